"""Kills beyond one rank: all ranks, the launcher, the persister, etcd; and one rank of a job whose store is S3."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_etcd import EtcdCluster, etcd_binary, one_node, process_ended
from support_jobs import Job, Reference, judge, resumes, wait_for
from support_s3 import S3Server, s3_server

from ckptrt.agents.connect import EtcdAccess
from ckptrt.errors import CoordError

__all__ = ["etcd_binary", "one_node", "s3_server"]  # fixtures

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS, GATE = 40, 18  # in the middle between two saves
LATE_GATE = 30


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Job(folder=tmp_path_factory.mktemp("unhurt"), steps=STEPS) as job:
        assert job.run() == 0, job.output
        assert judge(job, Reference(job)) == []
        yield Reference(job)


def test_both_ranks_at_once(tmp_path: Path, reference: Reference) -> None:
    gate = tmp_path / "go"
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate}) as job:
        job.launch()
        wait_for(lambda: job.reached(GATE), job)
        for pid in job.workers():
            kill(pid)
        gate.touch()
        assert job.finish() == 0, job.output
        assert judge(job, reference) == []
        (failure,) = job.events("failure")
        assert sorted([failure["rank"], *failure["consequences"]]) == [0, 1]
        assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 16, "memory")]


def test_the_launcher_takes_its_workers_with_it_and_the_next_one_goes_on(tmp_path: Path, reference: Reference) -> None:
    gate = tmp_path / "go"
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate}) as job:
        launcher = job.launch()
        wait_for(lambda: job.reached(GATE), job)
        workers = job.workers()
        launcher.kill()
        killed_s = time.monotonic()
        assert all(process_ended(pid, 2.0) for pid in workers)
        assert time.monotonic() - killed_s < 2.0
        launcher.wait()
        wait_for(lambda: not job.processes())  # the persister finishes what it was given, then nothing is left
        last = job.catalog().commits()[0]
        assert last.step == 16  # it was handed over before the kill
        gate.touch()
        assert job.run() == 0, job.output
        assert judge(job, reference, memory_lost=(2,)) == []
        assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 16, "stored")]
        assert "resume       step 16 from" in job.output


def test_the_persister_comes_back_and_writes_what_the_dead_one_had(tmp_path: Path, reference: Reference) -> None:
    gate = tmp_path / "go"
    # Each persister stops there once: the first for good, its successor until it is told to go on.
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate}, faults="persisting@rank=0,step=16:stop") as job:
        job.launch()
        wait_for(lambda: job.reached(GATE), job)
        first = wait_for(lambda: stopped_persister(job), job)
        assert 16 not in steps_of(job)
        kill(first)
        second = wait_for(lambda: stopped_persister(job, besides=first), job)
        os.kill(second, signal.SIGCONT)
        wait_for(lambda: 16 in steps_of(job), job)
        gate.touch()
        assert job.finish() == 0, job.output
        assert judge(job, reference) == []
        assert steps_of(job) == [40, 36, 32, 28, 24, 20, 16, 12, 8, 4]
        assert job.events("failure", "restart") == []
        assert "persister died (SIGKILL)" in job.output


def test_etcd_of_the_launcher_s_own(tmp_path: Path, reference: Reference) -> None:
    gate, late_gate = tmp_path / "go", tmp_path / "go on"
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate, LATE_GATE: late_gate}) as job:
        job.launch()
        wait_for(lambda: job.reached(GATE), job)
        (etcd,) = job.processes("--listen-client-urls")
        endpoint = command(etcd)[command(etcd).index("--listen-client-urls") + 1]
        before = members(endpoint)
        assert len(before) == 1
        kill(etcd)
        gate.touch()
        wait_for(lambda: job.reached(LATE_GATE), job)
        wait_for(lambda: [event for event in job.events("etcd") if event["kind"] == "respawned"], job)
        wait_for(lambda: members(endpoint) == before, job)
        kill(job.workers()[1])
        late_gate.touch()
        assert job.finish() == 0, job.output
        assert judge(job, reference) == []
        assert [event["rank"] for event in job.events("failure")] == [1]


def test_etcd_that_was_named_and_loses_its_data(tmp_path: Path, reference: Reference, one_node: EtcdCluster) -> None:
    gate, late_gate = tmp_path / "go", tmp_path / "go on"
    options = ("--ckpt-etcd-endpoints", one_node.endpoint(0))
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate, LATE_GATE: late_gate}, options=options) as job:
        job.launch()
        wait_for(lambda: job.reached(GATE), job)
        before = members(one_node.endpoint(0))
        assert len(before) == 1
        one_node.wipe(0)
        gate.touch()
        wait_for(lambda: job.reached(LATE_GATE), job)  # without any etcd
        one_node.launch(0)
        one_node.wait_ready(0)
        wait_for(lambda: members(one_node.endpoint(0)) == before, job)
        kill(job.workers()[1])
        late_gate.touch()
        assert job.finish() == 0, job.output
        assert judge(job, reference) == []
        assert [event["rank"] for event in job.events("failure")] == [1]
        assert job.processes("--listen-client-urls") == []
    assert members(one_node.endpoint(0)) == []


def test_a_rank_while_etcd_is_away(tmp_path: Path, reference: Reference, one_node: EtcdCluster) -> None:
    gate = tmp_path / "go"
    options = ("--ckpt-etcd-endpoints", one_node.endpoint(0))
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate}, options=options) as job:
        job.launch()
        wait_for(lambda: job.reached(GATE), job)
        one_node.kill(0)
        try:
            kill(job.workers()[0])
            gate.touch()
            assert job.finish() == 0, job.output
        finally:
            one_node.restart(0)
        assert judge(job, reference) == []
        assert [(r.incarnation, r.step, r.tier) for r in resumes(job)[0]] == [(1, 0, "fresh"), (2, 16, "memory")]
        assert "the fences alone keep the order" in job.output


def test_a_rank_and_then_the_launcher_of_a_job_on_s3(tmp_path: Path, reference: Reference, s3_server: S3Server) -> None:
    gate = tmp_path / "go"
    store: dict[str, Any] = {
        "url": f"{s3_server.url}/kills",
        "environ": s3_server.env,
        "storage_options": s3_server.options,
    }
    torn = "staging@rank=1,step=12,incarnation=1:kill"
    with Job(folder=tmp_path, steps=STEPS, gates={GATE: gate}, faults=torn, **store) as job:
        job.launch()
        wait_for(lambda: job.reached(GATE), job)
        wait_for(lambda: 16 in steps_of(job), job)  # a worker may be killed before it has handed its last snapshot over
        kill(job.process.pid)
        job.process.wait()
        wait_for(lambda: not job.processes())
        gate.touch()
        assert job.run() == 0, job.output
        assert judge(job, reference, memory_lost=(3,)) == []
        assert [(r.step, r.tier) for r in resumes(job)[0]] == [(0, "fresh"), (8, "memory"), (16, "stored")]


# --- looks and hands


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def steps_of(job: Job) -> list[int]:
    return [commit.step for commit in job.catalog().commits()]


def stopped_persister(job: Job, besides: int = 0) -> int:
    """The persister that has met its fault point, or 0."""
    for pid in job.processes("ckptrt.storage.persister"):
        if pid != besides and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return pid
    return 0


def members(endpoint: str) -> list[str]:
    """The keys of this etcd's members; none as well while it doesn't answer."""
    store = EtcdAccess(endpoints=endpoint).connect()
    try:
        return [item.key for item in store.get_prefix("/ckptrt/")[0] if "/members/" in item.key]
    except CoordError:
        return []
    finally:
        store.close()
