"""Failing system calls of real processes: `make syscalls`. Some minutes on two cores; see docs/design/crash-testing.md.

strace makes one call fail, or kills the process at it; then another one, until each that is asked for has had its turn.
Exit status 0 only if what was reported is there all the same, every failure was told, the next start works, and all
planted bugs are found.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from support_crash_explore import play
from support_crash_job import Job, Violation
from support_crash_log import WatchedFs
from support_crash_mutants import MUTANTS
from support_crash_scenarios import scenario_named
from support_syscalls import Call, Fault, faults_of, folder, play_traced, refusal
from support_syscalls_persister import ROLES, Rig

from ckptrt.storage import persister

__all__ = ["BUGS", "HISTORIES", "Bug", "Result", "Task", "hunt", "run_task", "tasks"]

HISTORIES = ("save", "borrow", "prune after commits", "re-save after a restart", "pin", "copy", "flush")
_FINDINGS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A planted bug and where it is looked for: a history or a thread of the persister, a kind of call, a fault."""

    name: str
    place: str
    syscall: str
    fault: str


BUGS = (
    Bug(name="a failed fsync is tried again", place="save", syscall="fsync", fault="EIO"),
    Bug(name="written under its own name", place="save", syscall="pwrite64", fault="killed"),
    Bug(name="prune: data before records", place="prune after commits", syscall="unlink", fault="killed"),
    Bug(name="copy: the commit before its data", place="flush", syscall="link", fault="killed"),
    Bug(name="a failed sync of a folder is ignored", place="commits", syscall="fsync", fault="EIO"),
    Bug(name="a failed commit is reported as done", place="commits", syscall="link", fault="EIO"),
    Bug(name="receipt before shard file", place="writes rank 0", syscall="pwrite64", fault="killed"),
    Bug(name="a failed write leaks its descriptor", place="writes rank 1", syscall="pwrite64", fault="ENOSPC"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work for one process: each `stride`-th call of a place from `first` on, or a planted bug."""

    place: str
    first: int = 0
    stride: int = 1
    bug: str = ""


@dataclass(slots=True, kw_only=True)
class Result:
    task: Task
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)  # syscall, fault -> calls
    findings: list[str] = field(default_factory=list)
    caught_by: str = ""


class _Place:
    """A history or a thread of the persister, which may be played again and again."""

    def __init__(self, name: str, base: str, bug: str = "") -> None:
        self._rig = Rig(base, bug) if name in ROLES else None
        self._name = name
        self._bug = next((mutant for mutant in MUTANTS if mutant.name == bug), None)
        if self._rig is None:  # whatever is imported late is imported here, and not by a process whose calls count
            play(scenario_named(name), Job(WatchedFs(f"{base}/dry")), 0)

    def play(self, call: Call | None = None, fault: Fault | None = None) -> tuple[list[Call], int]:
        if self._rig is not None:
            return self._rig.play(self._name, call, fault)
        if self._bug is None or call is None:
            return play_traced(scenario_named(self._name), call, fault)
        with self._bug.plant():
            return play_traced(scenario_named(self._name), call, fault)

    def close(self) -> None:
        if self._rig is not None:
            self._rig.close()


def hunt(bug: Bug) -> str:
    """Plant a bug and fail calls until somebody complains; the invariant that is broken, empty if none is."""
    with folder() as base:
        place = _Place(bug.place, base, bug.name)
        try:
            for call in [call for call in place.play()[0] if call.syscall == bug.syscall]:
                fault = next(fault for fault in faults_of(call.syscall) if fault.name == bug.fault)
                try:
                    place.play(call, fault)
                except Violation as error:
                    return error.invariant
        except Violation as error:
            return error.invariant
        finally:
            place.close()
    return ""


def run_task(task: Task) -> Result:
    logging.getLogger("ckptrt").setLevel(logging.CRITICAL)
    result = Result(task=task)
    if task.bug:
        result.caught_by = hunt(next(bug for bug in BUGS if bug.name == task.bug))
        return result
    with folder() as base:
        place = _Place(task.place, base)
        try:
            for call in place.play()[0][task.first :: task.stride]:
                for fault in faults_of(call.syscall):
                    _strike(place, call, fault, result)
                    if len(result.findings) >= _FINDINGS_MAX:
                        return result
        except Violation as error:
            result.findings.append(f"{task.place}, with nothing made to fail: {error}")
        finally:
            place.close()
    return result


def _strike(place: _Place, call: Call, fault: Fault, result: Result) -> None:
    try:
        count = place.play(call, fault)[1]
    except Violation as error:
        count = 1
        result.findings.append(f"{result.task.place}, {fault.name} at {call.syscall} number {call.number}: {error}")
    result.struck[call.syscall, fault.name] += count


def tasks(stride: int, seed: int, num_parts: int) -> list[Task]:
    """All work, the long pieces first. num_parts: processes among which the calls of a place are dealt."""
    places = [Task(place=place, first=(seed + part * stride), stride=stride * num_parts)
              for place in (*ROLES[::-1], *HISTORIES) for part in range(num_parts)]  # fmt: skip
    return [*places, *(Task(place=bug.place, bug=bug.name) for bug in BUGS)]


def report(results: Sequence[Result], say: Callable[[str], object]) -> bool:
    """Say the table line by line; True if all is well."""
    struck = sum((result.struck for result in results), Counter[tuple[str, str]]())
    faults = sorted({fault for _, fault in struck})
    say(f"{'system call':16}" + "".join(f"{fault:>14}" for fault in faults))
    for syscall in sorted({syscall for syscall, _ in struck}):
        say(f"  {syscall:14}" + "".join(f"{struck[syscall, fault]:14,}" for fault in faults))
    say(f"\n{'place':32}{'calls failed':>14}{'violations':>12}")
    for place in dict.fromkeys(result.task.place for result in results if not result.task.bug):
        mine = [result for result in results if result.task.place == place and not result.task.bug]
        say(f"  {place:30}{sum(r.struck.total() for r in mine):14,}{sum(len(r.findings) for r in mine):12}")
    bugs = [result for result in results if result.task.bug]
    if bugs:
        say(f"\n{'planted bug':46}caught by")
    for result in bugs:
        say(f"  {result.task.bug:44}{f'{result.caught_by}  {result.task.place}' if result.caught_by else 'MISSED'}")
    findings = [finding for result in results for finding in result.findings]
    for finding in findings[:40]:
        say(f"VIOLATION {finding}")
    caught = sum(bool(result.caught_by) for result in bugs)
    say(f"\nsystem calls failed {struck.total():,}   bugs caught {caught}/{len(bugs)}   violations {len(findings)}")
    return not findings and caught == len(bugs)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stride", type=int, default=4, help="fail every n-th call only; 1 for all, which takes a quarter of an hour"
    )
    parser.add_argument("--seed", type=int, default=0, help="which of these")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", action="append", default=[], help="a history, a thread of the persister, or a bug")
    args = parser.parse_args()
    if reason := refusal():
        _say(f"skipped: {reason}")
        return 0
    started_s = time.monotonic()
    work = tasks(args.stride, args.seed, args.workers)
    work = [task for task in work if not args.only or task.place in args.only or task.bug in args.only]
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(run_task, work))
    is_well = report(results, _say)
    took_s = time.monotonic() - started_s
    _say(f"{took_s:.0f} s with {args.workers} processes, one call in {args.stride}, seed {args.seed}")
    return 0 if is_well else 1


def _persist(name: str, arguments: Sequence[str]) -> int:
    """Be a persister in which a bug is planted."""
    with next(mutant for mutant in MUTANTS if mutant.name == name).plant():
        sys.argv[1:] = arguments
        persister.main()
    return 0


if __name__ == "__main__":
    sys.exit(_persist(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--persister"] else main())
