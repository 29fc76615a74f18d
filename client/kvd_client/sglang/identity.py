"""What makes one SGLang engine's pages the same as another's.

SGLang's page keys are chained SHA-256 over tokens, salt and adapter. Its storage configuration adds
a model's *name* and ranks, and nothing else; what is missing is put into kvd's namespace and layout
here, and whatever is not known ends the attach with a line that says what to do.

Imports neither SGLang nor torch: it reads the objects it is given.

Invariants:

S1. Two pools get the same namespace and layout only if a page of one is a page of the other.
S2. A model is known by a digest of its weights, never by its name.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd_client.identity import DTYPES, HASH_BYTES, RANKS_MAX, Group, Layout, Namespace
from kvd_client.weights import model_place, weights_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd_client.sglang.options import Options

SCHEMA: Final = "kvd-sglang-1"
CODEC_ORDERS: Final = {"layer_first": "layer,kv,page,token,head,dim/1"}
"""SGLang's host layouts whose pages kvd can keep as FP8, and kvd's name for their order."""
_SETTINGS: Final = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "torchao_config",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "json_model_override_args",
    "model_impl",
    "load_format",
    "model_loader_extra_config",
    "context_length",
    "speculative_algorithm",
)
"""Of the server's arguments, those that may change KV."""
_MEDIA: Final = ("vision_config", "audio_config", "image_token_id", "image_token_index")


class Model(NamedTuple):
    """What the engine runs.

    Attributes:
        name: For people.
        weights: A digest.
        dtype: Computed in, as SGLang was told.
        facts: A digest of all else that changes KV.
    """

    name: str
    weights: str
    dtype: str
    facts: str


class Shape(NamedTuple):
    """How one host pool keeps a page.

    Attributes:
        name: SGLang's name of the pool.
        spans: Bytes of each run of a page, in the order SGLang gives them.
        page_tokens: Tokens a page.
        dtype: Of its values.
        order: The pool's layout.
        detail: Whatever else the pool says of itself.
        layers: Of the model, in this pool.
        heads: KV heads; 0 if it has none.
        head_size: Values a head.
    """

    name: str
    spans: tuple[int, ...]
    page_tokens: int
    dtype: str
    order: str
    detail: str
    layers: int
    heads: int
    head_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, and of an object."""
        return sum(self.spans)


class Identity(NamedTuple):
    """What one pool of one rank tells kvd it is."""

    namespace: Namespace
    layout: Layout
    rank: int


def read_model(name: str, server: Any, options: Options, version: str) -> Model:  # noqa: ANN401
    """Describe the model.

    Args:
        name: As SGLang's storage configuration has it.
        server: SGLang's server arguments; None where they are not known.
        options: The user's.
        version: SGLang's.

    Raises:
        ValueError: Something is not known; the text says what to set (S2).
    """
    if server is None:
        msg = (
            f"SGLang {version} tells no server arguments, so what {name} computes is not known:"
            " kvd knows where they are in 0.5.23"
        )
        raise ValueError(msg)
    downloads = getattr(server, "download_dir", None)
    place = model_place(str(server.model_path), getattr(server, "revision", None), downloads)
    settings = {key: str(getattr(server, key, None)) for key in _SETTINGS}
    _check_adapters(server, options)
    config = _config(place, options)
    draft, wanted = options.draft_weights, getattr(server, "speculative_draft_model_path", None)
    if wanted and not draft:
        there = model_place(str(wanted), None, downloads)
        draft = _weights(there, "auto", wanted, "draft_weights")
    facts = {
        "schema": SCHEMA,
        "sglang": version,
        "settings": settings,
        "config": config,
        "scales": _file(getattr(server, "quantization_param_path", None)),
        "draft": draft,
    }
    weights = options.weights or _weights(place, settings["load_format"], server.model_path)
    shown = Path(str(server.model_path)).name[:64]
    return Model(shown or "model", weights, settings["dtype"], _digest(facts))


def _weights(place: Path | None, load_format: str, name: object, option: str = "weights") -> str:
    """Digest weights by their files; Unsupported where files do not tell."""
    mend = f'set "{option}" to a digest of them in --hicache-storage-backend-extra-config'
    return weights_digest(str(name), place, load_format, mend)


def _config(place: Path | None, options: Options) -> Any:  # noqa: ANN401 - any JSON value
    """Read the model's own settings, its rotary embedding with them."""
    if place is None or not (path := place / "config.json").is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    if not options.media and any(config.get(key) is not None for key in _MEDIA):
        msg = (
            "the model takes images or sound, which SGLang's page keys tell apart by short hashes:"
            ' set "media": true to trust them'
        )
        raise ValueError(msg)
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    return config


def _check_adapters(server: Any, options: Options) -> None:  # noqa: ANN401 - SGLang's
    on = getattr(server, "enable_lora", None) or getattr(server, "lora_paths", None)
    if on and not options.lora:
        msg = (
            "SGLang tells LoRA adapters apart by name and path: set"
            ' "lora": true if no adapter\'s files are ever rewritten in place'
        )
        raise ValueError(msg)


def _file(path: object) -> str:
    return blake2b(Path(str(path)).read_bytes(), digest_size=32).hexdigest() if path else ""


def describe(
    model: Model,
    shape: Shape,
    config: Any,  # noqa: ANN401 - SGLang's HiCacheStorageConfig
    salt: bytes,
    *,
    options: Options,
    life: str = "",
) -> Identity:
    """Describe one pool of one rank.

    Tensor-parallel ranks of a pool that is cut by heads share a space, and kvd folds them: a page
    counts once every rank's shard is there. Every other kind of rank gets a space of its own, and
    SGLang takes the least of what they find.

    Args:
        model: From `read_model`.
        shape: The pool's.
        config: Ranks and sizes.
        salt: From `read_salt`.
        options: The user's.
        life: Empty, or what parts this engine from all others since its storage was cleared.

    Raises:
        ValueError: kvd cannot keep such pages; the text says why.
    """
    replicated = bool(config.is_mla_model) and shape.name == "kv"
    dcp = int(getattr(config, "dcp_size", 1))
    tp, rank = int(config.tp_size), int(config.tp_rank)
    own: list[object] = [
        config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size,
        getattr(config, "dcp_rank", 0), dcp,
    ]  # fmt: skip
    if replicated and dcp == 1:
        tp, rank = 1, 0  # every rank's pages are the same: one writes, all read
    elif dcp > 1 or tp > RANKS_MAX or life:
        own += [tp, rank]
        tp, rank = 1, 0
    order = CODEC_ORDERS.get(shape.order, f"sglang/{shape.order}/1")
    if options.lossy and order not in CODEC_ORDERS.values():
        msg = (
            f'"lossy": kvd cannot keep pages of layout {shape.order} as FP8:'
            f" use --hicache-mem-layout {', '.join(CODEC_ORDERS)}, or leave lossy out"
        )
        raise ValueError(msg)
    extra = _digest({"facts": model.facts, "pool": shape._asdict(), "own": own, "life": life})
    dtype = shape.dtype if shape.dtype in DTYPES else "uint8"
    group = Group("full", shape.layers, shape.heads, shape.head_size, shape.page_bytes)
    namespace = Namespace(
        model=f"{model.name}/{shape.name}"[:128],
        revision=model.weights,
        dtype=model.dtype,
        salt=salt,
        extra=f"sglang {extra}",
        lossy=options.lossy,
    )
    layout = Layout(shape.page_tokens, shape.page_tokens, dtype, (group,), tp=tp, order=order)
    return Identity(namespace.check(), layout.check(), rank)


def chunk_hash(key: str) -> bytes:
    """Take SGLang's page key as it is; a key of another form is digested whole."""
    try:
        taken = bytes.fromhex(key)
    except ValueError:
        taken = b""
    if len(taken) == HASH_BYTES:
        return taken
    return blake2b(key.encode(), digest_size=HASH_BYTES, person=b"kvd.sglang.key.1").digest()


def chunk_hashes(keys: Sequence[str] | None) -> list[bytes]:
    """Take keys as they are."""
    return [chunk_hash(key) for key in keys or ()]


def _digest(facts: object) -> str:
    body = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(body.encode(), digest_size=32, person=b"kvd.sglang.fact1").hexdigest()
