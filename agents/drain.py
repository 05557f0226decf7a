"""On which step all ranks end together, so that their last snapshots are of one step. Pure.

Nobody may wait for the others at a step's end: they may need this rank to get there. So a step ahead is proposed to
all, each takes it or tells that it is beyond, and whoever arrives there asks. The word is given once all have taken it.
What a rank has taken binds it: it asks when it gets there. If some have not answered then, the proposal is withdrawn,
those who asked go on, and a later step is proposed; how far ahead grows with each try, until it is out of the reach of
messages under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Agreement", "arrived", "given_up", "propose", "replied"]

_AHEAD_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """target: the proposed step. reached: the last known step of each rank. taken: ranks that took the target.

    waiting: ranks that are at the target and have asked. decided: the word is given and stands.
    """

    num_ranks: int
    target: int
    ahead: int
    reached: Mapping[int, int] = field(default_factory=dict)
    taken: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    decided: bool = False


def propose(num_ranks: int, reached: int) -> Agreement:
    """Begin: the step after the last one that any rank is known to have done."""
    return Agreement(num_ranks=num_ranks, target=reached + 1, ahead=1)


def replied(agreement: Agreement, rank: int, step: int, target: int, taken: bool) -> Agreement:
    """A rank that has done `step` steps took a proposal, or is beyond it."""
    agreement = replace(agreement, reached={**agreement.reached, rank: step})
    if agreement.decided or target != agreement.target:
        return agreement  # of a proposal that is withdrawn
    if not taken:
        return given_up(agreement)
    return _decide(replace(agreement, taken=agreement.taken | {rank}))


def arrived(agreement: Agreement, rank: int, step: int) -> Agreement:
    """A rank has done the step that it took, and asks. It is told to end if that is decided, and may be held if not."""
    agreement = replace(agreement, reached={**agreement.reached, rank: step})
    if agreement.decided or step != agreement.target:
        return agreement
    return _decide(replace(agreement, taken=agreement.taken | {rank}, waiting=agreement.waiting | {rank}))


def given_up(agreement: Agreement) -> Agreement:
    """The target is out of some rank's reach, or was waited for long enough: another one, further ahead."""
    if agreement.decided:
        return agreement
    ahead = min(2 * agreement.ahead, _AHEAD_MAX)
    target = max(agreement.target, *agreement.reached.values()) + ahead
    return replace(agreement, target=target, ahead=ahead, taken=frozenset(), waiting=frozenset())


def _decide(agreement: Agreement) -> Agreement:
    return replace(agreement, decided=len(agreement.taken) == agreement.num_ranks)
