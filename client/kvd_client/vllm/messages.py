"""What the two halves tell each other, once a step. Plain data, pickled by vLLM. Pure.

A block id of 0 is vLLM's null block and never holds data: here it means "not this page".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvd_client.identity import Layout, Namespace


class Load(NamedTuple):
    """Copy chunks of a lease into blocks.

    Attributes:
        request: The engine's id of the request.
        token: Of the scheduler half's lease, to attach to.
        first: First chunk.
        blocks: For each group the block ids of all pages of all chunks, in order; 0 to skip.
        wait: The step that carries this waits for it (`load: sync`).
    """

    request: str
    token: bytes
    first: int
    blocks: tuple[tuple[int, ...], ...]
    wait: bool


class Save(NamedTuple):
    """Copy blocks into kvd once this step has filled them.

    Attributes:
        request: The engine's id of the request.
        parent: Hash of the chunk before the first; empty when the first is the prompt's first.
        hashes: Of the chunks, in order.
        blocks: For each group the block ids of all pages of all chunks; where one page of a chunk
            is 0, the chunk's object of that group is not saved.
    """

    request: str
    parent: bytes
    hashes: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]


class Step(NamedTuple):
    """What a step brings the worker half.

    Attributes:
        generation: Of this engine's namespace: raised when the cache was reset.
        loads: To begin.
        saves: To begin when the step's forward is over.
        reused: Blocks that this step, or its loads, may write to.
        tokens: That the step computes.
    """

    generation: str = ""
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    reused: tuple[int, ...] = ()
    tokens: int = 0


class Identity(NamedTuple):
    """What an engine tells kvd it is.

    Attributes:
        namespace: Without the salt, which each process reads for itself.
        layout: Of one rank's objects.
        page_tokens: Tokens a page, for each of the engine's groups.
        hash_tokens: Tokens that each of the engine's block hashes covers.
    """

    namespace: Namespace
    layout: Layout
    page_tokens: tuple[int, ...]
    hash_tokens: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """The engine's blocks a chunk, for each group."""
        return tuple(self.layout.chunk_tokens // size for size in self.page_tokens)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of these that a chunk keeps, its last ones: of states, the one at its end."""
        return tuple(
            1 if group.kind == "recurrent" else count
            for group, count in zip(self.layout.groups, self.blocks, strict=True)
        )
