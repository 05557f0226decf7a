"""Whether the workers still get on, and which of them keeps the others. Pure: time is passed in.

A worker tells its steps, at most ten times a second. Silence is judged by what the job itself has shown: the longest
pause between two steps that any rank ever told, many times over, but never less than some minutes; or by a limit that
the user gave. Nothing is judged before a rank's first step (imports, compilation), after its last, or in a section that
has been gone through less than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Look", "Watch", "ended", "entered", "heard", "left", "limit_s", "odd_one", "silent", "wake_at_s"]

_FACTOR = 10.0
_FLOOR_S = 300.0
_STEP = ""  # the section between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """fixed_s: the user's limit, None for a learned one. told_s: when each rank was last heard of, while it is watched.

    longest_s: by section, of all ranks. sections: rank -> the one that it is in, if it isn't in a plain step.
    """

    fixed_s: float | None = None
    steps: Mapping[int, int] = field(default_factory=dict)
    told_s: Mapping[int, float] = field(default_factory=dict)
    sections: Mapping[int, str] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)


def heard(watch: Watch, rank: int, step: int, at_s: float) -> Watch:
    """A rank has done a step."""
    watch = _learn(watch, rank, at_s)
    return replace(
        watch,
        steps={**watch.steps, rank: step},
        told_s={**watch.told_s, rank: at_s},
        sections={**watch.sections, rank: _STEP},
    )


def entered(watch: Watch, rank: int, section: str, at_s: float) -> Watch:
    """A rank begins something that isn't a step, such as a validation."""
    if rank in watch.told_s:
        watch = _learn(watch, rank, at_s)
    return replace(watch, told_s={**watch.told_s, rank: at_s}, sections={**watch.sections, rank: section})


def left(watch: Watch, rank: int, at_s: float) -> Watch:
    """And is through with it."""
    watch = _learn(watch, rank, at_s)
    return replace(watch, told_s={**watch.told_s, rank: at_s}, sections={**watch.sections, rank: _STEP})


def ended(watch: Watch, rank: int) -> Watch:
    """A rank has done its last step."""
    return replace(watch, told_s={other: at_s for other, at_s in watch.told_s.items() if other != rank})


def _learn(watch: Watch, rank: int, at_s: float) -> Watch:
    if rank not in watch.told_s:
        return watch
    section = watch.sections.get(rank, _STEP)
    longest_s = max(watch.longest_s.get(section, 0.0), at_s - watch.told_s[rank])
    return replace(watch, longest_s={**watch.longest_s, section: longest_s})


def limit_s(watch: Watch, rank: int) -> float | None:
    """How long a rank may be silent now; None if nothing is known of what it does."""
    section = watch.sections.get(rank, _STEP)
    longest_s = watch.longest_s.get(section)
    if watch.fixed_s is not None:
        return watch.fixed_s if section == _STEP else max(watch.fixed_s, _FACTOR * longest_s) if longest_s else None
    return None if longest_s is None else max(_FLOOR_S, _FACTOR * longest_s)


def wake_at_s(watch: Watch) -> float | None:
    """When the first limit will be over, if nobody says anything."""
    ends = [at_s + limit for rank, at_s in watch.told_s.items() if (limit := limit_s(watch, rank)) is not None]
    return min(ends, default=None)


def silent(watch: Watch, now_s: float) -> dict[int, float]:
    """The ranks whose limit is over, with the seconds since they were heard of."""
    late = {rank: now_s - at_s for rank, at_s in watch.told_s.items()}
    return {rank: for_s for rank, for_s in late.items() if (limit := limit_s(watch, rank)) and for_s >= limit}


# --- which one it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What could be seen of a rank. stack: of its main thread, innermost frame first; empty if it gave none.

    state: of its process, as the kernel has it (R, S, D, T ...).
    """

    rank: int
    step: int
    silent_s: float
    stack: tuple[str, ...] = ()
    state: str = ""


_WAITS = ("torch/distributed/", "torch/autograd/graph.py", "torch/_dynamo/")
_STATES = {"T": "it is stopped", "t": "a debugger holds it", "D": "it is stuck in the kernel", "Z": "it is dead"}


def odd_one(looks: Iterable[Look]) -> tuple[Look, str]:
    """The rank that keeps the others, as far as can be told, and by what."""
    ranked = sorted(looks, key=lambda look: look.rank)
    for look in ranked:
        if look.state in _STATES:
            return look, _STATES[look.state]
    quiet = [look for look in ranked if not look.stack]
    if quiet and len(quiet) < len(ranked):
        return quiet[0], "it gave no stack"
    behind = min(ranked, key=lambda look: look.step)
    if any(look.step > behind.step + 1 for look in ranked):
        return behind, f"the others are at step {max(look.step for look in ranked)}"
    busy = [look for look in ranked if look.stack and not _is_waiting(look)]
    if busy and len(busy) < len(ranked):
        return busy[0], "the others wait in a collective"
    counts = Counter(look.stack for look in ranked)
    rare = min(ranked, key=lambda look: (counts[look.stack], -look.silent_s))
    if counts[rare.stack] < max(counts.values()):
        return rare, "the others are elsewhere"
    return max(ranked, key=lambda look: look.silent_s), "it was the first to fall silent"


def _is_waiting(look: Look) -> bool:
    return any(part in frame for frame in look.stack[:6] for part in _WAITS)
