"""Which worker keeps the others: what all nodes see of theirs, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptrt.agents import watchdog
from ckptrt.agents.watchdog import Look
from ckptrt.clock import Clock, SystemClock

__all__ = ["Lookout"]

_PATIENCE_S = 3.0  # how long the other nodes' looks are waited for


class Lookout:
    """One alarm after the other. ask_others(rank): have all nodes look but that of this rank; how many do."""

    def __init__(self, ask_others: Callable[[int], int], clock: Clock | None = None) -> None:
        self._ask_others = ask_others
        self._clock = clock or SystemClock()
        self._looks: list[Look] = []
        self._missing = 0
        self._until_s: float | None = None

    def forget(self) -> None:
        """The workers are no longer those that were looked at."""
        self._looks, self._until_s = [], None

    def take(self, looks: Sequence[Look]) -> None:
        """One node's looks: the first ones are an alarm."""
        if self._until_s is None:
            self._missing = self._ask_others(looks[0].rank) if looks else 0
            self._until_s = self._clock.monotonic_s() + (_PATIENCE_S if self._missing else 0.0)
        else:
            self._missing -= 1
            self._until_s = 0.0 if self._missing <= 0 else self._until_s
        self._looks += looks

    def wake_in_s(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - self._clock.monotonic_s())

    def found(self) -> tuple[list[Look], tuple[Look, str]] | None:
        """Once all have told, or have had their time: the looks, and who it is and why."""
        if self._until_s is None or self._clock.monotonic_s() < self._until_s:
            return None
        looks = self._looks
        self.forget()
        return (looks, watchdog.odd_one(looks)) if looks else None
