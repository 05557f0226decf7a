"""Finding out what hung workers do: their stacks, and the state that the kernel sees them in."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping

from ckptrt import env
from ckptrt.agents import watchdog
from ckptrt.agents.watchdog import Look, Watch
from ckptrt.clock import Clock, SystemClock

__all__ = ["HangWatch"]

_STACK_WAIT_S = 1.0  # a process that runs at all has written its stacks by then
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.*)$')


class HangWatch:
    """Watches one set of workers. limit_s: see Job.hang_timeout_s."""

    def __init__(self, limit_s: float | None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._off = limit_s == math.inf
        self.watch = Watch(fixed_s=limit_s)
        self._stacks_at_s: float | None = None
        self._asked = False  # somebody wants to know, whether ranks are silent here or not
        self._sizes: dict[int, int] = {}

    def begin_set(self) -> None:
        """New workers; what was learned of the pauses between steps stays."""
        self.watch = Watch(fixed_s=self.watch.fixed_s, longest_s=self.watch.longest_s)
        self._stacks_at_s, self._asked = None, False

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None:
        """What a worker has told of itself."""
        if name in ("first_step", "step") and step is not None:
            self.watch = watchdog.heard(self.watch, rank, step, at_s)
        elif name == "ended":
            self.watch = watchdog.ended(self.watch, rank)
        elif name.startswith("enter:"):
            self.watch = watchdog.entered(self.watch, rank, name.partition(":")[2], at_s)
        elif name == "leave":
            self.watch = watchdog.left(self.watch, rank, at_s)

    def wake_in_s(self) -> float | None:
        at_s = self._stacks_at_s or watchdog.wake_at_s(self.watch)
        if at_s is None or (self._off and not self._asked):
            return None
        return max(0.0, at_s - self._clock.monotonic_s())

    def look(self, pids: Mapping[int, int], stacks_file: Callable[[int], str], *, asked: bool = False) -> None:
        """Have the ranks write their stacks; `check` gives them in a second."""
        for rank, pid in pids.items():
            # To any other process the signal is death: only who has told a step has prepared for it.
            if rank in self.watch.steps and stacks_file(rank):
                self._sizes[rank] = _size(stacks_file(rank))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, env.STACKS_SIGNAL)
        self._stacks_at_s = self._clock.monotonic_s() + _STACK_WAIT_S
        self._asked = asked

    def check(self, pids: Mapping[int, int], stacks_file: Callable[[int], str]) -> list[Look] | None:
        """To be called when `wake_in_s` is over: first asks for the stacks, then gives what they show.

        pids: of the live workers, by rank. stacks_file(rank): where each writes, or empty. None while nothing is to be
        said. A rank that tells a step meanwhile ends the alarm.
        """
        now_s = self._clock.monotonic_s()
        if not (self._asked or (not self._off and watchdog.silent(self.watch, now_s))):
            self._stacks_at_s = None
            return None
        if self._stacks_at_s is None:
            self.look(pids, stacks_file)
            return None
        if now_s < self._stacks_at_s:
            return None
        self._stacks_at_s, self._asked = None, False
        return [
            Look(
                rank=rank,
                step=self.watch.steps.get(rank, 0),
                silent_s=now_s - self.watch.told_s.get(rank, now_s),
                stack=_main_stack(_tail(stacks_file(rank), self._sizes.get(rank, 0))),
                state=_process_state(pid),
            )
            for rank, pid in sorted(pids.items())
        ]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _tail(path: str, start: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _main_stack(dump: str) -> tuple[str, ...]:
    """The frames of the thread that took the signal, which is the main one, as `file:line in name`."""
    _, _, rest = dump.partition("Current thread ")
    frames: list[str] = []
    for text in rest.splitlines()[1:]:
        match = _FRAME.match(text)
        if match is None:
            break
        frames.append(f"{match['file']}:{match['line']} in {match['name']}")
    return tuple(frames)


def _process_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
