"""Time, as a thing that is passed in: decisions read the monotonic clock, people read the wall clock."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol

__all__ = ["Clock", "FakeClock", "SystemClock"]


class Clock(Protocol):
    """Seconds that only grow (`monotonic_s`), a way to wait, and a wall-clock time for display only."""

    def monotonic_s(self) -> float: ...

    def sleep_s(self, duration_s: float) -> None: ...

    def wall_iso(self) -> str:
        """UTC time such as 2026-11-30T19:41:07Z. Never compared, never decides."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep_s(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def wall_iso(self) -> str:
        return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeClock:
    """A clock that moves only when it is told to, or when somebody sleeps on it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        self._now_s += duration_s

    def advance(self, duration_s: float) -> None:
        self._now_s += duration_s

    def wall_iso(self) -> str:
        seconds = int(self._now_s)
        return f"2000-01-01T{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}Z"
