"""Metrics of what a host does with others: fetches, and the directory. Pure."""

from __future__ import annotations

from typing import Final

from kvd.http.figures import Source, labelled, one

_OF_PEER: Final = "peer.peers.[peer=host]"
_ENDS: Final = (
    "refused",
    "turned_down",
    "stale",
    "corrupt",
    "late",
    "silent",
    "no_room",
    "failed",
    "quarantined",
    "fenced",
)
"""Of `kvd.peer.asker.COUNTS`, all but what was asked for and what came."""


def _of_peer(label: str, *names: str) -> tuple[Source, ...]:
    return tuple(Source(f"{_OF_PEER}.{name}", ((label, name),)) for name in names)


FLEET: Final = (
    ("kvd_peer_fetched_bytes_total", "Bytes fetched from a host.", one(f"{_OF_PEER}.bytes")),
    ("kvd_peer_fetched_chunks_total", "Chunks that came whole.", one(f"{_OF_PEER}.chunks")),
    (
        "kvd_peer_spare_chunks_total",
        "Of those, chunks that enough failure domains had already.",
        one(f"{_OF_PEER}.spare"),
    ),
    ("kvd_peer_asks_total", "Times a host was asked for chunks.", one(f"{_OF_PEER}.asked")),
    (
        "kvd_peer_fetch_troubles_total",
        "What went wrong with fetches from a host, by what it was.",
        _of_peer("what", *_ENDS),
    ),
    ("kvd_peer_offered_total", "Chunks offered to other hosts.", one("peer.offered")),
    (
        "kvd_peer_asks_refused_total",
        "Asks of other hosts that were refused, by reason.",
        one("peer.asks_refused.*reason"),
    ),
    (
        "kvd_peer_requests_total",
        "Fetches put off, by why: too much under way, or tried again.",
        labelled("why", over_budget="peer.over_budget", retried="peer.retried"),
    ),
    (
        "kvd_peer_connections_refused_total",
        "Connections of hosts that were turned away.",
        one("peer.connections_refused"),
    ),
    (
        "kvd_directory_lookups_total",
        "Chains looked up in the directory of the fleet, by how.",
        labelled(
            "outcome",
            all="directory.counters.lookups",
            asked="directory.counters.lookups_asked",
            late="directory.counters.lookups_late",
            shut="directory.counters.lookups_shut",
            shed="directory.counters.lookups_shed",
        ),
    ),
    (
        "kvd_directory_chunks_total",
        "Chunks asked for there, and of them those that somebody has.",
        labelled(
            "outcome",
            asked="directory.counters.chunks_asked",
            found="directory.counters.chunks_found",
        ),
    ),
    (
        "kvd_directory_entries_total",
        "Entries told to the directory, by what became of them.",
        labelled(
            "outcome",
            told="directory.counters.told",
            withdrawn="directory.counters.withdrawn",
            dropped="directory.counters.dropped",
            refused="directory.counters.refused",
            wrong="directory.counters.wrong",
            strange="directory.counters.strange",
        ),
    ),
    (
        "kvd_directory_trips_total",
        "Times the directory was given up as down or slow.",
        one("directory.counters.trips"),
    ),
    (
        "kvd_directory_sweeps_total",
        "Times that everything held was told anew.",
        one("directory.counters.sweeps"),
    ),
    (
        "kvd_directory_twins_total",
        "Signs of life of another daemon with this host's name.",
        one("directory.counters.twins"),
    ),
)
FLEET_NOW: Final = (
    (
        "kvd_peer_bytes",
        "Bytes of a host's fetches, by state; quarantined: late writes may still come.",
        tuple(
            Source(f"{_OF_PEER}.{state}_bytes", (("state", state),))
            for state in ("in_flight", "quarantined")
        ),
    ),
    ("kvd_peer_fetches", "Fetches from a host under way.", one(f"{_OF_PEER}.fetches")),
    (
        "kvd_peer_rate_bytes",
        "Bytes a second from a host, as measured.",
        one(f"{_OF_PEER}.bytes_s"),
    ),
    ("kvd_peer_held_bytes", "Bytes kept in place for other hosts.", one("peer.held_bytes")),
    (
        "kvd_peer_served",
        "Hosts and asks being served.",
        labelled("what", hosts="peer.served_hosts", asks="peer.served_asks"),
    ),
    ("kvd_peer_waiting", "Acquires that wait for other hosts.", one("peer.waiting")),
    ("kvd_directory_hosts", "Hosts of the fleet, this one included.", one("directory.hosts")),
    ("kvd_directory_waiting", "Entries waiting to be told.", one("directory.waiting")),
    ("kvd_directory_hints", "Answers kept for a moment.", one("directory.hints")),
    (
        "kvd_directory_entries_per_second_max",
        "How fast entries are told at most, for now.",
        one("directory.entries_per_s_max"),
    ),
    (
        "kvd_directory_sweeping",
        "1 while everything held is told anew.",
        one("directory.sweeping"),
    ),
)
