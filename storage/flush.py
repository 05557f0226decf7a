"""Flushing: what was committed where ranks write is brought to where it stays, in the background, newest first.

What is due is told by the two places alone, so nothing is lost when this process dies: the next one goes on. A near
checkpoint goes when the newest two are newer, but not before it is flushed, if the rules want it to stay.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import CorruptError, Error, FencedError, NotFoundError, PersistError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.copy import copy, plan_copy
from ckptrt.storage.layout import COMMITS, CommitId
from ckptrt.storage.prune import prune_committed, wanted_ids
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiers.base import Tier

__all__ = ["FlushNotice", "Flusher", "due"]

_log = logging.getLogger(__name__)

_NEAR_KEEP = Keep(last=2)
_FENCE_CHECK_S = 10.0  # how long a job that was taken over elsewhere may write near without knowing it
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 60.0
_CLOSING_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushNotice:
    """A step has arrived, in `took_s`, or could not be brought: then it stays near and is tried again."""

    step: int
    took_s: float = 0.0
    error: Error | None = None


def due(
    near: Catalog,
    there: Mapping[CommitId, Mapping[str, float]],
    keep: Keep | None,
    bad: Collection[CommitId] = (),
    done: Collection[CommitId] = (),
) -> list[CommitId]:
    """The commits of the near place that must still be brought to the far one, newest first.

    there: those that the far place has, with their metrics. keep: which ones shall stay, of both; None: all of the
    valid path. bad: those that are damaged. done: those that have been there before.
    """
    missing = [commit for commit in near.path().commits if not any(commit in them for them in (there, bad, done))]
    if not missing or keep is None:
        return missing
    wanted = wanted_ids(near, keep, there, bad)
    return [commit for commit in missing if commit in wanted]


class Flusher:
    """Flushes one run, in a thread of its own, through all its incarnations.

    notify is called from that thread. fenced: the error that this job must stop with, once another one has opened a
    newer incarnation in the far place, which the near one can't know of.
    """

    def __init__(
        self, near: Tier, far: Tier, notify: Callable[[FlushNotice], None], clock: Clock | None = None
    ) -> None:
        self.near = Catalog(near)
        self.far = Catalog(far)
        self.fenced: FencedError | None = None
        self._notify = notify
        self._clock = clock or SystemClock()
        self._incarnation = 0
        self._keep: Keep | None = None
        # What the far place is known to have, with its metrics; None before the first look.
        self._there: dict[CommitId, Mapping[str, float]] | None = None
        self._under_way: tuple[CommitId, ...] = ()  # stays, even if newer ones come: else none would ever arrive
        self._begun: dict[CommitId, float] = {}  # those that nobody has been told of yet, and when they were begun
        self._damaged: set[CommitId] = set()
        self._arrived: set[CommitId] = set()  # if the far place has one no more, somebody there wanted it gone
        self._changed = threading.Condition()
        self._awake = False
        self._closing = False
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="ckptrt-flush", daemon=True)
        self._thread.start()

    def serve(self, incarnation: int, keep: Keep | None) -> None:
        """Go on for this incarnation, whose fence is written."""
        with self._changed:
            if incarnation > self._incarnation:
                self._incarnation, self.fenced = incarnation, None
            self._keep = keep
        self.wake()

    def wake(self) -> None:
        """Something was committed."""
        with self._changed:
            self._awake = True
            self._changed.notify()

    def prune_near(self) -> None:
        """Free the near place of what is flushed, or wanted by nobody. Raises StorageError."""
        with self._changed:
            there, keep = self._there, self._keep
            under_way, incarnation = self._under_way, self._incarnation
        if there is not None:  # else nothing is known to be flushed
            waiting = due(self.near, there, keep, self._damaged, self._arrived)
            prune_committed(self.near, _NEAR_KEEP, {*waiting, *under_way}, incarnation)

    def close(self) -> None:
        """Bring what is due, and end. If the far place can't be reached, that is given up after a while and told."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # --- the thread

    def _run(self) -> None:
        failures = 0
        while True:
            awake, closing = self._await(failures)
            if self._incarnation:
                try:
                    if not self._is_fenced() and (awake or closing or failures):
                        self._bring_all()
                    failures = 0
                except Exception as cause:  # noqa: BLE001 whatever it was must be told, and the training goes on
                    failures += 1
                    self._tell_failure(cause)
            if closing and (not failures or failures >= _CLOSING_TRIES):
                return

    def _await(self, failures: int) -> tuple[bool, bool]:
        """Wait for something to do, or until it is time to try again; whether there is, and whether to end then."""
        delay_s = min(_RETRY_FIRST_S * 2 ** (failures - 1), _RETRY_MAX_S) if failures else _FENCE_CHECK_S
        with self._changed:
            if failures and self._closing:
                self._changed.wait(delay_s)
            else:
                self._changed.wait_for(lambda: self._closing or (self._awake and not failures), delay_s)
            awake, self._awake = self._awake, False
            return awake, self._closing

    def _bring_all(self) -> None:
        """Bring all that is due, the newest first: more may be committed meanwhile."""
        if self.near.run is None:
            self.near.open_run()
        while not self._is_fenced():
            keep, there = self._look()
            waiting = due(self.near, there, keep, self._damaged, self._arrived)
            if not waiting:
                break
            self._flush(waiting[0], keep)
        self._prune(self.prune_near)

    def _look(self) -> tuple[Keep | None, dict[CommitId, Mapping[str, float]]]:
        """The rules, and what is there. Commits never change, so each is read once, and only if a rule needs it."""
        with self._changed:
            keep, known = self._keep, self._there or {}
        there: dict[CommitId, Mapping[str, float]] = {}
        for commit in self.far.commit_ids():
            there[commit] = known.get(commit, {})
            if keep is not None and keep.best is not None and commit not in known:
                with contextlib.suppress(CorruptError, NotFoundError):
                    there[commit] = self.far.read_commit(commit).metrics
        if there.keys() - known.keys():
            self.far.tier.settle(COMMITS)  # it can be seen before it is safe
        with self._changed:
            self._there = there
        for commit in there.keys() & self._begun.keys():
            self._told = ""
            self._arrived.add(commit)
            took_s = self._clock.monotonic_s() - self._begun.pop(commit)
            self._notify(FlushNotice(step=commit.step, took_s=took_s))
        return keep, there

    def _is_fenced(self) -> bool:
        newest = self.far.newest_incarnation()
        with self._changed:
            if newest <= self._incarnation or self.fenced is not None:
                return self.fenced is not None
            self.fenced = error = self.far.fenced_error(self._incarnation, newest)
        self._notify(FlushNotice(step=0, error=error))
        return True

    def _flush(self, commit: CommitId, keep: Keep | None) -> None:
        self._begun.setdefault(commit, self._clock.monotonic_s())
        self._hold(commit)
        try:
            copy(self.near, self.far.tier, plan_copy(self.near, self.far.tier, [commit]))
        except (CorruptError, NotFoundError) as error:
            if commit not in self.near.commit_ids():
                self._begun.pop(commit)
                return  # somebody has pruned it meanwhile
            if isinstance(error, NotFoundError):
                raise
            self._damaged.add(commit)
            self._tell(FlushNotice(step=commit.step, error=_not_flushed(self.far, commit, error)))
            return
        finally:
            self._hold()
        self._look()
        if keep is not None:
            self._prune(lambda: prune_committed(self.far, keep, incarnation=self._incarnation))

    def _prune(self, prune: Callable[[], object]) -> None:
        try:
            prune()
        except Error as error:
            self._tell(FlushNotice(step=0, error=error))

    def _hold(self, *commits: CommitId) -> None:
        with self._changed:
            self._under_way = commits

    def _tell_failure(self, cause: Exception) -> None:
        error = cause if isinstance(cause, Error) else PersistError(f"flushing failed: {cause!r}")
        _log.warning("event=flush_failed url=%s: %s", self.far.tier.url, error.what)
        self._tell(FlushNotice(step=0, error=_not_flushed(self.far, None, error)))

    def _tell(self, notice: FlushNotice) -> None:
        """Once until something is flushed again, however often it is tried."""
        text = type(notice.error).__name__ + str(notice.step)
        if text != self._told:
            self._told = text
            self._notify(notice)


def _not_flushed(far: Catalog, commit: CommitId | None, error: Error) -> PersistError:
    step = f"step {commit.step}" if commit else "what was committed"
    return PersistError(
        f"{step} is not in {far.tier.url} yet: {error.what}",
        safe="training goes on; it is committed in local_dir and stays there",
        hint=error.hint or "nothing need be done: it is tried again",
    )
