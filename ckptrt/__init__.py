"""Checkpointing and fault tolerance for PyTorch training jobs.

    rt = ckptrt.init("runs/gpt", model=model, optim=optim, every=10, keep=3)
    rt.restore()
    for step in range(rt.start_step, steps):
        ...
        rt.step(loss=loss)
    rt.close()

What needs torch is loaded on first use, so `import ckptrt` and everything in ckptrt.storage stay quick and small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptrt.errors import (
    AccessError,
    BusyError,
    CompactedError,
    CoordError,
    CorruptError,
    Error,
    ExistsError,
    FencedError,
    LeaseGoneError,
    MismatchError,
    NoCheckpointError,
    NoSpaceError,
    NotFoundError,
    PersistError,
    QuorumError,
    StorageError,
    TransientError,
    UnknownOutcomeError,
    UsageError,
    VersionError,
)

if TYPE_CHECKING:
    from ckptrt.runtime import Runtime
    from ckptrt.snapshot import SaveHandle
    from ckptrt.starting import init
    from ckptrt.storage.retention import Keep

    __version__: str

__all__ = [
    "AccessError",
    "BusyError",
    "CompactedError",
    "CoordError",
    "CorruptError",
    "Error",
    "ExistsError",
    "FencedError",
    "Keep",
    "LeaseGoneError",
    "MismatchError",
    "NoCheckpointError",
    "NoSpaceError",
    "NotFoundError",
    "PersistError",
    "QuorumError",
    "Runtime",
    "SaveHandle",
    "StorageError",
    "TransientError",
    "UnknownOutcomeError",
    "UsageError",
    "VersionError",
    "__version__",
    "init",
]

_LAZY = {
    "Keep": "ckptrt.storage.retention",
    "Runtime": "ckptrt.runtime",
    "SaveHandle": "ckptrt.snapshot",
    "init": "ckptrt.starting",
}


def __getattr__(name: str) -> object:
    """Load a public name on its first use (PEP 562) and keep it."""
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("ckptrt")
    elif name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
