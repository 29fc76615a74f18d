"""A retrieval task that is hard enough to lose: many facts of one kind in one document.

A document is prose of the language's reference with a sentence for each of several names at even
distances: "The password of Clara is copper." Asked is, for each name, the word after "The password
of Clara is"; right is the word that is likeliest among those of the document. So a model that has
no memory of the document scores one in as many as there are names.

Declared before FP8 was asked: names, words, wording, length and number were chosen on documents of
other seeds (1001 and on) with bfloat16 alone, so that it is right between half and 95 times of 100.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAMES: Final = (
    "Anna Peter Martha Oliver Clara Victor Emma Walter Alice Henry Laura Simon Julia Thomas Helen "
    "Arthur"
)
_WORDS: Final = (
    "granite copper walnut harbor silver meadow candle velvet thunder garden marble ribbon falcon "
    "pepper island winter bottle mirror orange pillow button ladder rocket tunnel basket hammer "
    "lantern saddle castle blanket anchor violin"
)
NAMES: Final = tuple(_NAMES.split())
WORDS: Final = tuple(_WORDS.split())
FACT: Final = "The password of {} is {}."
ASK: Final = "The password of {} is"
FACTS: Final = 12
DOCUMENTS: Final = 4
TOKENS: Final = 1500
Z95: Final = 1.959964


class Document(NamedTuple):
    """A document, and what is in it, in the order of depth."""

    text: str
    names: list[str]
    words: list[str]


def document(prose: str, count_of: Callable[[str], int], seed: int) -> Document:
    """Make a document.

    Args:
        prose: Where the filler comes from.
        count_of: Counts the tokens of a text.
        seed: Which.
    """
    order = random.Random(seed)
    names, words = order.sample(NAMES, FACTS), order.sample(WORDS, FACTS)
    start = order.randrange(len(prose) - 10 * TOKENS)
    paragraphs: list[str] = []
    tokens = 0
    for paragraph in prose[start : start + 10 * TOKENS].split("\n\n")[1:]:
        tokens += count_of(paragraph + "\n\n")
        if tokens > TOKENS:
            break
        paragraphs.append(paragraph)
    apart = len(paragraphs) / FACTS
    for index in reversed(range(FACTS)):
        paragraphs.insert(int(index * apart), FACT.format(names[index], words[index]))
    return Document("\n\n".join(paragraphs) + "\n\n", names, words)


def interval(right: int, asked: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    share, square = right / asked, Z95 * Z95
    middle = (share + square / (2 * asked)) / (1 + square / asked)
    half = Z95 / (1 + square / asked)
    half *= math.sqrt(share * (1 - share) / asked + square / (4 * asked * asked))
    return middle - half, middle + half


def paired_p(one: Sequence[bool], other: Sequence[bool]) -> float:
    """Return McNemar's exact two-sided p: how likely such a difference is if there is none."""
    first = sum(a and not b for a, b in zip(one, other, strict=True))
    second = sum(b and not a for a, b in zip(one, other, strict=True))
    asked = first + second
    tail = sum(math.comb(asked, k) for k in range(min(first, second) + 1))
    return min(1.0, 2.0 * tail / float(2**asked))
