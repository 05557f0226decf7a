"""Made-up histories of a run, and the reader's rule once more, written from FORMAT.md in the plainest way."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptrt.storage.layout import CommitId
from ckptrt.storage.records import Parent

__all__ = ["History", "naive", "parent"]


def parent(step: int, incarnation: int) -> Parent:
    return Parent(step=step, incarnation=incarnation)


@dataclass
class History:
    """A run as it happens: incarnations start from a commit of the path, commit, and may commit late as zombies."""

    fences: dict[int, Parent | None] = field(default_factory=dict)
    commits: list[CommitId] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    # The twin: what each incarnation's own history is, as it knew it when it started and as it went on.
    history: dict[int, list[CommitId]] = field(default_factory=dict)
    current: int = 0

    def start(self, choice: int) -> None:
        older = self.history.get(self.current, [])
        self.current += 1
        base = older[choice % len(older)] if older and choice else None
        kept = older[: older.index(base) + 1] if base else []
        self.fences[self.current] = parent(*base) if base else None
        self.starts[self.current] = base.step if base else 0
        self.history[self.current] = list(kept)

    def commit(self, incarnation: int, ahead: int) -> None:
        """The incarnation commits its next step; that of a deposed one is nobody's history but its own."""
        mine = [c.step for c in self.commits if c.incarnation == incarnation]
        commit = CommitId(max([self.starts[incarnation], *mine]) + ahead, incarnation)
        self.commits.append(commit)
        self.history[incarnation].append(commit)


def naive(fences: dict[int, Parent | None], commits: list[CommitId]) -> list[CommitId]:
    """The rule once more, as slow as it is plain: commit by commit, is there a way to it from the newest fence?"""
    if not fences:
        return []
    found: list[CommitId] = []
    for commit in commits:
        at, limits, segments = max(fences), [], 0
        while at != commit.incarnation:
            origin = fences.get(at)
            if origin is None or origin.incarnation >= at:
                at = 0
                break
            limits.append(origin.step)
            at, segments = origin.incarnation, segments + 1
        if at and all(commit.step <= limit for limit in limits):
            found.append(commit)
    newest_of: dict[int, CommitId] = {}
    for commit in found:
        if commit.step not in newest_of or newest_of[commit.step].incarnation < commit.incarnation:
            newest_of[commit.step] = commit
    return sorted(newest_of.values(), key=lambda c: (c.incarnation, c.step), reverse=True)
