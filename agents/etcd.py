"""etcd as a CoordStore, by a client of our own for its v3 JSON gateway: standard library only.

At a glance:

    store = EtcdCoordStore("http://a:2379,http://b:2379,http://c:2379")     see CoordStore for what it does
    EtcdCoordStore(endpoints, user=, password=, ca_cert=, client_cert=, client_key=, request_timeout_s=2.0)

Why our own, and what the gateway's traps are: docs/design/coordination.md; the wire side is in etcd_http.py.

A request goes to the endpoint that answered last, and on to the next one when it was surely not carried out (refused
connection, no leader) or when it changes nothing. A write that may have been carried out is never sent twice.
An attempt takes at most request_timeout_s; a call goes on trying for that long, and at least once at every endpoint.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from ckptrt.agents.coord import KeyValue, WatchBase, WatchEvent
from ckptrt.agents.etcd_http import (
    Endpoint,
    Gateway,
    NoAnswerError,
    NotSentError,
    Refusal,
    Stream,
    Verdict,
    decode_text,
    encode_text,
    number,
    parse_endpoints,
    prefix_end,
)
from ckptrt.errors import CompactedError, CoordError, LeaseGoneError, UnknownOutcomeError, UsageError

__all__ = ["EtcdCoordStore", "EtcdWatch"]

_log = logging.getLogger(__name__)
_Json = dict[str, Any]

_PAUSE_S = 0.05  # between rounds over the endpoints
_PAUSE_MAX_S = 0.5
_SILENCE_MAX_S = 2.0  # after which a watch asks whether its node is still there


class EtcdCoordStore:
    """A CoordStore on one etcd cluster. Connections are made when they are needed; none survives a fork."""

    def __init__(
        self,
        endpoints: str | Iterable[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca_cert: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        request_timeout_s: float = 2.0,
    ) -> None:
        if (user is None) != (password is None):
            raise UsageError("etcd needs a user and a password, or neither")
        self.endpoints = parse_endpoints(endpoints)
        self.request_timeout_s = request_timeout_s
        self._credentials = None if user is None else {"name": user, "password": password}
        tls = _tls_context(ca_cert, client_cert, client_key) if any(e.tls for e in self.endpoints) else None
        self._gateway = Gateway(tls, min(1.0, request_timeout_s))
        self._token = ""
        self._authenticating = threading.Lock()
        self._current = 0  # index of the endpoint that answered last
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    def get(self, key: str) -> KeyValue | None:
        found = self.call("/v3/kv/range", {"key": encode_text(key)}).get("kvs")
        return _key_value(found[0]) if found else None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        answer = self.call("/v3/kv/range", _prefix_range(prefix))
        found = [_key_value(item) for item in answer.get("kvs", ())]
        return sorted(found, key=lambda item: item.key), _revision(answer)

    def put(self, key: str, value: str, lease_id: int | None = None) -> int:
        return _revision(self.call("/v3/kv/put", _put(key, value, lease_id), writes=f"put {key}"))

    def create(self, key: str, value: str, lease_id: int | None = None) -> int | None:
        return self.compare_and_swap(key, value, 0, lease_id)

    def compare_and_swap(self, key: str, value: str, mod_revision: int, lease_id: int | None = None) -> int | None:
        answer = self._transact(key, mod_revision, {"request_put": _put(key, value, lease_id)})
        return _revision(answer) if answer.get("succeeded") else None

    def delete(self, key: str, mod_revision: int | None = None) -> bool:
        if mod_revision is None:
            answer = self.call("/v3/kv/deleterange", {"key": encode_text(key)}, writes=f"delete {key}")
            return number(answer, "deleted") > 0
        answer = self._transact(key, mod_revision, {"request_delete_range": {"key": encode_text(key)}})
        return bool(answer.get("succeeded")) and mod_revision > 0

    def grant(self, ttl_s: float) -> tuple[int, int]:
        # Sent twice it leaves a lease that nobody knows, which ends by itself: so it is retried like a read.
        answer = self.call("/v3/lease/grant", {"TTL": str(max(1, math.ceil(ttl_s)))})
        return number(answer, "ID"), number(answer, "TTL")

    def keepalive(self, lease_id: int) -> int:
        # A dead lease is answered with HTTP 200 and no TTL.
        return number(self.call("/v3/lease/keepalive", {"ID": str(lease_id)}), "TTL")

    def revoke(self, lease_id: int) -> None:
        try:
            self.call("/v3/lease/revoke", {"ID": str(lease_id)})
        except LeaseGoneError:
            _log.debug("event=revoke_dead lease=%x", lease_id)

    def watch(self, prefix: str, start_revision: int, idle_timeout_s: float | None = None) -> EtcdWatch:
        watch = EtcdWatch(self, prefix, start_revision, idle_timeout_s)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        self._closing.set()
        for watch in list(self._watches):
            watch.close()
        self._gateway.close()

    # The rest is for EtcdWatch and this class.

    def call(self, path: str, body: _Json, *, writes: str = "") -> _Json:
        """Send a request to one endpoint after the other until one answers.

        writes: what the request would do, for a request that must not be carried out twice.
        """
        self.check_usable()
        deadline_s = time.monotonic() + self.request_timeout_s
        problems: dict[Endpoint, Exception] = {}
        may_authenticate = self._credentials is not None
        while True:
            sent = False
            for _ in self.endpoints:
                index = self._current
                endpoint = self.endpoints[index]
                try:
                    return self.ask(endpoint, path, body)
                except NotSentError as error:
                    problems[endpoint] = error
                except (NoAnswerError, Refusal) as error:
                    problems[endpoint] = error
                    sent = True
                    verdict = error.verdict if isinstance(error, Refusal) else Verdict.UNCERTAIN
                    if verdict is Verdict.AUTHENTICATE and may_authenticate:
                        may_authenticate = False
                        self.forget_token()
                        continue
                    _raise_if_final(error, verdict, writes)
                self._move_on(index)
            # With nobody listening anywhere it is for the caller to know at once.
            if not sent or time.monotonic() >= deadline_s or self._closing.wait(_PAUSE_S):
                raise _unreachable(problems)

    def ask(self, endpoint: Endpoint, path: str, body: _Json, timeout_s: float | None = None) -> _Json:
        """One attempt at one endpoint. Raises NotSentError, NoAnswerError or Refusal."""
        token = self.token(endpoint)
        return self._gateway.post(endpoint, path, body, token, timeout_s or self.request_timeout_s)

    def open_stream(self, endpoint: Endpoint, path: str, body: _Json) -> Stream:
        """Begin a streaming request at one endpoint. Raises NotSentError, NoAnswerError or Refusal."""
        return self._gateway.stream(endpoint, path, body, self.token(endpoint))

    def token(self, endpoint: Endpoint) -> str:
        """The token of our user, from that endpoint if there is none yet; empty without a user."""
        if self._credentials is None:
            return ""
        with self._authenticating:
            if not self._token:
                self._token = str(self._authenticate(endpoint).get("token", ""))
            return self._token

    def _authenticate(self, endpoint: Endpoint) -> _Json:
        try:
            return self._gateway.post(
                endpoint, "/v3/auth/authenticate", self._credentials or {}, "", self.request_timeout_s
            )
        except (NoAnswerError, Refusal) as error:
            if isinstance(error, Refusal) and error.verdict is not Verdict.UNCERTAIN:
                raise
            # Whatever became of it, the request that the token was for has not been sent.
            raise NotSentError(f"{endpoint} did not authenticate us: {error}") from error

    def forget_token(self) -> bool:
        """Have the next request authenticate anew. Returns whether there is a user to do it for."""
        with self._authenticating:
            self._token = ""
        return self._credentials is not None

    def current_endpoint(self) -> int:
        return self._current

    def is_ours(self) -> bool:
        """False in a forked child of the process that made this client."""
        return os.getpid() == self._pid

    def check_usable(self) -> None:
        """Raise CoordError in a forked child, and after close."""
        if not self.is_ours():
            raise CoordError(
                f"this etcd client belongs to process {self._pid}, and process {os.getpid()} is a fork of it",
                hint="make a client of its own after the fork; sockets shared by two processes mix up their answers",
            )
        if self._closing.is_set():
            raise CoordError("this etcd client is closed")

    def _transact(self, key: str, mod_revision: int, operation: _Json) -> _Json:
        compare = {"key": encode_text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}
        return self.call("/v3/kv/txn", {"compare": [compare], "success": [operation]}, writes=f"write {key}")

    def _move_on(self, index: int) -> None:
        # Only from where the request failed: another thread may have found a good endpoint already.
        if self._current == index:
            self._current = (index + 1) % len(self.endpoints)


class EtcdWatch(WatchBase):
    """A watch on etcd that outlives connections and nodes. All its work is done in `poll`."""

    def __init__(
        self, store: EtcdCoordStore, prefix: str, start_revision: int, idle_timeout_s: float | None = None
    ) -> None:
        super().__init__(start_revision, idle_timeout_s)
        self._store = store
        self._prefix = prefix
        self._index = store.current_endpoint()
        self._stream: Stream | None = None
        self._inbox: deque[_Json] = deque()  # came, and was not looked at yet
        self._heard_at_s = 0.0  # when the node last showed that it is there
        self._created = False  # the node has said that it watches
        self._cluster_id = 0
        self._failures = 0  # in a row; the first is told, the others are not
        self._denied = False
        self._reading = threading.Lock()

    def poll(self, timeout_s: float) -> list[WatchEvent]:
        if self.closed:
            return []
        self._store.check_usable()
        deadline_s = time.monotonic() + timeout_s
        try:
            with self._reading:
                return self._poll_until(deadline_s)
        finally:
            if self._closing.is_set():
                self._drop_unread()

    def close(self) -> None:
        super().close()
        if not self._store.is_ours():
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
        return self._store.endpoints[self._index]

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
        create = {**_prefix_range(self._prefix), "start_revision": str(self._next_revision)}
        self._stream = self._store.open_stream(self._endpoint, "/v3/watch", {"create_request": create})
        self._created = False
        self._heard_at_s = time.monotonic()

    def _read(self, left_s: float) -> list[WatchEvent]:
        if self._stream is None:
            return []
        if self._inbox:
            # One at a time: a refusal that follows events must not take them with it.
            return self._take(self._inbox.popleft())
        silence_max_s = _SILENCE_MAX_S if self._created else self._store.request_timeout_s
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
        probe = {"key": encode_text(self._prefix), "count_only": True}
        self._store.ask(self._endpoint, "/v3/kv/range", probe, min(1.0, self._store.request_timeout_s))
        self._heard_at_s = time.monotonic()

    def _take(self, message: _Json) -> list[WatchEvent]:
        header = message.get("header", {})
        self._check_cluster(number(header, "cluster_id"))
        if message.get("canceled"):
            self._canceled(message)
        if message.get("created"):
            # Its revision is where the node is, not how far we have read: it comes even before a refusal for
            # compaction, so it must not move next_revision.
            self._created = True
            self._check_history(number(header, "revision"))
            self._recovered()
        events = [_event(item) for item in message.get("events", ())]
        events = [event for event in events if event.mod_revision >= self._next_revision]
        if events:
            self._next_revision = events[-1].mod_revision + 1
        return events

    def _canceled(self, message: _Json) -> None:
        compact_revision = number(message, "compact_revision")
        if compact_revision:
            raise self._compacted("were compacted away", compact_revision)
        reason = str(message.get("cancel_reason", "it gave no reason"))
        # A token that has run out shows as a lack of permission here.
        if "permission" in reason and (self._denied or not self._store.forget_token()):
            raise CoordError(f"etcd refuses a watch of {self._prefix}: {reason}", hint=Refusal(7, reason).hint)
        self._denied = "permission" in reason
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
        probe = {"key": encode_text(self._prefix), "count_only": True}
        if _revision(self._store.ask(self._endpoint, "/v3/kv/range", probe)) < self._next_revision - 1:
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
        self._index = (self._index + 1) % len(self._store.endpoints)
        rounds = self._failures // len(self._store.endpoints)
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


def _tls_context(ca_cert: str | None, client_cert: str | None, client_key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_cert)
        if client_cert:
            context.load_cert_chain(client_cert, client_key)
        return context
    except (OSError, ValueError) as error:
        files = ", ".join(name for name in (ca_cert, client_cert, client_key) if name)
        raise UsageError(f"the certificates for etcd can't be loaded ({files}): {error}") from error


def _raise_if_final(error: NoAnswerError | Refusal, verdict: Verdict, writes: str) -> None:
    if verdict is Verdict.ELSEWHERE or (verdict is Verdict.UNCERTAIN and not writes):
        return
    if verdict is Verdict.UNCERTAIN:
        raise UnknownOutcomeError(
            f"etcd did not say whether it did: {writes} ({error})",
            hint="read the key again; the write may have been applied, or may still be",
        ) from error
    if verdict is Verdict.LEASE_GONE:
        raise LeaseGoneError(f"the lease is dead{f', so nothing was done: {writes}' if writes else ''}") from error
    hint = error.hint if isinstance(error, Refusal) else ""
    raise CoordError(f"etcd refused: {error}", hint=hint) from error


def _unreachable(problems: dict[Endpoint, Exception]) -> CoordError:
    details = "; ".join(str(error) if str(e) in str(error) else f"{e}: {error}" for e, error in problems.items())
    return CoordError(
        f"no etcd endpoint could serve the request: {details}",
        safe="nothing was written; checkpoints do not depend on etcd",
        hint="check that etcd runs and that a majority of its nodes can reach each other",
    )


def _prefix_range(prefix: str) -> _Json:
    return {"key": encode_text(prefix or "\0"), "range_end": prefix_end(prefix)}


def _put(key: str, value: str, lease_id: int | None) -> _Json:
    return {"key": encode_text(key), "value": encode_text(value), "lease": str(lease_id or 0)}


def _revision(answer: _Json) -> int:
    return number(answer.get("header", {}), "revision")


def _key_value(item: _Json) -> KeyValue:
    return KeyValue(
        key=decode_text(item, "key"),
        value=decode_text(item, "value"),
        mod_revision=number(item, "mod_revision"),
        create_revision=number(item, "create_revision"),
        lease_id=number(item, "lease") or None,
    )


def _event(item: _Json) -> WatchEvent:
    pair = item.get("kv", {})
    return WatchEvent(
        kind="delete" if item.get("type") == "DELETE" else "put",  # PUT is zero, and so left out
        key=decode_text(pair, "key"),
        value=decode_text(pair, "value"),
        mod_revision=number(pair, "mod_revision"),
    )
