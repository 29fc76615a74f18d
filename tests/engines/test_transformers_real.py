"""A real model, SmolLM2-135M, and real text through `cached`: what the README promises."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvd.demo import model as demo_model  # noqa: E402
from kvd.demo.text import DOCUMENT  # noqa: E402
from kvd_client import transformers as kvd_hf  # noqa: E402
from tests.engines.hf_kit import padded  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

QUESTIONS = ("Who built the lighthouse?", "When was the light lit for the first time, and by whom?")


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, Any]:
    """The demo's model and tokenizer."""
    try:
        model, tokenizer = demo_model.load()
    except demo_model.ModelMissing as error:
        pytest.skip(str(error))
    return model, tokenizer


def test_real_text_is_answered_as_without_kvd(daemon: Any, smollm: tuple[Any, Any]) -> None:
    """Two questions on one document, alone, again, in a batch, and a second turn: equal tokens."""
    model, tokenizer = smollm
    document = tokenizer(DOCUMENT, add_special_tokens=False).input_ids[:230]

    def chat(question: str) -> Any:
        content = f"{tokenizer.decode(document)}\n{question}"
        message = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])

    def answer(ids: Any, mask: Any = None) -> list[list[int]]:
        mask = torch.ones_like(ids) if mask is None else mask
        output = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        return list(output[:, ids.shape[1] :].tolist())

    prompts = [chat(question) for question in QUESTIONS]
    batch = padded(prompts)
    turn = torch.cat([prompts[0], torch.tensor(answer(prompts[0])), chat(QUESTIONS[1])], dim=1)
    plain = [answer(prompts[0]), answer(prompts[1]), answer(*batch), answer(turn)]
    with kvd_hf.cached(model, socket=daemon.socket, strict=True, answer_s=5.0) as kvd:
        loaded, answers = [], []
        for ids in (prompts[0], prompts[1], batch, turn):
            answers.append(answer(*ids) if isinstance(ids, tuple) else answer(ids))
            loaded.append(kvd.last.prefix.tokens)
    assert answers == plain
    assert loaded[0] == 0
    assert loaded[1] >= 192, "the document"
    assert loaded[2] >= 2 * 192
    assert loaded[3] >= (prompts[0].shape[1] + 5) // 64 * 64, "prompt and answer of the first turn"
