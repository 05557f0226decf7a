"""The kill matrix: SIGKILL to one rank in each phase of a save, many seeds, 2 and 4 ranks: `make kill-matrix`.

    staging         in the middle of the copy into memory                      in the worker
    sealed          the snapshot is whole, and nobody knows of it yet          in the worker
    persisting      the persister is about to write that rank's shard file     in the persister
    before commit   all shard files are there, the commit isn't                in the persister
    after commit    the checkpoint exists, no rank has heard of it             in the persister

Kills of one job share one launch: each incarnation has its own, at a random step and rank, and the persister may be
held up before, so that two saves are under way, and after, so that the next incarnation meets the last one's writes.
Rows that say `cold` are of jobs that may not restart: a kill ends the launcher too, what was in memory is lost, and a
new launch has to go on from the store, where the torn step has left files behind.
Every loss, every checkpoint and every choice of a step is compared with a job that nobody hurt. Exit status 0 only if
nothing at all is wrong.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_jobs import Job, Reference, Resume, judge, resumes

__all__ = ["PHASES", "Kill", "Outcome", "outcomes", "plan_kills", "play", "told"]

PHASES = ("staging", "sealed", "persisting", "before commit", "after commit")
EVERY = 4
_POINTS = {"persisting": "persisting", "before commit": "committing", "after commit": "committed"}
_HOLDS_S = (0.0, 0.02, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Incarnation `incarnation` loses `rank` in this phase of the save of `step`.

    slow_s: how long the persister is held at the save before; hold_s: how long at this one, after the kill.
    """

    phase: str
    incarnation: int
    step: int
    rank: int
    slow_s: float
    hold_s: float

    def specs(self) -> Iterator[str]:
        at = f"rank={self.rank},incarnation={self.incarnation},step="
        if self.slow_s:
            yield f"persisting@{at}{self.step - EVERY}:sleep={self.slow_s}"
        if self.phase not in _POINTS:
            yield f"{self.phase}@{at}{self.step}:kill"
            return
        yield f"{_POINTS[self.phase]}@{at}{self.step}:kill-pid"
        if self.hold_s:
            yield f"{_POINTS[self.phase]}@{at}{self.step}:sleep={self.hold_s}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one kill. took_s: from the victim's last sign of life to the first new step of all ranks."""

    kill: Kill
    at_first_attempt: bool
    tier: str
    took_s: float
    problems: tuple[str, ...]


def plan_kills(seeds: Sequence[int], phases: Sequence[str], ranks: int) -> list[Kill]:
    """One kill for each seed and phase, in a random order; the first may hit the very first save."""
    rng = random.Random(f"{seeds}-{ranks}")
    wanted = [phase for _ in seeds for phase in phases]
    rng.shuffle(wanted)
    kills: list[Kill] = []
    step = 0
    for incarnation, phase in enumerate(wanted, 1):
        # A worker that is killed from the persister may be one save ahead, and that save isn't made again.
        ahead = bool(kills) and kills[-1].phase in _POINTS
        step += EVERY * rng.randint(2 if ahead else 1, 4)
        kills.append(
            Kill(
                phase=phase,
                incarnation=incarnation,
                step=step,
                rank=rng.randrange(ranks),
                slow_s=rng.choice(_HOLDS_S[:2]),
                hold_s=rng.choice(_HOLDS_S),
            )
        )
    return kills


def play(
    folder: Path, kills: Sequence[Kill], ranks: int, parallel: str, *, cold: bool = False
) -> tuple[list[Outcome], list[str]]:
    """Run the job with these kills and once more without any. What became of each kill, and what else was wrong."""
    steps = kills[-1].step + 2 * EVERY
    faults = ";".join(spec for kill in kills for spec in kill.specs())
    facts: dict[str, Any] = {"ranks": ranks, "parallel": parallel, "steps": steps, "every": EVERY}
    with (
        Job(folder=folder / "unhurt", **facts) as unhurt,
        Job(folder=folder / "hurt", faults=faults, max_restarts=0 if cold else len(kills), **facts) as hurt,
    ):
        status = unhurt.run()
        reference = Reference(unhurt)
        problems = [f"the reference: {text}" for text in judge(unhurt, reference)]
        if status:
            return [], [*problems, unhurt.output[-2000:]]
        for _ in range(len(kills) + 1 if cold else 1):
            hurt.run(timeout_s=60.0 + 5.0 * len(kills))
        problems += judge(hurt, reference, memory_lost=range(1, len(kills) + 2) if cold else ())
        failures = len(hurt.events("failure"))
        if failures != len(kills):
            problems.append(f"{failures} failures for {len(kills)} kills")
        return outcomes(hurt, kills), problems


def outcomes(job: Job, kills: Sequence[Kill]) -> list[Outcome]:
    starts = {resume.incarnation: resume for resume in resumes(job)[0]}
    failures = {event["incarnation"]: event for event in job.events("failure")}
    found = []
    for kill in kills:
        resume = starts.get(kill.incarnation + 1)
        failure = failures.get(kill.incarnation)
        problems = list(_violations(kill, resume))
        if failure is None or (failure["rank"], failure["code"]) != (kill.rank, -9):
            told = failure and {name: failure[name] for name in ("rank", "code", "error")}
            problems.append(f"incarnation {kill.incarnation} was to lose rank {kill.rank}, but: {told}")
        took_s = _took_s(job, kill)
        found.append(
            Outcome(
                kill=kill,
                at_first_attempt=took_s is not None,
                tier=resume.tier if resume else "none",
                took_s=took_s or 0.0,
                problems=tuple(problems),
            )
        )
    return found


def _violations(kill: Kill, resume: Resume | None) -> Iterator[str]:
    """What the phase alone says about the step to go on from; all else is the judge's business."""
    if resume is None:
        yield f"nothing came after incarnation {kill.incarnation}"
    elif kill.phase == "staging" and resume.step >= kill.step:
        yield f"incarnation {resume.incarnation} went on from step {resume.step}, but step {kill.step} was torn"
    elif kill.phase in ("before commit", "after commit") and resume.step < kill.step:
        yield (
            f"incarnation {resume.incarnation} went on from step {resume.step}, "
            f"but step {kill.step} was written by all ranks"
        )


def _took_s(job: Job, kill: Kill) -> float | None:
    """From the last note of the killed rank to the last rank's first step; None if the next set had none."""
    alive_s = [note["at_s"] for note in job.notes(kill.rank) if note["incarnation"] == kill.incarnation]
    firsts = [
        next((n["at_s"] for n in job.notes(rank, "step") if n["incarnation"] == kill.incarnation + 1), None)
        for rank in range(job.ranks)
    ]
    if not alive_s or None in firsts:
        return None
    return max(at_s for at_s in firsts if at_s is not None) - alive_s[-1]


def table(results: Mapping[str, Sequence[Outcome]]) -> str:
    """results: by a label of the row, such as the number of ranks."""
    rows = [f"{'phase':<14} {'ranks':>6} {'kills':>5} {'first attempt':>13} {'memory':>6} {'store':>5} "]
    rows[0] += f"{'fresh':>5} {'median s':>8} {'max s':>6} {'violations':>10}"
    for phase in PHASES:
        for label, found in results.items():
            mine = [outcome for outcome in found if outcome.kill.phase == phase]
            if not mine:
                continue
            tiers = [sum(outcome.tier == tier for outcome in mine) for tier in ("memory", "stored", "fresh")]
            took = [outcome.took_s for outcome in mine]
            rows.append(
                f"{phase:<14} {label:>6} {len(mine):>5} {sum(o.at_first_attempt for o in mine):>13} {tiers[0]:>6} "
                f"{tiers[1]:>5} {tiers[2]:>5} {statistics.median(took):>8.3f} {max(took):>6.3f} "
                f"{sum(len(o.problems) for o in mine):>10}"
            )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="kills for each phase and number of ranks")
    parser.add_argument("--cold-seeds", type=int, default=2, help="the same for kills that end the launcher too")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, help="keep everything here, for a look at it; else it is removed")
    args = parser.parse_args()
    began_s = time.monotonic()
    results: dict[str, list[Outcome]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ckptrt-kills-") as temporary:
        for cold, seeds in ((False, args.seeds), (True, args.cold_seeds)):
            chosen = range(args.first_seed, args.first_seed + seeds)
            for ranks in args.ranks:
                label = f"{ranks} cold" if cold else str(ranks)
                for parallel, share in (("ddp", chosen[::2]), ("fsdp", chosen[1::2])):
                    folder = (args.out or Path(temporary)) / f"{parallel}-{label.replace(' ', '-')}"
                    if share:
                        kills = plan_kills(share, PHASES, ranks)
                        found, wrong = play(folder, kills, ranks, parallel, cold=cold)
                        results[label] = results.get(label, []) + found
                        problems += [f"{parallel}, {label} ranks: {text}" for text in (*wrong, *told(found))]
    sys.stdout.write(f"{table(results)}\n{time.monotonic() - began_s:.0f} s in all\n")
    sys.stdout.writelines(f"violation  {text}\n" for text in problems)
    return 1 if problems else 0


def told(found: Sequence[Outcome]) -> Iterator[str]:
    for outcome in found:
        yield from outcome.problems
        if not outcome.at_first_attempt:
            yield f"nothing came up at once after {outcome.kill}"


if __name__ == "__main__":
    sys.exit(main())
