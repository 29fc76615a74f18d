"""docs/configuration.md is what the code says: each key, what it takes, its default, its meaning.

    python -m tests.docs.test_configuration_page

writes the marked part anew. What a key takes is found by giving it something wrong and reading the
error; its meaning is the docstring of the dataclass that it ends up in; its default is what stands
in systemd/kvd.toml, which another test holds against the code.
"""

from __future__ import annotations

import inspect
import re
import tempfile
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvd import config
from kvd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "configuration.md"
MARKS: Final = ("<!-- configuration -->\n", "<!-- end -->")
TENANTS: Final = "tenants.NAME"
ATTRIBUTES: Final = {"bytes": "size_bytes"}
"""A key to the attribute that it becomes, where that has another name."""


def usual(folder: str) -> config.Config:
    """Return the configuration of an empty file."""
    return config.load(
        "/dev/null", {"socket": f"{folder}/s", "state_dir": folder, "host.bytes": "1MiB"}
    )


def holders(loaded: config.Config) -> dict[str, type]:
    """The dataclass of each table."""
    found: dict[str, type] = {"": config.Config, TENANTS: config.TenantConfig}
    for field in fields(loaded):
        value = getattr(loaded, field.name)
        if is_dataclass(value):
            found[field.name] = type(value)
    return found


def meanings(holder: type) -> dict[str, str]:
    """What a dataclass' docstring says of its attributes."""
    said = inspect.cleandoc(holder.__doc__ or "").partition("Attributes:\n")[2]
    return {
        name: " ".join(text.split())
        for name, text in re.findall(r"^    (\w+): ((?:.+\n?(?:     +.+\n?)*))", said, re.MULTILINE)
    }


def takes(table: str, key: str, folder: str) -> str:
    """Return what a key takes, as the error says that it gives for something else."""
    path = Path(folder) / "kvd.toml"
    head = f"[{table.replace('NAME', 'x')}]\n" if table else ""
    users = "uids = [1]\n" if table == TENANTS and key != "uids" else ""
    path.write_text(f"{head}{users}{key} = {{wrong = 1}}\n")
    with pytest.raises(ConfigError) as error:
        config.load(str(path), {"host.bytes": "1MiB"} if (table, key) != ("host", "bytes") else {})
    text = str(error.value)
    assert f"{key} = " in text, text
    return text.rpartition("}: ")[2].removeprefix("write ").removesuffix(", without quotes")


def default(values: dict[str, Any], table: str, key: str) -> str:
    """Return what the shipped file has for a key."""
    here = values.get(table, {}) if table else values
    if not isinstance(here, dict) or key not in here:
        return ""
    value = here[key]
    if key == "socket_mode":
        return f"`0o{value:o}`"
    return (
        f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value!r}`".replace("'", '"')
    )


def sections() -> Iterator[str]:
    """Write the tables."""
    shipped = tomllib.loads((ROOT / "systemd/kvd.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        known = holders(usual(folder))
        for table, keys in config._KNOWN.items():
            own = [key for key in keys if table or key not in {*config._KNOWN, "tenants"}]
            means = {key: text for each in known.values() for key, text in meanings(each).items()}
            means |= meanings(known[table])  # a table may end up in two dataclasses
            yield f"### {'At the top' if not table else f'[{table}]'}\n\n"
            yield "| key | default | takes | |\n| --- | --- | --- | --- |\n"
            for key in own:
                text = means[ATTRIBUTES.get(key, key)]
                shown = default(shipped, table, key)
                yield f"| `{key}` | {shown} | {takes(table, key, folder)} | {text} |\n"
            yield "\n"


def test_every_key_is_in_the_reference() -> None:
    """The page is what the code says; the module says how to renew it."""
    assert "".join(sections()) in PAGE.read_text(encoding="utf-8")


def test_every_key_has_a_default_in_the_shipped_file() -> None:
    """systemd/kvd.toml shows each key there is, tenants apart, and so its default."""
    shipped = tomllib.loads((ROOT / "systemd/kvd.toml").read_text(encoding="utf-8"))
    missing = [
        f"[{table}] {key}"
        for table, keys in config._KNOWN.items()
        if table != TENANTS
        for key in keys
        if (table or key not in {*config._KNOWN, "tenants"})
        and key not in (shipped.get(table, {}) if table else shipped)
    ]
    assert not missing


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest[rest.index(MARKS[1]) :]
    PAGE.write_text(before + MARKS[0] + "".join(sections()) + after, encoding="utf-8")
