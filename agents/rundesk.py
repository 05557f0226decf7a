"""Opens the run that the workers name: once for all of a set, while they wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from ckptrt.agents.agentsocket import error_reply
from ckptrt.agents.ledger import Opening, RunLedger
from ckptrt.errors import Error
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["Opener", "RunDesk"]

Answer = Callable[[Message], None]


class Opener(Protocol):
    """Who has the threads and the decisions."""

    def submit(self, call: Callable[..., None], *args: object) -> None:
        """Have the helper thread do it."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Have the supervisor's thread do it."""
        ...

    def advance(self, world_size: int) -> Opening:
        """Open the next incarnation; on the helper thread."""
        ...

    def run_opened(self, opening: Opening) -> None: ...

    def run_refused(self, error: Error) -> None: ...


class RunDesk:
    """answer: what the workers of the present set are answered with, once that is known."""

    def __init__(self, ledger: RunLedger, opener: Opener) -> None:
        self.answer: Message | None = None
        self._ledger = ledger
        self._opener = opener
        self._refusals: dict[str, Message] = {}  # by url: said once for all ranks of a set
        self._waiters: list[tuple[RunPlace, Answer]] = []

    def begin_set(self) -> None:
        self._refusals.clear()

    def note(self, opening: Opening) -> None:
        """An incarnation is open."""
        if self._ledger.url:
            self.answer = {"op": "run", "incarnation": opening.incarnation, "resume": opening.resume_text}

    def open_run(self, place: RunPlace, world_size: int, answer: Answer) -> None:
        if self.answer is not None:
            answer(self._answer_to(place, self.answer))
            return
        if place.url in self._refusals:
            answer(self._refusals[place.url])
            return
        self._waiters.append((place, answer))
        if len(self._waiters) == 1:
            self._opener.submit(self._open, place, world_size)

    def _open(self, place: RunPlace, world_size: int) -> None:
        """On the helper thread."""
        try:
            self._ledger.open_run(place)
            opening = self._opener.advance(world_size)
        except Error as error:
            self._opener.post(partial(self._refused, place.url, error))
        except Exception as error:  # noqa: BLE001 - a bug here must reach the worker, which would wait for ever
            failure = Error(f"{place.url} can't be opened: {error!r}")
            self._opener.post(partial(self._refused, place.url, failure))
        else:
            self._opener.post(partial(self._opened, opening))

    def _opened(self, opening: Opening) -> None:
        self._opener.run_opened(opening)
        assert self.answer is not None
        waiters, self._waiters = self._waiters, []
        for place, answer in waiters:
            answer(self._answer_to(place, self.answer))

    def _answer_to(self, place: RunPlace, known: Message) -> Message:
        """The answer to a worker that means the run that is open; an error for one that means another."""
        try:
            self._ledger.open_run(place)
        except Error as error:
            return error_reply(error)
        return known

    def _refused(self, url: str, error: Error) -> None:
        self._refusals[url] = error_reply(error)
        waiters, self._waiters = self._waiters, []
        for _place, answer in waiters:
            answer(self._refusals[url])
        self._opener.run_refused(error)
