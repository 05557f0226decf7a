"""A file system that writes down all that is done to it, and can be told to fail, to stop dead, or to take turns.

`WatchedFs` sits where `Fs` does, below LocalTier. Every call that changes something becomes an `Op` in its log, with
enough in it to do it again elsewhere (support_crash_disk.py); what a job reported is noted between them.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptrt.storage.tiers.fs import Fs

__all__ = ["DATA_OPS", "ENTRY_OPS", "ROOT", "Killed", "Op", "Turns", "WatchedFs"]

ROOT = 1  # the inode of the folder that is there, and durable, before anything is done
DATA_OPS = frozenset({"write", "allocate", "truncate"})
ENTRY_OPS = frozenset({"create", "link", "rename", "unlink", "mkdir", "rmdir"})


class Killed(BaseException):
    """The process is dead: nothing that it would have done after this call is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One change, sync or note.

    inode: the file or folder that it is about. folder, name: the entry that it changes; `source` is a rename's.
    """

    kind: str
    inode: int = 0
    folder: int = 0
    name: str = ""
    source: str = ""
    offset: int = 0
    data: bytes = b""
    size_bytes: int = 0
    note: Any = None


class WatchedFs(Fs):
    """Real system calls below one durable folder, logged.

    on_call is asked before each with its name and number (from 1). It may raise, or return a fault: "short" makes a
    read or write do half of its work, an errno of "lost" kind (negative) is raised after the work was done.
    """

    def __init__(self, base: str, *, syncs: bool = False) -> None:
        """syncs: really sync files and folders; else that is only put down, which is enough for the model."""
        self.base = base
        self._syncs = syncs
        self.log: list[Op] = []
        self.num_calls = 0
        self.on_call: Callable[[str, int], str | int | None] = lambda call, number: None
        self.open_files: dict[int, int] = {}  # descriptor -> inode
        self._inodes: dict[str, int] = {base: ROOT}
        self._last_inode = ROOT
        self._dead = False

    def note(self, *note: Any) -> None:
        """Put down what the job has just done or learnt."""
        self.log.append(Op(kind="note", note=note))

    def reap(self) -> list[int]:
        """Close what a killed or leaking process had open, as the kernel would. Returns the descriptors."""
        left = list(self.open_files)
        for fd in left:
            os.close(fd)
        self.open_files.clear()
        return left

    def revive(self) -> None:
        """A new process on the same disk; the kernel has closed what a killed one had open."""
        if self._dead:
            self._dead = False
            self.reap()

    def _enter(self, call: str) -> str | int | None:
        if self._dead:
            raise Killed(call)
        self.num_calls += 1
        try:
            return self.on_call(call, self.num_calls)
        except Killed:
            self._dead = True
            raise

    @staticmethod
    def _leave(fault: str | int | None) -> None:
        """Lose the answer of a call that was done."""
        if isinstance(fault, int) and fault < 0:
            raise OSError(-fault, os.strerror(-fault))

    def _new(self, path: str) -> int:
        self._last_inode += 1
        self._inodes[path] = self._last_inode
        return self._last_inode

    def _entry(self, kind: str, path: str, inode: int, source: str = "") -> None:
        folder, _, name = path.rpartition("/")
        self.log.append(Op(kind=kind, inode=inode, folder=self._inodes[folder], name=name, source=source))

    # --- files

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        self._enter("open")
        fd = super().open(path, flags, mode)
        inode = self._inodes.get(path)
        if flags & os.O_CREAT and inode is None:
            inode = self._new(path)
            self._entry("create", path, inode)
        elif flags & os.O_TRUNC and inode:
            self.log.append(Op(kind="truncate", inode=inode))
        self.open_files[fd] = inode or 0
        return fd

    def close(self, fd: int) -> None:
        if self._dead:
            raise Killed("close")
        self.open_files.pop(fd, None)
        try:
            self._enter("close")
        finally:
            super().close(fd)  # Linux lets go of the descriptor whatever close(2) says

    def pread_into(self, fd: int, out: memoryview, offset: int) -> int:
        fault = self._enter("pread")
        if fault == "short":
            out = out[: max(len(out) // 2, 1)]
        return super().pread_into(fd, out, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        fault = self._enter("pwrite")
        if fault == "short" and len(data) > 1:
            data = data[: len(data) // 2]
        count = super().pwrite(fd, data, offset)
        self.log.append(Op(kind="write", inode=self.open_files[fd], offset=offset, data=bytes(data[:count])))
        return count

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self._enter("fallocate")
        super().fallocate(fd, size_bytes)
        self.log.append(Op(kind="allocate", inode=self.open_files[fd], size_bytes=size_bytes))

    def set_direct(self, fd: int, direct: bool) -> None:
        self._enter("fcntl")
        super().set_direct(fd, direct)

    def fsync(self, fd: int) -> None:
        try:
            self._enter("fsync")
            if self._syncs:
                super().fsync(fd)
        except OSError:
            self.log.append(Op(kind="fsync_failed", inode=self.open_files[fd]))
            raise
        self.log.append(Op(kind="fsync", inode=self.open_files[fd]))

    def fstat(self, fd: int) -> os.stat_result:
        self._enter("fstat")
        return super().fstat(fd)

    # --- names

    def link(self, source: str, target: str) -> None:
        fault = self._enter("link")
        super().link(source, target)
        self._inodes[target] = self._inodes[source]
        self._entry("link", target, self._inodes[source])
        self._leave(fault)

    def rename(self, source: str, target: str) -> None:
        """Within one folder; replaces what is there. In the product only exports do this; here planted bugs do."""
        self._enter("rename")
        os.rename(source, target)
        self._inodes[target] = self._inodes.pop(source)
        self._entry("rename", target, self._inodes[target], source.rpartition("/")[2])

    def unlink(self, path: str) -> None:
        fault = self._enter("unlink")
        super().unlink(path)
        self._entry("unlink", path, self._inodes.pop(path))
        self._leave(fault)

    def mkdir(self, path: str) -> None:
        fault = self._enter("mkdir")
        super().mkdir(path)
        self._entry("mkdir", path, self._new(path))
        self._leave(fault)

    def rmdir(self, path: str) -> None:
        fault = self._enter("rmdir")
        super().rmdir(path)
        self._entry("rmdir", path, self._inodes.pop(path))
        self._leave(fault)

    def fsync_dir(self, path: str) -> None:
        self._enter("fsync_dir")
        if self._syncs or not os.path.isdir(path):
            super().fsync_dir(path)
        if path in self._inodes:  # folders above the base were there before
            self.log.append(Op(kind="fsync_dir", inode=self._inodes[path]))

    def scandir(self, path: str) -> Sequence[os.DirEntry[str]]:
        self._enter("scandir")
        return super().scandir(path)

    def stat(self, path: str) -> os.stat_result:
        self._enter("stat")
        return super().stat(path)

    def lstat(self, path: str) -> os.stat_result:
        self._enter("lstat")
        return super().lstat(path)

    def realpath(self, path: str) -> str:
        self._enter("realpath")
        return super().realpath(path)


class Turns:
    """Lets one of several programs run at a time and draws who is next at each call of the file system."""

    def __init__(self, seed: object) -> None:
        self._rng = random.Random(f"turns {seed}")
        self._changed = threading.Condition()
        self._names: dict[int, int] = {}  # thread -> program
        self._stay = self._rng.choice(
            (0.0, 0.5, 0.9, 0.97)
        )  # how often the same program goes on: bursts find other bugs
        self._alive: list[int] = []
        self._at: int | None = None
        self.errors: dict[int, BaseException] = {}

    def run(self, *programs: Callable[[], None]) -> None:
        """Run all to their ends; what they raised is in `errors`, by program."""
        self._alive = list(range(len(programs)))
        threads = [threading.Thread(target=self._run, args=(i, p), daemon=True) for i, p in enumerate(programs)]
        self._at = self._rng.choice(self._alive)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def step(self) -> None:
        """The calling program has reached a point at which another may go on."""
        me = self._names.get(threading.get_ident())
        if me is None:
            return
        with self._changed:
            self._draw()
            self._changed.wait_for(lambda: self._at == me)

    def _draw(self) -> None:
        if self._at in self._alive and self._rng.random() < self._stay:
            return
        self._at = self._rng.choice(self._alive) if self._alive else None
        self._changed.notify_all()

    def _run(self, number: int, program: Callable[[], None]) -> None:
        self._names[threading.get_ident()] = number
        with self._changed:
            self._changed.wait_for(lambda: self._at == number)
        try:
            with suppress(Killed):
                program()
        except Exception as error:  # noqa: BLE001 the caller looks at it
            self.errors[number] = error
        finally:
            with self._changed:
                self._names.pop(threading.get_ident(), None)
                self._alive.remove(number)
                self._draw()
