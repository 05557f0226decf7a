"""Which checkpoints a run has: fences, commits, the reader's rule, and the newest good one.

Whatever is damaged is reported and passed over; it never hides the rest. Commits are listed before fences, so a commit
that is seen was there before the newest fence that is seen: a late commit of an older incarnation can't slip through.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import (
    CorruptError,
    ExistsError,
    FencedError,
    NotFoundError,
    UsageError,
    VersionError,
)
from ckptrt.storage.checkpoint import Checkpoint, check_commit
from ckptrt.storage.layout import (
    COMMITS,
    DATA,
    FENCES,
    RUN,
    CommitId,
    commit_name,
    fence_name,
    parse_commit_name,
    parse_data_dir,
    parse_fence_name,
)
from ckptrt.storage.lineage import Lineage, trace
from ckptrt.storage.owner import made_by, this_owner
from ckptrt.storage.records import CommitRecord, FenceRecord, Owner, Parent, RunRecord, seal, unseal
from ckptrt.storage.runlock import RunHold, hold_run
from ckptrt.storage.slots import MemorySnapshot, memory_snapshots
from ckptrt.storage.tiers import Tier, open_tier

__all__ = [
    "Catalog", "Checkpoint", "CommitId", "CommitInfo", "FenceRecord", "MemorySnapshot", "Overview", "Owner", "Parent",
    "RunHold", "RunRecord", "Selection", "hold_run", "memory_snapshots", "open_catalog", "this_owner",
]  # fmt: skip

_log = logging.getLogger(__name__)
State = Literal["committed", "off-path", "damaged", "too-new"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """A commit as found. `reason` says why it is anything but committed; `record` is None if it can't be read."""

    id: CommitId
    state: State
    reason: str = ""
    record: CommitRecord | None = None

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def incarnation(self) -> int:
        return self.id.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The newest good commit, or None, and the newer ones on the path that were passed over, each with its reason."""

    commit: CommitInfo | None
    skipped: tuple[CommitInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All of a run's records at one look. Maps and tuples are newest first; `commits` holds every state.

    bad_fences: incarnation -> what is wrong with its fence.
    problems: all that is wrong with run record, fences and path; damaged commits are told by their own state.
    """

    fences: dict[int, FenceRecord]
    bad_fences: dict[int, str]
    commits: tuple[CommitInfo, ...]
    lineage: Lineage
    problems: tuple[str, ...]

    @property
    def valid(self) -> list[CommitInfo]:
        """Commits on the path whose records are whole, in the order in which a restore prefers them."""
        found = {commit.id: commit for commit in self.commits if commit.state == "committed"}
        return [found[commit] for commit in self.lineage.commits if commit in found]


class Catalog:
    """One run's records on one tier. Nothing is cached but the run record, so every call tells the present."""

    def __init__(self, tier: Tier, clock: Clock | None = None) -> None:
        self.tier = tier
        self.run: RunRecord | None = None  # None before open_run/create_run, or if the record is damaged
        self.run_problem = ""
        self._clock = clock or SystemClock()

    def places(self) -> tuple[Catalog, ...]:
        """The catalogs of the places that hold the run, nearest first: where ranks write, and where it stays."""
        return (self,)

    # --- the run

    def create_run(self, run_id: str | None = None) -> RunRecord | None:
        """Open the run, creating it if there is none. An existing run keeps its own id.

        None if the run record is damaged: that is logged, and costs no checkpoint. VersionError for a newer format.
        """
        record = RunRecord(run_id=run_id or secrets.token_hex(8), created_at=self._clock.wall_iso(), made_by=made_by())
        try:
            self.tier.size(RUN)
            self.tier.settle("")  # who made it may have died before it was durable
            return self.open_run()
        except NotFoundError:
            self.tier.probe()  # a store that replaces what is there must be found out before the first checkpoint
        try:
            self.tier.create(RUN, seal(record))
        except ExistsError:
            return self.open_run()
        self.run, self.run_problem = record, ""
        return record

    def open_run(self) -> RunRecord | None:
        """Read the run record. NotFoundError if nothing is there; None, and a warning, if only the record is bad."""
        try:
            self.run, self.run_problem = unseal(RunRecord, self.tier.read(RUN), self._where(RUN)), ""
        except CorruptError as error:
            self.run, self.run_problem = None, error.what
        except NotFoundError:
            if not self.tier.list(COMMITS) and not self.tier.list(FENCES):
                raise NotFoundError(
                    f"there is no run at {self.tier.url}", hint="check the path; a run's directory holds run.json"
                ) from None
            self.run, self.run_problem = None, f"{self._where(RUN)} is missing"
        if self.run_problem:
            _log.warning("run record unusable, its checkpoints are read all the same: %s", self.run_problem)
        return self.run

    # --- fences

    def fences(self) -> dict[int, FenceRecord]:
        """Every readable fence by incarnation, newest first."""
        return self._read_fences()[0]

    def newest_incarnation(self) -> int:
        """The highest incarnation that has a fence, readable or not; 0 if none."""
        return max(self.fence_numbers(), default=0)

    def next_incarnation(self) -> int:
        """A number that nothing here has: no fence, and no commit or data that a copy cut short has left."""
        attempts = (parse_data_dir(entry.name) for entry in self.tier.list(DATA) if entry.is_folder)
        named = [*self.commit_ids(), *(attempt[0] for attempt in attempts if attempt is not None)]
        return max((*self.fence_numbers(), *(commit.incarnation for commit in named)), default=0) + 1

    def newest_fence(self) -> FenceRecord | None:
        """The newest fence that can be read. Use next_incarnation() to choose the next number."""
        return next(iter(self.fences().values()), None)

    def write_fence(
        self, incarnation: int, parent: Parent | None, world_size: int, owner: Owner | None = None
    ) -> FenceRecord:
        """Open an incarnation and make all older ones harmless.

        Raises ExistsError if somebody else has fenced this incarnation, FencedError if a newer one is fenced.
        """
        if incarnation < 1 or world_size < 1 or (parent is not None and parent.incarnation >= incarnation):
            raise UsageError(f"incarnation {incarnation} of {world_size} ranks can't go on from {parent}")
        newest = self.newest_incarnation()
        if newest > incarnation:
            raise self.fenced_error(incarnation, newest)
        record = FenceRecord(
            incarnation=incarnation,
            parent=parent,
            world_size=world_size,
            owner=owner or this_owner(),
            created_at=self._clock.wall_iso(),
        )
        name, data = fence_name(incarnation), seal(record)
        try:
            self.tier.create(name, data)
        except ExistsError:
            # A write that was sent twice finds its own first copy.
            if self.tier.read(name) != data:
                holder = self._fence_owner(incarnation)
                raise ExistsError(
                    f"incarnation {incarnation} of {self.tier.url} is already fenced by {holder}",
                    safe="all committed checkpoints",
                    hint="take the next incarnation, or stop this job if the other one is alive",
                ) from None
        return record

    def fenced_error(self, mine: int, newest: int) -> FencedError:
        """The error for a writer of incarnation `mine` when `newest` owns the run."""
        return FencedError(
            f"incarnation {mine} of {self.tier.url} may not write any more: incarnation {newest} was opened by "
            f"{self._fence_owner(newest)}",
            safe="all checkpoints committed before; the newer incarnation goes on from one of them",
            hint="stop this job if the newer one is meant to run",
        )

    # --- commits

    def overview(self) -> Overview:
        """Read every fence and commit record. VersionError if a fence is of a newer format: the path can't be told."""
        names = self._commit_names()
        fences, bad_fences = self._read_fences()
        lineage = trace({i: fence.parent for i, fence in fences.items()}, names.values(), bad_fences)
        data = self.tier.read_many(names)
        # A commit that was removed since it was listed is left out.
        commits = [self._info(commit, data[name], lineage) for name, commit in names.items() if name in data]
        commits.sort(key=lambda commit: commit.id, reverse=True)
        run = [self.run_problem] if self.run_problem else []
        return Overview(
            fences=fences,
            bad_fences=bad_fences,
            commits=tuple(commits),
            lineage=lineage,
            problems=(*run, *bad_fences.values(), *lineage.problems),
        )

    def commits(self) -> list[CommitInfo]:
        """The commits on the valid path, newest first; overview() has those off it and damaged ones, with reasons."""
        return self.overview().valid

    def newest_good(
        self, max_step: int | None = None, besides: Collection[CommitId] = (), before: int | None = None
    ) -> Selection:
        """The newest commit on the path (of at most `max_step`) that is whole as far as names, sizes and metadata tell.

        besides: commits that are known to be bad, or not wanted; they are not looked at. before: see path(). Reads no
        more commits than needed. VersionError if a newer ckptrt wrote one on the way: it isn't passed over.
        """
        skipped: list[CommitInfo] = []
        for commit in self.path(before).commits:
            if (max_step is not None and commit.step > max_step) or commit in besides:
                continue
            info = self.examine(commit)
            if info.state == "committed":
                return Selection(commit=info, skipped=tuple(skipped))
            skipped.append(info)
        return Selection(commit=None, skipped=tuple(skipped))

    def path(self, before: int | None = None) -> Lineage:
        """The reader's rule applied to the names of all commits; reads fences only.

        before: as if that incarnation, and newer ones, had not been fenced: for who has just done so and chooses anew.
        """
        return self.lineage(self.commit_ids(), before)

    def lineage(self, commits: Iterable[CommitId], before: int | None = None) -> Lineage:
        """The same for these commits, listed before this call, of which some may lie elsewhere."""
        fences, bad_fences = self._read_fences()
        parents = {i: fence.parent for i, fence in fences.items() if before is None or i < before}
        bad = {i: problem for i, problem in bad_fences.items() if before is None or i < before}
        return trace(parents, commits, bad)

    def check_fresh(self, before: int | None = None) -> None:
        """Raise CorruptError if a start from nothing would leave checkpoints aside that nobody chose to leave.

        The newest fence goes on from a step that is gone, and there are commits: somebody died between choosing it and
        the next checkpoint, while another one's prune removed it; or the store isn't all there.
        """
        fences = [fence for number, fence in self.fences().items() if before is None or number < before]
        commits = sorted(self.commit_ids(), reverse=True)
        if fences and commits and fences[0].parent is not None:
            parent = fences[0].parent
            raise CorruptError(
                f"{self.tier.url} goes on from step {parent.step} of incarnation {parent.incarnation}, which is gone; "
                f"there is step {commits[0].step} of incarnation {commits[0].incarnation}, but it is off the path",
                safe="nothing was changed or deleted",
                hint=f"look with `ckptrt ls`; removing {fence_name(fences[0].incarnation)} brings the older path back, "
                "--ckpt-resume=never (or another directory) starts anew",
            )

    def examine(self, commit: CommitId) -> CommitInfo:
        """Check one commit: its record, the manifest's head, and that all shard files have their sizes.

        Damage is told by the state, whatever else goes wrong (the store can't be reached, a newer format) is raised.
        """
        record = None
        try:
            record = self.read_commit(commit)
            problems = Checkpoint(self.tier, record).problems()
        except (CorruptError, NotFoundError) as error:
            problems = [error.what]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            return CommitInfo(id=commit, state="damaged", reason=problems[0] + more, record=record)
        return CommitInfo(id=commit, state="committed", record=record)

    def commit_ids(self) -> list[CommitId]:
        """Every commit by its name alone, on the path or not."""
        return list(self._commit_names().values())

    def read_commit(self, commit: CommitId) -> CommitRecord:
        """A commit's record, verified and checked against its name."""
        name = commit_name(commit)
        return self._open_commit(commit, self.tier.read(name))

    def open_checkpoint(self, commit: CommitId | CommitInfo) -> Checkpoint:
        """A checkpoint to read from; takes any commit, on the path or not."""
        commit_id = commit.id if isinstance(commit, CommitInfo) else commit
        return Checkpoint(self.tier, self.read_commit(commit_id))

    def find(self, step: int) -> CommitId:
        """The commit of a step on the valid path; NotFoundError says which steps there are."""
        lineage = self.path()
        for commit in lineage.commits:
            if commit.step == step:
                return commit
        raise NotFoundError(
            f"{self.tier.url} has no checkpoint of step {step}" + _off_path_hint(step, lineage),
            hint=f"there are steps {_few(commit.step for commit in lineage.commits)}" if lineage.commits else "",
        )

    # --- reading records

    def _commit_names(self) -> dict[str, CommitId]:
        entries = ((entry.name, parse_commit_name(entry.name)) for entry in self.tier.list(COMMITS))
        return {name: commit for name, commit in entries if commit is not None}

    def fence_numbers(self) -> list[int]:
        """Every incarnation that has a fence, readable or not, newest first."""
        numbers = (parse_fence_name(entry.name) for entry in self.tier.list(FENCES))
        return sorted((number for number in numbers if number is not None), reverse=True)

    def _read_fences(self) -> tuple[dict[int, FenceRecord], dict[int, str]]:
        numbers = self.fence_numbers()
        data = self.tier.read_many([fence_name(number) for number in numbers])
        fences: dict[int, FenceRecord] = {}
        bad: dict[int, str] = {}
        for number in numbers:
            where = self._where(fence_name(number))
            try:
                if fence_name(number) not in data:
                    raise CorruptError(f"{where} is listed but can't be found")
                fence = unseal(FenceRecord, data[fence_name(number)], where)
                if fence.incarnation != number:
                    raise CorruptError(f"{where} is damaged: it is the fence of incarnation {fence.incarnation}")
                fences[number] = fence
            except CorruptError as error:
                bad[number] = error.what
        return fences, bad

    def _info(self, commit: CommitId, data: bytes, lineage: Lineage) -> CommitInfo:
        try:
            record = self._open_commit(commit, data)
        except CorruptError as error:
            return CommitInfo(id=commit, state="damaged", reason=error.what)
        except VersionError as error:
            return CommitInfo(id=commit, state="too-new", reason=error.what)
        if commit in lineage.off_path:
            return CommitInfo(id=commit, state="off-path", reason=lineage.off_path[commit], record=record)
        return CommitInfo(id=commit, state="committed", record=record)

    def _open_commit(self, commit: CommitId, data: bytes) -> CommitRecord:
        where = self._where(commit_name(commit))
        record = unseal(CommitRecord, data, where)
        check_commit(record, commit, where)
        return record

    def _fence_owner(self, incarnation: int) -> str:
        name = fence_name(incarnation)
        try:
            fence = unseal(FenceRecord, self.tier.read(name), self._where(name))
        except (CorruptError, NotFoundError, VersionError) as error:
            return f"an unknown job ({error.what})"
        owner = fence.owner
        return f"pid {owner.pid} of {owner.user or 'an unknown user'} on {owner.host} at {fence.created_at}"

    def _where(self, name: str) -> str:
        return f"{self.tier.url.rstrip('/')}/{name}"


def open_catalog(url: str, create: bool = False, run_id: str | None = None, **options: object) -> Catalog:
    """The catalog of the run at a path or URL.

    create: make the run if there is none (else NotFoundError). options: storage options for the URL's file system.
    Raises VersionError for a run of a newer format.
    """
    catalog = Catalog(open_tier(url, **options))
    if create:
        catalog.create_run(run_id)
    else:
        catalog.open_run()
    return catalog


def _off_path_hint(step: int, lineage: Lineage) -> str:
    for commit, reason in lineage.off_path.items():
        if commit.step == step:
            return f" on the valid path (incarnation {commit.incarnation} has one, but {reason})"
    return ""


def _few(steps: Iterable[int]) -> str:
    listed = [str(step) for step in steps]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
