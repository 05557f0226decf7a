"""Copies between places: equal, verified, and going on after being killed anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from flips import names
from support_runs import FakeRun, flip_bit, make_run, overwrite
from support_s3 import S3Server, s3_server

from ckptrt.errors import CorruptError, Error, MismatchError, NoSpaceError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.cli import cli
from ckptrt.storage.copy import copy, plan_copy
from ckptrt.storage.layout import CommitId, commit_name
from ckptrt.storage.tiers import open_tier
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import verify_commit

__all__ = ["s3_server"]  # a fixture


def history(tier: Tier, columns: int = 16) -> FakeRun:
    """Steps 10, 20 and, after a restart and borrowing from 10, step 30; a zombie's 25 is off the path."""
    run = make_run(tier, [10, 20], columns=columns)
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.fence(2, (20, 1))
    run.zombie_save(25, 1)
    run.commit(30, 2, {0: run.write_rank(30, 2, 0, borrow=old), 1: run.write_rank(30, 2, 1)})
    return run


def copy_all(run: FakeRun, target: Tier, steps: list[int] | None = None) -> None:
    commits = [c for c in run.catalog.path().commits if steps is None or c.step in steps]
    copy(run.catalog, target, plan_copy(run.catalog, target, commits))


def contents(tier: Tier) -> dict[str, bytes]:
    return {name: tier.read(name) for name in names(tier)}  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "local", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "memory":
        return MemoryTier()
    if request.param == "local":
        return LocalTier(str(tmp_path / "target"))
    server: S3Server = request.getfixturevalue("s3_server")
    return open_tier(f"{server.url}/copy-{tmp_path.name}", **server.options)


def test_a_copy_is_a_replica_with_the_same_history(target: Tier, tmp_path: Path) -> None:
    run = history(LocalTier(str(tmp_path / "source")))
    before = contents(run.tier)
    copy_all(run, target)
    assert contents(run.tier) == before
    replica = Catalog(target)
    assert replica.path().commits == run.catalog.path().commits
    for commit in replica.path().commits:
        assert verify_commit(replica, commit, read_data=True).is_ok
    wanted = {name: data for name, data in before.items() if "s000000025" not in name and not name.endswith(".lock")}
    assert contents(target) == wanted
    assert plan_copy(run.catalog, target, list(replica.path().commits)).commits == ()


def test_one_step_brings_the_files_that_it_borrows(target: Tier) -> None:
    run = history(MemoryTier())
    copy_all(run, target, [30])
    replica = Catalog(target)
    assert [commit.step for commit in replica.path().commits] == [30]
    assert verify_commit(replica, CommitId(30, 2), read_data=True).is_ok


def test_a_newer_step_may_follow_and_an_older_one_does_not_become_the_newest() -> None:
    run, target = history(MemoryTier()), MemoryTier()
    for step in (20, 30, 10):
        copy_all(run, target, [step])
        newest = Catalog(target).newest_good().commit
        assert newest is not None and newest.step == max(20, 30 if step != 20 else 0)


def test_a_copy_killed_at_any_call_shows_nothing_partial_and_is_gone_on_with() -> None:
    run = history(MemoryTier())
    whole = MemoryTier()
    copy_all(run, whole)
    for method in ("create", "write", "settle"):
        for number in range(40):
            inner = MemoryTier()
            broken = FaultyTier(inner, [Fault(method=method, first=number + 1, times=None, error=NoSpaceError)])
            try:
                copy_all(run, broken)
            except Error:
                pass
            else:
                break  # there are no more calls to fail
            replica = Catalog(inner)
            for commit in replica.commit_ids():
                assert verify_commit(replica, commit, read_data=True).is_ok
            copy_all(run, inner)
            assert contents(inner) == contents(whole)
        assert number > 2


def newest(tier: Tier) -> int:
    commit = Catalog(tier).newest_good().commit
    return commit.step if commit else 0


def test_the_newest_checkpoint_of_the_target_never_goes_back_at_any_call() -> None:
    """The target has a step that the source has cut off since; a newer one takes its place in one instant."""
    run = make_run(MemoryTier(), [10, 20, 25])
    old = MemoryTier()
    copy_all(run, old)
    run.fence(2, (20, 1))
    run.fence(3, (20, 1))
    run.save(30, 3)
    run.fence(4, (30, 3))
    run.save(40, 4)
    for number in range(40):
        inner = MemoryTier()
        for name, data in contents(old).items():
            inner.create(name, data)
        copy_all(run, inner, [10])
        assert newest(inner) == 25, "an older step changes nothing"
        broken = FaultyTier(inner, [Fault(method="create", first=number + 1, times=None, error=NoSpaceError)])
        try:
            copy_all(run, broken, [40])
        except Error:
            assert newest(inner) in (25, 40)
            copy_all(run, inner, [40])
        else:
            break
        assert newest(inner) == 40
        assert Catalog(inner).path().commits == (CommitId(40, 4), CommitId(20, 1), CommitId(10, 1))
    assert number > 4


def test_a_longer_file_of_the_same_beginning_is_not_taken_for_a_copy() -> None:
    run, target = history(MemoryTier()), MemoryTier()
    copy_all(run, target, [20])
    target.delete(commit_name(CommitId(20, 1)))
    (name,) = [name for name in names(target) if name.endswith("r00001.safetensors")]
    overwrite(target, name, target.read(name) + b"more")
    with pytest.raises(MismatchError, match="other contents"):
        copy_all(run, target, [20])


def test_a_target_in_which_a_job_runs_is_refused(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    history(LocalTier(source))
    holder = "import sys, time\nfrom ckptrt.storage.runlock import hold_run\n"
    holder += f"hold = hold_run({target!r})\nprint('held', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdin is not None
        assert job.stdout.readline() == "held\n"
        result = CliRunner().invoke(cli, ["cp", source, target])
        job.stdin.close()
    assert result.exit_code == 11, result.output
    assert not Path(target, "commits").exists()


def test_a_damaged_source_is_refused_and_nothing_of_it_is_seen() -> None:
    run = history(MemoryTier())
    for name in names(run.tier):
        if "s000000020" not in name or name.endswith(("receipt.json", ".lock")):
            continue
        target, whole = MemoryTier(), run.tier.read(name)
        overwrite(run.tier, name, flip_bit(whole, 8 * len(whole) // 2))
        with pytest.raises(CorruptError, match="s000000020"):
            copy_all(run, target, [20])
        assert not Catalog(target).commit_ids()
        overwrite(run.tier, name, whole)


def test_what_a_killed_copy_left_damaged_is_not_taken_for_a_copy() -> None:
    run, target = history(MemoryTier()), MemoryTier()
    copy_all(run, target, [20])
    target.delete(commit_name(CommitId(20, 1)))
    (name,) = [name for name in names(target) if name.endswith("r00001.safetensors")]
    overwrite(target, name, flip_bit(target.read(name), 50_00))
    with pytest.raises(MismatchError, match="other contents"):
        copy_all(run, target, [20])
    assert not Catalog(target).commit_ids()


def test_a_target_of_another_run_or_with_a_history_of_its_own_is_refused() -> None:
    run = history(MemoryTier())
    other = MemoryTier()
    Catalog(other).create_run("another")
    with pytest.raises(MismatchError, match="another run"):
        copy_all(run, other)
    forked = MemoryTier()
    copy_all(run, forked, [20])
    fork = FakeRun(tier=forked)
    fork.fence(3, (20, 1))
    with pytest.raises(MismatchError, match="gone its own way"):
        copy_all(run, forked)


def test_the_command_line_copies_the_newest_good_one(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    history(LocalTier(source))

    def run_cli(*args: str) -> str:
        result = CliRunner().invoke(cli, ["cp", *args])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run_cli(source, target, "-n").endswith("dry run    nothing was copied\n")
    assert not Path(target, "commits").exists()
    assert run_cli(source, target).startswith(f"copied     step 30 to {target}: 3 files")
    assert run_cli(source, target) == "there      step 30 already\n"
    assert '"step": 10' in run_cli(source, target, "--all", "--json")
    assert [c.step for c in Catalog(LocalTier(target)).path().commits] == [30, 20, 10]
    assert CliRunner().invoke(cli, ["cp", f"{source}@10", target, "--all"]).exit_code == 2
