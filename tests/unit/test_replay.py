"""Traces, tiers and the optimum against slow ones; the command; floors on parts of real traces."""

from __future__ import annotations

import argparse
import gzip
import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay import FLOORS, gap_closed, load
from kvd import replay_cli
from kvd.policies import POLICIES, LeafLru, LifeTable, Request, make, make_admission
from kvd.replay import Tier, Tiers, replay, replay_optimum, replay_tiers
from kvd.trace import Entry, Trace, TraceError, read_trace
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.replay import Outcome

GOOD: Final = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}


def parent_of(block: int) -> int | None:
    """A tree in which block n has the children 3n to 3n + 2; 1 and 2 are roots."""
    return None if block < 3 else block // 3


def chain_to(block: int) -> tuple[int, ...]:
    """Return the blocks from the root to a block."""
    above = parent_of(block)
    return (*(chain_to(above) if above is not None else ()), block)


def trace_of(blocks: list[int]) -> Trace:
    """Make a trace of one-token blocks, a second apart: each request ends in a block."""
    chains = [chain_to(block) for block in blocks]
    return Trace(tuple(Entry(Request(10**9 * at, c, 5), len(c)) for at, c in enumerate(chains)), 1)


TRACES: Final = st.lists(st.integers(1, 40), max_size=40).map(trace_of)


def leading(chain: tuple[int, ...], kept: frozenset[int] | set[int]) -> int:
    """Count the leading run of a chain."""
    return next((at for at, block in enumerate(chain) if block not in kept), len(chain))


# --------------------------------------------------------------------------------- reading


def write(path: Path, *lines: object) -> str:
    """Write lines, JSON unless they are text."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


def test_a_trace_is_read(tmp_path: Path) -> None:
    """All fields arrive; a last block that is not full is said to be partial."""
    path = write(
        tmp_path / "t",
        GOOD,
        "",
        {"timestamp": 6.0, "input_length": 1024, "hash_ids": [1, 3]},
        {"timestamp": 6, "input_length": 1030, "output_length": None, "hash_ids": [1, 3]},
    )
    assert read_trace(path) == Trace(
        (
            Entry(Request(5_000_000, (1, 2), 7, partial=True), 1000),
            Entry(Request(6_000_000, (1, 3), None), 1024),
            Entry(Request(6_000_000, (1, 3), None), 1030),
        ),
        512,
    )


def test_a_trace_may_be_compressed(tmp_path: Path) -> None:
    """Gzip is known by its first bytes, whatever the file is called."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read_trace(str(path)).entries[0].input_tokens == 1000


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "no JSON (Expecting property name enclosed in double quotes at column 2); write"),
        ("[" * 100_000, "no JSON"),
        ("\ud800", "no JSON"),
        ("[1]", "[1] is no object; write one object a line"),
        ({**GOOD, "timestamp": -1}, '"timestamp" is -1; write a whole number from 0 on'),
        ({**GOOD, "timestamp": 1.5}, '"timestamp" is 1.5; write'),
        ({**GOOD, "timestamp": 10**30}, '"timestamp" is 1000000'),
        ({**GOOD, "timestamp": float("nan")}, '"timestamp" is NaN'),
        ({**GOOD, "input_length": "x" * 99}, f'"input_length" is "{"x" * 39}...; write'),
        ({**GOOD, "output_length": True}, '"output_length" is true; write'),
        ({"timestamp": 1, "hash_ids": []}, '"input_length" is missing; write'),
        ({**GOOD, "hash_ids": None}, 'write "hash_ids" as a list of whole numbers'),
        ({**GOOD, "hash_ids": [1, True]}, 'write "hash_ids" as a list of whole numbers'),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "1000 input tokens make 2 blocks of 512, but hash_ids"),
        ({**GOOD, "hash_ids": []}, "hash_ids has 0; give the trace's own --block-tokens"),
        ({**GOOD, "hash_ids": [1, 1]}, "block 1 twice in hash_ids; name each once"),
        ({**GOOD, "timestamp": 4}, "earlier than the line before; sort the trace by timestamp"),
        ({**GOOD, "hash_ids": [2, 1]}, "block 2 follows nothing here but block 1 before"),
    ],
)
def test_a_bad_line_is_named_with_its_mend(tmp_path: Path, line: object, error: str) -> None:
    """The error names file and line, what is wrong, and what to write."""
    path = tmp_path / "t"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(f"{json.dumps(GOOD)}\n{text}\n".encode(errors="surrogatepass"))
    with pytest.raises(TraceError) as raised:
        read_trace(str(path))
    assert str(raised.value).startswith(f"{path}:2: ")
    assert error in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 250


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    """A missing, empty, unreadable or broken file is an error of one line."""
    with pytest.raises(TraceError, match="No such file or directory; name a readable file"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(str(tmp_path))
    with pytest.raises(TraceError, match="no request in it"):
        read_trace(write(tmp_path / "t", "", ""))
    packed = gzip.compress(json.dumps(GOOD).encode() * 100)
    for broken in (packed[:-20], packed[:15] + b"x" * 9 + packed[24:], packed[:3]):
        (tmp_path / "t").write_bytes(broken)
        with pytest.raises(TraceError, match="broken gzip file"):
            read_trace(str(tmp_path / "t"))


def test_other_views_of_a_trace() -> None:
    """Partial blocks and lengths of answers can be left out; what was asked for stays."""
    trace = Trace((Entry(Request(0, (1, 2), 7, partial=True), 1000),), 512)
    assert trace.whole_blocks().entries[0] == Entry(Request(0, (1,), 7), 1000)
    assert trace.without_output().entries[0].request == Request(0, (1, 2), partial=True)
    assert replay(trace.whole_blocks(), make("lru"), 5).blocks == 2
    assert trace.head(0).entries == ()


# --------------------------------------------------------------------------------- replaying


@given(TRACES, st.integers(1, 12))
def test_lru_replays_like_a_list(trace: Trace, capacity: int) -> None:
    """Hits are those of a list in which a chain's tail is older than its head."""
    kept: list[int] = []
    hits = 0
    for entry in trace.entries:
        chain = tuple(entry.request.chain)
        hits += leading(chain, set(kept))
        kept = [block for block in kept if block not in chain] + list(reversed(chain))
        kept = kept[-capacity:]
    outcome = replay(trace, make("lru"), capacity)
    assert outcome.hits == outcome.tokens_saved == hits
    assert outcome.blocks == outcome.tokens == sum(len(e.request.chain) for e in trace.entries)


@given(TRACES, st.integers(1, 12), st.sampled_from(POLICIES))
def test_a_tier_keeps_its_rules(trace: Trace, capacity: int, name: str) -> None:
    """Capacity, parents and the policy's books are right after each request (R1)."""
    tier = Tier(make(name), capacity)
    for entry in trace.entries:
        tier.policy.touched(entry.request)
        tier.store(entry.request)
        gone = list(tier.shrink())
        assert not any(block in tier for block in gone)
        tier.check()
    best = replay_optimum(trace, capacity).hits
    assert replay(trace, make(name), capacity).hits <= best


def exhaustive(trace: Trace, capacity: int) -> int:
    """Try every choice of what to keep after each request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for entry in trace.entries:
        chain = tuple(entry.request.chain)
        found: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            now = hits + leading(chain, kept)
            for subset in subsets(sorted(kept | set(chain)), capacity):
                found[subset] = max(found.get(subset, 0), now)
        states = found
    return max(states.values(), default=0)


def subsets(blocks: list[int], size_max: int) -> list[frozenset[int]]:
    """Return all subsets up to a size."""
    made: list[frozenset[int]] = [frozenset()]
    for block in blocks:
        made += [one | {block} for one in made if len(one) < size_max]
    return made


@given(st.lists(st.integers(1, 12), max_size=7), st.integers(1, 3))
def test_the_optimum_is_the_best_of_all_choices(blocks: list[int], capacity: int) -> None:
    """Nothing that could be kept would have found more."""
    trace = trace_of(blocks)
    assert replay_optimum(trace, capacity).hits == exhaustive(trace, capacity)


@given(
    TRACES,
    st.integers(1, 8),
    st.integers(1, 12),
    st.sampled_from(
        [
            ("lru", "all"),
            ("lru", "second-touch"),
            ("s3fifo", "all"),
            ("lifetable", "all"),
            ("lifetable", "second-touch"),
            ("lifetable", "predicted"),
        ]
    ),
    st.sampled_from([0, 0.5, 0.9]),
)
def test_two_tiers_keep_their_rules(
    trace: Trace, upper: int, lower: int, names: tuple[str, str], threshold: float
) -> None:
    """No block is lost from under another, and every read was written first (R2)."""
    policy, admission = names
    below = Tier(make(policy), lower)
    decides = make_admission(admission, below.policy, remembered=9, threshold=threshold)
    tiers = Tiers(Tier(make(policy), upper), below, decides)
    ever: set[int] = set()
    hits = 0
    for entry in trace.entries:
        chain = tuple(entry.request.chain)
        here = tiers.upper.parents.keys() | below.parents.keys()
        ever |= below.parents.keys()
        reads = tiers.lower_hits
        found = tiers.use(entry.request)
        assert found == leading(chain, here)
        assert tiers.lower_hits - reads <= len(ever & set(chain))
        hits += found
        tiers.check()
    assert len(ever) <= tiers.written
    again = Tiers(Tier(make(policy), upper), other := Tier(make(policy), lower), decides)
    if admission == "all":
        outcome = replay_tiers(trace, again)
        assert outcome.total.hits == hits
        assert len(other.parents) <= outcome.written


def test_a_block_that_returns_is_not_written_again() -> None:
    """The lower copy stays while the block is used above, and is good when it leaves."""
    tiers = Tiers(
        Tier(LeafLru(), 1),
        Tier(LeafLru(), 9),
        make_admission("all", LeafLru(), remembered=1, threshold=0),
    )
    outcome = replay_tiers(trace_of([1, 2] * 5), tiers)
    assert (outcome.written, outcome.lower_hits) == (2, 8)
    assert outcome.write_amplification == 0.25
    assert outcome.total.block_hit_ratio == 0.8
    assert outcome.total.token_savings == 0.8


def test_a_parent_is_written_if_a_child_was() -> None:
    """What admission refuses is taken all the same when something written depends on it (R2)."""

    class Refuse:
        """Takes block 3 only."""

        def touched(self, request: Request[int]) -> None:
            """Learn nothing."""

        def admits(self, block: int) -> bool:
            """Say no to the parent."""
            return block == 3

    tiers = Tiers(Tier(LeafLru(), 1), Tier(LeafLru(), 9), Refuse())
    for entry in trace_of([3, 2, 2]).entries:
        tiers.use(entry.request)
    assert list(tiers.lower.parents) == [3, 1]
    tiers.check()


def test_a_full_lower_tier_takes_only_what_it_would_keep() -> None:
    """A block worth less than the one that would have to go for it is not written."""
    lower = Tier(LifeTable[int](), 1)
    tiers = Tiers(
        Tier(LeafLru(), 1), lower, make_admission("all", lower.policy, remembered=1, threshold=0)
    )
    for at, block in enumerate([1, 2, 1]):  # 1 goes down and is used there, then 2 leaves
        tiers.use(Request(100 * at * 10**9, chain_to(block)))
    assert (tiers.written, list(lower.parents)) == (1, [1])


# -------------------------------------------------------------------------------------- floors


def percent(outcome: Outcome) -> float:
    """Return block hits in per cent."""
    return 100 * outcome.block_hit_ratio


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacity"), [("conversation", 1000), ("synthetic", 1000), ("synthetic", 10_000)]
)
def test_the_default_policy_reaches_its_floors(name: str, capacity: int) -> None:
    """Three of the eight cells of the bench, about three seconds."""
    trace = load(name)
    hits, gap = FLOORS[name][capacity]
    reached = percent(replay(trace, make("lifetable"), capacity))
    lru = percent(replay(trace, make("lru"), capacity))
    assert reached >= hits
    assert 100 * gap_closed(lru, reached, percent(replay_optimum(trace, capacity))) >= gap


def test_on_part_of_a_trace_the_table_beats_lru() -> None:
    """Three thousand requests are enough to learn from, without knowing the output too."""
    trace = load("conversation").head(3000)
    lru = percent(replay(trace, make("lru"), 1000))
    for each in (trace, trace.whole_blocks().without_output()):
        policy = LifeTable[int]()
        assert percent(replay(each, policy, 1000)) > 1.2 * lru
        policy.check()


# ------------------------------------------------------------------------------------- command


def parse(*arguments: str) -> argparse.Namespace:
    """Parse as `kvd replay` does."""
    parser = argparse.ArgumentParser()
    replay_cli.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Write a trace of three requests, two of them alike."""
    return write(tmp_path / "t", GOOD, GOOD, {**GOOD, "hash_ids": [1, 3]})


def rows_of(text: str) -> list[dict[str, Any]]:
    """Read one JSON object a line."""
    return [json.loads(line) for line in text.splitlines()]


def test_json_has_a_line_for_each_result(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Capacities and policies are crossed; the fields are those promised."""
    options = parse(
        path,
        *("--capacity", "9", "--capacity", "1"),
        *("--policy", "lru", "--policy", "optimum"),
        "--json",
    )
    assert replay_cli.run(options) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [(row["capacity"], row["policy"]) for row in rows] == [
        (9, "lru"),
        (9, "optimum"),
        (1, "lru"),
        (1, "optimum"),
    ]
    assert rows[0] == {
        "policy": "lru",
        "capacity": 9,
        "block_hit_ratio": 0.5,
        "token_savings": 0.504,  # 1000 and 512 of 3000
    }
    assert replay_cli.run(parse(path, "--capacity", "9", "--whole-blocks", "--json")) == 0
    assert rows_of(capsys.readouterr().out)[0] == {
        "policy": "lifetable",
        "capacity": 9,
        "block_hit_ratio": round(2 / 6, 6),
        "token_savings": round(1024 / 3000, 6),
    }


def test_two_tiers_report_what_they_write(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Written, read and their ratio come with every admission."""
    row: dict[str, Any] = {}
    for admission in ("all", "second-touch", "predicted"):
        options = parse(
            path, "--capacity", "1", "--lower-capacity", "9", "--admission", admission, "--json"
        )
        assert replay_cli.run(options) == 0
        row = rows_of(capsys.readouterr().out)[0]
        assert row["admission"] == admission
        assert row["lower_capacity"] == 9
        assert row["write_amplification"] == round(row["written"] / max(1, row["read"]), 6)
    assert row["read"] > 0


def test_people_get_a_table(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a result under one line of names."""
    assert replay_cli.run(parse(path, "--capacity", "9", "--ignore-output")) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["policy", "capacity", "block", "hit", "ratio", "token", "savings"]
    assert line.split() == ["lifetable", "9", "50.0", "%", "50.4", "%"]
    assert replay_cli.run(parse(path, "--capacity", "1", "--lower-capacity", "9")) == 0
    assert "write amplification" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--capacity 1 --admission all", "add --lower-capacity BLOCKS"),
        ("--capacity 1 --threshold 0.1", "add --lower-capacity BLOCKS"),
        ("--capacity 1 --lower-capacity 1 --policy optimum", "leave --lower-capacity out"),
        (
            "--capacity 1 --lower-capacity 1 --policy lru --admission predicted",
            "use --policy lifetable",
        ),
        ("--capacity 1 --lower-capacity 1 --threshold 0.1", "add --admission predicted"),
    ],
)
def test_options_that_do_not_go_together_are_refused(path: str, arguments: str, error: str) -> None:
    """The error says what to change; nothing is replayed."""
    with pytest.raises(KvdError, match=error):
        replay_cli.run(parse(path, *arguments.split()))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "--capacity"),
        ("--capacity 0", "'0': write a whole number from 1 on"),
        ("--capacity x", "'x': write a whole number from 1 on"),
        ("--capacity 1 --block-tokens -3", "'-3': write a whole number"),
        ("--capacity 1 --threshold 1.5", "'1.5': write a chance from 0 to 1"),
        ("--capacity 1 --threshold nan", "'nan': write a chance from 0 to 1"),
        ("--capacity 1 --threshold x", "'x': write a chance from 0 to 1"),
        ("--capacity 1 --policy fifo", "invalid choice: 'fifo'"),
    ],
)
def test_a_wrong_option_ends_with_2(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual exit code for wrong options, and the mend on stderr."""
    with pytest.raises(SystemExit) as ended:
        parse("t", *arguments.split())
    assert ended.value.code == 2
    assert error in capsys.readouterr().err
