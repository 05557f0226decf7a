"""What calls to etcd have in common, whichever way they travel: endpoints, refusals, and going on to the next node."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ckptrt.errors import CoordError, LeaseGoneError, UnknownOutcomeError, UsageError

__all__ = [
    "Endpoint",
    "Failover",
    "Json",
    "NoAnswerError",
    "NotSentError",
    "Refusal",
    "Verdict",
    "number",
    "parse_endpoints",
]

T = TypeVar("T")
Json = dict[str, Any]

_PAUSE_S = 0.05  # between rounds over the endpoints


class NotSentError(Exception):
    """No request left this machine: it can't have been carried out."""


class NoAnswerError(Exception):
    """The request, or a part of it, was sent and no whole answer came: it may have been carried out."""


class Verdict(Enum):
    """What a refusal means for the one who asked."""

    FINAL = "final"  # not carried out, and it would not be elsewhere
    ELSEWHERE = "elsewhere"  # not carried out; another node, or the same one later, may do it
    UNCERTAIN = "uncertain"  # it may have been carried out
    AUTHENTICATE = "authenticate"  # not carried out; the token is not good any more
    LEASE_GONE = "lease gone"


class Refusal(Exception):
    """An answer that says no: gRPC code (2, unknown, when the server named none) and message."""

    def __init__(self, code: int, message: str, http_status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status

    @staticmethod
    def parse(http_status: int, body: bytes) -> Refusal:
        """Read an error body: the unary shape, the stream shape, or text that isn't JSON."""
        try:
            data = json.loads(body)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            text = body.decode(errors="replace").strip()[:200] or "empty answer"
            return Refusal(2, f"HTTP {http_status}: {text}", http_status)
        return Refusal.of(data, http_status)

    @staticmethod
    def of(data: Json, http_status: int = 0) -> Refusal:
        inner = data.get("error")
        if isinstance(inner, dict):
            return Refusal(number(inner, "grpc_code") or 2, str(inner.get("message", inner)), http_status)
        # Newer gateways leave `error` out and have only code and message.
        return Refusal(number(data, "code") or 2, str(data.get("message") or inner or data), http_status)

    @property
    def verdict(self) -> Verdict:
        text = self.message.lower()
        if "lease not found" in text:
            return Verdict.LEASE_GONE
        if self.code == 16 or "auth revision in header is old" in text or "invalid auth token" in text:
            return Verdict.AUTHENTICATE
        if "no leader" in text or "too many requests" in text or "not capable" in text:
            return Verdict.ELSEWHERE
        if self.code == 2 and 400 <= self.http_status < 500:
            return Verdict.FINAL  # not etcd's own words, but whoever said it refused the request as such
        # cancelled, unknown, deadline exceeded, internal, unavailable, data loss
        return Verdict.UNCERTAIN if self.code in (1, 2, 4, 13, 14, 15) else Verdict.FINAL

    @property
    def hint(self) -> str:
        """What a person can do about a final refusal."""
        text = self.message.lower()
        if "user name is empty" in text or self.code in (7, 16) or "authentication failed" in text:
            return "check the etcd user, its password and its role"
        if "space exceeded" in text:
            return "etcd is full: compact and defragment it, then `etcdctl alarm disarm`"
        if "commonname" in text:
            return "etcd's JSON gateway takes no user from a client certificate: give a user name and a password"
        if self.http_status in (404, 405):
            return "this server has no v3 JSON gateway: is it etcd 3.4 or newer, without --enable-grpc-gateway=false?"
        return ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd node's client address."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parse_endpoints(endpoints: str | Iterable[str]) -> tuple[Endpoint, ...]:
    """Endpoints from URLs or host:port, in one comma-separated text or several. Raises UsageError."""
    texts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    return tuple(_parse_endpoint(text.strip()) for text in texts if text.strip()) or _no_endpoint()


def _no_endpoint() -> tuple[Endpoint, ...]:
    raise UsageError("no etcd endpoint was given", hint="name at least one, such as http://10.0.0.1:2379")


def _parse_endpoint(text: str) -> Endpoint:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or 2379
    except ValueError as error:
        raise UsageError(f"{text!r} is not an etcd endpoint: {error}", hint="write http://host:2379") from error
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/"):
        raise UsageError(f"{text!r} is not an etcd endpoint", hint="write http://host:2379 or https://host:2379")
    return Endpoint(host, port, parts.scheme == "https")


def number(data: Json, name: str) -> int:
    """An integer field, which comes as a string when it is 64 bits wide, and not at all when it is zero."""
    return int(data.get(name) or 0)


class Failover:
    """Makes a call at one endpoint after the other until one answers; never makes one twice that may have been heard.

    It starts with the endpoint that answered last. A call takes as long as its attempts do, goes on for
    request_timeout_s, and at least until every endpoint was tried; when nobody listens anywhere, it fails at once.
    It also watches over the use of the client: not after close, and not in a forked child.
    """

    def __init__(self, endpoints: str | Iterable[str], request_timeout_s: float) -> None:
        self.endpoints = parse_endpoints(endpoints)
        self.request_timeout_s = request_timeout_s
        self.current = 0  # index of the endpoint that answered last
        self._pid = os.getpid()
        self._closing = threading.Event()

    def run(self, attempt: Callable[[Endpoint], T], *, writes: str = "", authenticate: Callable[[], bool]) -> T:
        """The first answer that attempt gets; it raises NotSentError, NoAnswerError or Refusal when it gets none.

        writes: what the call would do, for one that must not be carried out twice.
        authenticate: told that a token was refused; returns whether another try makes sense.
        """
        self.check_usable()
        deadline_s = time.monotonic() + self.request_timeout_s
        problems: dict[Endpoint, Exception] = {}
        refused_token = False
        while True:
            heard = False
            for _ in self.endpoints:
                index = self.current
                endpoint = self.endpoints[index]
                try:
                    return attempt(endpoint)
                except NotSentError as error:
                    problems[endpoint] = error
                    self.leave(index)
                except (NoAnswerError, Refusal) as error:
                    problems[endpoint] = error
                    heard = True
                    verdict = error.verdict if isinstance(error, Refusal) else Verdict.UNCERTAIN
                    if verdict is Verdict.AUTHENTICATE and not refused_token and authenticate():
                        refused_token = True
                        continue
                    if verdict in (Verdict.ELSEWHERE, Verdict.UNCERTAIN):
                        self.leave(index)
                    _raise_if_final(error, verdict, writes)
            if not heard or time.monotonic() >= deadline_s or self._closing.wait(_PAUSE_S):
                raise _unreachable(problems)

    def leave(self, index: int) -> None:
        """Begin the next calls elsewhere: this endpoint has failed."""
        if self.current == index:  # else another thread has found a good one already
            self.current = (index + 1) % len(self.endpoints)

    def close(self) -> None:
        self._closing.set()

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
