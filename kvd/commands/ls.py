"""`kvd ls`: the namespaces, or the chunks of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvd.commands._shared import add_json, add_socket, ago, complete_labels, connected, dump, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvd.admin.client import Admin
    from kvd.admin.names import SpaceRow

EPILOG: Final = """\
examples:
  kvd ls                                  every namespace, what it has in each tier, its last use
  kvd ls llama-3-8b@main                  the chunks of one, by label or by id
  kvd ls 3fa9c1 --tier nvme --limit 1000
  kvd ls --where 9c2e41                   which hosts hold a chunk, by the beginning of its hash
  kvd ls --json | jq '.spaces[] | select(.sessions == 0)'

A namespace is one model, revision, adapter, dtype and salt of one tenant, with one layout. Root and
the daemon's user see all of them, others those of their own tenant.

exit codes:
  0  listed
  1  no daemon
  2  wrong option, or no such namespace; stderr says what there is
"""
TIERS: Final = {"any": 3, "host": 1, "nvme": 2}
LIMIT: Final = 50
_HASH_CHARS: Final = 12
_HASH_CHARS_MIN: Final = 4
_HOSTS: Final = 4
"""In the mask of tiers: say which hosts hold each."""
_LIMIT_MAX: Final = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    space = parser.add_argument(
        "space", metavar="NAMESPACE", nargs="?", help="its chunks, by label or id as shown"
    )
    complete_labels(space)
    parser.add_argument("--tier", choices=TIERS, default="any", help="chunks that are there only")
    parser.add_argument(
        "--limit",
        metavar="CHUNKS",
        type=_count,
        default=LIMIT,
        help=f"most chunks to list (default: {LIMIT}); 0 for all",
    )
    parser.add_argument(
        "--where", metavar="HASH", help="which hosts hold this chunk, as the directory knows"
    )
    add_socket(parser)
    add_json(parser)


def _count(text: str) -> int:
    import argparse

    if not text.isdecimal() or int(text) > _LIMIT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, or 0 for all")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """List; raises KvdError."""
    from kvd.admin import names

    with connected(options) as admin:
        known = names.spaces(admin)
        if options.where is not None:
            chosen = [names.find_one(known, options.space)] if options.space else known
            _show_where(admin, chosen, options.where.lower(), as_json=options.json)
            return 0
        if options.space is None:
            _show_spaces(known, as_json=options.json)
            return 0
        space = names.find_one(known, options.space)
        limit = options.limit or _LIMIT_MAX
        chunks = _chunks(admin, space, TIERS[options.tier], limit + 1)
        _show_chunks(space, chunks, limit, as_json=options.json)
    return 0


def _show_spaces(known: list[SpaceRow], *, as_json: bool) -> None:
    from kvd.sizes import about
    from kvd.tables import aligned, clean

    if as_json:
        dump({"spaces": [row.plain() for row in known]})
        return
    head = ["NAMESPACE", "TENANT", "CHUNKS", "TOKENS", "HOST", "NVME", "SESSIONS", "USED", "LABEL"]
    rows = [
        [
            row.id,
            clean(row.tenant),
            f"{row.chunks:,}",
            f"{row.chunks * row.chunk_tokens:,}",
            about(row.host_bytes),
            about(row.nvme_bytes),
            str(row.sessions),
            ago(row.age_s),
            clean(row.label),
        ]
        for row in sorted(known, key=lambda row: (row.tenant, row.label, row.space))
    ]
    say(aligned([head, *rows]) if rows else ["no namespaces: no engine has stored or joined"])


def _chunks(admin: Admin, space: SpaceRow, tiers: int, most: int) -> list[dict[str, Any]]:
    from kvd_client import wire

    found: list[dict[str, Any]] = []
    for rows in admin.pages(wire.ListChunks, space.space, tiers):
        found += map(_plain, rows)
        if len(found) >= most:
            break
    return found[:most]


def _plain(row: list[Any]) -> dict[str, Any]:
    names = ("chunk", "parent", "tiers", "host_bytes", "nvme_bytes", "lossy", "pins")
    chunk: dict[str, Any] = dict(zip((*names, "state", "age_s", "hosts"), row, strict=False))
    chunk["chunk"], chunk["parent"] = chunk["chunk"].hex(), chunk["parent"].hex()
    chunk["lossy"] = bool(chunk["lossy"])
    chunk["tiers"] = [
        name for name, bit in TIERS.items() if bit & chunk["tiers"] == bit != TIERS["any"]
    ]
    return chunk


def _held_by(admin: Admin, space: SpaceRow, text: str) -> Iterator[dict[str, Any]]:
    """Yield the first chunk of a namespace whose hash begins so, with who holds it."""
    from kvd_client import wire

    chunks = _chunks(admin, space, TIERS["any"], _LIMIT_MAX)
    after = next((i for i, c in enumerate(chunks) if c["chunk"].startswith(text)), None)
    while after is not None:  # at its page or a little later: nodes without bytes are not listed
        after, rows = admin.ask(wire.ListChunks, space.space, TIERS["any"] | _HOSTS, after)
        for chunk in map(_plain, rows):
            if chunk["chunk"].startswith(text):
                yield {"space": space.id, **chunk, "hosts": chunk["hosts"].split()}
                return
        after = after or None


def _show_where(admin: Admin, known: list[SpaceRow], text: str, *, as_json: bool) -> None:
    """Show who holds the chunks here whose hash begins so; raises KvdError when there is none."""
    from kvd.tables import aligned, clean
    from kvd_client.errors import KvdError

    if len(text) < _HASH_CHARS_MIN or text.strip("0123456789abcdef"):
        msg = f"--where {text!r}: write at least {_HASH_CHARS_MIN} characters of a hash"
        raise KvdError(msg)
    found = [each for space in known for each in _held_by(admin, space, text)]
    if not found:
        msg = f"no chunk here begins with {text!r}: ask on a host that holds it"
        raise KvdError(msg)
    if as_json:
        dump({"chunks": found})
        return
    rows = [
        [each["space"], each["chunk"][:_HASH_CHARS], "+".join(each["tiers"]), clean(hosts)]
        for each in found
        for hosts in [", ".join(each["hosts"]) or "nobody: not told yet"]
    ]
    say(aligned([["NAMESPACE", "CHUNK", "HERE", "HOSTS"], *rows]))


def _show_chunks(
    space: SpaceRow, found: list[dict[str, Any]], limit: int, *, as_json: bool
) -> None:
    from kvd.tables import aligned, clean

    shown, more = found[:limit], len(found) > limit
    if as_json:
        dump({"space": space.plain(), "chunks": shown, "more": more})
        return
    say(
        [f"{space.id}  {clean(space.label)}, tenant {clean(space.tenant)}, {space.chunks:,} chunks"]
    )
    if shown:
        say(aligned([_HEAD, *_cells(shown)]))
    if more:
        say([f"and more: --limit 0 shows all, --limit {10 * limit} more of them"])


_HEAD: Final = ["CHUNK", "AFTER", "TIERS", "HOST", "ON NVME", "LEASES", "USED", "STATE"]


def _cells(chunks: list[dict[str, Any]]) -> Iterator[list[str]]:
    from kvd.sizes import about

    for chunk in chunks:
        state = " ".join(filter(None, [chunk["state"], "lossy" if chunk["lossy"] else ""]))
        yield [
            chunk["chunk"][:_HASH_CHARS],
            chunk["parent"][:_HASH_CHARS] or "-",
            "+".join(chunk["tiers"]) or "-",
            about(chunk["host_bytes"]) if chunk["host_bytes"] else "-",
            about(chunk["nvme_bytes"]) if chunk["nvme_bytes"] else "-",
            str(chunk["pins"]),
            ago(chunk["age_s"]),
            state,
        ]
