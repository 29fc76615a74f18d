"""Hugging Face transformers and the tier below: lossy copies, waits, what is worth loading."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd import statpage  # noqa: E402
from kvd_client import transformers as kvd_hf  # noqa: E402
from kvd_client.paths import stat_page_name  # noqa: E402
from tests.engines.hf_kit import (  # noqa: E402
    CHUNK,
    MODELS,
    WAIT_S,
    WHOLE,
    connect,
    greedy,
    llama,
    load,
    prompt,
    run,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def cold_daemon(make_daemon: Any, tmp_path: Any) -> Any:
    """A daemon with an NVMe tier, in the default form: FP8 where the namespace allows it."""
    config = tmp_path / "kvd.toml"
    # A busy machine's disk may be slow, and the daemon may have to compile its codec.
    config.write_text(f"[limits]\npromote_s = {WAIT_S}\n[nvme]\nslow_s = 30\n")
    daemon = make_daemon(arguments=["--nvme-bytes", "1GiB", "--config", str(config)])
    daemon.start()
    return daemon


def restart(daemon: Any) -> None:
    """Stop the daemon and start it again: what it held is on NVMe only."""
    assert daemon.stop(60) == 0
    daemon.start()


def space(daemon: Any) -> dict[str, Any]:
    """What the statistics say of the only space, once they are new."""
    called_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        page = statpage.read(stat_page_name(daemon.socket))
        if asked_s - page.age_s > called_s:
            (found,) = page.stats["spaces"]
            return dict(found)
        assert asked_s < called_s + 30, "the daemon does not write its page"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["gemma3", "deepseek"])
def test_an_exact_copy_comes_back_from_nvme(cold_daemon: Any, name: str) -> None:
    """After a restart an exact namespace gives the same tokens, whatever form the disk has."""
    ids = prompt()
    model = MODELS[name]()
    with connect(cold_daemon, model) as client:
        right, _, _ = run(client, model, ids)
    restart(cold_daemon)
    with connect(cold_daemon, model) as client:
        answer, prefix, stored = run(client, model, ids)
    assert (prefix.tokens, prefix.found, prefix.lossy, prefix.note) == (WHOLE, WHOLE, False, "")
    assert answer == right
    assert (stored.tokens, stored.bytes, stored.lossy) == (WHOLE, 0, False)


def test_a_lossy_copy_is_told_and_goes_nowhere_else(cold_daemon: Any) -> None:
    """FP8 from NVMe is marked; no other namespace takes it, nor what was computed after it."""
    ids = prompt()
    model = llama()
    with connect(cold_daemon, model, lossy=True) as client:
        run(client, model, ids)
        warm = load(client, model, ids)
        assert (warm.tokens, warm.lossy) == (WHOLE, False), "in memory it is what was stored"
        exact = greedy(model, ids, warm.cache)
    restart(cold_daemon)
    longer = torch.cat([ids, prompt(40, seed=5)], dim=1)
    with connect(cold_daemon, model, lossy=True) as client:
        prefix = load(client, model, longer)
        assert (prefix.tokens, prefix.lossy, prefix.note) == (WHOLE, True, "")
        greedy(model, longer, prefix.cache)
    assert prefix.cache is not None
    with connect(cold_daemon, model) as client:
        refused = kvd_hf.store_prefix(client, model, copy.deepcopy(prefix.cache), ids)
        assert (refused.tokens, refused.bytes, refused.lossy) == (0, 0, True)
        assert "another namespace" in refused.note
        assert run(client, model, ids)[0] == exact


def test_what_follows_a_lossy_copy_is_lossy_for_good(cold_daemon: Any) -> None:
    """A tail computed after FP8 stays marked when an exact copy of the prefix has come back."""
    ids = prompt()
    model = llama()
    with connect(cold_daemon, model, lossy=True) as client:
        run(client, model, ids)
    restart(cold_daemon)
    longer = torch.cat([ids, prompt(40, seed=5)], dim=1)
    with connect(cold_daemon, model, lossy=True) as client:
        prefix = load(client, model, longer)
    assert prefix.lossy
    assert prefix.cache is not None
    greedy(model, longer, prefix.cache)
    restart(cold_daemon)  # what was brought up is on NVMe only
    with connect(cold_daemon, model, lossy=True) as client:
        cache = kvd_hf.new_cache(model)
        greedy(model, ids, cache)
        kvd_hf.store_prefix(client, model, cache, ids)
        stored = kvd_hf.store_prefix(client, model, prefix.cache, longer)
        assert (stored.tokens, stored.lossy) == (340 // CHUNK * CHUNK, True)
        alone = load(client, model, ids)
        assert (alone.tokens, alone.lossy) == (WHOLE, False), "this was computed"
        whole = load(client, model, longer)
        assert (whole.tokens, whole.lossy) == (stored.tokens, True)
    restart(cold_daemon)
    with connect(cold_daemon, model, lossy=True) as client:
        assert load(client, model, longer).lossy


def test_what_is_not_worth_loading_is_not_loaded(cold_daemon: Any) -> None:
    """An engine tells kvd how fast it computes; kvd then offers loads only where that is slower."""
    ids, other = prompt(), prompt(seed=11)
    model = llama()
    with connect(cold_daemon, model) as client:
        for each in (ids, other):
            run(client, model, each)
    restart(cold_daemon)
    with connect(cold_daemon, model) as client:
        assert load(client, model, other).tokens == WHOLE, "now the disk is known"
        cache = kvd_hf.new_cache(model)
        fresh = prompt(seed=12)
        greedy(model, fresh, cache)
        kvd_hf.store_prefix(client, model, cache, fresh, seconds=1e-4)
        prefix = load(client, model, ids)
        assert (prefix.cache, prefix.tokens, prefix.found) == (None, 0, WHOLE)
        assert "computing this prompt is faster" in prefix.note
        answer, _, stored = run(client, model, ids)
        assert answer == greedy(model, ids)
        assert stored.tokens == WHOLE


def test_only_computed_tokens_are_reported(cold_daemon: Any) -> None:
    """Loaded tokens took the engine no time, and a few tokens tell of no rate."""
    ids = prompt()
    model = llama()
    with connect(cold_daemon, model) as client:
        cache = kvd_hf.new_cache(model)
        greedy(model, ids, cache)
        kvd_hf.store_prefix(client, model, cache, ids)
        assert space(cold_daemon)["prefill_tokens_s"] == 0
        kvd_hf.store_prefix(client, model, cache, ids, seconds=3.0)
        assert space(cold_daemon)["prefill_tokens_s"] == 100
        loaded = load(client, model, ids)
        assert loaded.cache is not None
        greedy(model, ids, loaded.cache)
        kvd_hf.store_prefix(client, model, loaded.cache, ids, seconds=1.0)
        assert space(cold_daemon)["prefill_tokens_s"] == 100, "12 tokens were computed"


def test_a_wait_that_is_too_short_is_a_miss(cold_daemon: Any) -> None:
    """What does not come up from NVMe in time is a miss that says so, and is there later."""
    ids = prompt()
    model = llama()
    with connect(cold_daemon, model) as client:
        run(client, model, ids)
    restart(cold_daemon)
    with connect(cold_daemon, model) as client:
        prefix = load(client, model, ids, wait_s=0.0)
        assert (prefix.cache, prefix.found) == (None, WHOLE)
        assert "(not within 0 s)" in prefix.note
        deadline = time.monotonic() + 30
        while not (prefix := load(client, model, ids)).tokens:
            assert time.monotonic() < deadline, prefix.note
            time.sleep(0.05)
        assert prefix.tokens == WHOLE


def test_a_daemon_without_room_for_a_session_is_a_miss(make_daemon: Any, tmp_path: Any) -> None:
    """A refusal that may pass does not stop an engine: it misses, and is let in later."""
    config = tmp_path / "kvd.toml"
    config.write_text("[limits]\nsessions = 1\n")
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon.start()
    ids = prompt()
    model = llama()
    with connect(daemon, model) as first, connect(daemon, model) as second:
        assert first.connected
        assert not second.connected
        _, prefix, stored = run(second, model, ids)
        assert (prefix.note, stored.note) == ("kvd does not answer", "kvd does not answer")
        first.close()
        deadline = time.monotonic() + 30
        while not run(second, model, ids)[2].tokens:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert load(second, model, ids).tokens == WHOLE
