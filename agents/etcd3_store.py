"""etcd as a CoordStore through the `etcd3` Python API, for those who want gRPC: `pip install ckptrt[etcd3]`.

At a glance:

    store = Etcd3CoordStore("http://a:2379,http://b:2379", user=, password=, ca_cert=, client_cert=, client_key=)

The package (cslab-etcd3, imported as `etcd3`) is loaded when a store is made. What it doesn't do is done here: one
client per endpoint and failover between them, a time-out on every call, endpoints that are tried again at once after
a failure (the package waits 300 s), watches that subscribe anew and notice a dead node, a new token after
UNAUTHENTICATED, refusal of use after a fork (gRPC's own threads don't survive one).
"""

from __future__ import annotations

import importlib
import logging
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ckptrt.agents.coord import KeyValue, WatchEvent
from ckptrt.agents.etcd_calls import Endpoint, Failover, NoAnswerError, NotSentError, Refusal, Verdict
from ckptrt.agents.etcd_watch import EtcdWatch, WatchMessage
from ckptrt.errors import LeaseGoneError, UsageError

__all__ = ["Etcd3CoordStore"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_GRPC_OPTIONS = [
    # A node that was away for long is tried again within a second, not after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),  # a listing of many members is more than 4 MiB
]

# The package has no types: a client is Any.
_Client = Any


class Etcd3CoordStore:
    """A CoordStore on one etcd cluster through the etcd3 API. See CoordStore for what it does."""

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
        self._etcd3 = _import_etcd3()
        self.calls = Failover(endpoints, request_timeout_s)
        if ca_cert is None and any(endpoint.tls for endpoint in self.calls.endpoints):
            raise UsageError("the etcd3 client needs ca_cert for an https endpoint")
        self._options = {
            "ca_cert": ca_cert, "cert_cert": client_cert, "cert_key": client_key, "user": user, "password": password,
            "timeout": request_timeout_s, "grpc_options": _GRPC_OPTIONS,
        }  # fmt: skip
        self._clients: dict[Endpoint, _Client] = {}
        self._connecting = threading.Lock()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()

    def get(self, key: str) -> KeyValue | None:
        found = self._run(lambda client: client.get_response(_bytes(key)).kvs)
        return _key_value(found[0]) if found else None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        answer = self._run(
            lambda client: client.get_prefix_response(_bytes(prefix)) if prefix else client.get_all_response()
        )
        return sorted(map(_key_value, answer.kvs), key=lambda item: item.key), int(answer.header.revision)

    def put(self, key: str, value: str, lease_id: int | None = None) -> int:
        answer = self._run(
            lambda client: client.put(_bytes(key), _bytes(value), lease=lease_id or 0), writes=f"put {key}"
        )
        return int(answer.header.revision)

    def create(self, key: str, value: str, lease_id: int | None = None) -> int | None:
        return self.compare_and_swap(key, value, 0, lease_id)

    def compare_and_swap(self, key: str, value: str, mod_revision: int, lease_id: int | None = None) -> int | None:
        def transact(client: _Client) -> tuple[bool, list[Any]]:
            put = client.transactions.put(_bytes(key), _bytes(value), lease=lease_id or 0)
            return _transact(client, key, mod_revision, put)

        succeeded, answers = self._run(transact, writes=f"write {key}")
        # The package drops the header with the revision; the read in the same transaction has it.
        return int(answers[1][0][1].mod_revision) if succeeded else None

    def delete(self, key: str, mod_revision: int | None = None) -> bool:
        def delete(client: _Client) -> bool:
            if mod_revision is None:
                return bool(client.delete(_bytes(key)))
            return _transact(client, key, mod_revision, client.transactions.delete(_bytes(key)))[0]

        return self._run(delete, writes=f"delete {key}") and mod_revision != 0

    def grant(self, ttl_s: float) -> tuple[int, int]:
        lease = self._run(lambda client: client.lease(max(1, math.ceil(ttl_s))))
        return int(lease.id), int(lease.ttl)

    def keepalive(self, lease_id: int) -> int:
        answers = self._run(lambda client: list(client.refresh_lease(lease_id)))
        return int(answers[0].TTL) if answers else 0

    def revoke(self, lease_id: int) -> None:
        try:
            self._run(lambda client: client.revoke_lease(lease_id))
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
        if self.calls.is_ours():
            self.forget_token()

    # The next three are for EtcdWatch.

    def open_watch(self, endpoint: Endpoint, prefix: str, start_revision: int) -> _Etcd3Watch:
        client = self._new_client(endpoint)  # its own: a watch that hangs is ended by closing its channel
        try:
            return self._attempt(lambda client: _Etcd3Watch(client, prefix, start_revision), client, endpoint)
        except BaseException:
            client.close()
            raise

    def probe(self, endpoint: Endpoint, key: str, timeout_s: float) -> int:
        answer = self._attempt(lambda client: client.get_response(_bytes(key)), self._client(endpoint), endpoint)
        return int(answer.header.revision)

    def forget_token(self) -> bool:
        with self._connecting:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
        return self._options["user"] is not None

    def _run(self, call: Callable[[_Client], T], *, writes: str = "") -> T:
        return self.calls.run(
            lambda endpoint: self._attempt(call, self._client(endpoint), endpoint),
            writes=writes,
            authenticate=self.forget_token,
        )

    def _attempt(self, call: Callable[[_Client], T], client: _Client, endpoint: Endpoint) -> T:
        try:
            return call(client)
        except _failures(self._etcd3) as error:
            raise _translate(error, endpoint) from error

    def _client(self, endpoint: Endpoint) -> _Client:
        with self._connecting:
            if endpoint not in self._clients:
                self._clients[endpoint] = self._new_client(endpoint)
            return self._clients[endpoint]

    def _new_client(self, endpoint: Endpoint) -> _Client:
        options = self._options if endpoint.tls else {**self._options, "ca_cert": None}
        try:
            client = self._etcd3.client(host=endpoint.host, port=endpoint.port, **options)
        except _failures(self._etcd3) as error:
            problem = _translate(error, endpoint)
            if isinstance(problem, Refusal) and problem.verdict is not Verdict.UNCERTAIN:
                raise problem from error
            raise NotSentError(f"{endpoint} did not authenticate us: {problem}") from error
        for node in client.endpoints.values():
            node.time_retry = 0
        # A node that sees no leader says so at once, and ends its watches.
        client.metadata = (*(client.metadata or ()), ("hasleader", "true"))
        if not endpoint.tls:
            client.call_credentials = None  # gRPC refuses them in plain text; the token is in the metadata too
        return client


class _Etcd3Watch:
    """One subscription, with its messages in our words."""

    def __init__(self, client: _Client, prefix: str, start_revision: int) -> None:
        self._client = client
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if prefix:
            client.add_watch_prefix_callback(_bytes(prefix), self._answers.put, start_revision=start_revision)
        else:
            client.add_watch_callback(b"\0", self._answers.put, range_end=b"\0", start_revision=start_revision)
        # The package keeps etcd's word that the watch exists to itself, and so the revision in it.
        header = client.get_response(_bytes(prefix or "\0")).header
        self._first: WatchMessage | None = WatchMessage(
            cluster_id=header.cluster_id, revision=header.revision, created=True
        )

    def read(self, timeout_s: float) -> list[WatchMessage]:
        if self._first is not None:
            first, self._first = self._first, None
            return [first]
        try:
            answer = self._answers.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return []
        if hasattr(answer, "events"):
            events = tuple(map(_event, answer.events))
            return [WatchMessage(cluster_id=answer.header.cluster_id, revision=answer.header.revision, events=events)]
        compacted = getattr(answer, "compacted_revision", 0)
        if compacted:
            return [WatchMessage(canceled=True, compact_revision=compacted)]
        raise NoAnswerError(f"the watch ended: {_reason(answer) if answer else 'the server closed it'}")

    def wake(self) -> None:
        self._answers.put(None)

    def close(self) -> None:
        self._client.close()


def _import_etcd3() -> Any:
    try:
        return importlib.import_module("etcd3")
    except (ImportError, TypeError) as error:  # TypeError: an etcd3 made for another protobuf
        raise UsageError(
            f"the etcd3 client can't be loaded: {error}",
            hint="pip install 'ckptrt[etcd3]' (not `etcd3` 0.12, which needs protobuf < 3.21); the built-in client"
            " needs nothing",
        ) from error


def _failures(etcd3: Any) -> tuple[type[Exception], ...]:
    """What calls of the package raise when etcd or the way to it fails."""
    grpc = importlib.import_module("grpc")
    return (etcd3.exceptions.Etcd3Exception, grpc.RpcError)


def _translate(error: Exception, endpoint: Endpoint) -> NotSentError | NoAnswerError | Refusal:
    """The package's exceptions in our words. Its own ones hide the RPC's, which says more."""
    rpc: Any = error if hasattr(error, "code") else error.__context__
    if not hasattr(rpc, "code") or not hasattr(rpc, "details"):
        return NoAnswerError(f"{endpoint}: {_reason(error)}")
    code, details = int(rpc.code().value[0]), str(rpc.details())
    if code == 14 and "failed to connect" in details.lower():
        return NotSentError(f"{endpoint}: {details}")
    return Refusal(code, details)


def _reason(error: Any) -> str:
    details = error.details() if hasattr(error, "details") else ""
    return str(details or error or type(error).__name__)


def _transact(client: _Client, key: str, mod_revision: int, operation: Any) -> tuple[bool, list[Any]]:
    name = _bytes(key)
    succeeded, answers = client.transaction(
        compare=[client.transactions.mod(name) == mod_revision],
        success=[operation, client.transactions.get(name)],
        failure=[],
    )
    return bool(succeeded), answers


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _key_value(pair: Any) -> KeyValue:
    return KeyValue(
        key=_text(pair.key),
        value=_text(pair.value),
        mod_revision=int(pair.mod_revision),
        create_revision=int(pair.create_revision),
        lease_id=int(pair.lease) or None,
    )


def _event(event: Any) -> WatchEvent:
    return WatchEvent(
        kind="delete" if type(event).__name__ == "DeleteEvent" else "put",
        key=_text(event.key),
        value=_text(event.value),
        mod_revision=int(event.mod_revision),
    )
