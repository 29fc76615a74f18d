"""`cached`: `model.generate` with kvd in it answers as it does without, whatever happens to kvd."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    GenerationConfig,
    LogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)

from kvd_client import transformers as kvd_hf  # noqa: E402
from tests.engines.hf_kit import (  # noqa: E402
    CHUNK,
    MODELS,
    PROMPT,
    WHOLE,
    connect,
    greedy,
    greedy_rows,
    llama,
    padded,
    prompt,
)

pytestmark = pytest.mark.timeout(180)

SIXTEEN: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0}
EIGHT: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}


def block(daemon: Any, model: Any, **options: Any) -> Any:
    """`cached` with a client for tests, made from `connect_model`'s options."""
    usual = {"socket": daemon.socket, "chunk_tokens": CHUNK, "strict": True, "answer_s": 5.0}
    return kvd_hf.cached(model, **{**usual, **options})


@pytest.mark.parametrize("name", MODELS)
def test_generate_answers_as_without_kvd(daemon: Any, name: str) -> None:
    """In the block the second call loads the prompt; a second engine loads prompt and answer."""
    ids = prompt()
    one, two = MODELS[name](), MODELS[name]()
    plain = greedy(one, ids)
    with block(daemon, one) as kvd:
        assert greedy(one, ids) == plain
        assert kvd.last.prefix.tokens == 0
        assert kvd.last.stored.tokens == (PROMPT + 15) // CHUNK * CHUNK
        assert greedy(one, ids) == plain
        assert kvd.last.prefix.tokens == WHOLE
        assert (kvd.calls, kvd.tokens, kvd.tokens_loaded) == (2, 2 * PROMPT, WHOLE)
    assert "generate" not in vars(one)
    assert not kvd.client.connected
    turn = torch.cat([ids, torch.tensor([plain]), prompt(30, seed=9)], dim=1)
    expected = greedy(two, turn)
    with block(daemon, two) as kvd:
        assert greedy(two, turn) == expected
        assert kvd.last.prefix.tokens == (PROMPT + 15) // CHUNK * CHUNK


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
        {**STATIC},
        {**STATIC, "num_beams": 2},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda options: ",".join(options) or "greedy",
)
def test_ways_to_generate(daemon: Any, name: str, options: dict[str, Any]) -> None:
    """Beams, samples, several answers, static caches, rich outputs, of a padded batch: the same."""
    model = MODELS[name]()
    ids, mask = padded([prompt(200), prompt(170, seed=8)])

    def answers() -> list[list[int]]:
        torch.manual_seed(1)
        output = model.generate(ids, attention_mask=mask, **EIGHT, **options)
        tensor = output if isinstance(output, torch.Tensor) else output.sequences
        return list(tensor.tolist())

    plain = answers()
    with block(daemon, model) as kvd:
        assert answers() == plain
        assert kvd.last.prefix.tokens == 0
        # once more without a static cache, whose sliding layers have dropped what was to be stored
        greedy_rows(model, ids, mask)
        assert kvd.last.stored.tokens >= 2 * 160
        assert answers() == plain
        assert kvd.last.prefix.tokens > 0.7 * int(mask.sum())


def test_the_answer_ends_where_it_ends(daemon: Any) -> None:
    """In a batch an answer that ended early is stored up to its end, not with what fills it up."""
    model = llama()
    ids = torch.cat([prompt(), prompt(seed=11)])
    long = greedy_rows(model, ids, tokens=40)
    end = long[0][20]
    assert end not in long[0][:20]
    with block(daemon, model) as kvd:
        model.generate(ids, max_new_tokens=40, eos_token_id=end, pad_token_id=0)
        first = (PROMPT + 21) // CHUNK
        other = long[1].index(end) + 1 if end in long[1] else 39
        assert kvd.last.stored.tokens == (first + (PROMPT + other) // CHUNK) * CHUNK


def test_padding_that_no_mask_tells_is_seen(daemon: Any) -> None:
    """Without a mask `generate` takes padding tokens for padding: so does kvd."""
    model = llama(pad_token_id=0)
    ids, mask = padded([prompt(200), prompt(170, seed=8)])
    plain = greedy_rows(model, ids, mask)
    with block(daemon, model) as kvd:
        for _ in range(2):
            output = model.generate(ids, max_new_tokens=16, min_new_tokens=16)
            assert output[:, 200:].tolist() == plain
        assert kvd.last.prefix.tokens > 300


def test_what_kvd_cannot_take_on_runs_without_it(daemon: Any) -> None:
    """Such a call answers as ever, its reason is told, with one warning; strict, it raises."""
    ids = prompt(70)
    model, helper = llama(), llama()
    embeds = model.get_input_embeddings()(ids).detach()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("assisted decoding", {"inputs": ids, "assistant_model": helper}),
        ("assisted decoding", {"inputs": ids, "prompt_lookup_num_tokens": 3}),
        ("a cache of its own", {"inputs": ids, "past_key_values": kvd_hf.new_cache(model)}),
        ("no token ids", {"inputs_embeds": embeds}),
        ("only from an empty cache", {"inputs": ids, "prefill_chunk_size": 64}),
        ("use_cache is off", {"inputs": ids, "use_cache": False}),
        ("whether KV depends", {"inputs": ids, "position_ids": torch.arange(70)[None]}),
        ("padding_side = 'left'", {"inputs": ids, "attention_mask": 1 - torch.eye(70)[-1:]}),
    ]
    if torch.cuda.is_available():  # without a GPU it fails in transformers itself
        cases.append(("'offloaded'", {"inputs": ids, "cache_implementation": "offloaded"}))
    for words, call in cases:
        again = {**call}
        if "past_key_values" in call:
            again["past_key_values"] = kvd_hf.new_cache(model)
        plain = model.generate(**call, **EIGHT, do_sample=False)
        with (
            block(daemon, model, strict=False) as kvd,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            output = model.generate(**again, **EIGHT, do_sample=False)
            assert output.tolist() == plain.tolist(), words
            assert words in kvd.last.note
            assert kvd.last.stored.tokens == 0
            mine = [str(each.message) for each in told if "kvd takes no part" in str(each.message)]
            assert len(mine) == 1, words
        with block(daemon, model), pytest.raises(kvd_hf.Unsupported, match=words):
            model.generate(**call, **EIGHT)


def test_a_model_that_changes_in_the_block_never_hits(daemon: Any) -> None:
    """After a weight update the block goes on without kvd, and says so."""
    ids = prompt()
    model = llama()
    with block(daemon, model, strict=False) as kvd:
        greedy(model, ids)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
        with pytest.warns(UserWarning, match="connect_model"):
            changed = greedy(model, ids)
        assert kvd.last.prefix.tokens == 0
    assert changed == greedy(model, ids)


def test_what_changes_kv_from_call_to_call_keeps_kvd_out(daemon: Any) -> None:
    """Training mode, autocast, another attention: such calls neither load nor store."""
    ids = prompt()
    model = llama()
    with block(daemon, model, strict=False) as kvd:
        greedy(model, ids)
        stored = kvd.last.stored.tokens
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(match="autocast"):
            greedy(model, ids)
        assert (kvd.last.prefix.tokens, kvd.last.stored.tokens) == (0, 0)
        model.train()
        with pytest.warns(match="training mode"):
            greedy(model, ids)
        assert (kvd.last.prefix.tokens, kvd.last.stored.tokens) == (0, 0)
        model.eval()
        greedy(model, ids)
        assert (kvd.last.prefix.tokens, kvd.last.stored.tokens) == (WHOLE, stored)
        model.set_attn_implementation("eager")
        with pytest.warns(match="connect_model"):
            greedy(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(kvd_hf.UnsupportedModel):
        connect(daemon, model)


def test_the_model_s_own_settings_count(daemon: Any) -> None:
    """A static cache asked for in the model's or the call's configuration; restored afterwards."""
    ids = prompt()
    model = llama()
    plain = greedy(model, ids)
    model.generation_config.cache_implementation = "static"
    model.generation_config.disable_compile = True
    with block(daemon, model, strict=False) as kvd:
        for _ in range(2):
            output = model.generate(ids, **SIXTEEN, return_dict_in_generate=True, do_sample=False)
            assert output.sequences[0, PROMPT:].tolist() == plain
            assert type(output.past_key_values).__name__ == "StaticCache"
        assert kvd.last.prefix.tokens == WHOLE
        config = GenerationConfig(**SIXTEEN, cache_implementation="static", disable_compile=True)
        assert model.generate(ids, config)[0, PROMPT:].tolist() == plain
        assert kvd.last.prefix.tokens == WHOLE
        with pytest.warns(UserWarning, match="prefill_chunk_size"):
            model.generate(ids, **SIXTEEN, prefill_chunk_size=64, do_sample=False)
    assert model.generation_config.cache_implementation == "static"


def test_misuse_of_the_block_is_named(daemon: Any) -> None:
    """Two blocks over one model, or options beside a client, or a model with an encoder."""
    model = llama()
    with block(daemon, model), pytest.raises(ValueError, match="other `cached` block"):
        block(daemon, model).__enter__()
    with connect(daemon, model) as client:
        with pytest.raises(ValueError, match="salt: give them to connect_model"):
            kvd_hf.cached(model, client, salt=b"s" * 16).__enter__()
        with kvd_hf.cached(model, client, store=False) as kvd:
            greedy(model, prompt())
            assert kvd.last.stored.tokens == 0
        assert client.connected, "the caller's client stays open"
        assert kvd_hf.load_prefix(client, model, prompt()).cache is None
    small = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, vocab_size=100)
    with pytest.raises(kvd_hf.UnsupportedModel, match="has an encoder"):
        kvd_hf.cached(T5ForConditionalGeneration(small).eval()).__enter__()


# ------------------------------------------------------------------------------- kvd goes away


class Kill(LogitsProcessor):
    """Does something to the daemon before a step of `generate`."""

    def __init__(self, step: int, act: Any) -> None:
        """Act at that step."""
        self.step, self.act = step, act

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: ARG002 - the interface
        """Leave the scores as they are."""
        self.step -= 1
        if self.step == 0:
            self.act()
        return scores


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("step", [0, 1, 8])
def test_generate_goes_on_when_the_daemon_does_not(daemon: Any, how: int, step: int) -> None:
    """Killed or stopped before the call, at the first token or within the answer: the answer."""
    ids = prompt()
    model = llama()
    plain = greedy(model, ids)

    def act() -> None:
        os.kill(daemon.pid, how)

    with block(daemon, model, answer_s=1.0) as kvd:
        greedy(model, ids)
        if step == 0:
            act()
        began = time.monotonic()
        output = model.generate(ids, **SIXTEEN, do_sample=False, logits_processor=[Kill(step, act)])
        assert output[0, PROMPT:].tolist() == plain
        assert time.monotonic() - began < 60
        assert greedy(model, ids) == plain, "and the next one"
        assert (kvd.last.prefix.tokens, kvd.last.stored.tokens) == (0, 0)
        if how == signal.SIGKILL:
            assert (kvd.last.prefix.note, kvd.last.stored.note) == ("kvd does not answer",) * 2
    if how == signal.SIGSTOP:
        os.kill(daemon.pid, signal.SIGCONT)


def test_generate_comes_back_to_kvd(daemon: Any) -> None:
    """After a restart of the daemon the same block stores and loads again."""
    ids = prompt()
    model = llama()
    plain = greedy(model, ids)
    with block(daemon, model) as kvd:
        greedy(model, ids)
        daemon.kill()
        assert greedy(model, ids) == plain
        daemon.start()
        deadline = time.monotonic() + 60
        while not kvd.last.prefix.tokens:
            assert greedy(model, ids) == plain
            assert time.monotonic() < deadline, kvd.last
            time.sleep(0.1)


def test_threads_share_a_block(daemon: Any) -> None:
    """Calls from several threads at a time answer right."""
    model = llama()
    prompts = [prompt(seed=n) for n in range(4)]
    plain = [greedy(model, ids) for ids in prompts]
    answers: dict[int, list[int]] = {}
    with block(daemon, model):

        def ask(number: int) -> None:
            for _ in range(2):
                answers[number] = greedy(model, prompts[number])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answers[number] for number in range(4)] == plain
