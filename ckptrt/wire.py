"""Messages between processes of one node: one JSON object a message, file descriptors beside it.

A Unix stream socket carries frames of a 4-byte little-endian length and UTF-8 JSON. Descriptors travel with
the frame's first bytes (SCM_RIGHTS), so they arrive no later than the message that names them.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

__all__ = ["Channel", "Message", "connect", "listen"]

Message = dict[str, Any]
_LENGTH = struct.Struct("<I")
_FRAME_MAX_BYTES = 64 << 20
_FDS_MAX = 64  # in one batch; the kernel takes 253


class Channel:
    """One end of a Unix socket that speaks frames. Not thread-safe for two senders or two receivers at once."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send one message; the descriptors stay the caller's own. Raises OSError when the peer is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        frame = _LENGTH.pack(len(body)) + body
        if len(fds) > _FDS_MAX * len(frame):
            raise ValueError(f"{len(fds)} descriptors are too many for a message of {len(frame)} bytes")
        for first in range(0, len(fds), _FDS_MAX):  # a byte carries a batch: the kernel never joins two in one read
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[first : first + _FDS_MAX]))]
            self.sock.sendmsg([frame[:1]], rights)
            frame = frame[1:]
        if frame:
            self.sock.sendall(frame)

    def send_or_drop(self, message: Message) -> bool:
        """Send a small message if the peer has room for it at once, else drop it; False if it was dropped.

        Raises OSError when the peer is gone. Never waits, whatever time-out the socket has.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        frame = _LENGTH.pack(len(body)) + body
        try:
            # A frame of a few hundred bytes goes into one buffer of the kernel, whole or not at all. os.write, since
            # socket.send would first wait for room.
            os.set_blocking(self.sock.fileno(), False)
            if os.write(self.sock.fileno(), frame) != len(frame):
                raise ConnectionError("a message was cut off")
        except BlockingIOError:
            return False
        finally:
            self.sock.settimeout(self.sock.gettimeout())
        return True

    def receive(self) -> tuple[Message, tuple[int, ...]] | None:
        """The next message and the descriptors sent with it (now the caller's), or None at the end of the stream.

        Raises TimeoutError if the socket has a time-out, and ConnectionError on a torn or oversized frame.
        """
        while True:
            message = self._pop()
            if message is not None:
                fds, self._fds = tuple(self._fds), []
                return message, fds
            if not self._fill():
                if self._buffer:
                    raise ConnectionError("the peer went away in the middle of a message")
                return None

    def pending(self) -> bool:
        """Whether a whole message is already buffered, so that a selector need not be asked."""
        return len(self._buffer) >= 4 and len(self._buffer) >= 4 + int(_LENGTH.unpack_from(self._buffer)[0])

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self.sock.close()

    def _fill(self) -> bool:
        # A read must not run past the frame whose descriptors it carries: the next frame's would be mixed in.
        want = 4 if len(self._buffer) < 4 else 4 + _frame_size(self._buffer)
        room = array.array("i", [0] * _FDS_MAX).itemsize * _FDS_MAX
        data, ancillary, flags, _addr = self.sock.recvmsg(want - len(self._buffer), socket.CMSG_SPACE(room))
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise ConnectionError("descriptors that came with a message were lost: is the limit of open files too low?")
        self._buffer += data
        return bool(data)

    def _pop(self) -> Message | None:
        if not self.pending():
            return None
        end = 4 + _frame_size(self._buffer)
        message = json.loads(self._buffer[4:end])
        del self._buffer[:end]
        if not isinstance(message, dict):
            raise ConnectionError("a message must be a JSON object")
        return message


def _frame_size(buffer: bytearray) -> int:
    size = int(_LENGTH.unpack_from(buffer)[0])
    if size > _FRAME_MAX_BYTES:
        raise ConnectionError(f"a frame of {size} bytes is more than the {_FRAME_MAX_BYTES} allowed")
    return size


def listen(path: str) -> socket.socket:
    """A listening Unix socket at path, readable by this user only. Replaces a dead socket file."""
    if os.path.exists(path):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(64)
    return sock


def connect(path: str, timeout_s: float | None = None) -> Channel:
    """A channel to the socket at path. Raises OSError when nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return Channel(sock)
