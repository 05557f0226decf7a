"""Zombies: a real process that stops before any of its calls to the disk, is succeeded, and goes on.

The zombie is a forked process that saves, prunes, copies or pins, and sends itself SIGSTOP before its n-th call. While
it is stopped, the job is taken over as a launcher does it: the same code chooses where to go on, raises the incarnation
and writes the fence. The zombie is woken right then, or once two more steps are saved, or once the old ones are pruned
too. It runs to its end. What it said after it woke must be true, and nothing of the successor's may be missing or
changed, nor what the successor went on from while it has saved nothing itself.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from support_crash_explore import disk
from support_crash_job import COLUMNS, Job, Violation, load, save_on
from support_crash_judge import check_clean, prune_all
from support_crash_log import Op
from support_crash_mutants import MUTANTS
from support_crash_scenarios import source_run

from ckptrt.agents.ledger import RunLedger
from ckptrt.clock import FakeClock
from ckptrt.errors import Error, NoCheckpointError, NotFoundError
from ckptrt.storage import commit as committing
from ckptrt.storage import prune
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.layout import CommitId
from ckptrt.storage.prune import prune_committed
from ckptrt.storage.records import Parent
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiered import RunPlace
from ckptrt.storage.tiers.fs import Fs
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.verify import verify_commit

__all__ = ["BUGS", "DEEDS", "WOKEN", "Haunting", "calls_of", "haunt"]

_STEPS = (10, 20, 30)
WOKEN = ("after the fence", "after the saves", "after the prune")


class _StoppingFs(Fs):
    """Real calls, counted; before call number `stop_at` this process stops. What a `Job` wants of a watched one."""

    def __init__(self, base: str, stop_at: int) -> None:
        self.base = base
        self.log: list[Op] = []
        self.num_calls = 0
        self.told_before: int | None = None  # how many notes there were when it stopped
        self.on_call = lambda call, number: None
        self._stop_at = stop_at

    def note(self, *note: Any) -> None:
        self.log.append(Op(kind="note", note=note))

    def revive(self) -> None:
        """It was never killed."""

    def count(self) -> None:
        self.num_calls += 1
        if self.num_calls == self._stop_at:
            self.told_before = len(self.log)
            os.kill(os.getpid(), signal.SIGSTOP)


def _counted(name: str) -> Callable[..., Any]:
    real = getattr(Fs, name)

    def call(self: _StoppingFs, *args: Any, **kwargs: Any) -> Any:
        self.count()
        return real(self, *args, **kwargs)

    return call


for _name, _member in list(vars(Fs).items()):
    if callable(_member) and not _name.startswith("_"):
        setattr(_StoppingFs, _name, _counted(_name))


def _start(job: Job) -> None:
    job.create()
    job.fence(1)
    job.save(40)


def _save(job: Job) -> None:
    job.fs.note("fenced", 1)
    for step in (40, 50):
        job.save(step)
        job.prune(2, incarnation=1)


def _pin(job: Job) -> None:
    job.pin(CommitId(30, 1))
    job.unpin(CommitId(30, 1))


def _copy(job: Job) -> None:
    source = source_run()
    job.copy_from(source, source.path().commits)


# What a zombie may be at, and whether there is a run when it begins.
DEEDS: Mapping[str, tuple[Callable[[Job], Any], bool]] = {
    "a first start": (_start, False),
    "a save": (_save, True),
    "a prune": (lambda job: job.prune_by_hand(1), True),
    "a pin": (_pin, True),
    "a copy": (_copy, False),
}


def _no_look_after_the_commit() -> AbstractContextManager[Any]:
    return patch.object(committing, "_check_counts", lambda catalog, commit_id: None)


def _no_second_look() -> AbstractContextManager[Any]:
    return patch.object(prune, "_is_taken_over", lambda catalog, plan: False)


def _of_the_crash_tests(name: str) -> Callable[[], AbstractContextManager[Any]]:
    return next(mutant.plant for mutant in MUTANTS if mutant.name == name)


# Planted in the zombie alone, with the deed by which each has to be found.
BUGS: Mapping[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "the fence isn't checked": (_of_the_crash_tests("the fence isn't checked"), "a save"),
    "the fence isn't checked once more after the commit": (_no_look_after_the_commit, "a save"),
    "published by rename": (_of_the_crash_tests("published by rename"), "a first start"),
    "prune doesn't look at the fences again": (_no_second_look, "a prune"),
}


@dataclass(slots=True, kw_only=True)
class Haunting:
    """pauses: how often a process was stopped, succeeded and woken."""

    pauses: int = 0
    violations: list[str] = field(default_factory=list)


def calls_of(deed: str) -> int:
    """How many calls it takes when nobody stops."""
    with disk() as base:
        _prepare(base, deed)
        told = _Zombie(base, deed, 0).end()
    return int(told["calls"])


def haunt(deed: str, *, stride: int = 1, first: int = 1, bug: str = "", enough: int = 0) -> Haunting:
    """Stop before every stride-th call. enough: end after so many violations, if not 0."""
    haunting = Haunting()
    for stop_at in range(first, calls_of(deed) + 1, stride):
        for woken in WOKEN:
            with disk() as base:
                haunting.pauses += 1
                try:
                    _haunt_once(base, deed, stop_at, woken, bug)
                except Violation as error:
                    haunting.violations.append(f"{deed}, paused before call {stop_at}, woken {woken}: {error}")
                    if len(haunting.violations) == enough:
                        return haunting
    return haunting


def _prepare(base: str, deed: str) -> None:
    os.makedirs(f"{base}/runs")
    if DEEDS[deed][1]:
        job = Job(_StoppingFs(base, 0))  # type: ignore[arg-type]
        job.create()
        job.fence(1)
        for step in _STEPS:
            job.save(step)


class _Zombie:
    """The process. bug: planted in it."""

    def __init__(self, base: str, deed: str, stop_at: int, bug: str = "") -> None:
        self._told, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._told)
                with BUGS[bug][0]() if bug else nullcontext():
                    fs = _StoppingFs(base, stop_at)
                    job = Job(fs, lenient=True)  # type: ignore[arg-type]
                    DEEDS[deed][0](job)
                notes = [op.note for op in fs.log]
                facts = {
                    "calls": fs.num_calls,
                    "before": notes[: fs.told_before],
                    "after": notes[fs.told_before or 0 :],
                }
                with open(told, "w") as file:
                    json.dump(facts, file)
                code = 0
            finally:
                os._exit(code)
        os.close(told)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self._ended = not os.WIFSTOPPED(status)

    def end(self) -> dict[str, Any]:
        """Wake it, and see it to its end; what it had to say."""
        if not self._ended:
            os.kill(self.pid, signal.SIGCONT)
            os.waitpid(self.pid, 0)
        with open(self._told, "rb") as file:
            data = file.read()
        if not data:
            raise Violation("I7", "it died of something that is no error of ours")
        return dict(json.loads(data))


def _haunt_once(base: str, deed: str, stop_at: int, woken: str, bug: str) -> None:
    _prepare(base, deed)
    zombie = _Zombie(base, deed, stop_at, bug)
    told: dict[str, Any] | None = None
    try:
        heir = _Heir(f"{base}/runs/a", oldest=deed == "a prune" and woken == "after the fence")
        if woken == "after the fence":
            told = zombie.end()
        heir.save()
        if woken == "after the prune":
            prune_committed(heir.catalog, Keep(last=1))
    except Error as error:
        raise Violation("I7", f"the job can't be taken over: {error.what}") from error
    finally:
        told = told or zombie.end()
    # Whoever prunes by hand after the take-over means it.
    stay = heir.mine[1:] if woken == "after the prune" or deed == "a prune" else heir.mine
    try:
        _judge(heir, stay, told)
        _check_nothing_stays(heir)
    except Error as error:
        raise Violation("I7", f"afterwards: {error.what}") from error


class _Heir:
    """Takes the job over, as a launcher and its workers do. oldest: goes on from an older step, if it is there."""

    def __init__(self, root: str, oldest: bool) -> None:
        ledger = RunLedger(lambda above: (above + 1, ""))
        ledger.open_run(RunPlace.of(root))
        try:
            opening = ledger.advance(memory=list, policy="10" if oldest else "auto", world_size=2)
        except NoCheckpointError:
            opening = ledger.advance(memory=list, policy="auto", world_size=2)
        ledger.close()
        self.catalog = Catalog(LocalTier(root), FakeClock())
        self.incarnation = opening.incarnation
        self.parent: CommitId | None = None
        if opening.resume is not None:
            self.parent = CommitId(opening.resume.step, opening.resume.incarnation)
        self.mine = [CommitId((self.parent.step if self.parent else 0) + more, self.incarnation) for more in (5, 10)]

    def save(self) -> None:
        if self.parent is not None:
            load(self.catalog, self.parent, {self.parent: {"0a": COLUMNS}})
        for commit in self.mine:
            save_on(self.catalog.tier, self.catalog, commit, "0b")


def _check_nothing_stays(heir: _Heir) -> None:
    """Another restart later, nothing is left of what the zombie did."""
    newest = heir.mine[-1]
    incarnation = heir.catalog.next_incarnation()
    heir.catalog.write_fence(incarnation, Parent(step=newest.step, incarnation=newest.incarnation), 2)
    last = CommitId(newest.step + 1, incarnation)
    save_on(heir.catalog.tier, heir.catalog, last, "0c")
    prune_all(heir.catalog, 1)
    check_clean(heir.catalog, last)


def _judge(heir: _Heir, stay: list[CommitId], told: dict[str, Any]) -> None:
    catalog = heir.catalog
    path = catalog.path().commits
    if not path or path[0] != stay[-1]:
        raise Violation("I5", f"the newest checkpoint is {path[:1]}, not the successor's {stay[-1]}")
    if missing := [commit for commit in stay if commit not in path]:
        raise Violation("I1", f"the successor's {missing[0]} is gone")
    for commit in path:
        attempt = "0b" if commit.incarnation == heir.incarnation else "0a"
        load(catalog, commit, {commit: {attempt: COLUMNS}}, attempt)
        if not verify_commit(catalog, commit, read_data=True).is_loadable:
            raise Violation("I2", f"{commit} counts but is damaged")
    after = [
        (what, CommitId(*fact) if isinstance(fact, list) and len(fact) == 2 else fact) for what, fact in _firsts(told)
    ]
    for what, fact in after:
        if what == "committed" and fact not in path and len(stay) == len(heir.mine):
            raise Violation("I1", f"{fact} was reported as committed after the take-over, and doesn't count")
        if what == "fenced" and fact == heir.incarnation:
            raise Violation("I5", f"incarnation {heir.incarnation} was given to two")
        if what == "pinned" and ("unpinning", fact) not in after:
            _check_pinned(catalog, fact)


def _firsts(told: dict[str, Any]) -> list[tuple[str, Any]]:
    """What was said after it woke, each with its first fact."""
    return [(what, facts[0] if facts else None) for what, *facts in told["after"]]


def _check_pinned(catalog: Catalog, commit: CommitId) -> None:
    try:
        catalog.read_commit(commit)
    except NotFoundError as error:
        raise Violation("I1", f"{commit} was reported as pinned, and is gone") from error
