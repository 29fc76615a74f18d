"""One engine process of the demo: load what kvd has, generate, store.

    python -m kvd.demo.engine --socket SOCKET

Stages go to stderr, one line each with the prefix `STAGE`; the result is one line of JSON on
stdout (`Result`). Time to first token runs from having the prompt's token ids to having the first
new one: look-up and load are inside it, start-up and the model's weights are not, as in a server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import torch

STAGE: Final = "stage: "
CHUNK_TOKENS: Final = 64
WARM_UP_TOKENS: Final = 64


class Result(NamedTuple):
    """What an engine tells its parent; times in milliseconds, rates in GB/s."""

    connected: bool
    prompt_tokens: int
    first_token_ms: float
    total_ms: float
    tokens_found: int
    tokens_reused: int
    bytes_reused: int
    lossy: bool
    load_ms: float
    load_gb_s: float
    memcpy_gb_s: float
    tokens_stored: int
    bytes_stored: int
    store_ms: float
    new_tokens: list[int]
    text: str
    note: str


def stage(text: str) -> None:
    """Tell the parent what begins now."""
    print(STAGE + text, file=sys.stderr, flush=True)


def build_prompt(tokenizer: Any, tokens: int) -> torch.Tensor:  # noqa: ANN401 - any tokenizer
    """Put document and question into the model's chat form.

    Args:
        tokenizer: With a chat template.
        tokens: About how many the prompt should have; 0 for the whole document once. A longer
            one repeats the document, a shorter one cuts it.

    Returns:
        Token ids, `[1, tokens]`.
    """
    import torch

    from kvd.demo.text import DOCUMENT, QUESTION

    def ids(document: str) -> list[int]:
        content = f"{document}\n{QUESTION}"
        message = [{"role": "user", "content": content}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        found: list[int] = tokenizer(chat, add_special_tokens=False).input_ids
        return found

    document = DOCUMENT
    if tokens:
        room = max(1, tokens - len(ids("")))
        once: list[int] = tokenizer(DOCUMENT, add_special_tokens=False).input_ids
        document = tokenizer.decode((once * (room // len(once) + 1))[:room])
    return torch.tensor([ids(document)])


def memcpy_gb_s(size_bytes: int) -> float:
    """Measure a plain copy of as many bytes into fresh memory, as a load does; median of 5."""
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8)
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        source.clone()
        rates.append(size_bytes / (time.perf_counter() - started) / 1e9)
    return sorted(rates)[2]


def serve_one(
    model: Any,  # noqa: ANN401 - any decoder model
    client: Any,  # noqa: ANN401 - kvd_client.Client, whose import must wait for a parsed command line
    ids: torch.Tensor,
    new_tokens: int,
) -> tuple[list[int], Result]:
    """Answer one prompt with what kvd has, then give kvd what it lacks."""
    from transformers.generation.streamers import BaseStreamer

    from kvd_client import transformers as kvd_hf

    class FirstToken(BaseStreamer):
        """Notes when the first new token is there; the prompt itself is streamed before it."""

        puts = 0
        at = 0.0

        def put(self, value: object) -> None:  # noqa: ARG002 - the interface
            self.puts += 1
            if self.puts == 2:  # noqa: PLR2004 - prompt, then first token
                self.at = time.perf_counter()

        def end(self) -> None:
            """Nothing more to note."""

    first = FirstToken()
    stage("answering")
    started = time.perf_counter()
    prefix = kvd_hf.load_prefix(client, model, ids)
    cache = kvd_hf.new_cache(model) if prefix.cache is None else prefix.cache
    output = model.generate(
        ids, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, streamer=first
    )
    ended = time.perf_counter()
    stage("storing")
    computed_s = first.at - started - prefix.seconds
    stored = kvd_hf.store_prefix(client, model, cache, ids, seconds=computed_s)
    answer: list[int] = output[0, ids.shape[1] :].tolist()
    return answer, Result(
        connected=client.connected,
        prompt_tokens=ids.shape[1],
        first_token_ms=(first.at - started) * 1e3,
        total_ms=(ended - started) * 1e3,
        tokens_found=prefix.found,
        tokens_reused=prefix.tokens,
        bytes_reused=prefix.bytes,
        lossy=prefix.lossy,
        load_ms=prefix.seconds * 1e3,
        load_gb_s=prefix.bytes / prefix.seconds / 1e9,
        memcpy_gb_s=memcpy_gb_s(prefix.bytes) if prefix.bytes else 0.0,
        tokens_stored=stored.tokens,
        bytes_stored=stored.bytes,
        store_ms=stored.seconds * 1e3,
        new_tokens=answer,
        text="",
        note=prefix.note or stored.note,
    )


def run(arguments: argparse.Namespace) -> Result:
    """Load the model, connect, warm up, answer."""
    stage("starting Python, torch and transformers")
    import torch
    import transformers

    from kvd.demo import model as demo_model
    from kvd_client.transformers import connect_model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    stage("loading the model")
    model, tokenizer = demo_model.load()
    stage("reading the weights' digest, connecting")
    salt = bytes.fromhex(arguments.salt)
    client = connect_model(
        model, arguments.socket, chunk_tokens=CHUNK_TOKENS, salt=salt, lossy=arguments.lossy
    )
    stage("warming up")
    with torch.no_grad():  # as a server is: memory and threads are there before the first request
        model(input_ids=torch.ones((1, WARM_UP_TOKENS), dtype=torch.long))
    with client:
        ids = build_prompt(tokenizer, arguments.tokens)
        answer, result = serve_one(model, client, ids, arguments.new_tokens)
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    return result._replace(text=text.strip())


def main() -> int:
    """Run one engine; 2 when the model is not there."""
    parser = argparse.ArgumentParser(prog="kvd.demo.engine", description=__doc__)
    parser.add_argument("--socket", help="kvd's socket")
    parser.add_argument("--prepare", action="store_true", help="only expand the model, once")
    parser.add_argument("--tokens", type=int, default=0, help="of the prompt; 0: as it is")
    parser.add_argument("--new-tokens", type=int, default=24, help="to generate, at most")
    parser.add_argument("--salt", default="", help="hex: engines with one salt share")
    parser.add_argument("--lossy", action="store_true", help="allow FP8 copies in colder tiers")
    arguments = parser.parse_args()
    from kvd.demo import model as demo_model

    try:
        if arguments.prepare:
            stage("expanding the model to float32, once")
            print(json.dumps(str(demo_model.prepare())))
        else:
            print(json.dumps(run(arguments)._asdict()))
    except demo_model.ModelMissing as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
