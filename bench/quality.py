"""What the cold forms do to a model's answers.

    python -m bench.quality [--json] [--tokens 4096] [--after 1024] [--new-tokens 200]
                            [--threads 1] [--keep FILE]

The demo's model (SmolLM2-135M-Instruct, computed in float32) reads the first part of a text; its KV
is rounded to bfloat16, as engines keep it, cut into objects in the layout of
`kvd_client.transformers`, and goes through a cold form (`kvd.codec`) and back. Then the model goes
on from that KV. The texts come with Python: the language's reference (`pydoc_data.topics`), and a
module's source (`argparse`).

    perplexity      of the text after the first part; `fp8_perplexity_cost_pct` is how much higher
                    it is than with bfloat16, over both texts together; `bf16_..._pct` the same of
                    bfloat16 over the float32 that the model computed
    top1_agreement  of the tokens after the first part: the same most likely next token as bf16
    greedy          tokens generated on, without a teacher: the share that are the same as with bf16
                    at the same place, and how many are the same before the first that is not
    retrieval       48 facts in four documents, see `bench/_recall.py`: the share of them of which
                    the right word is likelier than those of the document's other facts.
                    `_interval` is Wilson's, 95 %; `retrieval_paired_p` how likely a difference as
                    between bf16 and FP8 is where there is none (McNemar, exact)
    passkey         a five-digit key at several depths of 2,000 tokens of prose: the share of keys
                    of which every token is the likeliest, which is what greedy decoding gives;
                    `_logprob` is the mean log-likelihood of a whole key. Easy: it was chosen after
                    bf16 and FP8 had both found all
    lossless        every bit of every object is compared

The last, incomplete chunk of a document never leaves the engine, and stays as it was computed.

On one thread unless told otherwise: several take longer wherever somebody else wants a core, and
their sums differ from run to run. `--keep` writes what is done to a file after each step; a run
with the same file and numbers goes on from there. `seconds` is how long it took in all.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from bench import _recall
from bench import codec as bench_codec
from bench._steps import Steps
from bench._table import report
from kvd import codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kvd.codec import Form

    Figures = dict[str, object]
    Layers = list[tuple[torch.Tensor, torch.Tensor]]

TEXTS: Final = ("pydoc_data.topics", "argparse")
CHUNK_TOKENS: Final = bench_codec.CHUNK_TOKENS
PIECE_TOKENS: Final = 512
DEPTHS: Final = (1, 4, 7, 10, 13)  # paragraphs before the key, of 14 to 15
NEEDLE: Final = "The pass key of the tower is {}."
QUESTION: Final = "The pass key of the tower is"


def text_of(module: str) -> str:
    """Read a module's source; of the reference, its prose."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    if module == "pydoc_data.topics":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    return Path(spec.origin).read_text(encoding="utf-8")


class Prefix(NamedTuple):
    """The KV of a first part, in float32 as it was computed, and the part's tokens."""

    layers: Layers
    tokens: int


class Model:
    """The demo's model, with caches made by hand."""

    def __init__(self, threads: int) -> None:
        """Load it."""
        import torch
        import transformers

        from kvd.demo import model as demo_model

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._net, self.tokenizer = demo_model.load()

    def ids(self, text: str) -> list[int]:
        """Encode a text as it is."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found

    def read(self, ids: Sequence[int], cache: object = None) -> tuple[torch.Tensor, Any]:
        """Read tokens on top of a cache; return their logits, (tokens, words), and the cache."""
        with self._torch.no_grad():
            inputs = self._torch.tensor([ids])
            out = self._net(inputs, past_key_values=cache, use_cache=True)
        return out.logits[0], out.past_key_values

    def prefix(self, ids: Sequence[int]) -> Prefix:
        """Compute the KV of a first part."""
        cache: Any = None
        with self._torch.no_grad():
            for at in range(0, len(ids), PIECE_TOKENS):
                inputs = self._torch.tensor([ids[at : at + PIECE_TOKENS]])
                out = self._net(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
        return Prefix([(layer.keys, layer.values) for layer in cache.layers], len(ids))

    def cache(self, layers: Layers) -> Any:  # noqa: ANN401 - a DynamicCache
        """Make a cache of KV; the KV itself stays as it is."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._net.config)
        layer: Any
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    def losses(self, layers: Layers, ids: Sequence[int]) -> tuple[list[float], list[int]]:
        """Read on; return each token's loss but the first's, and the likeliest next ones."""
        cache = self.cache(layers)
        losses: list[float] = []
        best: list[int] = []
        for at in range(0, len(ids) - 1, PIECE_TOKENS):
            piece = ids[at : min(at + PIECE_TOKENS, len(ids) - 1)]
            logits, cache = self.read(piece, cache)
            targets = self._torch.tensor(ids[at + 1 : at + 1 + len(piece)])
            found = self._torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            losses += found.tolist()
            best += logits.argmax(dim=-1).tolist()
        return losses, best

    def answers(self, layers: Layers, question: str, answer: str) -> tuple[bool, float]:
        """Tell whether greedy decoding gives the answer, and the answer's log-likelihood."""
        asked, whole = self.ids(question), self.ids(question + answer)
        assert whole[: len(asked)] == asked
        logits, _ = self.read(whole, self.cache(layers))
        logits = logits[len(asked) - 1 : -1]
        wanted = self._torch.tensor(whole[len(asked) :])
        logprob = logits.log_softmax(-1).gather(1, wanted.unsqueeze(1)).sum().item()
        return bool((logits.argmax(-1) == wanted).all()), float(logprob)

    def likeliest(self, layers: Layers, question: str, answers: Sequence[str]) -> int:
        """Return which answer the model would rather begin than the others."""
        first = [self.ids(f" {answer}")[0] for answer in answers]
        assert len(set(first)) == len(first), "answers that begin alike"
        logits, _ = self.read(self.ids(question), self.cache(layers))
        return int(logits[-1][self._torch.tensor(first)].argmax())

    def further(self, layers: Layers, ids: Sequence[int]) -> Layers:
        """Return the KV once more tokens have been read."""
        if not ids:
            return layers
        _, cache = self.read(ids, self.cache(layers))
        return [(layer.keys, layer.values) for layer in cache.layers]

    def generate(self, layers: Layers, ids: Sequence[int], count: int) -> list[int]:
        """Read the last tokens of a prompt and go on greedily, also past an end token."""
        logits, cache = self.read(ids, self.cache(layers))
        found: list[int] = []
        while True:
            found.append(int(logits[-1].argmax()))
            if len(found) == count:
                return found
            logits, cache = self.read(found[-1:], cache)


# ------------------------------------------------------------------------- through a form


class Forms:
    """Takes KV through the cold forms, object by object, and compares."""

    def __init__(self) -> None:
        """Compile what has to be."""
        import torch

        from kvd_client.hf_cache import ORDER

        assert bench_codec.ORDERS["_heads"] == ORDER  # the layout of kvd_client.transformers
        self._torch = torch
        codec.warm_up()
        self.objects = 0
        self.bit_exact = True
        self._squares = np.zeros(2)

    def through(self, layers: Layers) -> tuple[Layers, Layers]:
        """Return KV rounded to bfloat16, and that after FP8; float32 both, lossless checked."""
        pairs = [self._torch.cat([keys, values]) for keys, values in layers]
        rounded = self._torch.stack(pairs).bfloat16()  # (layers, 2, heads, tokens, dim)
        bits = rounded.view(self._torch.int16).numpy().view(np.uint16)
        assert bits.shape[3] % CHUNK_TOKENS == 0
        shape, objects = bench_codec.cut(bits, bench_codec.ORDERS["_heads"])
        near = np.empty_like(bits)
        for index, source in enumerate(objects):
            self.objects += 1
            exact = self._back("lossless", shape, source)
            self.bit_exact = self.bit_exact and bool(np.array_equal(exact, source))
            chunk = slice(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)
            part = near[:, :, :, chunk]
            part[...] = self._back("fp8", shape, source).reshape(part.shape)
        same = self._torch.from_numpy(near.view(np.int16)).view(self._torch.bfloat16)
        error = (same.float() - rounded.float()).square().sum().item()
        self._squares += (error, rounded.float().square().sum().item())
        return self._layers(rounded), self._layers(same)

    @staticmethod
    def _back(form: Form, shape: codec.ObjectShape, source: bench_codec.Bits) -> bench_codec.Bits:
        """Encode an object with all compression there is, and decode it."""
        out = bytearray(codec.frame_bytes_max(form, shape))
        size = codec.encode(form, shape, source, out, planes=codec.ALL_PLANES).size_bytes
        back = np.empty_like(source)
        codec.decode(memoryview(out)[:size], shape, back)
        return back

    def _layers(self, kv: torch.Tensor) -> Layers:
        wide = kv.float()
        return [(pair[0].unsqueeze(0), pair[1].unsqueeze(0)) for pair in wide]

    def account(self) -> dict[str, Any]:
        """Return what became of the KV since the last account."""
        found = {
            "objects": self.objects,
            "bit_exact": self.bit_exact,
            "squares": self._squares.tolist(),
        }
        self.objects, self.bit_exact, self._squares = 0, True, np.zeros(2)
        return found


# ------------------------------------------------------------------------- what is asked


def share_same(one: Sequence[int], other: Sequence[int]) -> float:
    """Return at how many places two lists are the same, as a share."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def first_other(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many are the same before the first that is not."""
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1), len(one)
    )


def of_text(model: Model, forms: Forms, module: str, counts: tuple[int, int, int]) -> Figures:
    """Measure perplexity and agreement on one text."""
    tokens, after, new_tokens = counts
    ids = model.ids(text_of(module)[: 12 * (tokens + after)])[: tokens + after]
    assert len(ids) == tokens + after, "the text is too short"
    prefix = model.prefix(ids[:tokens])
    rounded, near = forms.through(prefix.layers)
    losses: dict[str, list[float]] = {}
    best: dict[str, list[int]] = {}
    for name, layers in (("f32", prefix.layers), ("bf16", rounded), ("fp8", near)):
        losses[name], best[name] = model.losses(layers, ids[tokens:])
    start = ids[tokens : tokens + 1]
    answers = [model.generate(layers, start, new_tokens) for layers in (rounded, near)]
    return forms.account() | {
        "losses": losses,
        "top1": share_same(best["bf16"], best["fp8"]),
        "greedy": share_same(*answers),
        "same_first": first_other(*answers),
    }


def texts(done: dict[str, Any]) -> Figures:
    """Put the texts' results together."""
    figures: Figures = {
        f"{name}_perplexity_{module.rpartition('.')[2]}": perplexity(losses)
        for module, found in done.items()
        for name, losses in found["losses"].items()
    }
    f32, bf16, fp8 = (
        perplexity([loss for found in done.values() for loss in found["losses"][name]])
        for name in ("f32", "bf16", "fp8")
    )
    return figures | {
        "bf16_perplexity": bf16,
        "fp8_perplexity": fp8,
        "fp8_perplexity_cost_pct": 100 * (fp8 / bf16 - 1),
        "bf16_perplexity_cost_pct": 100 * (bf16 / f32 - 1),
        "fp8_top1_agreement": sum(found["top1"] for found in done.values()) / len(done),
        "fp8_greedy_agreement": sum(found["greedy"] for found in done.values()) / len(done),
        "fp8_greedy_same_first": [found["same_first"] for found in done.values()],
    }


def perplexity(losses: Iterable[float]) -> float:
    """Return the perplexity of losses."""
    values = list(losses)
    return math.exp(sum(values) / len(values))


def both(model: Model, forms: Forms, text: str) -> tuple[dict[str, Layers], int]:
    """Read a document; return its KV as bfloat16 and after FP8, by name, and its tokens."""
    ids = model.ids(text)
    whole = len(ids) // CHUNK_TOKENS * CHUNK_TOKENS
    pair = forms.through(model.prefix(ids[:whole]).layers)
    read = [model.further(layers, ids[whole:]) for layers in pair]
    return dict(zip(("bf16", "fp8"), read, strict=True)), len(ids)


def passkey(model: Model, forms: Forms, depth: int, key: str) -> Figures:
    """Hide a key in the demo's document, and ask for it."""
    from kvd.demo.text import DOCUMENT

    paragraphs = DOCUMENT.split("\n\n")
    paragraphs.insert(depth, NEEDLE.format(key))
    variants, _ = both(model, forms, "\n\n".join(paragraphs) + "\n\n")
    answers = {name: model.answers(kv, QUESTION, f" {key}") for name, kv in variants.items()}
    return forms.account() | answers


def recall(model: Model, forms: Forms, prose: str, seed: int) -> Figures:
    """Ask for every fact of a document."""
    made = _recall.document(prose, lambda text: len(model.ids(text)), seed)
    variants, tokens = both(model, forms, made.text)
    right = {
        name: [
            model.likeliest(kv, _recall.ASK.format(who), made.words) == index
            for index, who in enumerate(made.names)
        ]
        for name, kv in variants.items()
    }
    return forms.account() | right | {"tokens": tokens}


def passkeys(done: dict[str, Any]) -> Figures:
    """Put the keys' results together."""
    figures: Figures = {"passkey_asked": len(done)}
    for name in ("bf16", "fp8"):
        found = [one[name] for one in done.values()]
        figures[f"{name}_passkey"] = sum(right for right, _ in found) / len(found)
        figures[f"{name}_passkey_logprob"] = sum(logprob for _, logprob in found) / len(found)
    return figures


def recalls(done: dict[str, Any]) -> Figures:
    """Put the documents' results together."""
    right = {
        name: [fact for one in done.values() for fact in one[name]] for name in ("bf16", "fp8")
    }
    asked = len(right["bf16"])
    figures: Figures = {
        "retrieval_asked": asked,
        "retrieval_tokens": max(one["tokens"] for one in done.values()),
        "retrieval_paired_p": _recall.paired_p(right["bf16"], right["fp8"]),
    }
    for name, found in right.items():
        figures[f"{name}_retrieval"] = sum(found) / asked
        figures[f"{name}_retrieval_interval"] = _recall.interval(sum(found), asked)
    return figures


def measure(counts: tuple[int, int, int], threads: int, keep: Path | None) -> Figures:
    """Measure everything; see the module for the names."""
    numbers = dict(zip(("tokens", "after", "new_tokens"), counts, strict=True))
    steps = Steps("bench.quality", keep, {**numbers, "facts": [_recall.FACT, _recall.FACTS]})
    model, forms = Model(threads), Forms()
    order = random.Random(0)
    keys = [(depth, str(order.randrange(10_000, 100_000))) for depth in DEPTHS]
    prose = text_of(TEXTS[0])
    read = {
        module: steps.run(f"text {module}", partial(of_text, model, forms, module, counts))
        for module in TEXTS
    }
    facts = {
        f"facts {seed}": steps.run(f"facts {seed}", partial(recall, model, forms, prose, seed))
        for seed in range(_recall.DOCUMENTS)
    }
    hidden = {
        f"key {depth}": steps.run(f"key {depth}", partial(passkey, model, forms, depth, key))
        for depth, key in keys
    }
    accounts = [*read.values(), *facts.values(), *hidden.values()]
    figures: Figures = {**numbers, "threads": threads}
    figures |= texts(read) | recalls(facts) | passkeys(hidden)
    error, whole = (sum(found["squares"][index] for found in accounts) for index in (0, 1))
    return figures | {
        "fp8_relative_error": math.sqrt(error / whole),
        "lossless_bit_exact": all(found["bit_exact"] for found in accounts),
        "objects": sum(found["objects"] for found in accounts),
        "seconds": steps.seconds,
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    """Measure and print; 1 if lossless is not, 2 without the model."""
    parser = argparse.ArgumentParser(prog="bench.quality", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, default=4096, help="of the first part")
    parser.add_argument("--after", type=int, default=1024, help="read after it")
    parser.add_argument("--new-tokens", type=int, default=200, help="generated after it")
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument("--keep", type=Path, help="a file for what is done, to go on from")
    arguments = parser.parse_args()
    tokens: int = arguments.tokens
    if tokens < CHUNK_TOKENS or tokens % CHUNK_TOKENS or tokens + arguments.after > 8192:
        parser.error(f"--tokens must be a multiple of {CHUNK_TOKENS}, and all at most 8192")
    from kvd.demo.model import ModelMissing

    try:
        counts = (tokens, arguments.after, arguments.new_tokens)
        figures = measure(counts, arguments.threads, arguments.keep)
    except ModelMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    report("answers from KV that was cold", figures, as_json=arguments.json)
    return 0 if figures["lossless_bit_exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
