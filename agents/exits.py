"""What a worker's exit was about: from its status, its own word on it, and what we had done to it."""

from __future__ import annotations

import contextlib
import shutil

from ckptrt import env
from ckptrt.agents.logs import SetLogs
from ckptrt.agents.verdict import Exit
from ckptrt.agents.workers import WorkerExited

__all__ = ["describe_exit", "hand_on_error_file"]


def describe_exit(exited: WorkerExited, logs: SetLogs, local_rank: int, stopped_s: float) -> Exit:
    """stopped_s: since when workers were being stopped."""
    error, error_at_s = logs.error(local_rank) if exited.code else ("", None)
    if exited.code < 0 and error_at_s is None:
        error = ""  # the last line on stderr of a process that was killed says nothing about why
    # A worker with a SIGTERM handler ends with a status of its own choice once it was asked to stop.
    asked = exited.by_us or (exited.code > 0 and error_at_s is None and exited.at_s > stopped_s)
    return Exit(
        rank=exited.rank,
        pid=exited.pid,
        code=exited.code,
        at_s=exited.at_s,
        by_us=asked,
        error=error,
        error_at_s=error_at_s,
        note=exited.note,
    )


def hand_on_error_file(source: str) -> None:
    """Give the cause's error file to whoever launched us, as torchrun does."""
    if source and env.error_file():
        with contextlib.suppress(OSError):
            shutil.copyfile(source, env.error_file())
