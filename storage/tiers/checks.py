"""Checks that every tier makes on what callers hand in and on what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptrt.errors import CorruptError, UsageError
from ckptrt.storage.tiers.names import join_url

__all__ = ["CountedPieces", "check_range", "short_object"]


class CountedPieces:
    """Pieces as flat bytes, none empty, that must add up to the promised size, else UsageError."""

    def __init__(self, pieces: Iterable[memoryview], size_bytes: int, url: str, name: str) -> None:
        if size_bytes < 0:
            raise UsageError(f"can't write {join_url(url, name)}: its size is given as {size_bytes} bytes")
        self._pieces = pieces
        self._size_bytes = size_bytes
        self._where = join_url(url, name)

    def __iter__(self) -> Iterator[memoryview]:
        seen_bytes = 0
        for piece in self._pieces:
            with memoryview(piece) as view, view.cast("B") as flat:
                seen_bytes += flat.nbytes
                if seen_bytes > self._size_bytes:
                    raise self._mismatch(f"more than {self._size_bytes}")
                if flat.nbytes:
                    yield flat
        if seen_bytes != self._size_bytes:
            raise self._mismatch(str(seen_bytes))

    def _mismatch(self, got: str) -> UsageError:
        return UsageError(
            f"can't write {self._where}: {self._size_bytes} bytes were promised and the pieces hold {got}",
            safe="nothing was written under that name",
            hint="pass the exact size of all pieces together",
        )


def check_range(url: str, name: str, start: int, size_bytes: int | None) -> None:
    """Refuse ranges that no object can have."""
    if start < 0 or (size_bytes is not None and size_bytes < 0):
        raise UsageError(f"can't read {join_url(url, name)}: no object has {size_bytes} bytes from offset {start}")


def short_object(url: str, name: str, start: int, end: int, actual_bytes: int) -> CorruptError:
    """The error for an object that ends before a range that it must hold."""
    return CorruptError(
        f"{join_url(url, name)} ends at offset {actual_bytes}, but bytes {start} to {end} were asked for",
        safe="the object was only read",
        hint="it was cut short after it was written: take another copy or an older checkpoint",
    )
