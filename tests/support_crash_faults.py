"""Every call fails, one at a time: with each error, once and from then on; and every byte of a run is changed.

After each failed call the job's promises are held against the disk as it is, and as a power cut would leave it; then
the fault is gone and the next save has to work.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from support_crash_disk import Tree, build, crash_points, digest, materialise
from support_crash_explore import Finding, bare_errors, disk, play
from support_crash_job import Job, Violation, load
from support_crash_judge import Ledger, judge, ledger_of, walk
from support_crash_log import Op, WatchedFs
from support_crash_scenarios import Scenario, scenario_named

from ckptrt.clock import FakeClock
from ckptrt.errors import Error
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.layout import COMMITS
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.verify import verify_commit

__all__ = ["FAULTS", "Fault", "FaultLoop", "damage_loop"]

_CHANGES_NAMES = ("link", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How calls fail. only: those that can fail so, empty for all. lost: the call is done but its answer not heard."""

    name: str
    code: int = 0
    only: tuple[str, ...] = ()
    lost: bool = False

    def strike(self) -> str | int:
        """What `WatchedFs.on_call` gives back, or raises."""
        if self.lost:
            return -self.code
        if not self.code:
            return "short"
        raise OSError(self.code, os.strerror(self.code))


_ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EROFS", "EMFILE", "ENOMEM")
FAULTS = (
    *(Fault(name=name, code=getattr(errno, name)) for name in _ERRORS),
    Fault(name="short", only=("pwrite", "pread")),
    Fault(name="EIO after it was done", code=errno.EIO, only=_CHANGES_NAMES, lost=True),
)


@dataclass(slots=True)
class FaultLoop:
    """Runs scenarios with failing calls; `calls` counts the calls that were failed."""

    max_findings: int = 20
    calls: int = 0
    findings: list[Finding] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def run(
        self,
        scenario: Scenario,
        faults: Sequence[Fault] = FAULTS,
        stride: int = 1,
        offset: int = 0,
        only: str | None = None,
        thorough: bool = False,
    ) -> None:
        """Fail every `stride`-th call (of one kind), from number `offset` + 1, once and for good.

        The first time that the product makes a call from a place in its code, it fails with each fault. When the same
        place makes it again, it fails with the first fault, with another one in turn, and as its kind can; from the
        fourth time on, with one in turn. With `thorough`, every call fails with each fault.
        """
        calls = _calls_of(scenario)
        names = [name for name, _place in calls]
        again = _times_before(calls)
        for number in range(1 + offset, len(names) + 1, stride):
            if only is not None and names[number - 1] != only:
                continue
            for fault, sticky in _strikes(faults, names[number - 1], 0 if thorough else again[number - 1]):
                if len(self.findings) < self.max_findings:
                    self.calls += 1
                    self._fail(scenario, fault, number, sticky)

    def _fail(self, scenario: Scenario, fault: Fault, number: int, sticky: bool) -> None:
        after = f"{fault.name} at call {number}{' and from then on' * sticky}"
        with disk() as base:
            fs = WatchedFs(f"{base}/live")
            struck: list[str] = []

            def strike(call: str, at: int) -> str | int | None:
                if at < number or (at > number and not sticky) or (fault.only and call not in fault.only):
                    return None
                struck.append(call)
                return fault.strike()

            fs.on_call = strike
            try:
                errors = _play_and_check(scenario, fs, struck)
                if errors and not fault.code:
                    raise Violation("I7", f"reads and writes may do a part of their work, but: {errors[0].what}")
                fs.on_call = lambda call, at: None
                self._judge(fs.log, base)
            except Violation as error:
                self.findings.append(
                    Finding(
                        scenario=scenario.name,
                        form=0,
                        invariant=error.invariant,
                        text=str(error),
                        after=f"{after} ({struck[0] if struck else 'never reached'})",
                    )
                )

    def _judge(self, log: list[Op], base: str) -> None:
        """The disk as it is, and as it would be if the power went now."""
        ledger = ledger_of(log)
        *_, (_, loose) = crash_points(log)
        for choice in ({}, dict.fromkeys(loose, "lost")):
            tree = build(log, choice)
            key = f"{digest(tree)} {ledger}"
            if key in self._seen:
                continue
            self._seen.add(key)
            materialise(tree, f"{base}/state")
            try:
                with bare_errors("judging the disk"):
                    judge(f"{base}/state/runs/a", ledger)
            finally:
                shutil.rmtree(f"{base}/state")


Place = tuple[tuple[str, int], ...]  # files and lines of the product, the innermost six, from the call outward


def _calls_of(scenario: Scenario) -> list[tuple[str, Place]]:
    """The calls that a scenario makes when nothing fails, and from where in the product."""
    calls: list[tuple[str, Place]] = []
    with disk() as base:
        fs = WatchedFs(f"{base}/live")
        fs.on_call = lambda call, at: calls.append((call, _place()))  # type: ignore[func-returns-value]
        play(scenario, Job(fs), 0)
    return calls


def _place() -> Place:
    lines: list[tuple[str, int]] = []
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if "/ckptrt/" in frame.f_code.co_filename:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
    return tuple(lines[:6])


def _times_before(calls: Iterable[tuple[str, Place]]) -> list[int]:
    """For each of them how often the same place had made it before."""
    counts: Counter[tuple[str, Place]] = Counter()
    found: list[int] = []
    for call in calls:
        found.append(counts[call])
        counts[call] += 1
    return found


def _strikes(faults: Sequence[Fault], call: str, again: int) -> list[tuple[Fault, bool]]:
    """With what a call fails that was made `again` times from the same place before, and whether from then on."""
    fitting = [fault for fault in faults if not fault.only or call in fault.only]
    if not again:
        return [(fault, sticky) for fault in faults for sticky in (False, True) if sticky or fault in fitting]
    first = fitting[0]
    other = fitting[again % len(fitting)]
    if again >= 3:
        return [(other, again % 2 == 0)]
    chosen = [first, other, *(fault for fault in fitting if fault.only)]
    return [(fault, sticky) for fault in dict.fromkeys(chosen) for sticky in (False, True)]


def _play_and_check(scenario: Scenario, fs: WatchedFs, struck: list[str]) -> list[Error]:
    job = Job(fs, lenient=True)
    with bare_errors("the job"):
        play(scenario, job, 0)
    condemned: set[int] = set()
    for op in fs.log:
        if op.kind == "fsync_failed":
            condemned.add(op.inode)
        elif op.kind in ("fsync", "link", "rename") and op.inode in condemned:
            raise Violation("I1", f"{op.kind} of a file whose fsync had failed")
    if "unlink" not in struck and (left := [path for path in walk(fs.base) if "/.tmp-" in path]):
        raise Violation("I8", f"{left[0]} was left by a write that failed")
    return job.errors


# --- damage


def damage_loop(flips: int, seed: int = 0) -> tuple[int, list[Finding]]:
    """Change files of a run, one at a time, and load and verify it. Returns how many changes, and what went wrong."""
    rng = random.Random(f"damage {seed}")
    findings: list[Finding] = []
    count = 0
    with disk() as base:
        fs = WatchedFs(f"{base}/live")
        play(scenario_named("save"), Job(fs), 0)
        ledger, tree = ledger_of(fs.log), build(fs.log, {})
        for what, changed, path in _damages(tree, flips, rng):
            count += 1
            materialise(changed, f"{base}/state")
            try:
                with bare_errors("judging a damaged run"):
                    size_differs = len(changed[path] or b"") != len(tree[path] or b"")
                    _judge_damage(f"{base}/state/runs/a", ledger, path.removeprefix("runs/a/"), size_differs)
            except Violation as error:
                findings.append(
                    Finding(scenario="damage", form=0, invariant=error.invariant, text=str(error), after=what)
                )
            finally:
                shutil.rmtree(f"{base}/state")
    return count, findings


def _damages(tree: Tree, flips: int, rng: random.Random) -> Iterator[tuple[str, Tree, str]]:
    files = {path: data for path, data in tree.items() if data}
    for path, data in files.items():
        for bit in sorted(rng.sample(range(8 * len(data)), min(flips, 8 * len(data)))):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} of {path}", {**tree, path: bytes(changed)}, path
        for size in sorted({0, 1, len(data) // 2, len(data) - 1}):
            yield f"{path} cut to {size} B", {**tree, path: data[:size]}, path
        start = rng.randrange(0, len(data), 512)
        holed = data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :]
        if holed != data:
            yield f"zeros at {start} of {path}", {**tree, path: holed}, path
        for other, its in files.items():
            if other != path and its != data and path.rpartition("/")[2][:1] == other.rpartition("/")[2][:1]:
                yield f"{other} in the place of {path}", {**tree, path: its}, path


def _judge_damage(root: str, ledger: Ledger, path: str, size_differs: bool) -> None:
    """Nothing wrong is loaded, `verify` tells, and what names and sizes tell is passed over."""
    catalog = Catalog(LocalTier(root), FakeClock())
    for commit in ledger.committed:
        with suppress(Error):  # reported
            load(catalog, commit, ledger.begun, ledger.committed[commit])
        if f"s{commit.step:09d}." not in path or path.endswith(".receipt.json"):
            continue  # another one's, or a spare copy
        if verify_commit(catalog, commit, read_data=True).is_loadable:
            raise Violation("I6", f"verify finds nothing in {commit}, whose file {path} was changed")
        newest = catalog.newest_good().commit
        if newest and newest.id == commit and (size_differs or path.startswith(COMMITS)):
            raise Violation("I2", f"{commit} is taken for good, but {path} was changed")
