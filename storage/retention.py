"""Which checkpoints stay: rules over steps, times and metrics. Pure.

A checkpoint stays if any rule wants it. The rules see the valid path only; what is pinned stays besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptrt.errors import UsageError
from ckptrt.storage.layout import CommitId

__all__ = ["Candidate", "Keep", "wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay.

    last: the newest so many good ones, at least 1. every: the first one in each stretch of so many steps, from the
    first multiple on. within_s: those younger than this. best: so many with the best `metric` (given to `rt.step`);
    `mode` says whether small or large numbers are good.
    """

    last: int = 1
    every: int | None = None
    within_s: float | None = None
    best: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"can't keep {self.last} checkpoints: at least the newest good one stays")
        if self.every is not None and self.every < 1:
            raise UsageError(f"can't keep one in {self.every} steps: it takes at least 1")
        if self.within_s is not None and not self.within_s >= 0:
            raise UsageError(f"can't keep checkpoints for {self.within_s} s")
        if self.best is not None and self.best < 1:
            raise UsageError(f"can't keep the {self.best} best: it takes at least 1")
        if self.mode not in ("min", "max"):
            raise UsageError(f"{self.mode!r} is neither min nor max")

    def __str__(self) -> str:
        rules = [f"the last {self.last} good checkpoint{'s' * (self.last > 1)}"]
        if self.every is not None:
            rules.append(f"one in {self.every} steps")
        if self.within_s is not None:
            rules.append(f"those of the last {self.within_s:g} s")
        if self.best is not None:
            rules.append(f"the {self.best} with the {self.mode} {self.metric}")
        return ", ".join(rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A commit on the path. age_s: by the store's clock. metrics: empty where its record can't be read."""

    id: CommitId
    age_s: float
    metrics: dict[str, float]


def wanted(keep: Keep, candidates: Sequence[Candidate]) -> dict[CommitId, str]:
    """The commits that the rules beyond `last` want, each with the rule. Candidates are newest first."""
    found: dict[CommitId, str] = {}
    if keep.every is not None:
        first_of = {c.id.step // keep.every: c.id for c in candidates if c.id.step >= keep.every}  # the oldest wins
        found.update((commit, f"every {keep.every} steps") for commit in first_of.values())
    if keep.within_s is not None:
        young = (c.id for c in candidates if c.age_s <= keep.within_s)
        found.update((commit, f"within {keep.within_s:g} s") for commit in young)
    if keep.best is not None:
        found.update((commit, f"best {keep.metric}") for commit in _best(keep, keep.best, candidates))
    return found


def _best(keep: Keep, count: int, candidates: Sequence[Candidate]) -> list[CommitId]:
    sign = 1.0 if keep.mode == "min" else -1.0
    numbers = [(c.metrics[keep.metric] * sign, c.id) for c in candidates if keep.metric in c.metrics]
    known = [(number, commit) for number, commit in numbers if not math.isnan(number)]
    # Of equal ones the newer is better: it has seen more.
    return [commit for _, commit in sorted(known, key=lambda pair: (pair[0], [-n for n in pair[1]]))[:count]]
