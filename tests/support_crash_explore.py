"""From a scenario to verdicts: every crash state that the model allows, built for real and judged."""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support_crash_disk import Choice, build, choices, crash_points, digest, materialise
from support_crash_job import Job, Violation
from support_crash_judge import judge, ledger_of
from support_crash_log import Op, WatchedFs
from support_crash_scenarios import Scenario

__all__ = ["Explorer", "Finding", "bare_errors", "disk", "play"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken invariant, and how to see it again: scenario, form, and what happened last."""

    scenario: str
    form: int
    invariant: str
    text: str
    after: str

    def __str__(self) -> str:
        return f"{self.scenario} #{self.form}, after {self.after}: {self.text}"


@dataclass(slots=True)
class Explorer:
    """Enumerates and judges; counts what it did. States that equal an earlier one, promises included, are skipped."""

    limit: int  # states at each point of the log
    seed: int = 0
    max_findings: int = 20
    states: int = 0
    points: int = 0
    findings: list[Finding] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def explore(self, scenario: Scenario, form: int = 0) -> bool:
        """All crash states of one form. False if the form is beyond the last one that there is."""
        with disk() as base:
            fs = WatchedFs(f"{base}/live")
            try:
                with bare_errors("the job"):
                    play(scenario, Job(fs), form)
            except Violation as error:
                self._put(scenario, form, error, fs.log, {})
            started = next((i for i, op in enumerate(fs.log) if op.note == ("restart",)), 0) if scenario.kills else 0
            self._judge_all(scenario, form, fs.log, started, base)
            return ("survived",) not in (op.note for op in fs.log)

    def _judge_all(self, scenario: Scenario, form: int, log: list[Op], started: int, base: str) -> None:
        rng = random.Random(f"{self.seed} {scenario.name} {form}")
        for length, loose in crash_points(log):
            if length < started or len(self.findings) >= self.max_findings:
                continue
            self.points += 1
            try:
                ledger = ledger_of(log[:length])
            except Violation as error:
                self._put(scenario, form, error, log[:length], {})
                return
            for choice in choices(log, loose, rng, self.limit):
                tree = build(log[:length], choice)
                key = f"{digest(tree)} {ledger}"
                if key in self._seen:
                    continue
                self._seen.add(key)
                self.states += 1
                place = f"{base}/state"
                materialise(tree, place)
                try:
                    with bare_errors("judging the disk"):
                        judge(f"{place}/runs/a", ledger)
                except Violation as error:
                    self._put(scenario, form, error, log[:length], choice)
                finally:
                    shutil.rmtree(place)

    def _put(self, scenario: Scenario, form: int, error: Violation, log: list[Op], choice: Choice) -> None:
        fates = ", ".join(f"{tell(log[i])}: {fate}" for i, fate in choice.items()) or "all kept"
        last = tell(log[-1]) if log else "nothing"
        self.findings.append(
            Finding(
                scenario=scenario.name,
                form=form,
                invariant=error.invariant,
                text=str(error),
                after=f"{last} ({fates})",
            )
        )


def tell(op: Op) -> str:
    """An op in a few words."""
    if op.kind == "note":
        return " ".join(str(part) for part in op.note)
    size = f" {len(op.data)} B" if op.data else ""
    return f"{op.kind} {op.name or f'#{op.inode}'}{size}"


def play(scenario: Scenario, job: Job, form: int) -> None:
    """Run a scenario in its folder; no descriptor may be left open by it."""
    os.mkdir(job.fs.base)
    try:
        scenario.play(job, form)
    finally:
        left = job.fs.reap()
    if left:
        raise Violation("I8", f"{len(left)} descriptors were left open")


@contextmanager
def bare_errors(doing: str) -> Iterator[None]:
    """Nothing but a verdict may come out of a job or its judge: any other error is one too."""
    try:
        yield
    except Violation:
        raise
    except Exception as error:
        raise Violation("I7", f"{doing} ended in {error!r}") from error


@contextmanager
def disk() -> Iterator[str]:
    """An empty folder in memory, gone afterwards. Warnings of what is done to it are nobody's business."""
    base = tempfile.mkdtemp(prefix="ckptrt-crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    level = logging.getLogger("ckptrt").level
    logging.getLogger("ckptrt").setLevel(logging.CRITICAL)
    try:
        yield base
    finally:
        logging.getLogger("ckptrt").setLevel(level)
        shutil.rmtree(base)
