"""The coordination store: a small key-value store with revisions, leases and watches, as etcd has them.

At a glance:

    store = EtcdCoordStore(["http://10.0.0.1:2379"]) or MemoryCoordStore(MemoryCoord())
    store.get(key) -> KeyValue | None
    store.get_prefix(prefix) -> (list[KeyValue], revision)
    store.put(key, value, lease_id=None) -> revision
    store.create(key, value, lease_id=None) -> revision | None              None: the key is taken
    store.compare_and_swap(key, value, mod_revision, lease_id=None) -> revision | None
    store.delete(key, mod_revision=None) -> bool
    store.grant(ttl_s) -> (lease_id, granted_ttl_s)
    store.keepalive(lease_id) -> remaining seconds, 0 when the lease is dead
    store.revoke(lease_id)
    with store.watch(prefix, revision + 1) as watch:
        watch.poll(timeout_s) -> list[WatchEvent]                           or: for event in watch
    store.close()

Whoever wants to follow a prefix lists it and watches from the next revision; on `CompactedError` it lists again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Protocol

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import CompactedError, CoordError, LeaseGoneError

__all__ = [
    "CoordStore",
    "KeyValue",
    "MemoryCoord",
    "MemoryCoordStore",
    "MemoryWatch",
    "Watch",
    "WatchBase",
    "WatchEvent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key as it was at one revision of the store."""

    key: str
    value: str
    mod_revision: int  # revision of the last write; what compare_and_swap and delete compare with
    create_revision: int  # revision at which the key came into being; the oldest one leads
    lease_id: int | None = None  # the lease whose end deletes the key


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One change of one key. A key that goes with its lease is an ordinary delete."""

    kind: Literal["put", "delete"]
    key: str
    value: str  # empty for a delete
    mod_revision: int  # events of one transaction or one lease's end share it


class Watch(Protocol):
    """The changes of a prefix from one revision on: in order, each once, none left out.

    A broken connection is the watch's own business: it goes on where it was, on another endpoint if there is one, and
    the reader notices nothing but a delay. Where the events between can't be had any more (the store was compacted, or
    came back without its data), it raises CompactedError, and its reader has to list and watch anew.
    One thread reads; `close` may be called from any.
    """

    @property
    def next_revision(self) -> int:
        """The revision that a successor of this watch would have to start from."""
        ...

    @property
    def closed(self) -> bool: ...

    def poll(self, timeout_s: float) -> list[WatchEvent]:
        """What happened, waiting up to timeout_s for it; empty when nothing did, or at once when the watch is closed.

        All events of one revision come in one list. It may take a request time-out longer while it reconnects.
        Raises CompactedError as said above, CoordError when the store refuses the watch (permissions).
        """
        ...

    def __iter__(self) -> Iterator[WatchEvent]:
        """Events one by one, until the watch is closed or was idle for the time given to `CoordStore.watch`."""
        ...

    def __enter__(self) -> Watch: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """End the watch; a poll that waits in another thread returns soon. Never raises."""
        ...


class CoordStore(Protocol):
    """What membership, incarnations and fences need from etcd; any number of threads may call it.

    Revisions count the writes of the whole store, from 1; a key's `mod_revision` is the one that wrote it last. Reads
    see every write that was answered before they began, whoever made it.

    Errors are CoordErrors. A write that raises UnknownOutcomeError may have been applied, may still be applied later,
    or never: read the key again before deciding anything. Every other CoordError of a write says that it was not
    applied. LeaseGoneError: the lease named is dead. Nothing is retried in silence where that could apply a
    write twice.
    """

    def get(self, key: str) -> KeyValue | None:
        """The key as it is now, or None."""
        ...

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys that start with prefix, sorted by key, and the revision of the store that this is a view of."""
        ...

    def put(self, key: str, value: str, lease_id: int | None = None) -> int:
        """Write the key whatever it was; its lease becomes lease_id (None: none). Returns the new revision."""
        ...

    def create(self, key: str, value: str, lease_id: int | None = None) -> int | None:
        """Write the key if it doesn't exist. Of any number of racing creates exactly one gets a revision."""
        ...

    def compare_and_swap(self, key: str, value: str, mod_revision: int, lease_id: int | None = None) -> int | None:
        """Write the key if its mod_revision is the given one (0: it doesn't exist), else return None."""
        ...

    def delete(self, key: str, mod_revision: int | None = None) -> bool:
        """Delete the key, if given only at that mod_revision. Returns whether this call deleted it."""
        ...

    def grant(self, ttl_s: float) -> tuple[int, int]:
        """A new lease: its id (never 0) and the seconds really granted, which may be more than asked for.

        Its keys are deleted when it isn't kept alive for that long; the store may take longer, never shorter.
        """
        ...

    def keepalive(self, lease_id: int) -> int:
        """Renew the lease to its full time to live, which is returned in seconds; 0 when the lease is dead."""
        ...

    def revoke(self, lease_id: int) -> None:
        """End the lease and delete its keys now. Ending a dead lease is no error."""
        ...

    def watch(self, prefix: str, start_revision: int, idle_timeout_s: float | None = None) -> Watch:
        """A watch on prefix for all changes at start_revision (>= 1) or later; it connects at its first poll.

        idle_timeout_s ends its iterator when nothing has happened for so long.
        """
        ...

    def close(self) -> None:
        """Give up connections and watches. Leases live on until they run out or are revoked."""
        ...


class WatchBase:
    """The part of a watch that doesn't depend on the store: closing, iterating, `with`."""

    def __init__(self, start_revision: int, idle_timeout_s: float | None) -> None:
        if start_revision < 1:
            # 0 means "from now" to etcd, and what happened since the caller last looked would be lost.
            raise ValueError(f"a watch starts from a revision of 1 or more, not {start_revision}")
        self._next_revision = start_revision
        self._idle_timeout_s = idle_timeout_s
        self._closing = threading.Event()

    @property
    def next_revision(self) -> int:
        return self._next_revision

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def poll(self, timeout_s: float) -> list[WatchEvent]:
        raise NotImplementedError

    def close(self) -> None:
        self._closing.set()

    def __iter__(self) -> Iterator[WatchEvent]:
        while not self.closed:
            events = self.poll(60.0 if self._idle_timeout_s is None else self._idle_timeout_s)
            if not events and self._idle_timeout_s is not None:
                return
            yield from events

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True, kw_only=True)
class _MemoryLease:
    ttl_s: int
    ends_at_s: float
    keys: set[str] = field(default_factory=set)


class MemoryCoord:
    """What the clients of one in-memory store share: the keys, their history, the leases.

    For tests and for a job of one process tree without etcd. Leases run on the clock passed in; they end when anybody
    uses the store, or calls `expire`, after their time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.changed = threading.Condition()
        self.reachable = True  # set to False, every call of every client fails as if etcd were down
        self.revision = 1  # an empty etcd is at revision 1 too
        self.compacted = 0
        self._clock = clock or SystemClock()
        self._items: dict[str, KeyValue] = {}
        self._history: list[WatchEvent] = []
        self._leases: dict[int, _MemoryLease] = {}
        self._last_lease_id = 0

    def compact(self, revision: int) -> None:
        """Forget the changes before revision, as etcd does; a watch from there gets CompactedError."""
        with self.changed:
            self.compacted = max(self.compacted, min(revision, self.revision))
            self._history = [event for event in self._history if event.mod_revision >= self.compacted]
            self.changed.notify_all()

    def wipe(self) -> None:
        """Lose everything, as an etcd that comes back on an empty disk."""
        with self.changed:
            self.revision, self.compacted = 1, 0
            self._items.clear()
            self._history.clear()
            self._leases.clear()
            self.changed.notify_all()

    def expire(self) -> float | None:
        """Delete the keys of leases that have run out; the seconds to the next end, or None without a lease."""
        with self.changed:
            now_s = self._clock.monotonic_s()
            for lease_id in [i for i, lease in self._leases.items() if lease.ends_at_s <= now_s]:
                self.end_lease(lease_id)
            return min((lease.ends_at_s - now_s for lease in self._leases.values()), default=None)

    # What follows is for MemoryCoordStore and MemoryWatch, which hold `changed` and have called `expire`.

    def find(self, key: str) -> KeyValue | None:
        return self._items.get(key)

    def select(self, prefix: str) -> list[KeyValue]:
        return [self._items[key] for key in sorted(self._items) if key.startswith(prefix)]

    def events_since(self, prefix: str, revision: int) -> list[WatchEvent]:
        return [e for e in self._history if e.mod_revision >= revision and e.key.startswith(prefix)]

    def write(self, key: str, value: str, lease_id: int | None) -> int:
        if lease_id is not None and lease_id not in self._leases:
            raise LeaseGoneError(f"lease {lease_id:x} is dead, so {key} was not written")
        old = self._items.get(key)
        self._detach(old)
        self.revision += 1
        created = old.create_revision if old else self.revision
        item = KeyValue(key=key, value=value, mod_revision=self.revision, create_revision=created, lease_id=lease_id)
        self._items[key] = item
        if lease_id is not None:
            self._leases[lease_id].keys.add(key)
        self._record("put", item)
        return self.revision

    def remove(self, keys: list[str]) -> None:
        """Delete the keys in one revision, as a transaction does."""
        self.revision += 1
        for key in keys:
            item = self._items.pop(key)
            self._detach(item)
            self._record("delete", replace(item, value="", mod_revision=self.revision))

    def start_lease(self, ttl_s: int) -> int:
        self._last_lease_id += 1
        self._leases[self._last_lease_id] = _MemoryLease(ttl_s=ttl_s, ends_at_s=self._clock.monotonic_s() + ttl_s)
        return self._last_lease_id

    def renew_lease(self, lease_id: int) -> int:
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0
        lease.ends_at_s = self._clock.monotonic_s() + lease.ttl_s
        return lease.ttl_s

    def end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.keys:
            self.remove(sorted(lease.keys))

    def _detach(self, item: KeyValue | None) -> None:
        lease = self._leases.get(item.lease_id) if item is not None and item.lease_id is not None else None
        if item is not None and lease is not None:
            lease.keys.discard(item.key)

    def _record(self, kind: Literal["put", "delete"], item: KeyValue) -> None:
        self._history.append(WatchEvent(kind=kind, key=item.key, value=item.value, mod_revision=item.mod_revision))
        self.changed.notify_all()


class MemoryCoordStore:
    """One client of a MemoryCoord: a CoordStore without a server."""

    def __init__(self, coord: MemoryCoord) -> None:
        self._coord = coord
        self._watches: list[MemoryWatch] = []
        self._closed = False

    def get(self, key: str) -> KeyValue | None:
        with self._coord.changed:
            self._ready()
            return self._coord.find(key)

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        with self._coord.changed:
            self._ready()
            return self._coord.select(prefix), self._coord.revision

    def put(self, key: str, value: str, lease_id: int | None = None) -> int:
        with self._coord.changed:
            self._ready()
            return self._coord.write(key, value, lease_id)

    def create(self, key: str, value: str, lease_id: int | None = None) -> int | None:
        return self.compare_and_swap(key, value, 0, lease_id)

    def compare_and_swap(self, key: str, value: str, mod_revision: int, lease_id: int | None = None) -> int | None:
        with self._coord.changed:
            self._ready()
            item = self._coord.find(key)
            if (item.mod_revision if item else 0) != mod_revision:
                return None
            return self._coord.write(key, value, lease_id)

    def delete(self, key: str, mod_revision: int | None = None) -> bool:
        with self._coord.changed:
            self._ready()
            item = self._coord.find(key)
            if item is None or mod_revision not in (None, item.mod_revision):
                return False
            self._coord.remove([key])
            return True

    def grant(self, ttl_s: float) -> tuple[int, int]:
        granted_s = max(1, math.ceil(ttl_s))
        with self._coord.changed:
            self._ready()
            return self._coord.start_lease(granted_s), granted_s

    def keepalive(self, lease_id: int) -> int:
        with self._coord.changed:
            self._ready()
            return self._coord.renew_lease(lease_id)

    def revoke(self, lease_id: int) -> None:
        with self._coord.changed:
            self._ready()
            self._coord.end_lease(lease_id)

    def watch(self, prefix: str, start_revision: int, idle_timeout_s: float | None = None) -> MemoryWatch:
        watch = MemoryWatch(self._coord, prefix, start_revision, idle_timeout_s)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        self._closed = True
        for watch in self._watches:
            watch.close()

    def _ready(self) -> None:
        if self._closed:
            raise CoordError("this client of the in-memory store is closed")
        if not self._coord.reachable:
            raise CoordError("the in-memory store is switched off", hint="set MemoryCoord.reachable to True")
        self._coord.expire()


class MemoryWatch(WatchBase):
    """A watch on a MemoryCoord."""

    def __init__(
        self, coord: MemoryCoord, prefix: str, start_revision: int, idle_timeout_s: float | None = None
    ) -> None:
        super().__init__(start_revision, idle_timeout_s)
        self._coord = coord
        self._prefix = prefix

    def poll(self, timeout_s: float) -> list[WatchEvent]:
        deadline_s = time.monotonic() + timeout_s  # real seconds: this thread really waits
        with self._coord.changed:
            while True:
                lease_ends_in_s = self._coord.expire()
                events = self._take() if self._coord.reachable and not self.closed else []
                left_s = deadline_s - time.monotonic()
                if events or self.closed or left_s <= 0:
                    return events
                self._coord.changed.wait(left_s if lease_ends_in_s is None else min(left_s, lease_ends_in_s + 0.001))

    def close(self) -> None:
        super().close()
        with self._coord.changed:
            self._coord.changed.notify_all()

    def _take(self) -> list[WatchEvent]:
        coord = self._coord
        if self._next_revision < coord.compacted or self._next_revision > coord.revision + 1:
            raise CompactedError(
                f"changes of {self._prefix} since revision {self._next_revision} are gone",
                hint="list the prefix and watch from the revision of that list",
                compact_revision=coord.compacted,
            )
        events = coord.events_since(self._prefix, self._next_revision)
        self._next_revision = coord.revision + 1
        return events
