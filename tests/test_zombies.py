"""A process that sleeps through a take-over, at a sample of its calls; `make zombies` stops it before each."""

from __future__ import annotations

import pytest
from support_zombies import BUGS, DEEDS, haunt

STRIDES = {"a first start": 11, "a save": 37, "a prune": 31, "a pin": 7, "a copy": 29}
# Shortly before the calls at which each is found.
FIRST = {
    "the fence isn't checked": 66,
    "the fence isn't checked once more after the commit": 66,
    "published by rename": 20,
    "prune doesn't look at the fences again": 70,
}


def test_every_deed_and_bug_is_sampled() -> None:
    assert STRIDES.keys() == DEEDS.keys()
    assert FIRST.keys() == BUGS.keys()


@pytest.mark.parametrize("deed", DEEDS)
def test_a_zombie_harms_nobody_and_says_nothing_that_isnt_so(deed: str) -> None:
    haunting = haunt(deed, stride=STRIDES[deed])
    assert haunting.pauses > 12
    assert haunting.violations == []


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    assert haunt(BUGS[bug][1], first=FIRST[bug], bug=bug, enough=1).violations
