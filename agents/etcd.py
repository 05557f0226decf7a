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
import ssl
import threading
import weakref
from collections.abc import Iterable

from ckptrt.agents.coord import KeyValue, WatchEvent
from ckptrt.agents.etcd_calls import (
    Endpoint,
    Failover,
    Json,
    NoAnswerError,
    NotSentError,
    Refusal,
    Verdict,
    number,
)
from ckptrt.agents.etcd_http import Gateway, Stream, decode_text, encode_text, prefix_end
from ckptrt.agents.etcd_watch import EtcdWatch, WatchMessage
from ckptrt.errors import LeaseGoneError, UsageError

__all__ = ["EtcdCoordStore"]

_log = logging.getLogger(__name__)


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
        self.calls = Failover(endpoints, request_timeout_s)
        self._credentials = None if user is None else {"name": user, "password": password}
        uses_tls = any(endpoint.tls for endpoint in self.calls.endpoints)
        tls = _tls_context(ca_cert, client_cert, client_key) if uses_tls else None
        self._gateway = Gateway(tls, min(1.0, request_timeout_s))
        self._token = ""
        self._authenticating = threading.Lock()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    def get(self, key: str) -> KeyValue | None:
        found = self._call("/v3/kv/range", {"key": encode_text(key)}).get("kvs")
        return _key_value(found[0]) if found else None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        answer = self._call("/v3/kv/range", _prefix_range(prefix))
        found = [_key_value(item) for item in answer.get("kvs", ())]
        return sorted(found, key=lambda item: item.key), _revision(answer)

    def put(self, key: str, value: str, lease_id: int | None = None) -> int:
        return _revision(self._call("/v3/kv/put", _put(key, value, lease_id), writes=f"put {key}"))

    def create(self, key: str, value: str, lease_id: int | None = None) -> int | None:
        return self.compare_and_swap(key, value, 0, lease_id)

    def compare_and_swap(self, key: str, value: str, mod_revision: int, lease_id: int | None = None) -> int | None:
        answer = self._transact(key, mod_revision, {"request_put": _put(key, value, lease_id)})
        return _revision(answer) if answer.get("succeeded") else None

    def delete(self, key: str, mod_revision: int | None = None) -> bool:
        if mod_revision is None:
            answer = self._call("/v3/kv/deleterange", {"key": encode_text(key)}, writes=f"delete {key}")
            return number(answer, "deleted") > 0
        answer = self._transact(key, mod_revision, {"request_delete_range": {"key": encode_text(key)}})
        return bool(answer.get("succeeded")) and mod_revision > 0

    def grant(self, ttl_s: float) -> tuple[int, int]:
        # Sent twice it leaves a lease that nobody knows, which ends by itself: so it is retried like a read.
        answer = self._call("/v3/lease/grant", {"TTL": str(max(1, math.ceil(ttl_s)))})
        return number(answer, "ID"), number(answer, "TTL")

    def keepalive(self, lease_id: int) -> int:
        # A dead lease is answered with HTTP 200 and no TTL.
        return number(self._call("/v3/lease/keepalive", {"ID": str(lease_id)}), "TTL")

    def revoke(self, lease_id: int) -> None:
        try:
            self._call("/v3/lease/revoke", {"ID": str(lease_id)})
        except LeaseGoneError:
            _log.debug("event=revoke_dead lease=%x", lease_id)

    def watch(self, prefix: str, start_revision: int, idle_timeout_s: float | None = None) -> EtcdWatch:
        watch = EtcdWatch(self, prefix, start_revision, idle_timeout_s)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        self.calls.close()
        for watch in list(self._watches):
            watch.close()
        self._gateway.close()

    # The next three are for EtcdWatch.

    def open_watch(self, endpoint: Endpoint, prefix: str, start_revision: int) -> _GatewayWatch:
        create = {**_prefix_range(prefix), "start_revision": str(start_revision)}
        token = self._token_from(endpoint)
        return _GatewayWatch(self._gateway.stream(endpoint, "/v3/watch", {"create_request": create}, token))

    def probe(self, endpoint: Endpoint, key: str, timeout_s: float) -> int:
        body = {"key": encode_text(key), "count_only": True}
        return _revision(self._ask(endpoint, "/v3/kv/range", body, timeout_s))

    def forget_token(self) -> bool:
        with self._authenticating:
            self._token = ""
        return self._credentials is not None

    def _call(self, path: str, body: Json, *, writes: str = "") -> Json:
        timeout_s = self.calls.request_timeout_s
        return self.calls.run(
            lambda endpoint: self._ask(endpoint, path, body, timeout_s), writes=writes, authenticate=self.forget_token
        )

    def _ask(self, endpoint: Endpoint, path: str, body: Json, timeout_s: float) -> Json:
        return self._gateway.post(endpoint, path, body, self._token_from(endpoint), timeout_s)

    def _transact(self, key: str, mod_revision: int, operation: Json) -> Json:
        compare = {"key": encode_text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}
        return self._call("/v3/kv/txn", {"compare": [compare], "success": [operation]}, writes=f"write {key}")

    def _token_from(self, endpoint: Endpoint) -> str:
        """The token of our user, from that endpoint if there is none yet; empty without a user."""
        if self._credentials is None:
            return ""
        with self._authenticating:
            if not self._token:
                self._token = str(self._authenticate(endpoint, self._credentials).get("token", ""))
            return self._token

    def _authenticate(self, endpoint: Endpoint, credentials: Json) -> Json:
        try:
            return self._gateway.post(endpoint, "/v3/auth/authenticate", credentials, "", self.calls.request_timeout_s)
        except (NoAnswerError, Refusal) as error:
            if isinstance(error, Refusal) and error.verdict is not Verdict.UNCERTAIN:
                raise
            # Whatever became of it, the request that the token was for has not been sent.
            raise NotSentError(f"{endpoint} did not authenticate us: {error}") from error


class _GatewayWatch:
    """One watch stream of the gateway, with its messages in our words."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.wake = stream.wake
        self.close = stream.close

    def read(self, timeout_s: float) -> list[WatchMessage]:
        return [_watch_message(message) for message in self._stream.read(timeout_s)]


def _watch_message(message: Json) -> WatchMessage:
    header = message.get("header", {})
    return WatchMessage(
        cluster_id=number(header, "cluster_id"),
        revision=number(header, "revision"),
        created=bool(message.get("created")),
        canceled=bool(message.get("canceled")),
        cancel_reason=str(message.get("cancel_reason", "")),
        compact_revision=number(message, "compact_revision"),
        events=tuple(_event(item) for item in message.get("events", ())),
    )


def _tls_context(ca_cert: str | None, client_cert: str | None, client_key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_cert)
        if client_cert:
            context.load_cert_chain(client_cert, client_key)
        return context
    except (OSError, ValueError) as error:
        files = ", ".join(name for name in (ca_cert, client_cert, client_key) if name)
        raise UsageError(f"the certificates for etcd can't be loaded ({files}): {error}") from error


def _prefix_range(prefix: str) -> Json:
    return {"key": encode_text(prefix or "\0"), "range_end": prefix_end(prefix)}


def _put(key: str, value: str, lease_id: int | None) -> Json:
    return {"key": encode_text(key), "value": encode_text(value), "lease": str(lease_id or 0)}


def _revision(answer: Json) -> int:
    return number(answer.get("header", {}), "revision")


def _key_value(item: Json) -> KeyValue:
    return KeyValue(
        key=decode_text(item, "key"),
        value=decode_text(item, "value"),
        mod_revision=number(item, "mod_revision"),
        create_revision=number(item, "create_revision"),
        lease_id=number(item, "lease") or None,
    )


def _event(item: Json) -> WatchEvent:
    pair = item.get("kv", {})
    return WatchEvent(
        kind="delete" if item.get("type") == "DELETE" else "put",  # PUT is zero, and so left out
        key=decode_text(pair, "key"),
        value=decode_text(pair, "value"),
        mod_revision=number(pair, "mod_revision"),
    )
