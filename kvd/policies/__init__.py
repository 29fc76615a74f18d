"""Eviction and admission policies, by name.

    base.py        what every policy is told and asked
    lru.py         lru         leaf-first LRU
    s3fifo.py      s3fifo      S3-FIFO over leaves
    lifetable.py   lifetable   reuse by age, learned; on hazard.py; the default
    admission.py   what is written to the tier below: all, second-touch, predicted

Chosen by replaying traces: `kvd replay`, `python -m bench.replay`, docs/adr/0011.
"""

from __future__ import annotations

from typing import Final

from kvd.policies.admission import Admission, AdmitAll, Predicted, SecondTouch
from kvd.policies.base import B, Policy, Request
from kvd.policies.lifetable import LifeTable
from kvd.policies.lru import LeafLru
from kvd.policies.s3fifo import LeafS3Fifo

__all__ = [
    "ADMISSIONS",
    "DEFAULT",
    "POLICIES",
    "Admission",
    "AdmitAll",
    "B",
    "LeafLru",
    "LeafS3Fifo",
    "LifeTable",
    "Policy",
    "Predicted",
    "Request",
    "SecondTouch",
    "make",
    "make_admission",
]

POLICIES: Final = ("lifetable", "lru", "s3fifo")
DEFAULT: Final = "lifetable"
ADMISSIONS: Final = ("all", "second-touch", "predicted")


def make(name: str) -> Policy[B]:
    """Make the policy of a name of `POLICIES`, for one tier."""
    assert name in POLICIES
    match name:
        case "lru":
            return LeafLru()
        case "s3fifo":
            return LeafS3Fifo()
        case _:
            return LifeTable()


def make_admission(
    name: str, lower: Policy[B], *, remembered: int, threshold: float
) -> Admission[B]:
    """Make the admission of a name of `ADMISSIONS` to the tier of a policy.

    Raises:
        TypeError: `predicted` without a policy that predicts.
    """
    assert name in ADMISSIONS
    match name:
        case "all":
            return AdmitAll()
        case "second-touch":
            return SecondTouch(remembered)
        case _:
            if not isinstance(lower, LifeTable):
                raise TypeError("only a life table predicts reuse")
            return Predicted(lower, threshold)
