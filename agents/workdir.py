"""The launcher's private directory: its sockets lie there."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile

__all__ = ["make_workdir"]

_PREFIX = "ckptrt-agent-"


def make_workdir() -> str:
    """A directory of this user alone; what killed launchers have left behind is removed."""
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{_PREFIX}*")):
        pid = path.rpartition(_PREFIX)[2].partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)  # another user's stays
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
