"""The one door to the local disk: a method per system call, so that all of them can be logged, failed or replayed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

__all__ = ["Fs"]

_libc = ctypes.CDLL(None, use_errno=True)


class Fs:
    """Plain system calls. Override a method to watch it or to make it fail; every failure is an OSError.

    Nothing here retries, caches or knows what the bytes mean. Paths are absolute.
    """

    # --- files

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread_into(self, fd: int, out: memoryview, offset: int) -> int:
        """Read up to `len(out)` bytes; 0 means that the file ends here."""
        return os.preadv(fd, [out], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data`, and say how much."""
        return os.pwrite(fd, data, offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Reserve the blocks of a file and set its size.

        fallocate(2) itself, since posix_fallocate(3) of glibc writes a byte to each block where the file system
        can't reserve any, which is slow and fails under O_DIRECT.
        """
        if not hasattr(_libc, "fallocate"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:  # as Python does for the calls that it wraps itself
                raise OSError(code, os.strerror(code))

    def set_direct(self, fd: int, direct: bool) -> None:
        """Turn O_DIRECT on or off for an open file."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    # --- names

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; never replaces one."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """Replaces a file or an empty folder that is there: never used within a run."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def scandir(self, path: str) -> Sequence[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return list(entries)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def realpath(self, path: str) -> str:
        return os.path.realpath(path)
