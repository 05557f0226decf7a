"""Where the next incarnation goes on from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Resume", "Snapshot", "choose_resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A step that is whole in memory for all ranks of its world."""

    step: int
    incarnation: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where the next incarnation goes on from; tier is "memory" or "stored"."""

    step: int
    incarnation: int
    tier: str

    def __str__(self) -> str:
        return f"{self.step}.{self.incarnation}.{self.tier}"


def choose_resume(
    *,
    memory: Sequence[Snapshot],
    committed: tuple[int, int] | None,
    fences: Mapping[int, tuple[int, int] | None],
    world_size: int,
) -> Resume | None:
    """The newest step to be had: from memory if it is there, else the newest good commit (step, incarnation).

    fences: incarnation -> (step, incarnation) of its parent, None for a fresh start. A snapshot counts only on the
    path from the newest fence, as a commit does: what a cut-off incarnation left in memory is not this job's history.
    """
    reach = _reach(fences)
    usable = [s for s in memory if s.world_size == world_size and s.step <= reach.get(s.incarnation, -1)]
    best = max(usable, key=lambda s: (s.step, s.incarnation), default=None)
    if best is not None and (committed is None or best.step >= committed[0]):
        return Resume(step=best.step, incarnation=best.incarnation, tier="memory")
    if committed is not None:
        return Resume(step=committed[0], incarnation=committed[1], tier="stored")
    return None


def _reach(fences: Mapping[int, tuple[int, int] | None]) -> dict[int, float]:
    """The last step that counts of each incarnation on the path from the newest fence."""
    reach: dict[int, float] = {}
    incarnation = max(fences, default=None)
    last: float = float("inf")
    while incarnation is not None and incarnation not in reach:
        reach[incarnation] = last
        parent = fences.get(incarnation)
        if parent is None:
            break
        last, incarnation = min(last, parent[0]), parent[1]
    return reach
