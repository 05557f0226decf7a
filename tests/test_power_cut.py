"""A real power cut: a file system on a loop device is shut down without flushing its journal, at random calls of a job.

Needs root and loop mounts. It shows on real file systems what test_crash.py shows on a model that is looser than they.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support_crash_explore import play
from support_crash_job import Job
from support_crash_judge import judge, ledger_of
from support_crash_log import WatchedFs
from support_crash_scenarios import scenario_named
from support_runs import make_run

from ckptrt.errors import Error
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.copy import copy, plan_copy
from ckptrt.storage.layout import CommitId
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import verify_commit

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2
_SIZES = {"ext4": 64 << 20, "xfs": 320 << 20}
_CUTS = {"save": 14, "prune after commits": 20}

pytestmark = pytest.mark.slow


class Disk:
    """A file system in a file, mounted at `place`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.image, self.place = folder / "image", folder / "disk"
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(_SIZES[kind])
        run(f"mkfs.{kind}", "-q", str(self.image))
        self.mount()

    def mount(self) -> None:
        run("mount", "-o", "loop", str(self.image), str(self.place))

    def unmount(self) -> None:
        run("umount", str(self.place))

    def cut(self) -> None:
        """What was not synced by now is lost, and nothing can be written any more."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


@contextmanager
def disk(kind: str, folder: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system and shut it down")
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} isn't installed")
    try:
        made = Disk(kind, folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"loop mounts of {kind} are refused here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.unmount()


@pytest.mark.parametrize("kind", sorted(_SIZES))
def test_what_was_reported_is_there_after_the_power_came_back(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "ckptrt")
    rng = random.Random(f"power {kind}")
    with disk(kind, tmp_path) as made:
        for name, cuts in _CUTS.items():
            total = calls_of(name, f"{made.place}/dry-{name}")
            for number, at in enumerate(sorted(rng.sample(range(20, total), cuts))):
                base = f"{made.place}/{name}-{number}"
                log = cut_at(made, base, name, at)
                judge(f"{base}/runs/a", ledger_of(log))


def calls_of(name: str, base: str) -> int:
    fs = WatchedFs(base)
    play(scenario_named(name), Job(fs), 0)
    return fs.num_calls


def cut_at(made: Disk, base: str, name: str, at: int) -> list:
    """Play a scenario until the power goes at its call `at`, and mount the disk again. Returns what was reported."""
    fs = WatchedFs(base, syncs=True)

    def cut(call: str, number: int) -> None:
        if number == at:
            made.cut()

    fs.on_call = cut
    os.sync()
    play(scenario_named(name), Job(fs, lenient=True), 0)
    assert fs.num_calls >= at
    made.unmount()
    made.mount()
    return fs.log


@pytest.mark.parametrize("kind", sorted(_SIZES))
def test_what_was_flushed_is_there_after_the_power_came_back(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "ckptrt")
    rng = random.Random(f"flush {kind}")
    near = history()
    with disk(kind, tmp_path) as made:
        total = flush_until(made, near, f"{made.place}/dry", None)[1]
        for number, at in enumerate(sorted(rng.sample(range(10, total), 16))):
            base = f"{made.place}/{number}"
            told, _ = flush_until(made, near, base, at)
            far = Catalog(LocalTier(f"{base}/far"))
            there = far.path().commits if told else ()
            assert set(told) <= set(there)
            assert all(verify_commit(far, commit, read_data=True).is_ok for commit in there)
            # The next flush goes on from whatever is there.
            copy(near, far.tier, plan_copy(near, far.tier, list(near.path().commits)))
            assert far.path().commits == near.path().commits
            assert all(verify_commit(far, commit, read_data=True).is_ok for commit in near.path().commits)


def history() -> Catalog:
    """A run of two incarnations whose last checkpoint borrows from its first."""
    run = make_run(MemoryTier(), [10, 20], columns=3000)
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.fence(2, (20, 1))
    run.commit(30, 2, {0: run.write_rank(30, 2, 0, borrow=old), 1: run.write_rank(30, 2, 1)})
    return run.catalog


def flush_until(made: Disk, near: Catalog, base: str, at: int | None) -> tuple[list[CommitId], int]:
    """Flush, the newest first, until the power goes at call `at`; what was told to have arrived, and all calls."""
    fs = WatchedFs(base, syncs=True)
    os.mkdir(base)
    os.sync()

    def cut(call: str, number: int) -> None:
        if number == at:
            made.cut()

    fs.on_call = cut
    far = LocalTier(f"{base}/far", fs=fs)
    told: list[CommitId] = []
    with suppress(Error):
        for commit in near.path().commits:
            copy(near, far, plan_copy(near, far, [commit]), num_parallel=1)
            told.append(commit)
    fs.reap()
    if at is not None:
        made.unmount()
        made.mount()
    return told, fs.num_calls


def test_a_file_that_was_not_synced_is_lost(tmp_path: Path) -> None:
    """The cut is a real one: it loses what a mere unmount would have kept."""
    with disk("ext4", tmp_path) as made:
        os.sync()
        Path(made.place, "unsynced").write_bytes(b"1234")
        made.cut()
        made.unmount()
        made.mount()
        assert not Path(made.place, "unsynced").exists()
