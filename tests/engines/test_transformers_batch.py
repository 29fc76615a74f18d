"""Batches, padding and static caches of Hugging Face transformers, through a real daemon."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel  # noqa: E402

from kvd_client import transformers as kvd_hf  # noqa: E402
from tests.engines.hf_kit import (  # noqa: E402
    CHUNK,
    MODELS,
    WHOLE,
    connect,
    greedy_rows,
    llama,
    padded,
    prompt,
    run_rows,
)

pytestmark = pytest.mark.timeout(180)

PAIRS = ["llama", "llama-bfloat16", "mistral-64", "mistral-65", "mistral-1000", "gemma3"]
"""Models whose batches are tried; a bfloat16 answer may leave another's, so no padding there."""


def three() -> list[Any]:
    """Three prompts of different lengths with a common beginning."""
    shared = prompt(8 * CHUNK)
    return [torch.cat([shared, prompt(n, seed=n)], dim=1) for n in (150, 61, 97)]


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "llama-bfloat16"])
def test_a_padded_batch_answers_as_it_does_without_kvd(daemon: Any, name: str) -> None:
    """Rows of three lengths, padded on the left: computed, loaded and plain answers are equal."""
    model = MODELS[name]()
    ids, mask = padded(three())
    plain = greedy_rows(model, ids, mask)
    with connect(daemon, model) as client:
        cold, prefix, stored = run_rows(client, model, ids, mask)
        assert prefix.cache is None
        assert stored.note == ""
        assert stored.tokens == sum(row.shape[1] // CHUNK * CHUNK for row in three())
        warm, prefix, again = run_rows(client, model, ids, mask)
        assert prefix.tokens > 0.7 * int(mask.sum())
        assert again.bytes == 0
        assert again.tokens == stored.tokens, again.note
    assert plain == cold == warm


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-65"])
def test_rows_are_shared_with_single_prompts(daemon: Any, name: str) -> None:
    """What a row of a padded batch stored, the prompt alone loads, and the other way round."""
    model = MODELS[name]()
    rows = three()
    ids, mask = padded(rows[:2])
    with connect(daemon, model) as client:
        plain = [greedy_rows(model, row) for row in rows]
        run_rows(client, model, ids, mask)
        answer, prefix, _ = run_rows(client, model, rows[1])
        assert prefix.tokens == (rows[1].shape[1] - 1) // CHUNK * CHUNK
        assert answer == plain[1]
        run_rows(client, model, rows[2])
        both, mask = padded(rows[1:])
        answer, prefix, _ = run_rows(client, model, both, mask)
        assert prefix.tokens > 0.7 * int(mask.sum())
        assert answer == [plain[1][0], plain[2][0]]


def test_a_batch_ends_where_its_shortest_row_ends(daemon: Any) -> None:
    """One row that kvd does not know leaves nothing to load but where it is still padding."""
    model = llama()
    rows = three()
    with connect(daemon, model) as client:
        run_rows(client, model, rows[0])
        ids, mask = padded([rows[0], prompt(40, seed=77)])
        plain = greedy_rows(model, ids, mask)
        answer, prefix, _ = run_rows(client, model, ids, mask)
    pad = ids.shape[1] - 40
    assert prefix.tokens == pad
    assert prefix.found == rows[0].shape[1] // CHUNK * CHUNK
    assert answer == plain


@pytest.mark.parametrize("name", PAIRS)
def test_a_batch_without_padding_is_loaded(daemon: Any, name: str) -> None:
    """Rows of one length share what they share, and each gets its own."""
    model = MODELS[name]()
    shared = prompt(160)
    ids = torch.cat([torch.cat([shared, prompt(140, seed=n)], dim=1) for n in (5, 6, 7)])
    plain = greedy_rows(model, ids)
    with connect(daemon, model) as client:
        cold, _, stored = run_rows(client, model, ids)
        chunk_bytes = sum(group.object_bytes for group in client.layout.groups)
        assert stored.bytes == (10 + 3 * 8) * chunk_bytes, "the shared chunks are stored once"
        warm, prefix, _ = run_rows(client, model, ids)
    assert prefix.tokens == 3 * WHOLE
    assert plain == cold == warm


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_rows_of_a_loaded_batch_may_change_places(daemon: Any, name: str) -> None:
    """A loaded batch whose rows were selected anew is stored right: no row takes another's gap."""
    model = MODELS[name]()
    ids, mask = padded(three())
    with connect(daemon, model) as client:
        run_rows(client, model, ids, mask)
        cache = kvd_hf.load_prefix(client, model, ids, attention_mask=mask).cache
    assert cache is not None
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        cache.batch_select_indices(order)
    plain = [greedy_rows(model, row) for row in three()]
    with connect(daemon, model, revision="empty") as client:
        greedy_rows(model, ids[order], mask[order], cache)
        kvd_hf.store_prefix(client, model, cache, ids[order], attention_mask=mask[order])
        for row, answer in zip(three(), plain, strict=True):
            assert run_rows(client, model, row)[0] == answer


@pytest.mark.parametrize("name", ["llama", "deepseek", "mistral-64", "mistral-1000", "gemma3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_static_cache_is_filled(daemon: Any, name: str, rows: int) -> None:
    """A static cache filled from kvd gives the tokens of one that was computed."""
    model = MODELS[name]()
    ids, mask = padded(three()[:rows])
    room = ids.shape[1] + 40
    plain = greedy_rows(model, ids, mask, kvd_hf.new_cache(model, room))
    with connect(daemon, model) as client:
        run_rows(client, model, ids, mask)
        loaded = kvd_hf.load_prefix(client, model, ids, attention_mask=mask, static_tokens=room)
        assert loaded.tokens > 0.7 * int(mask.sum())
        assert loaded.cache is not None
        assert loaded.cache.is_compileable
        copied = copy.deepcopy(loaded.cache)
        assert greedy_rows(model, ids, mask, loaded.cache) == plain
        layers: list[Any] = list(copied.layers)
        for layer in layers:
            layer.keys.zero_()
            layer.values.zero_()
        assert greedy_rows(model, ids, mask, copied) != plain, "the loaded bytes matter"
        with pytest.raises(ValueError, match="must hold the prompt"):
            kvd_hf.load_prefix(client, model, ids, static_tokens=20)


@pytest.mark.parametrize("name", ["llama", "deepseek", "mistral-64", "mistral-1000", "gemma3"])
def test_a_static_cache_is_stored(daemon: Any, name: str) -> None:
    """What a static cache still has of its layers is stored, and what it dropped is said."""
    model = MODELS[name]()
    ids = prompt()
    with connect(daemon, model) as client:
        cache = kvd_hf.new_cache(model, ids.shape[1] + 40)
        plain = greedy_rows(model, ids, None, cache)
        stored = kvd_hf.store_prefix(client, model, cache, ids)
        answer, prefix, _ = run_rows(client, model, ids)
    assert answer == plain
    if name in {"mistral-64", "gemma3"}:
        assert "dropped their past" in stored.note
        assert prefix.tokens == 0
    else:
        assert (stored.tokens, stored.note) == (WHOLE, "")
        assert prefix.tokens == WHOLE


def test_odd_batches_are_refused(daemon: Any) -> None:
    """Padding on the right or inside, a mask of another shape, another number of rows: said so."""
    model = llama()
    ids = prompt(64).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    inside = torch.ones_like(ids)
    inside[0, 5] = 0
    with connect(daemon, model) as client:
        for bad in (mask, inside, torch.zeros_like(ids)):
            with pytest.raises(kvd_hf.UnsupportedInput, match="padding_side = 'left'"):
                kvd_hf.load_prefix(client, model, ids, attention_mask=bad)
        with pytest.raises(kvd_hf.UnsupportedInput, match=r"shape \[2, 63\]"):
            kvd_hf.load_prefix(client, model, ids, attention_mask=mask[:, 1:])
        with pytest.raises(kvd_hf.UnsupportedInput, match="token ids"):
            kvd_hf.load_prefix(client, model, torch.zeros(1, 3, 4))
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        with pytest.raises(kvd_hf.UnsupportedCache, match="2 sequences, input_ids 1"):
            kvd_hf.store_prefix(client, model, cache, ids[:1])


def test_a_model_without_position_ids_takes_no_padding(daemon: Any) -> None:
    """Where positions cannot be told, padding would shift them: refused; without it, cached."""
    torch.manual_seed(4)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    plain_forward = model.forward

    def forward(input_ids: Any = None, past_key_values: Any = None, **rest: Any) -> Any:
        """As before, by other parameters."""
        return plain_forward(input_ids=input_ids, past_key_values=past_key_values, **rest)

    model.forward = forward
    ids, mask = padded([prompt(100), prompt(80, seed=8)])
    with connect(daemon, model) as client:
        with pytest.raises(kvd_hf.UnsupportedInput, match="takes no position ids"):
            kvd_hf.load_prefix(client, model, ids, attention_mask=mask)
        assert kvd_hf.load_prefix(client, model, ids[:1]).note == (
            "kvd holds no prefix of this prompt"
        )
