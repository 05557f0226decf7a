"""A worker's line to its node's agent (`ckptrt-launch`), which owns what must outlive the worker."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping
from typing import Any

from ckptrt import wire
from ckptrt.errors import from_data

__all__ = ["AgentLink"]

_TIMEOUT_S = 60.0


class AgentLink:
    """Requests to the agent, one at a time. Raises Error with the agent's reason, or OSError if the agent is gone."""

    def __init__(self, path: str, rank: int, incarnation: int) -> None:
        self._channel = wire.connect(path, _TIMEOUT_S)
        self._lock = threading.Lock()
        self._news = select.poll()
        self._news.register(self._channel.fileno(), select.POLLIN)
        self._proposed: int | None = None
        self.rank = rank
        hello, _ = self._ask({"op": "hello", "rank": rank, "pid": os.getpid(), "incarnation": incarnation})
        self.stacks = str(hello.get("stacks", ""))

    def open_run(self, place: Mapping[str, Any], world_size: int) -> tuple[int, str]:
        """Have the run opened and fenced, once per incarnation: its number, and where to resume from."""
        reply, _ = self._ask({"op": "open_run", **place, "world_size": world_size})
        return int(reply["incarnation"]), str(reply["resume"])

    def arena(self, size_bytes: int) -> tuple[int, bool]:
        """A memfd of that size for this rank, kept by the agent too; and whether it is a new one."""
        reply, fds = self._ask({"op": "arena", "rank": self.rank, "size_bytes": size_bytes})
        return fds[0], bool(reply["created"])

    def holdings(self) -> tuple[int, ...]:
        """Descriptors of every arena on this node, of the last incarnation's ranks too. The caller closes them."""
        return self._ask({"op": "holdings"})[1]

    def persister(self) -> str:
        """The path of the persister's socket."""
        return str(self._ask({"op": "persister"})[0]["path"])

    def release_retired(self) -> None:
        """Arenas of another layout are no longer needed: a snapshot in the present one is committed."""
        self.tell({"op": "release_retired"})

    def committed(self, step: int) -> None:
        """Say that a step is committed: what the supervisor counts as progress."""
        self.tell({"op": "committed", "step": step})

    def phase(self, name: str, step: int | None = None) -> None:
        """Say what this worker has reached, for the account of a recovery."""
        self.tell({"op": "phase", "name": name, "at_s": time.monotonic(), "step": step})

    def proposal(self) -> int | None:
        """The newest step that the agent has proposed to end at since the last call. Never waits."""
        with self._lock, contextlib.suppress(OSError):
            while self._news.poll(0):
                if not self._take_news(self._channel.receive()):
                    break  # the agent is gone, and this process will be
        proposed, self._proposed = self._proposed, None
        return proposed

    def reply_to_drain(self, step: int, target: int, taken: bool) -> None:
        """Say whether this rank, which has done `step` steps, takes the proposal."""
        self._ask({"op": "drain_reply", "step": step, "target": target, "taken": taken})

    def may_end(self, step: int) -> bool:
        """Ask at the end of a step that was taken whether it is the last one. Waits a moment for the others."""
        return bool(self._ask({"op": "drain_arrived", "step": step})[0]["end"])

    def _take_news(self, received: tuple[wire.Message, tuple[int, ...]] | None) -> bool:
        """Keep what the agent says without having been asked; False for anything else."""
        if received is None or received[0]["op"] != "drain":
            return False
        self._proposed = int(received[0]["step"])
        return True

    def tell(self, message: wire.Message) -> None:
        """A message without an answer. A busy or stopped agent misses it; if it is gone, so will this process be."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send_or_drop(message)

    def _ask(self, message: wire.Message) -> tuple[wire.Message, tuple[int, ...]]:
        with self._lock:
            self._channel.send(message)
            while self._take_news(received := self._channel.receive()):
                pass
        if received is None:
            raise ConnectionError("the node's agent has closed the line")
        reply, fds = received
        if reply["op"] == "error":
            raise from_data(reply)
        return reply, fds
