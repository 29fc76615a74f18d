"""kvd as SGLang's storage backend: check a host for it, and see pages move, without a GPU.

    kvd serve --host-bytes 2GiB &                           # if it is not running
    python examples/sglang_hicache.py                       # pages of a pool on the CPU
    python examples/sglang_hicache.py --model FOLDER        # would this model be taken?

The last lines are the command that starts a server with kvd on a host with a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kvd_client.sglang.identity import chunk_hash, describe, read_model
from kvd_client.sglang.options import read_options
from kvd_client.sglang.pool import PoolStore, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE, LAYERS, HEADS, DIM, PAGES = 64, 8, 4, 64, 64


class Pool:
    """What kvd needs of one of SGLang's host pools: where the bytes of a page lie."""

    page_size, layer_num, head_num, head_dim = PAGE, LAYERS, HEADS, DIM
    layout, dtype = "page_first", torch.bfloat16

    def __init__(self) -> None:
        """Make room for `PAGES` pages of K and of V."""
        shape = (2, PAGES * PAGE, LAYERS, HEADS, DIM)
        self.kv_buffer = torch.randn(shape).to(self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Give address and bytes of K and V of each page, as SGLang's pools do."""
        size = PAGE * LAYERS * HEADS * DIM * self.dtype.itemsize
        half = self.kv_buffer[0].numel() * self.dtype.itemsize
        starts = [
            self.kv_buffer.data_ptr() + page * size for page in (indices[::PAGE] // PAGE).tolist()
        ]
        return [at + part for at in starts for part in (0, half)], [size] * (2 * len(starts))


def main() -> None:
    """Check, move, and print the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a model's folder or name (default: none)")
    parser.add_argument("--socket", default="", help="kvd's socket (default: the usual place)")
    arguments = parser.parse_args()
    extra: dict[str, Any] = {
        "backend_name": "kvd",
        "module_path": "kvd_client.sglang",
        "class_name": "KvdHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
    }
    if arguments.socket:
        extra["socket"] = arguments.socket
    server = SimpleNamespace(
        model_path=arguments.model or "example", load_format="auto", dtype="auto"
    )
    known = {} if arguments.model else {"weights": "of-the-example"}
    options = read_options({**extra, **known})
    model = read_model("example", server, options, "0.5.23")
    print(f"model {model.name}, weights {model.weights[:16]}...")
    ranks = SimpleNamespace(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False,
    )  # fmt: skip
    pool = Pool()
    shape = shape_of(pool, "kv")
    identity = describe(model, shape, ranks, b"", options=options)
    store = PoolStore(pool, shape, identity, socket=options.socket, wait_s=10.0, load_wait_s=10.0)
    keys = [chunk_hash(f"page {number}") for number in range(PAGES // 2)]
    tokens = torch.arange(PAGES * PAGE)
    source, target = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    megabytes = len(keys) * shape.page_bytes / 1e6
    steps: dict[str, Callable[[], list[bool]]] = {
        "stored": lambda: store.write(keys, source, None),
        "read": lambda: store.read(keys, target),
    }
    for title, step in steps.items():
        began = time.perf_counter()
        done = sum(step())
        took_ms = (time.perf_counter() - began) * 1e3
        print(f"{title} {done} of {len(keys)} pages, {megabytes:.1f} MB, in {took_ms:.1f} ms")
    halves = pool.kv_buffer.view(2, 2, -1)
    print("the same bytes:", torch.equal(halves[:, 0], halves[:, 1]))
    store.close()
    print(
        "\npython -m sglang.launch_server"
        f" --model-path {arguments.model or 'MODEL'} --page-size 64 --enable-hierarchical-cache"
        " --hicache-storage-backend dynamic \\\n"
        f"    --hicache-storage-backend-extra-config '{json.dumps(extra)}'"
    )


if __name__ == "__main__":
    main()
