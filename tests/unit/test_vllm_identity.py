"""What tells one vLLM engine's KV from another's: each difference is another identity."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvd_client.errors import Unsupported
from kvd_client.vllm.identity import adapter_hash, describe
from kvd_client.vllm.options import Options

if TYPE_CHECKING:
    from kvd_client.vllm.messages import Identity


@dataclass
class FullAttentionSpec:
    """Stands for vLLM's, by name and fields."""

    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 64
    page_size_bytes: int = 32 * 2 * 2 * 64 * 2
    attention_chunk_size: int | None = None
    prefix_replay_tokens: int = 0


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    """Likewise."""

    sliding_window: int = 128
    extra_retained_tokens: int = 0


@dataclass
class MambaSpec:
    """Likewise."""

    block_size: int = 64
    page_size_bytes: int = 4096
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Likewise; not known to kvd."""


@dataclass
class Caches:
    """Stands for KVCacheConfig."""

    specs: tuple[Any, ...] = (FullAttentionSpec(),)
    kv_cache_layout: str = "LBHNC"
    hash_block_size: int = 32
    cacheable: tuple[int, ...] | None = None

    @property
    def kv_cache_groups(self) -> list[Any]:
        """One group a specification, of two layers."""
        return [
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"{n}.a", f"{n}.b"])
            for n, spec in enumerate(self.specs)
        ]

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        """All, unless said otherwise."""
        return tuple(range(len(self.specs))) if self.cacheable is None else self.cacheable


@dataclass
class Facts:
    """All that a test may vary."""

    options: Options = field(default_factory=lambda: Options(weights="w1"))
    caches: Caches = field(default_factory=Caches)
    dtype: str = "torch.bfloat16"
    cache_dtype: str = "auto"
    quantization: str | None = None
    algorithm: str = "sha256"
    hf: dict[str, Any] = field(
        default_factory=lambda: {"rope_theta": 10000.0, "_name_or_path": "a"}
    )
    length: int = 4096
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    speculative: str | None = None
    scales: bool = False
    backend: str = "cpu"
    version: str = "0.32.0"
    load_format: str = "auto"
    kernel: int = 32
    blocks: int = 8
    state: tuple[int, ...] = (4, 5)

    @property
    def tensors(self) -> dict[str, Any]:
        """The caches' views, of the kernels' blocks; two parts of each state."""
        attention = SimpleNamespace(shape=(self.blocks, 2, self.kernel, 128))
        state = [SimpleNamespace(shape=(self.blocks, *self.state))] * 2
        return {
            name: state if isinstance(group.kv_cache_spec, MambaSpec) else attention
            for group in self.caches.kv_cache_groups
            for name in group.layer_names
        }

    def describe(self) -> Identity:
        """Describe this engine."""
        settings = SimpleNamespace(to_dict=lambda: dict(self.hf), **self.hf)
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="/models/m",
                revision=None,
                dtype=self.dtype,
                quantization=self.quantization,
                max_model_len=self.length,
                hf_config=settings,
                hf_text_config=settings,
            ),
            cache_config=SimpleNamespace(
                block_size=32,
                cache_dtype=self.cache_dtype,
                kv_cache_layout=None,
                prefix_caching_hash_algo=self.algorithm,
                calculate_kv_scales=self.scales,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tp,
                pipeline_parallel_size=self.pp,
                decode_context_parallel_size=self.dcp,
                prefill_context_parallel_size=1,
            ),
            speculative_config=None
            if self.speculative is None
            else SimpleNamespace(method=self.speculative),
            load_config=SimpleNamespace(load_format=self.load_format, download_dir=None),
        )
        return describe(
            config,
            self.caches,
            self.tensors,
            self.options,
            backend=self.backend,
            version=self.version,
        )


def ids(identity: Identity) -> tuple[bytes, bytes]:
    """Return what the daemon tells engines apart by."""
    return identity.namespace.id, identity.layout.id


@pytest.mark.parametrize(
    "change",
    [
        {"options": Options(weights="w2")},
        {"options": Options(weights="w1", chunk_tokens=512)},
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"algorithm": "sha256_cbor"},
        {"hf": {"rope_theta": 10001.0}},
        {"tp": 2},
        {"backend": "cpu amx"},
        {"kernel": 16},
        {"version": "0.32.1"},
        {"caches": Caches(kv_cache_layout="LBNHC")},
        {"caches": Caches(hash_block_size=16)},
        {"caches": Caches(specs=(FullAttentionSpec(block_size=64),))},
        {"caches": Caches(specs=(FullAttentionSpec(num_kv_heads=4),))},
        {"caches": Caches(specs=(SlidingWindowSpec(),))},
        {"caches": Caches(specs=(FullAttentionSpec(), SlidingWindowSpec()))},
        {"caches": Caches(specs=(FullAttentionSpec(), MambaSpec()))},
    ],
    ids=str,
)
def test_each_difference_is_another_identity(change: dict[str, Any]) -> None:
    """Engines that differ in anything that changes KV bytes do not meet."""
    assert ids(replace(Facts(), **change).describe()) != ids(Facts().describe())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"hf": {"rope_theta": 10000.0, "_name_or_path": "b", "transformers_version": "5"}},
        {"length": 8192},
        {"speculative": "ngram"},
        {"blocks": 9},
    ],
    ids=str,
)
def test_what_changes_no_bytes_is_no_difference(change: dict[str, Any]) -> None:
    """A folder's name in the settings, or a longer limit, keeps engines together."""
    assert ids(replace(Facts(), **change).describe()) == ids(Facts().describe())


def test_states_of_another_shape_are_another_identity() -> None:
    """Two parts of the same bytes may be cut elsewhere."""
    both = Caches(specs=(FullAttentionSpec(), MambaSpec()))
    one, other = Facts(caches=both), Facts(caches=both, state=(5, 4))
    assert ids(one.describe()) != ids(other.describe())


def test_the_limit_counts_where_rope_depends_on_it() -> None:
    """With a rotary embedding chosen by the longest prompt, the limit is part of the identity."""
    long = {"rope_scaling": {"rope_type": "longrope"}}
    one, other = Facts(hf=long), Facts(hf=long, length=8192)
    assert ids(one.describe()) != ids(other.describe())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"caches": Caches(kv_cache_layout="LHBNC")}, "VLLM_KV_CACHE_LAYOUT"),
        ({"caches": Caches(specs=(ChunkedLocalAttentionSpec(),))}, "ChunkedLocalAttentionSpec"),
        ({"caches": Caches(specs=(MambaSpec(mamba_cache_mode="all"),))}, "mamba-cache-mode align"),
        ({"caches": Caches(specs=(MambaSpec(num_speculative_blocks=1),))}, "speculation"),
        ({"caches": Caches(cacheable=())}, "prefix"),
        ({"caches": Caches(specs=(FullAttentionSpec(),) * 2, cacheable=(0,))}, "hash"),
        ({"caches": Caches(specs=(FullAttentionSpec(attention_chunk_size=8),))}, "chunked"),
        ({"caches": Caches(specs=(FullAttentionSpec(prefix_replay_tokens=8),))}, "Full"),
        ({"caches": Caches(specs=(FullAttentionSpec(),) * 17)}, "groups"),
        ({"algorithm": "xxhash"}, "sha256_cbor"),
        ({"dcp": 2}, "context parallel"),
        ({"pp": 2}, "pipeline"),
        ({"speculative": "eagle"}, "draft"),
        ({"scales": True}, "scales"),
        ({"tp": 128}, "tp"),
    ],
    ids=str,
)
def test_what_is_not_known_keeps_kvd_out(change: dict[str, Any], reason: str) -> None:
    """The refusal names what it is."""
    with pytest.raises(Unsupported, match=reason):
        replace(Facts(), **change).describe()


def test_chunks_are_whole_blocks_of_every_group() -> None:
    """The user's size is raised to what all block sizes divide."""
    caches = Caches(specs=(FullAttentionSpec(), FullAttentionSpec(block_size=48)))
    identity = Facts(options=Options(weights="w", chunk_tokens=100), caches=caches).describe()
    assert identity.layout.chunk_tokens == 192
    assert identity.pages == (6, 4)


def test_with_states_a_chunk_is_as_small_as_the_engine_s_blocks() -> None:
    """The engine keeps few states, at ends of blocks: each of them is to be a legal length."""
    caches = Caches(specs=(FullAttentionSpec(), MambaSpec()))
    identity = Facts(options=Options(weights="w", chunk_tokens=256), caches=caches).describe()
    assert identity.layout.chunk_tokens == 64
    assert (identity.blocks, identity.pages) == ((2, 1), (2, 1))
    assert identity.layout.groups[1].object_bytes == 2 * 4096


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "auto"])
def test_unknown_weights_keep_kvd_out(load_format: str) -> None:
    """Random, streamed or missing weights need a digest from the user."""
    mend = 'give "weights": "DIGEST" in kv_connector_extra_config'
    with pytest.raises(Unsupported, match=f"weights.*{mend}|not on this host: {mend}"):
        replace(Facts(), options=Options(), load_format=load_format).describe()


def test_adapters_are_told_apart_by_content() -> None:
    """Two contents of one adapter never meet, nor an adapter's KV and the base model's."""
    key = bytes(32)
    hashes = {key, adapter_hash("1f", key), adapter_hash("2f", key), adapter_hash("1f", b"x" * 32)}
    assert len(hashes) == 4
