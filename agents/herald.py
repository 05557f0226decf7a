"""Tells people and programs what happens: lines on the console, and JSON lines in <log dir>/<run>/events.jsonl.

Times in events are of the machine's monotonic clock, which all processes of the node share; `wall` is for people.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from ckptrt.agents.console import Console
from ckptrt.agents.report import Recovery, failure_lines, hang_lines, line, recovery_line
from ckptrt.agents.restart import Action, State
from ckptrt.agents.verdict import Verdict
from ckptrt.agents.watchdog import Look
from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import Error

__all__ = ["EventLog", "Herald"]


class EventLog:
    """Appends JSON lines; without a directory it does nothing. A full disk costs events, never the job."""

    def __init__(self, directory: str | None, *, warn: Callable[[str], None], clock: Clock | None = None) -> None:
        self._fd = -1
        self._warn = warn
        self._clock = clock or SystemClock()
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            path = os.path.join(directory, "events.jsonl")
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **facts: Any) -> None:
        if self._fd < 0:
            return
        record = {"event": event, "at_s": self._clock.monotonic_s(), "wall": self._clock.wall_iso(), **facts}
        try:
            os.write(self._fd, json.dumps(record).encode() + b"\n")
        except OSError as error:
            self._warn(f"events can't be written any more: {error.strerror}")
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Herald:
    """The launcher's voice. directory: where events.jsonl goes, or None for nowhere."""

    def __init__(self, console: Console, directory: str | None) -> None:
        self._console = console
        self._events = EventLog(directory, warn=lambda text: self.say("warn", text))

    def say(self, word: str, text: str) -> None:
        self._console.say(line(word, text))

    def event(self, event: str, **facts: Any) -> None:
        self._events.write(event, **facts)

    def error(self, error: Error) -> None:
        self._console.say(f"error[{error.code}]: {error}")
        self.event("error", code=error.code, what=error.what, safe=error.safe, hint=error.hint)

    def failure(self, verdict: Verdict, *, incarnation: int, step: int | None, tail: Sequence[str], log: str) -> None:
        cause = verdict.cause
        self._console.say(failure_lines(verdict, step=step, tail=tail, log=os.path.relpath(log) if log else ""))
        self.event(
            "failure",
            incarnation=incarnation,
            rank=cause.rank,
            pid=cause.pid,
            code=cause.code,
            error=cause.error,
            note=cause.note,
            step=step,
            consequences=[other.rank for other in verdict.consequences],
            stopped=[other.rank for other in verdict.stopped],
        )

    def hang(self, looks: Sequence[Look], odd: Look, why: str) -> None:
        self._console.say(hang_lines(looks, odd, why))
        stacks = {look.rank: list(look.stack) for look in looks}
        self.event("hang", rank=odd.rank, why=why, silent_s=odd.silent_s, step=odd.step, stacks=stacks)

    def restart(self, state: State) -> None:
        budget = state.budget
        left = budget.max_restarts - state.restarts
        progress = f", no-progress {state.no_progress} of {budget.max_no_progress}" if state.has_run else ""
        self.say(f"restart {state.restarts}", f"budget {left} of {budget.max_restarts} left{progress}")
        self.event("restart", number=state.restarts, left=left, no_progress=state.no_progress)

    def recovery(self, recovery: Recovery, incarnation: int) -> None:
        parts = recovery.parts()
        self._console.say(recovery_line(parts))
        self.event(
            "recovery" if "first step" in parts else "respawned",
            incarnation=incarnation,
            parts=parts,
            total_s=sum(parts.values()),
            failed_at_s=recovery.failed_at_s,
        )

    def give_up(self, action: Action, state: State) -> None:
        why = {
            Action.GIVE_UP_BUDGET: f"all {state.budget.max_restarts} restarts are used up",
            Action.GIVE_UP_PROGRESS: f"{state.budget.max_no_progress} restarts in a row without a newly committed step",
            Action.GIVE_UP_ERROR: "the same error twice before the first step; another start would meet it again",
        }[action]
        self.say("done", f"failed: {why}")
        self.event("give_up", why=why)

    def done(self, state: State, drained_step: int | None = None) -> None:
        code = state.exit_code or 0
        if state.drained and drained_step is not None:
            self.say("drain", f"step {drained_step} is committed on all ranks; the same command goes on from there")
            self.event("drain", step=drained_step)
        restarts = "1 restart" if state.restarts == 1 else f"{state.restarts} restarts"
        self.say("done", f"{restarts}, exit {code}")
        self.event("done", exit_code=code, restarts=state.restarts)

    def close(self) -> None:
        self._events.close()
