"""`kvd events`: what enters and leaves the tiers of a daemon, as routers hear it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.errors import StartError
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

EPILOG: Final = """\
examples:
  kvd events                          follow this host's daemon
  kvd events --replay                 what it still keeps, then follow
  kvd events --replay --no-follow --json | jq .block_hashes
  kvd events --endpoint tcp://10.0.0.5:5557

The daemon has to be told to publish them ([events] endpoint). A batch that was missed is asked for
again, if the daemon has a replay_endpoint; otherwise a line says how many are missing.

exit codes:
  0    shown, as many as asked for
  1    no daemon, or one that publishes nothing; stderr says what to change
  2    wrong option
  130  ended by Ctrl-C
"""
REPLAY_S: Final = 5.0
HASHES_SHOWN: Final = 3
MESSAGE_BYTES_MAX: Final = 64 << 20
EXIT_NO_EVENTS: Final = 1
_END: Final = -1


class NoEvents(KvdError):
    """Nobody publishes events there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's (default: $KVD_SOCKET, else the usual one)"
    )
    parser.add_argument("--endpoint", metavar="ADDRESS", help="subscribe there; ask no daemon")
    parser.add_argument("--replay-endpoint", metavar="ADDRESS", help="and ask there for a replay")
    parser.add_argument("--topic", default="", help="only topics that begin so (default: all)")
    parser.add_argument("--replay", action="store_true", help="begin with what is still kept")
    parser.add_argument("--no-follow", action="store_true", help="end after the replay")
    parser.add_argument("--count", metavar="N", type=int, default=0, help="end after N events")
    parser.add_argument("--json", action="store_true", help="one JSON object an event")


def run(options: argparse.Namespace) -> int:
    """Show events until there are enough, or Ctrl-C; return the exit code.

    Raises:
        StartError: Options that do not go together.
    """
    if options.no_follow and not options.replay:
        raise StartError("--no-follow shows only what is kept: give --replay as well")
    try:
        endpoint, replay = _endpoints(options)
    except NoEvents as error:
        sys.stderr.write(f"kvd: error: {error}\n")
        return EXIT_NO_EVENTS
    for shown, (number, event) in enumerate(_batches(options, endpoint, replay), 1):
        sys.stdout.write(_line(number, event, as_json=options.json) + "\n")
        sys.stdout.flush()
        if shown == options.count:
            break
    return 0


def _endpoints(options: argparse.Namespace) -> tuple[str, str]:
    """Return where to subscribe and where to ask; from the daemon's page unless given."""
    if options.endpoint:
        return options.endpoint, options.replay_endpoint or ""
    from kvd import statpage
    from kvd_client.paths import default_socket, stat_page_name

    path = options.socket or default_socket()
    try:
        events = statpage.read(stat_page_name(path)).stats.get("events")
    except statpage.NoStatPage as error:
        raise NoEvents(f"{path}: {error}") from error
    if not isinstance(events, dict):
        raise NoEvents(
            'this daemon publishes no events: set [events] endpoint = "tcp://127.0.0.1:5557"'
            " in its configuration and restart it"
        )
    return str(events["endpoint"]), options.replay_endpoint or str(events["replay_endpoint"])


def _batches(
    options: argparse.Namespace, endpoint: str, replay: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield events with the number of their batch; fill gaps by asking for a replay."""
    import zmq

    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, options.topic)
        subscriber.connect(endpoint)
        expected: int | None = None
        if options.replay:
            expected = 0
            for number, payload in _replayed(context, replay, 0):
                yield from _events(number, payload)
                expected = number + 1
        while not options.no_follow:
            _, sequence, payload = subscriber.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if expected is not None and number < expected and number > 0:
                continue  # it came with the replay
            if expected is not None and number > expected:
                for missed, again in _replayed(context, replay, expected):
                    if missed >= number:
                        break
                    yield from _events(missed, again)
                    expected = missed + 1
                if expected < number:
                    yield number, {"type": "missed", "batches": number - expected}
            yield from _events(number, payload)
            expected = number + 1
    finally:
        context.destroy(linger=0)


def _replayed(context: Any, replay: str, start: int) -> Iterator[tuple[int, bytes]]:  # noqa: ANN401
    """Ask for what is kept from a batch on; nothing without somebody to ask."""
    import zmq

    if not replay:
        return
    with context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.setsockopt(zmq.RCVHWM, 0)
        asker.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        asker.connect(replay)
        asker.send_multipart([b"", start.to_bytes(8, "big")])
        deadline = time.monotonic() + REPLAY_S
        while asker.poll(max(0, int(1e3 * (deadline - time.monotonic())))):
            _, _, sequence, payload = asker.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number == _END:
                return
            yield number, payload
            deadline = time.monotonic() + REPLAY_S
    sys.stderr.write(f"kvd: warning: {replay} does not answer; going on without a replay\n")


def _events(number: int, payload: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    import msgpack

    _, events, *_ = msgpack.unpackb(payload, raw=False, max_ext_len=0)
    yield from ((number, event) for event in events)


def _line(number: int, event: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        hashes = [_hex(each) for each in event.get("block_hashes", ())]
        shown = {**event, "sequence": number}
        if "block_hashes" in event:
            shown["block_hashes"] = hashes
        if event.get("parent_block_hash") is not None:
            shown["parent_block_hash"] = _hex(event["parent_block_hash"])
        return json.dumps(shown)
    if event["type"] == "missed":
        return f"{number:>8}  missed          {event['batches']} batches are lost"
    hashes = [_hex(each)[-16:] for each in event.get("block_hashes", ())]
    more = f" and {len(hashes) - HASHES_SHOWN} more" if len(hashes) > HASHES_SHOWN else ""
    label = "".join(c if c.isprintable() else "?" for c in str(event.get("kvd_label", "")))
    listed = " ".join(hashes[:HASHES_SHOWN]) + more
    return (
        f"{number:>8}  {event['type']:<16}{event.get('medium', ''):<8}  {label}  {listed}".rstrip()
    )


def _hex(key: int | bytes) -> str:
    return key.hex() if isinstance(key, bytes) else f"{key:016x}"
