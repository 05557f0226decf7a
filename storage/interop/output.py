"""Where an export goes: put together under another name beside it, and given its own name once it is whole.

A folder that was exported has `ckptrt-export.json`, which says what it was made of and which files belong to it. Only
such a folder, with nothing else in it, is replaced when asked for.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
from typing import Any

from ckptrt.errors import ExistsError, NotFoundError, StorageError, UsageError
from ckptrt.storage.tiers.fs import Fs
from ckptrt.storage.tiers.local import LocalTier, local_path
from ckptrt.storage.tiers.oserrors import from_oserror

__all__ = ["NOTE", "Output"]

_log = logging.getLogger(__name__)

NOTE = "ckptrt-export.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


class Output:
    """A folder (or, with `is_file`, one file) that appears whole or not at all.

    Use as a context: files are written to `tier`, which lies in `folder`; `publish` gives them their place, and without
    it nothing is left. Raises ExistsError at once if something is there that must not be replaced.
    """

    def __init__(self, path: str, *, is_file: bool = False, force: bool = False, fs: Fs | None = None) -> None:
        if "://" in path and not path.startswith("file:"):
            raise UsageError(
                f"can't export to {path}: formats of others are written to a local directory",
                safe="nothing was written",
                hint="export to a directory and copy that, or use `ckptrt cp` for a checkpoint as it is",
            )
        self.path = local_path(path)
        self._is_file = is_file
        self._force = force
        self._fs = fs or Fs()
        parent, name = os.path.split(self.path)
        self._parent = LocalTier(parent, fs=self._fs)
        short = name.encode()[:64].decode(errors="ignore")  # names have at most 255 bytes
        self._temp = f".{short}.export-{secrets.token_hex(4)}"
        self.folder = f"{parent.rstrip('/')}/{self._temp}"
        self.tier = LocalTier(self.folder, fs=self._fs)
        self.check()

    def check(self) -> None:
        """ExistsError if publish() would have to refuse."""
        try:
            found = self._fs.lstat(self.path)
            if self._is_file:
                if not stat.S_ISREG(found.st_mode) or not self._force:
                    raise self._taken("it is there already", can_force=stat.S_ISREG(found.st_mode))
            elif not stat.S_ISDIR(found.st_mode):
                raise self._taken("it is there already and no directory", can_force=False)
            else:
                self._check_folder()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._error(error, "look at") from error

    def _check_folder(self) -> None:
        names = [entry.name for entry in self._fs.scandir(self.path)]
        if not names:
            return
        if NOTE not in names:
            raise self._taken("it isn't empty, and no earlier export", can_force=False)
        foreign = sorted(self._walk("") - self._noted() - {NOTE})
        if foreign:
            raise self._taken(f"it holds an earlier export and something else ({foreign[0]})", can_force=False)
        if not self._force:
            raise self._taken("it holds an earlier export", can_force=True)

    def _walk(self, prefix: str) -> set[str]:
        """Every file below the folder, hidden ones too."""
        found: set[str] = set()
        for entry in self._fs.scandir(f"{self.path}/{prefix}"):
            if entry.is_dir(follow_symlinks=False):
                found |= self._walk(f"{prefix}{entry.name}/") or {f"{prefix}{entry.name}/"}
            else:
                found.add(prefix + entry.name)
        return found

    def _noted(self) -> set[str]:
        try:
            return set(map(str, json.loads(LocalTier(self.path, fs=self._fs).read(NOTE))["files"]))
        except (ValueError, KeyError, TypeError, RecursionError, NotFoundError):
            return set()

    def note(self, facts: dict[str, Any]) -> None:
        """Write the note beside the files. facts: its `files` are the names of all files of the folder."""
        self.tier.create(NOTE, json.dumps(facts, indent=2).encode() + b"\n")

    def sync(self, name: str) -> None:
        """Make a file durable that something else has written into `folder`."""
        try:
            fd = self._fs.open(f"{self.folder}/{name}", os.O_RDONLY)
            try:
                self._fs.fsync(fd)
            finally:
                self._fs.close(fd)
        except OSError as error:
            raise self._error(error, "sync") from error

    def publish(self, file: str = "") -> None:
        """Give the folder, or that one file of it, its place, durable. ExistsError if somebody took it meanwhile."""
        self.check()
        try:
            if self._is_file:
                self._place_file(f"{self.folder}/{file}")
            else:
                self._place_folder()
            self._fs.fsync_dir(os.path.dirname(self.path))
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._taken("something was put there meanwhile", can_force=False) from None
            raise self._error(error, "write") from error

    def _place_file(self, file: str) -> None:
        if self._force:
            self._fs.rename(file, self.path)
        else:
            self._fs.link(file, self.path)

    def _place_folder(self) -> None:
        old = self.folder + ".old"
        try:
            self._fs.rename(self.folder, self.path)  # onto nothing, or an empty folder
            return
        except OSError as error:
            if error.errno not in _TAKEN or not self._force:
                raise
        self._fs.rename(self.path, old)
        try:
            self._fs.rename(self.folder, self.path)
        except OSError:
            self._fs.rename(old, self.path)
            raise
        self._parent.delete_prefix(f"{self._temp}.old/")

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._parent.delete_prefix(f"{self._temp}/")
        except StorageError as error:  # what became of the export is the news
            _log.warning("%s is left behind and may be removed: %s", self.folder, error.what)

    def _taken(self, why: str, *, can_force: bool) -> ExistsError:
        return ExistsError(
            f"won't write to {self.path}: {why}",
            safe="it was left as it is",
            hint="--force replaces it" if can_force else "name another place, or remove it yourself",
        )

    def _error(self, error: OSError, doing: str) -> Exception:
        return from_oserror(error, f"file://{os.path.dirname(self.path)}", os.path.basename(self.path), doing)
