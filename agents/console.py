"""What people see: the ranks' output copied from their files, and the launcher's own lines, in one order.

Workers write to files, so a blocked terminal never blocks a worker or the supervisor: this thread alone waits for it. A
line of the launcher's comes after everything that the ranks had written before it was said.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Console", "Follow"]

_INTERVAL_S = 0.05
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class Follow:
    """A file to copy from as it grows. prefix: before each line; without one the bytes go out as they are.

    sink: the descriptor to write to, or a function of one line (bytes, with its line end).
    """

    path: str
    sink: int | Callable[[bytes], None]
    prefix: bytes = b""
    _fd: int = -1
    _rest: bytes = field(default=b"")

    def copy(self, *, last: bool = False) -> None:
        if self._fd < 0:
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        while self._fd >= 0 and (data := os.read(self._fd, _CHUNK_BYTES)):
            self._emit(data)
        if last:
            if self._rest:
                self._emit(b"\n")
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _emit(self, data: bytes) -> None:
        if isinstance(self.sink, int) and not self.prefix:
            _write(self.sink, data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if isinstance(self.sink, int):
                _write(self.sink, self.prefix + line + b"\n")
            else:
                self.sink(line + b"\n")


class Console:
    """One thread that writes to the terminal. All methods return at once but `close`."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._follows: list[Follow] = []
        self._thread = threading.Thread(target=self._run, name="ckptrt-console", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Write lines of our own, after what the ranks have written so far."""
        self._queue.put(lambda: self._say(text))

    def follow(self, follows: list[Follow]) -> None:
        """Copy these files from now on, as well as those before."""
        self._queue.put(lambda: self._follows.extend(follows))

    def unfollow(self) -> None:
        """Copy what is left of all files followed so far and forget them."""
        self._queue.put(self._finish)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write all that is left; give up on a terminal that takes nothing for timeout_s."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _say(self, text: str) -> None:
        self._copy()
        _write(self._fd, text.encode(errors="replace") + b"\n")

    def _copy(self) -> None:
        for follow in self._follows:
            follow.copy()

    def _finish(self) -> None:
        for follow in self._follows:
            follow.copy(last=True)
        self._follows.clear()

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=_INTERVAL_S if self._follows else None)
            except queue.Empty:
                task = self._copy
            if task is None:
                self._finish()
                return
            task()


def _write(fd: int, data: bytes) -> None:
    # A terminal or pipe that is gone takes the output with it; the files still have it.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
