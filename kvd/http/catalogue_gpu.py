"""Metrics of the GPU tier. Pure."""

from __future__ import annotations

from typing import Final

from kvd.http.figures import labelled, one

GPU: Final = (
    (
        "kvd_gpu_copied_bytes_total",
        "Bytes copied between host memory and GPU memory, by direction.",
        labelled("direction", up="gpu.bytes_up", down="gpu.bytes_down"),
    ),
    (
        "kvd_gpu_evicted_objects_total",
        "Objects whose copy in GPU memory was given up for room.",
        one("gpu.evicted"),
    ),
    (
        "kvd_gpu_lost_objects_total",
        "Stores whose copy down to host memory failed; they are not found.",
        one("gpu.lost"),
    ),
    (
        "kvd_gpu_verified_copies_total",
        "Copies read back from the GPU and compared, by what came out.",
        labelled("outcome", all="gpu.verified", differed="gpu.differed"),
    ),
)
GPU_NOW: Final = (
    (
        "kvd_gpu_bytes",
        "GPU memory of the tier, by what it is.",
        labelled("state", ready="gpu.ready_bytes", pinned="gpu.pinned_bytes"),
    ),
    ("kvd_gpu_objects", "Objects that have a copy in GPU memory.", one("gpu.objects")),
    (
        "kvd_gpu_moves",
        "Copies under way, by direction.",
        labelled("direction", up="gpu.rising", down="gpu.falling"),
    ),
    ("kvd_gpu_device", "Number of the device.", one("gpu.device")),
)
