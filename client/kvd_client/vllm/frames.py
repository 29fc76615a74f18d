"""FP8 objects of pages in host memory: the bytes that the kernels of a GPU make and read.

An object is a frame of kvd's codec, uncompressed (`kvd_client.cuda.forms`). Any thread; no GIL
while values are looped over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client import fp8
from kvd_client.cuda.kernels import ITEM_BYTES
from kvd_client.errors import KvdError, Unsupported

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvd_client.cuda.forms import Form

    Bytes = npt.NDArray[np.uint8]


def warm_up() -> None:
    """Compile the loops, or load them: some seconds the first time on a host.

    Raises:
        Unsupported: They cannot be had here; the text says what to install.
    """
    try:
        from kvd_client import _fp8_loops  # noqa: F401 - compiles
    except Exception as error:  # numba and llvmlite may fail in any way
        raise Unsupported(
            f"\"fp8\" of KV in host memory needs numba, pip install 'kvd[vllm]': {error}"
        ) from error


def write(form: Form, values: Bytes, slot: memoryview) -> None:
    """Quantise an object into a slot.

    Args:
        form: Of FP8.
        values: (useful_bytes,) the object's pages, for each plane in order.
        slot: Writable, `object_bytes` long.
    """
    import numpy as np

    assert form.axes is not None
    whole = np.frombuffer(slot, np.uint8)
    exponents = np.empty(form.planes * form.axes.heads, np.int16)
    bits = values.view(f"u{ITEM_BYTES[form.axes.dtype]}")
    fp8.encode(form.axes.dtype, _shape(form), bits, whole[form.codes_at :], exponents)
    whole[: form.scales_at] = np.frombuffer(form.header(), np.uint8)
    whole[form.scales_at : form.codes_at] = exponents.astype("<i2").view(np.uint8)


def read(form: Form, slot: memoryview, values: Bytes) -> None:
    """Restore an object from a slot; arguments as `write`.

    Raises:
        KvdError: The slot does not hold such an object.
    """
    import numpy as np

    assert form.axes is not None
    check(form, slot)
    whole = np.frombuffer(slot, np.uint8)
    exponents = whole[form.scales_at : form.codes_at].view("<i2").astype(np.int16)
    bits = values.view(f"u{ITEM_BYTES[form.axes.dtype]}")
    fp8.decode(form.axes.dtype, _shape(form), whole[form.codes_at :], exponents, bits)


def check(form: Form, slot: memoryview) -> None:
    """Raise KvdError unless a slot begins as the form demands."""
    if not form.sound(slot):
        raise KvdError("an object of kvd's does not begin as FP8 of this engine must")


def _shape(form: Form) -> tuple[int, int, int, int]:
    assert form.axes is not None
    return form.planes, form.pages * form.axes.rows, form.axes.heads, form.axes.run
