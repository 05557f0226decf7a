"""A TCP connection between the agents of two nodes: whole messages in the loop, and how long the other was silent."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

from ckptrt.clock import Clock, SystemClock
from ckptrt.wire import Channel, Message

__all__ = ["Line", "dial", "local_address"]

_MESSAGES_PER_TURN = 256


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect. Raises OSError when nobody answers in that time."""
    return socket.create_connection((host, port), timeout_s)


def local_address(toward: str) -> str:
    """The address of this machine on the way to a host (`host:port`), for others to connect to."""
    host, _, port = toward.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:  # sends nothing: the kernel only chooses the way
        sock.connect(address)
        return str(sock.getsockname()[0])


class Line:
    """One end. Messages and the end of the line are told from the loop; a line that we close ourselves says nothing.

    A peer that doesn't read what it is sent is as good as gone: the kernel's buffer holds far more than is ever under
    way, so one that is full ends the line.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = str(sock.getpeername()[0])
        self._clock = clock or SystemClock()
        self._channel = Channel(sock)
        self._selector = selector
        self._on_message = on_message
        self._on_closed = on_closed
        self._open = True
        self._heard_at_s = self._clock.monotonic_s()
        selector.register(sock, selectors.EVENT_READ, self._read)

    @property
    def silent_s(self) -> float:
        return self._clock.monotonic_s() - self._heard_at_s

    def take_over(self, on_message: Callable[[Message], None], on_closed: Callable[[str], None]) -> None:
        """From now on it is somebody else who is told."""
        self._on_message, self._on_closed = on_message, on_closed

    def send(self, message: Message) -> None:
        if not self._open:
            return
        try:
            self._channel.send(message)
        except BlockingIOError:
            self.end("it doesn't read what it is sent")
        except OSError as error:
            self.end(f"the connection broke: {error.strerror or error}")

    def end(self, why: str) -> None:
        """Close, and tell so."""
        if self._open:
            self.close()
            self._on_closed(why)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._selector.unregister(self._channel.sock)
            self._channel.close()

    def _read(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if not self._open:
                return
            try:
                received = self._channel.receive()
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                self.end(f"the connection broke: {getattr(error, 'strerror', None) or error}")
                return
            if received is None:
                self.end("it closed the connection")
                return
            message, fds = received
            for fd in fds:
                os.close(fd)
            self._heard_at_s = self._clock.monotonic_s()
            try:
                self._on_message(message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self.end(f"it said something that makes no sense: {error!r}")
