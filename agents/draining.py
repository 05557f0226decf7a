"""Draining a set of workers: the agreement on the last step, held against the ranks' connections and the clock."""

from __future__ import annotations

from collections.abc import Callable

from ckptrt.agents import drain
from ckptrt.agents.drain import Agreement
from ckptrt.clock import Clock, SystemClock
from ckptrt.wire import Message

__all__ = ["Draining"]

_HOLD_S = 1.0  # how long a rank that has arrived is kept waiting for the others' answers


class Draining:
    """One drain of one set. broadcast(message): to all its ranks.

    A rank that asks is answered at once if the word is given, and held for a moment if not: the others are about to
    answer then, or can't before this rank goes on.
    """

    def __init__(
        self,
        num_ranks: int,
        reached: int,
        timeout_s: float,
        broadcast: Callable[[Message], None],
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._broadcast = broadcast
        self._agreement: Agreement = drain.propose(num_ranks, reached)
        self._held: list[Callable[[Message], None]] = []
        self._held_until_s: float | None = None
        self.deadline_s = self._clock.monotonic_s() + timeout_s
        self._tell()

    @property
    def step(self) -> int | None:
        """The last step, once it is agreed on."""
        return self._agreement.target if self._agreement.decided else None

    def replied(self, rank: int, step: int, target: int, taken: bool) -> None:
        self._take(drain.replied(self._agreement, rank, step, target, taken))

    def arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        """A rank asks at its step's end whether to end; `answer` is called now or soon."""
        before = self._agreement.target
        self._take(drain.arrived(self._agreement, rank, step))
        if self._agreement.decided or step != before:
            answer(_word(self._agreement.decided and step == self._agreement.target))
            return
        self._held.append(answer)
        self._held_until_s = self._held_until_s or self._clock.monotonic_s() + _HOLD_S

    def wake_in_s(self) -> float:
        until_s = min(self.deadline_s, self._held_until_s or self.deadline_s)
        return max(0.0, until_s - self._clock.monotonic_s())

    def check(self) -> bool:
        """To be called when `wake_in_s` is over; whether the time for all of it is."""
        now_s = self._clock.monotonic_s()
        if self._held_until_s is not None and now_s >= self._held_until_s:
            self._take(drain.given_up(self._agreement))
        return now_s >= self.deadline_s

    def _take(self, agreement: Agreement) -> None:
        before, self._agreement = self._agreement, agreement
        if agreement.decided and not before.decided:
            self._release(True)
        elif agreement.target != before.target:
            self._release(False)
            self._tell()

    def _release(self, end: bool) -> None:
        held, self._held, self._held_until_s = self._held, [], None
        for answer in held:
            answer(_word(end))

    def _tell(self) -> None:
        self._broadcast({"op": "drain", "step": self._agreement.target})


def _word(end: bool) -> Message:
    return {"op": "drain_word", "end": end}
