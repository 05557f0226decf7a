"""One new file, written once: past the page cache where the file system allows it, and synced before it counts."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress

from ckptrt.storage.tiers.fs import Fs

__all__ = ["FileWriter"]

_BLOCK_BYTES = 4096  # what O_DIRECT asks of address, length and offset, on any disk of today
_DIRECT_FROM_BYTES = 1 << 20  # below this the page cache is as good
_BOUNCE_BYTES = 1 << 20
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FileWriter:
    """Writes pieces in order to an empty open file, then fsyncs and closes it.

    Any error condemns the file: after a failed fsync the kernel may have dropped the bytes and forgotten that, so
    a second fsync would lie (which is why nothing here tries again). The caller unlinks it.
    """

    def __init__(self, fs: Fs, fd: int, size_bytes: int) -> None:
        self._fs = fs
        self._fd = fd
        self._size_bytes = size_bytes
        self._offset = 0
        self._direct = False
        self._bounce: mmap.mmap | None = None

    def write_all(self, pieces: Iterable[memoryview]) -> None:
        """Write everything and make it durable. The descriptor is closed in any case, whatever the outcome."""
        try:
            self._prepare()
            for piece in pieces:
                self._write_piece(piece)
            self._fs.fsync(self._fd)
        except BaseException:
            self._close_condemned()
            raise
        self._fs.close(self._fd)  # some network file systems tell of a failed write only here

    def _close_condemned(self) -> None:
        with suppress(OSError):  # the first error says more
            self._fs.close(self._fd)

    def _prepare(self) -> None:
        if self._size_bytes < _DIRECT_FROM_BYTES:
            return
        try:
            self._fs.fallocate(self._fd, self._size_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        try:
            self._fs.set_direct(self._fd, True)
            self._direct = True
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise

    def _write_piece(self, piece: memoryview) -> None:
        done = 0
        while done < piece.nbytes:
            rest = piece[done:]
            whole = rest.nbytes - rest.nbytes % _BLOCK_BYTES
            if self._direct and whole and self._offset % _BLOCK_BYTES == 0:
                count = self._write_direct(rest[:whole])
            else:
                self._leave_direct()
                count = self._checked(self._fs.pwrite(self._fd, rest, self._offset))
            done += count
            self._offset += count

    def _write_direct(self, blocks: memoryview) -> int:
        """Write some whole blocks: as they lie if the kernel takes their address, else by way of an aligned copy."""
        try:
            return self._checked(self._fs.pwrite(self._fd, blocks, self._offset))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        bounce = self._bounce = self._bounce or mmap.mmap(-1, _BOUNCE_BYTES)
        size = min(blocks.nbytes, _BOUNCE_BYTES)
        with memoryview(bounce) as aligned, aligned[:size] as part:
            part[:] = blocks[:size]
            try:
                return self._checked(self._fs.pwrite(self._fd, part, self._offset))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        self._leave_direct()  # so it isn't the address: this file system lets one open for O_DIRECT but not write
        return self._checked(self._fs.pwrite(self._fd, blocks, self._offset))

    def _leave_direct(self) -> None:
        if self._direct:
            self._fs.set_direct(self._fd, False)
            self._direct = False

    def _checked(self, count: int) -> int:
        if count <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return count
