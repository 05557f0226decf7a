"""The seam between ckptrt and any place that keeps bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Entry", "Tier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name directly below a prefix. A folder's name ends in a slash and it has neither size nor time."""

    name: str
    size_bytes: int = 0
    modified_s: float = 0.0  # seconds since 1970 by the store's clock; for grace times and people only

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")


@runtime_checkable
class Tier(Protocol):
    """Objects by name below one root (a run's directory). The contract that tests/tier_conformance.py checks:

    - Names are relative, '/'-separated, never start with '/', and hold no '.' or '..' part (UsageError).
    - A write is durable when the call returns: contents and name survive a power cut.
    - `create` and `write` never replace: of any number of concurrent writers of a name exactly one succeeds and
      the others get ExistsError, and then what is there is durable, whoever wrote it. Nobody ever sees a part of an
      object. A failed call leaves no object of that name
      (or, for `create` on a network, raises TransientError only if it can't tell).
    - Every error is one of ckptrt.errors.StorageError and says the tier's url and the name.
    - Methods may be called from several threads. An instance is not usable in a forked child.
    """

    url: str

    def create(self, name: str, data: bytes) -> None:
        """Write a small new object at once. ExistsError if the name is taken, even by equal bytes."""
        ...

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new object of exactly `size_bytes` from pieces in order.

        Pieces stay the caller's: each is done with when the next is asked for. All but the last are multiples of
        1 MiB; a piece whose address and length are multiples of 4 KiB may be written without a copy.
        """
        ...

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Bytes from `start`, to the end if no size is given. CorruptError if the object ends before that."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` (writable, contiguous bytes) from `start`. CorruptError if the object ends before that."""
        ...

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Whole small objects by name, in parallel where that helps; missing ones are left out."""
        ...

    def size(self, name: str) -> int:
        """Bytes of an object; NotFoundError if there is none."""
        ...

    def list(self, prefix: str) -> list[Entry]:
        """What lies directly below a prefix ('' or ending in a slash), sorted by name; empty if nothing does."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; no error if it is gone already."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Remove everything below a prefix that ends in a slash, and the folder; may be repeated after a crash."""
        ...

    def settle(self, prefix: str) -> None:
        """Make durable which names are to be seen directly below a prefix, whoever added or removed them.

        For who is about to build on another process's work: that one may have died, or not yet be done, between a
        change and its becoming durable. No error if nothing is there.
        """
        ...

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        """Remove what interrupted writes left directly below a prefix, and say what that was.

        Only what nobody has touched since `before_s` (seconds since 1970): it may be the work of a writer that lives.
        Listings never show any of it, and nothing else is removed. dry_run: remove nothing.
        """
        ...

    def probe(self) -> None:
        """Prove that this place keeps the contract of `create`, where that is in doubt: StorageError if it doesn't.

        For a run's first opening; where the operating system guarantees it, nothing is done.
        """
        ...

    def close(self) -> None: ...
