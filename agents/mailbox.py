"""How other threads and signals reach the supervisor's thread: calls in a queue, and a descriptor that wakes it."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable

__all__ = ["Mailbox"]


class Mailbox:
    """Calls for the supervisor's thread, from other threads and from signals; readable when there are some."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._inbox, self._wake = socket.socketpair()
        self._inbox.setblocking(False)
        self._wake.setblocking(False)

    def fileno(self) -> int:
        return self._inbox.fileno()

    def wake_fd(self) -> int:
        """Where signal.set_wakeup_fd shall write."""
        return self._wake.fileno()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        with contextlib.suppress(BlockingIOError):  # full of bytes that nobody has read yet: that wakes too
            self._wake.send(b"\0")

    def take(self) -> tuple[list[int], list[Callable[[], None]]]:
        """The signals and calls that have come, each in order."""
        signums: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while data := self._inbox.recv(4096):
                signums += [number for number in data if number]
        calls: list[Callable[[], None]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                calls.append(self._calls.get_nowait())
        return signums, calls

    def close(self) -> None:
        self._inbox.close()
        self._wake.close()
