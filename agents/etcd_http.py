"""The wire side of our etcd client: requests and streams to etcd's v3 JSON gateway.

What the gateway does that one would not expect, and where it is taken care of:

    int64 as strings, fields that are zero left out          `etcd_calls.number`
    two shapes of errors, and plain text for a bad path      `etcd_calls.Refusal.parse`
    lines of a stream don't end where HTTP chunks do         `StreamDecoder`
    a node without a leader holds requests for 7 s           the `hasleader` header, on every request
    a kept connection that the server closed meanwhile       `Gateway._take`, before anything is sent on it
    a loopback port that nobody listens on, connected to itself      `open_socket`
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import select
import socket
import ssl
import threading
from collections import defaultdict
from dataclasses import dataclass, field

from ckptrt.agents.etcd_calls import Endpoint, Json, NoAnswerError, NotSentError, Refusal

__all__ = ["Gateway", "Stream", "StreamDecoder", "decode_text", "encode_text", "open_socket", "prefix_end"]

_LINGER_S = 4  # a peer that acknowledges nothing for so long is gone (packets dropped, machine off)


def encode_text(text: str) -> str:
    """Text as the gateway wants bytes: base64. What was not UTF-8 when it was read goes back unchanged."""
    return base64.b64encode(text.encode("utf-8", "surrogateescape")).decode("ascii")


def decode_text(data: Json, name: str) -> str:
    return base64.b64decode(data.get(name) or "").decode("utf-8", "surrogateescape")


def prefix_end(prefix: str) -> str:
    """The base64 range_end with which a range holds the keys that start with prefix."""
    raw = prefix.encode("utf-8", "surrogateescape").rstrip(b"\xff")
    end = raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"  # b"\0": no end
    return base64.b64encode(end).decode("ascii")


def open_socket(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """A connected socket that notices a dead peer within seconds. Raises NotSentError."""
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    except (OSError, UnicodeError) as error:
        raise NotSentError(f"{endpoint}: {error}") from error
    try:
        if sock.getsockname() == sock.getpeername():
            # The kernel picked the very port that we call as our own, so we called ourselves; keeping the connection
            # would also keep the server from coming back.
            raise ConnectionRefusedError("nobody listens there")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 2),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", _LINGER_S),
            ("TCP_USER_TIMEOUT", _LINGER_S * 1000),
        ):
            if hasattr(socket, name):  # not everywhere outside Linux
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if endpoint.tls:
            return (tls or ssl.create_default_context()).wrap_socket(sock, server_hostname=endpoint.host)
        return sock
    except (OSError, ValueError) as error:
        sock.close()
        raise NotSentError(f"{endpoint}: {error}") from error


class Gateway:
    """Requests to endpoints over kept connections; each request in flight has a connection to itself."""

    def __init__(self, tls: ssl.SSLContext | None, connect_timeout_s: float) -> None:
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._idle: defaultdict[Endpoint, list[http.client.HTTPConnection]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closed = False

    def post(self, endpoint: Endpoint, path: str, body: Json, token: str, timeout_s: float) -> Json:
        """The answer to one request. Raises NotSentError, NoAnswerError or Refusal."""
        connection = self._take(endpoint)
        try:
            connection.sock.settimeout(timeout_s)
            connection.request("POST", path, json.dumps(body).encode(), _headers(token))
            response = connection.getresponse()
            payload = response.read()
            reusable = not response.will_close
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswerError(f"{endpoint}: {str(error) or type(error).__name__}") from error
        except BaseException:
            connection.close()
            raise
        self._give_back(endpoint, connection, reusable)
        if response.status != 200:
            raise Refusal.parse(response.status, payload)
        return _one_object(endpoint, payload)

    def stream(self, endpoint: Endpoint, path: str, body: Json, token: str) -> Stream:
        """A request whose answer is lines without end. Raises NotSentError or NoAnswerError."""
        sock = open_socket(endpoint, self._tls, self._connect_timeout_s)
        payload = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", f"Host: {str(endpoint).split('//')[1]}", f"Content-Length: {len(payload)}"]
        head += [f"{name}: {value}" for name, value in _headers(token).items()]
        try:
            sock.settimeout(self._connect_timeout_s)
            sock.sendall("\r\n".join([*head, "", ""]).encode() + payload)
        except OSError as error:
            sock.close()
            raise NoAnswerError(f"{endpoint}: {error}") from error
        return Stream(sock)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _take(self, endpoint: Endpoint) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle[endpoint].pop() if self._idle[endpoint] else None
            if connection is None:
                break
            # Readable while nobody asked anything: the server closed it. Better now than with a write half sent.
            if not _readable(connection.sock):
                return connection
            connection.close()
        sock = open_socket(endpoint, self._tls, self._connect_timeout_s)
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port)
        connection.sock = sock
        return connection

    def _give_back(self, endpoint: Endpoint, connection: http.client.HTTPConnection, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._closed:
                self._idle[endpoint].append(connection)
                return
        connection.close()


def _readable(sock: socket.socket) -> bool:
    poller = select.poll()  # unlike select(), good for descriptors above 1023
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def _headers(token: str) -> dict[str, str]:
    # hasleader: a node that sees no leader says so at once (and ends a watch) rather than after 7 s (or never).
    headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
    return {**headers, "Authorization": token} if token else headers


def _one_object(endpoint: Endpoint, payload: bytes) -> Json:
    """The object of a unary answer, or the only one of a stream that ended; errors of the latter come with HTTP 200."""
    try:
        data = json.loads(payload)
    except ValueError as error:
        raise NoAnswerError(f"{endpoint}: an answer that is not JSON: {payload[:100]!r}") from error
    if not isinstance(data, dict):
        raise NoAnswerError(f"{endpoint}: an answer that is no JSON object: {payload[:100]!r}")
    if "error" in data:
        raise Refusal.of(data)
    result = data.get("result")
    return result if isinstance(result, dict) else data


@dataclass(slots=True)
class StreamDecoder:
    """Bytes of an HTTP answer in, lines of its body out, however the bytes, the chunks and the lines are cut."""

    status: int = 0  # 0: the head has not come yet
    _ended: bool = False
    _raw: bytearray = field(default_factory=bytearray)
    _body: bytearray = field(default_factory=bytearray)
    _chunked: bool = False
    _left: int | None = None  # bytes that are missing of the chunk, or of a body of known length

    def ended(self) -> bool:
        """Whether the server has said that nothing more comes, even if it leaves the connection open."""
        return self._ended

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now. Raises ValueError when this is no HTTP."""
        self._raw += data
        if not self.status:
            self._read_head()
        if self.status:
            self._read_body()
        *lines, rest = bytes(self._body).split(b"\n")
        self._body = bytearray() if self._ended else bytearray(rest)
        if self._ended and rest:
            lines.append(rest)
        return [line for line in lines if line.strip()]

    def _read_head(self) -> None:
        head, mark, rest = bytes(self._raw).partition(b"\r\n\r\n")
        if not mark:
            if len(head) > 65536:
                raise ValueError("the head of the answer has no end")
            return
        status_line, _, fields = head.partition(b"\r\n")
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
            raise ValueError(f"not an HTTP answer: {status_line[:80]!r}")
        self._raw = bytearray(rest)
        headers = http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
        self._chunked = "chunked" in (headers.get("Transfer-Encoding") or "").lower()
        length = headers.get("Content-Length")
        self._left = int(length) if length and not self._chunked else None
        self.status = int(words[1])

    def _read_body(self) -> None:
        if not self._chunked:
            self._move(len(self._raw) if self._left is None else min(self._left, len(self._raw)))
            self._ended = self._left == 0
            return
        while self._raw and not self._ended:
            if not self._left:
                line, mark, _ = bytes(self._raw[:64]).partition(b"\r\n")
                if line and not mark and len(self._raw) > 64:
                    raise ValueError(f"not the size of a chunk: {line[:40]!r}")
                if not mark:
                    return
                del self._raw[: len(line) + 2]
                if line:  # an empty one ends the chunk before
                    self._left = int(line.split(b";")[0], 16)
                    self._ended = self._left == 0
            else:
                self._move(min(self._left, len(self._raw)))

    def _move(self, size: int) -> None:
        self._body += self._raw[:size]
        del self._raw[:size]
        if self._left is not None:
            self._left -= size


class Stream:
    """The answer of a streaming request, message by message."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = StreamDecoder()
        self._refused = b""

    def read(self, timeout_s: float) -> list[Json]:
        """The messages that came, waiting up to timeout_s for bytes; empty when none did.

        Raises NoAnswerError when the stream has ended or broken, Refusal when it was refused from the start.
        """
        if self._decoder.ended():
            raise NoAnswerError("the server ended the stream")
        self._sock.settimeout(max(timeout_s, 0.001))
        try:
            data = self._sock.recv(1 << 18)
            lines = self._decoder.feed(data)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return []
        except (OSError, ValueError) as error:
            raise NoAnswerError(str(error)) from error
        if self._decoder.status not in (0, 200):
            self._refused += b"\n".join(lines)
            if self._decoder.ended() or not data:
                raise Refusal.parse(self._decoder.status, self._refused)
            return []
        if not lines and not data:
            raise NoAnswerError("the connection was closed")
        return [_stream_object(line) for line in lines]

    def wake(self) -> None:
        """End a read that waits in another thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def close(self) -> None:
        self._sock.close()


def _stream_object(line: bytes) -> Json:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise NoAnswerError(f"a line that is not JSON: {line[:100]!r}") from error
    if not isinstance(data, dict):
        raise NoAnswerError(f"a line that is no JSON object: {line[:100]!r}")
    if "error" in data:
        raise Refusal.of(data)
    result = data.get("result")
    return result if isinstance(result, dict) else data
