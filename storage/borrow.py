"""Unchanged tensors are not written again: which of a snapshot's can be borrowed, and the file that holds the rest.

The trainer marks tensors that seldom change; a mark is a hint and costs one pass over their bytes. Only bytes decide:
a tensor is borrowed if the newest committed checkpoint has the same region of it with the same xxh3-128 digest. What
is borrowed names the file in which the bytes have lain from the beginning, so references never form chains.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from ckptrt.storage.records import BorrowedRecord, DigestRecord, ObjectRecord, ReceiptRecord, ShardRecord, TensorRecord
from ckptrt.storage.shardfile import TensorSpec, chunk_digests, lay_out, tensor_bytes
from ckptrt.storage.slots import SlotMeta

__all__ = ["PIECE_BYTES", "Parcel", "Pieces", "pack"]

PIECE_BYTES = 8 << 20  # one write; two digest chunks

_Place = tuple[str, tuple[int, ...]]  # a region's tensor and offsets


class Pieces(Sequence[memoryview]):
    """A shard file in pieces for a tier, digested as they pass by. May be gone through again after a failure.

    segments: (first byte in the file, bytes), in order and without gaps. A piece that lies in one segment is handed out
    as it is; else it is put together in one buffer, which the next such piece takes again.
    """

    def __init__(self, segments: Sequence[tuple[int, memoryview]]) -> None:
        self._starts = [start for start, _ in segments]
        self._segments = [data for _, data in segments]
        self.size_bytes = self._starts[-1] + len(self._segments[-1])
        self._digests: dict[int, str] = {}
        self._buffer: memoryview | None = None

    def __len__(self) -> int:
        return (self.size_bytes + PIECE_BYTES - 1) // PIECE_BYTES

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        piece = self._piece(index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, self.size_bytes))
        if index not in self._digests:
            self._digests[index] = chunk_digests(piece)
        return piece

    def digests(self) -> str:
        return "".join(self._digests[index] for index in range(len(self)))

    def _piece(self, start: int, end: int) -> memoryview:
        number = bisect_right(self._starts, start) - 1
        if end <= self._starts[number] + len(self._segments[number]):
            return self._segments[number][start - self._starts[number] : end - self._starts[number]]
        if self._buffer is None:
            self._buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))  # page-aligned, as O_DIRECT wants it
        at = start
        while at < end:
            begin, data = self._starts[number], self._segments[number]
            stop = min(end, begin + len(data))
            self._buffer[at - start : stop - start] = data[at - begin : stop - begin]
            at, number = stop, number + 1
        return self._buffer[: end - start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a rank must write of a snapshot, and what its receipt says."""

    pieces: Pieces
    tensors: tuple[TensorRecord, ...]
    objects: tuple[ObjectRecord, ...]
    borrowed: tuple[BorrowedRecord, ...] = ()
    digests: tuple[DigestRecord, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def borrowed_bytes(self) -> int:
        return sum(tensor_bytes(tensor) for part in self.borrowed for tensor in part.tensors)


def pack(rank: int, meta: SlotMeta, image: memoryview, base: ReceiptRecord | None) -> Parcel:
    """Sort a snapshot's tensors into those that `base`, the rank's part of the newest commit, has and the others.

    image: the slot's bytes, a whole shard file; its owner must keep them as long as the pieces are used. With nothing
    to borrow the file is the image itself, uncopied.
    """
    steady = {index: meta.tensors[index] for index in meta.steady}
    digests = {index: _digest(tensor, image) for index, tensor in steady.items()}
    held = _held(base) if base is not None else {}
    found: dict[ShardRecord, list[TensorRecord]] = {}
    taken: set[int] = set()
    for index, tensor in steady.items():
        shard, there, digest = held.get((tensor.key, tensor.offsets), (None, None, ""))
        if shard is not None and there is not None and digest == digests[index].xxh3 and _same_kind(tensor, there):
            found.setdefault(shard, []).append(there)
            taken.add(index)
    parcel = Parcel(
        pieces=Pieces([(0, image)]),
        tensors=meta.tensors,
        objects=meta.objects,
        digests=tuple(digests.values()),
        metrics=meta.metrics,
    )
    if not found:
        return parcel
    rest = [tensor for index, tensor in enumerate(meta.tensors) if index not in taken]
    pieces, tensors, objects = _compact(rank, rest, meta.objects, image)
    borrowed = tuple(BorrowedRecord(shard=shard, tensors=tuple(there)) for shard, there in found.items())
    return replace(parcel, pieces=pieces, tensors=tensors, objects=objects, borrowed=borrowed)


def _digest(tensor: TensorRecord, image: memoryview) -> DigestRecord:
    with image[tensor.start : tensor.start + tensor_bytes(tensor)] as data:
        return DigestRecord(tensor.key, tensor.offsets, xxhash.xxh3_128_hexdigest(data))


def _held(base: ReceiptRecord) -> dict[_Place, tuple[ShardRecord, TensorRecord, str]]:
    digests = {(digest.key, digest.offsets): digest.xxh3 for digest in base.digests}
    places = (((t.key, t.offsets), shard, t) for shard, tensors in base.files() for t in tensors)
    return {place: (shard, tensor, digests[place]) for place, shard, tensor in places if place in digests}


def _same_kind(a: TensorRecord, b: TensorRecord) -> bool:
    return (a.dtype, a.shape, a.sizes, a.rank_only) == (b.dtype, b.shape, b.sizes, b.rank_only)


def _compact(
    rank: int, tensors: Sequence[TensorRecord], objects: Sequence[ObjectRecord], image: memoryview
) -> tuple[Pieces, tuple[TensorRecord, ...], tuple[ObjectRecord, ...]]:
    """A shard file of these parts of an image."""
    specs = [
        TensorSpec(key=t.key, dtype=t.dtype, shape=t.shape, offsets=t.offsets, sizes=t.sizes, rank_only=t.rank_only)
        for t in tensors
    ]
    layout = lay_out(rank, specs, [(plain.key, plain.size_bytes) for plain in objects])
    segments = [(0, memoryview(layout.header))]
    for record, index in zip(layout.tensors, layout.order, strict=True):
        start, size_bytes = tensors[index].start, tensor_bytes(record)
        segments.append((record.start, image[start : start + size_bytes]))
    for placed, plain in zip(layout.objects, objects, strict=True):
        segments.append((placed.start, image[plain.start : plain.start + plain.size_bytes]))
    return Pieces([segment for segment in segments if len(segment[1])]), layout.tensors, layout.objects
