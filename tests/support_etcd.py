"""Real etcd for tests: clusters on loopback whose nodes can be killed, paused and restarted, and fixtures for them.

Test files import the fixtures that they use, and those that these use.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrt.agents.embedded_etcd import find_etcd
from ckptrt.errors import UsageError

__all__ = ["EtcdCluster", "etcd_binary", "one_node", "prefix", "process_ended", "three_nodes", "wait_until"]


def wait_until(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """The first true value of condition; fails the test when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            pytest.fail(f"not true within {timeout_s} s: {condition}")
        time.sleep(0.01)


def process_ended(pid: int, timeout_s: float = 10.0) -> bool:
    """Wait for the end of a process that need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(fd)


class EtcdCluster:
    """Nodes of one etcd cluster, numbered from 0, with fast timers."""

    def __init__(
        self,
        binary: str,
        directory: Path,
        num_nodes: int,
        *options: str,
        scheme: str = "http",
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host  # where clients reach it
        self._binary = binary
        self._directory = directory
        self._options = options
        self._scheme = scheme
        self._token = uuid.uuid4().hex
        self._ports = free_ports(2 * num_nodes)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * num_nodes
        self._stopped: set[int] = set()

    @property
    def endpoints(self) -> list[str]:
        return [self.endpoint(node) for node in range(len(self._processes))]

    def endpoint(self, node: int) -> str:
        return f"{self._scheme}://{self._host}:{self._ports[2 * node]}"

    def data_dir(self, node: int) -> Path:
        return self._directory / f"n{node}"

    def start(self) -> None:
        for node in range(len(self._processes)):
            self.launch(node)
        for node in range(len(self._processes)):
            self.wait_ready(node)

    def launch(self, node: int) -> None:
        peers = [f"n{i}=http://127.0.0.1:{self._ports[2 * i + 1]}" for i in range(len(self._processes))]
        peer = peers[node].split("=")[1]
        client = self.endpoint(node)
        command = [
            self._binary, "--name", f"n{node}", "--data-dir", str(self.data_dir(node)),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", ",".join(peers), "--initial-cluster-token", self._token,
            "--heartbeat-interval", "10", "--election-timeout", "100" if len(peers) == 1 else "300",
            "--logger", "zap", "--log-level", "warn", *self._options,
        ]  # fmt: skip
        with open(self._directory / f"n{node}.log", "ab") as log:
            self._processes[node] = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_ready(self, node: int) -> None:
        process = self._processes[node]
        log = self._directory / f"n{node}.log"

        def ready() -> bool:
            if process is None or process.poll() is not None:
                pytest.fail(f"etcd node {node} ended: {log.read_text(errors='replace')[-2000:]}")
            return self.healthy(node)

        wait_until(ready, 30.0)

    def healthy(self, node: int) -> bool:
        if self._scheme == "https":
            with socket.socket() as probe:
                return probe.connect_ex((self._host, self._ports[2 * node])) == 0
        connection = http.client.HTTPConnection(self._host, self._ports[2 * node], timeout=2.0)
        try:
            connection.request("GET", "/health")
            return bool(json.loads(connection.getresponse().read()).get("health") == "true")
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()

    def kill(self, node: int) -> None:
        process = self._processes[node]
        if process is not None:
            process.kill()
            process.wait()

    def restart(self, node: int) -> None:
        self.kill(node)
        self.launch(node)
        self.wait_ready(node)

    def leader(self) -> int:
        """The node that leads; the first one if none that answers does."""
        for node, process in enumerate(self._processes):
            if process is not None and process.poll() is None:
                with contextlib.suppress(OSError, AssertionError, http.client.HTTPException):
                    status = self.post("/v3/maintenance/status", {}, node)
                    if status["leader"] == status["header"]["member_id"]:
                        return node
        return 0

    def restart_dead(self) -> None:
        for node, process in enumerate(self._processes):
            if process is not None and process.poll() is not None:
                self.launch(node)

    def pause(self, node: int) -> None:
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        self._signal(node, signal.SIGCONT)

    def wipe(self, node: int) -> None:
        """Kill the node and throw its data away."""
        self.kill(node)
        shutil.rmtree(self.data_dir(node))
        self._token = uuid.uuid4().hex

    def stop(self) -> None:
        for node in range(len(self._processes)):
            self.kill(node)

    def post(self, path: str, body: dict[str, Any], node: int = 0) -> dict[str, Any]:
        """A request of the test's own, past the client that is tested."""
        connection = http.client.HTTPConnection(self._host, self._ports[2 * node], timeout=10.0)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            payload = answer.read()
            assert answer.status == 200, payload
            return dict(json.loads(payload))
        finally:
            connection.close()

    def compact(self, revision: int) -> None:
        self.post("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def _signal(self, node: int, number: signal.Signals) -> None:
        process = self._processes[node]
        assert process is not None
        process.send_signal(number)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


@pytest.fixture(scope="session")
def etcd_binary() -> str:
    try:
        server = find_etcd()
    except UsageError as error:
        pytest.skip(f"no etcd server on this machine: {error.what}")
    if server.note:
        pytest.skip(f"the etcd server on this machine isn't fit to be killed: {server.note}")
    return server.path


def _cluster(binary: str, directory: Path, num_nodes: int) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(binary, directory, num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def one_node(etcd_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One node for the tests of a file; a test that kills it starts it again."""
    yield from _cluster(etcd_binary, tmp_path_factory.mktemp("etcd1"), 1)


@pytest.fixture(scope="module")
def three_nodes(etcd_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three nodes for the tests of a file; a test that kills one starts it again."""
    yield from _cluster(etcd_binary, tmp_path_factory.mktemp("etcd3"), 3)


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"/test/{uuid.uuid4().hex}/"
