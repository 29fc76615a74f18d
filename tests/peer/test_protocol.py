"""The peer protocol step by step: what is asked, believed, refused, quarantined and fenced."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from kvd.peer.asker import Asker, Mover
from kvd.peer.breaker import Breaker, Bucket
from kvd.peer.holder import Holder
from kvd.peer.messages import (
    KINDS,
    Agent,
    Ask,
    Have,
    Hello,
    Message,
    Offer,
    PeerError,
    Piece,
    Ping,
    Pong,
    Release,
    Stop,
    Welcome,
    decode,
    encode,
    seal,
    tag_of,
)
from kvd.peer.protocol import (
    MS,
    Drop,
    Ended,
    GiveBack,
    Held,
    HolderAction,
    KillMover,
    Knobs,
    Land,
    Publish,
    Quarantine,
    S,
    Send,
    StartMover,
    Take,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE, LAYOUT, TAG = b"n" * 32, b"l" * 32, b"t" * 16
KEYS = [bytes([i]) * 32 for i in range(4)]
SIZE = 4096
DIGEST = b"d" * 16
KNOBS = Knobs(lease_ms=10_000, quarantine_bytes=2 * SIZE)
NOW = 100 * S

EXAMPLES: list[Message] = [
    Hello(1, "prod", "a.example", 7, "tcp"),
    Welcome(1, "prod", "b.example", 9, "rdma"),
    Ask(1, 9, TAG, NAMESPACE, LAYOUT, 1000, ((KEYS[0], 1), (KEYS[1], (1 << 256) - 1))),
    Agent(3, b"metadata"),
    Offer(1, 9, 0, 3, (Piece(255, 1 << 40, SIZE, 5, 1, b"s" * 16),)),
    Stop(1, 9, 2, "busy", 250),
    Have(1, 0),
    Release(1),
    Ping(4),
    Pong(4, 9),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_message_survives_the_wire(message: Message) -> None:
    """Every message comes out as it went in, and its frame says its length."""
    frame = encode(message)
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert decode(frame[4:]) == message


def test_every_kind_has_an_example() -> None:
    """The examples above leave no kind of message out."""
    assert [type(message) for message in EXAMPLES] == list(KINDS)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_field_has_a_rule(message: Message) -> None:
    """A field of another type, missing or too large, is refused, whichever it is."""
    fields = msgpack.unpackb(encode(message)[4:])
    wrongs: list[Any] = [None, -1, 1.5, "", "x\n", b"", [], [[]], [[b"k", 1]], {}, "x" * 300]
    for place in range(1, len(fields)):
        for wrong in wrongs:
            broken = [*fields[:place], wrong, *fields[place + 1 :]]
            with pytest.raises(PeerError):
                decode(msgpack.packb(broken))
    for short in (fields[:-1], [*fields, 0], [99, *fields[1:]], [], 5):
        with pytest.raises(PeerError):
            decode(msgpack.packb(short))


def test_noise_is_refused() -> None:
    """Random bytes raise PeerError and nothing else."""
    noise = random.Random(1)
    for _ in range(3000):
        body = bytearray(encode(noise.choice(EXAMPLES))[4:])
        for _ in range(noise.randint(1, 4)):
            body[noise.randrange(len(body))] = noise.randrange(256)
        try:
            decode(bytes(body))
        except PeerError:
            continue


def test_a_pieces_end_does_not_wrap() -> None:
    """An address and a length that reach beyond 64 bits are refused."""
    offer = Offer(1, 9, 0, 3, (Piece(0, (1 << 64) - 10, 20, 5, 0, b"s" * 16),))
    with pytest.raises(PeerError, match="pieces"):
        decode(encode(offer)[4:])


def test_seal_tells_everything_apart() -> None:
    """Another namespace, layout, key, column, size, generation, form or content: another seal."""
    base = (NAMESPACE, LAYOUT, KEYS[0], (0, SIZE, 1, 0), DIGEST)
    others = [
        (b"x" * 32, *base[1:]),
        (base[0], b"x" * 32, *base[2:]),
        (*base[:2], KEYS[1], *base[3:]),
        *((*base[:3], numbers, DIGEST) for numbers in ((1, SIZE, 1, 0), (0, 1, 1, 0))),
        *((*base[:3], numbers, DIGEST) for numbers in ((0, SIZE, 2, 0), (0, SIZE, 1, 1))),
        (*base[:4], b"x" * 16),
    ]
    assert len({seal(*base), *(seal(*other) for other in others)}) == 1 + len(others)


def test_tag_hides_the_tenants_name() -> None:
    """A tenant's tag is the same on all hosts of a cluster, another elsewhere, and no name."""
    assert tag_of("prod", "alice") == tag_of("prod", "alice") != tag_of("test", "alice")
    assert tag_of("prod", "alice") != tag_of("prod", "bob")
    assert b"alice" not in tag_of("prod", "alice")


# -------------------------------------------------------------------- the asker


class Fetching:
    """An asker that has asked for the first chunks and has a mover."""

    def __init__(self, chunks: int = 2, deadline_s: float = 60) -> None:
        """Ask at NOW."""
        self.asker = Asker("b", KNOBS, random.Random(1).random)
        self.asker.link_up(NOW, epoch=9)
        wants = tuple((key, 1) for key in KEYS[:chunks])
        want = Want(TAG, NAMESPACE, LAYOUT, (SIZE,), wants, NOW + int(deadline_s * S))
        self.fetch, actions = self.asker.fetch(NOW, want)
        assert [type(action) for action in actions] == [Send, StartMover]
        self.life = self.asker.life
        self.asker.mover_up(NOW, self.life)

    def offer(self, chunk: int, **other: Any) -> list[object]:
        """Say what the holder says of a chunk."""
        message = Offer(self.fetch, 9, chunk, 1, (self.piece(chunk),))._replace(**other)
        return list(self.asker.heard(NOW, message))

    @staticmethod
    def piece(at: int) -> Piece:
        """Describe a chunk's object."""
        sealed = seal(NAMESPACE, LAYOUT, KEYS[at], (0, SIZE, 5, 0), DIGEST)
        return Piece(0, 1 << 20, SIZE, 5, 0, sealed)

    def begin(self, at: int) -> int:
        """Let a read of a chunk begin; return its number."""
        (land,) = self.offer(at)
        assert isinstance(land, Land)
        return land.read


def test_what_fits_is_published_and_handed_back() -> None:
    """Right bytes in time are published at once, chunk by chunk, and the holder hears of each."""
    f = Fetching()
    first, second = f.begin(0), f.begin(1)
    assert f.asker.landed(NOW + S, first, [DIGEST]) == [
        Publish(first),
        Send("b", Have(f.fetch, 0)),
    ]
    assert f.asker.landed(NOW + S, second, [DIGEST]) == [
        Publish(second),
        Send("b", Have(f.fetch, 1)),
        Send("b", Release(f.fetch)),
        Ended(f.fetch, 2, "done"),
    ]
    assert not f.asker.fetches
    assert not f.asker.reads


def test_wrong_bytes_are_not_published() -> None:
    """A digest that does not fit the seal frees the slot, ends the fetch, and is a strike."""
    f = Fetching()
    for _ in range(3):
        read = f.begin(0)
        actions = f.asker.landed(NOW, read, [b"x" * 16])
        assert actions[0] == GiveBack(read)
        assert isinstance(actions[-1], Ended)
        if not f.asker.refusal(NOW):
            want = Want(TAG, NAMESPACE, LAYOUT, (SIZE,), ((KEYS[0], 1),), NOW + S)
            f.fetch, _ = f.asker.fetch(NOW, want)
    assert f.asker.counts["corrupt"] == 3
    assert f.asker.refusal(NOW + 59 * S) == "backing off"
    assert not f.asker.refusal(NOW + 61 * S)


def test_a_lease_ends_by_the_askers_own_clock() -> None:
    """Right bytes after nine tenths of the lease, counted from the request, are not published."""
    in_time, late = Fetching(), Fetching()
    for f, at, action in ((in_time, 8.9, Publish), (late, 9.1, GiveBack)):
        read = f.begin(0)
        assert isinstance(f.asker.landed(NOW + int(at * S), read, [DIGEST])[0], action)


@pytest.mark.parametrize(
    "other",
    [
        {"epoch": 8},
        {"ask": 99},
        {"at": 2},
        {"pieces": (Fetching.piece(0)._replace(size_bytes=SIZE - 1),)},
        {"pieces": (Fetching.piece(0)._replace(column=1),)},
        {"pieces": (Fetching.piece(0), Fetching.piece(0))},
    ],
    ids=["old epoch", "other ask", "other chunk", "short", "other column", "twice"],
)
def test_what_was_not_asked_for_is_not_read(other: dict[str, Any]) -> None:
    """An offer of another life, ask, chunk, column or size begins no read."""
    assert not [a for a in Fetching().offer(0, **other) if isinstance(a, Land)]


def test_an_offer_said_twice_is_read_once() -> None:
    """The second of two equal offers does nothing, before, during and after the read."""
    f = Fetching()
    read = f.begin(0)
    assert f.offer(0) == []
    f.asker.landed(NOW, read, [DIGEST])
    assert f.offer(0) == []


def test_a_late_read_is_quarantined_then_fenced() -> None:
    """Past its deadline a slot stays out of use until the mover has been reaped."""
    f = Fetching()
    read = f.begin(0)
    later = NOW + 4 * S
    actions = f.asker.tick(later)
    assert Quarantine(read) in actions
    assert any(isinstance(a, Ended) for a in actions)
    assert not any(isinstance(a, GiveBack | KillMover) for a in actions)
    assert f.asker.quarantined_bytes == SIZE
    assert f.asker.refusal(later) == "backing off"
    later += KNOBS.quarantine_ms * MS
    assert f.asker.tick(later) == [KillMover(f.life, "old")]
    assert f.asker.mover is Mover.DYING
    assert f.asker.mover_gone(later, f.life) == [GiveBack(read)]
    assert f.asker.quarantined_bytes == 0
    assert f.asker.mover.value == "none"


def test_a_late_completion_frees_and_publishes_nothing() -> None:
    """A quarantined read that completes after all gives its slot back; its bytes are not used."""
    f = Fetching()
    read = f.begin(0)
    f.asker.tick(NOW + 4 * S)
    assert f.asker.landed(NOW + 5 * S, read, [DIGEST]) == [GiveBack(read)]
    assert f.asker.landed(NOW + 5 * S, read, [DIGEST]) == []
    assert f.asker.tick(NOW + 50 * S) == []


def test_a_full_quarantine_is_fenced_at_once() -> None:
    """Two slots reach the budget: nothing more is asked, the mover is killed at once."""
    f = Fetching()
    f.begin(0)
    f.begin(1)
    assert KillMover(f.life, "full") in f.asker.tick(NOW + 4 * S)
    assert f.asker.refusal(NOW + 1000 * S) == "fencing"


def test_a_caller_waits_no_longer_than_it_said() -> None:
    """At its deadline a fetch has ended for its caller; what lands later is still published."""
    f = Fetching(deadline_s=1)
    read = f.begin(0)
    assert Ended(f.fetch, 0, "deadline") in f.asker.tick(NOW + int(1.1 * S))
    actions = f.asker.landed(NOW + int(1.2 * S), read, [DIGEST])
    assert actions[0] == Publish(read)
    assert not any(isinstance(a, Ended) for a in f.asker.tick(NOW + 20 * S))


def test_a_silent_holder_is_given_up() -> None:
    """Without a word for the answer time the fetch ends, and the host is backed off."""
    f = Fetching()
    actions = f.asker.tick(NOW + 6 * S)
    assert Ended(f.fetch, 0, "silent") in actions
    assert f.asker.refusal(NOW + 6 * S) == "backing off"


def test_a_lost_link_ends_all_fetches() -> None:
    """When the link goes, every caller hears at once, and nothing is asked until it is back."""
    f = Fetching()
    read = f.begin(0)
    assert f.asker.link_down(NOW) == [Ended(f.fetch, 0, "link lost")]
    assert f.asker.refusal(NOW) == "no link"
    f.asker.link_up(NOW, 10)
    assert f.asker.landed(NOW, read, [DIGEST]) == [GiveBack(read)]


# -------------------------------------------------------------------- the holder


def ask(chunks: int = 4, **other: Any) -> Ask:
    """Ask for some chunks."""
    wants = tuple((key, 1) for key in KEYS[:chunks])
    return Ask(1, 9, TAG, NAMESPACE, LAYOUT, 10_000, wants)._replace(**other)


def holder(**knobs: int) -> Holder:
    """Make a holder that serves host a TAG."""
    return Holder(9, KNOBS._replace(**knobs), lambda host, tag, _: (host, tag) == ("a", TAG))


def test_chunks_are_offered_in_order_and_let_go() -> None:
    """Whatever is ready first, offers come in prefix order; what is handed back is unpinned."""
    h = holder()
    takes = [a for a in h.heard(NOW, "a", ask(2)) if isinstance(a, Take)]
    held = [Held(0, 1 << 20, SIZE, 5, 0, DIGEST)]
    assert h.taken(takes[1].ticket, 1, held) == []
    said = [a.message for a in h.taken(takes[0].ticket, 1, held) if isinstance(a, Send)]
    assert [type(message) for message in said] == [Offer, Offer, Stop]
    assert said[0] == Offer(1, 9, 0, 1, (Fetching.piece(0),))
    assert h.heard(NOW, "a", Have(1, 0)) == [Drop(takes[0].ticket)]
    assert h.heard(NOW, "a", Release(1)) == [Drop(takes[1].ticket)]
    assert not h.services


@pytest.mark.parametrize(("held", "why"), [(None, "miss"), ((), "not now")])
def test_a_miss_ends_the_ask(held: tuple[Held, ...] | None, why: str) -> None:
    """What is not here is said at once, what is not given otherwise; nothing after it is offered.

    Only a miss says that the directory is wrong.
    """
    h = holder()
    takes = [a for a in h.heard(NOW, "a", ask(2)) if isinstance(a, Take)]
    actions = h.taken(takes[0].ticket, 1, held)
    assert Send("a", Stop(1, 9, 0, why, 0)) in actions


@pytest.mark.parametrize(
    ("host", "other", "why"),
    [
        ("a", {"epoch": 8}, "epoch"),
        ("b", {}, "forbidden"),
        ("a", {"tag": b"x" * 16}, "forbidden"),
        ("a", {"lease_ms": 20_000}, "busy"),
    ],
)
def test_who_may_not_ask_gets_nothing(host: str, other: dict[str, Any], why: str) -> None:
    """Another epoch, host or tenant is told so, and nothing is pinned for it."""
    (said,) = holder().heard(NOW, host, ask(**other))
    assert isinstance(said, Send)
    assert isinstance(said.message, Stop)
    assert said.message.why == why


def test_a_host_gets_a_bounded_share() -> None:
    """More asks than allowed are told to come again; chunks are held only so far ahead."""
    h = holder(asks_max=1, ahead_max=2)
    assert len(h.heard(NOW, "a", ask())) == 2
    (said,) = h.heard(NOW, "a", ask(ask=2))
    assert isinstance(said, Send)
    assert said.message == Stop(2, 9, 0, "busy", 250)


def test_only_so_many_bytes_are_held_ahead() -> None:
    """Before a chunk's size is known few are taken; then as many as fit, what comes included."""
    h = holder(ahead_bytes=3 * SIZE, ahead_first=2)
    takes = [a for a in h.heard(NOW, "a", ask(8)) if isinstance(a, Take)]
    assert len(takes) == 2
    held = [Held(0, 1 << 20, SIZE, 5, 0, DIGEST)]
    for _ in range(8):
        more = [a for a in h.taken(takes[0].ticket, 1, held) if isinstance(a, Take)]
        takes = takes[1:] + more
        if not takes:
            break
    assert h.held_bytes() == 3 * SIZE
    (service,) = h.services.values()
    assert len(service.tickets) == 3, "none is taken that does not fit"
    again = h.heard(NOW, "a", Have(1, 0))
    assert [type(action) for action in again] == [Drop, Take]


def test_a_lease_ends_by_the_holders_clock_too() -> None:
    """What was never handed back is unpinned when the lease has ended, or the link has."""
    ends: list[Callable[[Holder], list[HolderAction]]] = [
        lambda h: h.tick(NOW + 10 * S),
        lambda h: h.link_down("a"),
    ]
    for end in ends:
        h = holder()
        h.heard(NOW, "a", ask(2))
        assert h.tick(NOW + 9 * S) == []
        assert [type(action) for action in end(h)] == [Drop, Drop]


# -------------------------------------------------------------------- a fleet's protection


def test_pauses_grow_and_success_opens_slowly() -> None:
    """Each failure doubles the pause up to a minute; afterwards asks are allowed 1, 2, 4."""
    breaker = Breaker(4, random.Random(1).random)
    now, pauses = NOW, []
    for _ in range(12):
        breaker.failed(now)
        breaker.failed(now)  # the same failure: many reads end at once
        start = now
        while breaker.open(now):
            now += S // 4
        pauses.append((now - start) / S)
    assert pauses[0] <= 1
    assert pauses[2] > pauses[0]
    assert 30 <= pauses[-1] <= 91
    allowed = []
    for _ in range(4):
        allowed.append(breaker.allowed)
        breaker.succeeded()
    assert allowed == [1, 2, 4, 4]


def test_a_bucket_is_a_bound_over_time() -> None:
    """No more than the burst and the rate's share of the time gets through."""
    bucket = Bucket(10, 5)
    spent = sum(bucket.spend(NOW + i * S // 100, 1) for i in range(1000))
    assert 100 <= spent <= 106
    debt = Bucket(10, 5)
    assert debt.spend(NOW, 50)
    assert not debt.spend(NOW + 4 * S, 1)
    assert debt.spend(NOW + 5 * S, 1)
