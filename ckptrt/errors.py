"""The one exception tree.

Two questions are answered by class alone: may I retry (`TransientError`), and is what was saved safe?

    Error(Exception)
    ├── UsageError             the call or the command line is wrong; nothing was touched
    ├── StorageError           the storage failed; `safe` says what is still there
    │   ├── TransientError     worth a retry (time-outs, 503, resets)
    │   ├── ExistsError        a create-only write found the name taken
    │   ├── NotFoundError      no object of that name
    │   ├── NoSpaceError       disk or quota full
    │   └── AccessError        credentials or permissions
    ├── CorruptError           bytes differ from what was written; never loaded
    ├── VersionError           written by a newer major version of the format
    ├── NoCheckpointError      nothing to resume from although something was asked for
    ├── MismatchError          the checkpoint doesn't fit the state (keys, shapes, dtypes)
    ├── FencedError            a newer incarnation owns the run; this one must stop
    ├── BusyError              another live job holds the run
    ├── PersistError           one snapshot could not be made durable; training is not harmed
    └── CoordError             the coordination store (etcd) failed
        ├── CompactedError     a watch asked for a revision that is gone; list again
        ├── LeaseGoneError     the lease named has ended; nothing was written under it
        ├── QuorumError        too few nodes came in the time that they had
        └── UnknownOutcomeError  a write got no answer and may have been applied; read again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

__all__ = [
    "AccessError", "BusyError", "CompactedError", "CoordError", "CorruptError", "Error", "ExistsError",
    "FencedError", "LeaseGoneError", "MismatchError", "NoCheckpointError", "NoSpaceError", "NotFoundError",
    "PersistError", "QuorumError", "StorageError", "TransientError", "UnknownOutcomeError", "UsageError",
    "VersionError",
]  # fmt: skip


class Error(Exception):
    """Base of every error that ckptrt raises.

    what: one sentence, what failed and where (run, step, rank, file, tensor).
    safe: what is still safe, or empty when nothing was at risk.
    hint: what to do next.
    `code` is stable and meant for scripts; `exit_code` is the table of docs/reference/exit-codes.md.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, safe: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.safe = safe
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.safe:
            lines.append(f"  safe  {self.safe}")
        if self.hint:
            lines.append(f"  do    {self.hint}")
        return "\n".join(lines)

    def data(self) -> dict[str, str]:
        """The error as plain data, for another process; `from_data` makes it an exception again."""
        return {"code": self.code, "what": self.what, "safe": self.safe, "hint": self.hint}

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.safe, self.hint))


def _rebuild(kind: type[Error], what: str, safe: str, hint: str) -> Error:
    return kind(what, safe=safe, hint=hint)


class UsageError(Error):
    code = "usage"
    exit_code = 2


class StorageError(Error):
    code = "storage"


class TransientError(StorageError):
    code = "unreachable"


class ExistsError(StorageError):
    code = "exists"


class NotFoundError(StorageError):
    code = "not-found"
    exit_code = 10


class NoSpaceError(StorageError):
    code = "no-space"


class AccessError(StorageError):
    code = "auth"
    exit_code = 12


class CorruptError(Error):
    code = "damaged"
    exit_code = 4


class VersionError(Error):
    code = "version-too-new"


class NoCheckpointError(Error):
    code = "no-checkpoint"
    exit_code = 5


class MismatchError(Error):
    code = "layout-mismatch"


class FencedError(Error):
    code = "fenced"
    exit_code = 11


class BusyError(Error):
    code = "locked"
    exit_code = 11


class PersistError(Error):
    code = "persist"


class CoordError(Error):
    code = "coord"


class QuorumError(CoordError):
    """Too few nodes came in the time that they had."""

    code = "quorum"
    exit_code = 21


class CompactedError(CoordError):
    """`compact_revision` is the oldest revision that a watch may still start from."""

    code = "compacted"

    def __init__(self, what: str, *, safe: str = "", hint: str = "", compact_revision: int = 0) -> None:
        super().__init__(what, safe=safe, hint=hint)
        self.compact_revision = compact_revision


class LeaseGoneError(CoordError):
    code = "lease-gone"


class UnknownOutcomeError(CoordError):
    """The one CoordError of a write after which the write may have been applied, or may yet be."""

    code = "coord-unknown-outcome"


def from_data(data: Mapping[str, object]) -> Error:
    """The error that `Error.data` told of, as an exception of its class (of `Error` for an unknown code)."""
    kinds: list[type[Error]] = [Error]
    for kind in kinds:
        if kind.code == data["code"]:
            break
        kinds += kind.__subclasses__()
    else:
        kind = Error
    return kind(str(data["what"]), safe=str(data.get("safe", "")), hint=str(data.get("hint", "")))
