"""Lines of keys in a TOML text."""

from __future__ import annotations

import tomllib

from hypothesis import given, reject
from hypothesis import strategies as st

from kvd.toml_lines import key_lines

_NAMES = st.sampled_from(["a", "b-c", '"d.e"', "'f g'", '"h\\"#]"'])
_SCALARS = st.sampled_from(
    [
        "1",
        "true",
        '"x # y = 1"',
        "'z = ]'",
        '"""\nq = 1\n[a]\n"""',
        "'''\n\"'\n'''",
        '"""a""""',
        "1.5",
    ]
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3).map(
        lambda items: "[ # a = 1\n" + "".join(f"  {item}, # b = ]\n" for item in items) + "]"
    ),
    max_leaves=4,
)


@given(st.data())
def test_lines_agree_with_tomllib(data: st.DataObject) -> None:
    """Every key tomllib finds has a line, no other has, and it is the line it was written on."""
    text, expected, used = "", {}, set()
    tables = data.draw(st.lists(st.lists(_NAMES, min_size=1, max_size=2), max_size=3))
    for number, table in enumerate([[], *tables]):
        if tuple(table) in used or (number and not table):
            continue
        used.add(tuple(table))
        if table:
            text += data.draw(st.sampled_from(["", "\n", "# [x]\n"]))
            header = f" [ {' . '.join(table)} ] # c = 2\n"
            expected[tuple(_bare(name) for name in table)] = text.count("\n") + 1
            text += header
        for name in data.draw(st.lists(_NAMES, unique=True, max_size=3)):
            text += data.draw(st.sampled_from(["", "\n\n", "# a = 1\n"]))
            path = tuple(_bare(part) for part in (*table, name))
            expected[path] = text.count("\n") + 1
            text += f"{name} = {data.draw(_VALUES)} # d = 3\n"
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # a table and a key of the same name
        reject()
    lines = key_lines(text)
    assert set(lines) == set(_paths(values))
    assert {path: lines[path] for path in expected} == {
        path: min(line for other, line in expected.items() if other[: len(path)] == path)
        for path in expected
    }


def test_inline_tables_and_dotted_keys() -> None:
    """Keys inside inline tables, after dots and beside odd texts have their own lines."""
    text = """
a.b = { c = [1, { d = 2 }], e = \'}\', "f.g" = "]" }
h = [ { i = 1 },
      { j = 2 } ]
k = { l = \"\"\"x\"\"\"\", m = "}" }
[[n]]
o = 1
[[n]]
p = 1
"""
    tomllib.loads(text)
    assert {".".join(path): line for path, line in key_lines(text).items()} == {
        **dict.fromkeys(["a", "a.b", "a.b.c", "a.b.c.d", "a.b.e", "a.b.f.g"], 2),
        **dict.fromkeys(["h", "h.i"], 3),
        "h.j": 4,
        **dict.fromkeys(["k", "k.l", "k.m"], 5),
        "n": 6,
        "n.o": 7,
        "n.p": 9,
    }


def _bare(name: str) -> str:
    ((bare, _),) = tomllib.loads(f"{name} = 0").items()
    return bare


def _paths(values: dict[str, object], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in values.items():
        found.append((*above, name))
        if isinstance(value, dict):
            found += _paths(value, (*above, name))
    return found
