"""Resumes at the edges: at the very last step, from memory alone; and what --ckpt-resume says, on a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_jobs import Job, Reference, judge, resumes, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Job(folder=tmp_path_factory.mktemp("unhurt"), steps=STEPS) as job:
        assert job.run() == 0, job.output
        yield Reference(job)


def test_a_job_that_resumes_at_its_last_step_ends_with_that_step_committed(
    tmp_path: Path, reference: Reference
) -> None:
    # Only rank 0 hands its snapshot over: without another save, memory alone would hold step 16. Rank 1 is stopped, and
    # killed when rank 0 has sealed too: else it would take rank 0 down with it before that, and step 12 be the newest.
    with Job(folder=tmp_path, steps=STEPS, faults="sealed@rank=1,step=16,incarnation=1:stop") as job:
        job.launch()
        wait_for(lambda: list(tmp_path.glob("**/data/s000000016.*/r00000.receipt.json")), job)
        os.kill(wait_for(lambda: stopped_worker(job), job), signal.SIGKILL)
        assert job.finish() == 0, job.output
        ends_with_its_last_step(job, reference)


def test_a_job_whose_last_snapshot_was_being_written_ends_with_that_step_committed(
    tmp_path: Path, reference: Reference
) -> None:
    fault = "persisting@rank=1,step=16:kill-pid;persisting@rank=1,step=16:sleep=0.5"
    with Job(folder=tmp_path, steps=STEPS, faults=fault) as job:
        assert job.run() == 0, job.output
        ends_with_its_last_step(job, reference)


def ends_with_its_last_step(job: Job, reference: Reference) -> None:
    assert judge(job, reference) == []
    assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 16, "memory")]
    assert job.catalog().commits()[0].step == 16


def stopped_worker(job: Job) -> int:
    """The worker that has met its fault point, or 0."""
    for pid in job.workers():
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return pid
    return 0


def test_a_fresh_start_that_was_asked_for_is_not_repeated_at_a_restart(tmp_path: Path, reference: Reference) -> None:
    options = ("--ckpt-resume", "never")
    with Job(folder=tmp_path, steps=STEPS, options=options, faults="step@rank=0,step=10,incarnation=1:kill") as job:
        assert job.run() == 0, job.output
        assert judge(job, reference) == []
        assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 8, "memory")]
