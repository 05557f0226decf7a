"""The arena's bytes: what a rank's process, the persister and the agent agree on in shared memory.

    page 0       arena header: how many slots of what size, whose they are
    slot k       header page | image (a whole shard file) | meta (JSON: what lies where in the image)

A slot is sealed by one write of its header, whose own digest covers it: a process killed at any instant leaves
the slot either sealed and whole or not sealed. The image is page-aligned, so that it goes to disk without a copy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from ckptrt.errors import CorruptError
from ckptrt.storage.records import ObjectRecord, TensorRecord
from ckptrt.storage.shardfile import PAGE_BYTES

__all__ = [
    "SLOTS", "ArenaView", "MemorySnapshot", "SlotHeader", "SlotMeta", "arena_bytes", "format_arena", "memory_snapshots",
    "pages",
]  # fmt: skip

SLOTS = 2  # of a rank: one whole snapshot is there while the next is filled

_ARENA = struct.Struct("<8sIIIIQ")  # magic, version, rank, slots, pad, slot_bytes
_ARENA_MAGIC = b"CKPTAREN"
_SLOT = struct.Struct("<8sIIIIqqQQQQ")  # magic, version, rank, world_size, pad, step, incarnation, image, meta x3
_SLOT_MAGIC = b"CKPTSLOT"
_DIGEST = struct.Struct("<Q")
_VERSION = 1


class MemorySnapshot(NamedTuple):
    """A step that the memory tier holds whole."""

    step: int
    incarnation: int
    world_size: int


class SlotMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the image holds; becomes the receipt once digests and a file name are known.

    steady: numbers of the tensors that are likely to be what they were in the last checkpoint. metrics: numbers of the
    training loop at this step.
    """

    tensors: tuple[TensorRecord, ...]
    objects: tuple[ObjectRecord, ...]
    steady: tuple[int, ...] = ()
    metrics: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """A sealed slot: which snapshot it holds. `meta_start` counts from the slot's begin."""

    rank: int
    world_size: int
    step: int
    incarnation: int
    image_bytes: int
    meta_start: int
    meta_bytes: int
    meta_xxh3: int


def pages(size_bytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def arena_bytes(slots: int, slot_bytes: int) -> int:
    return PAGE_BYTES + slots * slot_bytes


def format_arena(mapping: mmap.mmap, rank: int, slots: int, slot_bytes: int) -> None:
    """Write a fresh arena header; every slot is unsealed."""
    head = _ARENA.pack(_ARENA_MAGIC, _VERSION, rank, slots, 0, slot_bytes)
    for slot in range(slots):
        start = PAGE_BYTES + slot * slot_bytes
        mapping[start : start + _SLOT.size + _DIGEST.size] = bytes(_SLOT.size + _DIGEST.size)
    mapping[: len(head) + 8] = head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head))


class ArenaView:
    """A mapped arena. The mapping belongs to the view: close() after the last memoryview of it is released."""

    def __init__(self, fd: int) -> None:
        """Map the arena behind a descriptor, which stays the caller's. Raises CorruptError if it isn't one."""
        self.mapping = mmap.mmap(fd, 0)
        head = self.mapping[: _ARENA.size].ljust(_ARENA.size, b"\0")
        digest = _DIGEST.unpack_from(self.mapping, _ARENA.size)[0]
        self.rank: int
        self.slots: int
        self.slot_bytes: int
        magic, version, self.rank, self.slots, _pad, self.slot_bytes = _ARENA.unpack(head)
        if magic != _ARENA_MAGIC or version != _VERSION or digest != xxhash.xxh3_64_intdigest(head):
            self.mapping.close()
            raise CorruptError("this memory holds no arena of this version")
        if arena_bytes(self.slots, self.slot_bytes) > len(self.mapping):
            self.mapping.close()
            raise CorruptError("an arena's header claims more memory than there is")
        self._view = memoryview(self.mapping)

    def header(self, slot: int) -> SlotHeader | None:
        """The slot's header if it is sealed, else None."""
        start = self._start(slot)
        head = bytes(self._view[start : start + _SLOT.size])
        digest = _DIGEST.unpack_from(self._view, start + _SLOT.size)[0]
        magic, version, rank, world_size, _pad, step, incarnation, image, meta_start, meta, meta_xxh3 = _SLOT.unpack(
            head
        )
        if magic != _SLOT_MAGIC or version != _VERSION or digest != xxhash.xxh3_64_intdigest(head):
            return None
        if PAGE_BYTES + image > meta_start or meta_start + meta > self.slot_bytes:
            return None
        return SlotHeader(
            rank=rank,
            world_size=world_size,
            step=step,
            incarnation=incarnation,
            image_bytes=image,
            meta_start=meta_start,
            meta_bytes=meta,
            meta_xxh3=meta_xxh3,
        )

    def image(self, slot: int, size_bytes: int) -> memoryview:
        """The slot's image: `size_bytes` bytes of a shard file, page-aligned. Belongs to the arena."""
        start = self._start(slot) + PAGE_BYTES
        return self._view[start : start + size_bytes]

    def meta(self, slot: int, header: SlotHeader) -> SlotMeta:
        start = self._start(slot) + header.meta_start
        data = self._view[start : start + header.meta_bytes]
        if xxhash.xxh3_64_intdigest(data) != header.meta_xxh3:
            raise CorruptError(f"the memory snapshot of step {header.step}, rank {header.rank}, has a damaged index")
        return msgspec.json.decode(data, type=SlotMeta)

    def unseal(self, slot: int) -> None:
        """Give up the slot's content; must precede any write to its image."""
        start = self._start(slot)
        # All of it: had the old digest stayed, the first bytes of a new seal would make the old header valid again.
        self._view[start : start + _SLOT.size + _DIGEST.size] = bytes(_SLOT.size + _DIGEST.size)

    def seal(self, slot: int, *, world_size: int, step: int, incarnation: int, image_bytes: int, meta: bytes) -> None:
        """Make the slot's content a snapshot. All of the image must have been written before."""
        start = self._start(slot)
        meta_start = PAGE_BYTES + pages(image_bytes)
        if meta_start + len(meta) > self.slot_bytes:
            raise ValueError(f"a slot of {self.slot_bytes} bytes can't hold {image_bytes} + {len(meta)}")
        self._view[start + meta_start : start + meta_start + len(meta)] = meta
        digest = xxhash.xxh3_64_intdigest(meta)
        fields = (step, incarnation, image_bytes, meta_start, len(meta), digest)
        head = _SLOT.pack(_SLOT_MAGIC, _VERSION, self.rank, world_size, 0, *fields)
        self._view[start : start + len(head) + 8] = head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head))

    def close(self) -> None:
        self._view.release()
        self.mapping.close()

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return PAGE_BYTES + slot * self.slot_bytes


def memory_snapshots(fds: Iterable[int]) -> list[MemorySnapshot]:
    """Every snapshot that the arenas behind these descriptors hold for all ranks of its world, newest first.

    The descriptors stay the caller's. What isn't an arena, or isn't sealed, holds nothing.
    """
    ranks: dict[MemorySnapshot, set[int]] = {}
    for fd in fds:
        try:
            view = ArenaView(fd)
        except (CorruptError, ValueError):  # ValueError: an empty file can't be mapped
            continue
        for slot in range(view.slots):
            header = view.header(slot)
            if header is not None:
                snapshot = MemorySnapshot(header.step, header.incarnation, header.world_size)
                ranks.setdefault(snapshot, set()).add(header.rank)
        view.close()
    whole = [snapshot for snapshot, held in ranks.items() if held >= set(range(snapshot.world_size))]
    return sorted(whole, key=lambda snapshot: (snapshot.incarnation, snapshot.step), reverse=True)
