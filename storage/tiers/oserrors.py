"""From an errno to an error that says what, where, what is safe and what to do."""

from __future__ import annotations

import errno
import os

from ckptrt.errors import AccessError, ExistsError, NoSpaceError, NotFoundError, StorageError
from ckptrt.storage.tiers.names import join_url

__all__ = ["exists_error", "from_oserror", "not_found_error"]

_UNTOUCHED = "nothing was written under that name; what was stored before is untouched"

_KINDS: dict[int, tuple[type[StorageError], str]] = {
    errno.ENOSPC: (NoSpaceError, "free space on that disk, prune old checkpoints, or point the run elsewhere"),
    errno.EDQUOT: (NoSpaceError, "raise the quota, prune old checkpoints, or point the run elsewhere"),
    errno.EACCES: (AccessError, "give this user the right to read and write there"),
    errno.EPERM: (AccessError, "give this user the right to read and write there"),
    errno.EROFS: (AccessError, "the file system is mounted read-only: remount it, or point the run elsewhere"),
    errno.ENOENT: (NotFoundError, "check the path, and that the disk is mounted"),
    errno.EEXIST: (ExistsError, "choose another name; a stored object is never replaced"),
    errno.EMFILE: (StorageError, "raise the limit of open files (ulimit -n)"),
    errno.EIO: (StorageError, "look at the kernel log (dmesg); the disk may be failing"),
    errno.ENOTDIR: (StorageError, "a part of that path is a file, not a folder"),
    errno.ELOOP: (StorageError, "a symbolic link there points to itself"),
}  # fmt: skip


def from_oserror(error: OSError, url: str, name: str, doing: str, *, writing: bool = True) -> StorageError:
    """The StorageError for an operating system's error met while `doing` (such as 'write') the object `name`."""
    code = error.errno or 0
    kind, hint = _KINDS.get(code, (StorageError, "look at the kernel log (dmesg) and at the mount"))
    text = os.strerror(code) if code else str(error)
    label = f"{errno.errorcode[code]}: {text}" if code in errno.errorcode else text
    return kind(f"can't {doing} {join_url(url, name)}: {label}", safe=_UNTOUCHED if writing else "", hint=hint)


def exists_error(url: str, name: str) -> ExistsError:
    return ExistsError(
        f"{join_url(url, name)} exists already",
        safe="the object that is there is untouched",
        hint="choose another name; a stored object is never replaced",
    )


def not_found_error(url: str, name: str) -> NotFoundError:
    return NotFoundError(f"there is no object {join_url(url, name)}", hint="list what is there, or check the name")
