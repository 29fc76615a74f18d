"""The parent's side of a vLLM engine in its own environment, for tests and benches."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO, Self

ROOT: Final = Path(__file__).resolve().parent.parent
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
CONNECTOR: Final = ("KvdConnector", "kvd_client.vllm")
START_S: Final = 180.0
ANSWER_S: Final = 180.0

Tokens = list[int]


class EngineDied(RuntimeError):
    """The engine's process ended, or did not answer in time; the text has its last words."""


class Engine:
    """One engine process, or with `multiprocess` a family of them."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        kvd: dict[str, Any] | None = None,
        policy: str = "recompute",
        connector: tuple[str, str] = CONNECTOR,
        multiprocess: bool = False,
        environment: dict[str, str] | None = None,
        **llm: Any,  # noqa: ANN401 - JSON
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            model: Folder of the model.
            log: Where its output goes.
            kvd: kv_connector_extra_config; None for an engine without kvd.
            policy: kv_load_failure_policy.
            connector: Class and module.
            multiprocess: Scheduler and worker in processes of their own, as in production.
            environment: More variables.
            llm: More arguments of `vllm.LLM`.
        """
        arguments = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "enforce_eager": True,
            "block_size": 32,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "dtype": "bfloat16",
            **llm,
        }
        if kvd is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": connector[0],
                "kv_connector_module_path": connector[1],
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": kvd,
            }
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(PYTHON), "-m", "bench._vllm_engine"],
                cwd=ROOT,
                env={
                    **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
                    "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # equal threads, equal answers
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                    **(environment or {}),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        try:
            self.started_s: float = self._ask(arguments, START_S)["started_s"]
        except EngineDied:
            self.close()
            raise

    def _ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one line and wait for its answer; a watchdog ends an engine that hangs."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        watchdog = threading.Timer(seconds, self.kill)
        watchdog.start()
        try:
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
            line = stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise EngineDied(f"the engine ended: {self.log.read_text(errors='replace')[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **command: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        """Do one of `_vllm_engine.COMMANDS`."""
        return self._ask({"do": do, **command}, ANSWER_S)

    def generate(
        self,
        prompts: Sequence[Tokens],
        tokens: int,
        **more: Any,  # noqa: ANN401 - JSON
    ) -> dict[str, Any]:
        """Answer prompts, all at once: `tokens`, `cached`, `finish` of each, `seconds` in all.

        With `logprobs=n` also those of each first token's `n` likeliest.
        """
        return self.ask("generate", prompts=list(prompts), tokens=tokens, **more)

    def reset(self, *, connector: bool = False) -> bool:
        """Clear the engine's own prefix cache; False if blocks are in use."""
        return bool(self.ask("reset", connector=connector)["reset"])

    def kill(self) -> None:
        """Kill the engine, all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)

    def close(self) -> None:
        """Let it end, or make it."""
        streams: list[IO[str] | None] = [self.process.stdin, self.process.stdout]
        with contextlib.suppress(BrokenPipeError):
            for stream in streams[:1]:
                if stream is not None:
                    stream.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
