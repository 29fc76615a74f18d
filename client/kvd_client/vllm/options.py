"""What a user may set in `kv_connector_extra_config`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHUNK_TOKENS: Final = 256
CHUNK_TOKENS_MAX: Final = 1 << 16
LOAD_WAIT_S: Final = 5.0
WAIT_S: Final = 0.5
LOADS: Final = ("async", "sync")
SAVES: Final = ("all", "prompt", "none")


class BadOption(ValueError):
    """An option is unknown or has a value it cannot have; the text says which and what it may."""


class Options(NamedTuple):
    """How the connector behaves.

    Attributes:
        socket: The daemon's socket; None for the usual place.
        chunk_tokens: Tokens a chunk; made a multiple of the engine's blocks.
        weights: Digest of the model's weights; empty to make one from the files.
        adapters: LoRA name to a digest of that adapter's content; others are not cached.
        salt_file: File of 16 to 64 secret bytes; only engines with the same share.
        load: `async`: other requests run meanwhile; `sync`: the step waits for the load.
        save: `all`, `prompt` (not what was generated), or `none`.
        media: Cache prompts with images or sound, trusting the identifiers that vLLM has of them.
        fp8: Keep KV as FP8: half of the bytes, and not quite what was computed. Only engines with
            the same choice share.
        load_wait_s: Longest wait for chunks that have to come up from NVMe.
        wait_s: Longest wait for any other answer: of a request, or of the worker's own thread; a
            step never waits.
    """

    socket: str | None = None
    chunk_tokens: int = CHUNK_TOKENS
    weights: str = ""
    adapters: Mapping[str, str] = {}
    salt_file: str = ""
    load: str = "async"
    save: str = "all"
    media: bool = False
    fp8: bool = False
    load_wait_s: float = LOAD_WAIT_S
    wait_s: float = WAIT_S


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 60  # noqa: PLR2004


_RULES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "socket": (_text, "a path"),
    "chunk_tokens": (
        lambda v: type(v) is int and 1 <= v <= CHUNK_TOKENS_MAX,
        f"a whole number from 1 to {CHUNK_TOKENS_MAX}",
    ),
    "weights": (_text, "a digest of the model's weights, as text"),
    "adapters": (
        lambda v: isinstance(v, dict) and all(_text(k) and _text(d) for k, d in v.items()),
        'an object of adapter names and digests, as {"name": "digest"}',
    ),
    "salt_file": (_text, "a path"),
    "load": (LOADS.__contains__, f"one of {', '.join(LOADS)}"),
    "save": (SAVES.__contains__, f"one of {', '.join(SAVES)}"),
    "media": (lambda v: isinstance(v, bool), "true or false"),
    "fp8": (lambda v: isinstance(v, bool), "true or false"),
    "load_wait_s": (_seconds, "more than 0 and at most 60"),
    "wait_s": (_seconds, "more than 0 and at most 60"),
}


def read_options(extra: Mapping[str, Any]) -> Options:
    """Check the user's options.

    Raises:
        BadOption: One is unknown or has a bad value.
    """
    for name, value in extra.items():
        if name not in _RULES:
            raise BadOption(
                f"kv_connector_extra_config has no option {name!r} for kvd;"
                f" there are: {', '.join(_RULES)}"
            )
        good, rule = _RULES[name]
        if not good(value):
            raise BadOption(f"kv_connector_extra_config {name!r} must be {rule}, not {value!r}")
    return Options(**extra)
