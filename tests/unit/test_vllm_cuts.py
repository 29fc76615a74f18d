"""How vLLM's pages are cut for FP8, whom that keeps apart, and whom it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd_client.cuda.kernels import Axes
from kvd_client.errors import Unsupported
from kvd_client.identity import Group, Layout, Namespace
from kvd_client.vllm import frames
from kvd_client.vllm.cuts import Cut, Cuts, as_fp8, cut_groups
from kvd_client.vllm.messages import Identity
from kvd_client.vllm.options import BadOption, read_options
from kvd_client.vllm.pages import GroupPages, cut_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS, HEADS, SIZE, PAGES = 32, 2, 16, 2
LAYERS = ("a", "b")
CPU = ("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",)
GPU = ("vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",)
MIXED = (
    "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    "vllm.v1.attention.backends.flashinfer.FlashInferBackend",
)


@dataclass
class FullAttentionSpec:
    """Stands for vLLM's, by name and fields."""

    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = SIZE
    head_size_v: int = SIZE
    dtype: str = "torch.bfloat16"
    kv_quant_mode: int = 0
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    more_bytes: int = 0

    @property
    def page_size_bytes(self) -> int:
        item = 4 if "32" in self.dtype else 1 if "8" in self.dtype else 2
        return 2 * self.block_size * self.num_kv_heads * self.head_size * item + self.more_bytes


class SlidingWindowSpec(FullAttentionSpec):
    """Likewise."""


class MLAAttentionSpec(FullAttentionSpec):
    """Likewise."""


class MambaSpec(FullAttentionSpec):
    """Likewise."""


FULL = FullAttentionSpec()


def cut(
    *specs: Any,
    order: str = "LBHNC",
    writers: Sequence[str] = CPU,
    kernel: int = TOKENS,
) -> Cuts:
    """Cut groups of two layers, whose kernels have blocks of so many tokens."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"{number}{name}" for name in LAYERS])
        for number, spec in enumerate(specs)
    ]
    view = SimpleNamespace(shape=(4, HEADS, kernel, 2 * SIZE))
    tensors = {name: view for group in groups for name in group.layer_names}
    caches = SimpleNamespace(kv_cache_groups=groups)
    return cut_groups(caches, tensors, lambda _: writers, order)


CASES = [
    ("LBHNC", CPU, TOKENS),
    ("LBHNC", CPU, TOKENS // 2),
    ("LBNHC", GPU, TOKENS),
    ("BLNHC", GPU, TOKENS // 2),
    ("LBHNC", GPU, TOKENS),
    ("BLHNC", MIXED, TOKENS),
]


def page_of(kv: np.ndarray[Any, Any], order: str, writers: Sequence[str], kernel: int) -> bytes:
    """Lay (tokens, heads, K or V, size) out as a back end does, a kernel block after the other."""
    parts = []
    for start in range(0, TOKENS, kernel):
        block = kv[start : start + kernel]
        if writers == CPU:
            parts.append(block.transpose(1, 2, 0, 3))  # a head: its K, then its V
        elif order.endswith("NHC"):
            parts.append(block)
        else:
            parts.append(block.transpose(1, 0, 2, 3))
    return b"".join(part.tobytes() for part in parts)


@pytest.mark.parametrize(("order", "writers", "kernel"), CASES)
def test_k_and_v_of_each_head_have_a_scale_of_their_own(
    order: str, writers: Sequence[str], kernel: int
) -> None:
    """Heads of a billionth of others' size keep their accuracy: with a shared scale they were 0."""
    (made,) = cut(FULL, order=order, writers=writers, kernel=kernel)
    assert made is not None
    assert made.planes * made.axes.heads == 2 * HEADS
    rng = np.random.default_rng(1)
    shape = (len(LAYERS), PAGES, TOKENS, HEADS, 2, SIZE)
    sizes = 2.0 ** np.array([[-30, 0], [12, -18]])
    wide = (
        rng.standard_normal(shape)
        * sizes[:, :, None]
        * np.array([1, 2.0**40])[:, None, None, None, None, None]
    )
    bits = (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pages = [page_of(page, order, writers, kernel) for layer in bits for page in layer]
    group = cut_pages(GroupPages(np.zeros((2, 1), np.int64), 1 << 20, len(pages[0]), PAGES), made)
    parts = np.frombuffer(b"".join(pages), np.uint8).reshape(2, PAGES, made.planes, -1)
    values = np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).ravel()
    slot = memoryview(bytearray(group.object_bytes))
    frames.write(group.form, values, slot)
    out = np.empty_like(values)
    frames.read(group.form, slot, out)
    was, now = ((v.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for v in (values, out))
    error = np.abs(now - was)
    assert (error <= np.maximum(np.abs(was) / 16, 0)).mean() > 0.98
    back = out.reshape(2, made.planes, PAGES, -1).transpose(0, 2, 1, 3)
    assert group.starts.ravel().tolist() == [n * made.plane_bytes for n in range(made.planes)] * 2
    assert back.shape == parts.shape


def identity(cuts: Cuts = (), **change: Any) -> Identity:
    """Describe an engine with a group for each cut, as FP8 or, without, one exact group."""
    kinds = ["full", "sliding", "recurrent"][: max(1, len(cuts))]
    size = len(LAYERS) * PAGES * FULL.page_size_bytes
    groups = tuple(
        Group(kind, len(LAYERS), HEADS, SIZE, size, 64 if kind == "sliding" else 0)
        for kind in kinds
    )
    layout = Layout(PAGES * TOKENS, TOKENS, "bfloat16", groups, order="vllm;LBHNC;pages=32;/1")
    exact = Identity(Namespace("m", "1", "bfloat16"), layout, (TOKENS,) * len(kinds), TOKENS)
    exact = exact._replace(**change)
    return as_fp8(exact, cuts) if cuts else exact


def ids(of: Identity) -> tuple[bytes, bytes]:
    """What the daemon tells engines apart by."""
    return of.namespace.id, of.layout.id


def test_fp8_and_exact_engines_never_meet() -> None:
    """Both ids differ, and of two ways to cut a page one; engines of one way meet."""
    cuts = cut(FULL)
    one, exact = identity(cuts), identity()
    assert one.namespace.lossy
    assert not exact.namespace.lossy
    assert ids(one)[0] != ids(exact)[0]
    assert ids(one)[1] != ids(exact)[1]
    assert ids(one) == ids(identity(cut(FULL)))
    for other in (cut(FULL, kernel=16), cut(replace(FULL, dtype="torch.float16"))):
        assert identity(other).layout.id != one.layout.id
    half = exact.layout.groups[0].object_bytes // 2
    scales = len(LAYERS) * 2 * HEADS * 2
    assert one.layout.groups[0].object_bytes == 64 + scales + half
    assert one._replace(namespace=exact.namespace, layout=exact.layout) == exact


def test_windows_are_cut_and_states_and_latents_stay_exact() -> None:
    """Of a mixed model only what FP8 is for changes its size."""
    cuts = cut(FULL, SlidingWindowSpec(), MambaSpec())
    assert cuts == (*cut(FULL) * 2, None)
    assert cut(MLAAttentionSpec(), FULL)[0] is None
    made, exact = identity(cuts), identity((*cut(FULL) * 2, None))
    assert made.layout.groups == exact.layout.groups
    sizes = [group.object_bytes for group in made.layout.groups]
    assert sizes[0] == sizes[1] < sizes[2] == len(LAYERS) * PAGES * FULL.page_size_bytes


@pytest.mark.parametrize(
    ("specs", "more", "reason"),
    [
        ([MLAAttentionSpec()], {}, 'this model has none: leave "fp8" out'),
        ([MambaSpec()], {}, 'this model has none: leave "fp8" out'),
        ([FULL, replace(FULL, dtype="torch.float8_e4m3fn")], {}, 'few bits.*leave "fp8" out'),
        ([replace(FULL, dtype="torch.uint8")], {}, 'few bits.*leave "fp8" out'),
        ([replace(FULL, kv_quant_mode=2)], {}, 'few bits.*leave "fp8" out'),
        ([replace(FULL, head_size_v=8)], {}, 'one width.*leave "fp8" out'),
        ([replace(FULL, more_bytes=64)], {}, 'one width.*leave "fp8" out'),
        ([replace(FULL, num_head_slots=2)], {}, 'one width.*leave "fp8" out'),
        ([replace(FULL, state_content_bytes=64)], {}, 'one width.*leave "fp8" out'),
        ([FULL], {"writers": ["NewBackend"]}, "NewBackend.*--attention-backend.*Triton"),
        ([FULL], {"writers": ["plugin.FlashAttentionBackend"]}, "plugin.*--attention-backend"),
        ([FULL], {"writers": []}, "--attention-backend"),
        ([FULL], {"writers": [*CPU, *GPU]}, "differ"),
        ([FULL], {"kernel": 24}, "another shape"),
        ([FULL], {"writers": GPU, "kernel": 16}, "set --block-size 16"),
    ],
    ids=str,
)
def test_what_cannot_be_fp8_is_refused_with_the_mend(
    specs: list[Any], more: dict[str, Any], reason: str
) -> None:
    """One line that says why, and what to change."""
    with pytest.raises(Unsupported, match=reason) as error:
        cut(*specs, **more)
    assert "\n" not in str(error.value)
    assert "fp8" in str(error.value)


def test_the_option_is_off_and_takes_true_or_false() -> None:
    """FP8 is asked for, never a default."""
    assert read_options({}).fp8 is False
    assert read_options({"fp8": True}).fp8 is True
    with pytest.raises(BadOption, match="'fp8' must be true or false"):
        read_options({"fp8": "yes"})


def test_a_cut_says_its_bytes() -> None:
    """A part of a page, of two bytes a value or four."""
    assert Cut(1, Axes("bfloat16", 3, 2, 5)).plane_bytes == 60
    assert Cut(1, Axes("float32", 3, 2, 5)).plane_bytes == 120
