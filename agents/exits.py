"""What a worker's exit was about: from its status, its own word on it, and what we had done to it."""

from __future__ import annotations

from ckptrt.agents.logs import SetLogs
from ckptrt.agents.verdict import Exit
from ckptrt.agents.watchdog import Look
from ckptrt.agents.workers import WorkerExited

__all__ = ["describe_exit"]

_KILLED = -9


def describe_exit(exited: WorkerExited, logs: SetLogs, stopped_s: float, hung: tuple[Look, str] | None) -> Exit:
    """stopped_s: since when workers were being stopped. hung: who kept the others, and by what it is told."""
    if hung is not None and exited.rank == hung[0].rank:
        # However it ended: it is the cause, and that it was killed is our doing.
        look, why = hung
        return Exit(
            rank=exited.rank,
            pid=exited.pid,
            code=exited.code or _KILLED,
            at_s=stopped_s - look.silent_s,
            note=f"hung for {look.silent_s:.1f} s: {why}",
        )
    error, error_at_s = logs.error(exited.rank) if exited.code else ("", None)
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
