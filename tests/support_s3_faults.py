"""An S3 server that answers as it is told, and a proxy that loses answers: what a real server won't do on demand."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>as scripted</Message></Error>'


class ScriptedS3:
    """Keeps whole objects in a dict, replaces them in spite of If-None-Match, and first works off `script`.

    Each entry of the script is the (status, code) that one request gets instead of its answer. `requests` holds
    the (method, path) of each.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.script: deque[tuple[int, str]] = deque()
        self.requests: list[tuple[str, str]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Be silent."""

            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not self.scripted():
                    owner.objects[self.path.partition("?")[0]] = data
                    self.answer(200, b"", {"ETag": '"0"'})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not self.scripted():
                    self.answer(501, _ERROR.format(code="NotImplemented").encode())

            def do_GET(self) -> None:
                if not self.scripted():
                    data = owner.objects.get(self.path.partition("?")[0])
                    if data is None:
                        self.answer(404, _ERROR.format(code="NoSuchKey").encode())
                    else:
                        self.answer(200, data)

            do_HEAD = do_GET

            def do_DELETE(self) -> None:
                if not self.scripted():
                    owner.objects.pop(self.path.partition("?")[0], None)
                    self.answer(204, b"")

            def scripted(self) -> bool:
                owner.requests.append((self.command, self.path))
                if not owner.script:
                    return False
                status, code = owner.script.popleft()
                self.answer(status, _ERROR.format(code=code).encode())
                return True

            def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def options(self) -> dict[str, Any]:
        return {"key": "K", "secret": "S", "endpoint_url": f"http://127.0.0.1:{self._server.server_port}"}

    def __enter__(self) -> ScriptedS3:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class LossyProxy:
    """Passes bytes between a client and a server. Where `loses` says so, the server's answer is dropped.

    `loses` is called with the first line of a request ("PUT /bucket/key HTTP/1.1"); the request itself always
    arrives and its answer is waited for, so what was asked for has been done when the connection is cut.
    """

    def __init__(self, port: int) -> None:
        self.loses: Callable[[str], bool] = lambda line: False
        self.lost: list[str] = []
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                state: dict[str, str] = {}
                for work in (self._upstream, self._downstream):
                    thread = threading.Thread(target=work, args=(client, server, state))
                    self._threads.append(thread)
                    thread.start()

    def _upstream(self, client: socket.socket, server: socket.socket, state: dict[str, str]) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                line = data.split(b"\r\n", 1)[0].decode("latin-1")
                if line.endswith(" HTTP/1.1"):
                    state["line"] = line
                server.sendall(data)
        _cut(client, server)

    def _downstream(self, client: socket.socket, server: socket.socket, state: dict[str, str]) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                line = state.get("line", "")
                if not data.startswith(b"HTTP/1.1 100") and self.loses(line):
                    self.lost.append(line)
                    break
                client.sendall(data)
        _cut(client, server)

    def __enter__(self) -> LossyProxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _cut(*self._sockets)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def _cut(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
