"""Which checkpoints a run has, and that damage to one record never hides the others."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support_runs import OWNER, FakeRun, flip_bit, make_run, overwrite

from ckptrt.clock import FakeClock
from ckptrt.errors import (
    AccessError,
    BusyError,
    CorruptError,
    ExistsError,
    FencedError,
    NotFoundError,
    UsageError,
    VersionError,
)
from ckptrt.storage.catalog import Catalog, Parent, hold_run, open_catalog
from ckptrt.storage.layout import DATA, CommitId, commit_name, fence_name
from ckptrt.storage.records import CommitRecord, FenceRecord, ManifestRef, RunRecord, seal
from ckptrt.storage.tiers.memory import MemoryTier


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def newer(record: bytes) -> bytes:
    """A record as a later major version might write it."""
    return record.replace(b'{"ckptrt":"1.0","kind"', b'{"ckptrt":"2.0","sort"')


# --- the run


def test_a_run_is_created_once_and_then_opened(tier):
    first = Catalog(tier).create_run("gpt")
    assert Catalog(tier).create_run("other") == first
    assert Catalog(tier).open_run() == first


def test_no_run_is_an_error_that_writes_nothing(tmp_path):
    with pytest.raises(NotFoundError, match="no run at") as info:
        open_catalog(str(tmp_path / "none"))
    assert info.value.exit_code == 10
    assert not list(tmp_path.iterdir())


def test_a_run_of_a_newer_format_is_refused(tier):
    tier.create("run.json", newer(seal(RunRecord(run_id="x", created_at="", made_by=""))))
    for opening in (Catalog(tier).open_run, Catalog(tier).create_run):
        with pytest.raises(VersionError, match=r"format 2\.0"):
            opening()


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 40])
def test_a_damaged_run_record_costs_no_checkpoint(tier, damage, caplog):
    run = make_run(tier, [10])
    overwrite(tier, "run.json", damage)
    with caplog.at_level(logging.WARNING):
        assert run.catalog.create_run() is None
    assert "run.json" in caplog.text
    assert run.catalog.newest_good().commit.step == 10
    tier.delete("run.json")
    assert run.catalog.open_run() is None
    assert "missing" in run.catalog.run_problem


# --- fences


def test_an_incarnation_is_fenced_once(tier):
    run = make_run(tier, [])
    run.fence(2, (10, 1))
    assert run.catalog.newest_fence().parent == Parent(step=10, incarnation=1)
    with pytest.raises(ExistsError, match="pid 4711 of ada on node-a"):
        Catalog(tier, FakeClock(99)).write_fence(2, None, 4, OWNER)
    # The same write sent twice, as a client does that lost the answer.
    assert run.catalog.write_fence(2, Parent(step=10, incarnation=1), run.world_size, OWNER)


def test_a_fence_older_than_the_newest_is_refused(tier):
    run = make_run(tier, [])
    run.fence(5)
    with pytest.raises(FencedError, match="incarnation 5 was opened by pid 4711"):
        run.fence(4)
    assert sorted(run.catalog.fences()) == [1, 5]


@pytest.mark.parametrize("parent", [Parent(step=1, incarnation=2), Parent(step=1, incarnation=3)])
def test_a_fence_must_go_on_from_an_older_incarnation(tier, parent):
    with pytest.raises(UsageError):
        Catalog(tier).write_fence(2, parent, 1, OWNER)


def test_a_damaged_fence_still_counts_as_the_newest(tier):
    run = make_run(tier, [10, 20])
    run.fence(2, (10, 1))
    run.save(20, 2)
    overwrite(tier, fence_name(2), b"garbage")
    assert run.catalog.newest_incarnation() == 2
    assert run.catalog.newest_fence().incarnation == 1
    assert [c.id for c in run.catalog.commits()] == [(20, 2), (10, 1)]
    assert any("i00000002.json is damaged" in problem for problem in run.catalog.overview().problems)


def test_a_fence_under_another_ones_name_is_damage(tier):
    run = make_run(tier, [10])
    tier.create(fence_name(7), tier.read(fence_name(1)))
    assert list(run.catalog.fences()) == [1]
    assert "it is the fence of incarnation 1" in run.catalog.overview().bad_fences[7]


def test_stray_names_are_no_fences_and_no_commits(tier):
    run = make_run(tier, [10])
    for name in ("fences/i00000009.json.tmp", "fences/i000000009.json", "fences/i٠٠٠٠٠٠٠٩.json", "commits/x.json"):
        tier.create(name, b"?")
    assert run.catalog.newest_incarnation() == 1
    assert [c.step for c in run.catalog.overview().commits] == [10]


def test_a_fence_of_a_newer_format_is_refused(tier):
    run = make_run(tier, [10])
    tier.create(fence_name(2), newer(tier.read(fence_name(1))))
    for call in (run.catalog.newest_good, run.catalog.overview):
        with pytest.raises(VersionError):
            call()


def test_a_newer_minor_version_may_have_more_fields(tier):
    run = make_run(tier, [10])
    body = tier.read(fence_name(1)).partition(b'"body":')[2].removesuffix(b"}\n").replace(b"{", b'{"new":[1],', 1)
    digest = xxhash.xxh3_64_hexdigest(b"1.7 fence " + body).encode()
    overwrite(tier, fence_name(1), b'{"ckptrt":"1.7","kind":"fence","xxh3":"%s","body":%s}\n' % (digest, body))
    assert not run.catalog.overview().problems
    assert run.catalog.newest_fence().owner == OWNER


def test_a_flipped_version_digit_is_damage_not_a_newer_format(tier):
    run = make_run(tier, [10])
    data = tier.read(fence_name(1))
    overwrite(tier, fence_name(1), data.replace(b'"ckptrt":"1.0"', b'"ckptrt":"3.0"'))
    assert "damaged" in run.catalog.overview().bad_fences[1]
    assert run.catalog.newest_good().commit.step == 10


# --- commits


def test_commits_are_told_apart_by_state(tier):
    run = make_run(tier, [10, 20])
    run.fence(2, (20, 1))
    run.zombie_save(30, 1)
    run.save(40, 2)
    overwrite(tier, commit_name(CommitId(20, 1)), b"{}")
    states = {c.id: c.state for c in run.catalog.overview().commits}
    assert states == {(40, 2): "committed", (30, 1): "off-path", (20, 1): "damaged", (10, 1): "committed"}
    assert [c.step for c in run.catalog.commits()] == [40, 10]


def test_a_commit_under_another_steps_name_is_damage(tier):
    run = make_run(tier, [10])
    tier.create(commit_name(CommitId(20, 1)), tier.read(commit_name(CommitId(10, 1))))
    selection = run.catalog.newest_good()
    assert selection.commit.step == 10
    assert "it is the commit of step 10" in selection.skipped[0].reason


HOSTILE = [
    "../../etc",
    "/etc",
    "",
    ".",
    "s000000020.i00000001.0a/..",
    "s000000010.i00000001.0a",
    "s000000020.i00000001.0A",
]


@pytest.mark.parametrize("data", HOSTILE)
def test_a_commit_that_points_out_of_its_own_data_folder_is_refused(tier, data):
    run = make_run(tier, [10])
    reference = ManifestRef(size_bytes=9, xxh3="0" * 32, head_bytes=9, head_xxh3="0" * 32)
    fields: dict[str, Any] = {
        "world_size": 1,
        "manifest": reference,
        "size_bytes": 0,
        "num_tensors": 0,
        "created_at": "",
        "made_by": "",
    }
    good = "s000000020.i00000001.0a"
    for step, record in (
        (20, CommitRecord(step=20, incarnation=1, data=data, **fields)),
        (30, CommitRecord(step=30, incarnation=1, data=good.replace("20", "30"), references=(data or "x",), **fields)),
    ):
        name = commit_name(CommitId(step, 1))
        tier.create(name, seal(record))
        if record.references != ("s000000010.i00000001.0a",):  # the one name in the list that is a folder of data/
            with pytest.raises(CorruptError, match="can't be"):
                run.catalog.open_checkpoint(CommitId(step, 1))
    assert run.catalog.newest_good().commit.step == 10


def test_the_newest_good_one_is_whole_and_the_skipped_ones_say_why(tier):
    run = make_run(tier, [10, 20, 30, 40, 50, 60])
    folders = {step: f"{DATA}s{step:09d}.i00000001.0a/" for step in (20, 30, 40, 50, 60)}
    tier.delete(folders[20] + "r00001.safetensors")
    overwrite(tier, folders[30] + "r00000.safetensors", b"short")
    manifest = tier.read(folders[40] + "manifest.json.zst")
    overwrite(tier, folders[40] + "manifest.json.zst", flip_bit(manifest, 200))
    overwrite(tier, folders[50] + "manifest.json.zst", tier.read(folders[50] + "manifest.json.zst")[:-1])
    tier.delete(folders[60] + "manifest.json.zst")
    selection = run.catalog.newest_good()
    assert selection.commit.step == 10
    reasons = {skip.step: skip.reason for skip in selection.skipped}
    assert list(reasons) == [60, 50, 40, 30, 20]
    assert "manifest.json.zst" in reasons[60]
    assert "bytes instead of" in reasons[50]
    assert "digest" in reasons[40]
    assert "(rank 0) has 5 bytes instead of" in reasons[30]
    assert "r00001.safetensors (rank 1) is missing" in reasons[20]
    assert run.catalog.newest_good(max_step=9).commit is None


def test_the_newest_good_one_can_be_asked_for_below_a_step_and_besides_some(tier):
    run = make_run(tier, [10, 20, 30])
    assert run.catalog.newest_good(max_step=29).commit.step == 20
    assert run.catalog.newest_good(besides=[CommitId(30, 1)]).commit.step == 20
    assert run.catalog.newest_good().skipped == ()


def test_a_commit_of_a_newer_format_is_not_passed_over(tier):
    run = make_run(tier, [10, 20])
    overwrite(tier, commit_name(CommitId(20, 1)), newer(tier.read(commit_name(CommitId(20, 1)))))
    with pytest.raises(VersionError):
        run.catalog.newest_good()
    assert [c.state for c in run.catalog.overview().commits] == ["too-new", "committed"]


def test_a_step_that_is_not_there_is_named_with_those_that_are(tier):
    run = make_run(tier, [10, 20])
    run.fence(2, (10, 1))
    assert run.catalog.find(10) == (10, 1)
    with pytest.raises(NotFoundError, match="incarnation 1 has one, but newer") as info:
        run.catalog.find(20)
    assert "there are steps 10" in info.value.hint


def test_a_zombies_commit_between_the_two_listings_is_not_taken(tier):
    """Fence and late commit come while a reader is listing: what it takes must have been there before the fence."""
    run = make_run(tier, [10])
    plain_list = tier.list

    def listing(prefix):
        found = plain_list(prefix)
        tier.list = plain_list  # only the first listing is followed by what happens here
        run.fence(2, (10, 1))
        run.zombie_save(20, 1)
        return found

    tier.list = listing
    assert [c.id for c in run.catalog.commits()] == [(10, 1)]
    assert run.catalog.tier.read(commit_name(CommitId(20, 1)))


# --- a checkpoint's parts


def test_a_rank_reads_its_own_section_only(tier):
    run = make_run(tier, [10], world_size=3)
    checkpoint = run.catalog.open_checkpoint(CommitId(10, 1))
    head = checkpoint.head()
    reads: list[tuple[str, int, int | None]] = []
    plain_read = tier.read

    def reading(name, start=0, size_bytes=None):
        reads.append((name, start, size_bytes))
        return plain_read(name, start, size_bytes)

    tier.read = reading
    receipt = checkpoint.receipt(1)
    section = head.sections[1]
    assert (receipt.rank, receipt.shard.name) == (1, section.shard)
    assert reads == [
        (checkpoint.manifest_name, checkpoint.record.manifest.head_bytes + section.start, section.size_bytes)
    ]
    assert [r.rank for r in checkpoint.receipts()] == [0, 1, 2]
    assert len(reads) == 2
    with pytest.raises(UsageError, match="written by 3 ranks"):
        checkpoint.receipt(3)


def test_damage_to_one_section_leaves_the_others_readable(tier):
    run = make_run(tier, [10])
    checkpoint = run.catalog.open_checkpoint(CommitId(10, 1))
    section = checkpoint.head().sections[1]
    at = checkpoint.record.manifest.head_bytes + section.start + 9
    overwrite(tier, checkpoint.manifest_name, flip_bit(tier.read(checkpoint.manifest_name), at * 8))
    assert checkpoint.receipt(0).rank == 0
    with pytest.raises(CorruptError, match="section of rank 1"):
        checkpoint.receipt(1)


# --- who holds a run


def test_a_run_can_be_held_once_in_a_process(tmp_path):
    with hold_run(str(tmp_path / "run")) as hold:
        assert hold.is_locked
        with pytest.raises(BusyError, match=f"this very process, pid {os.getpid()}"):
            hold_run(f"file://{tmp_path}/run")
        # The refused attempt must not have cost the lock.
        assert _try_to_hold(tmp_path / "run") == 11
    assert _try_to_hold(tmp_path / "run") == 0


def _try_to_hold(path: Path) -> int:
    code = "import sys; from ckptrt.storage.runlock import hold_run; from ckptrt.errors import BusyError\n"
    code += "try: hold_run(sys.argv[1])\nexcept BusyError as e: print(e); sys.exit(e.exit_code)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 11), done.stderr
    assert done.returncode == 0 or f"pid {os.getpid()} of " in done.stdout
    return done.returncode


@pytest.mark.processes
def test_the_hold_dies_with_its_process_and_names_it(tmp_path):
    code = "import sys; from ckptrt.storage.runlock import hold_run\n"
    code += "hold = hold_run(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=rf"another job, pid {other.pid} of .* on .* since 20") as info:
            hold_run(str(tmp_path))
        assert info.value.exit_code == 11
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == other.pid
        other.kill()
        other.wait()
        hold_run(str(tmp_path)).release()


@pytest.mark.processes
def test_a_forked_child_neither_has_nor_drops_the_hold(tmp_path):
    hold = hold_run(str(tmp_path))
    child = multiprocessing.get_context("fork").Process(target=_child, args=(hold, str(tmp_path)))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert _try_to_hold(tmp_path) == 11
    hold.release()


def _child(hold, path: str) -> None:
    assert not hold.is_locked
    hold.release()
    with pytest.raises(BusyError, match=f"another job, pid {os.getppid()}"):
        hold_run(path)


def test_an_object_store_is_not_locked_but_fenced():
    with hold_run("s3://bucket/run") as hold, hold_run("memory://bucket/run"):
        assert not hold.is_locked


def test_a_directory_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AccessError, match=r"file/run/run\.lock"):
        hold_run(str(tmp_path / "file" / "run"))


def test_fences_are_small_enough_for_thousands_of_restarts(tier):
    run = FakeRun(tier=tier)
    for incarnation in range(1, 200):
        run.fence(incarnation, (0, incarnation - 1) if incarnation > 1 else None)
    assert next(iter(run.catalog.fences())) == 199
    assert isinstance(run.catalog.newest_fence(), FenceRecord)
    assert len(run.catalog.path().segments) == 199
