"""A rank's slots: which one may be filled next, and that one whole snapshot stays in memory meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckptrt.errors import CorruptError, NoSpaceError
from ckptrt.storage.shardfile import PAGE_BYTES
from ckptrt.storage.slots import SLOTS, ArenaView, arena_bytes, format_arena, pages

__all__ = ["Arena"]

_ROUND_BYTES = 1 << 20
_SLACK_BYTES = 256 << 10  # plain data may grow a little from save to save
_MADV_POPULATE_WRITE = 23

Allocate = Callable[[int], tuple[int, bool]]


@dataclass(slots=True)
class _Slot:
    step: int = -1
    incarnation: int = -1
    in_flight: bool = False  # handed to the persister, which has neither written it nor failed
    turn: int = 0  # which of two snapshots of one step is the later one

    @property
    def holds(self) -> bool:
        return self.step >= 0


class Arena:
    """Shared memory for two snapshots, made once, warm, and reused.

    allocate(size_bytes) gives a memfd and whether it is new; an old one may still hold snapshots. A slot is free if
    it isn't being written out and another one holds something newer: so at every instant one whole snapshot is there.
    Methods may be called from the training thread and from the one that hears from the persister.
    """

    def __init__(self, rank: int, allocate: Allocate) -> None:
        self._rank = rank
        self._allocate = allocate
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._keep: tuple[int, int] | None = None
        self._turn = 0
        self.view: ArenaView | None = None
        self.fd = -1

    def keep(self, step: int, incarnation: int) -> None:
        """Say which snapshot of an earlier incarnation the job has gone on from: the one worth keeping."""
        self._keep = (step, incarnation)

    def ensure(self, image_bytes: int, meta_bytes: int) -> bool:
        """Have slots of at least that size; True if the memory is another than before. Raises NoSpaceError."""
        needed = PAGE_BYTES + pages(image_bytes) + meta_bytes
        if self.view is not None and self.view.slot_bytes >= needed:
            return False
        slot_bytes = PAGE_BYTES + -(-(needed + _SLACK_BYTES) // _ROUND_BYTES) * _ROUND_BYTES
        size_bytes = arena_bytes(SLOTS, slot_bytes)
        fd, is_new = self._allocate(size_bytes)
        try:
            view = self._map(fd, size_bytes, slot_bytes, is_new)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            # An outgrown arena stays mapped until its views are collected, and the persister maps what it still reads.
            outgrown, self.view, self.fd = self.fd, view, fd
            self._slots = [self._adopt(slot) for slot in range(SLOTS)]
        if outgrown >= 0:
            os.close(outgrown)
        return True

    def lease(self) -> int | None:
        """A slot to fill, emptied; None if every one is needed."""
        with self._lock:
            newest = max(self._slots, key=lambda slot: (slot.incarnation, slot.step, slot.turn))
            for index, slot in enumerate(self._slots):
                if not slot.in_flight and (not slot.holds or slot is not newest):
                    assert self.view is not None
                    self.view.unseal(index)
                    self._slots[index] = _Slot()
                    return index
            return None

    def sealed(self, index: int, step: int, incarnation: int) -> None:
        """The slot that was leased holds a snapshot now, and is handed to the persister."""
        with self._lock:
            self._turn += 1
            self._slots[index] = _Slot(step=step, incarnation=incarnation, in_flight=True, turn=self._turn)

    def settled(self, index: int, step: int) -> None:
        """The snapshot of `step` is on disk or given up; the slot goes on holding it until it is needed."""
        with self._lock:
            if self._slots[index].step == step:
                self._slots[index].in_flight = False

    def close(self) -> None:
        """Let go of the memory; it is freed once nobody else maps it."""
        with self._lock:
            fd, self.fd, self.view = self.fd, -1, None
        if fd >= 0:
            os.close(fd)

    def _map(self, fd: int, size_bytes: int, slot_bytes: int, is_new: bool) -> ArenaView:
        if not is_new:
            # Whoever had this memory before may have been killed while it was making the arena.
            with contextlib.suppress(CorruptError):
                return ArenaView(fd)
        self._warm(fd, size_bytes, slot_bytes)
        return ArenaView(fd)

    def _adopt(self, index: int) -> _Slot:
        """What a slot holds from before: kept if the job went on from it, else emptied."""
        assert self.view is not None
        header = self.view.header(index)
        if header is None or (header.step, header.incarnation) != self._keep:
            self.view.unseal(index)
            return _Slot()
        return _Slot(step=header.step, incarnation=header.incarnation)

    def _warm(self, fd: int, size_bytes: int, slot_bytes: int) -> None:
        """Take the memory now: a copy into pages that must be made first is 15 to 23 times slower."""
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            raise NoSpaceError(
                f"rank {self._rank}: no {size_bytes >> 20} MiB of shared memory for snapshots ({error.strerror})",
                safe="training and what is committed are untouched; nothing can be saved",
                hint="raise the memory limit, or save less state per rank",
            ) from None
        with mmap.mmap(fd, size_bytes) as mapping:
            format_arena(mapping, self._rank, SLOTS, slot_bytes)


def populate(view: ArenaView) -> None:
    """Enter all pages of a mapping into this process's page table. Best effort: older kernels can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * len(view.mapping)).from_buffer(view.mapping)
    libc.madvise(ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_size_t(len(view.mapping)), _MADV_POPULATE_WRITE)
    del buffer
