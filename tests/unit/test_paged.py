"""Gather and scatter agree with a byte-by-byte model, for every form, order and copier."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvd_client import _copiers  # noqa: E402
from kvd_client.paged import PagedKV  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, BLOCKS, PAGE, HEADS, DIM = 3, 12, 16, 2, 64


def kernels() -> list[_copiers.KernelName]:
    """Give the copiers that can be built and work here."""
    works: list[_copiers.KernelName] = []
    for name in _copiers.KERNEL_NAMES:
        try:
            _copiers._prove(_copiers.build_copier(name, 2))
        except Exception:  # noqa: BLE001, S112 - that is the question
            continue
        works.append(name)
    return works


KERNELS = kernels()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> _copiers.KernelName:
    """Every copier in turn."""
    name: _copiers.KernelName = request.param
    return name


def filled(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    """A tensor of random bytes: NaN patterns must survive too."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return raw.view(dtype)


def raw(tensor: Any) -> bytes:
    """The tensor's bytes in logical order."""
    content: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return content


def expected(planes: list[Any], ids: list[int]) -> bytes:
    """The object, as the module's docstring defines it, for planes with dense logical order."""
    return b"".join(raw(plane[block]) for plane in planes for block in ids)


def forms() -> dict[str, Any]:
    """One engine in every form: (layers, form, the planes it must be taken as)."""
    kv_blocks = [filled(2, BLOCKS, PAGE, HEADS, DIM) for _ in range(LAYERS)]
    blocks_kv = [filled(BLOCKS, 2, PAGE, HEADS, DIM) for _ in range(LAYERS)]
    hnd = [
        (filled(BLOCKS, HEADS, PAGE, DIM), filled(BLOCKS, HEADS, PAGE, DIM)) for _ in range(LAYERS)
    ]
    nhd = [
        (filled(BLOCKS, PAGE, HEADS, DIM), filled(BLOCKS, PAGE, HEADS, DIM)) for _ in range(LAYERS)
    ]
    latent = [filled(BLOCKS, PAGE, 576) for _ in range(LAYERS)]
    # all layers in one allocation, block first: the widest stride an engine uses
    cross = filled(BLOCKS, LAYERS, 2, PAGE, HEADS, DIM)
    crossed = [cross[:, layer] for layer in range(LAYERS)]
    return {
        "kv_blocks": (kv_blocks, "kv_blocks", [t[i] for t in kv_blocks for i in range(2)]),
        "blocks_kv": (blocks_kv, "blocks_kv", [t[:, i] for t in blocks_kv for i in range(2)]),
        "hnd": (hnd, "pairs", [t for pair in hnd for t in pair]),
        "nhd": (nhd, "pairs", [t for pair in nhd for t in pair]),
        "latent": (latent, "latent", latent),
        "crossed": (crossed, "blocks_kv", [t[:, i] for t in crossed for i in range(2)]),
    }


@pytest.mark.parametrize("name", list(forms()))
def test_round_trip_in_every_form(name: str, kernel: _copiers.KernelName) -> None:
    """An object has the defined bytes, and scattering it elsewhere restores just those blocks."""
    layers, form, planes = forms()[name]
    paged = PagedKV.from_layers(layers, form, PAGE, threads=2, kernel=kernel)
    ids, others = [7, 0, 11, 3], [1, 2, 5, 10]
    out = bytearray(paged.object_bytes(len(ids)))
    paged.gather(ids, out)
    assert bytes(out) == expected(planes, ids)

    untouched = [block for block in range(BLOCKS) if block not in others]
    before = expected(planes, untouched)
    paged.scatter(others, memoryview(bytes(out)))
    assert expected(planes, others) == bytes(out)
    assert expected(planes, untouched) == before


def test_forms_of_one_engine_give_the_same_object() -> None:
    """How K and V are stored together does not show in the object."""
    apart = [(filled(BLOCKS, PAGE, HEADS, DIM), filled(BLOCKS, PAGE, HEADS, DIM)) for _ in "123"]
    objects = []
    for layers, form in (
        (apart, "pairs"),
        ([torch.stack(pair) for pair in apart], "kv_blocks"),
        ([torch.stack(pair, dim=1) for pair in apart], "blocks_kv"),
    ):
        paged = PagedKV.from_layers(layers, form)  # type: ignore[arg-type]
        out = bytearray(paged.object_bytes(2))
        paged.gather([4, 9], out)
        objects.append(bytes(out))
    assert objects[0] == objects[1] == objects[2]


def test_permuted_page_is_copied_in_physical_order() -> None:
    """An HND cache seen through an NHD view gives HND bytes and says so in `page_shape`."""
    physical = filled(BLOCKS, HEADS, PAGE, DIM)
    paged = PagedKV([physical.permute(0, 2, 1, 3)], PAGE)
    assert paged.page_shape == (HEADS, PAGE, DIM)
    out = bytearray(paged.object_bytes(1))
    paged.gather([5], out)
    assert bytes(out) == raw(physical[5])


@given(
    page_bytes=st.sampled_from([2, 48, 64, 1000, 1024, 4096, 5120, 18432]),
    gap_bytes=st.sampled_from([0, 1, 64, 1024]),
    shift_bytes=st.sampled_from([0, 1, 8, 64]),
    tables=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True), min_size=1, max_size=3
    ),
    which=st.sampled_from(KERNELS),
    threads=st.integers(1, 3),
)
@settings(deadline=None)
def test_any_size_stride_and_alignment(
    *,
    page_bytes: int,
    gap_bytes: int,
    shift_bytes: int,
    tables: list[list[int]],
    which: _copiers.KernelName,
    threads: int,
) -> None:
    """Streamed or not, whatever the alignment: batches are right and nothing beside is written."""
    stride = page_bytes + gap_bytes
    backings = [filled(10 * stride + shift_bytes, dtype=torch.uint8) for _ in range(2)]
    planes = [
        backing.as_strided((10, 1, page_bytes), (stride, page_bytes, 1), shift_bytes)
        for backing in backings
    ]
    paged = PagedKV(planes, 1, threads=threads, kernel=which)
    edge = 128
    outs = [bytearray(b"\xa5" * (paged.object_bytes(len(ids)) + 2 * edge)) for ids in tables]
    views = [memoryview(out)[edge:-edge] for out in outs]
    paged.gather_many(list(zip(tables, views, strict=True)))
    for ids, out in zip(tables, outs, strict=True):
        assert bytes(out[edge:-edge]) == expected(planes, ids)
        assert out[:edge] == out[-edge:] == b"\xa5" * edge

    models = [backing.clone() for backing in backings]
    fresh = [os.urandom(paged.object_bytes(len(tables[0])))]
    paged.scatter_many([(tables[0], fresh[0])])
    at = 0
    for model in models:
        for block in tables[0]:
            page = torch.frombuffer(bytearray(fresh[0][at : at + page_bytes]), dtype=torch.uint8)
            start = shift_bytes + block * stride
            model[start : start + page_bytes] = page
            at += page_bytes
    for backing, model in zip(backings, models, strict=True):
        assert torch.equal(backing, model)


def test_block_ids_in_any_integer_form() -> None:
    """Lists, tuples, ranges, numpy and torch integers name the same blocks."""
    plane = filled(BLOCKS, PAGE, DIM)
    paged = PagedKV([plane])
    for ids in (
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], dtype=np.uint16),
        np.array([1, 9, 2, 9, 3], dtype=np.int32)[::2],
        torch.tensor([1, 2, 3], dtype=torch.int32),
    ):
        out = bytearray(paged.object_bytes(3))
        paged.gather(ids, out)
        assert bytes(out) == expected([plane], [1, 2, 3])


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([], "integers"),
        ([0, -1], "within"),
        ([0, BLOCKS], "within"),
        ([2**40], "within"),
        ([[0, 1]], "integers"),
        ([0.0, 1.0], "integers"),
        ([True, False], "integers"),
        (["0"], "integers"),
    ],
)
def test_bad_block_ids_move_nothing(ids: list[Any], why: str, kernel: _copiers.KernelName) -> None:
    """A bad id anywhere in a batch is refused before its good neighbours are copied."""
    plane = filled(BLOCKS, PAGE, DIM)
    before = raw(plane)
    paged = PagedKV([plane], kernel=kernel)
    good, other = bytearray(paged.object_bytes(2)), bytearray(paged.object_bytes(2))
    with pytest.raises(ValueError, match=why):
        paged.gather_many([([1, 2], good), (ids, other)])
    with pytest.raises(ValueError, match=why):
        paged.scatter_many([([1, 2], b"\1" * len(good)), (ids, b"\1" * len(good))])
    assert not any(good)
    assert raw(plane) == before


def test_bad_buffers_move_nothing() -> None:
    """Too short, too long, read-only and strided buffers are refused for the whole batch."""
    plane = filled(BLOCKS, PAGE, DIM)
    before = raw(plane)
    paged = PagedKV([plane])
    size = paged.object_bytes(2)
    good = bytearray(size)
    bad: list[Any] = [
        bytearray(size - 1),
        bytearray(size + 1),
        memoryview(bytearray(2 * size))[::2],
    ]
    for buffer in [*bad, bytes(size)]:
        with pytest.raises(ValueError, match="buffer"):
            paged.gather_many([([1, 2], good), ([3, 4], buffer)])
    for buffer in bad:
        with pytest.raises(ValueError, match="buffer"):
            paged.scatter_many([([1, 2], bytes(size)), ([3, 4], buffer)])
    assert not any(good)
    assert raw(plane) == before
    paged.gather_many([])
    paged.scatter_many([])


def test_bad_planes_are_refused_with_the_reason() -> None:
    """What cannot be copied as pages does not become a PagedKV."""
    good = filled(BLOCKS, PAGE, HEADS, DIM)
    for planes, why in (
        ([], "at least one"),
        ([good, filled(BLOCKS, PAGE, HEADS, 2 * DIM)], "plane 1: pages of"),
        ([good, filled(BLOCKS, HEADS, PAGE, DIM)], "plane 1: pages of"),
        ([good, filled(BLOCKS, PAGE, HEADS, DIM, dtype=torch.float16)], "plane 1: pages of"),
        ([good, filled(BLOCKS + 1, PAGE, HEADS, DIM)], "plane 1: 13 blocks"),
        ([good[:, :, :, ::2]], "not contiguous"),
        ([good[:, :, :1]], "not contiguous"),
        ([good[:1].expand(BLOCKS, -1, -1, -1)], "overlap"),
        ([good.to("meta")], "not on the CPU"),
        ([filled(BLOCKS * PAGE)], "is not"),
        ([filled(BLOCKS, 8, DIM)], "no dimension"),
    ):
        with pytest.raises(ValueError, match=why):
            PagedKV(planes)
    with pytest.raises(ValueError, match="threads"):
        PagedKV([good], threads=0)


def test_bad_layers_are_refused_with_the_reason() -> None:
    """A layer that does not have the form it is said to have is named."""
    pair = (filled(BLOCKS, PAGE, DIM), filled(BLOCKS, PAGE, DIM))
    for layers, form, why in (
        ([torch.stack(pair)], "blocks_kv", "layer 0: form 'blocks_kv'"),
        ([torch.stack(pair, dim=1)], "kv_blocks", "layer 0: form 'kv_blocks'"),
        ([pair], "latent", "not a tuple"),
        ([pair[0]], "pairs", "needs a tuple"),
        ([pair[0]], "sideways", "unknown form"),
    ):
        with pytest.raises(ValueError, match=why):
            PagedKV.from_layers(layers, form)  # type: ignore[arg-type]


@pytest.fixture
def large() -> Iterator[tuple[PagedKV, mmap.mmap, list[Any]]]:
    """A PagedKV whose object of 16 pages is 16 MiB, so that helpers take part, and a slot."""
    planes = [filled(24, PAGE, 8, 128) for _ in range(32)]
    paged = PagedKV(planes, threads=3)
    fd = os.memfd_create("slot")
    os.ftruncate(fd, paged.object_bytes(16))
    with mmap.mmap(fd, 0) as slot:
        os.close(fd)
        yield paged, slot, planes


def test_helpers_share_a_large_copy(large: tuple[PagedKV, mmap.mmap, list[Any]]) -> None:
    """Several threads, several at once: every byte is copied, into shared memory too."""
    paged, slot, planes = large
    ids = list(range(16))
    model = expected(planes, ids)
    paged.gather(ids, slot)
    assert slot[:] == model
    with ThreadPoolExecutor(4) as pool:
        outs = [bytearray(len(model)) for _ in range(8)]
        list(pool.map(lambda out: paged.gather(ids, out), outs))
    assert all(out == model for out in outs)
    paged.scatter(range(8, 24), slot)
    assert expected(planes, list(range(8, 24))) == model


def test_a_copy_leaves_the_gil(
    large: tuple[PagedKV, mmap.mmap, list[Any]],
    kernel: _copiers.KernelName,
) -> None:
    """Another Python thread runs on while objects are copied, though nothing takes the GIL away."""
    _, slot, planes = large
    paged = PagedKV(planes, threads=1, kernel=kernel)
    ticks, stop = 0, False

    def tick() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0)

    paged.gather(range(16), slot)
    thread = threading.Thread(target=tick)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        before, end = ticks, time.monotonic() + 10
        while ticks - before <= 20 and time.monotonic() < end:
            paged.gather(range(16), slot)
        during = ticks - before
    finally:
        stop = True
        sys.setswitchinterval(interval_s)
        thread.join()
    assert during > 20


@pytest.mark.skipif("numba" not in KERNELS, reason="no numba")
def test_a_fork_gets_helpers_of_its_own(large: tuple[PagedKV, mmap.mmap, list[Any]]) -> None:
    """A child forked after a threaded copy does not wait for threads it does not have."""
    paged, slot, planes = large
    paged.gather(range(16), slot)
    copier = paged._copier
    assert isinstance(copier, _copiers.NumbaCopier)
    assert copier._pool is not None
    first = copier._pool
    copier._pool_pid += 1  # as a fork would see it; really forking a threaded pytest is a risk
    paged.gather(range(8, 24), slot)
    assert copier._pool is not first
    assert slot[:] == expected(planes, list(range(8, 24)))


def test_late_helpers_do_not_hold_up_the_caller(
    large: tuple[PagedKV, mmap.mmap, list[Any]],
) -> None:
    """When the helpers never get to run, the caller copies it all and returns."""
    paged, slot, planes = large
    copier = paged._copier
    if not isinstance(copier, _copiers.NumbaCopier):
        pytest.skip("no numba")
    gate = threading.Event()
    pool = copier._helpers()
    blocked = [pool.submit(gate.wait, 45) for _ in range(copier._threads - 1)]
    try:
        paged.gather(range(16), slot)
        assert slot[:] == expected(planes, list(range(16)))
        assert not any(future.done() for future in blocked)
        slot[:4096] = bytes(4096)
    finally:
        gate.set()
    for future in blocked:
        future.result()
    assert slot[:4096] == bytes(4096)  # the late helpers have touched nothing (P3)


def test_a_copier_that_lies_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails or copies wrong bytes is passed over, and copies still work."""

    class Lying(_copiers.MemmoveCopier):
        """Copies nothing."""

        def copy(self, target: Any, source: Any, page_bytes: int) -> None:
            """Pretend."""

    def broken(threads: int) -> Any:
        raise OSError(threads)

    monkeypatch.setattr(_copiers, "NumbaCopier", broken)
    monkeypatch.setattr(_copiers, "SyscallCopier", Lying)
    paged = PagedKV([filled(BLOCKS, PAGE, DIM)])
    assert paged.kernel == "memmove"


def test_a_refused_system_call_is_an_oserror() -> None:
    """Memory that is not there is an error, not a short object."""
    copier = _copiers.SyscallCopier()
    target = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(OSError, match="too little"):
        copier.copy(np.array([target.ctypes.data]), np.array([4096]), 4096)


def test_importing_is_light() -> None:
    """The module imports neither torch, numpy, numba nor asyncio before a PagedKV is built."""
    heavy = {"torch", "numpy", "numba", "asyncio"}
    code = f"import sys, kvd_client.paged; print(sorted({heavy!r} & set(sys.modules)))"
    path = os.pathsep.join(["client", *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"
