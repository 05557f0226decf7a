"""What prune keeps, what it removes, and that it may be killed at any point."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_runs import FakeRun, make_run, overwrite

from ckptrt.errors import StorageError, TransientError, UsageError, VersionError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.layout import CommitId, commit_name
from ckptrt.storage.prune import PrunePlan, PrunePolicy, execute, plan_prune, prune_committed
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiers.faulty import FaultyTier
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier

LATER_S = 1e6


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def plan(run: FakeRun, keep_last: int, grace_s: float = 0.0, in_s: float = LATER_S, **fields) -> PrunePlan:
    fields.setdefault("removed_grace_s", grace_s)
    policy = PrunePolicy(keep=Keep(last=keep_last), grace_s=grace_s, **fields)
    return plan_prune(run.catalog, policy, time.time() + in_s)


def steps(removals) -> list[int]:
    return [removal.id.step for removal in removals]


def folders(run: FakeRun) -> list[str]:
    return [entry.name for entry in run.tier.list("data/")]


def folder(step: int, incarnation: int = 1, nonce: str = "0a") -> str:
    return f"data/s{step:09d}.i{incarnation:08d}.{nonce}/"


def test_the_last_few_stay_and_the_rest_goes_with_its_data(tier):
    run = make_run(tier, [10, 20, 30, 40])
    made = plan(run, 2)
    assert [(kept.id.step, kept.reason) for kept in made.kept] == [(40, "the newest good one"), (30, "last 2")]
    assert steps(made.commits) == steps(made.folders) == [20, 10]
    assert made.freed_bytes == sum(e.size_bytes for s in (10, 20) for e in tier.list(folder(s)))
    result = execute(run.catalog, made)
    assert result.freed_bytes == made.freed_bytes
    assert folders(run) == [folder(30), folder(40)]
    assert run.catalog.newest_good().commit.step == 40
    assert plan(run, 2).is_empty


def test_planning_changes_nothing(tmp_path):
    run = make_run(LocalTier(str(tmp_path)), [10, 20, 30])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    plan(run, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_keeping_none_is_refused():
    with pytest.raises(UsageError):
        PrunePolicy(keep=Keep(last=0))


def test_damaged_ones_among_the_newest_do_not_count_and_stay(tier):
    run = make_run(tier, [10, 20, 30, 40, 50])
    overwrite(tier, commit_name(CommitId(50, 1)), b"{}")
    tier.delete(folder(40) + "r00000.safetensors")
    made = plan(run, 2)
    assert {kept.id.step: kept.reason.partition(":")[0] for kept in made.kept} == {
        50: "damaged, doesn't count", 40: "damaged, doesn't count", 30: "the newest good one", 20: "last 2",
    }  # fmt: skip
    execute(run.catalog, made)
    assert folders(run) == [folder(s) for s in (20, 30, 40, 50)]


def test_with_nothing_good_nothing_on_the_path_goes(tier):
    run = make_run(tier, [10, 20])
    for step in (10, 20):
        tier.delete(folder(step) + "r00000.safetensors")
    made = plan(run, 1)
    assert made.is_empty
    assert len(made.kept) == 2


def test_young_data_wait_and_their_commits_do_not(tier):
    run = make_run(tier, [10, 20])
    made = plan(run, 1, grace_s=60, in_s=30)
    assert steps(made.commits) == [10]
    assert not made.folders
    assert steps(made.waiting) == [10]
    execute(run.catalog, made)
    later = plan(run, 1, grace_s=60, in_s=90)
    assert steps(later.folders) == [10]
    assert later.folders[0].reason == "never committed, and a later step was"


def test_no_grace_is_none_even_if_the_stores_clock_is_ahead(tier):
    run = make_run(tier, [10, 20])
    assert steps(plan(run, 1, in_s=-500).folders) == [10]


def test_data_in_the_making_are_untouchable_however_old(tier):
    run = make_run(tier, [10])
    run.write_data(20)
    run.write_data(10, nonce="0b")
    made = plan(run, 1)
    assert [(r.name, r.reason) for r in made.folders] == [
        (folder(10, nonce="0b"), "another attempt at this checkpoint was committed")
    ]
    run.save(30)
    assert steps(plan(run, 2).folders) == [20, 10]


def test_uncommitted_data_of_older_incarnations_go_after_the_grace_time(tier):
    run = make_run(tier, [10])
    run.write_data(20)
    run.fence(2, (10, 1))
    assert steps(plan(run, 1, grace_s=60, in_s=30).waiting) == [20]
    assert steps(plan(run, 1, grace_s=60, in_s=90).folders) == [20]


def test_a_folder_without_a_visible_file_is_removed_with_what_a_crash_left_in_it(tmp_path):
    run = make_run(LocalTier(str(tmp_path)), [10])
    left = tmp_path / folder(5) / ".tmp-0123"
    left.parent.mkdir()
    left.write_bytes(b"torn")
    execute(run.catalog, plan(run, 1, grace_s=60, in_s=0))
    assert not left.parent.exists()


def test_branches_go_after_the_grace_time(tier):
    run = make_run(tier, [10, 20])
    run.fence(2, (10, 1))
    run.zombie_save(30, 1)
    run.save(40, 2)
    young = plan(run, 5, grace_s=60, in_s=30)
    assert young.is_empty
    assert {kept.id: kept.reason for kept in young.kept}[
        CommitId(20, 1)
    ] == "off the path, but younger than the grace time"
    made = plan(run, 5, grace_s=60, in_s=90)
    assert [r.id for r in made.commits] == [r.id for r in made.folders] == [(30, 1), (20, 1)]
    execute(run.catalog, made)
    assert [c.id for c in run.catalog.overview().commits] == [(40, 2), (10, 1)]


def test_a_running_job_leaves_branches_alone_until_it_has_passed_them(tier):
    run = make_run(tier, [10, 20])
    run.fence(2)  # from scratch, by mistake perhaps
    run.save(5, 2)
    run.fence(3, (5, 2))
    run.save(6, 3)
    run.fence(4, (5, 2))
    run.save(6, 4)
    run.zombie_save(7, 2)
    execute(run.catalog, plan(run, 1, overtaken_only=True))
    assert [c.id for c in run.catalog.overview().commits] == [(20, 1), (10, 1), (7, 2), (6, 4), (6, 3)]
    run.save(8, 4)
    execute(run.catalog, plan(run, 1, overtaken_only=True))
    assert [c.id for c in run.catalog.overview().commits] == [(20, 1), (10, 1), (8, 4), (6, 3)]
    execute(run.catalog, plan(run, 1))
    assert [c.id for c in run.catalog.overview().commits] == [(8, 4)]


def test_folders_that_kept_commits_refer_to_stay(tier):
    run = make_run(tier, [10, 20])
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.commit(30, 1, {0: run.write_rank(30, 1, 0, borrow=old), 1: run.write_rank(30, 1, 1)})
    made = plan(run, 1)
    assert steps(made.commits) == [20, 10]
    assert steps(made.folders) == [20]
    execute(run.catalog, made)
    assert run.catalog.newest_good().commit.step == 30
    run.save(40)
    execute(run.catalog, plan(run, 1))
    assert folders(run) == [folder(40)]


def test_foreign_names_are_left_alone(tier):
    run = make_run(tier, [10, 20])
    tier.create("data/notes.txt", b"mine")
    tier.create("data/old-experiments/x", b"mine")
    execute(run.catalog, plan(run, 1))
    assert folders(run) == ["data/notes.txt", "data/old-experiments/", folder(20)]


def test_records_of_a_newer_format_stop_the_plan(tier):
    run = make_run(tier, [10, 20])
    data = tier.read(commit_name(CommitId(20, 1)))
    overwrite(tier, commit_name(CommitId(20, 1)), data.replace(b'"ckptrt":"1.0","kind"', b'"ckptrt":"2.0","sort"'))
    with pytest.raises(VersionError):
        plan(run, 1)


def test_a_plan_is_not_executed_under_a_newer_incarnation(tier):
    run = make_run(tier, [10, 20])
    made = plan(run, 1)
    run.fence(2, (10, 1))
    with pytest.raises(StorageError, match="taken over"):
        execute(run.catalog, made)
    assert len(folders(run)) == 2


def test_a_last_commit_that_comes_while_planning_keeps_its_data(tier):
    """Data listed, then commits; then the last commit of incarnation 1, and fence 2 that goes on from it."""
    run = make_run(tier, [10])
    receipts = run.write_data(20)
    plain_list = tier.list

    def listing(prefix):
        found = plain_list(prefix)
        if prefix == "commits/":
            tier.list = plain_list
            run.commit(20, 1, receipts)
            run.fence(2, (20, 1))
        return found

    tier.list = listing
    execute(run.catalog, plan(run, 1))
    assert run.catalog.newest_good().commit.id == (20, 1)


def test_what_can_not_be_deleted_is_reported_and_its_data_stay(tier):
    run = make_run(tier, [10, 20, 30])
    plain_delete = tier.delete

    def delete(name):
        if "s000000010" in name:
            raise TransientError("503")
        plain_delete(name)

    tier.delete = delete
    result = execute(run.catalog, plan(run, 1))
    assert [str(error) for error in result.errors] == ["503"]
    assert result.deleted == [commit_name(CommitId(20, 1))]
    assert len(folders(run)) == 3
    with pytest.raises(TransientError):
        prune_committed(run.catalog, Keep(last=1))
    tier.delete = plain_delete
    execute(run.catalog, plan(run, 1))
    assert folders(run) == [folder(30)]


def test_a_running_job_frees_what_it_no_longer_keeps_at_once(tier):
    run = make_run(tier, [10, 20, 30])
    reads: list[str] = []
    plain_read = tier.read

    def read(name, start=0, size_bytes=None):
        reads.append(name)
        return plain_read(name, start, size_bytes)

    tier.read = read
    assert prune_committed(run.catalog, Keep(last=2)).deleted == [commit_name(CommitId(10, 1)), folder(10)]
    assert {name.partition("/")[2][:10] for name in reads} == {"s000000020", "s000000030"}


class Killed(Exception):
    """The process died here."""


class KillingTier(MemoryTier):
    """Dies before the n-th deletion; a folder dies half-deleted."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def delete(self, name):
        self._count()
        super().delete(name)

    def delete_prefix(self, prefix):
        self._count()
        for entry in self.list(prefix):
            self._count()
            super().delete(entry.name)


def small_history(tier: MemoryTier) -> FakeRun:
    run = FakeRun(tier=tier, world_size=1, columns=1)
    run.fence(1)
    run.save(10)
    run.save(20)
    run.write_data(30)
    run.fence(2, (10, 1))
    run.save(20, 2)
    old = run.catalog.open_checkpoint(CommitId(20, 2)).receipt(0)
    run.commit(30, 2, {0: run.write_rank(30, 2, 0, borrow=old)})
    run.save(40, 2)
    return run


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_prune_killed_at_any_deletion_leaves_a_sound_run_and_can_be_repeated(keep_last):
    whole = small_history(KillingTier(1000))
    execute(whole.catalog, plan(whole, keep_last))
    wanted = sorted(whole.tier._bucket.objects)
    num_deletions = 1000 - whole.tier.left
    assert num_deletions > 10
    for count in range(num_deletions):
        run = small_history(KillingTier(count))
        with pytest.raises(Killed):
            execute(run.catalog, plan(run, keep_last))
        assert run.catalog.newest_good().commit.id == (40, 2)
        for commit in run.catalog.overview().valid:  # whatever is still listed is whole
            assert run.catalog.examine(commit.id).state == "committed"
        run.tier.left = 1000
        execute(run.catalog, plan(run, keep_last))
        assert sorted(run.tier._bucket.objects) == wanted


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["save", "zombie", "torn", "damage"]), st.integers(0, 3)),
            st.tuples(st.just("fence"), st.integers(0, 3)),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
    st.booleans(),
)
def test_after_any_history_prune_leaves_the_good_ones_that_it_promised(happened, keep_last, overtaken_only):
    run = FakeRun(tier=MemoryTier(), world_size=1, columns=1)
    run.fence(1)
    incarnation, step = 1, 0
    for what, number in happened:
        step += 10
        path = run.catalog.path().commits
        if what == "save":
            run.save(step, incarnation)
        elif what == "zombie":
            run.zombie_save(step, max(1, incarnation - number))
        elif what == "torn":
            run.write_data(step, max(1, incarnation - number))
        elif what == "damage" and path:
            run.tier.delete(folder(*path[min(number, len(path) - 1)]) + "r00000.safetensors")
        elif what == "fence":
            incarnation += 1
            run.fence(incarnation, path[min(number, len(path) - 1)] if path else None)

    def good() -> list[CommitId]:
        return [c for c in run.catalog.path().commits if run.catalog.examine(c).state == "committed"]

    before = good()
    execute(run.catalog, plan(run, keep_last, overtaken_only=overtaken_only))
    assert good() == before[:keep_last]
    again = plan(run, keep_last, overtaken_only=overtaken_only)
    assert again.is_empty
    # Each folder that is left belongs to a commit that is left, or may still be in the making.
    ids = set(Catalog(run.tier).commit_ids())
    for name in folders(run):
        step, owner = int(name[6:15]), int(name[17:25])
        assert (step, owner) in ids or owner == incarnation


def test_records_are_durably_gone_before_data_go_even_if_another_prune_removed_them(tier):
    """A prune that was killed leaves a record that is gone and could come back: its data must not go before."""
    run = make_run(FaultyTier(tier), [10, 20])
    tier.delete(commit_name(CommitId(10, 1)))
    made = plan(run, 1)
    assert not made.commits and steps(made.folders) == [10]
    run.tier.calls.clear()
    execute(run.catalog, made)
    methods = [call for call in run.tier.calls if call[0] in ("settle", "delete_prefix")]
    assert methods == [("settle", "commits/"), ("delete_prefix", folder(10))]


def test_what_interrupted_writes_left_goes_too_but_not_where_data_are_in_the_making(tmp_path):
    run = make_run(LocalTier(str(tmp_path)), [10, 20])
    run.write_data(30)
    left = [f"{place}.tmp-0123" for place in ("", "fences/", "commits/", folder(20), folder(30))]
    for name in left:
        (tmp_path / name).write_bytes(b"12345")
    assert not plan(run, 2, in_s=30.0).unfinished  # too young to be nobody's
    assert not plan(run, 2, overtaken_only=True).unfinished  # a running job has no time for this
    made = plan(run, 2)
    assert [entry.name for entry in made.unfinished] == left[:-1] and made.freed_bytes == 20 and not made.is_empty
    result = execute(run.catalog, made)
    assert result.deleted == left[:-1][:1] + sorted(left[1:-1]) and result.freed_bytes == 20
    assert not [name for name in left[:-1] if (tmp_path / name).exists()] and (tmp_path / left[-1]).exists()
    assert plan(run, 2).is_empty


def test_a_pruner_that_slept_through_a_takeover_takes_nothing_from_the_new_incarnation(tier, monkeypatch):
    run = make_run(tier, [10, 20, 30])
    made = plan(run, 1)
    before = {name: tier.read(name) for name in map(commit_name, run.catalog.commit_ids())}
    real = tier.delete

    def sleep_and_delete(name: str) -> None:  # between the look at the fences and the first deletion
        monkeypatch.setattr(tier, "delete", real)
        run.fence(2, parent=CommitId(10, 1))
        real(name)

    monkeypatch.setattr(tier, "delete", sleep_and_delete)
    result = execute(run.catalog, made)
    assert "taken over" in result.errors[0].what and not result.deleted
    assert {name: tier.read(name) for name in map(commit_name, run.catalog.commit_ids())} == before
    assert folders(run) == [folder(10), folder(20), folder(30)]
    assert run.catalog.newest_good().commit.step == 10
