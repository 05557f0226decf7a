"""The supervisor of one node: one thread, one selector. Events in, the pure core decides, actions out.

Everything slow (storage, etcd) is done by one helper thread, whose results come back through the mailbox; so do the
notices of the lease keeper. The main thread only waits in the selector, and is the one that all child processes hang
on by their death signal.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from ckptrt import env
from ckptrt.agents import restart, watchdog
from ckptrt.agents.agentsocket import AgentServer
from ckptrt.agents.console import Console
from ckptrt.agents.draining import Draining
from ckptrt.agents.exits import describe_exit
from ckptrt.agents.hang import HangWatch
from ckptrt.agents.herald import Herald
from ckptrt.agents.job import Job, WorkerStore, worker_env
from ckptrt.agents.joblink import JobLink, LinkNotice
from ckptrt.agents.ledger import Opening, RunLedger, memory_snapshots
from ckptrt.agents.logs import SetLogs, open_set_logs
from ckptrt.agents.mailbox import Mailbox
from ckptrt.agents.persister_keeper import PersisterKeeper
from ckptrt.agents.report import Recovery
from ckptrt.agents.restart import Action, Budget, Event, Phase, State
from ckptrt.agents.rundesk import RunDesk
from ckptrt.agents.verdict import Verdict, judge
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
from ckptrt.errors import Error, UsageError
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["Supervisor"]

_PERSISTER_PATIENCE_S = 60.0
_TAIL_LINES = 20


class Supervisor:
    """Runs one job on one node to its end. To be made and run on the main thread."""

    def __init__(self, job: Job, group: WorkerGroup, console: Console, *, link: JobLink | None = None) -> None:
        self.job = job
        self._group = group
        self._console = console
        self._mailbox = Mailbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox, selectors.EVENT_READ, self._read_mailbox)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="ckptrt-io")
        self._link = link or JobLink(job.run, endpoints=job.etcd_endpoints, notify=self._post_notice)
        self._ledger = RunLedger(self._link.raise_incarnation)
        self._desk = RunDesk(self._ledger, self)
        self._store = WorkerStore(job.store_host, job.master_port)
        self._dir = make_workdir()
        self._server = AgentServer(self.socket_path, self, self._selector)
        directory = job.logs.directory
        self._herald = Herald(console, directory)
        self._persister = PersisterKeeper(
            os.path.join(self._dir, "persister.sock"),
            environ=dict(job.environ),
            say=console.say,
            log_path=os.path.join(directory, "persister.log") if directory else None,
        )
        budget = Budget(
            max_restarts=job.max_restarts, max_no_progress=job.max_no_progress, drained_exit=job.drained_exit
        )
        self._state = State(budget=budget, num_workers=job.num_workers)
        self._watched: set[int] = set()
        self._linked = False
        # of the current set of workers
        self._opening: Opening | None = None
        self._set_logs = SetLogs(directory=None)
        self._specs: list[WorkerSpec] = []
        self._started_at_s = 0.0
        self._up: dict[int, int] = {}  # rank -> pid
        self._exits: list[WorkerExited] = []
        self._recovery = Recovery(failed_at_s=0.0, seen_at_s=0.0, num_workers=job.num_workers)
        self._last_step: int | None = None
        self._verdict: Verdict | None = None
        self._last_signal = 0
        self._draining: Draining | None = None
        self._hang = HangWatch(job.hang_timeout_s)
        self._hung: tuple[watchdog.Look, str] | None = None  # who keeps the others, and by what it is told

    @property
    def socket_path(self) -> str:
        return os.path.join(self._dir, "agent.sock")

    @property
    def state(self) -> State:
        return self._state

    def run(self) -> int:
        """Supervise until the job has ended; returns the exit code."""
        self._take_signals()
        try:
            self._dispatch(restart.Begin())
            while self._state.phase is not Phase.DONE:
                self._turn()
        finally:
            self._clean_up()
        return self._state.exit_code or 0

    # --- the loop

    def _turn(self) -> None:
        self._watch_group()
        phase = self._state.phase
        drain_s = self._draining.wake_in_s() if self._draining and phase is Phase.DRAINING else None
        hang_s = self._hang.wake_in_s() if phase is Phase.RUNNING else None
        waits = [self._group.wake_in_s(), self._persister.wake_in_s(), drain_s, hang_s]
        for key, _mask in self._selector.select(min((wait for wait in waits if wait is not None), default=None)):
            key.data()
        self._persister.check()
        self._check_clocks()
        self._poll_group()

    def _check_clocks(self) -> None:
        phase = self._state.phase
        if self._draining and phase is Phase.DRAINING and self._draining.check():
            self._herald.say("warn", f"the workers have not drained within {self.job.drain_s:g} s: stopping them")
            self._dispatch(restart.DrainTimedOut())
        if phase is Phase.RUNNING and (looks := self._hang.check(self._alive(), self.stacks_file)) is not None:
            self._hung = watchdog.odd_one(looks)
            self._herald.hang(looks, *self._hung)
            seen_at_s = time.monotonic()
            began_at_s = seen_at_s - self._hung[0].silent_s
            self._recovery = Recovery(failed_at_s=began_at_s, seen_at_s=seen_at_s, num_workers=self.job.num_workers)
            self._dispatch(restart.WorkersHung())

    def _watch_group(self) -> None:
        wanted = set(self._group.filenos())
        for fd in self._watched - wanted:
            self._selector.unregister(fd)
        for fd in wanted - self._watched:
            self._selector.register(fd, selectors.EVENT_READ, lambda: None)
        self._watched = wanted

    def _poll_group(self) -> None:
        for event in self._group.poll():
            self._take_worker_event(event)
        if isinstance(self._group, ZygoteWorkers):
            problems, self._group.problems = self._group.problems, []
            for problem in problems:
                self._herald.say("warn", problem)

    def _take_signals(self) -> None:
        for signum in {*self.job.signals, *self.job.drain_signals}:
            # nohup's choice is kept; every other signal of the list is ours, as with torchrun.
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._mailbox.wake_fd(), warn_on_full_buffer=False)

    def _read_mailbox(self) -> None:
        signums, calls = self._mailbox.take()
        if signal.SIGCHLD in signums and self._linked:
            self.submit(self._link.check)
        for signum in signums:
            if signum in self.job.signals or signum in self.job.drain_signals:
                self._stop_requested(signum)
        for call in calls:
            call()

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        """Have the helper thread do it; an error that it didn't expect is raised here, and ends the job."""
        self._helper.submit(call, *args).add_done_callback(self._helped)

    def post(self, call: Callable[[], None]) -> None:
        self._mailbox.post(call)

    def _helped(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._mailbox.post(future.result)

    def _stop_requested(self, signum: int) -> None:
        state, drain = self._state, signum in self.job.drain_signals
        # A notice such as SIGUSR1 is not meant for workers that can drain: if they don't, they are stopped by SIGTERM.
        stop = signal.SIGTERM if drain and (state.has_run or state.stepped) else signum
        self._last_signal = stop
        self._dispatch(restart.StopRequested(signum=stop, drain=drain))
        doing = "stopping the workers"
        if self._state.phase is Phase.DRAINING:
            doing = "draining: the workers finish a step, save it and end; once more stops them now"
        elif state.phase is Phase.STOPPING and state.exit_code is not None:
            doing = "killing the workers"
        self._herald.say("signal", f"{signal.Signals(signum).name}: {doing}")
        self._herald.event("signal", signal=signal.Signals(signum).name)

    def _post_notice(self, notice: LinkNotice) -> None:
        self._mailbox.post(partial(self._take_notice, notice))

    def _take_notice(self, notice: LinkNotice) -> None:
        self._herald.say("warn", notice.text)
        self._herald.event("etcd", kind=notice.kind, text=notice.text)
        if notice.kind == "evicted":
            self._dispatch(restart.Evicted())

    # --- decisions

    def _dispatch(self, event: Event) -> None:
        self._state, actions = restart.step(self._state, event)
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        if action is Action.OPEN:
            self.submit(self._open)
        elif action is Action.START:
            self._start()
        elif action is Action.STOP:
            self._group.stop(self.job.grace_s)
        elif action is Action.FORWARD:
            # The time for a last checkpoint is given once.
            self._group.stop(self.job.grace_s if self._draining else self.job.drain_s, self._last_signal)
        elif action is Action.DRAIN:
            reached = self._last_step or 0
            self._draining = Draining(self.job.num_workers, reached, self.job.drain_s, self._server.broadcast)
        elif action is Action.KILL:
            self._group.stop(0.0)
        elif action is Action.JUDGE:
            self._judge()
        elif action is Action.RESTART:
            self._herald.restart(self._state)
        elif action is not Action.FINISH:
            self._herald.give_up(action, self._state)

    # --- opening an incarnation (on the helper thread, up to the posts)

    def _open(self) -> None:
        try:
            if not self._linked:
                self._link.open()
                self._linked = True
                if self.job.url:
                    self._ledger.open_run(RunPlace.of(self.job.url, self.job.local_dir))
            opening = self.advance(self.job.num_workers)
        except Error as error:
            self._mailbox.post(partial(self._open_failed, error))
        except Exception as error:  # noqa: BLE001 - a bug here must end the job with words, not hang it
            failure = Error(f"the incarnation can't be opened: {error!r}")
            self._mailbox.post(partial(self._open_failed, failure))
        else:
            self._mailbox.post(partial(self._opened, opening))

    def advance(self, world_size: int) -> Opening:
        fds = [fd for _rank, fd in self._server.arenas.holdings()]
        # What the user said of resuming is about the start of the job; a restart goes on from where the job was.
        policy = self.job.resume if self._desk.answer is None else "auto"
        return self._ledger.advance(memory=lambda: memory_snapshots(fds), policy=policy, world_size=world_size)

    def _open_failed(self, error: Error) -> None:
        self._herald.error(error)
        self._dispatch(restart.OpenFailed(exit_code=error.exit_code))

    def _opened(self, opening: Opening) -> None:
        if self._link.note:
            self._herald.say("warn", self._link.note)
            self._link.note = ""
        self._note_opening(opening)
        now_s = time.monotonic()
        self._recovery.decide_s, self._recovery.fence_s = opening.decide_s, opening.fence_s
        self._recovery.fenced_at_s = now_s
        self._dispatch(restart.Opened(incarnation=opening.incarnation))

    def _note_opening(self, opening: Opening) -> None:
        self._opening = opening
        for note in opening.notes:
            self._herald.say("warn", note)
        self._herald.event(
            "opened",
            incarnation=opening.incarnation,
            resume=opening.resume_text,
            url=self._ledger.url,
            decide_s=opening.decide_s,
            fence_s=opening.fence_s,
        )
        self._desk.note(opening)

    # --- the workers

    def _start(self) -> None:
        assert self._opening is not None
        job = self.job
        self._started_at_s = time.monotonic()
        self._draining = self._hung = None
        self._hang.begin_set()
        self._up.clear()
        self._exits.clear()
        self._set_logs = SetLogs(directory=None)
        self._desk.begin_set()
        self._server.begin_set()
        if self._ledger.url:
            self._persister.ensure()
        try:
            port = self._store.renew()
        except UsageError as error:
            self._herald.error(error)
            self._refused(error.what)
            return
        self._set_logs = logs = open_set_logs(job.logs, self._opening.incarnation, job.num_workers)
        ours = {env.AGENT_SOCKET: self.socket_path, env.LAUNCHED_AT: repr(time.monotonic())}
        if self._ledger.url:
            ours |= {
                env.DIR: self._ledger.url,
                env.LOCAL_DIR: self._ledger.local_dir,
                env.INCARNATION: str(self._opening.incarnation),
                env.RESUME: self._opening.resume_text,
            }
        self._specs = [self._spec(rank, port, ours, logs) for rank in range(job.num_workers)]
        self._console.follow(logs.follows)
        self._group.start(self._specs)
        self._poll_group()

    def _spec(self, rank: int, port: int, ours: dict[str, str], logs: SetLogs) -> WorkerSpec:
        job = self.job
        environ = worker_env(
            job, rank, port=port, restarts=self._state.restarts, error_file=logs.error_file(rank), ours=ours
        )
        return WorkerSpec(
            rank=rank,
            command=job.program.command(rank),
            request=job.program.request(rank, environ, job.cwd),
            streams=(0, *logs.streams[rank]),
        )

    def _take_worker_event(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerStarted):
            self._up[event.rank] = event.pid
            if len(self._up) == self.job.num_workers:
                self._all_up()
        elif isinstance(event, WorkerExited):
            self._worker_exited(event)
        else:
            self._unavailable(event)

    def _all_up(self) -> None:
        self._set_logs.close_streams()
        self._recovery.started_at_s = time.monotonic()
        self._herald.event(
            "started",
            incarnation=self._state.incarnation,
            restarts=self._state.restarts,
            pids=[self._up[rank] for rank in sorted(self._up)],
            logs=self._set_logs.directory,
        )
        self._dispatch(restart.WorkersUp())
        if self._state.restarts and not self._state.has_run:
            # These workers have never reported a step, so this is all that will be known.
            self._herald.recovery(self._recovery, self._state.incarnation)

    def _alive(self) -> dict[int, int]:
        """The pids of those who haven't exited, by rank: another's pid may be somebody else's by now."""
        gone = {exited.rank for exited in self._exits}
        return {rank: pid for rank, pid in self._up.items() if rank not in gone}

    def _worker_exited(self, exited: WorkerExited) -> None:
        self._exits.append(exited)
        self._hang.phase(exited.rank, "ended", exited.at_s, None)
        if exited.code == 0:
            self._dispatch(restart.WorkerFinished(rank=exited.rank))
            return
        if self._draining and exited.code == restart.EXIT_DRAINED:
            self._dispatch(restart.WorkerDrained(rank=exited.rank))
            return
        if self._state.phase in (Phase.RUNNING, Phase.DRAINING):
            self._recovery = Recovery(
                failed_at_s=exited.at_s, seen_at_s=time.monotonic(), num_workers=self.job.num_workers
            )
        self._dispatch(restart.WorkerFailed(rank=exited.rank))

    def _unavailable(self, event: WorkersUnavailable) -> None:
        if isinstance(self._group, ColdWorkers):
            self._refused(event.why)
            return
        self._herald.say("warn", f"no warm start: {event.why}; workers are started cold, which takes seconds longer")
        self._group.close()
        self._group = ColdWorkers()
        self._group.start(self._specs)
        self._poll_group()

    def _refused(self, why: str) -> None:
        """No worker could be started: as if all had failed at once."""
        for rank in range(self.job.num_workers):
            now_s = time.monotonic()
            self._worker_exited(WorkerExited(rank=rank, pid=0, code=127, at_s=now_s, note=why))

    # --- after a failure

    def _judge(self) -> None:
        self._recovery.stopped_at_s = time.monotonic()
        self._set_logs.close_streams()
        self._console.unfollow()
        self._verdict = verdict = judge(
            [describe_exit(exited, self._set_logs, self._recovery.seen_at_s, self._hung) for exited in self._exits]
        )
        self._recovery.failed_at_s = min(verdict.cause.began_at_s, self._recovery.seen_at_s)
        cause = verdict.cause
        seen = cause.rank in self._set_logs.shown
        tail = [] if seen else self._set_logs.tail(cause.rank, _TAIL_LINES)
        log = self._set_logs.files.get(cause.rank, ("", ""))[1]
        self._herald.failure(verdict, incarnation=self._state.incarnation, step=self._last_step, tail=tail, log=log)
        lived_s = self._recovery.seen_at_s - self._started_at_s
        self._dispatch(restart.Judged(error=verdict.fingerprint, lived_s=lived_s))

    # --- what the workers ask for (agentsocket.Desk)

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None:
        self._desk.open_run(place, world_size, answer)

    def run_opened(self, opening: Opening) -> None:
        self._note_opening(opening)
        self._persister.ensure()
        self._dispatch(restart.RunOpened(incarnation=opening.incarnation))

    def run_refused(self, error: Error) -> None:
        self._herald.error(error)
        self._dispatch(restart.RunOpened(exit_code=error.exit_code))

    def persister_path(self) -> str:
        self._persister.ensure()
        return self._persister.path

    def stacks_file(self, rank: int) -> str:
        return self._set_logs.stacks_file(rank)

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None:
        if self._draining:
            self._draining.replied(rank, step, target, taken)

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        if self._draining:
            self._draining.arrived(rank, step, answer)

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None:
        if self._state.phase not in (Phase.RUNNING, Phase.DRAINING):
            return
        self._hang.phase(rank, name, at_s, step)
        if step is not None:
            self._last_step = step if self._last_step is None else max(self._last_step, step)
        if self._recovery.phase(rank, name, at_s):
            self._dispatch(restart.FirstStep())
            if self._state.restarts:
                self._herald.recovery(self._recovery, self._state.incarnation)

    def committed(self, step: int) -> None:
        self._last_step = step if self._last_step is None else max(self._last_step, step)
        self._dispatch(restart.Committed(step=step))

    # --- the end

    def _clean_up(self) -> None:
        signal.set_wakeup_fd(-1)
        self._group.close()
        self._set_logs.close_streams()
        self._console.unfollow()
        self._server.close()
        self._persister.close(_PERSISTER_PATIENCE_S)
        self._helper.shutdown(wait=True)
        self._link.close()
        self._ledger.close()
        self._store.close()
        self._copy_error_file()
        self._herald.done(self._state, self._draining.step if self._draining else None)
        self._selector.close()
        self._mailbox.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _copy_error_file(self) -> None:
        """Hand the cause's error file on to whoever launched us, as torchrun does."""
        target = env.error_file()
        if target and self._verdict is not None and self._state.exit_code:
            with contextlib.suppress(OSError):
                shutil.copyfile(self._set_logs.error_file(self._verdict.cause.rank), target)
