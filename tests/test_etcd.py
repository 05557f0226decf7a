"""The etcd clients on real nodes that are killed, paused, wiped, restarted; with users, with TLS, after a fork."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from coord_conformance import collect
from support_etcd import EtcdCluster, etcd_binary, one_node, prefix, three_nodes, wait_until

from ckptrt.agents.connect import EtcdAccess
from ckptrt.agents.coord import CoordStore, WatchEvent
from ckptrt.agents.etcd import EtcdCoordStore
from ckptrt.errors import CompactedError, CoordError, UnknownOutcomeError, UsageError

__all__ = ["etcd_binary", "one_node", "prefix", "three_nodes"]  # fixtures

pytestmark = pytest.mark.processes

Open = Callable[..., CoordStore]


@pytest.fixture(params=["gateway", "etcd3"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Makes stores of either client, closed at the end of the test."""
    if request.param == "etcd3":
        pytest.importorskip("etcd3", reason="the extra ckptrt[etcd3] is not installed", exc_type=ImportError)
    stores: list[CoordStore] = []

    def open_store(*endpoints: str, request_timeout_s: float = 2.0, **options: str) -> CoordStore:
        access = EtcdAccess(endpoints=",".join(endpoints), client=request.param, **options)  # type: ignore[arg-type]
        stores.append(access.connect(request_timeout_s))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def put_until_it_is_there(store: CoordStore, key: str, value: str) -> None:
    """As callers do it: after a write without an answer, read; after a refused one, write again."""

    def done() -> bool:
        try:
            item = store.get(key)
            return (item is not None and item.value == value) or bool(store.put(key, value))
        except CoordError:
            return False

    wait_until(done, 30.0)


class Reader:
    """Follows a prefix in a thread of its own, as an agent does."""

    def __init__(self, store: CoordStore, prefix: str, start_revision: int) -> None:
        self.events: list[WatchEvent] = []
        self._watch = store.watch(prefix, start_revision)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for event in self._watch:
            self.events.append(event)

    def values(self) -> list[str]:
        return [event.value for event in self.events]

    def wait_for(self, value: str) -> None:
        wait_until(lambda: value in self.values(), 20.0)

    def close(self) -> None:
        self._watch.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_watch_loses_nothing_when_its_node_goes(
    three_nodes: EtcdCluster, open_store: Open, prefix: str, fault: str
) -> None:
    reader_store = open_store(*three_nodes.endpoints, request_timeout_s=1.0)
    writer = open_store(three_nodes.endpoint(2), three_nodes.endpoint(1))
    first = writer.put(prefix, "start")
    reader = Reader(reader_store, prefix, first)
    try:
        reader.wait_for("start")
        for number in range(30):
            if number == 10:
                getattr(three_nodes, fault)(0)
            put_until_it_is_there(writer, prefix, str(number))
        reader.wait_for("29")
        assert reader.values() == ["start", *map(str, range(30))]
        assert reader_store.put(prefix, "and calls work too")
    finally:
        reader.close()
        three_nodes.resume(0) if fault == "pause" else three_nodes.restart(0)


def test_a_node_without_a_majority_serves_nothing_and_says_so(three_nodes: EtcdCluster, prefix: str) -> None:
    store = EtcdCoordStore(three_nodes.endpoint(0), request_timeout_s=1.0)
    first = store.put(prefix, "1")
    three_nodes.kill(1)
    three_nodes.kill(2)
    try:
        wait_until(lambda: not three_nodes.healthy(0))
        with pytest.raises(CoordError, match="leader"):
            store.get(prefix)
        with pytest.raises(CoordError) as caught:
            store.put(prefix, "2")
        assert not isinstance(caught.value, UnknownOutcomeError)
        with store.watch(prefix, first) as watch:
            assert watch.poll(0.3) == []  # nothing that may be stale, and no error that the reader can't help
            three_nodes.launch(1)
            three_nodes.launch(2)
            assert [event.value for event in collect(watch, 1, 30.0)] == ["1"]
    finally:
        store.close()
        three_nodes.restart(1)
        three_nodes.restart(2)


def test_everything_goes_on_when_the_only_node_comes_back(one_node: EtcdCluster, open_store: Open, prefix: str) -> None:
    store = open_store(one_node.endpoint(0))
    lease_id, _ = store.grant(60)
    first = store.put(prefix, "before", lease_id)
    with store.watch(prefix, first) as watch:
        assert [event.value for event in collect(watch, 1)] == ["before"]
        one_node.kill(0)
        with pytest.raises(CoordError):
            store.get(prefix)
        assert watch.poll(0.2) == []
        one_node.restart(0)
        put_until_it_is_there(store, prefix, "after")
        assert [event.value for event in collect(watch, 1)] == ["after"]
    assert store.keepalive(lease_id) >= 60
    store.revoke(lease_id)


def test_a_watch_notices_that_the_data_is_gone(etcd_binary: str, tmp_path: Path, open_store: Open, prefix: str) -> None:
    cluster = EtcdCluster(etcd_binary, tmp_path, 1)
    try:
        cluster.start()
        store = open_store(cluster.endpoint(0))
        for number in range(5):
            last = store.put(prefix, str(number))
        with store.watch(prefix, last) as watch:
            collect(watch, 1)
            cluster.wipe(0)
            cluster.launch(0)
            cluster.wait_ready(0)
            with pytest.raises(CompactedError):
                collect(watch, 1)
        assert wait_until(lambda: store.get_prefix(prefix)) == ([], 1)
    finally:
        cluster.stop()


def test_users_and_tokens_that_do_not_outlive_a_node(
    etcd_binary: str, tmp_path: Path, open_store: Open, prefix: str
) -> None:
    cluster = EtcdCluster(etcd_binary, tmp_path, 1)
    try:
        cluster.start()
        cluster.post("/v3/auth/user/add", {"name": "root", "password": "secret"})
        cluster.post("/v3/auth/role/add", {"name": "root"})
        cluster.post("/v3/auth/user/grant", {"user": "root", "role": "root"})
        cluster.post("/v3/auth/enable", {})
        with pytest.raises(CoordError):
            open_store(cluster.endpoint(0)).get(prefix)
        with pytest.raises(CoordError, match="password"):
            open_store(cluster.endpoint(0), user="root", password="wrong").get(prefix)
        store = open_store(cluster.endpoint(0), user="root", password="secret")
        first = store.put(prefix, "1")
        with store.watch(prefix, first) as watch:
            assert [event.value for event in collect(watch, 1)] == ["1"]
            cluster.restart(0)  # its tokens are in its memory
            put_until_it_is_there(store, prefix, "2")
            assert [event.value for event in collect(watch, 1)] == ["2"]
        cluster.restart(0)
        with store.watch(prefix, first) as watch:  # the first to find out is a watch
            assert [event.value for event in collect(watch, 2)] == ["1", "2"]
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server and client certificates that it signed, each with its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine to make certificates with")
    directory = tmp_path_factory.mktemp("tls")
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1")
    make = [openssl, "req", "-newkey", "rsa:2048", "-nodes", "-subj"]
    commands = [[*make, "/CN=test CA", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem"]]
    for name in ("server", "client"):
        # The client's has no common name: with users switched on, the gateway would refuse it for having one.
        subject = "/CN=server" if name == "server" else "/O=client"
        commands.append([*make, subject, "-keyout", f"{name}.key", "-out", f"{name}.csr"])
        sign = ["x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san"]
        commands.append([openssl, *sign, "-in", f"{name}.csr", "-out", f"{name}.pem"])
    for command in commands:
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def tls_node(etcd_binary: str, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A node that shows a certificate and wants one."""
    options = [
        f"--cert-file={certificates / 'server.pem'}", f"--key-file={certificates / 'server.key'}",
        f"--trusted-ca-file={certificates / 'ca.pem'}", "--client-cert-auth",
    ]  # fmt: skip
    cluster = EtcdCluster(etcd_binary, tmp_path_factory.mktemp("etcd-tls"), 1, *options, scheme="https")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_tls_with_certificates_on_both_sides(
    tls_node: EtcdCluster, certificates: Path, open_store: Open, prefix: str
) -> None:
    files = {"ca_cert": "ca.pem", "client_cert": "client.pem", "client_key": "client.key"}
    store = open_store(tls_node.endpoint(0), **{name: str(certificates / file) for name, file in files.items()})
    first = store.put(prefix, "v")
    with store.watch(prefix, first) as watch:
        assert [event.value for event in collect(watch, 1)] == ["v"]
        assert watch.poll(0.05) == []
        store.put(prefix, "w")
        assert [event.value for event in collect(watch, 1)] == ["w"]


def test_a_server_whose_certificate_nobody_vouches_for_gets_nothing(tls_node: EtcdCluster, prefix: str) -> None:
    store = EtcdCoordStore(tls_node.endpoint(0))
    with pytest.raises(CoordError, match="CERTIFICATE_VERIFY_FAILED"):
        store.put(prefix, "v")
    store.close()


def test_certificates_that_are_not_there_are_told_at_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    with pytest.raises(UsageError, match=r"none\.pem"):
        EtcdCoordStore("https://127.0.0.1:1", ca_cert=missing)


def test_a_forked_child_is_refused_and_does_no_harm(one_node: EtcdCluster, prefix: str) -> None:
    # In a process of its own, which has one thread: a test run has many, and can't be forked safely.
    program = f"""
        import os
        from ckptrt.agents.etcd import EtcdCoordStore
        from ckptrt.errors import CoordError
        store = EtcdCoordStore({one_node.endpoint(0)!r})
        first = store.put({prefix!r}, "1")
        watch = store.watch({prefix!r}, first)
        assert len(watch.poll(10)) == 1
        child = os.fork()
        if child == 0:
            refused = []
            for call in (lambda: store.get({prefix!r}), lambda: store.put({prefix!r}, "2"), lambda: watch.poll(1)):
                try:
                    call()
                except CoordError as error:
                    refused.append("fork" in error.what)
            watch.close()
            store.close()
            own = EtcdCoordStore({one_node.endpoint(0)!r})
            own.put({prefix!r}, "3")
            own.close()
            os._exit(0 if refused == [True] * 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get({prefix!r}).value == "3"
        assert [event.value for event in watch.poll(10)] == ["3"]
        store.close()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_many_threads_share_a_store(one_node: EtcdCluster, open_store: Open, prefix: str) -> None:
    store = open_store(one_node.endpoint(0))

    def work(number: int) -> bool:
        return all(store.put(f"{prefix}{number}/{i}", "v") and store.get(f"{prefix}{number}/{i}") for i in range(25))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert len(store.get_prefix(prefix)[0]) == 200
