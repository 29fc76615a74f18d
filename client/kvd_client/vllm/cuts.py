"""How the pages of an engine's attention are cut for FP8: `"fp8": true` of the connector. Pure.

A scale belongs to K or V of one head of one layer, so kvd has to know where in a page these lie.
A page of vLLM is, in the order of its letters, H heads of N tokens of C values, C being K and V of
one token and head side by side; but the CPU's back end has all K of a block, then all V. As planes,
rows, heads and runs of `kvd_client.cuda.kernels.Axes`:

    NHC, side by side    one plane a layer        rows N   heads K0 V0 K1 V1 ..   run: a vector
    HNC, side by side    one plane a layer, head  rows N   heads K V              run: a vector
    HNC, K before V      one plane a layer        rows 1   heads K0 V0 K1 V1 ..   run: a block's

Layouts and namespaces made here are no exact engine's: both ids differ.

Invariants:

U1. A group is cut only if all that its pages hold is K and V of one width, in floats of 16 or 32
    bits, written by a back end whose pages are known; other attention with K and V is refused, with
    the mend. Latents and recurrent states stay exact beside it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd_client.cuda.forms import FP8_ORDER, Form
from kvd_client.cuda.kernels import ITEM_BYTES, Axes
from kvd_client.errors import Unsupported
from kvd_client.vllm.identity import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvd_client.vllm.messages import Identity

_OWN: Final = "vllm.v1.attention.backends"
"""A plug-in may have classes of the same names, and other pages."""
K_BEFORE_V: Final = frozenset({f"{_OWN}.cpu_attn.CPUAttentionBackend"})
SIDE_BY_SIDE: Final = frozenset(
    {
        f"{_OWN}.flash_attn.FlashAttentionBackend",
        f"{_OWN}.flashinfer.FlashInferBackend",
        f"{_OWN}.flex_attention.FlexAttentionBackend",
        f"{_OWN}.triton_attn.TritonAttentionBackend",
    }
)
_LEAVE: Final = 'or leave "fp8" out of kv_connector_extra_config'


class Cut(NamedTuple):
    """How the page of one layer is cut.

    Attributes:
        planes: Parts of one size, one after the other.
        axes: Of each part.
    """

    planes: int
    axes: Axes

    @property
    def plane_bytes(self) -> int:
        """Bytes of a part."""
        return self.axes.page_values * ITEM_BYTES[self.axes.dtype]


Cuts = tuple[Cut | None, ...]
"""One for each group; None for those that stay exact."""


def cut_groups(
    caches: Any,  # noqa: ANN401 - vLLM's KVCacheConfig
    tensors: Mapping[str, Any],
    writers: Callable[[Sequence[str]], Sequence[str]],
    order: str,
) -> Cuts:
    """Find out how each group's pages are cut.

    Args:
        caches: How vLLM placed them.
        tensors: The view of each layer, (blocks, heads, tokens, content) by its axes.
        writers: Names the classes of the attention back ends of some layers, with their modules.
        order: Physical order of the caches, as `KVCacheLayout` names it.

    Raises:
        Unsupported: FP8 is refused; the text says why, and what to do.
    """
    cuts: list[Cut | None] = []
    for group in caches.kv_cache_groups:
        if KINDS.get(type(group.kv_cache_spec).__name__) in {"full", "sliding"}:
            views = [tensors[name] for name in group.layer_names if name in tensors]
            tokens = {int(view.shape[-2]) for view in views}
            cuts.append(_cut(group.kv_cache_spec, tokens, writers(group.layer_names), order))
        else:
            cuts.append(None)
    if not any(cuts):
        raise Unsupported(f'"fp8" is for attention with K and V, this model has none: {_rest()}')
    return tuple(cuts)


def _rest() -> str:
    return _LEAVE.removeprefix("or ")


def _cut(spec: Any, tokens: set[int], writers: Sequence[str], order: str) -> Cut:  # noqa: ANN401
    """Cut one group's pages (U1).

    Args:
        spec: The group's, of attention with K and V.
        tokens: Tokens a block of the kernels, of each layer; a block of the engine has some.
        writers: Classes of its back ends.
        order: As in `cut_groups`.
    """
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or int(spec.kv_quant_mode):
        raise Unsupported(f'"fp8": KV is kept in few bits already ({dtype}): {_rest()}')
    heads, size, block = int(spec.num_kv_heads), int(spec.head_size), int(spec.block_size)
    plain = spec.page_size_bytes == 2 * block * heads * size * ITEM_BYTES[dtype]
    if not plain or spec.head_size_v != size or spec.state_content_bytes or spec.num_head_slots:
        raise Unsupported(f'"fp8": pages hold more than K and V of one width: {_rest()}')
    unknown = sorted(set(writers) - K_BEFORE_V - SIDE_BY_SIDE)
    if unknown or not writers:
        known = ", ".join(name.rpartition(".")[2] for name in sorted(SIDE_BY_SIDE))
        raise Unsupported(
            f'"fp8": how {", ".join(unknown) or "nobody"} lays out a page is not known to kvd:'
            f" choose another --attention-backend ({known}), {_LEAVE}"
        )
    kernel = tokens.pop() if len(tokens) == 1 else 0
    if kernel < 1 or block % kernel:
        raise Unsupported(f'"fp8": the caches have another shape than vLLM says: {_rest()}')
    if set(writers) <= K_BEFORE_V:
        return Cut(1, Axes(dtype, block // kernel, 2 * heads, kernel * size))
    if set(writers) & K_BEFORE_V:
        raise Unsupported(f'"fp8": back ends of one group differ in their pages: {_rest()}')
    if order.index("N") < order.index("H"):
        return Cut(1, Axes(dtype, block, 2 * heads, size))
    if kernel != block:
        raise Unsupported(
            f'"fp8": blocks of {block} tokens are split for the kernels: set --block-size {kernel},'
            f" {_LEAVE}"
        )
    return Cut(heads, Axes(dtype, block, 2, size))


def as_fp8(identity: Identity, cuts: Cuts) -> Identity:
    """Give the identity of an engine whose groups are kept as FP8, where they are cut."""
    layout = identity.layout
    groups = []
    for group, pages, cut in zip(layout.groups, identity.pages, cuts, strict=True):
        if cut is not None:
            form = Form(group.layers * cut.planes, pages, cut.plane_bytes, cut.axes)
            assert form.useful_bytes == group.object_bytes
            groups.append(group._replace(object_bytes=form.object_bytes))
        else:
            groups.append(group)
    digest = blake2b(repr(cuts).encode(), digest_size=16, person=b"kvd.vllm.cuts.1").hexdigest()
    order = f"{FP8_ORDER}:{digest}:{layout.order}"
    return identity._replace(
        namespace=identity.namespace._replace(lossy=True).check(),
        layout=layout._replace(dtype="uint8", groups=tuple(groups), order=order).check(),
    )
