"""A node's part in a job that another one leads: does what the leader says, tells it what becomes of the workers.

`hub.py` is the other end, and lists the messages.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ckptrt.agents.herald import Herald
from ckptrt.agents.job import Job, Order
from ckptrt.agents.line import Line, dial
from ckptrt.agents.loop import Loop
from ckptrt.agents.node import Node
from ckptrt.agents.verdict import Exit, describe_code
from ckptrt.agents.watchdog import Look
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Message

__all__ = ["Leader", "Member", "Parted"]

_BEATS = 6  # in the time after which silence is death
_STEPS_TOLD_S = 0.5  # steps are told so often; the node's own watchdog sees each


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Who leads a job, as etcd has it. token: who knows it is let in."""

    node: str
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """How it ended. exit_code: the part of this node is over; None if only the leader was lost.

    job: the id of the job that was taken part in, empty if it never came to that. refused: nobody listens there.
    """

    why: str
    job: str = ""
    exit_code: int | None = None
    refused: bool = False


class Member:
    """One connection to one leader, from the first word to the last."""

    def __init__(self, job: Job, loop: Loop, node: Node, herald: Herald, name: str, timeout_s: float) -> None:
        self._job = job
        self._loop = loop
        self._node = node
        self._herald = herald
        self._name = name
        self._timeout_s = timeout_s
        self._line: Line | None = None
        self._parted: Parted | None = None
        self._job_id = ""
        self._answers: dict[int, Callable[[Message], None]] = {}
        self._number = 0
        self._beat_at_s = 0.0
        self._step_told_at_s: dict[int, float] = {}
        self._told_to_go = False

    def serve(self, leader: Leader) -> Parted:
        """Take part until the leader says it is over, or is lost; no worker is left then."""
        try:
            sock = dial(leader.host, leader.port, min(2.0, self._timeout_s))
        except OSError as error:
            return Parted(why=f"{leader.node} can't be reached: {error}", refused=isinstance(error, ConnectionError))
        self._line = Line(sock, self._loop.selector, self._take, self._lost)
        self._node.boss = self
        self._loop.on_signal = self._signalled
        self._say({"op": "join", "token": leader.token, "node": self._name, "slots": self._job.num_workers, **_clock()})
        while self._parted is None:
            self._node.watch()
            self._loop.turn((self._node.wake_in_s(), max(0.0, self._beat_at_s - time.monotonic())))
            self._node.turn()
            self._check_clocks()
        self._line.close()
        self._settle()
        return self._parted

    def _check_clocks(self) -> None:
        assert self._line is not None
        now_s = time.monotonic()
        if now_s < self._beat_at_s:
            return
        late_s = now_s - self._beat_at_s if self._beat_at_s else 0.0
        self._beat_at_s = now_s + self._timeout_s / _BEATS
        self._say({"op": "beat", **_clock()})
        if late_s > self._timeout_s:
            # The leader has given this node up meanwhile, and others may have its ranks.
            self._line.end(f"this process did not run for {late_s:.1f} s")
        elif self._line.silent_s > self._timeout_s:
            self._line.end(f"nothing was heard of it for {self._line.silent_s:.1f} s")

    def _signalled(self, signum: int) -> None:
        if signum not in self._job.signals and signum not in self._job.drain_signals:
            return
        name = signal.Signals(signum).name
        if self._told_to_go:
            self._herald.say("signal", f"{name}: killing the workers")
            self._parted = Parted(why=name, job=self._job_id, exit_code=128 + signum)
            return
        self._told_to_go = True
        self._herald.say("signal", f"{name}: the leader is asked to go on without this node; once more ends it now")
        self._say({"op": "leave", "signum": int(signum)})

    def _lost(self, why: str) -> None:
        if self._parted is None:
            self._parted = Parted(why=f"the leader is lost: {why}", job=self._job_id)

    def _settle(self) -> None:
        """End what runs here: nobody decides for it any more, and others may be about to take its place."""
        self._node.boss = _Nobody()
        self._node.stop(0.0 if self._parted and self._parted.exit_code is None else self._job.grace_s)
        while self._node.busy:
            self._node.watch()
            self._loop.turn((self._node.wake_in_s(),))
            self._node.turn()

    def _say(self, message: Message) -> None:
        assert self._line is not None
        self._line.send(message)

    # --- what the leader says

    def _take(self, message: Message) -> None:
        op = str(message["op"])
        if op == "welcome":
            self._job_id = str(message["job"])
        elif op == "start":
            self._node.start(Order(**{name: value for name, value in message.items() if name != "op"}))
        elif op == "stop":
            self._node.stop(float(message["grace_s"]), int(message["signum"]))
        elif op == "drain":
            self._node.drain(message["message"])
        elif op == "look":
            self._node.look()
        elif op == "answer":
            self._answers.pop(int(message["number"]))(message["message"])
        elif op == "end":
            code = int(message["exit_code"])
            self._parted = Parted(why="the job is over", job=self._job_id, exit_code=code)
        elif op != "beat":
            raise ValueError(f"there is no message {op!r}")

    # --- node.Boss: all of it goes to the leader

    def started(self, rank: int, pid: int) -> None:
        self._say({"op": "started", "rank": rank, "pid": pid})

    def exited(self, ended: Exit) -> None:
        message: Message = {"op": "exited", "exit": asdict(ended)}
        if ended.code and not ended.by_us:
            account = self._node.account(ended.rank)
            message["account"] = {"tail": account.tail, "log": account.log}
            note = ended.error or ended.note
            self._herald.say("failure", f"rank {ended.rank} · {describe_code(ended.code)}{note and f' · {note}'}")
        self._say(message)

    def looked(self, looks: list[Look]) -> None:
        self._say({"op": "looked", "looks": [asdict(look) for look in looks]})

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None:
        number = self._expect(answer)
        self._say({"op": "open_run", "number": number, "place": place.data(), "world_size": world_size})

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None:
        self._say({"op": "drain_replied", "rank": rank, "step": step, "target": target, "taken": taken})

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        self._say({"op": "drain_arrived", "number": self._expect(answer), "rank": rank, "step": step})

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None:
        if name == "step":
            if at_s - self._step_told_at_s.get(rank, 0.0) < _STEPS_TOLD_S:
                return
            self._step_told_at_s[rank] = at_s
        self._say({"op": "phase", "rank": rank, "name": name, "at_s": at_s, "step": step})

    def committed(self, step: int) -> None:
        self._say({"op": "committed", "step": step})

    def _expect(self, answer: Callable[[Message], None]) -> int:
        self._number += 1
        self._answers[self._number] = answer
        return self._number


class _Nobody:
    """The boss while there is none: what workers say then is of no use to anybody, and nobody answers them."""

    def started(self, rank: int, pid: int) -> None: ...

    def exited(self, ended: Exit) -> None: ...

    def looked(self, looks: list[Look]) -> None: ...

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None: ...

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None: ...

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None: ...

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None: ...

    def committed(self, step: int) -> None: ...


def _clock() -> Message:
    return {"now_s": time.monotonic()}
