"""Hugging Face transformers through a real daemon: the same greedy tokens, and no wrong hit.

"Engines" are models built twice from one seed, each with a client of its own, so that nothing but
the daemon carries KV from one to the other.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache  # noqa: E402

from kvd_client import transformers as kvd_hf  # noqa: E402
from kvd_client.hf_model import weights_mark  # noqa: E402
from tests.engines.hf_kit import (  # noqa: E402
    CHUNK,
    MODELS,
    PROMPT,
    SHAPE,
    WHOLE,
    connect,
    greedy,
    llama,
    prompt,
    run,
)

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_engine_gives_the_same_tokens(daemon: Any, name: str) -> None:
    """An engine that loads a prefix answers exactly as one that computed it."""
    ids = prompt()
    one, two = MODELS[name](), MODELS[name]()
    plain = greedy(one, ids)
    with connect(daemon, one) as client:
        cold, prefix, stored = run(client, one, ids)
    assert prefix.cache is None
    assert (stored.tokens, stored.note) == (WHOLE, "")
    assert stored.bytes > 0
    with connect(daemon, two) as client:
        warm, prefix, again = run(client, two, ids)
    assert (prefix.tokens, prefix.note) == (WHOLE, "")
    assert plain == cold == warm
    assert again.bytes == 0, "what is there already was written again"
    assert again.tokens == WHOLE


@pytest.mark.parametrize("name", MODELS)
def test_the_loaded_bytes_matter(daemon: Any, name: str) -> None:
    """With loaded KV zeroed the answer differs, so the equality above is no accident."""
    ids = prompt()
    model = MODELS[name]()
    with connect(daemon, model) as client:
        right, _, _ = run(client, model, ids)
        cache = kvd_hf.load_prefix(client, model, ids).cache
    assert cache is not None
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        layer.keys.zero_()
        layer.values.zero_()
    assert greedy(model, ids, cache) != right


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-64"])
def test_a_conversation_grows(daemon: Any, name: str) -> None:
    """A loaded cache can be stored again after more tokens, and the longer prefix is found."""
    model = MODELS[name]()
    ids = prompt(200)
    with connect(daemon, model) as client:
        for turn in range(4):
            plain = greedy(model, ids)
            answer, prefix, stored = run(client, model, ids)
            assert answer == plain
            assert (prefix.tokens > 0) == (turn > 0)
            assert stored.tokens == ids.shape[1] // CHUNK * CHUNK, stored.note
            ids = torch.cat([ids, torch.tensor([answer]), prompt(60, seed=turn)], dim=1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_shared_beginning_is_shared(daemon: Any, name: str) -> None:
    """Another prompt with the same first tokens loads those and no more."""
    model = MODELS[name]()
    shared = prompt(160)
    first = torch.cat([shared, prompt(100, seed=8)], dim=1)
    second = torch.cat([shared, prompt(90, seed=9)], dim=1)
    with connect(daemon, model) as client:
        run(client, model, first)
        plain = greedy(model, second)
        answer, prefix, _ = run(client, model, second)
    assert prefix.tokens == 160
    assert answer == plain


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_last_token_is_never_loaded(daemon: Any, name: str) -> None:
    """A prompt that ends with a chunk leaves that chunk to compute: else the answer is wrong."""
    model = MODELS[name]()
    ids = prompt(10 * CHUNK)
    with connect(daemon, model) as client:
        cold, _, stored = run(client, model, ids)
        warm, prefix, _ = run(client, model, ids)
    assert stored.tokens == 10 * CHUNK
    assert prefix.tokens == 9 * CHUNK
    assert cold == warm


def test_other_models_never_hit(daemon: Any) -> None:
    """Weights, rotary scaling, dtype, revision, adapter, salt, attention: each parts the caches."""
    ids = prompt()
    yarn = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    touched = llama()
    with torch.no_grad():
        touched.model.embed_tokens.weight[499, 0] += 1e-3  # one number, in a row nobody asks for
    model = llama()
    with connect(daemon, model, salt=b"s" * 16) as client:
        run(client, model, ids)
        assert kvd_hf.load_prefix(client, model, ids).tokens == WHOLE
    others: list[tuple[Any, dict[str, Any]]] = [
        (llama(seed=7), {}),
        (touched, {}),
        (llama(rope_parameters=yarn), {}),
        (llama(dtype=torch.bfloat16), {}),
        (llama(attn_implementation="eager"), {}),
        (llama(rms_norm_eps=1e-5), {}),
        (llama(), {"revision": "2"}),
        (llama(), {"adapter": "other"}),
        (llama(), {"salt": b"t" * 16}),
        (llama(), {"salt": b""}),
    ]
    for other, options in others:
        with connect(daemon, other, **{"salt": b"s" * 16, **options}) as client:
            assert client.connected
            assert kvd_hf.load_prefix(client, other, ids).cache is None, options
    same = llama()
    with connect(daemon, same, salt=b"s" * 16) as client:
        assert kvd_hf.load_prefix(client, same, ids).tokens == WHOLE


def test_a_client_belongs_to_its_model(daemon: Any) -> None:
    """A client is refused for another model, and for its own after a weight update."""
    ids = prompt(50)
    one, two = llama(), llama()
    with connect(daemon, one) as client:
        with pytest.raises(kvd_hf.WrongModel, match="connect_model"):
            kvd_hf.load_prefix(client, two, ids)
        mark = weights_mark(one)
        greedy(one, ids)
        assert weights_mark(one) == mark, "running a model does not change it"
        with torch.no_grad():
            one.lm_head.weight.mul_(1.5)
        with pytest.raises(kvd_hf.WrongModel, match="again"):
            kvd_hf.load_prefix(client, one, ids)


def test_other_caches_are_refused(daemon: Any) -> None:
    """An offloading cache, one of two sequences, an empty one, or one of another model."""
    ids = prompt(64)
    model = llama()
    with connect(daemon, model) as client:
        offloading = StaticCache(config=model.config, max_cache_len=128, offloading=True)
        with pytest.raises(kvd_hf.UnsupportedCache, match=r"offloads.*new_cache"):
            kvd_hf.store_prefix(client, model, offloading, ids)
        pair = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids.repeat(2, 1), past_key_values=pair)
        with pytest.raises(kvd_hf.UnsupportedCache, match="2 sequences"):
            kvd_hf.store_prefix(client, model, pair, ids)
        with pytest.raises(kvd_hf.UnsupportedCache, match="empty"):
            kvd_hf.store_prefix(client, model, kvd_hf.new_cache(model), ids)
        wide = llama(num_key_value_heads=4)
        cache = kvd_hf.new_cache(wide)
        with torch.no_grad():
            wide(input_ids=ids, past_key_values=cache)
        with pytest.raises(kvd_hf.UnsupportedCache, match="another model"):
            kvd_hf.store_prefix(client, model, cache, ids)


def test_other_models_are_refused() -> None:
    """KV that does not follow from the token prefix, or has no end to cut at, is not cached."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(kvd_hf.UnsupportedModel, match="'dynamic'"):
        kvd_hf.connect_model(llama(rope_parameters=dynamic))
    with pytest.raises(kvd_hf.UnsupportedModel, match=r"eval\(\)"):
        kvd_hf.connect_model(llama().train())
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**SHAPE, num_hidden_layers=4, num_experts=4, moe_intermediate_size=32)
    with pytest.raises(kvd_hf.UnsupportedCache, match="layer 0 is a LinearAttention"):
        kvd_hf.connect_model(Qwen3NextForCausalLM(config).eval())


@pytest.mark.parametrize("name", ["mistral-64", "gemma3"])
def test_a_window_that_lost_its_past_is_not_stored(daemon: Any, name: str) -> None:
    """Sliding layers of an ordinary cache hold too little for whole chunks: nothing is stored."""
    ids = prompt()
    model = MODELS[name]()
    cache = DynamicCache(config=model.config)
    greedy(model, ids, cache)
    with connect(daemon, model) as client:
        stored = kvd_hf.store_prefix(client, model, cache, ids)
        assert (stored.tokens, stored.bytes) == (0, 0)
        assert "new_cache" in stored.note
        assert kvd_hf.load_prefix(client, model, ids).cache is None


def test_images_are_not_told_apart_by_their_token(daemon: Any) -> None:
    """A prompt with a token that stands for an image is neither stored nor looked up."""
    ids = prompt()
    model = llama(image_token_id=499)
    with connect(daemon, model) as client:
        run(client, model, ids)
        assert kvd_hf.load_prefix(client, model, ids).tokens == WHOLE
        ids[0, PROMPT - 1] = 499
        _, prefix, stored = run(client, model, ids)
    assert prefix.cache is None
    assert "images" in prefix.note
    assert (stored.tokens, stored.bytes) == (0, 0)


def test_without_a_daemon_all_is_a_miss(tmp_path: Any) -> None:
    """No daemon: the engine runs as ever, and is told why nothing was found or kept."""
    ids = prompt(100)
    model = llama()
    plain = greedy(model, ids)
    with kvd_hf.connect_model(model, tmp_path / "nobody.sock", chunk_tokens=CHUNK) as client:
        answer, prefix, stored = run(client, model, ids)
    assert answer == plain
    assert (prefix.cache, prefix.tokens, prefix.note) == (None, 0, "kvd does not answer")
    assert (stored.tokens, stored.bytes, stored.note) == (0, 0, "kvd does not answer")


def test_loading_warns_of_nothing(daemon: Any) -> None:
    """Read-only memory under a tensor raises no warning, and no filter is left behind."""
    ids = prompt()
    model = llama()
    with connect(daemon, model) as client:
        run(client, model, ids)
        filters = list(warnings.filters)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kvd_hf.load_prefix(client, model, ids).tokens == WHOLE
        assert warnings.filters == filters


def test_the_loaded_cache_owns_its_memory(daemon: Any) -> None:
    """What was loaded stays right after the client, and with it the daemon's memory, is gone."""
    ids = prompt()
    model = llama()
    with connect(daemon, model) as client:
        right, _, _ = run(client, model, ids)
        cache = kvd_hf.load_prefix(client, model, ids).cache
    assert greedy(model, ids, cache) == right
