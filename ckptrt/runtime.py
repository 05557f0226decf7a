"""The runtime in a training loop, as `ckptrt.init()` makes it: restore, step, save, wait, close."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import TimeoutError as FutureTimeoutError  # Python 3.10 has a class of its own
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat

from ckptrt import say
from ckptrt.adapters import adapt
from ckptrt.adapters.tree import TreeAdapter
from ckptrt.agentlink import AgentLink
from ckptrt.arena import Arena
from ckptrt.draining import DrainWatch
from ckptrt.env import WorkerEnv
from ckptrt.errors import BusyError, Error, FencedError, PersistError, UsageError, from_data
from ckptrt.faultpoints import faultpoint
from ckptrt.persisting import OwnPersister, PersisterLink
from ckptrt.ranks import find_ranks
from ckptrt.restoring import Restored, restore_newest
from ckptrt.session import Candidate, join_run
from ckptrt.snapshot import SaveHandle, SavePolicy, SaveStats, UnderWay, finite_numbers
from ckptrt.staging import CopyStager, Staged, Stager
from ckptrt.storage.owner import made_by
from ckptrt.storage.tiered import RunPlace
from ckptrt.telling import FlushWatch, tell_start, tell_unsaved
from ckptrt.wire import Message

__all__ = ["Runtime"]


_COMMIT_LINE_EVERY_S = 5.0
_CLOSE_TIMEOUT_S = 120.0  # a rank elsewhere may have failed to write and can't say so
_PROGRESS_EVERY_S = 0.1
_FENCES_MAX = 8
_EXIT_DRAINED = 75  # what the launcher takes for a drained worker
_EXIT_UNSAVED = 143


class Runtime:
    """One rank's checkpointing. Made by `ckptrt.init`; not to be shared between threads.

    start_step: the first step that the loop must run (0, or how many steps the restored checkpoint had behind it).
    step_count: steps that are done. last_committed: the newest step that is durable on every rank, or None.
    incarnation: number of this worker set. stats: what became of the saves.
    """

    def __init__(
        self,
        place: RunPlace,
        env: WorkerEnv,
        state: dict[str, Any],
        policy: SavePolicy,
        *,
        rng: bool,
    ) -> None:
        self._ranks = find_ranks(env.rank, env.world_size)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self._adapters = adapt(state, self.rank, self.world_size, rng=rng)
        for adapter in self._adapters:
            if isinstance(adapter, TreeAdapter):
                adapter.check()
        self._policy = policy
        self._session = join_run(env, self._ranks, place)
        self._flush = FlushWatch(place)
        self._drain = DrainWatch(self._session.agent) if self._session.agent is not None else None
        self._stager: Stager = CopyStager(self.rank, self.world_size)
        self._arena = Arena(self.rank, self._allocate)
        self._own_persister = OwnPersister() if self._session.agent is None else None
        if self._own_persister is not None:
            self._own_persister.ensure()  # its start takes a third of a second: let it be over by the first save
        self._link: PersisterLink | None = None
        self._lock = threading.Lock()
        self._in_flight: dict[int, UnderWay] = {}  # by step
        self._retry = 0  # how often the save of this step has failed before
        self._last_save: SaveHandle | None = None
        self._raise_next: Error | None = None
        self._commit_line_s = -_COMMIT_LINE_EVERY_S
        self._told_s: float | None = None
        self._metrics: Mapping[str, SupportsFloat] = {}
        self._outgrown = False
        self._closed = False
        self.start_step = 0
        self.step_count = 0
        self.last_committed: int | None = None
        self.stats = SaveStats()

    @property
    def incarnation(self) -> int:
        return self._session.incarnation

    def restore(self) -> Restored | None:
        """Load the newest checkpoint that is whole into the state; None if there is none. Says which, and why.

        Every rank calls it, before the first step. Live tensors are written only after every rank has read and
        verified all that it needs. Raises MismatchError if the checkpoint doesn't fit, CorruptError if none is whole.
        """
        self._check_open()
        if self._link is not None or self.step_count:
            raise UsageError("restore() comes before the first step")
        for _ in range(_FENCES_MAX):
            restored = restore_newest(self._session, self._adapters)
            parent = None
            if restored is not None:
                parent = Candidate(step=restored.step, incarnation=restored.incarnation, tier=restored.tier)
            if self._session.fence(parent):
                break
        else:
            raise BusyError(f"run {self._session.url}: another job commits as fast as this one can restore")
        if restored is not None:
            self.start_step = self.step_count = restored.step
            if restored.committed:
                self.last_committed = restored.step
            self._arena.keep(restored.step, restored.incarnation)
        self._connect()
        if self.rank == 0:
            tell_start(self._session, self.world_size, restored)
        if self._session.agent is not None:
            self._session.agent.phase("restored", self.step_count)
        if restored is not None and not restored.committed:
            # It lies in this node's memory only. The job may end, or lose the node, before another save is due.
            self.save()
        return restored

    def step(self, **metrics: SupportsFloat) -> None:
        """Say that a training step is done; saves if one is due.

        metrics: numbers of this step, such as its loss; rank 0's are stored with the checkpoint, those that are finite.
        Raises SystemExit, with the step committed, once the launcher was asked to drain the job; FencedError if another
        job has taken the run over; and with
        on_error="raise" the error of a save that failed since the last call.
        """
        self._check_open()
        self._raise_pending()
        if self._link is None:
            self._begin_unrestored()
        self.step_count += 1
        self._metrics = metrics
        if self._session.agent is not None:
            self._tell_progress(self._session.agent)
        faultpoint("step", rank=self.rank, step=self.step_count, incarnation=self.incarnation)
        if self._policy.every is not None and self.step_count % self._policy.every == 0:
            self.save()
        if self._drain is not None and self._drain.is_over(self.step_count):
            self._end_drained()

    def _end_drained(self) -> NoReturn:
        """Save this step, see it committed, and end the process: its agent was asked to, and all ranks agreed on it."""
        error = self.save(wait=True).committed.exception(_CLOSE_TIMEOUT_S)
        self.close()
        raise SystemExit(_EXIT_DRAINED if error is None else _EXIT_UNSAVED)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Say that this rank does something other than steps, such as a validation, which may take its own time.

        The launcher's watch for hangs learns how long each section takes, and doesn't judge one that it sees first.
        """
        self._check_open()
        agent = self._session.agent
        if agent is not None:
            agent.phase(f"enter:{name}")
        try:
            yield
        finally:
            if agent is not None:
                agent.phase("leave")

    def save(self, *, wait: bool = False) -> SaveHandle:
        """Take a snapshot of the present state and have it written in the background.

        Every rank calls it at the same step. Returns at once with a handle; if no slot is free, the save is skipped,
        counted, and the handle has the error. wait: wait for a free slot instead, such as at the end of the training.
        A second call at the same step waits for the first one's outcome and returns its handle if it is committed: a
        step is stored once. If it has failed, on every rank then, the step is tried again.
        """
        self._check_open()
        if self._link is None:
            self._begin_unrestored()
        step = self.step_count
        if self._last_save is None or self._last_save.step != step:
            self._retry = 0
        elif self._last_save.committed.exception(_CLOSE_TIMEOUT_S) is None:
            return self._last_save
        else:
            # All ranks know by now that the last try failed. The next one has a folder of its own, so that parts of
            # the two, which may hold different states, are never taken together.
            self._retry += 1
        handle = self._last_save = SaveHandle(step=step)
        assert self._link is not None
        started_s = time.monotonic()
        try:
            staged = self._stage(step)
            while staged is None and (wait or self._policy.when_busy == "wait") and self._await_slot():
                staged = self._stage(step)
        except Exception as cause:  # noqa: BLE001 the user's own state_dict() may raise anything; training goes on
            error = cause if isinstance(cause, Error) else PersistError(f"the state can't be captured: {cause!r}")
            error.__cause__ = cause if error is not cause else None
            handle.staged.set_exception(error)
            self._failed(handle, error)
            self._link.skip(step, self._retry)
            return handle
        except BaseException:  # ctrl-C in the middle of a copy
            handle.staged.set_exception(PersistError(f"step {step}: interrupted"))
            handle.committed.set_exception(PersistError(f"step {step}: interrupted"))
            self._link.skip(step, self._retry)
            raise
        stall_s = time.monotonic() - started_s
        self.stats.stall_s += stall_s
        if staged is None:
            self._skipped(handle)
            self._link.skip(step, self._retry)
            return handle
        handle.staged.set_result(stall_s)
        facts = {"rank": self.rank, "step": step, "incarnation": self.incarnation}
        faultpoint("sealed", **facts)
        with self._lock:
            self._in_flight[step] = UnderWay(handle, staged.slot, started_s, self._retry)
        self._link.submit(step, staged.slot, self._arena.fd, self._retry)
        faultpoint("submitted", **facts)
        return handle

    def _stage(self, step: int) -> Staged | None:
        metrics = finite_numbers(self._metrics) if self.rank == 0 else {}
        return self._stager.stage(self._adapters, self._arena, step, self.incarnation, metrics)

    def _await_slot(self) -> bool:
        """Wait until a save under way is settled; False if none is."""
        with self._lock:
            under_way = [save.handle.committed for save in self._in_flight.values()]
        wait_for_futures(under_way, return_when=FIRST_COMPLETED)
        return bool(under_way)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save that is under way is committed. Raises the error of the first one that failed.

        PersistError after `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            handles = [save.handle for save in self._in_flight.values()]
        failed: BaseException | None = None
        for handle in handles:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            try:
                failed = failed or handle.committed.exception(left_s)
            except FutureTimeoutError:
                raise PersistError(
                    f"step {handle.step} of run {self._session.url} isn't committed after {timeout_s:g} s",
                    safe=self._safe(),
                ) from None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait for saves under way, then let go of the run and of the memory.

        A save that fails now is told like any other; with on_error="raise", the error of one that failed since the
        last step() is raised once everything is closed, and FencedError in any case.
        """
        if self._closed:
            return
        if self._session.agent is not None:
            self._session.agent.phase("ended")  # from here on it may take its time
        try:
            self.wait(_CLOSE_TIMEOUT_S)
        except Error as error:
            if not self.stats.last_error:
                say.block("warn", str(error))
        finally:
            if self.rank == 0 and self._link is not None:
                self._flush.finish(self.last_committed)
            self._closed = True
            self._release()
            if self.rank == 0 and self._link is not None:
                tell_unsaved(self.step_count, self.last_committed, self.stats)
        self._raise_pending()

    def _release(self) -> None:
        if self._link is not None:
            self._link.close()
        with self._lock:
            left = [save.handle for save in self._in_flight.values()]
            self._in_flight.clear()
        for handle in left:
            handle.committed.set_exception(PersistError(f"step {handle.step}: the runtime was closed meanwhile"))
        if self._own_persister is not None:
            self._own_persister.close()
        self._stager.release()
        self._arena.close()
        self._session.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Error:
            if error is None:  # else the program's own error is what must be seen
                raise

    # --- joining

    def _connect(self) -> None:
        """Open the line to the persister; the fence is written, so data may be."""
        session, own = self._session, self._own_persister
        hello: Message = {
            "op": "hello",
            **session.place.data(),
            "incarnation": session.incarnation,
            "world_size": self.world_size,
            "nonce": session.nonce,
            "made_by": made_by(),
            "keep": None if self._policy.keep is None else asdict(self._policy.keep),
            "dedup": self._policy.dedup,
            "rank": self.rank,
            "pid": os.getpid(),
        }
        if session.agent is not None:
            self._link = PersisterLink(session.agent.persister(), hello, self._hear)
        else:
            assert own is not None
            self._link = PersisterLink(own.path, hello, self._hear, own.ensure)

    def _begin_unrestored(self) -> None:
        """The loop starts without restore(): fine in a new run, a mistake in one that has something to restore."""
        found = self._session.candidates()
        if found:
            raise UsageError(
                f"run {self._session.url} holds step {found[0].step}, but restore() was not called",
                safe="nothing was written",
                hint="call rt.restore() before the first step, or give another directory to start anew",
            )
        if not self._session.fence(None):
            raise BusyError(f"run {self._session.url}: something was committed while this job started; start it again")
        self._connect()
        if self.rank == 0:
            tell_start(self._session, self.world_size, None)

    def _tell_progress(self, agent: AgentLink) -> None:
        """Tell the agent how far this rank is: of the first step at once, then a few times a second at most."""
        now_s = time.monotonic()
        if self._told_s is None:
            agent.phase("first_step", self.step_count)
        elif now_s - self._told_s >= _PROGRESS_EVERY_S:
            agent.phase("step", self.step_count)
        else:
            return
        self._told_s = now_s

    def _allocate(self, size_bytes: int) -> tuple[int, bool]:
        if self._session.agent is not None:
            self._outgrown = True  # the agent keeps the old one until something is committed from the new one
            return self._session.agent.arena(size_bytes)
        fd = os.memfd_create(f"ckptrt-r{self.rank}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return fd, True

    # --- what became of saves; called from the link's thread

    def _hear(self, message: Message) -> None:
        op = message["op"]
        if op in ("committed", "persisted", "failed"):
            with self._lock:
                save = self._in_flight.get(int(message["step"]))
                if save is None or save.retry != int(message["retry"]):
                    return  # of an earlier try, or of another rank's that this one had no part in
                if op != "persisted":
                    del self._in_flight[save.handle.step]
            # What is on disk may wait for the other ranks without its slot. Else ranks that skip different steps could
            # fill all their slots with snapshots that wait for one another for ever.
            self._arena.settled(save.slot, save.handle.step)
            self.stats.borrowed_bytes += int(message.get("borrowed_bytes", 0))
            if op == "committed":
                self._committed(save)
            elif op == "failed":
                self._failed(save.handle, from_data(message))
        elif op in ("flushed", "unflushed", "fenced"):
            if op == "fenced":
                self._raise_next = from_data(message)
            if self.rank == 0:
                self._flush.hear(message)
        elif op in ("warning", "lost"):
            self._tell_error(from_data(message))

    def _committed(self, save: UnderWay) -> None:
        handle, step = save.handle, save.handle.step
        self.last_committed = max(step, self.last_committed or 0)
        self.stats.committed += 1
        if self._session.agent is not None:
            self._session.agent.committed(step)
            if self._outgrown:
                self._outgrown = False
                self._session.agent.release_retired()
        now_s = time.monotonic()
        if self.rank == 0 and now_s - self._commit_line_s >= _COMMIT_LINE_EVERY_S:
            self._commit_line_s = now_s
            staged_s = handle.staged.result()
            say.line(
                "commit",
                f"step {step} · durable in {(now_s - save.started_s) * 1e3:.0f} ms, stall {staged_s * 1e3:.1f} ms",
            )
        handle.committed.set_result(now_s - save.started_s)

    def _failed(self, handle: SaveHandle, error: Error) -> None:
        self.stats.failed += 1
        self.stats.last_error = error.code
        if isinstance(error, FencedError) or self._policy.on_error == "raise":
            self._raise_next = error
        self._tell_error(
            type(error)(
                f"step {handle.step}, rank {self.rank}: not saved ({self.stats.failed} failed so far): {error.what}",
                safe=error.safe or self._safe(),
                hint=error.hint,
            )
        )
        handle.committed.set_exception(error)

    def _skipped(self, handle: SaveHandle) -> None:
        self.stats.skipped += 1
        error = PersistError(
            f"step {handle.step}: skipped, both slots are still being written ({self.stats.skipped} skipped so far)",
            safe=self._safe(),
            hint="save less often, or to faster storage",
        )
        handle.staged.set_exception(error)
        handle.committed.set_exception(error)
        if self.rank == 0:
            say.line("skip", error.what)

    def _tell_error(self, error: Error) -> None:
        say.block("warn", f"{error.code}: {error}")

    def _safe(self) -> str:
        if self.last_committed is None:
            return "training goes on; nothing is committed yet"
        return f"training goes on; step {self.last_committed} is committed"

    def _raise_pending(self) -> None:
        error, self._raise_next = self._raise_next, None
        if error is not None:
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this runtime is closed")
