"""Crash tests of the storage, in full: `make crash`. Some minutes on two cores; see docs/design/crash-testing.md.

Every state that a power cut may leave is built and judged, every system call is made to fail, every part of a run is
damaged, and bugs are planted that all of this has to find. Exit status 0 only if nothing is wrong and none was missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from support_crash_explore import Explorer, Finding
from support_crash_faults import FAULTS, FaultLoop, damage_loop
from support_crash_mutants import MUTANTS, hunt
from support_crash_scenarios import SCENARIOS, scenario_named

__all__ = ["FAULT_SCENARIOS", "Result", "Task", "run_task", "tasks"]

FAULT_SCENARIOS = (
    "new run", "save", "re-save after a restart", "commit of a deposed one", "prune after commits", "prune by hand",
    "fall back and go on", "stale receipt", "borrow", "pin", "copy",
)  # fmt: skip
_FORMS_A_TASK = 20
_OFFSETS = 4  # tasks into which the calls of one scenario are dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work for one process. what: states, calls, damage or mutant."""

    what: str
    name: str
    first: int = 0
    limit: int = 0
    seed: int = 0
    thorough: bool = False


@dataclass(slots=True, kw_only=True)
class Result:
    task: Task
    count: int = 0
    took_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    caught_by: str = ""


def tasks(limit: int, flips: int, stride: int, seed: int, thorough: bool = False) -> list[Task]:
    """All work, the long pieces first."""
    found = [
        Task(what="calls", name=name, first=offset, limit=stride * _OFFSETS, thorough=thorough)
        for name in FAULT_SCENARIOS
        for offset in range(0, stride * _OFFSETS, stride)
    ]
    found += [
        Task(what="states", name=scenario.name, first=first, limit=limit, seed=seed)
        for scenario in sorted(SCENARIOS, key=lambda scenario: -scenario.forms)
        for first in range(0, scenario.forms, _FORMS_A_TASK)
    ]
    found += [Task(what="mutant", name=mutant.name) for mutant in MUTANTS]
    return [*found, Task(what="damage", name="damage", limit=flips, seed=seed)]


def run_task(task: Task) -> Result:
    started_s = time.monotonic()
    result = Result(task=task)
    if task.what == "states":
        explorer = Explorer(limit=task.limit, seed=task.seed)
        scenario = scenario_named(task.name)
        for form in range(task.first, min(task.first + _FORMS_A_TASK, scenario.forms)):
            if not explorer.explore(scenario, form) and scenario.kills:
                break
        result.count, result.findings = explorer.states, explorer.findings
    elif task.what == "calls":
        loop = FaultLoop()
        loop.run(scenario_named(task.name), FAULTS, stride=task.limit, offset=task.first, thorough=task.thorough)
        result.count, result.findings = loop.calls, loop.findings
    elif task.what == "damage":
        result.count, result.findings = damage_loop(task.limit, task.seed)
    else:
        found = hunt(next(mutant for mutant in MUTANTS if mutant.name == task.name))
        result.count = 1
        result.caught_by = f"{found.invariant}  {found.scenario}" if found else ""
    result.took_s = time.monotonic() - started_s
    return result


def report(results: Sequence[Result], say: Callable[[str], object]) -> bool:
    """Say the table line by line; True if all is well."""
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for result in results:
        row = sums[result.task.what, result.task.name]
        row[0] += result.count
        row[1] += len(result.findings)
        row[2] += result.took_s
    for what, title in (("states", "crash states"), ("calls", "failed calls"), ("damage", "damaged files")):
        say(f"\n{title:34}{'judged':>10}{'violations':>12}{'seconds':>10}")
        for (kind, name), (count, violations, took_s) in sums.items():
            if kind == what:
                say(f"  {name:32}{count:10,.0f}{violations:12.0f}{took_s:10.0f}")
    mutants = [result for result in results if result.task.what == "mutant"]
    say(f"\n{'planted bug':46}caught by")
    for result in mutants:
        say(f"  {result.task.name:44}{result.caught_by or 'MISSED'}")
    findings = [finding for result in results for finding in result.findings]
    for finding in findings[:40]:
        say(f"VIOLATION {finding}")
    caught = sum(bool(result.caught_by) for result in mutants)
    total = {what: sum(r.count for r in results if r.task.what == what) for what in ("states", "calls", "damage")}
    say(
        f"\nstates enumerated {total['states']:,}   calls failed {total['calls']:,}   files damaged "
        f"{total['damage']:,}   mutants caught {caught}/{len(mutants)}   violations {len(findings)}"
    )
    return not findings and caught == len(mutants)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=60, help="crash states at each point of a history")
    parser.add_argument("--flips", type=int, default=300, help="bits changed in each file")
    parser.add_argument("--stride", type=int, default=1, help="fail every n-th call only")
    parser.add_argument("--thorough", action="store_true", help="every call with every fault, not every place once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", default="", help="states, calls, damage or mutant")
    args = parser.parse_args()
    started_s = time.monotonic()
    work = [
        t for t in tasks(args.limit, args.flips, args.stride, args.seed, args.thorough) if args.only in ("", t.what)
    ]
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(run_task, work))
    is_well = report(results, _say)
    part = "every call with every fault" if args.thorough else "calls repeated by one place: a part of the faults"
    _say(f"{time.monotonic() - started_s:.0f} s with {args.workers} processes, seed {args.seed}; {part}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
