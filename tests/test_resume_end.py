"""Resumes at the edges: at the very last step, from memory alone; and what --ckpt-resume says, on a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support_jobs import Job, Reference, judge, resumes

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Job(folder=tmp_path_factory.mktemp("unhurt"), steps=STEPS) as job:
        assert job.run() == 0, job.output
        yield Reference(job)


@pytest.mark.parametrize(
    "fault",
    [
        "sealed@rank=1,step=16,incarnation=1:kill",
        "persisting@rank=1,step=16:kill-pid;persisting@rank=1,step=16:sleep=0.5",
    ],
)
def test_a_job_that_resumes_at_its_last_step_ends_with_that_step_committed(
    tmp_path: Path, reference: Reference, fault: str
) -> None:
    # In the first case only rank 0 handed its snapshot over: without another save, memory alone would hold step 16.
    with Job(folder=tmp_path, steps=STEPS, faults=fault) as job:
        assert job.run() == 0, job.output
        assert judge(job, reference) == []
        assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 16, "memory")]
        assert job.catalog().commits()[0].step == 16


def test_a_fresh_start_that_was_asked_for_is_not_repeated_at_a_restart(tmp_path: Path, reference: Reference) -> None:
    options = ("--ckpt-resume", "never")
    with Job(folder=tmp_path, steps=STEPS, options=options, faults="step@rank=0,step=10,incarnation=1:kill") as job:
        assert job.run() == 0, job.output
        assert judge(job, reference) == []
        assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 8, "memory")]
