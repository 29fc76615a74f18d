"""Carries out actions of a pure machine: in order, and what comes of them after them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

A = TypeVar("A")


class Pump(Generic[A]):
    """A queue of actions; an action that makes others does not go before those that wait."""

    def __init__(self, act: Callable[[A], None]) -> None:
        """Start empty; `act` carries out one."""
        self._act = act
        self._todo: deque[A] = deque()
        self._busy = False

    def __call__(self, actions: Iterable[A]) -> None:
        """Carry out actions, now or after those that are under way."""
        self._todo.extend(actions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._todo:
                self._act(self._todo.popleft())
        finally:
            self._busy = False
