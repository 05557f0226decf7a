"""The leader's side of the other nodes: lets them in, passes on what is decided, and notices when one is gone.

a node says      join  token, node, slots, now_s          what it is and has
                 beat  now_s                              it lives; its clock, to understand its times
                 started | exited | looked | phase | committed | open_run | drain_replied | drain_arrived
                 leave signum                             it was told to go
the leader says  welcome  job                             the job's own id
                 beat                                     it lives
                 start | stop | drain | look              what `NodeControl` has
                 answer  number, message                  to open_run and drain_arrived
                 end  exit_code                           the job, or this node's part in it, is over
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from ckptrt.agents.job import Order
from ckptrt.agents.line import Line
from ckptrt.agents.node import Account, Boss, NodeControl
from ckptrt.agents.verdict import Exit
from ckptrt.agents.watchdog import Look
from ckptrt.clock import Clock, SystemClock
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["Chief", "Hub"]

_BEATS = 6  # in the time after which silence is death


class Chief(Boss, Protocol):
    """The boss of several nodes."""

    def joined(self, node: str, slots: int, control: NodeControl) -> None: ...

    def lost(self, node: str, why: str) -> None: ...

    def leaving(self, node: str, signum: int) -> None:
        """A node was told to go."""
        ...


class _Remote:
    """Another node, as `NodeControl`; what it says is told to the chief in this machine's time."""

    def __init__(self, node: str, line: Line, chief: Chief, clock: Clock) -> None:
        self.node = node
        self.line = line
        self._chief = chief
        self._clock = clock
        self._ahead_s = float("inf")  # our clock before its own, less the quickest message's time
        self._accounts: dict[int, Account] = {}

    def heard_clock(self, now_s: float) -> None:
        self._ahead_s = min(self._ahead_s, self._clock.monotonic_s() - now_s)

    # --- NodeControl

    def start(self, order: Order) -> None:
        self._accounts.clear()
        self.line.send({"op": "start", **asdict(order)})

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        self.line.send({"op": "stop", "grace_s": grace_s, "signum": int(signum)})

    def drain(self, message: Message) -> None:
        self.line.send({"op": "drain", "message": message})

    def look(self) -> None:
        self.line.send({"op": "look"})

    def account(self, rank: int) -> Account:
        return self._accounts.get(rank, Account())

    # --- what it says

    def take(self, message: Message) -> None:
        handler = _HANDLERS.get(str(message["op"]))
        if handler is None:
            raise ValueError(f"there is no message {message['op']!r}")
        handler(self, message)

    def _beat(self, message: Message) -> None:
        self.heard_clock(float(message["now_s"]))

    def _started(self, message: Message) -> None:
        self._chief.started(int(message["rank"]), int(message["pid"]))

    def _exited(self, message: Message) -> None:
        told = Exit(**message["exit"])
        error_at_s = None if told.error_at_s is None else told.error_at_s + self._ahead_s
        account = message.get("account")
        if account is not None:
            self._accounts[told.rank] = Account(tail=tuple(account["tail"]), log=f"{self.node}:{account['log']}")
        facts = {**asdict(told), "at_s": told.at_s + self._ahead_s, "error_at_s": error_at_s}
        self._chief.exited(Exit(**facts))

    def _looked(self, message: Message) -> None:
        self._chief.looked([Look(**{**look, "stack": tuple(look["stack"])}) for look in message["looks"]])

    def _phase(self, message: Message) -> None:
        at_s = float(message["at_s"]) + self._ahead_s
        self._chief.phase(int(message["rank"]), str(message["name"]), at_s, message["step"])

    def _committed(self, message: Message) -> None:
        self._chief.committed(int(message["step"]))

    def _open_run(self, message: Message) -> None:
        place = RunPlace.from_data(message["place"])
        self._chief.open_run(place, int(message["world_size"]), self._answerer(message))

    def _drain_replied(self, message: Message) -> None:
        rank, step, target = (int(message[name]) for name in ("rank", "step", "target"))
        self._chief.drain_replied(rank, step, target, bool(message["taken"]))

    def _drain_arrived(self, message: Message) -> None:
        self._chief.drain_arrived(int(message["rank"]), int(message["step"]), self._answerer(message))

    def _leave(self, message: Message) -> None:
        self._chief.leaving(self.node, int(message["signum"]))

    def _answerer(self, message: Message) -> Callable[[Message], None]:
        number = int(message["number"])
        return lambda answer: self.line.send({"op": "answer", "number": number, "message": answer})


_HANDLERS: dict[str, Callable[[_Remote, Message], None]] = {
    "beat": _Remote._beat,
    "started": _Remote._started,
    "exited": _Remote._exited,
    "looked": _Remote._looked,
    "phase": _Remote._phase,
    "committed": _Remote._committed,
    "open_run": _Remote._open_run,
    "drain_replied": _Remote._drain_replied,
    "drain_arrived": _Remote._drain_arrived,
    "leave": _Remote._leave,
}


class Hub:
    """Listens from the start; lets nodes in while `chief` is set. timeout_s: silence after which a node is gone."""

    def __init__(
        self, host: str, token: str, selector: selectors.BaseSelector, timeout_s: float, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._token = token
        self._selector = selector
        self._timeout_s = timeout_s
        self._chief: Chief | None = None
        self._job = ""
        self._strangers: set[Line] = set()
        self._nodes: dict[str, _Remote] = {}
        self._beat_at_s = 0.0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def lead(self, chief: Chief, job: str) -> None:
        self._chief, self._job = chief, job

    def end(self, node: str, exit_code: int) -> None:
        """This node's part in the job is over."""
        remote = self._nodes.pop(node, None)
        if remote is not None:
            remote.line.send({"op": "end", "exit_code": exit_code})
            remote.line.close()

    def retire(self, exit_code: int | None = None) -> None:
        """Lead no more. exit_code: the job is over; without, the nodes have to look for another leader."""
        self._chief = None
        for remote in list(self._nodes.values()):
            if exit_code is not None:
                remote.line.send({"op": "end", "exit_code": exit_code})
            remote.line.close()
        self._nodes.clear()

    def close(self) -> None:
        self.retire()
        for line in list(self._strangers):
            line.close()
        self._selector.unregister(self._listener)
        self._listener.close()

    def wake_in_s(self) -> float | None:
        if not self._nodes and not self._strangers:
            return None
        return max(0.0, self._beat_at_s - self._clock.monotonic_s())

    def check(self) -> None:
        """Say that we live, and part with who doesn't; to be called when `wake_in_s` is over."""
        now_s = self._clock.monotonic_s()
        if now_s < self._beat_at_s:
            return
        # What arrived while this process didn't run must be read before it is judged: one turn more.
        late = now_s - self._beat_at_s > self._timeout_s / 2 and self._beat_at_s > 0
        self._beat_at_s = now_s + self._timeout_s / _BEATS
        for remote in list(self._nodes.values()):
            remote.line.send({"op": "beat"})
            if not late and remote.line.silent_s > self._timeout_s:
                remote.line.end(f"nothing was heard of it for {remote.line.silent_s:.1f} s")
        for line in [line for line in self._strangers if line.silent_s > self._timeout_s]:
            self._strangers.discard(line)
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _address = self._listener.accept()
            self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        line: Line | None = None

        def first(message: Message) -> None:
            assert line is not None
            self._join(line, message)

        def gone(why: str) -> None:
            if line is not None:
                self._strangers.discard(line)

        with contextlib.suppress(OSError):  # gone already
            line = Line(sock, self._selector, first, gone, self._clock)
            self._strangers.add(line)

    def _join(self, line: Line, message: Message) -> None:
        self._strangers.discard(line)
        known = hmac.compare_digest(str(message.get("token", "")), self._token)
        if self._chief is None or not known or message.get("op") != "join":
            line.close()
            return
        node, slots = str(message["node"]), int(message["slots"])
        if node in self._nodes:
            self._nodes[node].line.end("it has come anew")
        remote = self._nodes[node] = _Remote(node, line, self._chief, self._clock)
        remote.heard_clock(float(message["now_s"]))
        line.take_over(remote.take, lambda why: self._gone(remote, why))
        line.send({"op": "welcome", "job": self._job})
        self._chief.joined(node, slots, remote)

    def _gone(self, remote: _Remote, why: str) -> None:
        if self._nodes.get(remote.node) is remote:
            del self._nodes[remote.node]
            if self._chief is not None:
                self._chief.lost(remote.node, why)
