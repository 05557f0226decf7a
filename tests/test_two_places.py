"""Jobs that write to a local directory first: real persisters, real launches, nodes and stores that go away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_jobs import Job, Reference, judge, resumes, wait_for
from support_launch import Launch
from support_runs import flip_bit
from support_s3 import S3Server, s3_server

import ckptrt
from ckptrt.errors import BusyError, CorruptError, FencedError
from ckptrt.storage.catalog import open_catalog, this_owner
from ckptrt.storage.verify import verify_commit

__all__ = ["s3_server"]  # a fixture

pytestmark = pytest.mark.processes


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "CKPTRT_AGENT_SOCKET", "CKPTRT_DIR", "CKPTRT_LOCAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return {"dir": str(tmp_path / "far"), "local_dir": str(tmp_path / "near")}


def train(places: dict[str, Any], steps: int, **more: Any) -> list[float]:
    """Go on with the run up to a step, which is saved; gives the losses of what this job computed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    with ckptrt.init(**places, model=model, optim=optim, every=2, **more) as rt:
        rt.restore()
        for _ in range(rt.start_step, steps):
            loss = (model(torch.rand(4, 300)) ** 2).sum()
            optim.zero_grad()
            loss.backward()
            optim.step()
            losses.append(float(loss.detach()))
            rt.step(loss=losses[-1])
            rt.wait()
    return losses


def steps(url: str) -> list[int]:
    """The steps of the path, each whole."""
    catalog = open_catalog(url)
    found = catalog.path().commits
    assert all(verify_commit(catalog, commit, read_data=True).is_ok for commit in found)
    return [commit.step for commit in found]


def damage(folder: str, step: int) -> None:
    """Flip a bit in the middle of a step's shard file."""
    (path,) = Path(folder).glob(f"data/s{step:09}.*/*.safetensors")
    data = path.read_bytes()
    path.write_bytes(flip_bit(data, 4 * len(data)))


def test_a_run_goes_on_from_either_place_bit_for_bit(places, tmp_path, capfd) -> None:
    unbroken = train({"dir": str(tmp_path / "unbroken")}, 12)
    assert train(places, 4) == unbroken[:4]
    assert steps(places["dir"]) == [4, 2]
    assert train(places, 8) == unbroken[4:8]
    shutil.rmtree(places["local_dir"])  # another node, or a new disk
    assert train(places, 12) == unbroken[8:]
    said = capfd.readouterr().err
    assert f"resume       step 4 from {places['local_dir']} · " in said
    assert f"resume       step 8 from {places['dir']} · " in said
    assert f"flush        step 2 · in {places['dir']}, took " in said
    assert steps(places["dir"]) == [12, 10, 8, 6, 4, 2]
    assert steps(places["local_dir"]) == [12, 10]


def test_what_is_damaged_near_is_taken_from_far_and_said(places, tmp_path, capfd) -> None:
    unbroken = train({"dir": str(tmp_path / "unbroken")}, 6)
    train(places, 4)
    damage(places["local_dir"], 4)
    assert train(places, 6) == unbroken[4:]
    said = capfd.readouterr().err
    assert f"warn         rank 0: taken from {places['dir']} instead: " in said.replace("file://", "")
    assert "is damaged: bytes 0 to" in said
    assert f"resume       step 4 from {places['local_dir']} · " in said


def test_what_is_damaged_in_both_places_is_passed_over(places, tmp_path, capfd) -> None:
    unbroken = train({"dir": str(tmp_path / "unbroken")}, 6)
    train(places, 4)
    for folder in places.values():
        damage(folder, 4)
    assert train(places, 6) == unbroken[2:]
    said = capfd.readouterr().err
    assert "step 4 from local can't be loaded" in said
    assert "step 4 from stored can't be loaded" in said
    assert f"resume       step 2 from {places['local_dir']} · " in said


@pytest.mark.parametrize("pattern", ["commits/s000000004*", "data/s000000004.*/manifest*", "fences/*", "run.json"])
@pytest.mark.parametrize("place", ["dir", "local_dir"])
def test_a_damaged_record_in_one_place_costs_nothing(places, tmp_path, pattern, place) -> None:
    unbroken = train({"dir": str(tmp_path / "unbroken")}, 6)
    train(places, 4)
    (path,) = Path(places[place]).glob(pattern)
    path.write_bytes(flip_bit(path.read_bytes(), 500))
    assert train(places, 6) == unbroken[4:]


def test_a_far_place_that_fails_costs_no_step_and_gets_everything_later(places, capfd) -> None:
    train(places, 2)
    data = Path(places["dir"], "data")
    data.rename(data.with_name("away"))
    data.write_text("no folder: every write below it fails")
    train(places, 8, keep=ckptrt.Keep(last=3))
    said = capfd.readouterr().err
    assert "is not in " in said
    assert f"warn         step 8 is in {places['local_dir']} only; the next start flushes it, or by hand" in said
    assert steps(places["local_dir"]) == [8, 6, 4]  # those that the rules want, none of which is far away
    data.unlink()
    data.with_name("away").rename(data)
    train(places, 8, keep=ckptrt.Keep(last=3))
    assert steps(places["dir"]) == [8, 6, 4]
    assert steps(places["local_dir"]) == [8, 6]


def test_a_job_that_was_taken_over_on_another_node_stops(places, monkeypatch) -> None:
    rt = ckptrt.init(**places, loop={"n": 1})
    rt.step()
    rt.save()
    rt.wait()
    open_catalog(places["dir"]).write_fence(rt.incarnation + 1, None, 1, this_owner())
    rt.step()
    rt.save()  # wakes the flusher, which meets the fence

    def fenced() -> bool:
        try:
            rt.step()
        except FencedError:
            return True
        return False

    wait_for(fenced)
    with pytest.raises(FencedError, match="incarnation 2"):
        rt.save().committed.result(30)
    with pytest.raises(FencedError):
        rt.close()


def test_both_places_are_held(places, tmp_path) -> None:
    with ckptrt.init(**places, loop={"n": 1}) as rt:
        rt.step()
        for other in ({**places, "dir": str(tmp_path / "other")}, {**places, "local_dir": str(tmp_path / "other")}):
            with pytest.raises(BusyError):
                ckptrt.init(**other, loop={"n": 1})


def test_nothing_whole_in_either_place_is_an_error(places) -> None:
    train(places, 2)
    for folder in places.values():
        damage(folder, 2)
    with pytest.raises(CorruptError, match="none of its 2 checkpoints"):
        train(places, 4)


def test_ranks_with_local_dirs_of_their_own_are_refused_on_every_rank(tmp_path: Path) -> None:
    script = (
        "import os, ckptrt, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        f"near = '{tmp_path}/near' + os.environ['RANK']\n"
        f"rt = ckptrt.init('{tmp_path}/far', local_dir=near, loop={{'n': 1}})\n"
        "rt.restore()\n"
    )
    launch = Launch(tmp_path / "job", ["--nproc-per-node", "2", "--max-restarts", "0", "train.py"], script=script)
    try:
        assert launch.wait() != 0
        assert "this job already writes to" in launch.err
    finally:
        launch.close()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode != 0
    assert "isn't where rank 0 has opened the run" in done.stderr
    assert not list(tmp_path.glob("*/data/*"))


# --- under the launcher, with a real object store


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Job(folder=tmp_path_factory.mktemp("unhurt"), steps=32) as job:
        assert job.run() == 0, job.output
        yield Reference(job)


def local_job(tmp_path: Path, server: S3Server, **more: Any) -> Job:
    return Job(
        folder=tmp_path,
        steps=32,
        url=f"{server.url}/{tmp_path.name}",
        options=("--ckpt-local-dir", str(tmp_path / "near")),
        environ=server.env,
        storage_options=server.options,
        **more,
    )


@pytest.mark.slow
def test_a_node_that_is_lost_with_its_disk_costs_what_was_not_flushed(
    tmp_path: Path, reference: Reference, s3_server: S3Server
) -> None:
    gate = tmp_path / "gate"
    fault = "step@rank=1,step=10,incarnation=1:kill;persisting@rank=0,step=16:sleep=0.2"
    with local_job(tmp_path, s3_server, faults=fault, gates={24: gate}) as job:
        job.launch()
        wait_for(lambda: job.reached(24) and job.catalog().commits()[0].step == 24, job)
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)
        assert job.process is not None
        job.process.wait()
        shutil.rmtree(tmp_path / "near")
        gate.touch()
        job.faults = ""
        assert job.run() == 0, job.output
        shutil.rmtree(job.temp)  # what SIGKILL to all of them has left there
        job.temp.mkdir()
        assert judge(job, reference, memory_lost=[3]) == []
        assert [(r.step, r.tier) for r in resumes(job)[0]] == [(0, "fresh"), (8, "memory"), (24, "stored")]
        assert f"resume       step 24 from {job.url} · " in job.output
        assert f"checkpoints  {job.url}, first to {tmp_path / 'near'}" in job.output


@pytest.mark.slow
def test_a_persister_that_is_killed_while_it_flushes_is_gone_on_with(
    tmp_path: Path, reference: Reference, s3_server: S3Server
) -> None:
    with local_job(tmp_path, s3_server) as job:
        job.launch()
        for count in (4, 12, 20):
            wait_for(lambda count=count: job.reached(count), job)  # type: ignore[misc]
            for pid in job.processes("ckptrt.storage.persister"):
                os.kill(pid, signal.SIGKILL)
        assert job.finish() == 0, job.output
        assert judge(job, reference) == []
        catalog = job.catalog()
        assert [commit.step for commit in catalog.commits()] == list(range(32, 0, -4))
        assert all(verify_commit(catalog, commit.id, read_data=True).is_ok for commit in catalog.commits())
