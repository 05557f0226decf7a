"""The reader's rule on a hundred thousand made-up histories: restarts, forks, rollbacks, zombies, readers in between.

    python tests/histories.py --histories 100000 --seed 0

In each history incarnations start from any commit of the path (or from nothing), commit, and commit late, after any
number of newer ones have begun. After every event the path must be the newest incarnation's own history, equal to that
of a naive twin, with each step at most once. And a reader that lists commits, sleeps through any events, and lists
fences, must get what the newest incarnation holds of the commits that it saw: no late commit of an older one. One in
four is no history at all but any records, as a broken store might hold them: there the twin alone is the judge.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

from support_histories import History, naive, parent

from ckptrt.storage import lineage
from ckptrt.storage.layout import CommitId
from ckptrt.storage.records import Parent

__all__ = ["check"]

Rule = Callable[[dict[int, Parent | None], Sequence[CommitId]], list[CommitId]]


def check(histories: int, seed: int, bug: str = "") -> list[str]:
    """Play so many histories; what was wrong, at most one line for each. bug: one of `_BUGS`, planted."""
    rng = random.Random(f"histories {seed}")
    rule = _BUGS.get(bug, lambda fences, commits: lineage.valid_commits(fences, commits))
    return [wrong for number in range(histories) if (wrong := _play(rng, rule, bug == "fences first", number))]


def _play(rng: random.Random, rule: Rule, fences_first: bool, number: int) -> str:
    if number % 4 == 3:
        return _any_records(rng, rule, number)
    run = History()
    run.start(0)
    events = rng.randint(1, 25)
    looks = rng.randrange(events)  # when a reader takes its first listing
    wakes = rng.randint(looks, events)
    seen_commits: list[CommitId] = []
    seen_fences: dict[int, Parent | None] = {}
    for event in range(events):
        _happen(run, rng)
        commits = run.commits[:]
        rng.shuffle(commits)
        found = rule(run.fences, commits)
        if found != run.history[run.current][::-1]:
            return f"history {number}, event {event}: the path is {found}, not the newest incarnation's own history"
        if found != naive(run.fences, commits) or len({c.step for c in found}) != len(found):
            return f"history {number}, event {event}: the naive twin differs, or a step is there twice"
        if event == looks:
            seen_commits, seen_fences = commits, dict(run.fences)
        if event >= wakes:
            break
    if fences_first:
        seen_commits = run.commits[:]
    else:
        seen_fences = run.fences
    found = rule(seen_fences, seen_commits)
    own = run.history[max(seen_fences)] if not fences_first else run.history[run.current]
    if [commit for commit in found if commit not in own]:
        return f"history {number}: a reader took {found} for the path of {own}"
    return ""


def _any_records(rng: random.Random, rule: Rule, number: int) -> str:
    fences = {
        i: None if rng.random() < 0.2 else parent(rng.randrange(9), rng.randint(1, i))
        for i in rng.sample(range(1, 7), 4)
    }
    commits = [CommitId(rng.randrange(9), rng.randint(1, 6)) for _ in range(rng.randrange(20))]
    found, expected = rule(fences, sorted(set(commits))), naive(fences, sorted(set(commits)))
    return "" if found == expected else f"history {number}: {fences} and {commits} give {found}, not {expected}"


def _happen(run: History, rng: random.Random) -> None:
    what = rng.random()
    if what < 0.25:
        run.start(rng.randrange(7))
    elif what < 0.7:
        run.commit(run.current, rng.randint(1, 3))
    else:
        run.commit(rng.randint(1, run.current), rng.randint(1, 3))


# --- planted bugs: each breaks the rule in one place


def _segments(fences: dict[int, Parent | None], commits: Sequence[CommitId], slack: int, grow: bool) -> list[CommitId]:
    at, limit, found = max(fences, default=0), float("inf"), []
    steps: set[int] = set()
    while at in fences:
        mine = sorted((c for c in commits if c.incarnation == at and c.step <= limit), reverse=True)
        found += [c for c in mine if c.step not in steps]
        steps |= {c.step for c in mine}
        origin = fences[at]
        if origin is None or origin.incarnation >= at:
            break
        at, limit = origin.incarnation, origin.step + slack if grow else min(limit, origin.step + slack)
    return found


_BUGS: dict[str, Rule] = {
    "limits grow": lambda fences, commits: _segments(fences, commits, 0, grow=True),
    "off by one": lambda fences, commits: _segments(fences, commits, 1, grow=False),
    "newest step wins": lambda fences, commits: sorted(commits, reverse=True),
    "fences first": lambda fences, commits: lineage.valid_commits(fences, commits),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started_s = time.monotonic()
    wrong = check(args.histories, args.seed)
    caught = [bug for bug in _BUGS if check(2000, args.seed, bug)]
    for line in wrong[:10]:
        sys.stdout.write(line + "\n")
    took_s = time.monotonic() - started_s
    planted = f"planted bugs caught {len(caught)}/{len(_BUGS)}"
    sys.stdout.write(f"histories {args.histories:,}   violations {len(wrong)}   {planted}   ({took_s:.0f} s)\n")
    return 1 if wrong or len(caught) < len(_BUGS) else 0


if __name__ == "__main__":
    sys.exit(main())
