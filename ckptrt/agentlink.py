"""A worker's line to its node's agent (`ckptrt-launch`), which owns what must outlive the worker."""

from __future__ import annotations

import contextlib
import os
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
        self.rank = rank
        self._ask({"op": "hello", "rank": rank, "pid": os.getpid(), "incarnation": incarnation})

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

    def tell(self, message: wire.Message) -> None:
        """A message without an answer. A busy or stopped agent misses it; if it is gone, so will this process be."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send_or_drop(message)

    def _ask(self, message: wire.Message) -> tuple[wire.Message, tuple[int, ...]]:
        with self._lock:
            self._channel.send(message)
            received = self._channel.receive()
        if received is None:
            raise ConnectionError("the node's agent has closed the line")
        reply, fds = received
        if reply["op"] == "error":
            raise from_data(reply)
        return reply, fds
