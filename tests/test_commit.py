"""The commit: what it refuses, in which order it writes, and that it may be repeated."""

from __future__ import annotations

import msgspec
import pytest
from support_runs import FakeRun

from ckptrt.clock import FakeClock
from ckptrt.errors import CorruptError, FencedError, StorageError
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import CommitId, commit_name
from ckptrt.storage.records import ReceiptRecord, ShardRecord, seal, unseal
from ckptrt.storage.tiers.memory import MemoryTier


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun(tier=MemoryTier())
    run.fence(1)
    return run


def created(run: FakeRun) -> list[str]:
    """Names of all objects created from now on, in order."""
    names: list[str] = []
    plain_create = run.tier.create

    def create(name, data):
        names.append(name)
        plain_create(name, data)

    run.tier.create = create
    return names


def changed(receipt: bytes, **fields) -> bytes:
    return seal(msgspec.structs.replace(unseal(ReceiptRecord, receipt, "receipt"), **fields))


def test_the_manifest_is_written_before_the_commit_record_and_nothing_after(run):
    receipts = run.write_data(10)
    names = created(run)
    info = run.commit(10, 1, receipts)
    assert names == ["data/s000000010.i00000001.0a/manifest.json.zst", "commits/s000000010.i00000001.json"]
    assert info.record.world_size == 2
    assert info.record.num_tensors == 4  # weight, bias, and an rng of each rank
    assert info.record.size_bytes == sum(unseal(ReceiptRecord, r, "").shard.size_bytes for r in receipts.values())
    checkpoint = run.catalog.open_checkpoint(info)
    assert [checkpoint.receipt_bytes(rank) for rank in (0, 1)] == [receipts[0], receipts[1]]


def test_without_all_shards_there_is_no_checkpoint_until_the_commit(run):
    receipts = run.write_data(10)
    assert run.catalog.newest_good().commit is None
    run.commit(10, 1, receipts)
    assert run.catalog.newest_good().commit.step == 10


def test_a_newer_fence_stops_the_commit_and_names_its_owner(run):
    receipts = run.write_data(10)
    run.fence(2)
    names = created(run)
    with pytest.raises(FencedError, match="incarnation 2 was opened by pid 4711 of ada on node-a"):
        run.commit(10, 1, receipts)
    assert names == []


def test_a_newer_fence_stops_the_commit_even_if_it_is_damaged(run):
    receipts = run.write_data(10)
    run.tier.create("fences/i00000002.json", b"garbage")
    with pytest.raises(FencedError, match="an unknown job"):
        run.commit(10, 1, receipts)


def test_without_its_own_fence_an_incarnation_can_not_commit(run):
    receipts = run.write_data(10, 3)
    with pytest.raises(StorageError, match=r"fences/i00000003\.json is missing"):
        run.commit(10, 3, receipts)


def test_a_commit_may_be_repeated_after_a_crash_at_any_write(run):
    receipts = run.write_data(10)
    plain_create = run.tier.create

    def break_after(last: str):
        def create(name, data):
            plain_create(name, data)
            if name.startswith(last):
                raise StorageError("the answer was lost")

        return create

    for last in ("data/", "commits/"):
        run.tier.create = break_after(last)
        with pytest.raises(StorageError, match="lost"):
            run.commit(10, 1, receipts)
    run.tier.create = plain_create
    run.clock.advance(60)  # the record that is there counts, with its own time
    first = run.catalog.read_commit(CommitId(10, 1))
    assert run.commit(10, 1, receipts).record == first


def test_two_writers_of_one_incarnation_are_told_apart(run):
    run.commit(10, 1, run.write_data(10))
    receipts = run.write_data(10, nonce="0b")
    with pytest.raises(StorageError, match="already committed, with other data"):
        run.commit(10, 1, receipts, nonce="0b")
    assert run.catalog.read_commit(CommitId(10, 1)).data.endswith(".0a")


def test_a_foreign_manifest_in_the_folder_is_not_taken_for_ours(run):
    receipts = run.write_data(10)
    run.tier.create("data/s000000010.i00000001.0a/manifest.json.zst", b"foreign")
    with pytest.raises(StorageError, match="other contents"):
        run.commit(10, 1, receipts)
    assert not run.catalog.commit_ids()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: {0: r[0]}, "of a world of 2 ranks, but 1 sent one"),
        (lambda r: {1: r[1]}, "no receipt of rank 0"),
        (lambda r: {0: r[0], 2: r[1]}, "no receipt of rank 1"),
        (lambda r: {0: r[1], 1: r[0]}, "the receipt of rank 0 for step 10 is of .* rank 1"),
        (lambda r: {0: r[0], 1: changed(r[1], step=9)}, "is of step 9"),
        (lambda r: {0: r[0], 1: changed(r[1], incarnation=2)}, "incarnation 2"),
        (lambda r: {0: r[0], 1: r[1][:-2] + b" \n"}, "damaged"),
        (lambda r: {}, "no receipt of rank 0"),
    ],
)
def test_receipts_that_do_not_belong_together_write_nothing(run, spoil, message):
    receipts = run.write_data(10)
    names = created(run)
    with pytest.raises(CorruptError, match=message):
        run.commit(10, 1, spoil(receipts))
    assert names == []


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "s000000010.i00000001.0a", "s000000010.i00000001.0a/../run.json", "x/r00000.safetensors",
     "s000000010.i00000001.0a/a/b", "s000000010.i00000001.0a/.hidden"],
)  # fmt: skip
def test_a_shard_outside_data_is_refused(run, name):
    receipts = run.write_data(10)
    shard = ShardRecord(name=name, size_bytes=1, chunk_bytes=4 << 20, chunks="0" * 16)
    with pytest.raises(CorruptError, match="outside data/"):
        run.commit(10, 1, {**receipts, 1: changed(receipts[1], shard=shard)})


@pytest.mark.parametrize("data", ["../x", "s000000011.i00000001.0a", "s000000010.i00000001.0a/x"])
def test_a_folder_that_is_not_of_this_checkpoint_is_refused(run, data):
    receipts = run.write_data(10)
    names = created(run)
    with pytest.raises(CorruptError, match="can't be its data folder"):
        commit(run.tier, run.catalog, 10, 1, data, receipts, "tests", FakeClock())
    assert names == []


def test_shards_in_older_folders_are_listed_as_references(run):
    first = run.save(10)
    receipt = run.catalog.open_checkpoint(first).receipt(0)
    receipts = {0: run.write_rank(20, 1, 0, borrow=receipt), 1: run.write_rank(20, 1, 1)}
    info = run.commit(20, 1, receipts)
    assert info.record.references == ("s000000010.i00000001.0a",)
    assert run.catalog.newest_good().commit.step == 20
    run.tier.delete("data/s000000010.i00000001.0a/r00000.safetensors")
    assert run.catalog.newest_good().commit is None
    assert run.tier.read(commit_name(CommitId(20, 1)))
