"""Which chunks are told to vLLM's event stream: each once, when every rank has it."""

from __future__ import annotations

from kvd_client.vllm.announce import PENDING_MAX, Announcer, chunk_of

TOKENS = list(range(64))
HASHES = [bytes([n]) * 32 for n in range(4)]


def test_a_chunk_is_told_when_all_ranks_have_it_and_once() -> None:
    """Reports add up over steps; later ones, and those of unknown chunks, say nothing."""
    announcer = Announcer(2)
    chunk = chunk_of(HASHES, TOKENS, None, 1, hash_tokens=16, chunk_tokens=32)
    announcer.expect(HASHES[3], chunk)
    assert list(announcer.reported({HASHES[3]: 1, b"other": 2})) == []
    announcer.expect(HASHES[3], chunk)  # another request with the same prefix
    assert list(announcer.reported({HASHES[3]: 1})) == [chunk]
    assert list(announcer.reported({HASHES[3]: 2})) == []


def test_a_chunk_is_described_by_its_blocks() -> None:
    """Its block hashes, the one before them, and its tokens."""
    chunk = chunk_of(HASHES, TOKENS, ("a", 1), 1, hash_tokens=16, chunk_tokens=32)
    assert chunk == ((HASHES[2], HASHES[3]), HASHES[1], tuple(range(32, 64)), ("a", 1))
    assert chunk_of(HASHES, TOKENS, None, 0, hash_tokens=16, chunk_tokens=32).parent is None


def test_what_is_never_reported_is_forgotten() -> None:
    """The oldest goes when there are too many."""
    announcer = Announcer(1)
    chunk = chunk_of(HASHES, TOKENS, None, 0, hash_tokens=16, chunk_tokens=32)
    for number in range(PENDING_MAX + 1):
        announcer.expect(number.to_bytes(32, "big"), chunk)
    assert list(announcer.reported({bytes(32): 1})) == []
    assert list(announcer.reported({(1).to_bytes(32, "big"): 1})) == [chunk]
