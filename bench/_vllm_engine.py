"""A vLLM engine that is told what to do by lines of JSON. Runs in vLLM's own environment.

    python -m bench._vllm_engine < commands > answers

The first line is the engine's arguments, the later ones are commands (`COMMANDS`). Each is answered
by one line. Whatever vLLM prints goes to stderr. bench/_vllm.py is the other side.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import vllm


def generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Answer prompts of token ids, all at once, greedily."""
    sampling = vllm.SamplingParams(
        max_tokens=command["tokens"],
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        logprobs=command.get("logprobs"),
    )
    salts = command.get("salts") or [None] * len(command["prompts"])
    adapter = command.get("adapter")
    prompts: list[Any] = []
    for ids, salt in zip(command["prompts"], salts, strict=True):
        prompts.append({"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})})
    lora = None
    if adapter:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(adapter["name"], adapter["number"], adapter["path"])
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
    return {
        "seconds": time.perf_counter() - began,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "finish": [str(output.outputs[0].finish_reason) for output in outputs],
        "logprobs": [
            {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}
            for output in outputs
            if output.outputs[0].logprobs
        ],
    }


def reset(llm: Any, command: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Clear the engine's own prefix cache; tells whether no block was in use."""
    return {"reset": llm.reset_prefix_cache(reset_connector=command.get("connector", False))}


def processes(llm: Any, command: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Tell the processes of this engine."""
    del llm, command
    import psutil

    children = psutil.Process().children(recursive=True)
    return {"pids": [os.getpid(), *(child.pid for child in children)]}


def metrics(llm: Any, command: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Tell the engine's counters whose names begin as asked."""
    prefix = command["prefix"]
    found = [m for m in llm.get_metrics() if m.name.startswith(prefix)]
    return {"metrics": {m.name: getattr(m, "value", None) for m in found}}


COMMANDS = {
    "generate": generate,
    "reset": reset,
    "processes": processes,
    "metrics": metrics,
}


def main() -> None:
    """Build the engine and serve commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(body: dict[str, Any]) -> None:
        answers.write(json.dumps(body) + "\n")
        answers.flush()

    began = time.perf_counter()
    llm = vllm.LLM(**json.loads(sys.stdin.readline()))
    answer({"started_s": time.perf_counter() - began})
    for line in sys.stdin:
        command = json.loads(line)
        answer(COMMANDS[command.pop("do")](llm, command))


if __name__ == "__main__":
    main()
