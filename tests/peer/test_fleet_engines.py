"""Two engines on two hosts: what one computed the other loads, and answers the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench._fleet import wait_for
from kvd_client import transformers as kvd_hf
from tests.engines.hf_kit import MODELS, WHOLE, connect, greedy, prompt, run

if TYPE_CHECKING:
    from bench._fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_engine_on_another_host_gives_the_same_tokens(fleet: Fleet, name: str) -> None:
    """Host B's engine loads what host A's has computed, and its greedy output is the same."""
    ids = prompt()
    one, two = MODELS[name](), MODELS[name]()
    a, b = fleet.hosts["a"], fleet.hosts["b"]
    before = int(b.peer("a")["chunks"])
    options: dict[str, Any] = {}
    with connect(a, one, **options) as client:
        plain, _, stored = run(client, one, ids)
        assert stored.tokens == WHOLE
    with connect(b, two, **options) as client:
        wait_for(lambda: kvd_hf.load_prefix(client, two, ids).tokens == WHOLE, "elsewhere")
        again, prefix, _ = run(client, two, ids)
    assert prefix.tokens == WHOLE
    assert greedy(two, ids) == plain == again
    wait_for(lambda: int(b.peer("a")["chunks"]) > before, "fetched from A")
