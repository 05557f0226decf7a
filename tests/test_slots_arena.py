"""Slots in shared memory: sealed whole or not at all, and leased so that one whole snapshot is always there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support_state import memfd

from ckptrt.arena import Arena
from ckptrt.errors import CorruptError, NoSpaceError
from ckptrt.storage.slots import PAGE_BYTES, ArenaView, MemorySnapshot, arena_bytes, format_arena, memory_snapshots

SLOT_BYTES = 8 * PAGE_BYTES
HEADER_BYTES = 128  # enough for the header and its digest


@pytest.fixture
def view() -> Iterator[ArenaView]:
    fd = make_arena(rank=2)
    arena = ArenaView(fd)
    os.close(fd)
    yield arena
    arena.close()


def make_arena(rank: int = 0, slots: int = 2) -> int:
    fd, _ = memfd(arena_bytes(slots, SLOT_BYTES))
    import mmap

    with mmap.mmap(fd, 0) as mapping:
        format_arena(mapping, rank, slots, SLOT_BYTES)
    return fd


def seal(view: ArenaView, slot: int, step: int, incarnation: int = 1, world_size: int = 4, meta: bytes = b"{}") -> None:
    view.seal(slot, world_size=world_size, step=step, incarnation=incarnation, image_bytes=100, meta=meta)


def test_a_sealed_slot_tells_what_it_holds(view):
    assert view.header(0) is None
    view.image(0, 100)[:] = bytes(range(100))
    seal(view, 0, step=10, meta=b'{"tensors":[],"objects":[]}')
    header = view.header(0)
    assert (header.rank, header.world_size, header.step, header.incarnation) == (2, 4, 10, 1)
    assert bytes(view.image(0, header.image_bytes)) == bytes(range(100))
    assert view.meta(0, header).tensors == ()
    assert view.header(1) is None
    view.unseal(0)
    assert view.header(0) is None


def test_the_image_lies_on_a_page(view):
    for slot in (0, 1):
        view.image(slot, 4)[:] = b"here"
        assert view.mapping.find(b"here") % PAGE_BYTES == 0
        view.image(slot, 4)[:] = b"done"


@pytest.mark.parametrize("older", [0, 9], ids=["first", "reused"])
def test_a_seal_that_is_torn_at_any_byte_is_no_seal(view, older):
    if older:
        seal(view, 0, step=older)
    view.unseal(0)
    before = bytes(view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES])
    seal(view, 0, step=10)
    after = bytes(view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES])
    whole = max(at for at in range(HEADER_BYTES) if before[at] != after[at]) + 1
    for torn in range(whole):
        view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES] = after[:torn] + before[torn:]
        assert view.header(0) is None, f"sealed by {torn} of {whole} bytes"


def test_an_unseal_that_is_torn_leaves_the_old_snapshot_or_none(view):
    seal(view, 0, step=10)
    before = bytes(view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES])
    view.unseal(0)
    after = bytes(view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES])
    for torn in range(HEADER_BYTES):
        view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES] = after[:torn] + before[torn:]
        header = view.header(0)
        assert header is None or header.step == 10


def test_any_changed_bit_of_a_header_unseals_it(view):
    seal(view, 0, step=10)
    header = bytes(view.mapping[PAGE_BYTES : PAGE_BYTES + HEADER_BYTES]).rstrip(b"\0")
    for bit in range(len(header) * 8):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        view.mapping[PAGE_BYTES : PAGE_BYTES + len(header)] = bytes(changed)
        assert view.header(0) is None, f"bit {bit}"


def test_a_damaged_index_is_found(view):
    seal(view, 0, step=10, meta=b'{"tensors":[],"objects":[]}')
    header = view.header(0)
    at = PAGE_BYTES + header.meta_start
    view.mapping[at : at + 1] = b"["
    with pytest.raises(CorruptError, match="step 10, rank 2"):
        view.meta(0, header)


def test_what_does_not_fit_is_refused(view):
    with pytest.raises(ValueError, match="can't hold"):
        view.seal(0, world_size=1, step=1, incarnation=1, image_bytes=SLOT_BYTES, meta=b"")
    for slot in (-1, 2):
        with pytest.raises(IndexError):
            view.header(slot)


@pytest.mark.parametrize("damage", ["zero", "rank", "short", "empty"])
def test_memory_that_is_no_arena_is_refused_and_holds_nothing(damage):
    fd = make_arena()
    if damage == "zero":
        os.pwrite(fd, bytes(64), 0)
    elif damage == "rank":
        os.pwrite(fd, b"\x09", 12)
    elif damage == "short":
        os.ftruncate(fd, PAGE_BYTES * 3)
    else:
        os.ftruncate(fd, 0)
    with pytest.raises((CorruptError, ValueError)):
        ArenaView(fd)
    assert memory_snapshots([fd]) == []
    os.close(fd)


def test_a_snapshot_counts_only_if_every_rank_of_its_world_holds_it():
    fds = [make_arena(rank) for rank in range(3)]
    views = [ArenaView(fd) for fd in fds]
    for view in views:
        seal(view, 0, step=10, world_size=3)
    for view in views[:2]:
        seal(view, 1, step=20, world_size=3)
    assert memory_snapshots(fds) == [MemorySnapshot(10, 1, 3)]
    seal(views[2], 1, step=20, incarnation=2, world_size=3)
    assert memory_snapshots(fds) == [MemorySnapshot(10, 1, 3)], "another incarnation's step 20 is another snapshot"
    seal(views[2], 0, step=20, world_size=3)
    assert memory_snapshots(fds) == [MemorySnapshot(20, 1, 3)]
    for view in views:
        view.close()
    for fd in fds:
        os.close(fd)


class Leases(RuleBasedStateMachine):
    """Saves, commits, failures and restarts in any order: one whole snapshot stays, and none in flight is leased."""

    def __init__(self) -> None:
        super().__init__()
        self.fds: dict[int, int] = {}
        self.step = 0
        self.incarnation = 1
        self.in_flight: dict[int, int] = {}  # slot -> step
        self.image_bytes = 100
        self.newest: tuple[int, int] | None = None

    def allocate(self, size_bytes: int) -> tuple[int, bool]:
        """As the agent does: one memfd of each size, kept over restarts."""
        created = size_bytes not in self.fds
        if created:
            self.fds[size_bytes], _ = memfd(size_bytes)
        return os.dup(self.fds[size_bytes]), created

    @initialize()
    def start(self) -> None:
        self.arena = Arena(3, self.allocate)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
        for fd in self.fds.values():
            os.close(fd)

    @rule(skip=st.integers(0, 2))
    def save(self, skip: int) -> None:
        self.step += skip  # 0: the same step again, after a save that failed
        self.arena.ensure(self.image_bytes, 10)
        slot = self.arena.lease()
        if slot is None:
            assert len(self.in_flight) >= 1, "nothing is being written, yet no slot is free"
            return
        assert slot not in self.in_flight
        assert self.arena.view is not None
        assert self.arena.view.header(slot) is None, "a slot is emptied before it is filled"
        self.check_one_whole()
        self.arena.view.seal(
            slot, world_size=1, step=self.step, incarnation=self.incarnation, image_bytes=100, meta=b"{}"
        )
        self.arena.sealed(slot, self.step, self.incarnation)
        self.in_flight[slot] = self.step
        self.newest = (self.incarnation, self.step)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.arena.settled(slot, self.in_flight.pop(slot))

    @rule()
    def hear_of_an_old_step(self) -> None:
        for slot in self.in_flight:
            self.arena.settled(slot, -5)

    @precondition(lambda self: self.newest is not None)
    @rule()
    def restart(self) -> None:
        """The worker dies; its successor goes on from the newest snapshot in memory."""
        self.arena.close()
        self.arena = Arena(3, self.allocate)
        assert self.newest is not None
        self.step = self.newest[1]
        self.arena.keep(self.newest[1], self.newest[0])
        self.incarnation += 1
        self.in_flight.clear()
        self.arena.ensure(self.image_bytes, 10)

    @invariant()
    def check_one_whole(self) -> None:
        if self.newest is not None and self.arena.view is not None:
            headers = [self.arena.view.header(slot) for slot in (0, 1)]
            assert self.newest in [(h.incarnation, h.step) for h in headers if h is not None]


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestLeases = Leases.TestCase


def test_two_snapshots_of_one_step_do_not_block_all_later_ones():
    arena = Arena(0, memfd)
    for _ in range(3):
        arena.ensure(100, 10)
        slot = arena.lease()
        assert slot is not None
        arena.sealed(slot, step=5, incarnation=1)
        arena.settled(slot, step=5)
    arena.close()


def test_an_arena_that_its_maker_did_not_finish_is_made_anew():
    fds: list[int] = []

    def allocate(size_bytes: int) -> tuple[int, bool]:
        fds.append(memfd(size_bytes)[0])
        return os.dup(fds[0]), False  # an agent's: not new, but never formatted

    arena = Arena(0, allocate)
    arena.ensure(100, 10)
    assert arena.lease() is not None
    arena.close()
    for fd in fds:
        os.close(fd)


def test_growing_gives_the_old_memory_back():
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(0, memfd)
    for size_bytes in (100, 3 << 20, 6 << 20):
        assert arena.ensure(size_bytes, 10)
        assert not arena.ensure(size_bytes, 10)
    assert len(os.listdir("/proc/self/fd")) == before + 2, "one descriptor, and the mapping's own"
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_cannot_be_had_is_a_clear_error_and_leaves_the_arena_as_it_was(monkeypatch):
    arena = Arena(1, memfd)
    arena.ensure(100, 10)

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoSpaceError, match=r"rank 1: no .* MiB of shared memory"):
        arena.ensure(8 << 20, 10)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not arena.ensure(100, 10)
    assert arena.lease() is not None
    arena.close()
