"""What rank 0 tells the user of a run as a whole: where it goes on from, what is flushed, what is in no checkpoint."""

from __future__ import annotations

import threading
import time

from ckptrt import say
from ckptrt.errors import Error, from_data
from ckptrt.restoring import Restored
from ckptrt.session import Session
from ckptrt.snapshot import SaveStats
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["FlushWatch", "tell_start", "tell_unsaved"]

_FLUSH_LINE_EVERY_S = 5.0
_FLUSH_TIMEOUT_S = 1800.0


def tell_start(session: Session, world_size: int, restored: Restored | None) -> None:
    """Say whether the run starts or goes on, from what, and why."""
    url = session.url
    if restored is None:
        aside = len(session.catalog.commit_ids())
        left = f"{aside} checkpoints of older incarnations are left aside" if aside else "no committed checkpoint"
        say.line("start", f"fresh: {left} in {url} · incarnation {session.incarnation}")
        _tell_gone(session, aside)
        return
    saved, now = restored.world_size, world_size
    ranks = f"{now} rank{'s' * (now > 1)}" + (" (same as saved)" if saved == now else f" (saved by {saved})")
    why = "newest that every rank can have" if restored.tier == "memory" else "newest committed"
    where = {"memory": "memory", "local": session.place.local_dir}.get(restored.tier, url)
    say.line(
        "resume",
        f"step {restored.step} from {where} · {ranks} · "
        f"incarnation {restored.incarnation} -> {session.incarnation} · {why}",
    )
    if saved < now:
        say.line(
            "warn",
            f"ranks {saved} to {now - 1} are new: plain state from rank modulo {saved}, random generators anew",
        )
    elif saved > now:
        say.line("warn", f"plain state and random generators of ranks {now} to {saved - 1} are not used")


def _tell_gone(session: Session, num_commits: int) -> None:
    """A run that had come somewhere starts anew without a word only if it was told to."""
    older = (fence for number, fence in session.catalog.fences().items() if number < session.incarnation)
    last = next(older, None)
    if not num_commits and last is not None and last.parent is not None:
        say.line(
            "warn",
            f"incarnation {last.incarnation} went on from step {last.parent.step}, which is nowhere to be found now"
            + (f"; is {session.place.local_dir} the disk that it was written to?" if session.place.local_dir else ""),
        )


def tell_unsaved(step_count: int, last_committed: int | None, stats: SaveStats) -> None:
    """At the end, say which steps a resume would run again. Snapshots are taken when asked for, never here."""
    if step_count > (last_committed or 0):
        kept = f"the newest committed one is {last_committed}" if last_committed is not None else "none is committed"
        say.line(
            "warn",
            f"step {step_count} is in no checkpoint, {kept} ({stats.skipped} saves skipped, "
            f"{stats.failed} failed); rt.save(wait=True) before rt.close() keeps it",
        )


class FlushWatch:
    """Follows what is flushed to the run's url, if ranks write elsewhere first. Heard from the link's thread."""

    def __init__(self, place: RunPlace) -> None:
        self._place = place
        self._changed = threading.Condition()
        self._newest = 0
        self._error: Error | None = None
        self._line_s = -_FLUSH_LINE_EVERY_S

    def hear(self, message: Message) -> None:
        error = None if message["op"] == "flushed" else from_data(message)
        with self._changed:
            self._error = error
            if error is None:
                self._newest = max(self._newest, int(message["step"]))
            self._changed.notify()
        now_s = time.monotonic()
        if error is not None:
            say.block("warn", f"{error.code}: {error}")
        elif now_s - self._line_s >= _FLUSH_LINE_EVERY_S:
            self._line_s = now_s
            say.line("flush", f"step {message['step']} · in {self._place.url}, took {message['took_s']:.1f} s")

    def finish(self, committed: int | None) -> None:
        """At the end of the job, wait until its last checkpoint is where it stays, unless that can't be had now."""
        if not self._place.local_dir or committed is None:
            return
        with self._changed:
            if self._newest < committed and self._error is None:
                say.line("flush", f"step {committed} is on its way from {self._place.local_dir} to {self._place.url}")
            self._changed.wait_for(lambda: self._newest >= committed or self._error is not None, _FLUSH_TIMEOUT_S)
            arrived = self._newest >= committed
        if not arrived:
            say.line(
                "warn",
                f"step {committed} is in {self._place.local_dir} only; the next start flushes it, or by hand "
                f"`ckptrt cp {self._place.local_dir} {self._place.url}`",
            )
