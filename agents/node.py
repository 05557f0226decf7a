"""The workers of one node: starts and stops them, and tells its boss what becomes of them.

The boss is the supervisor in this process, or one on another node that is reached through `member.py`. What belongs to
the machine is here: processes, log files, sockets, arenas, the persister. What is decided is decided by the boss.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckptrt import env
from ckptrt.agents.agentsocket import AgentServer
from ckptrt.agents.console import Console
from ckptrt.agents.exits import describe_exit
from ckptrt.agents.hang import HangWatch
from ckptrt.agents.job import Job, Order, worker_env
from ckptrt.agents.logs import SetLogs, open_set_logs
from ckptrt.agents.persister_keeper import PersisterKeeper
from ckptrt.agents.report import line
from ckptrt.agents.restart import EXIT_DRAINED
from ckptrt.agents.verdict import Exit
from ckptrt.agents.watchdog import Look
from ckptrt.agents.workdir import make_workdir
from ckptrt.agents.workers import (
    ColdWorkers,
    WorkerEvent,
    WorkerExited,
    WorkerGroup,
    WorkerSpec,
    WorkerStarted,
    WorkersUnavailable,
)
from ckptrt.agents.zygote_workers import ZygoteWorkers
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["Account", "Boss", "Node", "NodeControl"]

_PERSISTER_PATIENCE_S = 60.0
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is left of a worker. tail: the end of its stderr, if nobody has seen it; the files by their paths."""

    tail: tuple[str, ...] = ()
    log: str = ""
    error_file: str = ""


class Boss(Protocol):
    """Who decides. Ranks are of the whole job, times of this machine's monotonic clock."""

    def started(self, rank: int, pid: int) -> None: ...

    def exited(self, ended: Exit) -> None:
        """A worker has ended, and by what is known as far as this node can tell."""
        ...

    def looked(self, looks: list[Look]) -> None:
        """What the workers here do: one of them has been silent for too long, or it was asked for."""
        ...

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None: ...

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None: ...

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None: ...

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None: ...

    def committed(self, step: int) -> None: ...


class NodeControl(Protocol):
    """What the boss can have a node do, be it this one or another."""

    def start(self, order: Order) -> None:
        """Start a set of workers; the last one must have ended."""
        ...

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        """A signal now, SIGKILL after grace_s."""
        ...

    def drain(self, message: Message) -> None:
        """Say something about a last step to all workers; from now on silence is no hang."""
        ...

    def look(self) -> None:
        """Find out what the workers do; `Boss.looked` follows in about a second."""
        ...

    def account(self, rank: int) -> Account: ...


class Node:
    """To be made and used on the main thread, which all workers hang on by their death signal. Calls of `Boss` come
    from `turn`, and from the selector."""

    def __init__(self, job: Job, group: WorkerGroup, console: Console, selector: selectors.BaseSelector) -> None:
        self.boss: Boss | None = None  # nobody, while it is being found out who decides
        self._job = job
        self._group = group
        self._console = console
        self._selector = selector
        self._dir = make_workdir()
        self.socket_path = os.path.join(self._dir, "agent.sock")
        self.server = AgentServer(self.socket_path, self, selector)
        directory = job.logs.directory
        self.persister = PersisterKeeper(
            os.path.join(self._dir, "persister.sock"),
            environ=dict(job.environ),
            say=console.say,
            log_path=os.path.join(directory, "persister.log") if directory else None,
        )
        self._hang = HangWatch(job.hang_timeout_s)
        self._watched: set[int] = set()
        # of the current set of workers
        self.logs = SetLogs(directory=None)
        self.pids: dict[int, int] = {}  # by rank, of those who live
        self._order: Order | None = None
        self._specs: list[WorkerSpec] = []
        self._left = 0  # how many have not ended yet
        self._stopped_at_s: float | None = None  # since when their ends say nothing about them
        self._draining = False

    @property
    def busy(self) -> bool:
        """Whether workers of the last set are left."""
        return self._left > 0

    # --- the loop

    def wake_in_s(self) -> float | None:
        hang_s = self._hang.wake_in_s() if self._is_watched() else None
        waits = [self._group.wake_in_s(), self.persister.wake_in_s(), hang_s]
        return min((wait for wait in waits if wait is not None), default=None)

    def watch(self) -> None:
        """Have the selector watch what the group's workers are heard by; to be called before each wait."""
        wanted = set(self._group.filenos())
        for fd in self._watched - wanted:
            self._selector.unregister(fd)
        for fd in wanted - self._watched:
            self._selector.register(fd, selectors.EVENT_READ, lambda: None)
        self._watched = wanted

    def turn(self) -> None:
        """Do what is due; to be called after each wait."""
        self.persister.check()
        if self._is_watched() and (looks := self._hang.check(self.pids, self.logs.stacks_file)) is not None:
            self._chief.looked(looks)
        self._poll()

    def _is_watched(self) -> bool:
        return self._left > 0 and self._stopped_at_s is None and not self._draining

    def _poll(self) -> None:
        for event in self._group.poll():
            self._take(event)
        if isinstance(self._group, ZygoteWorkers):
            problems, self._group.problems = self._group.problems, []
            for problem in problems:
                self._warn(problem)

    def _warn(self, text: str) -> None:
        self._console.say(line("warn", text))

    # --- what the boss wants

    def start(self, order: Order) -> None:
        self._order = order
        self._left = order.num_local
        self._stopped_at_s = None
        self._draining = False
        self._hang.begin_set()
        self.pids.clear()
        self.logs = SetLogs(directory=None)
        self.server.begin_set(order.ranks)
        if order.url:
            self.persister.ensure()
        self.logs = open_set_logs(self._job.logs, order.incarnation, order.num_local)
        self._specs = [self._spec(local_rank, order) for local_rank in range(order.num_local)]
        self._console.follow(self.logs.follows)
        self._group.start(self._specs)
        self._poll()

    def _spec(self, local_rank: int, order: Order) -> WorkerSpec:
        job = self._job
        ours = {env.AGENT_SOCKET: self.socket_path, env.LAUNCHED_AT: repr(time.monotonic())}
        environ = worker_env(job, order, local_rank, error_file=self.logs.error_file(local_rank), ours=ours)
        return WorkerSpec(
            rank=order.first_rank + local_rank,
            command=job.program.command(local_rank),
            request=job.program.request(local_rank, environ, job.cwd),
            streams=(0, *self.logs.streams[local_rank]),
        )

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        self._note_stop()
        self._group.stop(grace_s, signum)

    def drain(self, message: Message) -> None:
        self._draining = True
        self.server.broadcast(message)

    def look(self) -> None:
        self._hang.look(self.pids, self.logs.stacks_file, asked=True)

    def account(self, rank: int) -> Account:
        local = self._local(rank)
        return Account(
            tail=() if local in self.logs.shown else tuple(self.logs.tail(local, _TAIL_LINES)),
            log=self.logs.files.get(local, ("", ""))[1],
            error_file=self.logs.error_file(local),
        )

    def close(self) -> None:
        self._group.close()
        self.logs.close_streams()
        self._console.unfollow()
        self.server.close()
        self.persister.close(_PERSISTER_PATIENCE_S)
        shutil.rmtree(self._dir, ignore_errors=True)

    # --- what becomes of the workers

    def _take(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerStarted):
            self.pids[event.rank] = event.pid
            if len(self.pids) == self._left:
                self.logs.close_streams()
            self._chief.started(event.rank, event.pid)
        elif isinstance(event, WorkerExited):
            self._exited(event)
        else:
            self._unavailable(event)

    def _exited(self, exited: WorkerExited) -> None:
        self.pids.pop(exited.rank, None)  # another's pid may be somebody else's by now
        self._left -= 1
        self._hang.phase(exited.rank, "ended", exited.at_s, None)
        drained = self._draining and exited.code == EXIT_DRAINED
        if exited.code and not drained:
            self._note_stop()
        if self._left == 0:
            self.logs.close_streams()
            self._console.unfollow()
        stopped_at_s = exited.at_s if self._stopped_at_s is None else self._stopped_at_s
        self._chief.exited(describe_exit(exited, self.logs, self._local(exited.rank), stopped_at_s))

    def _note_stop(self) -> None:
        self._stopped_at_s = self._stopped_at_s or time.monotonic()

    def _unavailable(self, event: WorkersUnavailable) -> None:
        if isinstance(self._group, ColdWorkers):
            for rank in self._order.ranks if self._order else ():  # as if all had failed at once
                self._exited(WorkerExited(rank=rank, pid=0, code=127, at_s=time.monotonic(), note=event.why))
            return
        self._warn(f"no warm start: {event.why}; workers are started cold, which takes seconds longer")
        self._group.close()
        self._group = ColdWorkers()
        self._group.start(self._specs)
        self._poll()

    def _local(self, rank: int) -> int:
        return rank - (self._order.first_rank if self._order else 0)

    @property
    def _chief(self) -> Boss:
        assert self.boss is not None
        return self.boss

    # --- what the workers ask for (agentsocket.Desk)

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None:
        self.persister.ensure()
        self._chief.open_run(place, world_size, answer)

    def persister_path(self) -> str:
        self.persister.ensure()
        return self.persister.path

    def stacks_file(self, rank: int) -> str:
        return self.logs.stacks_file(self._local(rank))

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None:
        self._chief.drain_replied(rank, step, target, taken)

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        self._chief.drain_arrived(rank, step, answer)

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None:
        if self._stopped_at_s is None:
            self._hang.phase(rank, name, at_s, step)
            self._chief.phase(rank, name, at_s, step)

    def committed(self, step: int) -> None:
        self._chief.committed(step)
