"""The job that runs on a run, as far as this machine can tell: by the owner of the newest fence."""

from __future__ import annotations

import os
import signal
import socket

from ckptrt.errors import NotFoundError, UsageError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.records import Owner

__all__ = ["ask_to_drain", "find_launcher", "is_alive"]

_LAUNCHERS = ("ckptrt-launch", "ckptrt.agents.launch")


def find_launcher(catalog: Catalog) -> Owner:
    """The ckptrt-launch that has opened the run's newest incarnation, alive and on this machine.

    NotFoundError if no job runs; UsageError if it runs elsewhere, or without a launcher that could be asked.
    """
    url = catalog.tier.url
    fence = catalog.newest_fence()
    if fence is None:
        raise NotFoundError(f"no job has ever opened {url}", safe="everything; nobody was signalled")
    owner = fence.owner
    if owner.host != socket.gethostname():
        raise UsageError(
            f"{url} was opened last by pid {owner.pid} on {owner.host}, and this is {socket.gethostname()}",
            safe="everything; nobody was signalled",
            hint=f"there: ckptrt drain {url}, or kill -USR1 {owner.pid}",
        )
    words = _command(owner.pid)
    if not words:
        raise NotFoundError(
            f"no job runs on {url}: pid {owner.pid}, which opened it at {fence.created_at}, is gone",
            safe="everything; nobody was signalled",
        )
    if not any(name in word for word in words[:4] for name in _LAUNCHERS):
        raise UsageError(
            f"{url} was opened last by pid {owner.pid} ({' '.join(words)[:80]}), which is no ckptrt-launch",
            safe="everything; nobody was signalled",
            hint="a job can be drained if it was started with ckptrt-launch",
        )
    return owner


def ask_to_drain(owner: Owner) -> None:
    """Send the launcher its notice. NotFoundError if it is gone."""
    try:
        os.kill(owner.pid, signal.SIGUSR1)
    except ProcessLookupError:
        raise NotFoundError(f"the job has just ended: pid {owner.pid} is gone") from None


def is_alive(owner: Owner) -> bool:
    """Whether the launcher still runs."""
    return bool(_command(owner.pid))


def _command(pid: int) -> list[str]:
    """A process's words; none if it isn't there, or waits only to be reaped."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read().decode(errors="replace").rstrip("\0")
    except OSError:
        return []
    return text.split("\0") if text else []
