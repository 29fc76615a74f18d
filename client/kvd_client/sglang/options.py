"""What a user may set in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SGLANG_S: Final = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Keys that SGLang reads for itself."""
WAIT_S_MAX: Final = 60.0


class Options(NamedTuple):
    """The user's options.

    Attributes:
        socket: The daemon's; empty for the usual place.
        weights: A digest of the model's weights; empty: made from its files.
        draft_weights: The same of a draft model.
        salt_file: A file of 16 to 64 secret bytes; only engines with the same share.
        lossy: Let colder tiers keep FP8 copies.
        lora: Adapters' files are never rewritten in place, so that their name and path tell.
        media: Trust SGLang's short hashes of images and sound.
        wait_s: Longest wait for the daemon's answer.
        load_wait_s: Longest wait for pages that have to come up from NVMe.
    """

    socket: str = ""
    weights: str = ""
    draft_weights: str = ""
    salt_file: str = ""
    lossy: bool = False
    lora: bool = False
    media: bool = False
    wait_s: float = 0.25
    load_wait_s: float = 2.0


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _seconds(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < float(str(value)) <= WAIT_S_MAX


_RULES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "socket": (_text, "a path"),
    "weights": (_text, "a digest of the model's weights, as text"),
    "draft_weights": (_text, "a digest of the draft model's weights, as text"),
    "salt_file": (_text, "a path"),
    "lossy": (_flag, "true or false"),
    "lora": (_flag, "true or false"),
    "media": (_flag, "true or false"),
    "wait_s": (_seconds, f"more than 0 and at most {WAIT_S_MAX:g}"),
    "load_wait_s": (_seconds, f"more than 0 and at most {WAIT_S_MAX:g}"),
}
assert set(_RULES) == set(Options._fields)


def read_options(extra: Mapping[str, Any]) -> Options:
    """Check the user's options.

    Raises:
        ValueError: One is unknown or has a bad value, or SGLang would not call this backend.
    """
    where = "--hicache-storage-backend-extra-config"
    if not extra.get("interface_v1"):
        msg = f'{where} needs "interface_v1": 1: kvd copies whole pages, in place'
        raise ValueError(msg)
    if extra.get("tp_lcm_size"):
        msg = f"{where}: kvd keeps the pages of one number of ranks: leave tp_lcm_size out"
        raise ValueError(msg)
    mine = {name: value for name, value in extra.items() if name not in SGLANG_S}
    for name, value in mine.items():
        if name not in _RULES:
            msg = f"{where} has no option {name!r} for kvd; there are: {', '.join(_RULES)}"
            raise ValueError(msg)
        good, rule = _RULES[name]
        if not good(value):
            msg = f"{where}: {name!r} must be {rule}, not {value!r}"
            raise ValueError(msg)
    return Options(**mine)
