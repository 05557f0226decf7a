"""Workers as forks of the warm zygote: the agent's side of zygote.py."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import ckptrt
from ckptrt.agents.workers import WorkerBase, WorkerExited, WorkerSpec, WorkersUnavailable
from ckptrt.clock import Clock
from ckptrt.wire import Channel, Message

__all__ = ["ZygoteProcess", "ZygoteWorkers"]

# Not `-m`: that would leave the current directory in front of sys.path while torch is imported, and a random.py there
# would win over the library's. The package's own folder comes last, for a checkout that isn't installed.
_BOOT = (
    "import sys; sys.path = [p for p in sys.path if p] + [sys.argv.pop(1)];"
    " from ckptrt.agents.zygote import main; main()"
)
_SEND_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0


class ZygoteProcess:
    """A zygote and the channel to it. Starting one costs nothing here: it imports in parallel with its agent."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.ready = False
        self.took_s = 0.0
        self.failed: dict[str, str] = {}
        ours, theirs = socket.socketpair()
        root = os.path.dirname(os.path.dirname(os.path.abspath(ckptrt.__file__)))
        command = [sys.executable, "-u", "-c", _BOOT, root, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command, env=environ, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        ours.settimeout(_SEND_TIMEOUT_S)
        self._channel = Channel(ours)

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Raises OSError when the zygote is gone."""
        self._channel.send(message, fds)

    def receive(self) -> list[Message] | None:
        """The messages that are there, without waiting for more; None when the zygote is gone."""
        messages: list[Message] = []
        while self._channel.pending() or select.select([self._channel], [], [], 0)[0]:
            try:
                received = self._channel.receive()
            except OSError:
                received = None
            if received is None:
                return messages or None
            messages.append(received[0])
        return messages

    def how_it_ended(self) -> str:
        """A phrase on the exit of a zygote whose channel has closed."""
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit {code}"

    def close(self) -> None:
        """Hang up and kill it; its workers go with it."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


class ZygoteWorkers(WorkerBase):
    """Forks of a zygote. If it dies, its workers have died with it, and the next start brings up another.

    preload, path: modules to import beside the defaults, and folders in which to look for them.
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        *,
        preload: Sequence[str] = (),
        path: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock)
        self._zygote: ZygoteProcess | None = None
        self._environ = zygote.environ
        self._preload = {"op": "preload", "modules": list(preload), "path": list(path)}
        self._waiting: list[WorkerSpec] = []  # to be forked as soon as the zygote is ready
        self._asked: dict[int, int] = {}  # ticket -> rank
        self._ticket = 0
        self.problems: list[str] = []  # what could not be imported; for whoever prints
        self._adopt(zygote)

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        self._begin()
        if self._zygote is None:
            self._adopt(ZygoteProcess(self._environ))
        self._waiting = list(specs)
        self._fork_waiting()

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        for spec in self._waiting:  # nobody will start these, so they have ended
            self._never_came(spec.rank, "not started yet", by_us=True)
        self._waiting.clear()
        super().stop(grace_s, signum)

    def filenos(self) -> tuple[int, ...]:
        return (self._zygote.fileno(),) if self._zygote else ()

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
            self._lost("the job is over")

    def _adopt(self, zygote: ZygoteProcess) -> None:
        self._zygote = zygote
        if self._preload["modules"]:
            zygote.send(self._preload)

    def _fork_waiting(self) -> None:
        if self._zygote is None or not self._zygote.ready:
            return
        specs, self._waiting = self._waiting, []
        for spec in specs:
            self._ticket += 1
            self._asked[self._ticket] = spec.rank
            message = {"op": "fork", "ticket": self._ticket, "request": spec.request.to_message()}
            try:
                self._zygote.send(message, spec.streams)
            except OSError:
                return  # its end is read from the channel, and takes all that was asked for with it

    def _send(self, pids: Sequence[int], signum: int) -> None:
        if self._zygote is not None and pids:
            try:
                self._zygote.send({"op": "signal", "pids": list(pids), "signum": signum})
            except OSError:
                return  # as above

    def _collect(self) -> None:
        if self._zygote is None:
            return
        messages = self._zygote.receive()
        if messages is None:
            zygote, self._zygote = self._zygote, None
            how = zygote.how_it_ended()
            zygote.close()
            self._lost(f"the zygote died ({how}) and its workers with it")
            return
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        op = message["op"]
        if op == "exited":
            self._note_exited(message["pid"], message["code"], message["at_s"])
        elif op == "forked":
            self._note_started(self._asked.pop(message["ticket"]), message["pid"])
        elif op == "refused":
            self._refuse([self._asked.pop(message["ticket"])], message["why"])
        elif op == "ready" and self._zygote is not None:
            self._zygote.ready, self._zygote.took_s = True, message["took_s"]
            self._note_failed(message["failed"])
            self._fork_waiting()
        elif op == "preloaded":
            self._note_failed(message["failed"])

    def _note_failed(self, failed: dict[str, str]) -> None:
        self.problems += [f"{name} can't be preloaded: {why}" for name, why in failed.items()]

    def _refuse(self, ranks: list[int], why: str) -> None:
        """These ranks will not come. If others of the set run, the set has failed; else it can be started elsewhere."""
        if self._ranks:
            for rank in ranks:
                self._never_came(rank, why)
        elif not self._asked:
            self._events.append(WorkersUnavailable(why=why))

    def _never_came(self, rank: int, note: str, *, by_us: bool = False) -> None:
        now_s = self._clock.monotonic_s()
        exited = WorkerExited(rank=rank, pid=0, code=-signal.SIGKILL, at_s=now_s, note=note, by_us=by_us)
        self._events.append(exited)

    def _lost(self, note: str) -> None:
        """The zygote is gone: so are its workers, by their death signal."""
        missing = [*self._asked.values(), *(spec.rank for spec in self._waiting)]
        self._asked.clear()
        self._waiting.clear()
        if missing:
            self._refuse(missing, note)
        for pid in tuple(self._ranks):
            self._note_exited(pid, -signal.SIGKILL, self._clock.monotonic_s(), note)
