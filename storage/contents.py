"""What a checkpoint holds, added up from the receipts of all ranks. Metadata only, one receipt in memory at a time.

Made for a million tensors: sums for each branch of the hierarchy of names, and a light entry for each tensor only if
they are to be listed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

from ckptrt.storage.records import ReceiptOutline, TensorRecord
from ckptrt.storage.shardfile import item_bytes

__all__ = ["Contents", "Tensor", "TensorId", "Totals", "Widths", "id_order", "no_gc", "tensor_id"]

_BEYOND_ALL = chr(sys.maxunicode) * 8

# A global tensor's key, or key and rank of one that belongs to that rank alone.
TensorId = str | tuple[str, int]


def tensor_id(rank: int, tensor: TensorRecord) -> TensorId:
    return (tensor.key, rank) if tensor.rank_only else tensor.key


def id_order(tensor: TensorId) -> tuple[str, int]:
    """Sorts ids by key, then rank."""
    return (tensor, -1) if isinstance(tensor, str) else tensor


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the cycle collector from walking over millions of records again and again: none is part of a cycle.

    It takes two thirds of the time of decoding a receipt of a million tensors, and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class Totals:
    """Sums over tensors. A tensor counts once, however many ranks hold parts of it."""

    num_tensors: int = 0
    num_elements: int = 0
    size_bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # -> elements
    shape: tuple[int, ...] = ()  # of the last tensor; tells something if it is the only one

    def add(self, other: Totals) -> None:
        self.num_tensors += other.num_tensors
        self.num_elements += other.num_elements
        self.size_bytes += other.size_bytes
        self.shape = other.shape
        for dtype, elements in other.dtypes.items():
            self.dtypes[dtype] = self.dtypes.get(dtype, 0) + elements


@dataclass(slots=True)
class Tensor:
    """A global tensor, or one rank's own; `size_bytes` are those that are stored."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    ranks: tuple[int, ...]


class Contents:
    """Sums of the first `depth` levels of names, and in `tensors` the first `max_listed` tensors in order of names."""

    def __init__(self, receipts: Iterable[ReceiptOutline], depth: int = 1, max_listed: int | None = 0) -> None:
        """max_listed: None for all."""
        self.depth = depth
        self.branches: dict[str, Totals] = {}  # the first `depth` parts of a name -> all that begins so
        self.tensors: dict[TensorId, Tensor] = {}
        self.objects: dict[str, int] = {}  # component -> how many ranks have one
        self.files: set[str] = set()
        self._empty: set[str] = set()
        self._max_listed = max_listed
        self._last = _BEYOND_ALL if max_listed != 0 else ""  # no key after this one will be listed
        for receipt in receipts:
            self._add(receipt)
        self._drop_unlisted()

    @property
    def total(self) -> Totals:
        total = Totals()
        for branch in self.branches.values():
            total.add(branch)
        return total

    def _add(self, receipt: ReceiptOutline) -> None:
        branches, depth, last = self.branches, self.depth, self._last
        widths = Widths()
        for shard, tensors in receipt.files():
            self.files.add(shard.name)
            for tensor in tensors:
                key, dtype = tensor.key, tensor.dtype
                parts = key.split(".", depth)
                name = key if len(parts) <= depth else ".".join(parts[:depth])
                totals = branches.get(name)
                if totals is None:
                    totals = branches[name] = Totals()
                held = prod(tensor.sizes)
                size_bytes = held * widths[dtype]
                totals.size_bytes += size_bytes
                if key <= last:
                    self._list(receipt.rank, tensor, size_bytes)
                    last = self._last
                # A tensor is counted at the part that holds its first element: no need to remember a million names.
                if any(tensor.offsets) or not (held or self._is_new_and_empty(tensor)):
                    continue
                elements = held if tensor.sizes == tensor.shape else prod(tensor.shape)
                totals.num_tensors += 1
                totals.num_elements += elements
                totals.dtypes[dtype] = totals.dtypes.get(dtype, 0) + elements
                totals.shape = tensor.shape
        for plain in receipt.objects:
            self.objects[plain.key] = self.objects.get(plain.key, 0) + 1

    def _is_new_and_empty(self, tensor: TensorRecord) -> bool:
        """Whether this is the first part of a tensor without elements, of which no part holds the first one."""
        if prod(tensor.shape) or tensor.key in self._empty:
            return False
        if not tensor.rank_only:
            self._empty.add(tensor.key)
        return True

    def _list(self, rank: int, tensor: TensorRecord, size_bytes: int) -> None:
        name = tensor_id(rank, tensor)
        found = self.tensors.get(name)
        if found is None:
            self.tensors[name] = Tensor(tensor.dtype, tensor.shape, size_bytes, (rank,))
            if self._max_listed is not None and len(self.tensors) > 16 * self._max_listed:
                self._drop_unlisted()
            return
        found.size_bytes += size_bytes
        if found.ranks[-1] != rank:
            found.ranks = (*found.ranks, rank)

    def _drop_unlisted(self) -> None:
        """Put what is listed in order. Of a million tensors, few pass the last name that is still to be listed."""
        tensors = self.tensors
        # Plain names sort three times faster than pairs.
        order = None if all(isinstance(name, str) for name in tensors) else id_order
        names = sorted(tensors, key=order)
        if self._max_listed is not None and len(names) > self._max_listed:
            names = names[: self._max_listed]
            if names:
                self._last = id_order(names[-1])[0]
        self.tensors = {name: tensors[name] for name in names}


class Widths(dict[str, int]):
    """Bytes of an element by dtype; UsageError for one that nobody knows."""

    def __missing__(self, dtype: str) -> int:
        width = self[dtype] = item_bytes(dtype)
        return width
