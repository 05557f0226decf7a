"""The supervisor of a job: events in, the pure core decides, actions out.

It runs on one node and has all nodes do what is decided: its own, and others through `hub.py`. Everything slow, such as
storage and etcd, is done by one helper thread, whose results come back through the loop; so do the lease's notices.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ckptrt.agents import restart
from ckptrt.agents.draining import Draining
from ckptrt.agents.exits import hand_on_error_file
from ckptrt.agents.fleet import Fleet
from ckptrt.agents.herald import Herald
from ckptrt.agents.hub import Hub
from ckptrt.agents.job import Job, Order, WorkerStore
from ckptrt.agents.joblink import JobLink, LinkNotice
from ckptrt.agents.jobnote import JobNote
from ckptrt.agents.ledger import Opening, RunLedger, memory_snapshots
from ckptrt.agents.lookout import Lookout
from ckptrt.agents.loop import Loop
from ckptrt.agents.node import Account, Node, NodeControl
from ckptrt.agents.notebook import Notebook
from ckptrt.agents.report import Recovery
from ckptrt.agents.restart import Action, Budget, Event, Phase, State
from ckptrt.agents.rundesk import RunDesk
from ckptrt.agents.verdict import Exit, Verdict, judge
from ckptrt.agents.watchdog import Look
from ckptrt.agents.world import Place, Wait, World
from ckptrt.errors import Error, QuorumError, UsageError
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["Supervisor"]

_KILLED = -9


class Supervisor:
    """Runs one job to its end. node: the one here, which is a part of the fleet too, as `name`.

    hub: the way to the others, if there may be any. taken_over: what the last leader has noted, if there was one.
    """

    def __init__(
        self,
        job: Job,
        loop: Loop,
        node: Node,
        name: str,
        link: JobLink,
        herald: Herald,
        *,
        hub: Hub | None = None,
        taken_over: JobNote | None = None,
    ) -> None:
        self.job = job
        self.fleet = Fleet(job.rules, taken_over.world() if taken_over else None)
        self.fleet.add(name, job.num_workers, node)
        self.notebook = Notebook(link, taken_over, loop.submit if hub else None)
        self._name = name
        self._hub = hub
        self._loop = loop
        self._node = node
        self._link = link
        self._herald = herald
        self._ledger = RunLedger(link.raise_incarnation, job=self.notebook.note.id if hub else "")
        self._desk = RunDesk(self._ledger, self)
        self._store = WorkerStore(job.store_host, job.master_port)
        budget = Budget(
            max_restarts=job.max_restarts, max_no_progress=job.max_no_progress, drained_exit=job.drained_exit
        )
        self._state = self.notebook.note.state(budget)
        self._wait: Wait | None = None  # for more nodes, before a world can be made
        # of the current set of workers
        self._opening: Opening | None = None
        self._started_at_s = 0.0
        self._up: dict[int, int] = {}  # rank -> pid
        self._exits: list[Exit] = []
        now_s = time.monotonic()
        self._recovery = Recovery(failed_at_s=now_s, seen_at_s=now_s, stopped_at_s=now_s)
        self._last_step: int | None = None
        self._verdict: Verdict | None = None
        self._last_signal = 0
        self._told_to_go = False
        self._draining: Draining | None = None
        self._lookout = Lookout(self.fleet.look)
        self._hung: tuple[Look, str] | None = None  # who keeps the others, and by what it is told

    @property
    def state(self) -> State:
        return self._state

    def run(self) -> int:
        """Supervise until the job has ended; returns the exit code."""
        self._node.boss = self
        self._loop.on_signal = self._signalled
        if self._hub:
            self._hub.lead(self, self.notebook.note.id)
        # Whoever takes over a job that was running does so because its leader was lost, and the workers with it.
        self._dispatch(restart.Begin() if self._state.phase is Phase.NEW else restart.Judged(error=""))
        while self._state.phase is not Phase.DONE:
            self._node.watch()
            self._loop.turn((self._node.wake_in_s(), self._wake_in_s()))
            self._node.turn()
            self._check_clocks()
        return self._state.exit_code or 0

    # --- the clock

    def _wake_in_s(self) -> float | None:
        waits_s = [
            None if self._wait is None else max(0.0, self._wait.until_s - time.monotonic()),
            self._draining.wake_in_s() if self._draining and self._state.phase is Phase.DRAINING else None,
            self._lookout.wake_in_s(),
            self._hub.wake_in_s() if self._hub else None,
        ]
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _check_clocks(self) -> None:
        if self._wait is not None and time.monotonic() >= self._wait.until_s:
            self.reconsider()
        if self._draining and self._state.phase is Phase.DRAINING and self._draining.check():
            self._herald.say("warn", f"the workers have not drained within {self.job.drain_s:g} s: stopping them")
            self._dispatch(restart.DrainTimedOut())
        if (found := self._lookout.found()) is not None and self._state.phase is Phase.RUNNING:
            self._hung_up(*found)
        if self._hub:
            self._hub.check()

    def _signalled(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self.submit(self._link.check)
        elif signum in self.job.signals or signum in self.job.drain_signals:
            first, self._told_to_go = not self._told_to_go, True
            leave = self._hub is not None and first
            self.leaving(self._name, signum) if leave else self.stop_requested(signum)

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.submit(call, *args)

    def post(self, call: Callable[[], None]) -> None:
        self._loop.post(call)

    def stop_requested(self, signum: int) -> None:
        """The job is to end: a signal came here, or on another node when there are too few without it."""
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
        self.reconsider()

    def leaving(self, node: str, signum: int) -> None:
        """One node was told to go. The others go on without it if they can; all that end do so at a saved step."""
        state, world = self._state, self.fleet.world
        if self._hub and node != self._name and not (world and any(place.node == node for place in world.places)):
            self._hub.end(node, self.job.drained_exit)  # it has nothing to save
            self.fleet.remove(node)
            return
        others_can = self.fleet.leave(node)
        running = state.phase in (Phase.RUNNING, Phase.DRAINING)
        if state.phase is Phase.DRAINING and not state.regroup:
            return  # all end already: whoever ends a job tells all of its nodes
        if not others_can or state.phase is Phase.NEW or (running and not state.has_run):
            self.stop_requested(signum)
            return
        self._herald.say("node", f"{node} is to go: the others save a step with it, and go on without it")
        self._herald.event("node_leaving", node=node, signal=signal.Signals(signum).name)
        if running:
            self._dispatch(restart.Regroup())

    def joined(self, node: str, slots: int, control: NodeControl) -> None:
        """A node has come; it has nothing to do yet."""
        self.fleet.add(node, slots, control)
        self._herald.say("node", f"{node} is here with {slots} rank{'s' * (slots != 1)}: {len(self.fleet)} nodes")
        self._herald.event("node_joined", node=node, slots=slots)
        self.reconsider()

    def _grow(self) -> None:
        """Take in nodes that have come, once what the workers have done so far is worth more than the pause."""
        old_enough = time.monotonic() >= self._started_at_s + self.job.grow_after_s
        if self._hub and self._state.phase is Phase.RUNNING and old_enough and self.fleet.can_grow():
            self._herald.say("node", "there are more nodes: the workers save a step, and go on with them")
            self._dispatch(restart.Regroup())

    def noticed(self, notice: LinkNotice) -> None:
        """The tie to etcd has changed."""
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
            self._gather()
        elif action is Action.START:
            self._start()
        elif action is Action.STOP:
            self.fleet.stop(self.job.grace_s)
        elif action is Action.FORWARD:
            # The time for a last checkpoint is given once.
            self.fleet.stop(self.job.grace_s if self._draining else self.job.drain_s, self._last_signal)
        elif action is Action.DRAIN:
            reached, num_workers = self._last_step or 0, self._state.num_workers
            self._draining = Draining(num_workers, reached, self.job.drain_s, self.fleet.drain)
        elif action is Action.KILL:
            self.fleet.stop(0.0)
        elif action is Action.JUDGE:
            self._judge()
        elif action is Action.RESTART:
            self._herald.restart(self._state)
        elif action is not Action.FINISH:
            self._herald.give_up(action, self._state)

    # --- opening an incarnation (on the helper thread, up to the posts)

    def _gather(self) -> None:
        """Choose the nodes of the next set, and open its incarnation; or wait for more of them."""
        self._part_with_leavers()
        if self._state.phase is Phase.DONE:
            return
        chosen = self.fleet.choose()
        if isinstance(chosen, World):
            self._wait = None
            self.submit(self._open, chosen)
        elif chosen.over:
            self._wait = None
            failure = QuorumError(
                f"{chosen.why}, and the time to wait for more is over",
                safe="all that was committed",
                hint="start the other nodes, or allow fewer with --nnodes MIN:MAX; --rdzv-conf join_timeout=SECONDS",
            )
            self._open_failed(failure)
        else:
            if self._wait is None or self._wait.why != chosen.why:
                self._herald.say("wait", chosen.why)
            self._wait = chosen

    def _part_with_leavers(self) -> None:
        for node in self.fleet.left():
            if node == self._name:
                self.notebook.update(self._state, self.fleet.world, handed_over=True)
                self._dispatch(restart.OpenFailed(exit_code=self.job.drained_exit))
                return
            assert self._hub is not None
            self._hub.end(node, self.job.drained_exit)
            self.fleet.remove(node)

    def reconsider(self) -> None:
        """Nodes have come or gone, or time has passed, while more of them were waited for."""
        if self._wait is None:
            return
        if self._state.exit_code is not None:  # it was told to end meanwhile
            self._wait = None
            self._dispatch(restart.OpenFailed(exit_code=self._state.exit_code))
        else:
            self._gather()

    def _open(self, world: World) -> None:
        try:
            self._link.open()
            note = self.notebook.note
            if url := note.url or self.job.url:
                self._ledger.open_run(RunPlace.of(url, note.local_dir if note.url else self.job.local_dir))
            opening = self.advance(world.size)
        except Error as error:
            self.post(partial(self._open_failed, error))
        except Exception as error:  # noqa: BLE001 - a bug here must end the job with words, not hang it
            failure = Error(f"the incarnation can't be opened: {error!r}")
            self.post(partial(self._open_failed, failure))
        else:
            self.post(partial(self._opened, opening, world))

    def advance(self, world_size: int) -> Opening:
        nodes = [place.node for place in self.fleet.world.places] if self.fleet.world else []
        # The memory of this node is of use to its own ranks alone.
        fds = [fd for _rank, fd in self._node.server.arenas.holdings()] if nodes == [self._name] else []
        # What the user said of resuming is about the start of the job; a restart goes on from where the job was.
        policy = self.job.resume if self._desk.answer is None and not self.notebook.note.started else "auto"
        return self._ledger.advance(memory=lambda: memory_snapshots(fds), policy=policy, world_size=world_size)

    def _open_failed(self, error: Error) -> None:
        self._herald.error(error)
        self._dispatch(restart.OpenFailed(exit_code=error.exit_code))

    def _opened(self, opening: Opening, world: World) -> None:
        if self._link.note:
            self._herald.say("warn", self._link.note)
            self._link.note = ""
        gone = {place.node for place in world.places if place.node not in self.fleet} | set(self.fleet.left())
        if gone and self._state.exit_code is None:
            self._gather()  # one was lost or told to go meanwhile; the number is lost, and nothing else
            return
        self._note_opening(opening)
        now_s = time.monotonic()
        recovery = self._recovery
        recovery.decide_s, recovery.fence_s, recovery.fenced_at_s = opening.decide_s, opening.fence_s, now_s
        recovery.num_workers = world.size
        self._dispatch(restart.Opened(incarnation=opening.incarnation, num_workers=world.size))
        self._note_job(started=True)

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
        self._started_at_s = time.monotonic()
        self._draining = self._hung = None
        self._lookout.forget()
        self._up.clear()
        self._exits.clear()
        self._desk.begin_set()
        try:
            port = self._store.renew()
        except UsageError as error:
            self._herald.error(error)
            for rank in range(self._state.num_workers):  # none could be started: as if all had failed at once
                self.exited(Exit(rank=rank, pid=0, code=127, at_s=time.monotonic(), note=error.what))
            return
        self.fleet.start(partial(self._order, port))

    def _order(self, port: int, place: Place, number: int) -> Order:
        assert self._opening is not None and self.fleet.world is not None
        return Order(
            incarnation=self._opening.incarnation,
            restarts=self._state.restarts,
            resume=self._opening.resume_text,
            url=self._ledger.url,
            local_dir=self._ledger.local_dir,
            first_rank=place.first_rank,
            num_local=place.num_local,
            world_size=self.fleet.world.size,
            store_host=self.job.store_host,
            store_port=port,
            node_rank=number,
            num_nodes=len(self.fleet.world.places),
        )

    def started(self, rank: int, pid: int) -> None:
        self._up[rank] = pid
        if len(self._up) < self._state.num_workers:
            return
        self._recovery.started_at_s = time.monotonic()
        self._herald.event(
            "started",
            incarnation=self._state.incarnation,
            restarts=self._state.restarts,
            pids=[self._up[rank] for rank in sorted(self._up)],
            logs=self._node.logs.directory,
        )
        self._dispatch(restart.WorkersUp())
        if self._state.restarts and not self._state.has_run:
            # These workers have never reported a step, so this is all that will be known.
            self._herald.recovery(self._recovery, self._state.incarnation)

    def exited(self, ended: Exit) -> None:
        self._exits.append(ended)
        if ended.code == 0:
            self._dispatch(restart.WorkerFinished(rank=ended.rank))
            return
        if self._draining and ended.code == restart.EXIT_DRAINED:
            self._dispatch(restart.WorkerDrained(rank=ended.rank))
            return
        if self._state.phase in (Phase.RUNNING, Phase.DRAINING):
            self._recovery = Recovery(failed_at_s=ended.at_s, seen_at_s=time.monotonic())
        self._dispatch(restart.WorkerFailed(rank=ended.rank))

    def lost(self, node: str, why: str) -> None:
        """A node is gone, and its workers are no longer ours, whether they still run or not."""
        ranks = self.fleet.remove(node)
        self._herald.say("node", f"{node} is lost: {why}")
        self._herald.event("node_lost", node=node, why=why, ranks=list(ranks))
        if self._state.phase in (Phase.RUNNING, Phase.DRAINING, Phase.STOPPING):
            note, now_s = f"its node {node} is lost: {why}", time.monotonic()
            for rank in sorted({*ranks} - {exited.rank for exited in self._exits}):
                self.exited(Exit(rank=rank, pid=self._up.get(rank, 0), code=_KILLED, at_s=now_s, note=note))
        self.reconsider()

    def _note_job(self, **changes: Any) -> None:
        place = {"url": self._ledger.url, "local_dir": self._ledger.local_dir}
        self.notebook.update(self._state, self.fleet.world, **place, **changes)

    # --- after a failure

    def looked(self, looks: list[Look]) -> None:
        """One node's workers have been silent for too long, or it was asked because another's have."""
        if self._state.phase is Phase.RUNNING:
            self._lookout.take(looks)

    def _hung_up(self, looks: list[Look], odd: tuple[Look, str]) -> None:
        self._hung = odd
        self._herald.hang(looks, *odd)
        seen_at_s = time.monotonic()
        self._recovery = Recovery(failed_at_s=seen_at_s - odd[0].silent_s, seen_at_s=seen_at_s)
        self._dispatch(restart.WorkersHung())

    def _judge(self) -> None:
        recovery = self._recovery
        recovery.stopped_at_s = time.monotonic()
        self._verdict = verdict = judge([self._seen(ended) for ended in self._exits])
        cause = verdict.cause
        recovery.failed_at_s = min(cause.began_at_s, recovery.seen_at_s)
        account = self.fleet.account(cause.rank) if cause.pid else Account()  # that of the last set would mislead
        self._herald.failure(
            verdict, incarnation=self._state.incarnation, step=self._last_step, tail=account.tail, log=account.log
        )
        self.fleet.blame(cause.rank)
        lived_s = recovery.seen_at_s - self._started_at_s
        self._dispatch(restart.Judged(error=verdict.fingerprint, lived_s=lived_s))

    def _seen(self, ended: Exit) -> Exit:
        """How it is to be judged: a worker that hung is the cause however it ended, and that was our doing."""
        if self._hung is None or ended.rank != self._hung[0].rank:
            return ended
        look, why = self._hung
        note = f"hung for {look.silent_s:.1f} s: {why}"
        began_at_s = self._recovery.seen_at_s - look.silent_s
        code = ended.code or _KILLED
        return replace(ended, code=code, at_s=began_at_s, note=note, by_us=False, error="", error_at_s=None)

    # --- what the workers ask for (node.Boss)

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None:
        self._desk.open_run(place, world_size, answer)

    def run_opened(self, opening: Opening) -> None:
        self._note_opening(opening)
        self._dispatch(restart.RunOpened(incarnation=opening.incarnation))

    def run_refused(self, error: Error) -> None:
        self._herald.error(error)
        self._dispatch(restart.RunOpened(exit_code=error.exit_code))

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None:
        if self._draining:
            self._draining.replied(rank, step, target, taken)

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        if self._draining:
            self._draining.arrived(rank, step, answer)

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None:
        if self._state.phase not in (Phase.RUNNING, Phase.DRAINING):
            return
        if step is not None:
            self._last_step = step if self._last_step is None else max(self._last_step, step)
        if self._recovery.phase(rank, name, at_s):
            self._dispatch(restart.FirstStep())
            if self._state.restarts:
                self._herald.recovery(self._recovery, self._state.incarnation)

    def committed(self, step: int) -> None:
        self._last_step = step if self._last_step is None else max(self._last_step, step)
        self._dispatch(restart.Committed(step=step))
        self._note_job()
        self._grow()

    # --- the end

    def close(self, *, deposed: bool = False) -> None:
        """Let go of the run, after all workers and the persister have, and say how it ended unless it goes on."""
        self._ledger.close()
        self._store.close()
        if self._verdict is not None and self._state.exit_code:
            hand_on_error_file(self.fleet.account(self._verdict.cause.rank).error_file)
        if not deposed:
            self._herald.done(self._state, self._draining.step if self._draining else None)
