"""Objects in the memory of this process: for tests, and the plainest statement of what a tier does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckptrt.storage.tiers.base import Entry
from ckptrt.storage.tiers.checks import CountedPieces, check_range, short_object
from ckptrt.storage.tiers.names import check_name, check_prefix
from ckptrt.storage.tiers.oserrors import exists_error, not_found_error

__all__ = ["MemoryBucket", "MemoryTier"]


@dataclass(slots=True, kw_only=True)
class MemoryBucket:
    """Objects by full key, and the lock that guards them; several tiers may share one under differing roots."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryTier:
    """A tier in this process's memory. Nothing in it survives the process."""

    def __init__(self, url: str = "memory://", *, bucket: MemoryBucket | None = None, root: str = "") -> None:
        """`root` is empty or ends in a slash: where in the bucket this tier's names begin."""
        self.url = url
        self._bucket = bucket or MemoryBucket()
        self._root = root

    def create(self, name: str, data: bytes) -> None:
        self._put(name, bytes(data))

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        check_name(self.url, name)
        data = bytearray()
        for piece in CountedPieces(pieces, size_bytes, self.url, name):
            data += piece
        self._put(name, bytes(data))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(self.url, name, start, size_bytes)
        data = self._get(name)
        end = max(start, len(data)) if size_bytes is None else start + size_bytes
        if start > len(data) or end > len(data):
            raise short_object(self.url, name, start, end, len(data))
        return data[start:end]

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with out.cast("B") as flat:
            flat[:] = self.read(name, start, flat.nbytes)

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        keys = {name: self._key(name) for name in names}
        with self._bucket.lock:
            objects = self._bucket.objects
            return {name: objects[key][0] for name, key in keys.items() if key in objects}

    def size(self, name: str) -> int:
        return len(self._get(name))

    def list(self, prefix: str) -> list[Entry]:
        base = self._root + check_prefix(self.url, prefix)
        entries: dict[str, Entry] = {}
        with self._bucket.lock:
            for key, (data, modified_s) in self._bucket.objects.items():
                if not key.startswith(base):
                    continue
                head, slash, _ = key[len(base) :].partition("/")
                name = prefix + head + slash
                size_bytes, when_s = (0, 0.0) if slash else (len(data), modified_s)
                entries[name] = Entry(name=name, size_bytes=size_bytes, modified_s=when_s)
        return [entries[name] for name in sorted(entries)]

    def delete(self, name: str) -> None:
        key = self._key(name)
        with self._bucket.lock:
            self._bucket.objects.pop(key, None)

    def delete_prefix(self, prefix: str) -> None:
        base = self._root + check_prefix(self.url, prefix, may_be_empty=False)
        with self._bucket.lock:
            for key in [key for key in self._bucket.objects if key.startswith(base)]:
                del self._bucket.objects[key]

    def settle(self, prefix: str) -> None:
        """What is seen is as durable as it gets."""

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        """Nothing is ever half written."""
        check_prefix(self.url, prefix)
        return []

    def probe(self) -> None:
        """Nothing to prove."""

    def close(self) -> None:
        """Keep the objects: another tier of this process may have the same bucket."""

    def _key(self, name: str) -> str:
        return self._root + check_name(self.url, name)

    def _get(self, name: str) -> bytes:
        key = self._key(name)
        with self._bucket.lock:
            found = self._bucket.objects.get(key)
        if found is None:
            raise not_found_error(self.url, name)
        return found[0]

    def _put(self, name: str, data: bytes) -> None:
        key = self._key(name)
        with self._bucket.lock:
            if key in self._bucket.objects:
                raise exists_error(self.url, name)
            self._bucket.objects[key] = (data, time.time())
