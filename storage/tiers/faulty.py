"""A tier that fails where it is told to: for tests and for chaos runs."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import Error, TransientError
from ckptrt.storage.tiers.base import Entry, Tier
from ckptrt.storage.tiers.names import join_url

__all__ = ["Fault", "FaultyTier"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls some calls. Calls are counted per fault, among those that match `method` and `name`.

    method, name: shell patterns; read_many matches by any of its names.
    first: the first matching call that it befalls, from 1.
    times: how many calls from there on; None for all.
    delay_s: waited before the call.
    error: class of the error to raise; None to delay only.
    after: let the call happen and then raise, as when an answer is lost.
    """

    method: str = "*"
    name: str = "*"
    first: int = 1
    times: int | None = 1
    delay_s: float = 0.0
    error: type[Error] | None = TransientError
    after: bool = False


class FaultyTier:
    """Any tier with faults. `calls` holds every (method, name) so far, in order."""

    def __init__(self, tier: Tier, plan: Iterable[Fault] = (), *, clock: Clock | None = None) -> None:
        self.url = tier.url
        self.tier = tier
        self.calls: list[tuple[str, str]] = []
        self._plan = list(plan)
        self._seen = [0] * len(self._plan)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Add a fault; its calls are counted from now."""
        with self._lock:
            self._plan.append(fault)
            self._seen.append(0)

    def clear(self) -> None:
        """Heal: forget every fault."""
        with self._lock:
            self._plan.clear()
            self._seen.clear()

    def create(self, name: str, data: bytes) -> None:
        self._call("create", [name], lambda: self.tier.create(name, data))

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        self._call("write", [name], lambda: self.tier.write(name, pieces, size_bytes))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        return self._call("read", [name], lambda: self.tier.read(name, start, size_bytes))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._call("read_into", [name], lambda: self.tier.read_into(name, start, out))

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        return self._call("read_many", wanted, lambda: self.tier.read_many(wanted))

    def size(self, name: str) -> int:
        return self._call("size", [name], lambda: self.tier.size(name))

    def delete(self, name: str) -> None:
        self._call("delete", [name], lambda: self.tier.delete(name))

    def delete_prefix(self, prefix: str) -> None:
        self._call("delete_prefix", [prefix], lambda: self.tier.delete_prefix(prefix))

    def settle(self, prefix: str) -> None:
        self._call("settle", [prefix], lambda: self.tier.settle(prefix))

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        return self._call("sweep", [prefix], lambda: self.tier.sweep(prefix, before_s, dry_run=dry_run))

    def probe(self) -> None:
        self._call("probe", [], self.tier.probe)

    def close(self) -> None:
        self.tier.close()

    def _call(self, method: str, names: list[str], call: Callable[[], _T]) -> _T:
        faults = self._due(method, names)
        for fault in faults:
            if fault.delay_s:
                self._clock.sleep_s(fault.delay_s)
        for fault in faults:
            if fault.error is not None and not fault.after:
                raise self._error(fault.error, method, names)
        result = call()
        for fault in faults:
            if fault.error is not None and fault.after:
                raise self._error(fault.error, method, names)
        return result

    def _due(self, method: str, names: list[str]) -> list[Fault]:
        """Count the call, and give the faults that befall it."""
        due: list[Fault] = []
        with self._lock:
            self.calls += [(method, name) for name in names]
            for at, fault in enumerate(self._plan):
                if not fnmatch.fnmatchcase(method, fault.method):
                    continue
                if not any(fnmatch.fnmatchcase(name, fault.name) for name in names):
                    continue
                self._seen[at] += 1
                late = self._seen[at] - fault.first
                if late >= 0 and (fault.times is None or late < fault.times):
                    due.append(fault)
        return due

    def _error(self, kind: type[Error], method: str, names: list[str]) -> Error:
        where = join_url(self.url, names[0]) if names else self.url
        return kind(f"{method} of {where} failed: a fault that was asked for", hint="none: this is a test")

    def list(self, prefix: str) -> list[Entry]:  # last, since its name hides the type's from here on
        return self._call("list", [prefix], lambda: self.tier.list(prefix))
