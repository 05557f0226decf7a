"""Looking into a checkpoint's values: which tensors hold NaN or infinities? Reads all floating-point data, verified."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.records import ShardRecord, TensorRecord
from ckptrt.storage.shardfile import item_bytes
from ckptrt.storage.values import NonFinite, Reader, is_float
from ckptrt.storage.values import find_non_finite as find_in_bytes

__all__ = ["BadValues", "find_non_finite"]

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BadValues:
    """A rank's region of a tensor, and what in it isn't finite; `first` is an index of the global tensor."""

    key: str
    rank: int
    values: NonFinite


def find_non_finite(checkpoint: Checkpoint) -> list[BadValues]:
    """Every stored region that holds NaN or infinities, in order of ranks.

    Raises CorruptError for bytes that aren't as they were written, UsageError without numpy.
    """
    reader = Reader(checkpoint.tier)
    return [
        BadValues(key=tensor.key, rank=receipt.rank, values=found)
        for receipt in checkpoint.receipts()
        for shard, tensors in receipt.files()
        for tensor in tensors
        if is_float(tensor.dtype) and (found := _look(reader, shard, tensor))
    ]


def _look(reader: Reader, shard: ShardRecord, tensor: TensorRecord) -> NonFinite:
    width, count, total = item_bytes(tensor.dtype), prod(tensor.sizes), NonFinite()
    step = _PIECE_BYTES // width
    for number in range(0, count, step):
        start = tensor.start + number * width
        piece = reader.read(shard, start, tensor.start + min(number + step, count) * width)
        found = find_in_bytes(piece, tensor.dtype)
        if found.first is not None:
            found = replace(found, first=_index(number + found.first[0], tensor))
        total += found
    return total


def _index(number: int, tensor: TensorRecord) -> tuple[int, ...]:
    """Where the region's element of that number is in the global tensor."""
    index = []
    for size, offset in zip(reversed(tensor.sizes), reversed(tensor.offsets), strict=True):
        number, at = divmod(number, size)
        index.append(at + offset)
    return tuple(reversed(index))
