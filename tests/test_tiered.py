"""A run in two places: one history, fences far first, and what is damaged here is taken from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_runs import OWNER, FakeRun, flip_bit, make_run, overwrite
from tier_conformance import body, pieces_of

from ckptrt.errors import BusyError, CorruptError, ExistsError, MismatchError, StorageError, TransientError, UsageError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.copy import copy, plan_copy
from ckptrt.storage.layout import COMMITS, RUN, CommitId, commit_name, fence_name
from ckptrt.storage.records import Parent
from ckptrt.storage.tiered import RunPlace, TieredCatalog, hold_place, open_place
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.tiers.layered import LayeredTier
from ckptrt.storage.tiers.memory import MemoryTier


def flush(run: FakeRun, far: MemoryTier, *steps: int) -> None:
    commits = [commit for commit in run.catalog.path().commits if commit.step in steps]
    copy(run.catalog, far, plan_copy(run.catalog, far, commits))


def opened(near: MemoryTier, far: MemoryTier) -> TieredCatalog:
    catalog = TieredCatalog(near, far)
    catalog.create_run()
    return catalog


def steps(catalog: Catalog) -> list[int]:
    return [commit.step for commit in catalog.path().commits]


# --- the tier


def test_reads_come_from_near_and_what_it_lacks_from_far() -> None:
    near, far = MemoryTier(), MemoryTier()
    for tier, names in ((near, "ab"), (far, "bc")):
        for name in names:
            tier.create(f"x/{name}", f"{name} of {'near' if tier is near else 'far'}".encode())
    both = LayeredTier(near, far)
    assert [both.read(f"x/{name}") for name in "abc"] == [b"a of near", b"b of near", b"c of far"]
    assert both.read_many(["x/a", "x/c", "x/d"]) == {"x/a": b"a of near", "x/c": b"c of far"}
    assert [(entry.name, entry.size_bytes) for entry in both.list("x/")] == [("x/a", 9), ("x/b", 9), ("x/c", 8)]
    assert both.size("x/c") == 8
    out = bytearray(3)
    both.read_into("x/c", 5, memoryview(out))
    assert out == b"far"


@pytest.mark.parametrize("error", [StorageError, TransientError, CorruptError])
def test_a_near_disk_that_fails_is_read_around_and_a_far_one_is_not_hidden(error, caplog) -> None:
    near, far = MemoryTier(), MemoryTier()
    for tier in (near, far):
        tier.create("a", b"same")
    far.create("only far", b"x")
    failing = LayeredTier(FaultyTier(near, [Fault(method="read", times=None, error=error)]), far)
    assert failing.read("a") == b"same"
    assert "event=read_far" in caplog.text
    with pytest.raises(error):
        LayeredTier(near, FaultyTier(far, [Fault(method="read", times=None, error=error)])).read("only far")


def test_a_record_is_made_far_first_and_a_broken_off_try_is_completed() -> None:
    near, far = MemoryTier(), MemoryTier()
    with pytest.raises(StorageError):
        LayeredTier(near, FaultyTier(far, [Fault(method="create", error=StorageError)])).create("f", b"1")
    assert near.list("") == [] == far.list("")  # never near alone: nobody else would see it
    flaky = LayeredTier(FaultyTier(near, [Fault(method="create", error=StorageError)]), far)
    with pytest.raises(StorageError):
        flaky.create("f", b"1")
    flaky.create("f", b"1")
    assert near.read("f") == far.read("f") == b"1"
    with pytest.raises(ExistsError):
        flaky.create("f", b"2")


def test_a_view_of_two_places_neither_writes_shards_nor_deletes() -> None:
    both = LayeredTier(MemoryTier(), MemoryTier())
    for call in (
        lambda: both.write("a", pieces_of(body(1)), 1),
        lambda: both.delete("a"),
        lambda: both.delete_prefix("a/"),
        lambda: both.sweep("", 0.0),
    ):
        with pytest.raises(UsageError, match="belongs to one tier"):
            call()


# --- one history


def test_both_places_hold_the_run_and_every_fence() -> None:
    near, far = MemoryTier(), MemoryTier()
    catalog = opened(near, far)
    assert near.read(RUN) == far.read(RUN)
    catalog.write_fence(1, None, 2, OWNER)
    assert near.read(fence_name(1)) == far.read(fence_name(1))
    assert catalog.places()[0].newest_incarnation() == catalog.places()[1].newest_incarnation() == 1


def test_an_empty_local_dir_takes_over_the_runs_identity_and_history() -> None:
    far = MemoryTier()
    run = make_run(far, [10, 20])
    run.fence(2, (20, 1))
    near = MemoryTier()
    catalog = opened(near, far)
    assert near.read(RUN) == far.read(RUN)
    assert sorted(Catalog(near).fences()) == [1, 2]
    assert steps(catalog) == [20, 10]
    assert steps(catalog.near) == []


def test_a_run_that_gets_a_far_place_later_brings_its_history_there() -> None:
    near, far = MemoryTier(), MemoryTier()
    run = make_run(near, [10, 20])
    run.fence(2, (20, 1))
    catalog = opened(near, far)
    assert catalog.run is not None
    assert catalog.run.run_id == "fake" == Catalog(far).open_run().run_id
    assert sorted(Catalog(far).fences()) == [1, 2]
    assert steps(catalog) == [20, 10]


def test_what_another_node_did_meanwhile_cuts_off_what_this_one_never_flushed() -> None:
    """Node A dies with step 30 on its own disk; B goes on from 20, which was flushed; A comes back."""
    a, b, far = MemoryTier(), MemoryTier(), MemoryTier()
    on_a = FakeRun(tier=a)
    opened(a, far).write_fence(1, None, 2, OWNER)
    for step in (10, 20, 30):
        on_a.save(step)
    flush(on_a, far, 10, 20)
    from_b = opened(b, far)
    assert steps(from_b) == [20, 10]
    from_b.write_fence(2, Parent(step=20, incarnation=1), 2, OWNER)
    FakeRun(tier=b).save(25, 2)
    flush(FakeRun(tier=b), far, 25)
    back_on_a = opened(a, far)
    assert steps(back_on_a) == [25, 20, 10]
    assert CommitId(30, 1) in back_on_a.path().off_path
    assert back_on_a.newest_incarnation() == 2
    assert back_on_a.open_checkpoint(CommitId(25, 2)).receipt(0).step == 25


def test_two_runs_and_two_histories_of_one_are_refused() -> None:
    near, far = MemoryTier(), MemoryTier()
    make_run(near, [10])
    Catalog(far).create_run("another")
    with pytest.raises(MismatchError, match=r"another run \(fake\)"):
        opened(near, far)
    far = MemoryTier()
    opened(near, far)
    for place, parent in ((near, 10), (far, 9)):  # each without the other
        Catalog(place).write_fence(2, Parent(step=parent, incarnation=1), 2, OWNER)
    with pytest.raises(MismatchError, match="gone different ways"):
        opened(near, far)


@pytest.mark.parametrize("which", ["near", "far"])
@pytest.mark.parametrize("name", [fence_name(1), RUN, commit_name(CommitId(20, 1))])
def test_a_record_that_is_damaged_in_one_place_is_read_in_the_other(which: str, name: str) -> None:
    near, far = MemoryTier(), MemoryTier()
    run = make_run(near, [10, 20])
    flush(run, far, 10, 20)
    tier = near if which == "near" else far
    overwrite(tier, name, flip_bit(tier.read(name), 99))
    catalog = opened(near, far)
    assert steps(catalog) == [20, 10]
    assert catalog.newest_good().commit == catalog.examine(CommitId(20, 1))
    assert catalog.examine(CommitId(20, 1)).state == "committed"
    assert catalog.open_checkpoint(CommitId(20, 1)).record.step == 20
    assert not catalog.path().problems


def test_a_shard_that_is_cut_off_near_is_whole_in_sum() -> None:
    near, far = MemoryTier(), MemoryTier()
    run = make_run(near, [10])
    flush(run, far, 10)
    name = next(entry.name for entry in near.list("data/s000000010.i00000001.0a/") if "safetensors" in entry.name)
    overwrite(near, name, near.read(name)[:-1])
    assert opened(near, far).newest_good().commit is not None
    overwrite(far, name, far.read(name)[:-1])
    assert opened(near, far).newest_good().commit is None


def test_a_far_place_that_is_down_stops_the_start_and_says_which(tmp_path: Path) -> None:
    near = MemoryTier()
    make_run(near, [10])
    down = FaultyTier(MemoryTier(), [Fault(times=None, error=TransientError)])
    with pytest.raises(TransientError):
        TieredCatalog(near, down).create_run()
    assert sorted(Catalog(near).fences()) == [1]


# --- the place


def test_a_place_is_one_directory_or_two_that_differ(tmp_path: Path) -> None:
    place = RunPlace.of(str(tmp_path / "a"), str(tmp_path / "b"), {})
    assert RunPlace.from_data(place.data()) == place
    assert place.written == str(tmp_path / "b")
    assert RunPlace.of("s3://x/y").written == "s3://x/y"
    for url, local_dir in (("runs/a", "runs/a"), ("file://" + str(tmp_path), str(tmp_path)), ("a", "s3://b")):
        with pytest.raises(UsageError, match="local_dir"):
            RunPlace.of(url, local_dir)


def test_both_directories_are_held_or_none(tmp_path: Path) -> None:
    place = RunPlace.of(str(tmp_path / "far"), str(tmp_path / "near"))
    with hold_place(place):
        for one in (place.url, place.local_dir):
            with pytest.raises(BusyError):
                hold_place(RunPlace.of(one))
        with pytest.raises(BusyError):  # the far one is free, and stays so
            hold_place(RunPlace.of(str(tmp_path / "other"), place.local_dir))
        hold_place(RunPlace.of(str(tmp_path / "other"))).close()
    hold_place(place).close()


def test_opening_a_place_makes_the_run_in_both(tmp_path: Path) -> None:
    place = RunPlace.of(str(tmp_path / "far"), str(tmp_path / "near"))
    open_place(place)
    assert (tmp_path / "far" / RUN).read_bytes() == (tmp_path / "near" / RUN).read_bytes()
    assert not list((tmp_path / "near").glob(COMMITS + "*"))
