"""`kvd plan`: bytes a token, load or compute, chunk size, and what a fleet needs to hold."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvd.commands._shared import add_json, dump, say, size
from kvd.plan import loading
from kvd.plan.capacity import Demand, Fleet, budget, traffic
from kvd.plan.loading import Prefill, Source, break_even, chunk_choices, needed_bytes_s
from kvd.plan.shape import PlanError, Shape, from_config, from_numbers
from kvd.sizes import about, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.plan.capacity import Budget, Traffic

EPILOG: Final = """\
examples:
  kvd plan --model config.json --prefill 1024:32ms,8192:253ms,32768:1392ms
  kvd plan --layers 32 --kv-heads 8 --head-size 128 --prefill 30000 --nvme-rate 6GB --form fp8
  kvd plan --layers 32 --kv-heads 8 --head-size 128 \\
      --prefixes 32768 --tokens 8192 --copies 2 --hosts 128 --host-bytes 512GiB --share 0.8
  kvd plan --model config.json --prefill 30000 --plot plan.png

Rates that are not given are this host's, as `kvd doctor --measure` stored them. --prefill is what
the engine computes: tokens a second, or times of lengths. With --prefixes it counts what a fleet
needs: payload, metadata, staging, quarantine, copies, and --lost hosts.

exit codes:
  0  planned
  2  wrong option, or something to plan with is missing; stderr says what to give
  3  planned, and the fleet does not hold it
"""
EXIT_TOO_SMALL: Final = 3
LENGTHS: Final = (1024, 8192, 32_768)
CHUNKS: Final = (64, 128, 256, 512, 1024)
QUEUES: Final = (0, 4, 16)
CONFIG_BYTES_MAX: Final = 1 << 20
_MS: Final = 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="FILE", help="its config.json, as Hugging Face writes it")
    model.add_argument("--layers", type=_count, help="instead of a file")
    model.add_argument("--kv-heads", type=_count, help="of all ranks together")
    model.add_argument("--head-size", type=_count, help="values a head")
    model.add_argument("--dtype", help="of the KV (default: the file's, else bfloat16)")
    model.add_argument("--ranks", type=_count, default=1, help="tensor-parallel (default: 1)")
    load = parser.add_argument_group("load or compute")
    load.add_argument("--prefill", type=_prefill, help="tokens a second, or 1024:32ms,8192:253ms")
    load.add_argument("--host-rate", metavar="SIZE", type=_rate, help="bytes a second, as in 50GB")
    load.add_argument("--nvme-rate", metavar="SIZE", type=_rate, help="likewise, of reads")
    load.add_argument("--nvme-latency", metavar="MS", type=_ms, help="of one read (default: 0.1)")
    load.add_argument("--form", choices=loading.FORMS, default="fp8", help="on NVMe (default: fp8)")
    load.add_argument("--lengths", type=_counts, default=LENGTHS, help="prefixes, in tokens")
    load.add_argument(
        "--queue", type=_queue, default=QUEUES, help="equal loads ahead, as in 0,4,16"
    )
    load.add_argument("--chunk", type=_count, default=256, help="tokens (default: 256)")
    fleet = parser.add_argument_group("capacity")
    fleet.add_argument("--prefixes", type=_count, help="different ones to hold")
    fleet.add_argument("--tokens", type=_count, default=8192, help="of each (default: 8192)")
    fleet.add_argument("--copies", type=_count, default=1, help="of each (default: 1)")
    fleet.add_argument("--hosts", type=_count, default=1, help="how many (default: 1)")
    fleet.add_argument("--host-bytes", metavar="SIZE", type=size, help="memory of a host")
    fleet.add_argument("--share", type=_share, default=0.8, help="of it for kvd (default: 0.8)")
    fleet.add_argument("--lost", type=_any_count, default=1, help="hosts to survive (default: 1)")
    fleet.add_argument("--on", choices=("host", "nvme"), default="host", help="which tier holds it")
    fleet.add_argument(
        "--requests", metavar="RATE", type=_positive, help="hits a second, all hosts"
    )
    parser.add_argument("--config", metavar="FILE", help="whose state_dir has the measured rates")
    parser.add_argument("--plot", metavar="FILE", help="draw it, as in plan.png")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Plan and print; raises KvdError."""
    shape = _shape(options)
    sources = list(_sources(options))
    found: dict[str, Any] = {
        "model": asdict(shape) | {"token_bytes": shape.token_bytes},
        "sources": [asdict(source) for source in sources],
    }
    if options.prefill is not None and sources:
        found["loads"] = list(_loads(shape, sources, options))
        found["break_even"] = list(_break_even(shape, sources, options))
    if sources:
        found["chunks"] = [
            each._asdict()
            for each in chunk_choices(
                shape, sources[-1], max(options.lengths), CHUNKS, options.ranks
            )
        ]
    held = _budget(shape, options)
    if held is not None:
        found["capacity"] = held._asdict() | {"needed_bytes": held.needed_bytes}
    if options.requests is not None:
        fleet = _fleet(options)
        found["traffic"] = traffic(shape, fleet, options.requests, options.tokens)._asdict()
    if options.plot is not None:
        from kvd.plan.picture import draw

        title = f"{shape.name or 'model'}: {about(shape.token_bytes)} a token"
        draw(
            options.plot,
            title=title,
            shape=shape,
            sources=sources,
            prefill=options.prefill,
            held=held,
        )
        found["plot"] = options.plot
    if options.json:
        dump(found)
    else:
        say(_lines(shape, sources, held, found, options))
    return EXIT_TOO_SMALL if held is not None and not held.fits else 0


# ------------------------------------------------------------------------------------ arguments


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 on")
    return int(text)


def _any_count(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _queue(text: str) -> tuple[int, ...]:
    return tuple(sorted({_any_count(part) for part in text.split(",")}))


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low < value <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: write {what}")
    return value


def _share(text: str) -> float:
    return _number(text, 0, 1, "a share, above 0 and at most 1")


def _positive(text: str) -> float:
    return _number(text, 0, 1e12, "a number above 0")


def _ms(text: str) -> float:
    return _number(text.removesuffix("ms"), 0, 1e6, "milliseconds") / _MS


def _rate(text: str) -> float:
    try:
        return float(parse_size(text.removesuffix("/s")) or 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _prefill(text: str) -> Prefill:
    try:
        if ":" not in text:
            return Prefill.at_rate(_positive(text))
        points = [part.split(":") for part in text.split(",")]
        return Prefill([(_count(tokens), _ms(time)) for tokens, time in points])
    except (PlanError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _shape(options: argparse.Namespace) -> Shape:
    if options.model is None:
        numbers = (options.layers, options.kv_heads, options.head_size)
        if None in numbers:
            raise PlanError("give --model config.json, or --layers, --kv-heads and --head-size")
        return from_numbers(*numbers, options.dtype or "bfloat16")
    try:
        with open(options.model, "rb") as file:  # noqa: PTH123 - the user's path, as it is
            config = json.loads(file.read(CONFIG_BYTES_MAX))
    except OSError as error:
        raise PlanError(f"{options.model}: {error.strerror}; name a config.json") from error
    except ValueError as error:
        raise PlanError(f"{options.model}: no JSON ({error}); name a config.json") from error
    if not isinstance(config, dict):
        raise PlanError(f"{options.model}: no JSON object; name a config.json")
    return from_config(config, kv_dtype=options.dtype or "")


def _sources(options: argparse.Namespace) -> Iterator[Source]:
    """Yield the tiers whose rates are given, or were measured on this host."""
    from kvd import config, rates
    from kvd_client.errors import KvdError

    measured = rates.NONE
    if options.host_rate is None or options.nvme_rate is None:
        try:
            measured = rates.read(config.load(options.config, {}).state_dir)
        except KvdError:
            if options.config is not None:
                raise
    host = options.host_rate or measured.host_bytes_s
    if host:
        yield Source("host", host)
    nvme = options.nvme_rate or measured.nvme_read_bytes_s
    latency = options.nvme_latency or measured.nvme_read_s or 1e-4
    if nvme:
        yield Source("nvme", nvme, latency, loading.FORMS[options.form])


# ------------------------------------------------------------------------------------ figures


def _loads(
    shape: Shape, sources: list[Source], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for tokens in options.lengths:
        size_bytes = shape.load_bytes(tokens)
        yield {
            "tokens": tokens,
            "bytes": size_bytes,
            "compute_ms": round(options.prefill.seconds(tokens) * _MS, 3),
            "needed_bytes_s": round(needed_bytes_s(shape, options.prefill, tokens)),
            "load_ms": {
                source.name: {
                    str(ahead): round(source.seconds(size_bytes, ahead) * _MS, 3)
                    for ahead in options.queue
                }
                for source in sources
            },
        }


def _break_even(
    shape: Shape, sources: list[Source], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for source in sources:
        for ahead in options.queue:
            answer = break_even(shape, options.prefill, source, step=options.chunk, ahead=ahead)
            yield {"source": source.name, "ahead": ahead, **answer._asdict()}


def _fleet(options: argparse.Namespace) -> Fleet:
    if options.host_bytes is None:
        raise PlanError("a fleet needs --host-bytes, as in 512GiB")
    return Fleet(options.hosts, options.host_bytes, options.share, lost=options.lost)


def _budget(shape: Shape, options: argparse.Namespace) -> Budget | None:
    if options.prefixes is None:
        return None
    demand = Demand(options.prefixes, options.tokens, options.copies, options.chunk)
    smaller = loading.FORMS[options.form] if options.on == "nvme" else 1.0
    return budget(shape, demand, _fleet(options), smaller)


# ------------------------------------------------------------------------------------ for people


def _lines(
    shape: Shape,
    sources: list[Source],
    held: Budget | None,
    found: dict[str, Any],
    options: argparse.Namespace,
) -> Iterator[str]:
    yield _model_line(shape, options.chunk)
    if not sources:
        yield "no rates: give --host-rate and --nvme-rate, or run `kvd doctor --measure` here"
    for source in sources:
        form = f" of {options.form}" if source.name == "nvme" else ""
        yield f"{source.name} gives {source.bytes_s / 1e9:.2f} GB/s{form}"
    if "loads" in found:
        yield from _load_lines(found, options)
    elif sources:
        yield "give --prefill to compare loading with computing"
    if "chunks" in found:
        yield from _chunk_lines(found["chunks"], max(options.lengths))
    if held is not None:
        yield from _capacity_lines(held, options)
    if options.requests is not None:
        fleet = _fleet(options)
        needed = traffic(shape, fleet, options.requests, options.tokens)
        yield from _traffic_lines(needed, options)


def _model_line(shape: Shape, chunk: int) -> str:
    layers = f"{shape.full_layers} full layers" if shape.full_layers else ""
    if shape.sliding_layers:
        layers += f"{', ' * bool(layers)}{shape.sliding_layers} of a window of {shape.window:,}"
    if shape.stateless_layers:
        layers += f", {shape.stateless_layers} without KV (their state is not counted)"
    return (
        f"{shape.name or 'model'}: {layers}; {about(shape.token_bytes)} a token,"
        f" {about(shape.token_bytes * chunk)} a chunk of {chunk}"
    )


def _load_lines(found: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    from kvd.tables import aligned

    head = ["PREFIX", "KV", "COMPUTE", "EVEN AT", "FROM"]
    head += [f"{ahead} AHEAD" if ahead else "ALONE" for ahead in options.queue]
    rows = []
    for row in found["loads"]:
        first = [
            f"{row['tokens']:,}",
            about(row["bytes"]),
            _time(row["compute_ms"]),
            f"{row['needed_bytes_s'] / 1e9:.2f} GB/s",
        ]
        for name, times in row["load_ms"].items():
            rows.append([*first, name, *(_time(times[str(ahead)]) for ahead in options.queue)])
            first = ["", "", "", ""]
    yield ""
    yield from aligned([head, *rows])
    yield "EVEN AT: what loads faster wins over computing. N AHEAD: behind N equal loads"
    for answer in found["break_even"]:
        behind = f" behind {answer['ahead']} loads" if answer["ahead"] else ""
        if answer["tokens"] is None:
            what = "never wins"
        else:
            what = f"wins from {answer['tokens']:,} tokens on"
            what += f", up to {answer['until']:,}" if answer["until"] else ""
        yield f"loading from {answer['source']}{behind} {what}"


def _time(ms: float) -> str:
    return f"{ms:,.1f} ms" if ms < 10_000 else f"{ms / _MS:,.1f} s"  # noqa: PLR2004


def _chunk_lines(rows: list[dict[str, Any]], tokens: int) -> Iterator[str]:
    from kvd.tables import aligned

    yield ""
    head = ["CHUNK", "OBJECT", "LOST TOKENS", "READS", "LOOK-UP", "RECORDS", "PADDING", "ONE READ"]
    cells = [
        [
            f"{row['tokens']:,}",
            about(row["object_bytes"]),
            f"{row['lost_tokens']:,.0f}",
            f"{row['reads']:,}",
            about(row["hashes_bytes"]),
            about(row["metadata_bytes"]),
            f"{100 * row['padding_share']:.2f} %",
            _time(row["read_ms"]),
        ]
        for row in rows
    ]
    yield from aligned([head, *cells])
    yield f"for a prefix of {tokens:,} tokens; LOST TOKENS are computed again, on average"


def _capacity_lines(held: Budget, options: argparse.Namespace) -> Iterator[str]:
    from kvd.tables import aligned

    yield ""
    lost = f"{options.lost} lost host{'s' * (options.lost != 1)}"
    names = ("payload", "metadata", "staging", "quarantine", lost)
    rows = [[name, about(part)] for name, part in zip(names, held, strict=False)]
    rows += [["needed", about(held.needed_bytes)], ["there is", about(held.usable_bytes)]]
    yield from aligned([["CAPACITY", "BYTES"], *rows])
    fleet = f"{options.hosts:,} hosts of {about(options.host_bytes)} at {100 * options.share:g} %"
    if held.fits:
        yield f"{fleet} hold it"
    elif held.payload_fits:
        yield f"{fleet} just hold the payload, and not the rest: {held.hosts_needed:,} hold it all"
    else:
        yield (
            f"{fleet} do not hold it: {held.hosts_for_payload:,} just hold the payload,"
            f" {held.hosts_needed:,} hold it all"
        )


def _traffic_lines(needed: Traffic, options: argparse.Namespace) -> Iterator[str]:
    yield ""
    yield (
        f"{options.requests:g} hits a second of {options.tokens:,} tokens:"
        f" {needed.all_bytes_s / 1e9:.2f} GB/s, {needed.host_bytes_s / 1e9:.2f} a host,"
        f" {needed.host_lost_bytes_s / 1e9:.2f} with {options.lost} lost"
    )
