"""From receipts to a commit: what the coordinator does, and how the others learn of it.

One `RunWriter` serves the ranks of one node in one incarnation. The node with rank 0 coordinates: it holds the
receipts of its own ranks, reads the others' from the storage by their known names, and commits when it has all.
The other nodes look for the commit record by its known name. No rank waits for another, and nothing here needs a
listing to be right.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import Error, NotFoundError, PersistError, StorageError
from ckptrt.faultpoints import faultpoint
from ckptrt.storage import layout
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import CommitId
from ckptrt.storage.records import ReceiptRecord, unseal
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiers.base import Tier

__all__ = ["Attempt", "Notice", "RunWriter"]

_log = logging.getLogger(__name__)

# Who waits for other nodes asks again after this long, growing to the maximum.
_POLL_FIRST_S = 0.01
_POLL_MAX_S = 1.0
# A step whose ranks are all gone from here can still be finished by what other nodes wrote; not for ever.
_ORPHAN_TIMEOUT_S = 30.0
_FENCE_CHECK_S = 5.0
_FAILED_MAX = 16  # failed steps that are remembered for ranks that are late


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One incarnation's writing into one run: what all its ranks know without asking each other.

    dedup: whether tensors that haven't changed since the last checkpoint stay where they are.
    """

    url: str
    incarnation: int
    world_size: int
    nonce: str
    made_by: str
    keep: Keep | None
    dedup: bool = True

    def folder(self, step: int, retry: int = 0) -> str:
        """Where all ranks put their parts. retry: how often this step was tried, and failed, before."""
        return layout.data_dir(CommitId(step, self.incarnation), self.nonce + (f"r{retry}" if retry else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What became of a step: committed, or an error."""

    step: int
    error: Error | None = None
    retry: int = 0


@dataclass(slots=True)
class _Pending:
    receipts: dict[int, bytes] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)  # local ranks that have handed it over
    since_s: float = 0.0
    retry: int = 0


@dataclass(slots=True)
class _Failed:
    error: Error
    retry: int
    told: set[int]  # local ranks that know


class RunWriter:
    """Gathers receipts of one attempt and commits, or waits for the commit of another node's coordinator.

    notify is called from the writer's own thread with what became of each step. fenced: gives the error to fail with
    once this incarnation is known to be overtaken in a place that isn't `tier`.
    """

    def __init__(
        self,
        attempt: Attempt,
        tier: Tier,
        notify: Callable[[Notice], None],
        after_commit: Callable[[Catalog], None],
        clock: Clock | None = None,
        fenced: Callable[[], Error | None] = lambda: None,
    ) -> None:
        self.attempt = attempt
        self.tier = tier
        self.catalog = Catalog(tier)
        self._notify = notify
        self._after_commit = after_commit
        self._fenced = fenced
        self._clock = clock or SystemClock()
        self._ranks: dict[int, int] = {}  # rank -> pid of the local ranks seen in this attempt, gone ones too
        self._live: set[int] = set()
        self._pending: dict[int, _Pending] = {}
        self._failed: dict[int, _Failed] = {}
        self._bases: dict[int, bytes | ReceiptRecord] = {}  # rank -> its receipt in the newest commit
        self._parent_read = not attempt.dedup
        self._changed = threading.Condition()
        self._poll_s = _POLL_FIRST_S
        self._fence_checked_s = self._clock.monotonic_s()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"commit-i{attempt.incarnation}", daemon=True)
        self._thread.start()

    def join_rank(self, rank: int, pid: int) -> None:
        with self._changed:
            self._ranks[rank] = pid
            self._live.add(rank)

    def leave_rank(self, rank: int, pid: int) -> None:
        """The rank's process is gone and all that it had handed over is written or failed."""
        with self._changed:
            if self._ranks.get(rank) == pid:
                self._live.discard(rank)
            self._changed.notify()

    def expect(self, step: int, rank: int, retry: int = 0) -> bool:
        """A rank has handed over a snapshot of this step. False if that try has failed meanwhile, which it is told."""
        with self._changed:
            error = self._lost(step, rank, retry)
            if error is None:
                self._failed.pop(step, None)  # who knows that it failed, and comes again, begins anew
                begun = _Pending(since_s=self._clock.monotonic_s(), retry=retry)
                self._pending.setdefault(step, begun).ranks.add(rank)
            self._poll_s = _POLL_FIRST_S
            self._changed.notify()
        if error is not None:
            self._notify(Notice(step=step, error=error, retry=retry))
        return error is None

    def _lost(self, step: int, rank: int, retry: int) -> Error | None:
        """Why this try of a step is over before this rank has come to it."""
        failed = self._failed.get(step)
        if failed is not None and (retry < failed.retry or (retry == failed.retry and rank not in failed.told)):
            failed.told.add(rank)
            return failed.error
        pending = self._pending.get(step)
        return _given_up(step) if pending is not None and retry < pending.retry else None

    def add(self, step: int, rank: int, receipt: bytes) -> None:
        """A local rank's shard file is durable."""
        with self._changed:
            pending = self._pending.get(step)
            if pending is not None:  # else the step has failed or been overtaken, and everybody knows
                pending.receipts[rank] = receipt
            self._poll_s = _POLL_FIRST_S
            self._changed.notify()

    def base(self, rank: int) -> ReceiptRecord | None:
        """What a local rank stored in the newest commit, if that is known: its tensors needn't be written again."""
        with self._changed:
            known, read_parent = self._bases.get(rank), not self._parent_read
        if known is None and read_parent:
            self._read_parent()
            return self.base(rank)
        if not isinstance(known, bytes):
            return known
        receipt = unseal(ReceiptRecord, known, f"the receipt of rank {rank}")
        with self._changed:
            if self._bases.get(rank) is known:
                self._bases[rank] = receipt
        return receipt

    def _read_parent(self) -> None:
        """Take the checkpoint from which this incarnation goes on for the newest commit."""
        found: dict[int, ReceiptRecord] = {}
        try:
            parent = self.catalog.fences()[self.attempt.incarnation].parent
            if parent is not None:
                checkpoint = self.catalog.open_checkpoint(CommitId(parent.step, parent.incarnation))
                if checkpoint.record.world_size == self.attempt.world_size:
                    found = {rank: checkpoint.receipt(rank) for rank in self._ranks}
        except (Error, KeyError) as error:  # such as a resume from memory, whose step nobody committed
            _log.info("run %s: everything is written anew, the last checkpoint can't be read: %s", self.tier.url, error)
        with self._changed:
            self._parent_read = True
            for rank, receipt in found.items():
                self._bases.setdefault(rank, receipt)

    def fail(self, step: int, rank: int, error: Error, retry: int = 0) -> None:
        """A local rank will not write: the step can't be committed, its other ranks are told at once."""
        with self._changed:
            known = self._pending.get(step)
            if known is not None and known.retry > retry:
                return  # all of them are trying again already
            self._pending.pop(step, None)
            self._failed[step] = _Failed(error, retry, (known.ranks if known else set()) | {rank})
            for old in sorted(self._failed)[:-_FAILED_MAX]:
                del self._failed[old]
        if known is not None:
            self._notify(Notice(step=step, error=error, retry=retry))
        self._abandon(step, error, retry)

    def idle(self) -> bool:
        """Whether nothing is left to do for anybody."""
        with self._changed:
            return not self._live and not self._pending

    def close(self) -> None:
        """Stop when nothing is pending any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # --- the writer's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._ready():
                    self._poll_s = min(self._poll_s * 1.5, _POLL_MAX_S)
                    self._changed.wait(self._poll_s)
                if self._closing and not self._pending:
                    return
                steps = sorted(self._pending)
            try:
                self._advance(steps)
            except StorageError as error:
                # The store is unwell: what is pending stays so, and is tried again after a while.
                _log.warning(
                    "run %s: waiting for the storage to commit steps %s: %s", self.attempt.url, steps, error.what
                )
                self._clock.sleep_s(_POLL_MAX_S)
            except Exception as cause:  # noqa: BLE001 a bug here must fail these steps, not leave all ranks waiting
                _log.exception("run %s: steps %s can't be committed", self.attempt.url, steps)
                failure = PersistError(f"steps {steps} can't be committed: {cause!r}", safe="what was committed before")
                for step in steps:
                    self._finish(step, failure)
            self._drop_orphans()

    def _ready(self) -> bool:
        """Whether something can be done without waiting for another node."""
        return self._coordinates() and any(len(p.receipts) == self.attempt.world_size for p in self._pending.values())

    def _coordinates(self) -> bool:
        return 0 in self._ranks

    def _advance(self, steps: list[int]) -> None:
        for step in steps:
            with self._changed:
                pending = self._pending.get(step)
            if pending is None:
                continue
            if self._coordinates():
                self._fetch_missing(step, pending)
                if len(pending.receipts) == self.attempt.world_size:
                    self._commit(step, pending)
            elif self._is_committed(step):
                self._finish(step, None)
            elif self._is_abandoned(step, pending.retry):
                self._finish(step, _given_up(step))
        self._check_fence()

    def _fetch_missing(self, step: int, pending: _Pending) -> None:
        folder = self.attempt.folder(step, pending.retry)
        # Ranks of this node hand their receipts over by themselves; only the others' must be looked for.
        missing = {
            folder + layout.receipt_name(rank): rank
            for rank in range(self.attempt.world_size)
            if rank not in pending.receipts and rank not in self._ranks
        }
        if not missing:
            return
        marker = folder + layout.ABANDONED
        for name, data in self.tier.read_many([*missing, marker]).items():
            if name != marker:
                pending.receipts[missing[name]] = data
            elif len(pending.receipts) < self.attempt.world_size:
                self._finish(step, _given_up(step))

    def _commit(self, step: int, pending: _Pending) -> None:
        facts = {"step": step, "incarnation": self.attempt.incarnation}
        for rank, pid in self._ranks.items():
            faultpoint("committing", rank=rank, pid=pid, **facts)
        try:
            if (overtaken := self._fenced()) is not None:
                raise overtaken
            commit(
                self.tier,
                self.catalog,
                step=step,
                incarnation=self.attempt.incarnation,
                data=self.attempt.folder(step, pending.retry).removeprefix(layout.DATA).rstrip("/"),
                receipts=dict(pending.receipts),
                made_by=self.attempt.made_by,
                clock=self._clock,
            )
        except Error as error:
            with self._changed:
                self._bases.clear()  # a file that was borrowed from may be gone
            self._finish(step, error)
            self._abandon(step, error, pending.retry)
            return
        for rank, pid in self._ranks.items():
            faultpoint("committed", rank=rank, pid=pid, **facts)
        self._finish(step, None)
        self._after_commit(self.catalog)

    def _is_committed(self, step: int) -> bool:
        try:
            self.tier.size(layout.commit_name(CommitId(step, self.attempt.incarnation)))
        except NotFoundError:
            return False
        self.tier.settle(layout.COMMITS)  # it can be seen before it is safe
        return True

    def _is_abandoned(self, step: int, retry: int) -> bool:
        try:
            self.tier.size(self.attempt.folder(step, retry) + layout.ABANDONED)
        except NotFoundError:
            return False
        return True

    def _abandon(self, step: int, error: Error, retry: int) -> None:
        """Leave word for other nodes that this step will not be committed: they would wait for it until a later one."""
        if len(self._ranks) == self.attempt.world_size:
            return  # everybody is here and has been told
        with contextlib.suppress(StorageError):  # nothing but patience is lost, and the store may be what failed
            self.tier.create(self.attempt.folder(step, retry) + layout.ABANDONED, error.what.encode() + b"\n")

    def _finish(self, step: int, error: Error | None) -> None:
        """Tell of a step, and of older ones that a commit has overtaken."""
        with self._changed:
            mine = self._pending.pop(step, None)
            done: list[Notice] = []
            if error is None:
                if mine is not None and self.attempt.dedup:
                    self._bases.update((rank, mine.receipts[rank]) for rank in self._ranks if rank in mine.receipts)
                late = PersistError(
                    f"step {step} was committed before all ranks had written an older one",
                    safe=f"step {step} is committed",
                )
                overtaken = [old for old in sorted(self._pending) if old < step]
                done += [Notice(step=old, error=late, retry=self._pending.pop(old).retry) for old in overtaken]
            if mine is not None:
                done.append(Notice(step=step, error=error, retry=mine.retry))
        for notice in done:
            self._notify(notice)

    def _check_fence(self) -> None:
        """What waits for others may wait for a world that is gone: a newer fence ends it."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            steps = sorted(self._pending)
        if not steps or now_s - self._fence_checked_s < _FENCE_CHECK_S:
            return
        self._fence_checked_s = now_s
        newest = self.catalog.newest_incarnation()
        if newest > self.attempt.incarnation:
            for step in steps:
                self._finish(step, self.catalog.fenced_error(self.attempt.incarnation, newest))

    def _drop_orphans(self) -> None:
        """Give up steps that can't be completed: every rank of this node is gone and some receipt will never come."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            if self._live:
                return
            everybody_local = len(self._ranks) == self.attempt.world_size
            orphans = [
                step
                for step, pending in self._pending.items()
                if len(pending.receipts) < self.attempt.world_size
                and (everybody_local or now_s - pending.since_s > _ORPHAN_TIMEOUT_S)
            ]
            for step in orphans:
                del self._pending[step]
        for step in orphans:
            _log.info("run %s: step %d is given up, its ranks are gone", self.attempt.url, step)


def _given_up(step: int) -> PersistError:
    return PersistError(f"step {step} can't be committed: a rank on another node skipped it or could not write it")
