"""Opening an incarnation: choose where to resume, raise the number, write the fence. In this order, at every start.

All of it is I/O on the storage and on etcd, and may take long: the supervisor has it done on another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ckptrt.agents.resume import Resume, Snapshot, choose_resume
from ckptrt.errors import (
    CorruptError,
    ExistsError,
    FencedError,
    NoCheckpointError,
    NotFoundError,
    TransientError,
    UsageError,
)
from ckptrt.storage import catalog as storage
from ckptrt.storage.tiered import RunPlace, hold_place, open_place

__all__ = ["Opening", "RunLedger", "memory_snapshots"]

_log = logging.getLogger(__name__)

_FENCE_PATIENCE_S = 300.0  # a storage that can't be reached at a restart is waited for so long
_FENCE_RACES_MAX = 100
_CALM_TRIES = 3  # so often is a moment waited for in which nothing was committed since the choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An open incarnation. resume: None is a fresh start. notes: what was passed over or unusual, for the user."""

    incarnation: int
    resume: Resume | None
    notes: tuple[str, ...]
    decide_s: float
    fence_s: float

    @property
    def resume_text(self) -> str:
        return str(self.resume) if self.resume else "fresh"


def memory_snapshots(fds: Sequence[int]) -> list[Snapshot]:
    """The steps that are whole in these arenas, newest first."""
    if not fds:
        return []
    return [
        Snapshot(step=found.step, incarnation=found.incarnation, world_size=found.world_size)
        for found in storage.memory_snapshots(fds)
    ]


def _where(url: str, local_dir: str) -> str:
    return f"{url} through {local_dir}" if local_dir else url


class RunLedger:
    """The run that this job writes to, once it is known, and its incarnations.

    raise_incarnation: above -> (number, warning), from the coordination store. job: its id, if others may lead it too;
    what a former leader holds is no hindrance then.
    """

    def __init__(self, raise_incarnation: Callable[[int], tuple[int, str]], job: str = "") -> None:
        self._job = job
        self.url = ""
        self.local_dir = ""
        self._raise = raise_incarnation
        self._catalog: storage.Catalog | None = None
        self._hold: ExitStack | None = None
        self._fenced = 0  # the newest incarnation that this job has fenced
        self._unfenced = 0  # a number that was raised before the run was known

    def open_run(self, place: RunPlace) -> None:
        """Hold the run and open its catalog; the second call must name the same run.

        Raises BusyError when another job has it, and what the storage raises.
        """
        if self._catalog is not None:
            if (place.url, place.local_dir) != (self.url, self.local_dir):
                raise UsageError(
                    f"this job already writes to {_where(self.url, self.local_dir)}, not to "
                    f"{_where(place.url, place.local_dir)}",
                    safe="nothing was changed",
                    hint="use one run for one launch; start another ckptrt-launch for another run",
                )
            return
        with hold_place(place, self._job) as hold:
            self._catalog = open_place(place)
            self._hold = hold.pop_all()
        self.url, self.local_dir = place.url, place.local_dir

    def advance(self, *, memory: Callable[[], list[Snapshot]], policy: str, world_size: int) -> Opening:
        """Open the next incarnation. policy: auto, latest, never, or a step."""
        if self._catalog is None:
            began_s = time.monotonic()
            number, warning = self._raise(0)
            self._unfenced = number
            notes = (warning,) if warning else ()
            fence_s = time.monotonic() - began_s
            return Opening(incarnation=number, resume=None, notes=notes, decide_s=0.0, fence_s=fence_s)
        deadline_s = time.monotonic() + _FENCE_PATIENCE_S
        delay_s = 1.0
        while True:
            try:
                return self._advance(self._catalog, memory, policy, world_size)
            except TransientError as error:
                if time.monotonic() + delay_s > deadline_s:
                    raise
                _log.warning("event=storage_unreachable url=%s retry_s=%.0f: %s", self.url, delay_s, error.what)
                time.sleep(delay_s)
                delay_s = min(10.0, 2 * delay_s)

    def close(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _advance(
        self, catalog: storage.Catalog, memory: Callable[[], list[Snapshot]], policy: str, world_size: int
    ) -> Opening:
        mine: int | None = None
        newest = catalog.newest_incarnation()
        if self._fenced and newest > self._fenced:
            # Another job has taken over. Taking the run back would go on for ever.
            raise catalog.fenced_error(self._fenced, newest)
        for attempt in range(_FENCE_RACES_MAX):
            began_s = time.monotonic()
            known = set(catalog.commit_ids())
            resume, notes = self._choose(catalog, memory, policy, world_size, mine)
            decided_s = time.monotonic()
            parent = storage.Parent(step=resume.step, incarnation=resume.incarnation) if resume else None
            number = self._next(catalog.next_incarnation() - 1, notes)
            # What is in memory is newer than what its workers' persister may still commit, and prune can't reach it.
            from_memory = resume is not None and resume.tier == "memory"
            # A job that goes on committing has to be fenced in the midst of it: only then will it stop.
            calm = from_memory or attempt >= _CALM_TRIES
            if not calm and not known.issuperset(catalog.commit_ids()):
                self._unfenced = number
                continue
            try:
                catalog.write_fence(number, parent, world_size)
                mine = mine or number
                self._fenced = number
                # What the last workers' persister committed before the fence counts, and it may have pruned our choice
                # for it. After the fence it can do neither.
                if from_memory or known.issuperset(catalog.commit_ids()):
                    break
                _log.warning("event=late_commit url=%s incarnation=%d", self.url, number)
            except (ExistsError, FencedError) as error:
                _log.warning("event=fence_race url=%s incarnation=%d: %s", self.url, number, error.what)
        else:
            raise FencedError(
                f"{self.url}: somebody else opens a new incarnation each time that this job tries to",
                safe="all committed checkpoints",
                hint="stop the other job",
            )
        fence_s = time.monotonic() - decided_s
        return Opening(
            incarnation=number, resume=resume, notes=tuple(notes), decide_s=decided_s - began_s, fence_s=fence_s
        )

    def _next(self, newest: int, notes: list[str]) -> int:
        """A number for the fence: that of the workers who run already and have just named the run, if it will do."""
        number, self._unfenced = self._unfenced, 0
        if number > newest:
            return number
        number, warning = self._raise(newest)
        notes += [warning] if warning else []
        return number

    def _choose(
        self,
        catalog: storage.Catalog,
        memory: Callable[[], list[Snapshot]],
        policy: str,
        world_size: int,
        before: int | None,
    ) -> tuple[Resume | None, list[str]]:
        if policy == "never":
            return None, []
        if policy.isdigit():
            try:
                info = catalog.examine(catalog.find(int(policy)))
            except NotFoundError as error:
                raise NoCheckpointError(error.what, safe="nothing was changed", hint=error.hint) from None
            if info.state != "committed":
                raise NoCheckpointError(
                    f"step {policy} of {self.url} is {info.state}: {info.reason}",
                    safe="nothing was changed",
                    hint="name another step, or let --ckpt-resume=auto take the newest good one",
                )
            return Resume(step=info.step, incarnation=info.incarnation, tier="stored"), []
        found = catalog.newest_good(before=before)
        notes = [f"step {skipped.step} was passed over: {skipped.reason}" for skipped in found.skipped]
        fences = {
            number: (fence.parent.step, fence.parent.incarnation) if fence.parent else None
            for number, fence in catalog.fences().items()
            if before is None or number < before
        }
        committed = (found.commit.step, found.commit.incarnation) if found.commit else None
        resume = choose_resume(memory=memory(), committed=committed, fences=fences, world_size=world_size)
        if resume is None and found.skipped:
            raise CorruptError(
                f"{self.url} has {len(found.skipped)} checkpoints and none is whole: {'; '.join(notes[:3])}",
                safe="nothing was changed or deleted",
                hint="mount or repair what is missing; --ckpt-resume=never starts anew and leaves them aside for good",
            )
        if resume is None:
            catalog.check_fresh(before)
        if resume is None and policy == "latest":
            raise NoCheckpointError(
                f"{self.url} has no committed checkpoint, and --ckpt-resume=latest asks for one",
                safe="no checkpoint was touched",
                hint="use --ckpt-resume=auto to start fresh when there is none",
            )
        return resume, notes
