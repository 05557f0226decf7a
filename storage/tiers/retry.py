"""A tier that tries again what may be tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import stamina

from ckptrt.errors import CorruptError, ExistsError, StorageError, TransientError
from ckptrt.storage.tiers.base import Entry, Tier
from ckptrt.storage.tiers.names import join_url

__all__ = ["RetryTier"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class RetryTier:
    """Repeats calls that fail with TransientError, with growing, jittered pauses; every other error goes through.

    A create or write that failed so may have happened all the same, and the repeated one then finds the name taken.
    A tier that knows its own earlier attempts says so by `resolves_creates`, and its answer stands. For any other
    tier the object is read back: equal bytes mean that an earlier attempt had arrived. If somebody else created the
    same name with the same bytes meanwhile, both are told that they won; records that decide anything hold
    something of their writer's own, so that this can't be.

    `write` is repeated only if `pieces` is a Sequence (a list, say), which can be gone through again. An iterator is
    used up by the first attempt: the error goes to the caller, who can make the pieces anew.
    """

    def __init__(
        self,
        tier: Tier,
        attempts: int = 5,
        timeout_s: float = 45.0,
        *,
        wait_initial_s: float = 0.1,
        wait_max_s: float = 5.0,
    ) -> None:
        """At most `attempts` calls; none is begun later than `timeout_s` after the first."""
        self.url = tier.url
        self.tier = tier
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._wait_initial_s = wait_initial_s
        self._wait_max_s = wait_max_s

    @property
    def resolves_creates(self) -> bool:
        return True

    def create(self, name: str, data: bytes) -> None:
        self._publish("create", name, lambda: self.tier.create(name, data), [memoryview(data)])

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        if isinstance(pieces, Sequence):
            self._publish("write", name, lambda: self.tier.write(name, pieces, size_bytes), pieces)
        else:
            self.tier.write(name, pieces, size_bytes)

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        return self._retry("read", name, lambda: self.tier.read(name, start, size_bytes))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._retry("read_into", name, lambda: self.tier.read_into(name, start, out))

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        return self._retry("read_many", f"{len(wanted)} objects", lambda: self.tier.read_many(wanted))

    def size(self, name: str) -> int:
        return self._retry("size", name, lambda: self.tier.size(name))

    def list(self, prefix: str) -> list[Entry]:
        return self._retry("list", prefix, lambda: self.tier.list(prefix))

    def delete(self, name: str) -> None:
        self._retry("delete", name, lambda: self.tier.delete(name))

    def delete_prefix(self, prefix: str) -> None:
        self._retry("delete_prefix", prefix, lambda: self.tier.delete_prefix(prefix))

    def settle(self, prefix: str) -> None:
        self._retry("settle", prefix, lambda: self.tier.settle(prefix))

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        return self._retry("sweep", prefix, lambda: self.tier.sweep(prefix, before_s, dry_run=dry_run))

    def probe(self) -> None:
        self._retry("probe", "", self.tier.probe)

    def close(self) -> None:
        self.tier.close()

    def _retry(self, method: str, name: str, call: Callable[[], _T]) -> _T:
        failed: TransientError | None = None
        for attempt in stamina.retry_context(
            on=TransientError,
            attempts=self._attempts,
            timeout=self._timeout_s,
            wait_initial=self._wait_initial_s,
            wait_max=self._wait_max_s,
            wait_jitter=self._wait_initial_s,
        ):
            with attempt:
                if failed is not None:
                    where = join_url(self.url, name)
                    _log.warning(
                        "again method=%s object=%s attempt=%d error=%s", method, where, attempt.num, failed.what
                    )
                try:
                    return call()
                except TransientError as error:
                    failed = error
                    raise
        raise AssertionError("a retry ends with a result or an error")

    def _publish(self, method: str, name: str, call: Callable[[], None], pieces: Iterable[memoryview]) -> None:
        """Create something, knowing whether an earlier attempt may have done it already."""
        unsure = False

        def attempt() -> None:
            nonlocal unsure
            try:
                call()
            except TransientError:
                unsure = True
                raise
            except ExistsError:
                if not unsure or getattr(self.tier, "resolves_creates", False) or not self._holds(name, pieces):
                    raise

        self._retry(method, name, attempt)

    def _holds(self, name: str, pieces: Iterable[memoryview]) -> bool:
        """Whether the object is there with just these bytes."""
        start = 0
        try:
            for piece in pieces:
                if self.tier.read(name, start, piece.nbytes) != piece:
                    return False
                start += piece.nbytes
            return self.tier.size(name) == start
        except (CorruptError, StorageError) as error:
            if isinstance(error, TransientError):
                raise
            return False
