"""Copy many pages in one call without the GIL: the numba kernel behind `kvd_client.paged`.

Imports numba, so only `paged` imports it, when a `PagedKV` is built, and lives without it.

Why not memcpy a page (docs/adr/0006): a page is smaller than the size from which libc streams past
the caches, so every stored line is first read. Non-temporal stores in four streams a page avoid
that, and one call for a whole object leaves the GIL once instead of once a page.

Invariants:
    P1  every page index in [0, len(target)) is claimed by exactly one thread (atomic add)
    P2  `shared[1]` counts a page only after its stores are fenced, so whoever reads
        `shared[1] == len(target)` may read every target byte
    P3  a thread that arrives after the last claim touches nothing but `shared`
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-not-found, import-untyped, unused-ignore]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

STREAMS = 4  # a page is cut in four equal parts that are copied side by side
UNROLL = 4  # cache lines of each stream in one turn of the loop
LINE_BYTES = 64
PAGE_MULTIPLE_BYTES = STREAMS * UNROLL * LINE_BYTES  # a streamed page has a multiple of this
PREFETCH_BYTES = 512  # how far ahead of each stream to read; 256..512 best, 1024 worse (ADR 0006)

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_BYTE_PTR = ir.IntType(8).as_pointer()
_LINE = ir.VectorType(_I64, LINE_BYTES // 8)


def _pointer(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """Give `address + offset` as a pointer to `kind`."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _emit_stream(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Emit the copy loop: all loads of a turn, then all its non-temporal stores."""
    del signature
    target, source, size = arguments
    span = builder.udiv(size, ir.Constant(_I64, STREAMS))
    flag = builder.module.add_metadata([ir.Constant(_I32, 1)])
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch",
        [_BYTE_PTR],
        ir.FunctionType(ir.VoidType(), [_BYTE_PTR, _I32, _I32, _I32]),
    )
    hints = [ir.Constant(_I32, hint) for hint in (0, 0, 1)]  # read, streaming, data

    before = builder.block
    loop = builder.append_basic_block("stream")
    after = builder.append_basic_block("stream.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    turn = builder.phi(_I64)
    turn.add_incoming(ir.Constant(_I64, 0), before)
    lines = []
    for stream in range(STREAMS):
        start = builder.add(turn, builder.mul(span, ir.Constant(_I64, stream)))
        for line in range(UNROLL):
            offset = builder.add(start, ir.Constant(_I64, line * LINE_BYTES))
            ahead = builder.add(offset, ir.Constant(_I64, PREFETCH_BYTES))
            builder.call(prefetch, [_pointer(builder, source, ahead, ir.IntType(8)), *hints])
            lines.append(
                (offset, builder.load(_pointer(builder, source, offset, _LINE), align=1)),
            )
    for offset, line in lines:
        store = builder.store(line, _pointer(builder, target, offset, _LINE), align=LINE_BYTES)
        store.set_metadata("nontemporal", flag)
    following = builder.add(turn, ir.Constant(_I64, UNROLL * LINE_BYTES))
    turn.add_incoming(following, loop)
    builder.cbranch(builder.icmp_unsigned("<", following, span), loop, after)
    builder.position_at_end(after)
    return context.get_dummy_value()


def _emit_plain(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Emit libc's memcpy, for pages that cannot be streamed."""
    del signature
    target, source, size = arguments
    raw_memcpy: Any = cgutils.raw_memcpy
    raw_memcpy(
        builder,
        builder.inttoptr(target, _BYTE_PTR),
        builder.inttoptr(source, _BYTE_PTR),
        size,
        1,
    )
    return context.get_dummy_value()


def _emit_fence(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Emit a full fence: non-temporal stores are weakly ordered, even on x86."""
    del signature, arguments
    builder.fence("seq_cst")
    return context.get_dummy_value()


def _emit_fetch_add(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Emit one atomic 64-bit add and give the value before it."""
    del context, signature
    address, amount = arguments
    pointer = builder.inttoptr(address, _I64.as_pointer())
    return builder.atomic_rmw("add", pointer, amount, "seq_cst")


def _type_page(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    del typing_context, target, source, size
    return types.void(types.int64, types.int64, types.int64), _emit_stream


def _type_plain(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    del typing_context, target, source, size
    return types.void(types.int64, types.int64, types.int64), _emit_plain


def _type_fence(typing_context: Any) -> Any:
    del typing_context
    return types.void(), _emit_fence


def _type_fetch_add(typing_context: Any, address: Any, amount: Any) -> Any:
    del typing_context, address, amount
    return types.int64(types.int64, types.int64), _emit_fetch_add


_stream_page: Any = intrinsic(_type_page)
_plain_page: Any = intrinsic(_type_plain)
_fence: Any = intrinsic(_type_fence)
_fetch_add: Any = intrinsic(_type_fetch_add)


def _copy_pages(
    target: Any,
    source: Any,
    page_bytes: int,
    claim_pages: int,
    streamed: int,
    shared: Any,
    spins_max: int,
) -> int:
    """Claim and copy pages until none is left; run by each thread of one copy.

    Args:
        target: (pages,) int64 addresses to write; 64-byte aligned if `streamed`.
        source: (pages,) int64 addresses to read.
        page_bytes: bytes of a page; a multiple of `PAGE_MULTIPLE_BYTES` if `streamed`.
        claim_pages: pages taken in one claim.
        streamed: 1 for non-temporal stores, 0 for memcpy.
        shared: (2,) int64, zeroed by the caller: next page to claim, pages done.
        spins_max: how often to look whether the other threads are done before returning.

    Returns:
        Pages done by all threads; the copy is complete when it equals len(target).

    """
    pages = len(target)
    claim_at = shared.ctypes.data
    done_at = claim_at + 8
    start: int = _fetch_add(claim_at, claim_pages)
    while start < pages:
        stop = min(start + claim_pages, pages)
        for index in range(start, stop):
            if streamed:
                _stream_page(target[index], source[index], page_bytes)
            else:
                _plain_page(target[index], source[index], page_bytes)
        _fence()  # P2
        _fetch_add(done_at, stop - start)
        start = _fetch_add(claim_at, claim_pages)
    done = _fetch_add(done_at, 0)
    spins = 0
    while done < pages and spins < spins_max:
        done = _fetch_add(done_at, 0)
        spins += 1
    return int(done)


def _compiled() -> Any:
    """Compile for this CPU, from numba's cache where the cache folder can be written."""
    signature = "int64(int64[::1], int64[::1], int64, int64, int64, int64[::1], int64)"
    try:
        return njit(signature, nogil=True, cache=True)(_copy_pages)
    except RuntimeError:  # numba: "no locator available", nowhere to keep the cache
        return njit(signature, nogil=True)(_copy_pages)


copy_pages = _compiled()
