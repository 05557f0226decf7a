"""A directory of a POSIX file system: node-local NVMe, or a shared mount.

An object is written under a hidden temporary name of its own folder, made durable, and only then linked to its
name. link(2) never replaces, so one of any number of writers wins, and no reader can see a part of an object.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import unquote, urlsplit

from ckptrt.errors import AccessError, NotFoundError, StorageError, UsageError
from ckptrt.storage.tiers.base import Entry
from ckptrt.storage.tiers.checks import CountedPieces, check_range, short_object
from ckptrt.storage.tiers.filewriter import FileWriter
from ckptrt.storage.tiers.fs import Fs
from ckptrt.storage.tiers.names import TEMP, check_name, check_prefix
from ckptrt.storage.tiers.oserrors import exists_error, from_oserror, not_found_error

__all__ = ["LocalTier", "local_path"]

_log = logging.getLogger(__name__)

_ABSENT = (errno.ENOENT, errno.ENOTDIR)


def local_path(url: str) -> str:
    """The absolute path that a bare path or a file:// url means, without a closing slash."""
    path = url
    if url.startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{url!r} names the host {parts.netloc!r}; a file url has three slashes: file:///path")
        path = unquote(parts.path)
    if not path or "\0" in path:
        raise UsageError(f"{url!r} is no path of a directory", hint="name a directory, such as /mnt/nvme/run1")
    return os.path.abspath(path)


class LocalTier:
    """Objects as files below one directory, which is made at the first write.

    Folders that are symbolic links are read and written through, but nothing outside the root is ever deleted.
    """

    def __init__(self, path: str, *, fs: Fs | None = None) -> None:
        self.root = local_path(path)
        self.url = "file://" + self.root
        self._fs = fs or Fs()
        self._durable_dirs: set[str] = set()  # folders whose own names are known to survive a power cut
        self._lock = threading.Lock()
        self._warned = False

    # --- writing

    def create(self, name: str, data: bytes) -> None:
        self._publish(name, [memoryview(data)], len(data))

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        self._publish(name, pieces, size_bytes)

    def _publish(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        path = self._path(name)
        counted = CountedPieces(pieces, size_bytes, self.url, name)
        with self._errors(name, "write"):
            folder = os.path.dirname(path)
            if self._exists(path):
                self._settle(folder)
                raise exists_error(self.url, name)
            temp, fd = self._open_temp(folder)
            try:
                FileWriter(self._fs, fd, size_bytes).write_all(counted)
                if not self._link(temp, path):
                    self._settle(folder)
                    raise exists_error(self.url, name)
            finally:
                self._unlink(temp)
            try:
                self._sync_dir(folder)
            except OSError:
                self._unlink(path)  # what may not survive a power cut must not be taken for written
                raise

    def _open_temp(self, folder: str) -> tuple[str, int]:
        """Open a new hidden file, making its folder first if need be."""
        self._make_dirs(folder)
        temp = f"{folder}/{TEMP}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return temp, self._fs.open(temp, flags)
        except FileNotFoundError:
            self._forget_dirs(folder)  # someone removed the folder since this tier made it
            self._make_dirs(folder)
            return temp, self._fs.open(temp, flags)

    def _link(self, temp: str, path: str) -> bool:
        """Give the file its name; False if the name is taken.

        A network file system may have done it and lost the answer: the count of names tells.
        """
        try:
            self._fs.link(temp, path)
        except OSError as error:
            if self._fs.lstat(temp).st_nlink > 1:
                return True
            if error.errno == errno.EEXIST:
                return False
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
                raise StorageError(
                    f"can't write below {self.url}: its file system has no hard links, which a safe write needs",
                    safe="nothing was written",
                    hint="point the run at another file system or at an object store",
                ) from error
            raise
        return True

    def _make_dirs(self, folder: str) -> None:
        """Make a folder and those above it, each durable before anything is put into it."""
        with self._lock:
            if folder in self._durable_dirs:
                return
        if self._mkdir(folder):
            self._sync_dir(os.path.dirname(folder))
            self._vouch(os.path.dirname(folder))
        else:
            self._vouch(folder)
        with self._lock:
            self._durable_dirs.add(folder)

    def _settle(self, folder: str) -> None:
        """Make durable what another process has put into a folder, and the folder."""
        self._sync_dir(folder)
        self._vouch(folder)

    def _vouch(self, folder: str) -> None:
        """Make the name of a folder durable that was there already, and those of all folders above it.

        Another process may have made any of them, and have died before it could sync them.
        """
        while True:
            above = os.path.dirname(folder)
            with self._lock:
                if folder in self._durable_dirs:
                    return
            if self._fs.stat(above).st_dev != self._fs.stat(folder).st_dev or above == folder:
                return  # a mount point: nothing that a job does can lose its name
            try:
                self._sync_dir(above)
            except PermissionError:
                return  # not ours to open, so it isn't one of our jobs either that has changed it
            with self._lock:
                self._durable_dirs.add(folder)
            folder = above

    def _mkdir(self, folder: str) -> bool:
        """Make one folder, after those above it; False if it is there."""
        above = os.path.dirname(folder)
        try:
            self._fs.mkdir(folder)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError:
            self._forget_dirs(above)  # it may have been there when this tier last looked
            self._make_dirs(above)
        try:
            self._fs.mkdir(folder)
        except FileExistsError:
            return False
        return True

    def _sync_dir(self, folder: str) -> None:
        try:
            self._fs.fsync_dir(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            if not self._warned:  # some network file systems: names are as safe as their server makes them
                self._warned = True
                _log.warning("folders can't be synced there url=%s error=%s", self.url, error)

    def _forget_dirs(self, folder: str) -> None:
        with self._lock:
            self._durable_dirs = {d for d in self._durable_dirs if d != folder and not d.startswith(folder + "/")}

    def _unlink(self, path: str) -> None:
        """Remove what a write leaves over, without hiding the error that may be on its way."""
        try:
            self._fs.unlink(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                _log.warning("file left behind, delete_prefix removes it path=%s error=%s", path, error)

    # --- reading

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(self.url, name, start, size_bytes)
        with self._errors(name, "read", writing=False), self._open_object(name) as (fd, actual_bytes):
            end = max(start, actual_bytes) if size_bytes is None else start + size_bytes
            if max(start, end) > actual_bytes:
                raise short_object(self.url, name, start, end, actual_bytes)
            data = bytearray(end - start)
            self._fill(fd, name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        check_range(self.url, name, start, out.nbytes)
        with self._errors(name, "read", writing=False), self._open_object(name) as (fd, _), out.cast("B") as flat:
            self._fill(fd, name, start, flat)

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in names:
            with suppress(NotFoundError):
                found[name] = self.read(name)
        return found

    def _fill(self, fd: int, name: str, start: int, out: memoryview) -> None:
        done = 0
        while done < out.nbytes:
            count = self._fs.pread_into(fd, out[done:], start + done)
            if not count:
                raise short_object(self.url, name, start, start + out.nbytes, start + done)
            done += count

    @contextmanager
    def _open_object(self, name: str) -> Iterator[tuple[int, int]]:
        """The open file and its size; NotFoundError if no file has that name."""
        try:
            # Without O_NONBLOCK a FIFO that somebody left here would block the reader until somebody writes to it.
            fd = self._fs.open(self._path(name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _ABSENT:
                raise not_found_error(self.url, name) from None
            raise
        try:
            found = self._fs.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise not_found_error(self.url, name)
            yield fd, found.st_size
        finally:
            self._fs.close(fd)

    def size(self, name: str) -> int:
        with self._errors(name, "look up", writing=False), self._open_object(name) as (_, actual_bytes):
            return actual_bytes

    def list(self, prefix: str) -> list[Entry]:
        folder = self._path(check_prefix(self.url, prefix)[:-1]) if prefix else self.root
        with self._errors(prefix, "list", writing=False):
            try:
                found = self._fs.scandir(folder)
            except OSError as error:
                if error.errno in _ABSENT:
                    return []
                raise
            entries = [self._entry(prefix, item) for item in found if not item.name.startswith(TEMP)]
        return sorted((entry for entry in entries if entry), key=lambda entry: entry.name)

    def _entry(self, prefix: str, item: os.DirEntry[str]) -> Entry | None:
        """What a name stands for; None if it is neither file nor folder, or has just gone."""
        try:
            found = self._fs.stat(item.path)
        except OSError as error:
            if error.errno in (*_ABSENT, errno.ELOOP):
                return None
            raise
        if stat.S_ISDIR(found.st_mode):
            return Entry(name=f"{prefix}{item.name}/")
        if stat.S_ISREG(found.st_mode):
            return Entry(name=prefix + item.name, size_bytes=found.st_size, modified_s=found.st_mtime)
        return None

    # --- deleting

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._errors(name, "delete", writing=False):
            self._check_inside(path)
            try:
                self._fs.unlink(path)
                self._sync_dir(os.path.dirname(path))
            except OSError as error:
                if error.errno not in (*_ABSENT, errno.EISDIR):
                    raise

    def delete_prefix(self, prefix: str) -> None:
        folder = self._path(check_prefix(self.url, prefix, may_be_empty=False)[:-1])
        with self._errors(prefix, "delete", writing=False):
            self._check_inside(folder)
            self._forget_dirs(folder)
            try:
                linked = stat.S_ISLNK(self._fs.lstat(folder).st_mode)
                if linked:
                    self._fs.unlink(folder)
                else:
                    self._remove_tree(folder)
                self._sync_dir(os.path.dirname(folder))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise

    def _remove_tree(self, folder: str) -> None:
        """Remove a folder with all in it, links as links; whatever has gone already is no error."""
        for item in self._fs.scandir(folder):
            with suppress(FileNotFoundError):
                if item.is_dir(follow_symlinks=False):
                    self._remove_tree(item.path)
                else:
                    self._fs.unlink(item.path)
        with suppress(FileNotFoundError):
            self._fs.rmdir(folder)

    def settle(self, prefix: str) -> None:
        folder = self._path(check_prefix(self.url, prefix)[:-1]) if prefix else self.root
        with self._errors(prefix, "sync"):
            try:
                self._settle(folder)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        folder = self._path(check_prefix(self.url, prefix)[:-1]) if prefix else self.root
        found = []
        with self._errors(prefix, "sweep", writing=False):
            try:
                items = [item for item in self._fs.scandir(folder) if item.name.startswith(TEMP)]
            except OSError as error:
                if error.errno in _ABSENT:
                    return []
                raise
            if items:
                self._check_inside(f"{folder}/{items[0].name}")
            for item in items:
                entry = self._entry(prefix, item)
                if entry is None or entry.is_folder or entry.modified_s >= before_s:
                    continue
                found.append(entry)
                if not dry_run:
                    with suppress(FileNotFoundError):
                        self._fs.unlink(item.path)
        return found

    def _check_inside(self, path: str) -> None:
        """Refuse to delete through a symbolic link that leads out of the root."""
        root = self._fs.realpath(self.root)
        parent = self._fs.realpath(os.path.dirname(path))
        if parent != root and not parent.startswith(root.rstrip("/") + "/"):
            raise AccessError(
                f"won't delete {path}: a symbolic link leads it out of {self.root}, to {parent}",
                safe="nothing was deleted",
                hint="delete it there by hand if it may go",
            )

    def probe(self) -> None:
        """Nothing to prove."""

    def close(self) -> None:
        """Nothing is held open between calls."""

    # --- helpers

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{check_name(self.url, name)}"

    def _exists(self, path: str) -> bool:
        try:
            self._fs.lstat(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise
        return True

    @contextmanager
    def _errors(self, name: str, doing: str, *, writing: bool = True) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise from_oserror(error, self.url, name, doing, writing=writing) from error
