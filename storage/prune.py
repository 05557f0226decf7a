"""Making room: a plan of what goes and why, then its execution.

What may go: commits beyond the newest `keep_last` good ones, commits off the path, and data folders that no kept
commit needs. What never goes: the newest good checkpoint, any folder that a kept commit refers to, and data that may
still be in the making. Commit records go first, then data: after a kill in between only unreferenced data is left,
which the next prune finds. Data folders are listed before commits, so one that is committed meanwhile is seen as such.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptrt.errors import CorruptError, ExistsError, NotFoundError, StorageError, UsageError
from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.layout import (
    COMMITS,
    DATA,
    FENCES,
    PINS,
    CommitId,
    commit_name,
    parse_commit_name,
    parse_data_dir,
    parse_pin_name,
)
from ckptrt.storage.lineage import Lineage
from ckptrt.storage.pins import pinned_ids
from ckptrt.storage.retention import Candidate, Keep, wanted
from ckptrt.storage.tiers.base import Entry

__all__ = [
    "GRACE_S", "Kept", "PrunePlan", "PrunePolicy", "PruneResult", "Removal", "execute", "plan_prune",
    "prune_committed", "wanted_ids",
]  # fmt: skip

# Longer than any lease and any pause of a writer that still counts as alive.
GRACE_S = 3600.0
_WRITE_MAX_S = 60.0  # no record's own write takes longer; its temporary file may be that of a live one until then


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePolicy:
    """keep: which checkpoints of the path stay.

    grace_s: commits off the path and data without a commit stay until they are as old as this.
    removed_grace_s: the same for data of commits that this very plan removes.
    holding: commits that stay whatever the rules say, as nobody else has them yet.
    overtaken_only: leave commits off the path alone until the path has passed their step, and those of branches that
    were left altogether for good: nothing of an abandoned branch is lost unless somebody asks for it.
    """

    keep: Keep
    grace_s: float = GRACE_S
    removed_grace_s: float = GRACE_S
    holding: frozenset[CommitId] = frozenset()
    overtaken_only: bool = False

    def __post_init__(self) -> None:
        if self.grace_s < 0 or self.removed_grace_s < 0:
            raise UsageError("a grace time can't be negative")

    def __str__(self) -> str:
        return f"keep {self.keep} and what is pinned; data without a commit goes once it is {self.grace_s:g} s old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A commit that stays, and the rule by which it does."""

    id: CommitId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A commit record or a data folder (its name ends in a slash) that goes, or will go when it is old enough."""

    name: str
    id: CommitId
    reason: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """All newest first. `waiting` is dead too, but younger than the grace time: a later prune takes it.

    pins: of checkpoints that are gone, since a power cut took back their unpinning.
    unfinished: what interrupted writes left where all else stays, last touched before `unfinished_before_s`.
    """

    rule: str
    newest_incarnation: int
    kept: tuple[Kept, ...]
    commits: tuple[Removal, ...]
    folders: tuple[Removal, ...]
    waiting: tuple[Removal, ...]
    pins: tuple[Removal, ...] = ()
    unfinished: tuple[Entry, ...] = ()
    unfinished_before_s: float = 0.0

    @property
    def freed_bytes(self) -> int:
        gone: tuple[Removal | Entry, ...] = (*self.folders, *self.pins, *self.unfinished)
        return sum(part.size_bytes for part in gone)

    @property
    def is_empty(self) -> bool:
        return not (self.commits or self.folders or self.pins or self.unfinished)


@dataclass(slots=True, kw_only=True)
class PruneResult:
    """What an execution did; `errors` are what could not be deleted (it is tried again by the next prune)."""

    deleted: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    errors: list[StorageError] = field(default_factory=list)


def plan_prune(
    catalog: Catalog, policy: PrunePolicy, now_s: float, examine: Callable[[CommitId], CommitInfo] | None = None
) -> PrunePlan:
    """Decide what goes; changes nothing.

    now_s: seconds since 1970, compared with the store's times of writing. examine: what tells a good commit from a
    damaged one; by default Catalog.examine, which looks at records and sizes and reads no data. Raises VersionError if
    the run has records of a newer format: what they need can't be told.
    """
    folders = _data_folders(catalog)
    lineage = catalog.path()
    # An older incarnation's last commit may have come between the lists of commits and of fences.
    late = set(catalog.commit_ids()) - set(lineage.commits) - set(lineage.off_path)
    pinned = pinned_ids(catalog)
    stay = wanted(policy.keep, _candidates(catalog, lineage, policy.keep, now_s))
    stay.update((commit, "not flushed yet") for commit in policy.holding)
    stay.update((commit, "pinned") for commit in pinned)
    newest = _newest_good(lineage, policy.keep.last, examine or catalog.examine)
    kept, gone = _sort_commits(lineage, *newest, stay, policy)
    kept.update((commit, "committed just now") for commit in late)
    ages = _Ages(catalog, now_s)
    commits: list[Removal] = []
    for commit, reason in gone.items():
        # A branch is cut off by time as well: its owner may still be about to learn that it was fenced.
        if commit in lineage.off_path and not ages.passed(folders.get(commit, ()), policy.grace_s):
            kept[commit] = "off the path, but younger than the grace time"
        else:
            commits.append(Removal(name=commit_name(commit), id=commit, reason=reason))
    needed = _needed_folders(catalog, {*kept, *pinned}, folders)
    removed = {commit.id for commit in commits}
    dead, waiting = _sort_folders(policy, lineage, folders, kept, removed, needed, ages)
    before_s = now_s - max(policy.grace_s, _WRITE_MAX_S)
    return PrunePlan(
        rule=str(policy),
        newest_incarnation=_newest(lineage),
        kept=tuple(Kept(id=commit, reason=kept[commit]) for commit in sorted(kept, reverse=True)),
        commits=_newest_first(commits),
        folders=_newest_first(dead),
        waiting=_newest_first(waiting),
        pins=() if policy.overtaken_only else _newest_first(_idle_pins(catalog, lineage, folders, before_s)),
        unfinished=() if policy.overtaken_only else tuple(_unfinished(catalog, needed, before_s)),
        unfinished_before_s=before_s,
    )


def execute(catalog: Catalog, plan: PrunePlan) -> PruneResult:
    """Delete what the plan says, commit records first. May be repeated, and killed at any point.

    Raises StorageError, with nothing deleted, if a newer incarnation has started since the plan was made: it may go on
    from a checkpoint that the plan removes.
    """
    if _is_taken_over(catalog, plan):
        raise _taken_over_error(catalog, safe="everything; nothing was deleted")
    result = PruneResult()
    _delete_commits(catalog, plan, result)
    # A record that could not be deleted may need any of the folders.
    if plan.folders and not result.errors:
        # An earlier prune may have been killed when a record was gone but could still come back.
        catalog.tier.settle(COMMITS)
    for folder in plan.folders if not result.errors else ():
        _try(result, folder, catalog.tier.delete_prefix)
    for idle in plan.pins:
        _try(result, idle, catalog.tier.delete)
    _sweep(catalog, plan, result)
    return result


def _is_taken_over(catalog: Catalog, plan: PrunePlan) -> bool:
    return catalog.newest_incarnation() > plan.newest_incarnation


def _taken_over_error(catalog: Catalog, safe: str) -> StorageError:
    what = f"{catalog.tier.url} was taken over by a new incarnation while this prune was under way"
    return StorageError(what, safe=safe, hint="run prune again")


def _delete_commits(catalog: Catalog, plan: PrunePlan, result: PruneResult) -> None:
    """Delete commit records, but put back those that were pinned since, and all if a new incarnation has begun.

    Whoever prunes may sleep anywhere. An incarnation that is fenced after the look at the fences below finds the
    records gone and goes on from another; one that was fenced before may go on from any of these, and need its data.
    """
    commits = plan.commits
    records = catalog.tier.read_many([commit.name for commit in commits])
    # Since the plan was made minutes may have passed. Putting a record back takes room and a process that lives on, so
    # that is left for pins that come after this look.
    pinned = pinned_ids(catalog) if commits else set()
    result.errors += [_pinned_error(commit.id) for commit in commits if commit.id in pinned]
    commits = tuple(commit for commit in commits if commit.id not in pinned)
    for commit in commits:
        _try(result, commit, catalog.tier.delete)
    if (commits or plan.folders) and _is_taken_over(catalog, plan):
        for name, record in records.items():
            _put_back(catalog, name, record, result)
        result.deleted.clear()
        result.freed_bytes = 0
        result.errors.append(_taken_over_error(catalog, safe="everything; the records that were deleted are back"))
        return
    pinned = pinned_ids(catalog) if commits else set()
    for commit in commits:
        if commit.id in pinned and commit.name in records:
            _put_back(catalog, commit.name, records[commit.name], result)
            result.deleted = [name for name in result.deleted if name != commit.name]
            result.errors.append(_pinned_error(commit.id))


def _put_back(catalog: Catalog, name: str, record: bytes, result: PruneResult) -> None:
    commit = parse_commit_name(name)
    assert commit is not None
    try:
        catalog.tier.create(name, record)
        if catalog.examine(commit).state != "committed":
            catalog.tier.delete(name)  # a newer incarnation has pruned it meanwhile, and its data with it
    except ExistsError:
        pass  # it wasn't deleted
    except StorageError as error:
        result.errors.append(
            StorageError(
                f"{catalog.tier.url}/{name} was deleted and can't be put back: {error.what}",
                safe="the data of its checkpoint; without the record nobody finds them",
                hint=f"write these bytes to that name: {record.decode(errors='replace').rstrip()}",
            )
        )


def _pinned_error(commit: CommitId) -> StorageError:
    return StorageError(
        f"step {commit.step} was pinned while this prune was under way",
        safe="it stays, with its data",
        hint="run prune again for the others",
    )


def wanted_ids(
    catalog: Catalog, keep: Keep, elsewhere: Mapping[CommitId, Mapping[str, float]], bad: Collection[CommitId]
) -> set[CommitId]:
    """The commits of the path that shall stay, of this catalog's and of those that lie elsewhere, with their metrics.

    bad: those that don't count among the last ones.
    """
    lineage = catalog.lineage({*catalog.commit_ids(), *elsewhere})
    candidates = [
        replace(candidate, metrics=dict(elsewhere[candidate.id])) if candidate.id in elsewhere else candidate
        for candidate in _candidates(catalog, lineage, keep, time.time())
    ]
    last = [commit for commit in lineage.commits if commit not in bad][: keep.last]
    return {*last, *wanted(keep, candidates), *pinned_ids(catalog)}


def prune_committed(
    catalog: Catalog, keep: Keep, holding: Iterable[CommitId] = (), incarnation: int | None = None
) -> PruneResult:
    """What a running job does after each commit: keep what is wanted, free the others' space at once.

    holding: commits that stay whatever the rules say. incarnation: the job's own. Reads the records of the kept commits
    only, unless the rules need more. Raises FencedError if a newer one has begun, which may have other rules, and
    StorageError if something could not be deleted.
    """
    policy = PrunePolicy(keep=keep, removed_grace_s=0.0, holding=frozenset(holding), overtaken_only=True)
    plan = plan_prune(catalog, policy, time.time())
    if incarnation is not None and plan.newest_incarnation > incarnation:
        raise catalog.fenced_error(incarnation, plan.newest_incarnation)
    result = execute(catalog, plan)
    if result.errors:
        raise result.errors[0]
    return result


def _sweep(catalog: Catalog, plan: PrunePlan, result: PruneResult) -> None:
    for prefix in sorted({entry.name[: entry.name.rfind("/") + 1] for entry in plan.unfinished}):
        try:
            swept = catalog.tier.sweep(prefix, plan.unfinished_before_s)
        except StorageError as error:
            result.errors.append(error)
        else:
            result.deleted += [entry.name for entry in swept]
            result.freed_bytes += sum(entry.size_bytes for entry in swept)


def _unfinished(catalog: Catalog, needed: Collection[str], before_s: float) -> Iterator[Entry]:
    """What interrupted writes left among records and in folders that stay, but not where data are in the making."""
    for prefix in ("", FENCES, COMMITS, PINS, *sorted(needed)):
        yield from catalog.tier.sweep(prefix, before_s, dry_run=True)


def _idle_pins(catalog: Catalog, lineage: Lineage, folders: Collection[CommitId], before_s: float) -> Iterator[Removal]:
    """Pins of checkpoints of which nothing is there, when whoever set one has looked for its commit long ago."""
    there = {*lineage.commits, *lineage.off_path, *folders}
    for entry in catalog.tier.list(PINS):
        commit = parse_pin_name(entry.name)
        if commit is not None and commit not in there and entry.modified_s < before_s:
            yield Removal(
                name=entry.name, id=commit, reason="a pin without its checkpoint", size_bytes=entry.size_bytes
            )


def _try(result: PruneResult, removal: Removal, delete: Callable[[str], None]) -> None:
    try:
        delete(removal.name)
    except StorageError as error:
        result.errors.append(error)
    else:
        result.deleted.append(removal.name)
        result.freed_bytes += removal.size_bytes


def _data_folders(catalog: Catalog) -> dict[CommitId, list[str]]:
    """Names of data folders, by the commit that each is an attempt at. Anything with another name isn't ours."""
    found: dict[CommitId, list[str]] = {}
    for entry in catalog.tier.list(DATA):
        parsed = parse_data_dir(entry.name) if entry.is_folder else None
        if parsed is not None:
            found.setdefault(parsed[0], []).append(entry.name)
    return found


def _candidates(catalog: Catalog, lineage: Lineage, keep: Keep, now_s: float) -> list[Candidate]:
    """The path's commits as the rules see them; records are read only where a rule needs them."""
    found: list[Candidate] = []
    written_s = {entry.name: entry.modified_s for entry in catalog.tier.list(COMMITS)} if keep.within_s else {}
    for commit in lineage.commits:
        metrics: dict[str, float] = {}
        if keep.best is not None:
            with contextlib.suppress(CorruptError, NotFoundError):
                metrics = catalog.read_commit(commit).metrics
        age_s = now_s - written_s.get(commit_name(commit), now_s)
        found.append(Candidate(id=commit, age_s=age_s, metrics=metrics))
    return found


def _newest_good(
    lineage: Lineage, count: int, examine: Callable[[CommitId], CommitInfo]
) -> tuple[list[CommitId], dict[CommitId, CommitInfo]]:
    """The newest good commits of the path, and the damaged ones that are newer than the last of these."""
    good: list[CommitId] = []
    damaged: dict[CommitId, CommitInfo] = {}
    for commit in lineage.commits:
        if len(good) == count:
            break
        info = examine(commit)
        if info.state == "committed":
            good.append(commit)
        else:
            damaged[commit] = info
    return good, damaged


def _sort_commits(
    lineage: Lineage,
    good: list[CommitId],
    damaged: Mapping[CommitId, CommitInfo],
    stay: Mapping[CommitId, str],
    policy: PrunePolicy,
) -> tuple[dict[CommitId, str], dict[CommitId, str]]:
    """Which commits stay and which go, each with the reason."""
    last = policy.keep.last
    kept = {commit: "the newest good one" if i == 0 else f"last {last}" for i, commit in enumerate(good)}
    gone: dict[CommitId, str] = {}
    # Damaged ones among the newest don't count, and may yet be repaired from another tier. With nothing good at
    # all, everything on the path is in `damaged` and stays.
    kept.update((commit, f"damaged, doesn't count: {info.reason}") for commit, info in damaged.items())
    there = (*lineage.commits, *lineage.off_path)
    kept.update((commit, stay[commit]) for commit in there if commit in stay and commit not in kept)
    for commit in lineage.commits:
        if commit not in kept:
            gone[commit] = f"beyond the last {last}" if policy.keep == Keep(last=last) else "no rule keeps it"
    on_path = {segment.incarnation for segment in lineage.segments}
    for commit, reason in lineage.off_path.items():
        if commit in kept:
            continue
        overtaken = bool(good) and commit.incarnation in on_path and commit.step <= good[0].step
        if policy.overtaken_only and not overtaken:
            kept[commit] = f"off the path ({reason}), but not overtaken"
        else:
            gone[commit] = f"off the path: {reason}"
    return kept, gone


def _sort_folders(
    policy: PrunePolicy,
    lineage: Lineage,
    folders: Mapping[CommitId, Iterable[str]],
    kept: Collection[CommitId],
    removed: Collection[CommitId],
    needed: Collection[str],
    ages: _Ages,
) -> tuple[list[Removal], list[Removal]]:
    """Dead data folders: those that go now, and those that are too young."""
    dead: list[Removal] = []
    waiting: list[Removal] = []
    for commit, names in folders.items():
        reason = _why_dead(commit, lineage, removed, kept)
        grace_s = policy.removed_grace_s if commit in removed else policy.grace_s
        for name in names if reason else ():
            if name in needed:
                continue
            # No grace asked for means none, even if the store's clock is ahead of ours.
            old_enough = (grace_s == 0 and commit in removed) or ages.passed((name,), grace_s)
            removal = Removal(name=name, id=commit, reason=reason, size_bytes=ages.size_bytes(name))
            (dead if old_enough else waiting).append(removal)
    return dead, waiting


def _needed_folders(
    catalog: Catalog, kept: Collection[CommitId], folders: Mapping[CommitId, Iterable[str]]
) -> set[str]:
    """Folders that kept commits hold or refer to. For a record that can't be read: all attempts at that commit."""
    needed: set[str] = set()
    for commit in kept:
        try:
            record = catalog.read_commit(commit)
        except (CorruptError, NotFoundError):
            needed.update(folders.get(commit, ()))
            continue
        needed.update(f"{DATA}{name}/" for name in (record.data, *record.references))
    return needed


def _why_dead(commit: CommitId, lineage: Lineage, removed: Collection[CommitId], kept: Collection[CommitId]) -> str:
    """Why a data folder of this commit that nobody refers to is dead; empty if it may still be in the making."""
    if commit in removed:
        return "its commit goes"
    if commit in kept:
        return "another attempt at this checkpoint was committed"
    if commit.incarnation < _newest(lineage):
        return "never committed, and a newer incarnation has begun"
    committed = (*lineage.commits, *lineage.off_path)
    if any(c.incarnation == commit.incarnation and c.step > commit.step for c in committed):
        return "never committed, and a later step was"
    return ""


class _Ages:
    """Size and age of data folders, looked up when asked for."""

    def __init__(self, catalog: Catalog, now_s: float) -> None:
        self._catalog = catalog
        self._now_s = now_s
        self._known: dict[str, tuple[int, float]] = {}

    def passed(self, names: Iterable[str], grace_s: float) -> bool:
        """Whether everything in these folders is at least this old. A folder that shows nothing counts as old."""
        return all(self._now_s - self._look_up(name)[1] >= grace_s for name in names)

    def size_bytes(self, name: str) -> int:
        return self._look_up(name)[0]

    def _look_up(self, name: str) -> tuple[int, float]:
        if name not in self._known:
            entries = self._catalog.tier.list(name)
            newest_s = max((entry.modified_s for entry in entries), default=float("-inf"))
            self._known[name] = (sum(entry.size_bytes for entry in entries), newest_s)
        return self._known[name]


def _newest(lineage: Lineage) -> int:
    return lineage.segments[0].incarnation if lineage.segments else 0


def _newest_first(removals: Iterable[Removal]) -> tuple[Removal, ...]:
    return tuple(sorted(removals, key=lambda removal: (removal.id, removal.name), reverse=True))
