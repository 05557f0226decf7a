"""What `ckptrt doctor` asks of the machine: memory, limits, mounts, versions, and whether etcd answers. Linux."""

from __future__ import annotations

import json
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from ckptrt.storage.slots import SLOTS
from ckptrt.storage.units import size_text

__all__ = ["Check", "Mount", "check_etcd", "check_machine", "mount_of", "parse_mounts"]

_FILES_MIN = 1024
_SHM_MIN_BYTES = 64 << 20  # a container's default, too little for data loaders with workers
_ETCD_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. `do`: what to do about it, empty if nothing."""

    name: str
    result: Literal["ok", "warn", "fail", "skip"]
    what: str
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system: where, of which kind, and with which options."""

    path: str
    kind: str
    options: frozenset[str]


def parse_mounts(text: str) -> list[Mount]:
    """What /proc/self/mountinfo lists, the last mounted last."""
    found = []
    for line in text.splitlines():
        own, _, rest = line.partition(" - ")
        fields, super_fields = own.split(" "), rest.split(" ")
        path = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        options = frozenset((*fields[5].split(","), *super_fields[2].split(",")))
        found.append(Mount(path=path, kind=super_fields[0], options=options))
    return found


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that a real path lies on. Of several at one place the last one hides the others."""
    above = [m for m in mounts if m.path == "/" or path == m.path or path.startswith(m.path + "/")]
    return max(reversed(above), key=lambda mount: len(mount.path), default=None)


def check_machine(snapshot_bytes: int | None) -> Iterator[Check]:
    """snapshot_bytes: one rank's share of the last checkpoint, if there is one."""
    yield _versions()
    yield _memory(snapshot_bytes)
    yield _open_files()
    yield _shared_memory()


def _versions() -> Check:
    found = [f"python {platform.python_version()}"]
    for name in ("ckptrt", "torch", "s3fs"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    missing = "no torch" in found
    return Check(
        name="versions",
        result="warn" if missing else "ok",
        what=", ".join(found),
        do="pip install torch, on machines that train" if missing else "",
    )


def _memory(snapshot_bytes: int | None) -> Check:
    available = _available_bytes()
    if available is None:
        return Check(name="memory", result="skip", what="how much is available can't be told here")
    text = f"{size_text(available)} available"
    if snapshot_bytes is None:
        return Check(name="memory", result="ok", what=f"{text}; each rank takes {SLOTS} times the size of its state")
    needed = SLOTS * snapshot_bytes
    text += f"; {SLOTS} snapshots of a rank like those of the last checkpoint take {size_text(needed)}"
    if needed > available:
        return Check(name="memory", result="warn", what=text, do="give the job more memory, or use more ranks")
    return Check(name="memory", result="ok", what=text)


def _available_bytes() -> int | None:
    """What the machine has left, or the container if that is less."""
    meminfo = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    text = meminfo.get("MemAvailable", "").split()
    found = [int(text[0]) << 10] if text else []
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} allowed for each process"
    if soft != resource.RLIM_INFINITY and soft < _FILES_MIN:
        do = f"ulimit -n {_FILES_MIN}" if hard == resource.RLIM_INFINITY or hard >= _FILES_MIN else "raise the limit"
        return Check(name="open files", result="warn", what=text, do=f"{do}, before the job starts")
    return Check(name="open files", result="ok", what=text)


def _shared_memory() -> Check:
    """Snapshots lie in memfds, which need no mount; data loaders with workers use /dev/shm."""
    try:
        os.close(os.memfd_create("ckptrt-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Check(
            name="shared memory", result="fail", what=f"memfd_create: {error.strerror}", do="use Linux 3.17 or newer"
        )
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return Check(name="shared memory", result="ok", what="memfds work; there is no /dev/shm")
    size_bytes = shm.f_frsize * shm.f_blocks
    text = f"memfds work, so snapshots need no /dev/shm; that has {size_text(size_bytes)}"
    if size_bytes <= _SHM_MIN_BYTES:
        do = "data loaders with workers need more: docker run --shm-size, or an emptyDir of medium Memory"
        return Check(name="shared memory", result="warn", what=text, do=do)
    return Check(name="shared memory", result="ok", what=text)


def check_etcd(endpoint: str) -> Check:
    """Ask one endpoint of etcd how it is. Needs no account; one that wants client certificates can't be asked."""
    # Slow to load, and seldom asked for.
    import ssl
    import urllib.error
    import urllib.request

    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    do = "check the address, and that etcd runs; training goes on without it, restarts don't"
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/health", timeout=_ETCD_TIMEOUT_S) as answer:
            health = json.load(answer)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return Check(name="etcd", result="skip", what=f"{url} can't be asked without the job's certificates")
        return Check(name="etcd", result="fail", what=f"{url} doesn't answer: {error.reason}", do=do)
    except (OSError, ValueError) as error:
        return Check(name="etcd", result="fail", what=f"{url} doesn't answer as etcd does: {error}", do=do)
    if not isinstance(health, dict) or str(health.get("health")).lower() != "true":
        return Check(name="etcd", result="fail", what=f"{url} says that it isn't healthy", do=do)
    return Check(name="etcd", result="ok", what=f"{url} is healthy")


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
