"""A rank's line to the persister: it is started if nobody else does, and followed through its deaths."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptrt import say, wire
from ckptrt.errors import Error, PersistError, from_data

__all__ = ["OwnPersister", "PersisterLink"]

_CONNECT_TIMEOUT_S = 60.0
_RETRY_S = 0.02
_END_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submitted:
    slot: int
    fd: int  # our own
    retry: int


class OwnPersister:
    """A persister process of this rank's own, for jobs that no `ckptrt-launch` has started.

    It ends by itself when this process is gone, after it has written what it was given.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ckptrt-")
        self.path = os.path.join(self._folder, "persister.sock")
        self._control = -1
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Start it, or start it again if it died."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._control >= 0:
            os.close(self._control)
        read_end, self._control = os.pipe()
        command = [sys.executable, "-m", "ckptrt.storage.persister", "--socket", self.path]
        try:
            self._process = subprocess.Popen(
                [*command, "--control-fd", str(read_end)],
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def close(self) -> None:
        """Let it finish and end."""
        if self._control >= 0:
            # A word, not just the end of the pipe: a child that the program has forked may hold the pipe open.
            with contextlib.suppress(OSError):
                os.write(self._control, b".")
            os.close(self._control)
            self._control = -1
        if self._process is not None:
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # stuck in a write to a dead file system, say: it ends when that does
                say.line("warn", f"the persister (pid {self._process.pid}) is still busy and is left to itself")
                return
        shutil.rmtree(self._folder, ignore_errors=True)


class PersisterLink:
    """Hands slots over and hears what became of them.

    path: the persister's socket. hello: what to greet it with. revive: called before every attempt to connect.
    notice(message) is called from the link's thread for each `persisted`, `committed`, `failed` and `warning`.
    Slots that were handed over and not settled are handed over again to a persister that took a dead one's place. If
    none can be had, what was handed over has failed, and the next slot is the occasion to try again.
    """

    def __init__(
        self,
        path: str,
        hello: wire.Message,
        notice: Callable[[wire.Message], None],
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._hello = hello
        self._notice = notice
        self._revive = revive
        self._lock = threading.Lock()
        self._channel: wire.Channel | None = None
        self._submitted: dict[int, _Submitted] = {}
        self._skips: list[wire.Message] = []
        self._closing = False
        self._handed_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptrt-persister-link", daemon=True)
        self._thread.start()

    def submit(self, step: int, slot: int, fd: int, retry: int = 0) -> None:
        """Hand over a sealed slot of the arena behind `fd`, which stays the caller's."""
        with self._lock:
            self._settle(step)
            self._submitted[step] = _Submitted(slot=slot, fd=os.dup(fd), retry=retry)
            if self._channel is not None:
                with contextlib.suppress(OSError):  # a dead persister is noticed by the thread, which hands over again
                    self._send(self._channel, step, again=False)
            self._handed_over.set()

    def skip(self, step: int, retry: int = 0) -> None:
        """Say that this rank has no snapshot of a step, so that no other rank waits for it."""
        message: wire.Message = {"op": "skip", "step": step, "retry": retry}
        with self._lock, contextlib.suppress(OSError):
            if self._channel is None:
                self._skips.append(message)  # the first steps may be over before the persister is up
            else:
                self._channel.send(message)

    def close(self) -> None:
        """Hang up. What was handed over is still written."""
        with self._lock:
            self._closing = True
            if self._channel is not None:
                # Only the thread closes the channel, but a shutdown wakes it up.
                with contextlib.suppress(OSError):
                    self._channel.sock.shutdown(2)
            self._handed_over.set()
        self._thread.join()
        with self._lock:
            for step in list(self._submitted):
                self._settle(step)

    # --- the link's thread

    def _run(self) -> None:
        again = False
        while not self._closing:
            self._handed_over.clear()
            try:
                channel = self._connect()
                if channel is None:
                    return
                self._hand_over(channel, again)
                self._listen(channel)
            except OSError:
                pass  # the persister died: the next turn connects to its successor
            except Error as error:
                self._fail_all(error)
                self._handed_over.wait()
            finally:
                with self._lock:
                    if self._channel is not None:
                        self._channel.close()
                        self._channel = None
            again = True

    def _connect(self) -> wire.Channel | None:
        """A greeted channel; None if the link is being closed. PersistError if no persister comes up."""
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while not self._closing:
            with contextlib.suppress(OSError):
                self._revive()
                channel = self._greet()
                if channel is not None:
                    return channel
            if time.monotonic() > deadline_s:
                raise PersistError(
                    f"rank {self._hello['rank']}: no persister answers at {self._path}",
                    safe="training goes on; snapshots stay in memory only",
                    hint="look for its message on stderr",
                )
            time.sleep(_RETRY_S)
        return None

    def _greet(self) -> wire.Channel | None:
        """A channel to a persister that takes this rank; None if it hung up. Raises the error that it answers."""
        channel = wire.connect(self._path)
        taken = False
        try:
            channel.send(self._hello)
            received = channel.receive()
            taken = received is not None and received[0]["op"] == "ready"
        finally:
            if not taken:
                channel.close()
        if received is not None and not taken:
            raise from_data(received[0])
        return channel if taken else None

    def _hand_over(self, channel: wire.Channel, again: bool) -> None:
        with self._lock:
            self._channel = channel
            for step in sorted(self._submitted):
                self._send(channel, step, again)
            skips, self._skips = self._skips, []
            for message in skips:
                channel.send(message)
            if self._closing:  # close() came while there was no channel to wake this thread by
                channel.sock.shutdown(2)

    def _send(self, channel: wire.Channel, step: int, again: bool) -> None:
        job = self._submitted[step]
        message = {"op": "submit", "step": step, "retry": job.retry, "slot": job.slot, "again": again}
        channel.send(message, (job.fd,))

    def _listen(self, channel: wire.Channel) -> None:
        while (received := channel.receive()) is not None:
            message = received[0]
            if message["op"] in ("committed", "failed"):
                with self._lock:
                    job = self._submitted.get(int(message["step"]))
                    if job is not None and job.retry == int(message["retry"]):
                        self._settle(int(message["step"]))
            self._notice(message)

    def _fail_all(self, error: Error) -> None:
        with self._lock:
            retries = {step: job.retry for step, job in sorted(self._submitted.items())}
            for step in retries:
                self._settle(step)
        for step, retry in retries.items():
            self._notice({"op": "failed", "step": step, "retry": retry, **error.data()})
        self._notice({"op": "lost", **error.data()})

    def _settle(self, step: int) -> None:
        job = self._submitted.pop(step, None)
        if job is not None:
            os.close(job.fd)
