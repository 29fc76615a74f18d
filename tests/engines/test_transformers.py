"""Hugging Face transformers through a real daemon: the same greedy tokens, and no wrong hit.

Models are tiny and random, with weights large enough that their answers depend on the whole
prompt. "Engines" are models built twice from one seed, each with a client of its own, so that
nothing but the daemon carries KV from one to the other.
"""

from __future__ import annotations

import copy
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from kvd import statpage  # noqa: E402
from kvd_client import transformers as kvd_hf  # noqa: E402
from kvd_client.hf_model import weights_mark  # noqa: E402
from kvd_client.paths import stat_page_name  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 16
PROMPT = 300
WHOLE = 18 * CHUNK
"""Tokens of whole chunks that leave at least one token of the prompt to compute."""
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 500,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

pytestmark = pytest.mark.timeout(60)


def llama(seed: int = 0, **changes: Any) -> Any:
    """Every layer sees all tokens."""
    torch.manual_seed(seed)
    dtype = changes.pop("dtype", torch.float32)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": 4, **changes})
    return LlamaForCausalLM(config).to(dtype).eval()


def mistral(window: int = 64) -> Any:
    """Every layer sees a window."""
    torch.manual_seed(1)
    config = MistralConfig(**SHAPE, num_hidden_layers=3, sliding_window=window)
    return MistralForCausalLM(config).eval()


def gemma(window: int = 64) -> Any:
    """Two layers in three see a window, the others all tokens."""
    torch.manual_seed(2)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SHAPE, num_hidden_layers=6, sliding_window=window, layer_types=kinds
    )
    return Gemma3ForCausalLM(config).eval()


def deepseek() -> Any:
    """Latent attention: K and V of a layer differ in width."""
    torch.manual_seed(3)
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    config = DeepseekV3Config(
        **{**shape, "num_key_value_heads": 4},
        num_hidden_layers=3,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=24,
    )
    return DeepseekV3ForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-bfloat16": lambda: llama(dtype=torch.bfloat16),
    "mistral-64": mistral,
    "mistral-65": lambda: mistral(65),  # window - 1 is a whole number of chunks
    "mistral-1000": lambda: mistral(1000),  # wider than the prompt
    "gemma3": gemma,
    "deepseek": deepseek,
}


def prompt(tokens: int = PROMPT, seed: int = 3) -> Any:
    """Token ids, `[1, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 500, (1, tokens), generator=generator)


@torch.no_grad()
def greedy(model: Any, ids: Any, cache: Any = None, tokens: int = 16) -> list[int]:
    """Generate greedily; the new tokens only."""
    output = model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        past_key_values=cache,
    )
    answer: list[int] = output[0, ids.shape[1] :].tolist()
    return answer


def connect(daemon: Any, model: Any, **options: Any) -> Any:
    """Connect an engine with small chunks."""
    return kvd_hf.connect_model(model, daemon.socket, chunk_tokens=CHUNK, **options)


def run(client: Any, model: Any, ids: Any) -> tuple[list[int], kvd_hf.Prefix, kvd_hf.Stored]:
    """What an engine does with one prompt: load, generate, store."""
    prefix = kvd_hf.load_prefix(client, model, ids)
    cache = kvd_hf.new_cache(model) if prefix.cache is None else prefix.cache
    answer = greedy(model, ids, cache)
    return answer, prefix, kvd_hf.store_prefix(client, model, cache, ids)


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
    """A static cache, an offloading one, one of two sequences, or of another model."""
    ids = prompt(64)
    model = llama()
    with connect(daemon, model) as client:
        static = StaticCache(config=model.config, max_cache_len=128)
        with pytest.raises(kvd_hf.UnsupportedCache, match=r"layer 0 is a StaticLayer.*new_cache"):
            kvd_hf.store_prefix(client, model, static, ids)
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


def test_other_prompts_are_refused(daemon: Any) -> None:
    """Two prompts at once, or one with padding, are misuse and say so."""
    model = llama()
    with connect(daemon, model) as client:
        with pytest.raises(kvd_hf.UnsupportedInput, match=r"\[2, 64\].*one prompt"):
            kvd_hf.load_prefix(client, model, prompt(64).repeat(2, 1))
        mask = torch.ones(1, 64)
        mask[0, 0] = 0
        with pytest.raises(kvd_hf.UnsupportedInput, match="padded"):
            kvd_hf.load_prefix(client, model, prompt(64), attention_mask=mask)


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


# --------------------------------------------------------------------- lossy copies, NVMe, the gate


@pytest.fixture
def cold_daemon(make_daemon: Any) -> Any:
    """A daemon with an NVMe tier, in the default form: FP8 where the namespace allows it."""
    daemon = make_daemon(arguments=["--nvme-bytes", "1GiB"])
    daemon.start()
    return daemon


def restart(daemon: Any) -> None:
    """Stop the daemon and start it again: what it held is on NVMe only."""
    assert daemon.stop(40) == 0
    daemon.start()


def space(daemon: Any) -> dict[str, Any]:
    """What the statistics say of the only space, once they are new."""
    time.sleep(0.5)
    (found,) = statpage.read(stat_page_name(daemon.socket)).stats["spaces"]
    return dict(found)


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


def test_a_lossy_copy_is_told_and_not_stored_again(cold_daemon: Any) -> None:
    """FP8 from NVMe is marked; not even where kvd's own copy left memory is it stored as exact."""
    ids = prompt()
    model = llama()
    with connect(cold_daemon, model, lossy=True) as client:
        run(client, model, ids)
        warm = kvd_hf.load_prefix(client, model, ids)
        assert (warm.tokens, warm.lossy) == (WHOLE, False), "in memory it is what was stored"
        exact = greedy(model, ids, warm.cache)
    restart(cold_daemon)
    longer = torch.cat([ids, prompt(40, seed=5)], dim=1)
    with connect(cold_daemon, model, lossy=True) as client:
        prefix = kvd_hf.load_prefix(client, model, longer)
        assert (prefix.tokens, prefix.lossy, prefix.note) == (WHOLE, True, "")
        greedy(model, longer, prefix.cache)
    assert prefix.cache is not None
    restart(cold_daemon)  # the loaded chunks are no longer in host memory
    with connect(cold_daemon, model, lossy=True) as client:
        copied = copy.deepcopy(prefix.cache)
        stored = kvd_hf.store_prefix(client, model, copied, longer)
        chunk_bytes = sum(group.object_bytes for group in client.layout.groups)
        assert (stored.tokens, stored.lossy) == (340 // CHUNK * CHUNK, True)
        assert stored.bytes == (340 // CHUNK - WHOLE // CHUNK) * chunk_bytes
        again = kvd_hf.load_prefix(client, model, longer)
        assert (again.tokens, again.lossy) == (stored.tokens, True)
    with connect(cold_daemon, model) as client:
        refused = kvd_hf.store_prefix(client, model, prefix.cache, ids)
        assert (refused.tokens, refused.bytes) == (0, 0)
        assert "another namespace" in refused.note
        assert run(client, model, ids)[0] == exact


def test_a_lossy_copy_that_is_gone_is_not_claimed(cold_daemon: Any, make_daemon: Any) -> None:
    """What follows a lossy prefix is not stored where kvd holds that prefix no more."""
    ids = prompt()
    model = llama()
    with connect(cold_daemon, model, lossy=True) as client:
        run(client, model, ids)
    restart(cold_daemon)
    longer = torch.cat([ids, prompt(40, seed=5)], dim=1)
    with connect(cold_daemon, model, lossy=True) as client:
        prefix = kvd_hf.load_prefix(client, model, longer)
    assert prefix.lossy
    assert prefix.cache is not None
    greedy(model, longer, prefix.cache)
    other = make_daemon("other")
    other.start()
    with connect(other, model, lossy=True) as client:  # the same namespace, elsewhere
        stored = kvd_hf.store_prefix(client, model, prefix.cache, longer)
    assert (stored.tokens, stored.bytes) == (0, 0)
    assert stored.note


def test_what_is_not_worth_loading_is_not_loaded(cold_daemon: Any) -> None:
    """An engine tells kvd how fast it computes; kvd then offers loads only where that is slower."""
    ids, other = prompt(), prompt(seed=11)
    model = llama()
    with connect(cold_daemon, model) as client:
        for each in (ids, other):
            run(client, model, each)
    restart(cold_daemon)
    with connect(cold_daemon, model) as client:
        assert kvd_hf.load_prefix(client, model, other).tokens == WHOLE, "now the disk is known"
        cache = kvd_hf.new_cache(model)
        fresh = prompt(seed=12)
        greedy(model, fresh, cache)
        kvd_hf.store_prefix(client, model, cache, fresh, seconds=1e-4)
        prefix = kvd_hf.load_prefix(client, model, ids)
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
        loaded = kvd_hf.load_prefix(client, model, ids)
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
        prefix = kvd_hf.load_prefix(client, model, ids, wait_s=0.0)
        assert (prefix.cache, prefix.found) == (None, WHOLE)
        assert "(not within 0 s)" in prefix.note
        deadline = time.monotonic() + 10
        while not (prefix := kvd_hf.load_prefix(client, model, ids)).tokens:
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
        deadline = time.monotonic() + 10
        while not run(second, model, ids)[2].tokens:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert kvd_hf.load_prefix(second, model, ids).tokens == WHOLE
