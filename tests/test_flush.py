"""Flushing: newest first, nothing lost near before it is far, told once, fenced by others, gone on with by the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_launch import eventually
from support_runs import FakeRun, flip_bit, make_run, overwrite

from ckptrt.errors import CorruptError, FencedError, PersistError, StorageError, TransientError
from ckptrt.storage import flush as module
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.flush import Flusher, FlushNotice, due
from ckptrt.storage.layout import CommitId
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import verify_commit

Make = Callable[..., "Flushed"]


class Flushed:
    """A run on a near tier that is flushed to a far one, and what was told of it."""

    def __init__(self, near: Any, far: Any, keep: Keep | None = None) -> None:
        self.notices: list[FlushNotice] = []
        self.near, self.far = near, far
        self.flusher = Flusher(near, far, self.notices.append)
        self.flusher.serve(1, keep)

    def flushed(self) -> list[int]:
        return [notice.step for notice in self.notices if notice.error is None]

    def errors(self) -> list[str]:
        return [notice.error.what for notice in self.notices if notice.error is not None]

    def far_steps(self) -> list[int]:
        """The far path's steps, each of which must be whole."""
        catalog = Catalog(self.far)
        for commit in catalog.path().commits:
            assert verify_commit(catalog, commit, read_data=True).is_ok
        return [commit.step for commit in catalog.path().commits]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(module, "_RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(module, "_FENCE_CHECK_S", 0.05)
    made: list[Flushed] = []

    def start(near: Any, far: Any, keep: Keep | None = None) -> Flushed:
        made.append(Flushed(near, far, keep))
        return made[-1]

    yield start
    for one in made:
        one.flusher.close()


class Gate:
    """A tier whose shard files wait until they are let through."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self.reached, self.open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def write(self, name: str, pieces: Any, size_bytes: int) -> None:
        self.reached.set()
        assert self.open.wait(20)
        self._tier.write(name, pieces, size_bytes)


def steps(tier: Any) -> list[int]:
    return [commit.step for commit in Catalog(tier).path().commits]


# --- what is due


def test_due_is_what_the_rules_want_and_the_far_place_lacks_newest_first() -> None:
    near = MemoryTier()
    make_run(near, range(10, 70, 10))
    catalog = Catalog(near)
    assert [c.step for c in due(catalog, {}, None)] == [60, 50, 40, 30, 20, 10]
    assert [c.step for c in due(catalog, {CommitId(60, 1): {}, CommitId(20, 1): {}}, None)] == [50, 40, 30, 10]
    assert [c.step for c in due(catalog, {}, Keep(last=2))] == [60, 50]
    assert [c.step for c in due(catalog, {CommitId(60, 1): {}}, Keep(last=1, every=30))] == [30]


def test_a_branch_that_was_left_is_not_flushed() -> None:
    near = MemoryTier()
    run = make_run(near, [10, 20, 30])
    run.fence(2, (20, 1))
    run.save(25, 2)
    assert [c.step for c in due(Catalog(near), {}, None)] == [25, 20, 10]


# --- flushing


def test_everything_arrives_newest_first_and_near_keeps_two(make: Make) -> None:
    near, far = MemoryTier(), MemoryTier()
    make_run(near, [10, 20, 30, 40])
    run = make(near, far)
    run.flusher.close()
    assert run.flushed() == [40, 30, 20, 10]
    assert run.far_steps() == [40, 30, 20, 10]
    assert steps(near) == [40, 30]


def test_the_rules_hold_far_away_and_near_keeps_two(make: Make) -> None:
    near, far = MemoryTier(), MemoryTier()
    fake = make_run(near, [10, 20, 30])
    run = make(near, far, Keep(last=1, every=20))
    eventually(lambda: run.flushed() == [30, 20], "the first two")
    fake.save(40)
    run.flusher.wake()
    eventually(lambda: run.flushed() == [30, 20, 40], "the new one")
    run.flusher.close()
    assert run.far_steps() == [40, 20]
    assert steps(near) == [40, 30]


def test_nothing_near_goes_before_it_is_far_if_it_shall_stay(make: Make) -> None:
    near, far = MemoryTier(), FaultyTier(MemoryTier(), [Fault(times=None, error=TransientError)])
    fake = make_run(near, [10])
    run = make(near, far)
    for step in (20, 30, 40):
        fake.save(step)
        run.flusher.wake()
        run.flusher.prune_near()
    eventually(lambda: run.errors(), "word of the failure")
    assert steps(near) == [40, 30, 20, 10]
    assert len(run.errors()) == 1  # once, however often it is tried
    assert "is not in memory:// yet" in run.errors()[0]
    far.clear()
    eventually(lambda: run.flushed() == [40, 30, 20, 10], "all, by itself")
    run.flusher.close()
    assert run.far_steps() == [40, 30, 20, 10]
    assert steps(near) == [40, 30]


def test_one_that_is_under_way_arrives_though_newer_ones_come(make: Make) -> None:
    """With keep=1 and a slow far place every checkpoint would be pruned under the copy, and none ever arrive."""
    near, far = MemoryTier(), Gate(MemoryTier())
    fake = make_run(near, [10])
    run = make(near, far, Keep(last=1))
    assert far.reached.wait(20)
    for step in (20, 30, 40, 50):
        fake.save(step)
        run.flusher.wake()
        run.flusher.prune_near()
    assert steps(near) == [50, 40, 10]
    far.open.set()
    eventually(lambda: run.flushed()[:2] == [10, 50], "the one under way, then the newest")
    run.flusher.close()
    assert run.far_steps() == [50]
    assert steps(near) == [50, 40]


def test_what_is_damaged_near_is_told_and_the_older_ones_go_on(make: Make) -> None:
    near, far = MemoryTier(), MemoryTier()
    make_run(near, [10, 20])
    name = next(e.name for e in near.list("data/s000000020.i00000001.0a/") if "safetensors" in e.name)
    overwrite(near, name, flip_bit(near.read(name), 8 * near.size(name) - 9))
    run = make(near, far)
    eventually(lambda: run.flushed() == [10], "the older one")
    run.flusher.close()
    assert run.far_steps() == [10]
    assert len(run.errors()) == 1
    assert "step 20 is not in" in run.errors()[0]
    assert "damaged" in run.errors()[0]
    assert steps(near) == [20, 10]


def test_one_that_was_pruned_by_hand_meanwhile_is_no_error(make: Make) -> None:
    near, far = MemoryTier(), Gate(MemoryTier())
    fake = make_run(near, [10, 20])
    run = make(near, far)
    assert far.reached.wait(20)
    near.delete("commits/s000000020.i00000001.json")
    near.delete_prefix("data/s000000020.i00000001.0a/")
    fake.save(30)
    far.open.set()
    run.flusher.wake()
    eventually(lambda: 30 in run.flushed() and 10 in run.flushed(), "the others")
    run.flusher.close()
    assert run.errors() == []


def test_a_job_that_was_taken_over_elsewhere_stops_flushing_and_is_told(make: Make) -> None:
    near, far = MemoryTier(), MemoryTier()
    fake = make_run(near, [10])
    run = make(near, far)
    eventually(lambda: run.flushed() == [10], "the first one")
    Catalog(far).write_fence(2, None, 1)
    fake.save(20)
    eventually(lambda: run.flusher.fenced, "the fence, without being woken")
    run.flusher.wake()
    run.flusher.close()
    assert [type(n.error) for n in run.notices if n.error] == [FencedError]
    assert steps(far) == []  # incarnation 2 began anew
    assert Catalog(far).commit_ids() == [CommitId(10, 1)]


def test_the_next_incarnation_goes_on_with_the_same_flusher(make: Make) -> None:
    near, far = MemoryTier(), MemoryTier()
    fake = make_run(near, [10])
    run = make(near, far)
    eventually(lambda: run.flushed() == [10], "the first one")
    fake.fence(2, (10, 1))
    Catalog(far).write_fence(2, Catalog(near).fences()[2].parent, 2, Catalog(near).fences()[2].owner)
    overwrite(far, "fences/i00000002.json", near.read("fences/i00000002.json"))
    run.flusher.serve(2, None)
    fake.save(15, 2)
    run.flusher.wake()
    eventually(lambda: run.flushed() == [10, 15], "the next one")
    assert run.flusher.fenced is None
    run.flusher.close()
    assert run.far_steps() == [15, 10]


@pytest.mark.parametrize("method", ["create", "write", "read_many", "list", "settle"])
@pytest.mark.parametrize("first", [1, 2, 3, 5])
def test_any_call_that_fails_once_only_delays(make: Make, method: str, first: int) -> None:
    near = MemoryTier()
    make_run(near, [10, 20, 30])
    far = FaultyTier(MemoryTier(), [Fault(method=method, first=first, error=StorageError)])
    run = make(near, far)
    eventually(lambda: sorted(run.flushed()) == [10, 20, 30], "all")
    run.flusher.close()
    assert run.far_steps() == [30, 20, 10]


def test_closing_gives_up_on_a_place_that_is_down_and_the_next_one_goes_on(make: Make) -> None:
    near, far = MemoryTier(), FaultyTier(MemoryTier(), [Fault(times=None, error=TransientError)])
    make_run(near, [10])
    run = make(near, far)
    run.flusher.close()
    assert len(run.errors()) == 1
    assert steps(near) == [10]
    far.clear()
    again = make(near, far)
    again.flusher.close()
    assert again.far_steps() == [10]


def test_a_bug_is_told_and_ends_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = MemoryTier(), MemoryTier()
    make_run(near, [10])
    original = module.copy

    def buggy(*args: Any) -> None:
        monkeypatch.setattr(module, "copy", original)
        raise ZeroDivisionError("here")

    monkeypatch.setattr(module, "copy", buggy)
    run = make(near, far)
    eventually(lambda: run.flushed() == [10], "another try")
    assert isinstance(run.notices[0].error, PersistError)
    assert "ZeroDivisionError" in run.errors()[0]


def test_a_borrowed_file_is_not_read_again_for_each_checkpoint(make: Make) -> None:
    near, far = MemoryTier(), FaultyTier(MemoryTier())
    fake = make_run(near, [10])
    run = make(near, far)
    eventually(lambda: run.flushed() == [10], "the base")
    old = fake.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    base = f"data/{old.shard.name}"
    fake.commit(20, 1, {0: fake.write_rank(20, 1, 0, borrow=old), 1: fake.write_rank(20, 1, 1)})
    far.calls.clear()
    again = make(near, far)  # another process, which remembers nothing
    eventually(lambda: again.flushed() + run.flushed() == [20, 10] or run.flushed() == [10, 20], "the borrower")
    assert ("write", base) not in far.calls
    assert ("read_into", base) not in far.calls
    assert run.far_steps() == [20, 10]


def test_a_borrowed_file_that_the_far_place_lost_is_written_again(make: Make) -> None:
    near, far = MemoryTier(), MemoryTier()
    fake = make_run(near, [10])
    run = make(near, far)
    run.flusher.close()
    old = fake.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    far.delete(f"data/{old.shard.name}")
    fake.commit(20, 1, {0: fake.write_rank(20, 1, 0, borrow=old), 1: fake.write_rank(20, 1, 1)})
    again = make(near, far)
    again.flusher.close()
    assert again.far_steps() == [20, 10]


def test_a_pinned_checkpoint_stays_near_too(make: Make, tmp_path: Path) -> None:
    from ckptrt.storage.pins import pin

    near, far = MemoryTier(), MemoryTier()
    fake = make_run(near, [10, 20, 30, 40])
    pin(fake.catalog, CommitId(10, 1), "a reason")
    run = make(near, far, Keep(last=1))  # far away nobody has pinned it
    run.flusher.close()
    assert steps(near) == [40, 30, 10]
    assert run.flushed() == [40, 10]
    assert run.far_steps() == [40]


def test_a_prune_that_fails_is_told_as_such(make: Make) -> None:
    near, far = MemoryTier(), FaultyTier(MemoryTier(), [Fault(method="delete", times=None, error=StorageError)])
    fake = make_run(near, [10])
    run = make(near, far, Keep(last=1))
    eventually(lambda: run.flushed() == [10], "the first")
    fake.save(20)
    run.flusher.wake()
    eventually(lambda: run.flushed() == [10, 20], "the second")
    run.flusher.close()
    assert run.errors() == ["delete of memory:/commits/s000000010.i00000001.json failed: a fault that was asked for"]
    assert run.far_steps() == [20, 10]


def test_the_best_are_chosen_among_those_of_both_places(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = MemoryTier(), FaultyTier(MemoryTier())
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: 2.0}
    fake = FakeRun(tier=near)
    fake.fence(1)
    run = make(near, far, Keep(last=1, best=1))
    for step, loss in losses.items():
        fake.save(step, metrics={"loss": loss})
        run.flusher.wake()
        eventually(lambda step=step: step in run.flushed(), f"step {step}")  # type: ignore[misc]
        run.flusher.prune_near()
    run.flusher.close()
    assert run.far_steps() == [50, 20]
    assert steps(near) == [50, 40]
    assert run.flushed() == [10, 20, 30, 40, 50]


def test_a_corrupt_error_is_not_taken_for_a_prune(make: Make) -> None:
    near = FaultyTier(MemoryTier())
    make_run(near, [10])
    near.add(Fault(method="read_into", times=None, error=CorruptError))
    run = make(near, MemoryTier())
    eventually(lambda: run.errors(), "word of it")
    run.flusher.close()
    assert "step 10 is not in" in run.errors()[0]
