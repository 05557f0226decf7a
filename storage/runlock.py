"""Who may run a job on a run's directory: one at a time, told by a lock that dies with its process.

`<run>/run.lock` holds a POSIX record lock (fcntl), not flock(2): a forked child doesn't inherit it, so a worker that
outlives its launcher can't keep the run locked. Such a lock is lost as soon as the process closes *any* descriptor
of that file. So it is opened here only, and never while this process holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import struct
import threading

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import AccessError, BusyError
from ckptrt.storage.owner import this_owner
from ckptrt.storage.tiers.local import local_path

__all__ = ["LOCK", "RunHold", "hold_run", "run_holder"]

LOCK = "run.lock"

_log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[tuple[int, int, int]] = set()  # pid (a forked child holds nothing), device and inode of held lock files
_guard = threading.Lock()


class RunHold:
    """A run that is held until release() or the end of this process. Release in a forked child does nothing.

    `is_locked` is False where nothing was locked: object stores, and file systems without locks.
    """

    def __init__(self, url: str, fd: int | None = None) -> None:
        self.url = url
        self._fd = fd
        self._pid = os.getpid()

    @property
    def is_locked(self) -> bool:
        return self._fd is not None and self._pid == os.getpid()

    def release(self) -> None:
        """Let go of the run; may be called twice."""
        with _guard:
            fd, self._fd = self._fd, None
            if fd is None:
                return
            if self._pid == os.getpid():
                _held.discard(_identity(os.fstat(fd)))
            os.close(fd)

    def __enter__(self) -> RunHold:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def hold_run(url: str, clock: Clock | None = None, *, job: str = "") -> RunHold:
    """Take the run for this process, or raise BusyError that names who has it.

    job: an id that several processes may have. One of them that holds the run is no hindrance (it led the job, and
    sleeps): the fences keep it from publishing anything more. Nothing is locked then.

    Only a local directory is locked; it is made if it isn't there. On an object store the hold does nothing: there,
    and on file systems without locks, the fences protect the run. A second job then isn't kept out at its start, but
    whoever writes the newer fence wins and the other can't publish anything more.
    """
    if "://" in url and not url.startswith("file:"):
        return RunHold(url)
    path = os.path.join(local_path(url), LOCK)
    with _guard:
        fd = _open(path)
        if fd is None:
            raise _busy(url, {**_about_me(clock), "since": ""}, "this very process")
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read_owner(fd)
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                if job and owner.get("job") == job:
                    _log.warning("event=former_leader_holds run=%s pid=%s host=%s", url, owner["pid"], owner["host"])
                    return RunHold(url)
                raise _busy(url, owner, "another job") from None
            if error.errno in _NO_LOCKS:
                _log.warning("no locks on this file system, so a second job isn't kept out at its start: run=%s", url)
                return RunHold(url)
            raise AccessError(f"can't lock {path}: {error.strerror}", safe="nothing was changed") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({**_about_me(clock), "job": job}).encode() + b"\n", 0)
        _held.add(_identity(os.fstat(fd)))
    return RunHold(url, fd)


def run_holder(url: str) -> str:
    """Who holds the run at a local directory, for people; empty if nobody does. Takes no lock and changes nothing.

    Not for a process that holds a run itself: closing the file would let go of it.
    """
    try:
        fd = os.open(os.path.join(local_path(url), LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        # The kernel's answer for a write lock on all of the file: the lock in its way, or "unlocked".
        flock = struct.Struct("hhqqi4x")
        asked = flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = flock.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return ""
        owner = _read_owner(fd)
    finally:
        os.close(fd)
    return f"pid {owner.get('pid', pid)} of {owner.get('user', '?')} on {owner.get('host', '?')}"


def _open(path: str) -> int | None:
    """A descriptor of the lock file, or None if this process holds it: closing a second one would drop the lock."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path) and _identity(os.stat(path)) in _held:
            return None
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise AccessError(
            f"can't write {path}: {error.strerror}",
            safe="nothing was changed",
            hint="name a directory that you may write to, or have its permissions changed",
        ) from error


def _about_me(clock: Clock | None) -> dict[str, object]:
    owner = this_owner()
    return {"host": owner.host, "pid": owner.pid, "user": owner.user, "since": (clock or SystemClock()).wall_iso()}


def _read_owner(fd: int) -> dict[str, object]:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}  # the holder is just writing it; that the run is held is known all the same
    return owner if isinstance(owner, dict) else {}


def _busy(url: str, owner: dict[str, object], who: str) -> BusyError:
    if owner:
        since = f" since {owner['since']}" if owner.get("since") else ""
        who = f"{who}, pid {owner.get('pid')} of {owner.get('user')} on {owner.get('host')}{since}"
    return BusyError(
        f"{url} is in use by {who}",
        safe="all its checkpoints; nothing was changed",
        hint="wait for that job or stop it, or give this one another directory",
    )


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino
