"""One snapshot in flight: what the caller of save() holds in the hand."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["SaveHandle", "SaveStats"]


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
    last_error: str = ""
