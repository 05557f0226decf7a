"""Where the bytes of a checkpoint can be had: sealed slots of this node's memory, or shard files of a tier."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ckptrt import say
from ckptrt.errors import CorruptError, Error, NoCheckpointError, NotFoundError, StorageError
from ckptrt.plan import Read, chunk_aligned
from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.layout import DATA
from ckptrt.storage.records import ObjectRecord, ReceiptRecord, ShardRecord, TensorRecord
from ckptrt.storage.shardfile import bad_chunks
from ckptrt.storage.slots import ArenaView
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.layered import copies

__all__ = ["MemorySource", "Part", "Source", "StoredSource"]

_READ_BYTES = 16 << 20
_READERS = 4


class Part(Protocol):
    """What lies in one file: a rank's own, or an older one that it borrows from (which gives no plain data)."""

    rank: int
    tensors: tuple[TensorRecord, ...]
    objects: tuple[ObjectRecord, ...]


class Source(Protocol):
    """A checkpoint's bytes by file. Everything that `mapped` hands out has been verified as far as the tier allows.

    partial: it holds some components of a state only, and that is meant so.
    """

    world_size: int
    partial: bool

    def parts(self) -> Sequence[Part]:
        """The ranks' own files in order of ranks, then those that they borrow from."""
        ...

    def mapped(self, part: Part, reads: Sequence[Read]) -> AbstractContextManager[memoryview]:
        """The part's file as one buffer, of which (at least) the asked-for ranges hold their bytes.

        CorruptError names file, bytes and tensors if anything differs from what was written.
        """
        ...


class _SlotPart:
    def __init__(self, rank: int, tensors: tuple[TensorRecord, ...], objects: tuple[ObjectRecord, ...]) -> None:
        self.rank, self.tensors, self.objects = rank, tensors, objects


class MemorySource:
    """The snapshot of one step in the arenas of this node."""

    def __init__(self, fds: Sequence[int], step: int, incarnation: int) -> None:
        """Maps the arenas and closes the descriptors. NoCheckpointError if not every rank's snapshot is here."""
        self.world_size = 0
        self.partial = False
        self._images: dict[int, memoryview] = {}
        self._parts: dict[int, _SlotPart] = {}
        for fd in fds:
            try:
                self._take(ArenaView(fd), step, incarnation)
            except CorruptError:
                continue  # an arena that was never formatted holds nothing
            finally:
                os.close(fd)
        if not self.world_size or sorted(self._parts) != list(range(self.world_size)):
            raise NoCheckpointError(
                f"the memory tier doesn't hold step {step} of incarnation {incarnation} for all ranks: "
                f"{len(self._parts)} of {self.world_size or '?'}",
            )

    def _take(self, view: ArenaView, step: int, incarnation: int) -> None:
        for slot in range(view.slots):
            header = view.header(slot)
            if header is None or (header.step, header.incarnation) != (step, incarnation):
                continue
            meta = view.meta(slot, header)
            self.world_size = header.world_size
            self._images[header.rank] = view.image(slot, header.image_bytes)
            self._parts[header.rank] = _SlotPart(header.rank, meta.tensors, meta.objects)

    def parts(self) -> Sequence[Part]:
        return [self._parts[rank] for rank in range(self.world_size)]

    @contextmanager
    def mapped(self, part: Part, reads: Sequence[Read]) -> Iterator[memoryview]:
        yield self._images[part.rank]


class _FilePart:
    def __init__(self, receipt: ReceiptRecord, shard: ShardRecord, tensors: tuple[TensorRecord, ...]) -> None:
        self.rank, self.shard, self.tensors = receipt.rank, shard, tensors
        self.objects = receipt.objects if shard is receipt.shard else ()


class StoredSource:
    """The shard files of a committed checkpoint, read by ranges of whole digest chunks."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        receipts = list(checkpoint.receipts())
        self.world_size = len(receipts)
        self.partial = any(receipt.partial for receipt in receipts)
        parts = [_FilePart(receipt, *file) for receipt in receipts for file in receipt.files()]
        self._parts = sorted(parts, key=lambda part: part.shard is not receipts[part.rank].shard)

    def parts(self) -> Sequence[Part]:
        return self._parts

    @contextmanager
    def mapped(self, part: Part, reads: Sequence[Read]) -> Iterator[memoryview]:
        assert isinstance(part, _FilePart)
        # Address space is free and only pages that are read into take memory, so ranges keep their places. The map goes
        # with its last view: an error on its way up may hold one, so nothing is closed by force.
        view = memoryview(mmap.mmap(-1, max(part.shard.size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        wide = chunk_aligned(reads, part.shard.chunk_bytes, part.shard.size_bytes)
        read_verified(self._checkpoint.tier, part.shard, part.tensors, wide, view, part.rank)
        yield view


def read_verified(
    tier: Tier,
    shard: ShardRecord,
    tensors: Sequence[TensorRecord],
    reads: Sequence[Read],
    out: memoryview,
    rank: int,
) -> None:
    """Read ranges of whole chunks to their own offsets in `out`, in parallel, and check each chunk's digest.

    A chunk that one place can't give as it was written is taken from the next place that has the file, and a line
    says so.
    """
    step = max(_READ_BYTES // shard.chunk_bytes, 1) * shard.chunk_bytes
    pieces = [(at, min(step, start + size - at)) for start, size in reads for at in range(start, start + size, step)]
    first, *others = copies(tier)

    def read(piece: tuple[int, int]) -> None:
        start, size = piece
        try:
            _read_piece(first, shard, tensors, start, out[start : start + size], rank)
        except (CorruptError, StorageError) as error:
            if not others:
                raise
            _mend_piece(others, shard, tensors, start, out[start : start + size], rank, error)

    if len(pieces) == 1:
        read(pieces[0])
        return
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        for _ in pool.map(read, pieces):
            pass


def _read_piece(
    tier: Tier, shard: ShardRecord, tensors: Sequence[TensorRecord], start: int, out: memoryview, rank: int
) -> None:
    size = len(out)
    try:
        tier.read_into(DATA + shard.name, start, out)
    except (CorruptError, NotFoundError) as error:
        raise CorruptError(
            f"{error.what} (rank {rank}; bytes {start} to {start + size - 1} hold {_held(tensors, start, size)})",
            safe="nothing of it was loaded",
            hint=error.hint,
        ) from None
    for number in bad_chunks(shard, start // shard.chunk_bytes, out):
        at = number * shard.chunk_bytes
        raise _bad_chunk(tier, shard, tensors, at, min(shard.chunk_bytes, shard.size_bytes - at), rank)


def _mend_piece(
    others: Sequence[Tier],
    shard: ShardRecord,
    tensors: Sequence[TensorRecord],
    start: int,
    out: memoryview,
    rank: int,
    error: Error,
) -> None:
    """Take what is bad in `out` from other places, chunk by chunk. Raises the first place's `error` if none has it."""
    for number in bad_chunks(shard, start // shard.chunk_bytes, out):
        at = number * shard.chunk_bytes - start
        chunk = out[at : at + shard.chunk_bytes]
        for other in others:
            try:
                _read_piece(other, shard, tensors, start + at, chunk, rank)
                break
            except (CorruptError, StorageError):
                continue
        else:
            raise error
    say.line("warn", f"rank {rank}: taken from {others[0].url} instead: {error.what}")


def _bad_chunk(
    tier: Tier, shard: ShardRecord, tensors: Sequence[TensorRecord], start: int, size: int, rank: int
) -> CorruptError:
    return CorruptError(
        f"{tier.url}/{DATA}{shard.name} is damaged: bytes {start} to {start + size - 1} (rank {rank}) don't have their "
        f"digest; they hold {_held(tensors, start, size)}",
        safe="nothing of it was loaded",
        hint="`ckptrt verify --read-data` names all that is damaged and the newest good step",
    )


def _held(tensors: Sequence[TensorRecord], start: int, size: int) -> str:
    """Names of the tensors in a range of bytes."""
    at = sorted((record.start, record.key) for record in tensors)
    before = [key for begin, key in at if begin <= start][-1:]
    hit = before + [key for begin, key in at if start < begin < start + size]
    more = f" and {len(hit) - 4} more tensors" if len(hit) > 4 else ""
    return ", ".join(dict.fromkeys(hit[:4])) + more or "no tensor"
