"""One snapshot in flight: what the caller of save() holds in the hand, what becomes of it, and the rules for saving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, SupportsFloat

from ckptrt import say
from ckptrt.storage.retention import Keep

__all__ = ["OnError", "SaveHandle", "SavePolicy", "SaveStats", "UnderWay", "WhenBusy", "finite_numbers"]

OnError = Literal["warn", "raise"]
WhenBusy = Literal["skip", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHandle:
    """A save of one step.

    staged: done when the state is in host memory (its value: seconds that training stood still).
    committed: done when the checkpoint exists, on every rank (its value: seconds from save() on). Both carry the
    error if there was one: PersistError or another `ckptrt.Error`.
    """

    step: int
    staged: Future[float] = field(default_factory=Future)
    committed: Future[float] = field(default_factory=Future)


@dataclass(slots=True)
class SaveStats:
    """What became of this rank's saves since init()."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    stall_s: float = 0.0
    borrowed_bytes: int = 0  # not written again, since an older checkpoint has them
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When to save, what to keep, and what to do when a save fails or finds no slot: see `init`."""

    every: int | None
    keep: Keep | None
    on_error: OnError
    when_busy: WhenBusy
    dedup: bool = True


class UnderWay(NamedTuple):
    """A save that was handed over: its slot, when it began, and how often the step had failed before."""

    handle: SaveHandle
    slot: int
    started_s: float
    retry: int


def finite_numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Metrics as they are stored. What isn't a number is left out, with a warning: it must not cost the checkpoint.

    A metric may be a tensor on a device, whose value is waited for here. NaN and infinities, which no rule could rank,
    are left out.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            say.line("warn", f"the metric {name!r} isn't stored: it is no number ({error})")
            continue
        if math.isfinite(number):
            found[name] = number
    return found
