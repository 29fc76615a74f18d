"""The cold forms' speed and size, on one thread, beside memcpy.

    python -m bench.codec [--json] [--rounds 5] [--synthetic]

The KV is real: a small chat model (`kvd.demo.model`) reads 2,048 tokens of kvd's own source, and
its bfloat16 KV is cut into objects of 256 tokens (5.9 MB each, 47 MB together: more than most
caches). Without that model, or with `--synthetic`, it is random numbers with the spread of KV; then
speeds are of use and ratios are not, and `kv` says so.

All rates are GB/s of bfloat16, the best over all objects and rounds of interleaved calls, so that a
busy machine's neighbours matter little; compare with `memcpy_gbps` of the same run.

    fp8            amax, scale and round; and back. Tokens before heads, as paged engines have it
    fp8_heads      the same with heads before tokens, as transformers has it
    fp8_zstd       with the codes compressed
    lossless       with the byte planes compressed that pay
    raw            header and memcpy

`fp8_error_k` and `_v`: root of the summed squares of errors over that of values. `zstd_planes` of a
form is what its `Chooser` took (bit i: plane i).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import kvd
from bench._table import report
from kvd import codec
from kvd_client import Group, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Bits = npt.NDArray[np.uint16]
    Figures = dict[str, object]

CHUNK_TOKENS: Final = 256
TOKENS: Final = 2048
LAYERS, HEADS, HEAD_SIZE = 30, 3, 64  # of the model; the synthetic KV has its shape
ORDERS: Final = {"": "layer,kv,page,token,head,dim/1", "_heads": "layer,kv,head,token,dim/1"}


def real_kv() -> Bits:
    """Compute KV: (layers, 2, heads, tokens, dim), the bits of bfloat16.

    Raises:
        kvd.demo.model.ModelMissing: The model is not installed.
    """
    from kvd.demo import model as demo_model

    demo_model.gguf_folder()
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    model, tokenizer = demo_model.load()
    sources = sorted(Path(kvd.__file__).parent.rglob("*.py"))
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    ids = torch.tensor([tokenizer(text).input_ids[:TOKENS]])
    with torch.no_grad():
        cache: Any = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    found: Bits = torch.stack(pairs).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return found


def synthetic_kv() -> Bits:
    """Make numbers with the spread of KV: normal, K with channels that stand out."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((LAYERS, 2, HEADS, TOKENS, HEAD_SIZE), dtype=np.float32)
    values[:, 0] *= np.exp(rng.normal(size=(LAYERS, HEADS, 1, HEAD_SIZE))).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def cut(kv: Bits, order: str) -> tuple[codec.ObjectShape, list[Bits]]:
    """Cut KV into the objects of chunks, in one of `ORDERS`."""
    layers, _, heads, tokens, dim = kv.shape
    chunks = [kv[:, :, :, at : at + CHUNK_TOKENS] for at in range(0, tokens, CHUNK_TOKENS)]
    if "token,head" in order:
        chunks = [chunk.swapaxes(2, 3) for chunk in chunks]
    objects = [np.ascontiguousarray(chunk).reshape(-1) for chunk in chunks]
    group = Group("full", layers, heads, dim, objects[0].nbytes)
    shape = codec.shape_of(Layout(CHUNK_TOKENS, 16, "bfloat16", (group,), order=order).check(), 0)
    assert shape is not None
    return shape, objects


def seconds(action: Callable[[], object]) -> float:
    """Time one action."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class Case:
    """One form on one list of objects."""

    def __init__(self, form: codec.Form, shape: codec.ObjectShape, objects: list[Bits]) -> None:
        """Let a chooser see some objects, as the tier would, and keep all frames."""
        self.form, self.shape, self.objects = form, shape, objects
        self.out = bytearray(codec.frame_bytes_max(form, shape))
        self.back = np.zeros_like(objects[0])
        chooser = codec.Chooser(first=4)
        for source in objects[:4]:
            chooser.record(codec.encode(form, shape, source, self.out))
        self.planes = chooser.paying()
        self.encode_s = self.decode_s = float("inf")
        self.frames: list[bytes] = []

    def keep_frames(self, planes: int) -> float:
        """Encode all objects with these planes compressed; returns how many times smaller."""
        self.planes = planes
        self.frames = [self.one(source) for source in self.objects]
        return self.objects[0].nbytes * len(self.objects) / sum(map(len, self.frames))

    def one(self, source: Bits) -> bytes:
        """Encode one object."""
        size = codec.encode(self.form, self.shape, source, self.out, planes=self.planes).size_bytes
        return bytes(memoryview(self.out)[:size])

    def round(self, index: int) -> None:
        """Time one object both ways."""
        source, frame = self.objects[index], self.frames[index]
        spent = seconds(
            lambda: codec.encode(self.form, self.shape, source, self.out, planes=self.planes)
        )
        self.encode_s = min(self.encode_s, spent)
        spent = seconds(lambda: codec.decode(frame, self.shape, self.back))
        self.decode_s = min(self.decode_s, spent)

    def figures(self, name: str) -> Figures:
        """Give the rates so far."""
        size = self.objects[0].nbytes / 1e9
        return {
            f"{name}_encode_gbps": size / self.encode_s,
            f"{name}_decode_gbps": size / self.decode_s,
        }


def errors(case: Case, kv: Bits) -> Figures:
    """Give FP8's relative error over all of K and all of V."""
    squares = np.zeros((2, 2))
    layers, _, heads, _, dim = kv.shape
    for source, frame in zip(case.objects, case.frames, strict=True):
        codec.decode(frame, case.shape, case.back)
        for side in (0, 1):
            exact, back = (
                (bits.reshape(layers, 2, -1)[:, side].astype(np.uint32) << 16).view(np.float32)
                for bits in (source, case.back)
            )
            squares[side] += [((back - exact) ** 2).sum(), (exact**2).sum()]
    assert heads
    assert dim
    share = np.sqrt(squares[:, 0] / squares[:, 1])
    return {"fp8_error_k": float(share[0]), "fp8_error_v": float(share[1])}


def measure(rounds: int = 5, *, synthetic: bool = False) -> Figures:
    """Measure everything; see the module for the names."""
    from kvd.demo.model import ModelMissing

    codec.warm_up()
    kind = "synthetic"
    kv = None
    if not synthetic:
        try:
            kv, kind = real_kv(), "SmolLM2-135M-Instruct"
        except ModelMissing as missing:
            print(f"bench.codec: {missing}; synthetic KV instead", file=sys.stderr)
    if kv is None:
        kv = synthetic_kv()
    shape, objects = cut(kv, ORDERS[""])
    heads_shape, heads_objects = cut(kv, ORDERS["_heads"])
    cases = {
        "fp8": Case("fp8", shape, objects),
        "fp8_heads": Case("fp8", heads_shape, heads_objects),
        "fp8_zstd": Case("fp8", shape, objects),
        "lossless": Case("lossless", shape, objects),
        "raw": Case("raw", shape, objects),
    }
    figures: Figures = {"kv": kind, "object_bytes": objects[0].nbytes}
    for name, case in cases.items():
        plain = name in {"fp8", "fp8_heads", "raw"}
        figures[f"{name}_ratio"] = case.keep_frames(0 if plain else case.planes)
    figures["lossless_zstd_planes"] = cases["lossless"].planes
    memcpy_s = float("inf")
    target = np.zeros_like(objects[0])
    for _ in range(rounds):
        for index, source in enumerate(objects):
            memcpy_s = min(memcpy_s, seconds(lambda source=source: np.copyto(target, source)))  # type: ignore[misc]
            for case in cases.values():
                case.round(index)
    for name, case in cases.items():
        figures |= case.figures(name)
    figures |= errors(cases["fp8"], kv)
    return figures | {"memcpy_gbps": objects[0].nbytes / memcpy_s / 1e9}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.codec", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="over all objects")
    parser.add_argument("--synthetic", action="store_true", help="random numbers, no model")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds, synthetic=arguments.synthetic)
    report("cold forms, one thread", figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
