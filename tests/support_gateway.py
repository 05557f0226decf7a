"""A stand-in for etcd's JSON gateway whose every answer the test writes, for faults that no real etcd has on demand.

A `Script` maps a path to what is done with each request to it; what came is kept, to count what was sent.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Exchange", "ScriptedGateway", "answer", "close_unheard", "hang", "refuse", "scripted"]

Json = dict[str, Any]


class Exchange(BaseHTTPRequestHandler):
    """One connection; the scripts get it and write what they like."""

    protocol_version = "HTTP/1.1"
    server: ScriptedGateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.script(self, body)

    def send(self, status: int, payload: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Length", str(len(payload))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def start_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, payload: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


Script = Callable[[Exchange, Json], None]


class ScriptedGateway(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.script = script
        self.requests: list[tuple[str, Json]] = []
        self.released = threading.Event()  # set at the end: requests that hang come back
        self.closed_one = threading.Event()  # a connection was closed by this side

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed_one.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client went away: what it does is what is tested."""


@contextmanager
def scripted(script: Script) -> Iterator[ScriptedGateway]:
    """A server that does with each request what script does."""
    server = ScriptedGateway(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def answer(body: Json, status: int = 200) -> Script:
    """Always the same JSON."""
    return lambda exchange, _: exchange.send(status, json.dumps(body).encode())


def refuse(code: int, message: str, status: int = 503) -> Script:
    """An error in the shape of unary calls."""
    return answer({"error": message, "code": code, "message": message}, status)


def close_unheard(exchange: Exchange, _: Json) -> None:
    """Take the request and close the connection without a word."""
    exchange.close_connection = True


def hang(exchange: Exchange, _: Json) -> None:
    """Take the request and say nothing until the end of the test."""
    exchange.server.released.wait(300)
    exchange.close_connection = True
