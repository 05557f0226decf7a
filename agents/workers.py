"""The seam to worker processes: start a set of ranks, signal them, stop them, and hear of every exit at once.

Behind it: `ColdWorkers` (here, a fresh interpreter or any command), `ZygoteWorkers` (zygote_workers.py, forks of a warm
interpreter), and `FakeWorkers` for tests. None of them ever touches a process that it did not start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptrt.agents.children import ChildTable, death_signal
from ckptrt.agents.workerproc import ForkRequest
from ckptrt.clock import Clock, SystemClock

__all__ = [
    "ColdWorkers", "FakeWorkers", "WorkerBase", "WorkerEvent", "WorkerExited", "WorkerGroup", "WorkerSpec",
    "WorkerStarted", "WorkersUnavailable",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to start. The descriptors of `streams` (stdin, stdout, stderr) stay the caller's own.

    command: the program for a cold start; request: the same program for a fork.
    """

    rank: int
    command: tuple[str, ...]
    request: ForkRequest
    streams: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """code: exit status, or minus the signal's number. at_s: when its parent saw it. note: what else is known.

    by_us: it died of a signal that this group had sent.
    """

    rank: int
    pid: int
    code: int
    at_s: float
    note: str = ""
    by_us: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersUnavailable:
    """This group can't start workers (now, or any more); none of the set asked for is left running."""

    why: str


WorkerEvent = WorkerStarted | WorkerExited | WorkersUnavailable


class WorkerGroup(Protocol):
    """One set of workers after the other. All calls come from one thread, the one that made the group."""

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start a set; the last one must have ended. WorkerStarted follows for each rank, or WorkersUnavailable."""
        ...

    def send_signal(self, signum: int) -> None:
        """Send a signal to every live worker and to what it started."""
        ...

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        """SIGCONT and `signum` now, SIGKILL after grace_s to who is left; called again, the earlier deadline holds.

        Workers that were asked for and aren't up yet are reported as exited too.
        """
        ...

    def poll(self) -> list[WorkerEvent]:
        """What happened since the last call, in order; never waits. Carries out a stop whose grace is over."""
        ...

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when `poll` has something. SIGCHLD is the other occasion to call it."""
        ...

    def wake_in_s(self) -> float | None:
        """Seconds until `poll` has to be called even if nothing happens, or None."""
        ...

    def close(self) -> None:
        """Kill what is left and give up all resources."""
        ...


class WorkerBase(ABC):
    """What all groups share: who is alive, and the two steps of a stop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._ranks: dict[int, int] = {}  # pid -> rank, of live workers
        self._events: list[WorkerEvent] = []
        self._kill_at_s: float | None = None
        self._sent: set[int] = set()  # signals that this set got from here

    @abstractmethod
    def _send(self, pids: Sequence[int], signum: int) -> None: ...

    @abstractmethod
    def _collect(self) -> None:
        """Add what happened to the events, by `_note_started` and `_note_exited`."""

    def send_signal(self, signum: int) -> None:
        self._sent.add(signum)
        self._send(tuple(self._ranks), signum)

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        # A stopped process takes no signal but SIGKILL before it goes on.
        self._send(tuple(self._ranks), signal.SIGCONT)
        self.send_signal(signum)
        kill_at_s = self._clock.monotonic_s() + grace_s
        self._kill_at_s = kill_at_s if self._kill_at_s is None else min(self._kill_at_s, kill_at_s)

    def poll(self) -> list[WorkerEvent]:
        self._collect()
        if self._kill_at_s is not None and self._ranks and self._clock.monotonic_s() >= self._kill_at_s:
            self._kill_at_s = None
            self.send_signal(signal.SIGKILL)
            self._collect()
        events, self._events = self._events, []
        return events

    def filenos(self) -> tuple[int, ...]:
        return ()

    def wake_in_s(self) -> float | None:
        if self._kill_at_s is None or not self._ranks:
            return None
        return max(0.0, self._kill_at_s - self._clock.monotonic_s())

    def _begin(self) -> None:
        if self._ranks:
            raise AssertionError(f"ranks {sorted(self._ranks.values())} of the last set still run")
        self._kill_at_s = None
        self._sent.clear()

    def _note_started(self, rank: int, pid: int) -> None:
        self._ranks[pid] = rank
        self._events.append(WorkerStarted(rank=rank, pid=pid))
        if self._kill_at_s is not None:  # it came up while the set was being stopped
            self._sent.add(signal.SIGKILL)
            self._send((pid,), signal.SIGKILL)

    def _note_exited(self, pid: int, code: int, at_s: float, note: str = "") -> None:
        rank = self._ranks.pop(pid, None)
        if rank is not None:
            by_us = -code in self._sent
            self._events.append(WorkerExited(rank=rank, pid=pid, code=code, at_s=at_s, note=note, by_us=by_us))


class ColdWorkers(WorkerBase):
    """Each worker a fresh process: for commands that aren't Python, and where a zygote can't be used."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._children = ChildTable()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        self._begin()
        for spec in specs:
            stdin, stdout, stderr = spec.streams
            try:
                process = subprocess.Popen(
                    spec.command,
                    env=spec.request.env,
                    cwd=spec.request.cwd,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                    preexec_fn=death_signal(),  # noqa: PLW1509 - one system call, looked up before the fork
                )
            except OSError as error:
                self.close()
                self._events = [WorkersUnavailable(why=f"{spec.command[0]} can't be started: {error.strerror}")]
                return
            self._processes[process.pid] = process
            self._children.add(process.pid)
            self._note_started(spec.rank, process.pid)

    def close(self) -> None:
        for pid in tuple(self._processes):
            self._children.signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._collect()

    def _send(self, pids: Sequence[int], signum: int) -> None:
        for pid in pids:
            self._children.signal(pid, signum)

    def _collect(self) -> None:
        at_s = self._clock.monotonic_s()
        for pid, code in self._children.reap():
            self._processes.pop(pid).returncode = code  # reaped here, so Popen need not look for it
            self._note_exited(pid, code, at_s)


class FakeWorkers(WorkerBase):
    """Workers without processes, for tests: they end when told to, or by the signals that nothing survives.

    stubborn: ranks that ignore everything but SIGKILL.
    """

    def __init__(self, clock: Clock | None = None, *, stubborn: frozenset[int] = frozenset()) -> None:
        super().__init__(clock)
        self.signals: list[tuple[int, int]] = []  # (rank, signum), as sent
        self.starts: list[tuple[WorkerSpec, ...]] = []
        self._stubborn = stubborn
        self._next_pid = 1000
        self._ended: list[tuple[int, int]] = []

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        self._begin()
        self.starts.append(tuple(specs))
        for spec in specs:
            self._next_pid += 1
            self._note_started(spec.rank, self._next_pid)

    def end(self, rank: int, code: int) -> None:
        """Let a worker exit (code >= 0) or die of a signal (code < 0)."""
        self._ended += [(pid, code) for pid, known in self._ranks.items() if known == rank]

    def close(self) -> None:
        self._send(tuple(self._ranks), signal.SIGKILL)

    def _send(self, pids: Sequence[int], signum: int) -> None:
        for pid in pids:
            rank = self._ranks[pid]
            self.signals.append((rank, signum))
            if signum == signal.SIGKILL or (signum != signal.SIGCONT and rank not in self._stubborn):
                self._ended.append((pid, -signum))

    def _collect(self) -> None:
        ended, self._ended = self._ended, []
        for pid, code in ended:
            self._note_exited(pid, code, self._clock.monotonic_s())
