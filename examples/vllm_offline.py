"""kvd in vLLM: a prompt that only the first engine computes.

On a CPU, in a checkout (`make setup-vllm` makes the environment, `make setup` the daemon's):

    .venv/bin/kvd serve --host-bytes 1GiB &
    .venv-vllm/bin/python examples/vllm_offline.py --model FOLDER_OR_NAME

Start it twice: the second engine loads what the first one stored.

With a GPU, and CuPy in vLLM's environment, the same connector is given to the server (not tried on
one yet, docs/vllm.md):

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvdConnector", \
        "kv_connector_module_path": "kvd_client.vllm", "kv_role": "kv_both", \
        "kv_load_failure_policy": "recompute"}'
"""

from __future__ import annotations

import argparse
import os
import sys
import time

STORY = "The keeper of the light wrote down what passed: ships, birds, weather, and the hour. " * 60
QUESTION = "\nIn one sentence, what did the keeper write down?"


def answer(model: str, socket: str | None) -> None:
    """Start an engine with kvd and ask; tells how much was loaded."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=4096,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd_client.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket} if socket else {},
        },
    )
    for tokens in (1, 24):
        llm.reset_prefix_cache()  # so that what is reused comes from kvd
        began = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        (output,) = llm.generate([STORY + QUESTION], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        sys.stdout.write(
            f"pid {os.getpid()}: {len(output.prompt_token_ids or [])} tokens,"
            f" {output.num_cached_tokens} of them loaded,"
            f" {tokens} new in {seconds:.2f} s: {output.outputs[0].text!r}\n"
        )
        sys.stdout.flush()
        time.sleep(1)  # what was computed is saved meanwhile


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model's folder, or its name")
    parser.add_argument("--socket", help="kvd's socket (default: the usual place)")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answer(options.model, options.socket)


if __name__ == "__main__":
    main()
