"""A watch on etcd that outlives connections and nodes, whichever way its messages travel."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from ckptrt.agents.coord import WatchBase, WatchEvent
from ckptrt.agents.etcd_calls import Endpoint, Failover, NoAnswerError, NotSentError, Refusal, Verdict
from ckptrt.errors import CompactedError, CoordError

__all__ = ["EtcdWatch", "MessageStream", "WatchMessage", "WatchSource"]

_log = logging.getLogger(__name__)

_PAUSE_S = 0.05  # after every endpoint has failed; doubled up to
_PAUSE_MAX_S = 0.5
_SILENCE_MAX_S = 2.0  # after which a watch asks whether its node is still there


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchMessage:
    """One answer of etcd on a watch."""

    cluster_id: int = 0  # 0: not said
    revision: int = 0
    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0  # why it was cancelled: changes before this one are gone
    events: tuple[WatchEvent, ...] = ()


class MessageStream(Protocol):
    """A watch as long as one connection lasts. One thread reads; `wake` may come from another."""

    def read(self, timeout_s: float) -> list[WatchMessage]:
        """What came, waiting up to timeout_s; empty when nothing did. NoAnswerError or Refusal when it has ended."""
        ...

    def wake(self) -> None:
        """Make a read that waits return or raise soon."""
        ...

    def close(self) -> None: ...


class WatchSource(Protocol):
    """What a watch needs of its store; the errors are NotSentError, NoAnswerError and Refusal."""

    @property
    def calls(self) -> Failover: ...

    def open_watch(self, endpoint: Endpoint, prefix: str, start_revision: int) -> MessageStream: ...

    def probe(self, endpoint: Endpoint, key: str, timeout_s: float) -> int:
        """The revision of the store, as a majority of the cluster agrees on it, asked at this endpoint."""
        ...

    def forget_token(self) -> bool:
        """Have the next request authenticate anew. Returns whether there is a user to do it for."""
        ...


class EtcdWatch(WatchBase):
    """Reads one stream after the other, each from where the last one ended. All its work is done in `poll`."""

    def __init__(
        self, store: WatchSource, prefix: str, start_revision: int, idle_timeout_s: float | None = None
    ) -> None:
        super().__init__(start_revision, idle_timeout_s)
        self._store = store
        self._prefix = prefix
        self._index = store.calls.current
        self._stream: MessageStream | None = None
        self._inbox: deque[WatchMessage] = deque()  # came, and was not looked at yet
        self._heard_at_s = 0.0  # when the node last showed that it is there
        self._created = False  # the node has said that it watches
        self._cluster_id = 0
        self._failures = 0  # in a row; the first is told, the others are not
        self._denied = False
        self._reading = threading.Lock()

    def poll(self, timeout_s: float) -> list[WatchEvent]:
        if self.closed:
            return []
        self._store.calls.check_usable()
        deadline_s = time.monotonic() + timeout_s
        try:
            with self._reading:
                return self._poll_until(deadline_s)
        finally:
            if self._closing.is_set():
                self._drop_unread()

    def close(self) -> None:
        super().close()
        if not self._store.calls.is_ours():
            return  # in a forked child: the connection is the parent's, who still wants it
        stream = self._stream
        if stream is not None:
            stream.wake()
        self._drop_unread()

    def _poll_until(self, deadline_s: float) -> list[WatchEvent]:
        try:
            while not self._closing.is_set():
                events = self._advance(deadline_s - time.monotonic())
                if events or (time.monotonic() >= deadline_s and not self._inbox):
                    return events
            return []
        except BaseException:
            self._drop()
            raise

    def _drop_unread(self) -> None:
        """Close the stream, unless somebody reads it, who then does this on the way out."""
        if self._reading.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._reading.release()

    @property
    def _endpoint(self) -> Endpoint:
        return self._store.calls.endpoints[self._index]

    def _advance(self, left_s: float) -> list[WatchEvent]:
        """One step: connect, or read what comes within left_s, or see to a node that has gone silent."""
        try:
            if self._stream is None:
                self._connect()
            return self._read(max(left_s, 0.0))
        except (NotSentError, NoAnswerError, Refusal) as error:
            self._fail(error, left_s)
            return []

    def _connect(self) -> None:
        self._stream = self._store.open_watch(self._endpoint, self._prefix, self._next_revision)
        self._created = False
        self._heard_at_s = time.monotonic()

    def _read(self, left_s: float) -> list[WatchEvent]:
        if self._stream is None:
            return []
        if self._inbox:
            # One at a time: a refusal that follows events must not take them with it.
            return self._take(self._inbox.popleft())
        silence_max_s = _SILENCE_MAX_S if self._created else self._store.calls.request_timeout_s
        quiet_in_s = max(0.0, self._heard_at_s + silence_max_s - time.monotonic())
        self._inbox.extend(self._stream.read(min(left_s, quiet_in_s)))
        if self._inbox:
            self._heard_at_s = time.monotonic()
        elif quiet_in_s == 0.0:
            self._check_node()
        return []

    def _check_node(self) -> None:
        """A watch is silent when nothing happens, and just as silent when its node hangs: ask it something else."""
        if not self._created:
            raise NoAnswerError(f"{self._endpoint} does not answer")
        self._store.probe(self._endpoint, self._prefix, min(1.0, self._store.calls.request_timeout_s))
        self._heard_at_s = time.monotonic()

    def _take(self, message: WatchMessage) -> list[WatchEvent]:
        self._check_cluster(message.cluster_id)
        if message.canceled:
            self._canceled(message)
        if message.created:
            # Its revision is where the node is, not how far we have read: it comes even before a refusal for
            # compaction, so it must not move next_revision.
            self._created = True
            self._check_history(message.revision)
            self._recovered()
        events = [event for event in message.events if event.mod_revision >= self._next_revision]
        if events:
            self._next_revision = events[-1].mod_revision + 1
        return events

    def _canceled(self, message: WatchMessage) -> None:
        if message.compact_revision:
            raise self._compacted("were compacted away", message.compact_revision)
        reason = message.cancel_reason or "it gave no reason"
        # A token that has run out shows as one of these, depending on the version of etcd.
        denied = any(word in reason.lower() for word in ("permission", "auth token", "unauthenticated"))
        if denied and (self._denied or not self._store.forget_token()):
            raise CoordError(f"etcd refuses a watch of {self._prefix}: {reason}", hint=Refusal(7, reason).hint)
        self._denied = denied
        raise NoAnswerError(f"{self._endpoint} cancelled the watch: {reason}")

    def _check_cluster(self, cluster_id: int) -> None:
        if cluster_id and self._cluster_id and cluster_id != self._cluster_id:
            raise self._compacted("are unknown to the cluster that answers now; it is another one", 0)
        self._cluster_id = cluster_id or self._cluster_id

    def _check_history(self, revision: int) -> None:
        if revision >= self._next_revision - 1:
            return
        # This node lags behind, or the cluster has lost its data and counts from the beginning. A read that the
        # whole cluster agrees on tells which.
        if (
            self._store.probe(self._endpoint, self._prefix, self._store.calls.request_timeout_s)
            < self._next_revision - 1
        ):
            raise self._compacted("are lost: the store has gone back in time", 0)

    def _compacted(self, fate: str, compact_revision: int) -> CompactedError:
        return CompactedError(
            f"changes of {self._prefix} since revision {self._next_revision} {fate}",
            hint="list the prefix and watch from the revision of that list",
            compact_revision=compact_revision,
        )

    def _fail(self, error: Exception, left_s: float) -> None:
        self._drop()
        if self._closing.is_set():
            return
        verdict = error.verdict if isinstance(error, Refusal) else Verdict.UNCERTAIN
        if verdict is Verdict.AUTHENTICATE and not self._denied:
            self._denied = True
            self._store.forget_token()
            return
        if verdict in (Verdict.FINAL, Verdict.AUTHENTICATE) and isinstance(error, Refusal):
            raise CoordError(f"etcd refuses a watch of {self._prefix}: {error.message}", hint=error.hint) from error
        level = logging.DEBUG if self._failures else logging.WARNING
        _log.log(level, "event=watch_broken prefix=%s next_revision=%d: %s", self._prefix, self._next_revision, error)
        self._failures += 1
        self._store.calls.leave(self._index)  # what a watch finds out, a write need not find out again
        self._index = (self._index + 1) % len(self._store.calls.endpoints)
        rounds = self._failures // len(self._store.calls.endpoints)
        if rounds:
            self._closing.wait(min(_PAUSE_S * 2 ** min(rounds - 1, 8), _PAUSE_MAX_S, max(left_s, 0.001)))

    def _recovered(self) -> None:
        if self._failures:
            _log.info(
                "event=watch_resumed prefix=%s endpoint=%s failures=%d", self._prefix, self._endpoint, self._failures
            )
        self._failures = 0
        self._denied = False

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        self._inbox.clear()  # next_revision still stands before it: it will come again
        if stream is not None:
            stream.close()
