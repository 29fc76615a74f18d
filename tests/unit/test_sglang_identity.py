"""What an SGLang engine tells kvd it is, and what keeps kvd out of it. No SGLang needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvd_client.sglang.identity import (
    Model,
    Shape,
    chunk_hash,
    chunk_hashes,
    describe,
    read_model,
)
from kvd_client.sglang.options import Options, read_options
from kvd_client.sglang.pool import shape_of

if TYPE_CHECKING:
    from pathlib import Path

V1 = {"interface_v1": 1}
SHAPE = Shape("kv", (4096, 4096), 16, "bfloat16", "page_first", "Pool", 4, 4, 64)
MODEL = Model("toy", "digest", "auto", "facts")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of files are remembered under the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder(tmp_path: Path, name: str = "m", weights: bytes = b"w", config: str = "{}") -> Path:
    """A model's folder."""
    made = tmp_path / name
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(config)
    (made / "model.safetensors").write_bytes(weights)
    return made


def server(place: Path, **changes: Any) -> Any:
    """SGLang's arguments, as far as they matter."""
    usual = {"model_path": str(place), "load_format": "auto", "dtype": "auto"}
    return SimpleNamespace(**{**usual, **changes})


def ranks(**changes: Any) -> Any:
    """SGLang's storage configuration."""
    usual = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, '"interface_v1": 1'),
        ({**V1, "tp_lcm_size": 8}, "leave tp_lcm_size out"),
        ({**V1, "sokcet": "x"}, "no option 'sokcet' for kvd; there are: socket"),
        ({**V1, "wait_s": 0}, "'wait_s' must be more than 0 and at most 60, not 0"),
        ({**V1, "load_wait_s": True}, "'load_wait_s' must be more than 0"),
        ({**V1, "weights": 7}, "'weights' must be a digest"),
        ({**V1, "lossy": 1}, "'lossy' must be true or false"),
    ],
)
def test_a_bad_option_is_named(extra: dict[str, Any], words: str) -> None:
    """An option that is unknown, wrong or missing ends the start with a line that names it."""
    with pytest.raises(ValueError, match=words):
        read_options(extra)


def test_sglang_s_own_options_pass() -> None:
    """Keys that SGLang reads for itself are not kvd's to refuse; kvd's own are taken."""
    extra = {**V1, "allocator": "shm", "backend_name": "kvd", "prefetch_threshold": 9, "wait_s": 1}
    assert read_options(extra) == Options(wait_s=1)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ("{}", {"load_format": "dummy"}, "load_format 'dummy' .*\"weights\""),
        ("{}", {"enable_lora": True}, 'LoRA adapters .*"lora": true'),
        ("{}", {"lora_paths": ["a"]}, "LoRA"),
        ('{"vision_config": {}}', {}, 'images or sound.*"media": true'),
        ("{}", {"model_path": "no/such/model"}, 'not on this host.*"weights"'),
        (
            "{}",
            {"speculative_draft_model_path": "no/such"},
            'no/such are not on this host.*"draft_weights"',
        ),
    ],
)
def test_what_is_not_known_keeps_kvd_out(
    tmp_path: Path, config: str, arguments: dict[str, Any], words: str
) -> None:
    """A model that kvd cannot tell from others is refused, with what to set."""
    place = folder(tmp_path, config=config)
    with pytest.raises(ValueError, match=words):
        read_model("m", server(place, **arguments), Options(), "1")


def test_a_model_is_its_weights_and_settings(tmp_path: Path) -> None:
    """Equal content in another folder is the same model; each change makes another."""
    first = read_model("served", server(folder(tmp_path)), Options(), "1")
    again = read_model("other name", server(folder(tmp_path)), Options(), "1")
    assert first == again, "a served name plays no part"
    changed = {first.weights, first.facts}
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    for number, (weights, config, arguments, version) in enumerate(
        [
            (b"x", "{}", {}, "1"),
            (b"w", '{"rope_theta": 1}', {}, "1"),
            (b"w", "{}", {"kv_cache_dtype": "fp8_e4m3"}, "1"),
            (b"w", "{}", {"json_model_override_args": '{"rope_scaling": 2}'}, "1"),
            (b"w", "{}", {"attention_backend": "triton"}, "1"),
            (b"w", "{}", {"quantization_param_path": str(scales)}, "1"),
            (b"w", "{}", {}, "2"),
        ]
    ):
        place = folder(tmp_path, f"m{number}", weights, config)
        other = read_model("served", server(place, **arguments), Options(), version)
        new = {other.weights, other.facts} - changed
        assert new, (weights, config, arguments, version)
        changed |= new


def test_without_a_server_kvd_stays_out() -> None:
    """A name, or weights alone, do not tell in what type and by what back end it computes."""
    with pytest.raises(ValueError, match="tells no server arguments, so what toy computes"):
        read_model("toy", None, Options(weights="w"), "1")


def test_each_difference_of_a_pool_or_rank_parts() -> None:
    """Shape, layout, dtype, pool, ranks, salt, lossiness and life: each gives another space."""
    seen = set()
    shapes = [
        SHAPE,
        SHAPE._replace(name="swa"),
        SHAPE._replace(spans=(2048,) * 4),
        SHAPE._replace(page_tokens=32),
        SHAPE._replace(dtype="float16"),
        SHAPE._replace(order="page_head"),
        SHAPE._replace(detail="Other"),
        SHAPE._replace(layers=2),
        SHAPE._replace(heads=2),
    ]
    configs = [
        ranks(),
        ranks(tp_size=2),
        ranks(pp_size=2),
        ranks(pp_size=2, pp_rank=1),
        ranks(attn_cp_size=2, attn_cp_rank=1),
        ranks(tp_size=128, tp_rank=3),
        ranks(dcp_size=2, dcp_rank=1, tp_size=2, tp_rank=1, is_mla_model=True),
    ]
    for shape in shapes:
        for config in configs:
            for salt in (b"", b"s" * 16):
                for life in ("", "cleared"):
                    made = describe(MODEL, shape, config, salt, options=Options(), life=life)
                    seen.add((made.namespace.id, made.layout.id))
    assert len(seen) == len(shapes) * len(configs) * 4
    made = describe(MODEL, SHAPE, ranks(tp_size=2, tp_rank=1), b"", options=Options())
    assert (made.layout.tp, made.rank) == (2, 1), "heads are cut over ranks: kvd folds them"
    pair = [
        describe(
            MODEL, SHAPE, ranks(tp_size=2, tp_rank=n, is_mla_model=True), b"", options=Options()
        )
        for n in (0, 1)
    ]
    assert pair[0] == pair[1], "every rank holds the same"


def test_fp8_needs_an_order_that_kvd_knows() -> None:
    """A lossy namespace is refused where FP8 could not be read back head by head."""
    lossy = Options(lossy=True)
    with pytest.raises(ValueError, match="use --hicache-mem-layout layer_first"):
        describe(MODEL, SHAPE, ranks(), b"", options=lossy)
    made = describe(MODEL, SHAPE._replace(order="layer_first"), ranks(), b"", options=lossy)
    assert made.namespace.lossy


def test_keys_are_taken_as_they_are() -> None:
    """A hexadecimal SHA-256 is the hash; what is none is digested, and never meets one."""
    assert chunk_hash("ab" * 32) == bytes.fromhex("ab" * 32)
    odd = ["ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "_0", ""]
    assert len({*chunk_hashes(odd), chunk_hash("ab" * 32)}) == len(odd) + 1
    assert chunk_hashes(None) == []


def _refuse(error: Exception) -> Any:
    """Make a pool's method that fails."""

    def refuse(_: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": None}, "has no dtype"),
        ({"layout": ""}, "has no layout"),
        ({"dtype": None, "layout": None}, "has no dtype and no layout"),
        ({"get_page_buffer_meta": _refuse(AssertionError())}, "lie: AssertionError"),
        ({"get_page_buffer_meta": _refuse(RuntimeError("odd"))}, "lie: RuntimeError odd"),
        ({"get_page_buffer_meta": None}, "lie: TypeError"),
        ({"get_page_buffer_meta": lambda _: None}, "no bytes of its own"),
    ],
)
def test_a_pool_that_does_not_say_what_it_is_ends_the_start(
    change: dict[str, Any], words: str
) -> None:
    """Unknown is refused by a line that names the pool: two of them would be taken for one."""
    pytest.importorskip("torch")
    known = {"get_page_buffer_meta": lambda _: ([0], [64]), "dtype": "bfloat16", "layout": "x"}
    assert shape_of(SimpleNamespace(**known), "kv").order == "x"
    with pytest.raises(ValueError, match=f"'kv'.*{words}"):
        shape_of(SimpleNamespace(**(known | change)), "kv")
