"""Whether zstd pays, decided per namespace on its own objects.

Every `every`-th object and the first `first` of them are encoded with all byte planes compressed;
the rest only with those for which that paid in the last `first` samples. Bytes decide, and the
rates the caller has measured: compression that would make loading, or writing, slower than the
disk does without it is off.

Pure: no clock, no randomness; the same calls give the same answers. One thread at a time (the
loop); objects may be encoded by others meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.codec.frame import BYTE_PLANES_MAX

if TYPE_CHECKING:
    from kvd.codec import Encoded

ALL_PLANES: Final = (1 << BYTE_PLANES_MAX) - 1


class Rates(NamedTuple):
    """What limits a load and a store, all in bytes a second.

    Attributes:
        disk_bytes_s: What the tier reads at its usual queue depth; 0 while not known.
        unzstd_bytes_s: Bytes of byte planes that one thread decompresses (`Decoded`).
        threads: That compress or decompress at once.
        write_bytes_s: What the tier writes; 0 while not known, or where it does not matter.
        zstd_bytes_s: Bytes of byte planes that one thread encodes; 0 while not known.
    """

    disk_bytes_s: float = 0.0
    unzstd_bytes_s: float = 1e9
    threads: int = 1
    write_bytes_s: float = 0.0
    zstd_bytes_s: float = 0.0


def gain(saved_share: float, rates: Rates) -> float:
    """Give how many times faster a byte plane loads compressed, reading and decompressing at once.

    The disk delivers `1 / (1 - saved_share)` times as many plane bytes, and the threads may not
    keep up. Latency of a single object is not counted: loads are batches.
    """
    assert 0 <= saved_share < 1
    smaller = 1 / (1 - saved_share)
    if rates.disk_bytes_s <= 0:
        return smaller
    return min(smaller, rates.unzstd_bytes_s * rates.threads / rates.disk_bytes_s)


def keeps_up(rates: Rates) -> bool:
    """Tell whether a byte plane is compressed no slower than the disk would write it as it is."""
    return not rates.zstd_bytes_s or rates.zstd_bytes_s * rates.threads >= rates.write_bytes_s


class Chooser:
    """One namespace's and form's choice of byte planes to compress."""

    def __init__(self, *, first: int = 8, every: int = 64, saved_share_min: float = 0.05) -> None:
        """Start by sampling.

        Args:
            first: Objects to sample at the start, and the number of samples that count.
            every: After those, each so many-th object is a sample.
            saved_share_min: Of a byte plane's bytes, what compression must save to be worth it.

        Raises:
            ValueError: A number that makes no sense.
        """
        if first < 1 or every < 1 or not 0 <= saved_share_min < 1:
            raise ValueError("first and every must be at least 1, saved_share_min in [0, 1)")
        self._first = first
        self._every = every
        self._gain_min = 1 / (1 - saved_share_min)
        self._given = 0
        self._samples: tuple[deque[tuple[int, int]], ...] = tuple(
            deque(maxlen=first) for _ in range(BYTE_PLANES_MAX)
        )

    def next_planes(self, rates: Rates = Rates()) -> int:  # noqa: B008 - immutable
        """Give the byte planes to compress of the next object: `encode(planes=...)`."""
        index = self._given
        self._given += 1
        if index < self._first or (index - self._first) % self._every == self._every - 1:
            return ALL_PLANES
        return self.paying(rates)

    def record(self, encoded: Encoded) -> None:
        """Learn from an object: what was not tried says nothing."""
        for samples, plane in zip(self._samples, encoded.planes, strict=False):
            if plane.tried:
                samples.append((plane.raw_bytes, plane.stored_bytes))

    def paying(self, rates: Rates = Rates()) -> int:  # noqa: B008 - immutable
        """Give the byte planes for which compression pays by the samples so far."""
        if not keeps_up(rates):
            return 0
        mask = 0
        for index, samples in enumerate(self._samples):
            raw = sum(sample[0] for sample in samples)
            stored = sum(sample[1] for sample in samples)
            if stored < raw and gain(1 - stored / raw, rates) >= self._gain_min:
                mask |= 1 << index
        return mask
