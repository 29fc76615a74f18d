"""The wire format: golden bytes, round trips, and refusal of everything else.

A change that moves a golden byte is a new protocol version, never an edit of this file alone.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_client import wire, wire_gpu
from kvd_client.errors import WireError
from kvd_client.identity import Group, Layout
from tests.wire.admin_samples import ADMIN_KINDS, ADMIN_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT: Final = Layout(16, 8, "bfloat16", (Group("full", 2, 4, 64, 4096),), 2, 1, "l,k/1")
PLACE: Final = (1, 2, 0, 3, 8192, 4096, 77)
TABLES: Final[dict[str, wire.Table]] = {
    "TO_DAEMON": wire.TO_DAEMON,
    "TO_CLIENT": wire.TO_CLIENT,
    "REQUESTS": wire.REQUESTS,
    "REPLIES": wire.REPLIES,
}

SAMPLES: Final[list[tuple[str, Any, str]]] = [
    (
        "TO_DAEMON",
        wire.Hello(1, "vllm", b"\x11" * 32, "m@1", LAYOUT.fields(), 1, 0),
        "9801"  # array of 8, opcode
        "01"  # protocol
        "a4766c6c6d"  # client
        "c420"
        + "11"
        * 32  # namespace
        + "a36d4031"  # label
        "971008a862666c6f61743136"  # layout: chunk, page, dtype
        "9196a466756c6c020440cd100000"  # one group
        "0201a56c2c6b2f31"  # tp, pp, order
        "01"  # rank
        "00",  # lossy
    ),
    ("TO_DAEMON", wire.SlabRequest(7), "920207"),
    ("TO_DAEMON", wire.Bye(), "9103"),
    *ADMIN_SAMPLES,
    (
        "TO_CLIENT",
        wire.Welcome(1, 2**60, 3, 4096, 1 << 26),
        "960101cf100000000000000003cd1000ce04000000",
    ),
    ("TO_CLIENT", wire.SlabReply(7, 1 << 26), "930207ce04000000"),
    ("TO_CLIENT", wire.Refused(3, "too big"), "930303a7746f6f20626967"),
    ("REQUESTS", wire.Ping(2**64 - 1), "9201cfffffffffffffffff"),
    ("REQUESTS", wire.Lookup(5, b"\x22" * 32), "930205c420" + "22" * 32),
    (
        "REQUESTS",
        wire.Acquire(5, b"\x22" * 32, 0, 1000, 1),
        "960305c420" + "22" * 32 + "00cd03e801",
    ),
    ("REQUESTS", wire.Attach(6, b"\x33" * 16), "930406c410" + "33" * 16),
    ("REQUESTS", wire.Release(6, 9), "93050609"),
    (
        "REQUESTS",
        wire.Reserve(8, b"\x44" * 32, b"\x55" * 32, 3, 250, 1),
        "970608c420" + "44" * 32 + "c420" + "55" * 32 + "03ccfa01",
    ),
    (
        "REQUESTS",
        wire.Publish(8, wire.pack_generations([1, 2**40])),
        "930708c41001000000000000000000000000010000",
    ),
    ("REQUESTS", wire.Abort(8, wire.pack_generations([1])), "930808c4080100000000000000"),
    ("REQUESTS", wire.Prefill(4, 2048, 1000), "940904cd0800cd03e8"),
    ("REQUESTS", wire_gpu.UseGpu(3, b"\x77" * 16), "933203c410" + "77" * 16),
    ("REQUESTS", wire_gpu.GpuSlab(4, 1 << 31), "933304ce80000000"),
    (
        "REPLIES",
        wire_gpu.GpuSlabReply(4, 9, 1 << 28, b"\x88" * 64),
        "95330409ce10000000c440" + "88" * 64,
    ),
    ("REPLIES", wire.Pong(1), "920101"),
    ("REPLIES", wire.LookupReply(5, 12, 7), "9402050c07"),
    (
        "REPLIES",
        wire.AcquireReply(5, 0, 9, b"\x33" * 16, 2, 3, 1, wire.pack_places([PLACE])),
        "99"
        "03"
        "05"
        "00"
        "09"
        "c410" + "33" * 16 + "02"
        "03"
        "01"
        "c424"
        "01000000"
        "0200"
        "0000"
        "03000000"
        "0020000000000000"
        "0010000000000000"
        "4d00000000000000",
    ),
    ("REPLIES", wire.StatusReply(6, 5), "93050605"),
    (
        "REPLIES",
        wire.ReserveReply(8, wire.pack_places([(0, 0, 2, *wire.NOWHERE)])),
        "930608c4240000000000000200" + "00" * 28,
    ),
    ("REPLIES", wire.ResultsReply(8, b"\x00\x04"), "930708c4020004"),
]
IDS: Final = [type(message).__name__ for _, message, _ in SAMPLES]

NOT_INTEGERS: Final[list[Any]] = [-1, True, False, 1.0, "1", b"1", None, [1], []]
NOT_BYTES: Final[list[Any]] = [0, True, "x" * 32, None, [], [b"\0" * 32], 1.5]
NOT_TEXT: Final[list[Any]] = [0, True, b"text", None, ["text"], 1.5]

ILLEGAL: Final[dict[str, list[Any]]] = {
    "u1": [*NOT_INTEGERS, 2],
    "u32": [*NOT_INTEGERS, 2**32],
    "u64": NOT_INTEGERS,  # 2**64 has no encoding in msgpack
    "hash": [*NOT_BYTES, b"", b"\0" * 31, b"\0" * 33, b"\0" * 64],
    "handle": [*NOT_BYTES, b"\0" * 65],
    "token": [*NOT_BYTES, b"", b"\0" * 15, b"\0" * 17],
    "hashes": [*NOT_BYTES, b"\0", b"\0" * 33, b"\0" * 32 * (wire.HASHES_MAX + 1)],
    "generations": [*NOT_BYTES, b"\0", b"\0" * 9, b"\0" * 8 * (wire.HASHES_MAX + 1)],
    "objects": [*NOT_BYTES, b"\0", b"\0" * 37, b"\0" * 36 * (wire.HASHES_MAX + 1)],
    "results": [*NOT_BYTES, b"\0" * (wire.HASHES_MAX + 1)],
    "text": [*NOT_TEXT, "a" * 257, "é" * 129, "line\nbreak", "nul\0", "\u202e", "\x7f"],
    "long text": [*NOT_TEXT, "a" * 2049],
    "list": [0, True, None, "list", b"list", 1.5, [0] * 65],
}
KINDS: Final[dict[str, str]] = {
    **ADMIN_KINDS,
    "Hello": "u32 text hash text list u32 u1",
    "SlabRequest": "u32",
    "Bye": "",
    "Welcome": "u32 u64 u64 u32 u64",
    "SlabReply": "u32 u64",
    "Refused": "u32 long-text",
    "Ping": "u64",
    "Lookup": "u64 hashes",
    "Acquire": "u64 hashes u32 u32 u1",
    "Attach": "u64 token",
    "Release": "u64 u64",
    "Reserve": "u64 hash hashes u32 u32 u1",
    "Publish": "u64 generations",
    "Abort": "u64 generations",
    "Prefill": "u64 u32 u32",
    "UseGpu": "u64 token",
    "GpuSlab": "u64 u32",
    "GpuSlabReply": "u64 u64 u64 handle",
    "Pong": "u64",
    "LookupReply": "u64 u32 u32",
    "AcquireReply": "u64 u32 u64 token u32 u32 u1 objects",
    "StatusReply": "u64 u32",
    "ReserveReply": "u64 objects",
    "ResultsReply": "u64 results",
}
LONGEST: Final[dict[str, Any]] = {
    "u1": 1,
    "u32": 2**32 - 1,
    "u64": 2**64 - 1,
    "hash": b"\xff" * 32,
    "handle": b"\xff" * 64,
    "token": b"\xff" * 16,
    "hashes": b"\xff" * 32 * wire.HASHES_MAX,
    "generations": b"\xff" * 8 * wire.HASHES_MAX,
    "objects": b"\xff" * 36 * wire.HASHES_MAX,
    "results": b"\xff" * wire.HASHES_MAX,
    "text": "é" * 128,
    "long-text": "\U0001f600" * 2048,
}


def kinds(message: Any) -> list[str]:
    """Name the rule of each field of a message, as this file understands it."""
    return [kind.replace("-", " ") for kind in KINDS[type(message).__name__].split()]


def raw(message: Any) -> list[Any]:
    """Return what a message is before packing: its opcode and fields."""
    body: list[Any] = msgpack.unpackb(wire.encode(message))
    return body


def packed(body: Any) -> bytes:
    """Pack anything, legal or not."""
    payload = msgpack.packb(body)
    assert isinstance(payload, bytes)
    return payload


def refused(payload: bytes, table: wire.Table) -> WireError:
    """Decode what must be refused and return the error."""
    with pytest.raises(WireError) as caught:
        wire.decode(payload, table)
    return caught.value


def accepted_or_refused(payload: bytes, table: wire.Table) -> None:
    """Decode anything: a WireError, or a message that keeps its bytes on the way back."""
    try:
        message = wire.decode(payload, table)
    except WireError:
        return
    again = wire.encode(message)
    assert wire.encode(wire.decode(again, table)) == again
    assert type(message) in {kind for kind, _ in table.values()}


def test_every_message_is_sampled() -> None:
    """Each opcode of each table has golden bytes and rules in this file."""
    tabled = {(name, kind.__name__) for name, table in TABLES.items() for kind, _ in table.values()}
    assert {(name, type(message).__name__) for name, message, _ in SAMPLES} == tabled
    assert {kind for _, kind in tabled} == set(KINDS)
    assert all(len(kinds(message)) == len(message) for _, message, _ in SAMPLES)


@pytest.mark.parametrize(("name", "message", "golden"), SAMPLES, ids=IDS)
def test_golden_bytes(name: str, message: Any, golden: str) -> None:
    """Each message has exactly these bytes, and these bytes are that message."""
    assert wire.encode(message).hex() == golden
    decoded = wire.decode(bytes.fromhex(golden), TABLES[name])
    assert type(decoded) is type(message)
    assert decoded == message


@pytest.mark.parametrize(("name", "message", "golden"), SAMPLES, ids=IDS)
def test_every_illegal_field_is_refused_by_name(name: str, message: Any, golden: str) -> None:
    """A field of another type, sign, size or text is a WireError that names field and message."""
    body = raw(message)
    for at, (field, kind) in enumerate(zip(message._fields, kinds(message), strict=True), 1):
        for value in ILLEGAL[kind]:
            if value == body[at] and type(value) is type(body[at]):
                continue
            error = refused(packed([*body[:at], value, *body[at + 1 :]]), TABLES[name])
            whole = {"message", "protocol"}  # refused before the fields are looked at
            assert error.field in {f"{type(message).__name__}.{field}", *whole}, (field, value)


@pytest.mark.parametrize(("name", "message", "golden"), SAMPLES, ids=IDS)
def test_every_wrong_shape_is_refused(name: str, message: Any, golden: str) -> None:
    """Missing, extra and trailing parts, other containers and opcodes are WireErrors."""
    body, table = raw(message), TABLES[name]
    whole = bytes.fromhex(golden)
    for cut in range(len(whole)):
        refused(whole[:cut], table)
    refused(whole + b"\0", table)
    refused(whole + whole, table)
    refused(packed([*body, 0]), table)
    refused(packed(body[:-1]), table)
    for opcode in (-1, 0, 99, 2**64 - 1, True, 1.0, "1", b"\1", None, [1]):
        refused(packed([opcode, *body[1:]]), table)
    refused(packed({"0": body}), table)
    refused(packed([body]), table)


@pytest.mark.parametrize(("name", "message", "golden"), SAMPLES, ids=IDS)
def test_the_longest_message_fits(name: str, message: Any, golden: str) -> None:
    """What the rules allow at most has room in one packet or frame, and comes back."""
    values = [
        LONGEST.get(kind.replace(" ", "-"), value)
        for kind, value in zip(kinds(message), message, strict=True)
    ]
    if isinstance(message, wire.AdminHello):
        values[0] = wire.PROTOCOL
    if isinstance(message, wire.Hello):
        group = Group("sliding", 4096, 4096, 1 << 20, 1 << 36, 1 << 31)
        values[0] = wire.PROTOCOL
        values[4] = Layout(1 << 20, 1, "float8_e4m3fn", (group,) * 16, 16, 1, "é" * 128).fields()
    longest = type(message)(*values)
    payload = wire.encode(longest)
    on_socket = name in {"TO_DAEMON", "TO_CLIENT"}
    assert len(payload) <= (wire.PACKET_BYTES_MAX if on_socket else wire.MESSAGE_BYTES_MAX)
    assert wire.decode(payload, TABLES[name]) == longest


def hostile() -> Iterator[tuple[str, bytes]]:
    """Payloads made to hurt a decoder rather than to mean something."""
    yield "nothing", b""
    yield "nesting 600 deep", b"\x91" * 600 + b"\x01"
    yield "nesting beyond the unpacker's stack", b"\x91" * 100_000
    yield "nesting behind an opcode", b"\x92\x01" + b"\x91" * 2_000 + b"\x01"
    yield "array of 2**32 - 1", b"\xdd\xff\xff\xff\xff"
    yield "array of 65", b"\xdc\x00\x41" + b"\x01" * 65
    yield "array with fewer items than declared", b"\xdc\x00\x10\x01"
    yield "map of 2**32 - 1", b"\xdf\xff\xff\xff\xff"
    yield "map", b"\x92\x01\x81\x01\x02"
    yield "bytes of 2**32 - 1", b"\x92\x01\xc6\xff\xff\xff\xff"
    yield "text of 2**32 - 1", b"\x92\x01\xdb\xff\xff\xff\xff"
    yield "extension of 2**32 - 1", b"\x92\x01\xc9\xff\xff\xff\xff\x05"
    yield "extension", b"\x92\x01\xd4\x05\x00"
    yield "empty extension", b"\x92\x01\xc7\x00\x05"
    yield "time stamp", b"\x92\x01\xd6\xff\x00\x00\x00\x00"
    yield "empty time stamp", b"\x92\x01\xc7\x00\xff"
    yield "text that is not UTF-8", b"\x92\x01\xa2\xff\xff"
    yield "text with a surrogate", b"\x92\x01\xa3\xed\xa0\x80"
    yield "reserved byte", b"\xc1"
    yield "not a number", b"\x92\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(("what", "payload"), list(hostile()), ids=[w for w, _ in hostile()])
def test_hostile_payload_is_refused(what: str, payload: bytes) -> None:
    """Deep nesting, huge declared lengths, maps and extension types are WireErrors."""
    for table in TABLES.values():
        refused(payload, table)


@pytest.mark.parametrize(
    "odd", [b"\xc7\x00\x05", b"\x80", b"\xc0", b"\x91" * 600 + b"\x01", b"\xcb" + b"\xff" * 8]
)
def test_an_odd_layout_never_becomes_one(odd: bytes) -> None:
    """What Hello's list may still hide (empty extension or map, nesting) ends as ValueError."""
    hello = SAMPLES[0][1]
    good = wire.encode(hello._replace(layout=[1, 2, 3]))
    for inner in (b"\x91" + odd, b"\x97" + odd * 7, b"\x97\x10\x08\xa4int8\x91" + odd + odd * 3):
        payload = good.replace(b"\x93\x01\x02\x03", inner)
        try:
            fields = wire.decode(payload, wire.TO_DAEMON).layout
        except WireError:
            continue
        with pytest.raises(ValueError, match="layout"):
            Layout.from_fields(fields)


@pytest.mark.parametrize("odd", [b"\x81\xa1k\x02", b"\xd4\x05\x00", b"\xd6\xff" + b"\0" * 4])
def test_a_list_hides_no_map_and_no_extension(odd: bytes) -> None:
    """In the one field that takes any list, a map, extension or time stamp is a WireError too."""
    good = wire.encode(SAMPLES[0][1]._replace(layout=[7]))
    assert good.count(b"\x91\x07") == 1
    wire.decode(good, wire.TO_DAEMON)
    error = refused(good.replace(b"\x91\x07", b"\x91" + odd), wire.TO_DAEMON)
    assert error.field == "message"


def test_another_protocol_is_told_apart_from_garbage() -> None:
    """A greeting of another version, even with other fields, is refused by its version."""
    for fields in ([2, "client"], [0], [2, *SAMPLES[0][1][1:]]):
        assert refused(packed([1, *fields]), wire.TO_DAEMON).field == "protocol"


def test_an_error_never_repeats_the_value() -> None:
    """The text of a refusal holds no byte of what was refused."""
    error = refused(packed([1, 1, "secret\n", b"", "", [], 0, 0]), wire.TO_DAEMON)
    assert "secret" not in str(error)
    assert error.field == "Hello.client"


def test_only_the_protocol_s_messages_are_encoded() -> None:
    """Anything but a message of the tables is a KeyError, not bytes."""
    for other in ((1, 2), wire.Place(*PLACE)):
        with pytest.raises(KeyError):
            wire.encode(other)


@pytest.mark.parametrize("bad", [2**64, -(2**63) - 1, object(), "\ud800", {1j}])
def test_what_cannot_be_encoded_leaves_no_trace(bad: Any) -> None:
    """After a message that msgpack refuses half-way, the next one has its own bytes only."""
    with pytest.raises((OverflowError, TypeError, ValueError)):
        wire.encode(wire.Lookup(1, bad))
    for _, message, golden in SAMPLES:
        assert wire.encode(message).hex() == golden


@settings(max_examples=5 * settings().max_examples)
@given(st.binary(max_size=200), st.sampled_from(sorted(TABLES)))
def test_any_bytes_are_decoded_or_refused(payload: bytes, name: str) -> None:
    """Whatever the bytes, decoding gives a message or a WireError."""
    accepted_or_refused(payload, TABLES[name])


VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40)
    | st.sampled_from([b"\0" * 32, b"\0" * 16, b"\0" * 8, b"\0" * 36]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=10,
)


@given(st.integers(0, 9), st.lists(VALUES, max_size=8), st.sampled_from(sorted(TABLES)))
def test_any_fields_are_decoded_or_refused(opcode: int, fields: list[Any], name: str) -> None:
    """Whatever msgpack values follow an opcode, decoding gives a message or a WireError."""
    accepted_or_refused(packed([opcode, *fields]), TABLES[name])


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_message_is_decoded_or_refused(seed: int) -> None:
    """A few bytes changed, cut, doubled or moved give another message or a WireError."""
    chance = random.Random(seed)
    for _ in range(5_000):
        name, _, golden = chance.choice(SAMPLES)
        payload = bytearray.fromhex(golden)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(payload) + 1)
            match chance.randrange(4):
                case 0:
                    payload[at : at + 1] = chance.randbytes(1)
                case 1:
                    del payload[at : at + chance.randint(1, 9)]
                case 2:
                    payload[at:at] = chance.randbytes(chance.randint(1, 3))
                case _:
                    payload[at:at] = payload[chance.randrange(len(payload) + 1) :][:9]
        accepted_or_refused(bytes(payload), TABLES[name])


WORDS: Final = {
    "u1": st.integers(0, 1),
    "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, 2**64 - 1),
    "hash": st.binary(min_size=32, max_size=32),
    "handle": st.binary(max_size=64),
    "token": st.binary(min_size=16, max_size=16),
    "hashes": st.lists(st.binary(min_size=32, max_size=32), max_size=3).map(b"".join),
    "generations": st.lists(st.integers(0, 2**64 - 1), max_size=3).map(wire.pack_generations),
    "objects": st.lists(st.binary(min_size=36, max_size=36), max_size=3).map(b"".join),
    "results": st.binary(max_size=9),
    "text": st.text(st.characters(codec="utf-8"), max_size=60).filter(str.isprintable),
    "long text": st.text(st.characters(codec="utf-8"), max_size=60),
    "list": st.just(LAYOUT.fields()),
}


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """Every message with any legal fields comes back as it was."""
    name, sample, _ = data.draw(st.sampled_from(SAMPLES))
    message = type(sample)(*(data.draw(WORDS[kind]) for kind in kinds(sample)))
    if isinstance(message, wire.Hello | wire.AdminHello):
        message = message._replace(protocol=wire.PROTOCOL)
    assert wire.decode(wire.encode(message), TABLES[name]) == message


@given(
    st.lists(st.binary(min_size=32, max_size=32), max_size=5),
    st.lists(st.integers(0, 2**64 - 1), max_size=5),
    st.lists(
        st.builds(
            wire.Place,
            *[st.integers(0, 2**bits - 1) for bits in (32, 16, 16, 32, 64, 64, 64)],
        ),
        max_size=5,
    ),
)
def test_joined_records_round_trip(
    hashes: list[bytes], generations: list[int], places: list[wire.Place]
) -> None:
    """Joined hashes, generations and places are cut where they were joined."""
    assert wire.split_hashes(b"".join(hashes)) == hashes
    assert wire.unpack_generations(wire.pack_generations(generations)) == generations
    assert list(wire.unpack_places(wire.pack_places(places))) == places
