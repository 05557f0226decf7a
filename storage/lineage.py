"""The reader's rule: which commits belong to the history of the newest incarnation. Pure.

A fence says where its incarnation goes on from: a step, and the incarnation that had reached it. From the newest
fence back, along those parents, every incarnation gives one segment of history:

    newest fence f            all commits of f
    f.parent = (step, e)      commits of e up to that step, then on from the fence of e
    no parent, no fence       the path ends

What isn't on this path is a cut-off branch. A writer of an older incarnation that was paused and commits late lands
beyond its segment's last step, so it needs no help from the store to be harmless. Limits only shrink along the way:
a step that a newer incarnation didn't go on from is never on the path again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ckptrt.storage.layout import CommitId
from ckptrt.storage.records import Parent

__all__ = ["Lineage", "Segment", "trace", "valid_commits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One incarnation's part of the path: its commits up to `last_step` (None: all of them)."""

    incarnation: int
    last_step: int | None

    def covers(self, step: int) -> bool:
        return self.last_step is None or step <= self.last_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The path from the newest fence, newest first, and why everything else is off it."""

    segments: tuple[Segment, ...]
    commits: tuple[CommitId, ...]
    off_path: Mapping[CommitId, str]
    problems: tuple[str, ...]


def valid_commits(fences: Mapping[int, Parent | None], commits: Iterable[CommitId]) -> list[CommitId]:
    """The commits on the path, newest first: at most one for each step."""
    return list(trace(fences, commits).commits)


def trace(
    fences: Mapping[int, Parent | None], commits: Iterable[CommitId], unreadable: Collection[int] = ()
) -> Lineage:
    """The path and what is off it.

    fences: incarnation -> its parent, None for a fresh start.
    unreadable: incarnations whose fence is there but damaged, so that their parent isn't known. Such a fence still
    cuts off what is older; the path goes on from the next older fence, bounded by the unreadable one's first commit.
    """
    by_incarnation: dict[int, list[int]] = {}
    for step, incarnation in sorted(commits, reverse=True):
        by_incarnation.setdefault(incarnation, []).append(step)
    segments, problems = _walk(fences, by_incarnation, set(unreadable) - set(fences))
    owner_of: dict[int, int] = {}  # step -> the newest segment that has it
    valid: list[CommitId] = []
    for segment in segments:
        for step in by_incarnation.get(segment.incarnation, ()):
            if segment.covers(step) and step not in owner_of:
                owner_of[step] = segment.incarnation
                valid.append(CommitId(step, segment.incarnation))
    on_path = {segment.incarnation: segment for segment in segments}
    off_path = {
        CommitId(step, incarnation): _reason(step, on_path.get(incarnation), owner_of.get(step))
        for incarnation, steps in by_incarnation.items()
        for step in steps
        if owner_of.get(step) != incarnation
    }
    return Lineage(segments=tuple(segments), commits=tuple(valid), off_path=off_path, problems=tuple(problems))


def _walk(
    fences: Mapping[int, Parent | None], by_incarnation: Mapping[int, list[int]], unreadable: set[int]
) -> tuple[list[Segment], list[str]]:
    segments: list[Segment] = []
    problems: list[str] = []
    current: int | None = max((*fences, *unreadable), default=None)
    last_step: int | None = None
    while current is not None:
        segment = Segment(incarnation=current, last_step=last_step)
        segments.append(segment)
        if current in unreadable:
            current, last_step = _guess(segment, fences, by_incarnation, unreadable, problems)
            continue
        if current not in fences:
            problems.append(f"incarnation {current} has no fence; history before it can't be told")
            break
        parent = fences[current]
        if parent is None:
            break
        if parent.incarnation >= current:
            problems.append(
                f"the fence of incarnation {current} names {parent.incarnation}, not an older one, as its parent"
            )
            break
        current = parent.incarnation
        last_step = parent.step if last_step is None else min(last_step, parent.step)
    return segments, problems


def _guess(
    segment: Segment,
    fences: Mapping[int, Parent | None],
    by_incarnation: Mapping[int, list[int]],
    unreadable: set[int],
    problems: list[str],
) -> tuple[int | None, int | None]:
    """Where to go on below a fence that can't be read: the next older fence, up to this one's first commit."""
    problems.append(
        f"the fence of incarnation {segment.incarnation} can't be read; the next older is taken for its parent"
    )
    older = max((i for i in (*fences, *unreadable) if i < segment.incarnation), default=None)
    steps = [step for step in by_incarnation.get(segment.incarnation, ()) if segment.covers(step)]
    limits = [*steps[-1:], *([] if segment.last_step is None else [segment.last_step])]
    return older, min(limits, default=None)


def _reason(step: int, segment: Segment | None, owner: int | None) -> str:
    if segment is None:
        return "its incarnation isn't on the path of the newest fence"
    if not segment.covers(step):
        return f"newer incarnations went on from step {segment.last_step}"
    return f"incarnation {owner} took step {step} again"
