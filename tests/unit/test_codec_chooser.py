"""Whether zstd pays: by samples and rates alone."""

from __future__ import annotations

import pytest

from kvd.codec import ALL_PLANES, Chooser, Encoded, PlaneSize, Rates
from kvd.codec.chooser import gain


def encoded(*stored: int | None, raw: int = 1000) -> Encoded:
    """Make what encode returns; None for a plane that was not tried."""
    planes = tuple(PlaneSize(raw, raw if s is None else s, s is not None, 5) for s in stored)
    return Encoded("lossless", sum(plane.stored_bytes for plane in planes), planes)


def test_starts_with_samples_then_takes_every_kth() -> None:
    """The first objects and every k-th after them try all planes, the others what pays."""
    chooser = Chooser(first=3, every=4)
    given = []
    for _ in range(15):
        given.append(chooser.next_planes())
        chooser.record(
            encoded(*(None if not given[-1] >> i & 1 else s for i, s in enumerate((999, 400))))
        )
    sampled = [index for index, planes in enumerate(given) if planes == ALL_PLANES]
    assert sampled == [0, 1, 2, 6, 10, 14]
    assert {planes for index, planes in enumerate(given) if index not in sampled} == {0b10}


def test_nothing_pays_before_a_sample() -> None:
    """Objects that are not sampled, before any result is in, are stored as they are."""
    chooser = Chooser(first=1, every=100)
    assert chooser.next_planes() == ALL_PLANES
    assert chooser.next_planes() == 0


@pytest.mark.parametrize(("stored", "pays"), [(950, True), (951, False), (1000, False), (1, True)])
def test_share_saved_decides(stored: int, pays: bool) -> None:  # noqa: FBT001
    """A plane is compressed from the least share on."""
    chooser = Chooser(saved_share_min=0.05)
    chooser.record(encoded(stored))
    assert chooser.paying() == int(pays)


def test_no_saving_never_pays() -> None:
    """Even where any saving would do, none is none."""
    chooser = Chooser(saved_share_min=0.0)
    chooser.record(encoded(1000))
    assert chooser.paying() == 0


def test_only_the_last_samples_count() -> None:
    """Data that changes is followed after as many samples as are kept."""
    chooser = Chooser(first=2)
    for stored, pays in ((500, 1), (1000, 1), (1000, 0), (880, 1)):
        chooser.record(encoded(stored))
        assert chooser.paying() == pays


def test_planes_not_tried_say_nothing() -> None:
    """A plane left as it is does not count as one that saved nothing."""
    chooser = Chooser(first=2)
    chooser.record(encoded(500))
    for _ in range(5):
        chooser.record(encoded(None))
    assert chooser.paying() == 1


def test_a_disk_faster_than_the_threads_turns_it_off() -> None:
    """Compression that would slow loads down is not worth the room it saves."""
    chooser = Chooser()
    chooser.record(encoded(500))
    assert chooser.paying(Rates(disk_bytes_s=1e9, unzstd_bytes_s=2e9)) == 1
    assert chooser.paying(Rates(disk_bytes_s=6e9, unzstd_bytes_s=2e9)) == 0
    assert chooser.paying(Rates(disk_bytes_s=6e9, unzstd_bytes_s=2e9, threads=4)) == 1


def test_gain() -> None:
    """Reading and decompressing overlap: the slower of the two sets the pace."""
    assert gain(0.5, Rates()) == 2
    assert gain(0.5, Rates(1e9, 1.5e9, 1)) == 1.5
    assert gain(0.5, Rates(1e9, 1.5e9, 2)) == 2
    assert gain(0.0, Rates(2e9, 1e9, 1)) == 0.5


@pytest.mark.parametrize(
    "bad", [{"first": 0}, {"every": 0}, {"saved_share_min": 1.0}, {"saved_share_min": -0.1}]
)
def test_senseless_settings_are_refused(bad: dict[str, float]) -> None:
    """A chooser that could not work is not made."""
    with pytest.raises(ValueError, match="at least 1"):
        Chooser(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("write_gbps", "zstd_gbps", "pays"),
    [(0, 0, True), (2, 0, True), (0, 0.1, True), (1.9, 1.0, True), (2.1, 1.0, False)],
)
def test_slower_than_writing_is_off(write_gbps: float, zstd_gbps: float, pays: bool) -> None:  # noqa: FBT001
    """What two threads cannot compress as fast as the disk would take it stays as it is."""
    chooser = Chooser()
    chooser.record(encoded(500))
    rates = Rates(threads=2, write_bytes_s=write_gbps * 1e9, zstd_bytes_s=zstd_gbps * 1e9)
    assert chooser.paying(rates) == int(pays)
