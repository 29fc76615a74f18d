"""`kvd plan`: bytes a token, load or compute, capacity: worked examples, and the command."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import cli, config, rates
from kvd.plan.capacity import Demand, Fleet, budget, traffic
from kvd.plan.loading import Prefill, Source, break_even, chunk_choices, needed_bytes_s
from kvd.plan.shape import PlanError, Shape, from_config, from_numbers

if TYPE_CHECKING:
    from pathlib import Path

KIB, GIB, TIB = 1 << 10, 1 << 30, 1 << 40
LLAMA = from_numbers(32, 8, 128, "bfloat16")
H200 = Prefill([(1024, 0.032), (8192, 0.253), (32_768, 1.392)])
NUMBERS = ["--layers", "32", "--kv-heads", "8", "--head-size", "128"]


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file and no rates of this host play a part."""
    monkeypatch.delenv("KVD_CONFIG", raising=False)
    monkeypatch.setattr(config, "SYSTEM_FILE", "/nowhere/kvd.toml")
    monkeypatch.setattr(config, "_default_state_dir", lambda: str(tmp_path / "state"))


# ------------------------------------------------------------------------------------------ shape


@pytest.mark.parametrize(
    ("fields", "token_bytes"),
    [
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "hidden_size": 4096, "torch_dtype": "bfloat16"}, 128 * KIB),
        ({"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
          "hidden_size": 576, "dtype": "bfloat16"}, 22.5 * KIB),
        ({"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
          "torch_dtype": "float32"}, 2 * 768 * 4 * 12),
        ({"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
          "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}, 576 * 2 * 61),
        ({"text_config": {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 256,
          "hidden_size": 2560}, "torch_dtype": "float16"}, 2 * 4 * 256 * 2 * 4),
    ],
    ids=["llama 8b", "smollm2", "no groups", "mla", "nested"],
)  # fmt: skip
def test_bytes_a_token_of_a_config(fields: dict[str, Any], token_bytes: float) -> None:
    """From the fields that Hugging Face writes, with their usual defaults."""
    assert from_config(fields).token_bytes == token_bytes


def test_a_window_bounds_what_is_loaded_not_what_is_stored() -> None:
    """Sliding layers keep every chunk, and load what their window reaches."""
    fields = {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 64,
        "hidden_size": 256,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention", "linear_attention"],
    }
    shape = from_config(fields)
    assert (shape.full_layers, shape.sliding_layers, shape.stateless_layers) == (1, 4, 1)
    layer = 2 * 4 * 64 * 2
    assert shape.token_bytes == 5 * layer
    assert shape.load_bytes(256) == 5 * 256 * layer
    assert shape.load_bytes(4096) == (4096 + 4 * 512) * layer
    pattern = fields | {"layer_types": None, "sliding_window_pattern": 3}
    assert from_config(pattern).full_layers == 2
    assert from_config(pattern | {"use_sliding_window": False}).sliding_layers == 0
    assert from_config(fields, kv_dtype="fp8").token_bytes == 5 * layer // 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "--layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}, "head_dim"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64,
          "torch_dtype": "int3"}, "int3"),
    ],
)  # fmt: skip
def test_an_odd_config_is_told(fields: dict[str, Any], says: str) -> None:
    """The error names the field, and what to give instead."""
    with pytest.raises(PlanError, match=says):
        from_config(fields)


@pytest.mark.parametrize("numbers", [(0, 8, 128), (32, -1, 128), (32, 8, 1 << 30)])
def test_odd_numbers_are_told(numbers: tuple[int, int, int]) -> None:
    """No model has them."""
    with pytest.raises(PlanError, match="makes no model"):
        from_numbers(*numbers, "bf16")


# ---------------------------------------------------------------------------------------- loading


def test_the_break_even_rates_of_a_measured_host() -> None:
    """An 8B model's prefill as measured on an H200 breaks even at 4.2, 4.2 and 3.1 GB/s."""
    found = [needed_bytes_s(LLAMA, H200, tokens) / 1e9 for tokens in (1024, 8192, 32_768)]
    assert found == pytest.approx([4.19, 4.24, 3.09], abs=0.01)
    for tokens, seconds in ((1024, 0.032), (8192, 0.253), (32_768, 1.392)):
        assert H200.seconds(tokens) == pytest.approx(seconds)
    assert H200.seconds(65_536) > 2 * 1.392


def test_memory_wins_by_an_order_and_a_slow_disk_never() -> None:
    """Pinned memory at 54 GB/s wins at once; a disk at 1.3 never; twice as small it still loses."""
    host = Source("host", 54e9)
    assert break_even(LLAMA, H200, host, step=256).tokens == 256
    speedup = H200.seconds(8192) / host.seconds(LLAMA.load_bytes(8192))
    assert 12 < speedup < 17
    assert break_even(LLAMA, H200, Source("nvme", 1.3e9), step=256) == (None, None)
    assert break_even(LLAMA, H200, Source("nvme", 1.3e9, 1e-3, 2.0), step=256).tokens is None
    assert break_even(LLAMA, H200, Source("nvme", 3e9, 1e-3, 2.0), step=256).tokens == 256


@given(
    rate=st.floats(1e8, 1e11),
    latency=st.floats(0, 0.1),
    prefill=st.floats(100, 1e6),
    ahead=st.integers(0, 20),
)
def test_break_even_is_where_the_lines_cross(
    rate: float, latency: float, prefill: float, ahead: int
) -> None:
    """With a constant prefill rate it is the latency over the difference of the slopes."""
    answer = break_even(
        LLAMA, Prefill.at_rate(prefill), Source("x", rate, latency), step=256, ahead=ahead
    )
    gain = 1 / prefill - (ahead + 1) * LLAMA.token_bytes / rate
    exact = latency / gain if gain > 0 else float("inf")
    if answer.tokens is None:
        assert exact > (1 << 20) * 0.98
    else:
        assert exact * 0.999 <= answer.tokens <= max(256, exact * 1.01 + 512)
        assert answer.until is None


@pytest.mark.parametrize("points", [[], [(10, 1.0), (5, 2.0)], [(5, 2.0), (10, 1.0)], [(0, 0.0)]])
def test_prefill_must_rise(points: list[tuple[int, float]]) -> None:
    """Points out of order make no line."""
    with pytest.raises(PlanError, match="both rise"):
        Prefill(points)


def test_chunk_sizes_trade_lost_tokens_for_reads() -> None:
    """Larger chunks lose more of a prompt's end; smaller ones cost records, reads and padding."""
    rows = chunk_choices(LLAMA, Source("nvme", 2e9, 1e-4, 2.0), 8192, (64, 256, 1024))
    assert [row.reads for row in rows] == [128, 32, 8]
    assert [row.lost_tokens for row in rows] == [32, 128, 512]
    assert [row.object_bytes for row in rows] == [tokens * 128 * KIB for tokens in (64, 256, 1024)]
    for name in ("reads", "hashes_bytes", "metadata_bytes", "padding_share"):
        values = [getattr(row, name) for row in rows]
        assert values == sorted(values, reverse=True), name


# --------------------------------------------------------------------------------------- capacity


def test_the_worked_example() -> None:
    """32,768 prefixes of 8K tokens, two copies: 64 TiB, not in 128 hosts at 80 %, just in 160."""
    assert LLAMA.token_bytes == 128 * KIB
    demand = Demand(32_768, 8192, copies=2)
    assert demand.payload_bytes(LLAMA) == 64 * TIB
    small = budget(LLAMA, demand, Fleet(128, 512 * GIB))
    assert (small.payload_fits, small.fits) == (False, False)
    just = budget(LLAMA, demand, Fleet(160, 512 * GIB, staging=0, quarantine=0, lost=0))
    assert just.payload_fits
    assert just.usable_bytes == 64 * TIB == just.payload_bytes
    assert not just.fits, "nothing is left for the metadata"
    assert just.hosts_for_payload == 160
    rest = budget(LLAMA, demand, Fleet(160, 512 * GIB))
    assert not rest.fits
    enough = budget(LLAMA, demand, Fleet(rest.hosts_needed, 512 * GIB))
    assert enough.fits
    assert enough.needed_bytes <= enough.usable_bytes
    assert not budget(LLAMA, demand, Fleet(rest.hosts_needed - 1, 512 * GIB)).fits


@given(
    demand=st.builds(Demand, st.integers(1, 1 << 20), st.integers(1, 1 << 17), st.integers(1, 4)),
    fleet=st.builds(
        Fleet,
        st.integers(1, 2000),
        st.integers(1 * GIB, 4 * TIB),
        st.floats(0.1, 1.0),
        st.floats(0, 0.3),
        st.floats(0, 0.3),
        st.integers(0, 4),
    ),
)
def test_what_is_needed_adds_up(demand: Demand, fleet: Fleet) -> None:
    """It fits exactly if the parts fit, and the hosts it says are needed are enough and least."""
    shape = from_numbers(2, 2, 64, "fp8")
    try:
        found = budget(shape, demand, fleet)
    except PlanError:
        return  # a million hosts
    slack = found.hosts_needed + 8
    if fleet.hosts > fleet.lost:
        assert found.fits == (found.needed_bytes <= found.usable_bytes) or (
            abs(found.needed_bytes - found.usable_bytes) <= slack
        )
    assert found.payload_bytes <= found.needed_bytes
    assert found.hosts_needed >= found.hosts_for_payload


def test_read_bandwidth_is_divided_over_the_hosts_that_are_left() -> None:
    """A thousand hits of 8K tokens a second are a TB/s; a lost host's part goes to the others."""
    found = traffic(LLAMA, Fleet(10, TIB, lost=2), 1000, 8192)
    assert found.all_bytes_s == 1000 * 8192 * 128 * KIB
    assert found.host_bytes_s == found.all_bytes_s / 10
    assert found.host_lost_bytes_s == found.all_bytes_s / 8


@pytest.mark.parametrize(
    "fleet", [Fleet(0, 1), Fleet(1, 0), Fleet(1, 1, 0), Fleet(1, 1, 1, 0.9, 0.2)]
)
def test_no_fleet_is_told(fleet: Fleet) -> None:
    """Nothing can be planned on it."""
    with pytest.raises(PlanError, match="a fleet has hosts"):
        budget(LLAMA, Demand(1, 1), fleet)


# ---------------------------------------------------------------------------------------- command


def test_the_command_on_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    """It says so in words, in JSON and in the exit code."""
    ask = ["plan", *NUMBERS, "--prefixes", "32768", "--copies", "2", "--host-bytes", "512GiB"]
    assert cli.main([*ask, "--hosts", "128"]) == 3
    out = capsys.readouterr().out
    assert "128 KiB a token" in out
    assert re.search(r"payload +64.0 TiB", out)
    assert "128 hosts of 512 GiB at 80 % do not hold it: 160 just hold the payload" in out
    assert cli.main([*ask, "--hosts", "160"]) == 3
    assert "160 hosts of 512 GiB at 80 % just hold the payload" in capsys.readouterr().out
    assert cli.main([*ask, "--hosts", "200", "--requests", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["capacity"]["fits"], found["capacity"]["payload_bytes"]) == (True, 64 * TIB)
    assert found["traffic"]["host_bytes_s"] == 10 * GIB / 200


def test_the_command_compares_loading(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a config.json, measured points and rates; the picture is a PNG."""
    model = tmp_path / "config.json"
    model.write_text(
        '{"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,'
        ' "num_key_value_heads": 8, "hidden_size": 4096}'
    )
    picture = tmp_path / "plan.png"
    ask = ["plan", "--model", str(model), "--prefill", "1024:32ms,8192:253ms,32768:1392ms"]
    ask += ["--host-rate", "54GB", "--nvme-rate", "1.3GB/s", "--plot", str(picture)]
    assert cli.main(ask) == 0
    out = capsys.readouterr().out
    assert "llama: 32 full layers; 128 KiB a token" in out
    assert "loading from nvme never wins" in out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert cli.main([*ask, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loads"][1]["load_ms"]["host"]["0"] == pytest.approx(19.9, abs=0.1)
    assert found["break_even"][0] == {"source": "host", "ahead": 0, "tokens": 256, "until": None}


def test_measured_rates_are_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What `kvd doctor --measure` stored stands in for what is not given; what is given wins."""
    rates.write(tmp_path / "state", rates.HostRates(1e9, 2e9, 3e9, 1e-3))
    assert cli.main(["plan", *NUMBERS, "--json", "--nvme-rate", "5GB"]) == 0
    host, nvme = json.loads(capsys.readouterr().out)["sources"]
    assert (host["bytes_s"], nvme["bytes_s"], nvme["latency_s"]) == (1e9, 5e9, 1e-3)


STORED = {"host_bytes_s": 1, "nvme_read_bytes_s": 2, "nvme_write_bytes_s": 3, "nvme_read_s": 0.5}


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ([], rates.NONE),
        ({**STORED, "version": 2}, rates.NONE),
        ({**STORED, "version": 1, "host_bytes_s": "fast"}, rates.NONE),
        ({**STORED, "version": 1, "nvme_read_s": -1}, rates.NONE),
        ({**STORED, "version": 1}, (1, 2, 3, 0.5)),
    ],
)
def test_odd_rates_are_none(stored: Any, found: Any, tmp_path: Path) -> None:
    """A file that makes no sense is as good as none."""
    (tmp_path / rates.NAME).write_text(json.dumps(stored))
    assert rates.read(tmp_path) == found
    (tmp_path / rates.NAME).write_text(json.dumps(stored)[:-1])
    assert rates.read(tmp_path) == rates.NONE


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--layers, --kv-heads and --head-size"),
        (["--model", "/nowhere/config.json"], "name a config.json"),
        ([*NUMBERS, "--prefixes", "5"], "needs --host-bytes"),
        ([*NUMBERS, "--plot", "/nowhere/x.png"], "/nowhere/x.png"),
        ([*NUMBERS, "--dtype", "int3"], "int3"),
    ],
)
def test_what_is_missing_is_told(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and code 2."""
    assert cli.main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [["--prefill", "0"], ["--prefill", "5:x"], ["--prefill", "5:2ms,4:3ms"], ["--share", "1.5"],
     ["--hosts", "0"], ["--nvme-rate", "fast"], ["--queue", "-1"], ["--lengths", "1,,2"]],
)  # fmt: skip
def test_a_wrong_option_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse's line, with the option's name."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *NUMBERS, *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_shape_has_a_size_of_its_own() -> None:
    """Its fields are what its bytes follow from."""
    assert Shape(1, 2, 8, 10, 2).token_bytes == 60
    assert Shape(1, 2, 8, 10, 2).load_bytes(100) == 100 * 20 + 2 * 8 * 20
