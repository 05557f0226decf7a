"""What must be true of a run's folder after a crash, given what its job had been told before.

The judge opens the folder as a new process does. Each finding names the invariant that it breaks:

    I1  a reported commit is there and loads bit for bit        I5  the fences decide which commits count
    I2  nothing that isn't whole is listed, chosen or loaded    I6  a changed byte is never loaded
    I3  the newest good step is never older than reported       I7  errors are ours, and the job can go on
    I4  all that is loaded belongs to one attempt               I8  nothing is left over after a prune
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from support_crash_job import COLUMNS, WORLD_SIZE, Violation, load, save_on
from support_crash_log import Op

from ckptrt.clock import FakeClock
from ckptrt.errors import Error, NotFoundError
from ckptrt.storage.catalog import Catalog, Overview, Owner, Parent
from ckptrt.storage.layout import DATA, RUN, CommitId, parse_commit_name
from ckptrt.storage.pins import pinned_ids, unpin
from ckptrt.storage.prune import PrunePolicy, execute, plan_prune
from ckptrt.storage.retention import Keep
from ckptrt.storage.runlock import LOCK
from ckptrt.storage.tiers.local import LocalTier

__all__ = ["Ledger", "Violation", "check_clean", "judge", "ledger_of", "prune_all", "walk"]

Fences: TypeAlias = Mapping[int, "tuple[int, int] | None"]
_LONG_AFTER_S = 1e7


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a job had begun and what it had been told, up to some moment."""

    run_id: str | None = None
    begun_fences: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    begun: dict[CommitId, dict[str, int]] = field(default_factory=dict)  # attempts: nonce -> columns
    committed: dict[CommitId, str] = field(default_factory=dict)  # -> nonce, in order of the reports
    may_go: set[CommitId] = field(default_factory=set)
    gone: set[CommitId] = field(default_factory=set)
    damaged: set[CommitId] = field(default_factory=set)
    pinned: set[CommitId] = field(default_factory=set)
    unpinned: set[CommitId] = field(default_factory=set)
    floor: int = 0  # the newest checkpoint is never older than this step

    def take(self, what: str, *facts: Any) -> None:
        """Enter one note of the job's."""
        if what == "run":
            self.run_id = facts[0]
        elif what == "fencing":
            self.begun_fences[facts[0]] = facts[1]
        elif what == "fenced":
            if facts[0] in self.fenced:
                raise Violation("I5", f"two writers were told that incarnation {facts[0]} is theirs")
            self.fenced.add(facts[0])
        elif what == "fence copied":
            self.fenced.add(facts[0])
        elif what == "saving":
            self.begun.setdefault(facts[0], {})[facts[1]] = facts[2]
        elif what == "committed":
            if self.committed.setdefault(facts[0], facts[1]) != facts[1]:
                raise Violation(
                    "I5", f"{facts[0]} was committed twice, with attempts {self.committed[facts[0]]}, {facts[1]}"
                )
        elif what == "pruning":
            self.may_go.update(c for c in self.begun if c not in facts[0] and c not in self.pinned)
        elif what == "pruned":
            self.gone.update(commit for name in facts[0] if (commit := parse_commit_name(name)))
        elif what == "rollback":
            self.may_go.add(facts[0])
        elif what == "damaged":
            self.damaged.add(facts[0])
        elif what == "pinned":
            self.pinned.add(facts[0])
        elif what == "unpinning":
            self.pinned.discard(facts[0])
        elif what == "unpinned":
            self.unpinned.add(facts[0])
        elif what == "floor":
            self.floor = facts[0]


def ledger_of(log: Iterable[Op]) -> Ledger:
    ledger = Ledger()
    for op in log:
        if op.kind == "note":
            ledger.take(*op.note)
    return ledger


def judge(root: str, ledger: Ledger, go_on: bool = True) -> None:
    """Raise Violation if the folder isn't as it must be. go_on: recover, save and prune there too."""
    catalog = Catalog(LocalTier(root), FakeClock())
    with _no_error_of("I2", "reading the run's records"):
        _check_run(catalog, ledger)
        view = catalog.overview()
        path = _check_records(view, ledger)
    for commit in path:
        _check_commit(catalog, commit, ledger)
    good = [commit for commit in path if commit not in ledger.damaged]
    _check_promises(good, ledger)
    _check_pins(catalog, ledger)
    with _no_error_of("I2", "choosing the newest checkpoint"):
        selection = catalog.newest_good(besides=ledger.damaged)
    if selection.skipped:
        raise Violation("I2", f"{selection.skipped[0].id} counts but was passed over: {selection.skipped[0].reason}")
    newest = selection.commit.id if selection.commit else None
    if newest != next(iter(good), None):
        raise Violation("I3", f"the newest good checkpoint is said to be {newest}, of {good}")
    if go_on:
        _go_on(catalog, ledger, good)


def _check_run(catalog: Catalog, ledger: Ledger) -> None:
    try:
        record = catalog.open_run()
    except NotFoundError:
        if ledger.run_id is not None or ledger.fenced:
            raise
        return
    if record is None or (ledger.run_id is not None and record.run_id != ledger.run_id):
        if ledger.run_id is None and not os.path.exists(f"{catalog.tier.url.removeprefix('file://')}/{RUN}"):
            return  # of a run that never came to be, some later record is there
        raise Violation("I1", f"the run's record is {record or catalog.run_problem}")


def _check_records(view: Overview, ledger: Ledger) -> list[CommitId]:
    """No record is torn, none that was promised is missing, and those that count are those that a naive rule says."""
    if view.bad_fences:
        raise Violation("I2", f"a fence is damaged: {view.bad_fences}")
    missing = ledger.fenced - set(view.fences)
    if missing:
        raise Violation("I1", f"the fence of incarnation {min(missing)} was written and is gone")
    fences: dict[int, tuple[int, int] | None] = {}
    for incarnation, fence in view.fences.items():
        fences[incarnation] = (fence.parent.step, fence.parent.incarnation) if fence.parent else None
        if incarnation not in ledger.begun_fences or ledger.begun_fences[incarnation] != fences[incarnation]:
            raise Violation("I5", f"nobody wrote this fence of incarnation {incarnation}: {fences[incarnation]}")
    for info in view.commits:
        if info.state == "damaged" and info.id not in ledger.damaged:
            raise Violation("I2", f"a commit record is damaged: {info.reason}")
        if info.id not in ledger.begun:
            raise Violation("I2", f"nobody took a checkpoint {info.id}")
        if info.id in ledger.gone:
            raise Violation("I3", f"{info.id} was pruned and is back")
    naive = naive_path(fences, [info.id for info in view.commits])
    if [info.id for info in view.valid] != naive:
        raise Violation("I5", f"{[info.id for info in view.valid]} count; they should be {naive}, by {fences}")
    return naive


def naive_path(fences: Fences, commits: Sequence[CommitId]) -> list[CommitId]:
    """The reader's rule once more, step by step, for runs whose fences are all whole."""
    path: list[CommitId] = []
    at, limit = max(fences, default=0), math.inf
    while at:
        for commit in sorted(commits, reverse=True):
            if commit.incarnation == at and commit.step <= limit and commit.step not in {c.step for c in path}:
                path.append(commit)
        parent = fences.get(at)
        if parent is None:
            break
        limit, at = min(limit, parent[0]), parent[1]
    return path


def _check_commit(catalog: Catalog, commit: CommitId, ledger: Ledger) -> None:
    """What counts is whole and equal to what was saved."""
    reported = commit in ledger.committed
    try:
        info = catalog.examine(commit)
        if info.state != "committed" and commit not in ledger.damaged:
            raise Violation("I1" if reported else "I2", f"{commit} counts but isn't whole: {info.reason}")
        load(catalog, commit, ledger.begun, ledger.committed.get(commit))
    except Error as error:
        if commit not in ledger.damaged:
            raise Violation("I1" if reported else "I2", f"{commit} counts but doesn't load: {error.what}") from error
    except OSError as error:
        raise Violation("I7", f"{commit} ends in a bare {error!r}") from error


def _check_promises(good: Sequence[CommitId], ledger: Ledger) -> None:
    kept = [c for c in ledger.committed if c not in ledger.may_go | ledger.damaged]
    for commit in kept:
        if commit not in good:
            raise Violation("I1", f"{commit} was reported as committed; now these count: {list(good)}")
    # Steps only grow along a job's own reports, so the last one is what a user was told last.
    if kept and (not good or good[0].step < kept[-1].step):
        raise Violation("I3", f"{kept[-1]} was reported; the newest is {good[:1]}")
    if ledger.floor and (not good or good[0].step < ledger.floor):
        raise Violation("I3", f"step {ledger.floor} had been there; the newest is {good[:1]}")


def _check_pins(catalog: Catalog, ledger: Ledger) -> None:
    there = pinned_ids(catalog)
    if ledger.pinned - there:
        raise Violation("I1", f"{min(ledger.pinned - there)} was pinned, and its pin is gone")
    if ledger.unpinned & there:
        raise Violation("I1", f"{min(ledger.unpinned & there)} was unpinned, and its pin is back")


# --- and the job goes on


def _go_on(catalog: Catalog, ledger: Ledger, good: Sequence[CommitId]) -> None:
    """Prune, restart, save and prune again on what the crash left."""
    with _no_error_of("I8", "a prune after the crash"):
        prune_all(catalog, 99)
    for commit in good:
        _check_commit(catalog, commit, ledger)
    with _no_error_of("I7", "the next incarnation"):
        catalog.create_run("crash")
        incarnation = catalog.next_incarnation()
        parent = Parent(step=good[0].step, incarnation=good[0].incarnation) if good else None
        catalog.write_fence(incarnation, parent, WORLD_SIZE, Owner(host="node-b", pid=1))
        mine = CommitId((good[0].step if good else 0) + 7, incarnation)
        save_on(catalog.tier, catalog, mine, "0b")
        selection = catalog.newest_good()
    if selection.commit is None or selection.commit.id != mine:
        raise Violation("I7", f"{mine} was saved after the crash, but {selection.commit} is the newest")
    after = Ledger(begun={**ledger.begun, mine: {"0b": COLUMNS}})
    for commit in (mine, *good[:1]):
        _check_commit(catalog, commit, after)
    with _no_error_of("I8", "a prune after the next save"):
        prune_all(catalog, 1)
    pinned = pinned_ids(catalog) & {*good}
    for commit in (mine, *pinned):
        _check_commit(catalog, commit, after)
    for commit in pinned:  # else none of it would ever go
        unpin(catalog, commit)
    prune_all(catalog, 1)
    check_clean(catalog, mine)


def prune_all(catalog: Catalog, keep_last: int) -> None:
    policy = PrunePolicy(keep=Keep(last=keep_last), grace_s=0.0, removed_grace_s=0.0)
    result = execute(catalog, plan_prune(catalog, policy, _LONG_AFTER_S * 1e6))
    if result.errors:
        raise result.errors[0]


def check_clean(catalog: Catalog, only: CommitId) -> None:
    """One checkpoint is kept: nothing else may be there but the run's record and the fences."""
    root = catalog.tier.url.removeprefix("file://")
    folder = f"{DATA}{catalog.read_commit(only).data}/"
    for path in walk(root):
        known = path in (RUN, LOCK) or path.startswith((folder, "fences/i")) or parse_commit_name(path) == only
        if not known or "/.tmp-" in f"/{path}":
            raise Violation("I8", f"{path} is left over")


def walk(root: str) -> list[str]:
    """All files and empty folders below a folder, hidden ones too."""
    found: list[str] = []
    for folder, names, files in os.walk(root):
        where = "" if folder == root else folder[len(root) + 1 :] + "/"
        found += [where + name for name in files]
        if not names and not files and where not in ("", "data/", "commits/", "fences/", "pins/"):
            found.append(where)
    return sorted(found)


@contextmanager
def _no_error_of(invariant: str, doing: str) -> Any:
    try:
        yield
    except Error as error:
        raise Violation(invariant, f"{doing} failed: {error.what}") from error
    except OSError as error:
        raise Violation("I7", f"{doing} ended in a bare {error!r}") from error
