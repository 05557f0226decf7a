"""`ckptrt doctor`: each thing that can be wrong is found, and a healthy place is left as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support_runs import FakeRun, make_run, overwrite
from support_s3 import S3Server, s3_server

from ckptrt.errors import AccessError
from ckptrt.storage.catalog import CommitId
from ckptrt.storage.cli import cli
from ckptrt.storage.doctor import Place
from ckptrt.storage.layout import fence_name
from ckptrt.storage.machine import Check, check_etcd, check_machine, mount_of, parse_mounts
from ckptrt.storage.runlock import run_holder
from ckptrt.storage.tiers import open_tier
from ckptrt.storage.tiers.local import LocalTier

__all__ = ["s3_server"]

HOUR_S = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return make_run(LocalTier(str(tmp_path / "gpt")), [10, 20])


def checks(url: str, later_s: float = 0.0, write_test: bool = False) -> dict[str, Check]:
    """Looked at as if it were later than it is: what lies there is older then."""
    return {check.name: check for check in Place(url, time.time() + later_s).checks(write_test)}


def everything(root: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}


def test_a_healthy_place_passes_and_stays_as_it_was(run: FakeRun) -> None:
    before = everything(run.tier.root)
    result = CliRunner().invoke(cli, ["doctor", run.tier.root, "--write-test"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if not line.startswith("      ")]
    assert {line.split()[0] for line in lines[:-1]} <= {"ok", "warn"}
    assert "ok    run            2 checkpoints, a restart takes step 20\n" in result.stdout
    assert "ok    writes         create-only writes hold; a small one is durable in " in result.stdout
    assert everything(run.tier.root) == before
    found = json.loads(CliRunner().invoke(cli, ["doctor", run.tier.root, "--json"]).stdout)
    assert found["is_ok"]
    assert {check["name"]: check["result"] for check in found["checks"]}["writes"] == "skip"
    assert everything(run.tier.root) == before


def test_a_place_that_is_not_there_yet_is_fine_and_is_not_made(tmp_path: Path) -> None:
    found = checks(str(tmp_path / "a" / "b"), write_test=True)
    assert found["place"].what.endswith("isn't there; a first start makes it")
    assert found["run"].result == found["writes"].result == "ok"
    assert not list(tmp_path.iterdir())


def test_a_run_of_which_nothing_can_be_loaded_fails(run: FakeRun) -> None:
    for folder in Path(run.tier.root, "data").iterdir():
        (folder / "r00001.safetensors").unlink()
    found = checks(run.tier.root)["run"]
    assert (found.result, found.what) == ("fail", "2 checkpoints and none of them good")
    result = CliRunner().invoke(cli, ["doctor", run.tier.root])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("1 failure, ")
    assert CliRunner().invoke(cli, ["doctor", run.tier.root, "-q"]).stdout == "run\n"


def test_damaged_records_and_newer_formats_are_told(run: FakeRun) -> None:
    overwrite(run.tier, fence_name(1), b"x")
    found = checks(run.tier.root)["records"]
    assert found.result == "warn"
    assert found.what.startswith("fences/i00000001.json: ")
    overwrite(run.tier, "run.json", b'{"ckptrt":"2.0"}\n')
    assert checks(run.tier.root)["run"].result == "fail"


def test_leftovers_are_counted_once_they_are_old(run: FakeRun) -> None:
    run.fence(2, (20, 1))
    run.write_data(30, 1)
    Path(run.tier.root, "commits", ".tmp-0123456789abcdef").write_bytes(b"half")
    assert checks(run.tier.root)["leftovers"].result == "ok"
    found = checks(run.tier.root, later_s=2 * HOUR_S)["leftovers"]
    assert found.result == "warn"
    assert found.what.startswith("1 data folder without a commit, 1 unfinished write, ")
    run.zombie_save(30, 1, nonce="0b")
    assert checks(run.tier.root, later_s=2 * HOUR_S)["leftovers"].what.startswith("1 cut-off checkpoint, ")


def test_who_holds_the_run_is_named_and_keeps_it(run: FakeRun) -> None:
    assert run_holder(run.tier.root) == ""
    assert checks(run.tier.root)["run lock"].result == "ok"
    code = "import sys; from ckptrt.storage.runlock import hold_run\n"
    code += "with hold_run(sys.argv[1]):\n    print('held', flush=True)\n    sys.stdin.read()"
    command = [sys.executable, "-c", code, run.tier.root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):
            found = checks(run.tier.root)["run lock"]
            assert found.result == "warn"
            assert f"pid {holder.pid} of " in found.what
        holder.communicate("")
    assert checks(run.tier.root)["run lock"].result == "ok"


def test_clocks_that_differ_are_told(run: FakeRun) -> None:
    record = run.catalog.read_commit(CommitId(20, 1))
    assert checks(run.tier.root, later_s=-30 * 365 * 24 * HOUR_S)["run"].result == "warn", record.created_at
    assert checks(run.tier.root, later_s=30, write_test=True)["clock"].result == "warn"
    assert checks(run.tier.root, write_test=True)["clock"].result == "ok"


def test_a_store_that_replaces_objects_fails(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: LocalTier, name: str, data: bytes) -> None:
        Path(self.root, name).write_bytes(data)

    monkeypatch.setattr(LocalTier, "create", create)
    found = checks(run.tier.root, write_test=True)["writes"]
    assert found.result == "fail"
    assert "let a second writer replace an object" in found.what
    assert not [path for path in Path(run.tier.root).iterdir() if path.name.startswith(".doctor")]


def test_a_store_that_gives_back_other_bytes_fails(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalTier.read
    monkeypatch.setattr(
        LocalTier, "read", lambda self, name, *args: b"x" if name.startswith(".doctor") else read(self, name, *args)
    )
    assert "gave back other bytes" in checks(run.tier.root, write_test=True)["writes"].what


def test_a_store_that_refuses_writes_or_deletes_fails(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AccessError("not yours")

    monkeypatch.setattr(LocalTier, "delete", refuse)
    assert checks(run.tier.root, write_test=True)["deletes"].result == "fail"
    monkeypatch.setattr(LocalTier, "create", refuse)
    assert checks(run.tier.root, write_test=True)["writes"].what == "not yours"
    monkeypatch.setattr(LocalTier, "list", refuse)
    assert list(checks(run.tier.root)) == ["place"]


def test_a_full_disk_fails_and_a_filling_one_warns(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = run.catalog.read_commit(CommitId(20, 1)).size_bytes
    for free_bytes, inodes, result in (
        (size_bytes - 1, 5000, "fail"),
        (2 * size_bytes, 5000, "warn"),
        (3 * size_bytes, 5000, "ok"),
        (3 * size_bytes, 5, "fail"),
    ):
        stat = SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_files=10**6, f_favail=inodes, f_blocks=1)
        monkeypatch.setattr(os, "statvfs", lambda _path, stat=stat: stat)
        assert checks(run.tier.root)["space"].result == result


MOUNTS = """\
25 1 8:1 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/l
30 25 0:26 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw,size=65536k
31 25 8:2 / /data rw - ext4 /dev/sda2 rw,nobarrier
32 25 8:3 / /data/with\\040blank ro,relatime master:3 - xfs /dev/sdb rw
33 31 8:4 / /data/nvme rw - tmpfs below rw
34 31 8:4 / /data/nvme rw - xfs /dev/nvme0 rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "result"),
    [
        ("/srv/run", "overlay", "warn"), ("/dev/shm/run", "tmpfs", "warn"), ("/dev/shmem", "overlay", "warn"),
        ("/data/run", "ext4", "warn"), ("/data/with blank/run", "xfs", "fail"), ("/data/nvme", "xfs", "ok"),
    ],
)  # fmt: skip
def test_file_systems_that_lose_data_are_known(path: str, kind: str, result: str) -> None:
    from ckptrt.storage.doctor import _file_system

    mount = mount_of(path, parse_mounts(MOUNTS))
    assert mount is not None
    assert mount.kind == kind
    assert _file_system(mount).result == result


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in check_machine(1 << 60)}
    assert "torch " in found["versions"].what
    assert found["memory"].result == "warn"
    assert {check.name: check.result for check in check_machine(1)}["memory"] == "ok"
    monkeypatch.setattr("resource.getrlimit", lambda _which: (256, 4096))
    assert {check.name: check.do for check in check_machine(1)}["open files"].startswith("ulimit -n 1024")

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert {check.name: check.result for check in check_machine(1)}["shared memory"] == "fail"


@contextmanager
def http_server(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if self.path == "/health" else b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_etcd_is_asked_how_it_is() -> None:
    for status, body, result in (
        (200, b'{"health":"true","reason":""}', "ok"),
        (503, b'{"health":"false"}', "fail"),
        (200, b'{"health":"false"}', "fail"),
        (200, b"<html>", "fail"),
    ):
        with http_server(status, body) as address:
            assert check_etcd(address).result == result
    gone = check_etcd(address)
    assert gone.result == "fail"
    assert "doesn't answer" in gone.what


@pytest.mark.processes
def test_an_object_store_is_tried_and_its_unfinished_uploads_found(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    url = f"{s3_server.url}/doctor/gpt"
    tier = open_tier(url, **s3_server.options)
    run = make_run(tier, [10])
    found = checks(url, write_test=True)
    assert {name: check.result for name, check in found.items()} == dict.fromkeys(
        ("place", "run", "records", "leftovers", "writes", "clock"), "ok"
    )
    folder = run.catalog.read_commit(CommitId(10, 1)).data
    client = tier.tier._client  # type: ignore[attr-defined]
    client.call("create_multipart_upload", f"data/{folder}/r00000.safetensors", "begin")
    found = checks(url, later_s=2 * HOUR_S)
    assert found["leftovers"].what.startswith("1 unfinished write, ")
    assert [entry.name for entry in tier.list("")] == ["commits/", "data/", "fences/", "run.json"]
    tier.close()
