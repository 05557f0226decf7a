"""One node's tie to the coordination store: who runs the job, who is in it, and the number of its incarnation.

    /ckptrt/<run>/leader          who leads the job, by create: where to reach it, and a token to be let in
    /ckptrt/<run>/members/<node>  this node, under its lease
    /ckptrt/<run>/incarnation     a number that only grows and whose it is, by compare-and-swap
    /ckptrt/<run>/job             what the next leader has to know of a job of many nodes

Losing etcd stops nothing here: the fences in the storage keep a second job out, and the nodes of a job are connected
to their leader. But whoever leads many nodes can open no incarnation without etcd: another might lead by then. Who
takes the lead makes the incarnation its own, so that one that sleeps in the midst of raising it fails when it wakes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptrt import env
from ckptrt.agents.connect import EtcdAccess
from ckptrt.agents.coord import CoordStore, KeyValue, MemoryCoord, MemoryCoordStore
from ckptrt.agents.embedded_etcd import EmbeddedEtcd
from ckptrt.agents.lease import LeaseChange, LeaseKeeper
from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import BusyError, CoordError, UsageError

__all__ = ["JobLink", "LinkNotice"]

_log = logging.getLogger(__name__)

_TTL_S = 5.0
_RAISE_PATIENCE_S = 5.0  # how long a restart waits for etcd before it takes its number from the fences alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNotice:
    """lost, back: the lease. evicted: somebody else leads now. respawned: our own etcd had died and runs again."""

    kind: Literal["lost", "back", "evicted", "respawned"]
    text: str


class JobLink:
    """Membership of this node. `notify` is called from other threads; all calls but `close` may block for seconds."""

    def __init__(
        self,
        run: str,
        *,
        endpoints: Sequence[str] = (),
        notify: Callable[[LinkNotice], None],
        connect: Callable[[float], CoordStore] | None = None,
        clock: Clock | None = None,
        ttl_s: float = _TTL_S,
        alone: bool = True,
    ) -> None:
        self.deposed = False  # somebody else leads by now
        self.note = ""  # a sentence for the user on the etcd that was chosen
        self._prefix = f"/ckptrt/{run}"
        self._run = run
        self._endpoints = list(endpoints)
        self._notify = notify
        self._clock = clock or SystemClock()
        self._ttl_s = ttl_s
        self._alone = alone
        self._id = uuid.uuid4().hex
        self._connect = connect or self._connect_etcd
        self._etcd: EmbeddedEtcd | None = None
        self._memory: MemoryCoord | None = None
        self._store: CoordStore | None = None
        self._keeper: LeaseKeeper | None = None
        self._local_incarnation = 0  # the highest that this process has used
        self._opened = False
        self._closed = threading.Event()

    @property
    def etcd_pid(self) -> int:
        """Process id of the embedded etcd, 0 if there is none."""
        return self._etcd.pid if self._etcd else 0

    def open(self) -> None:
        """Reach etcd, started if none was named, and register; take the lead if this node is all there is. Once.

        BusyError names who leads, CoordError: no etcd.
        """
        if self._opened:
            return
        if not self._endpoints and self._connect == self._connect_etcd:
            self._start_own()
        self._store = self._connect(2.0)
        self._keeper = LeaseKeeper(self._connect, ttl_s=self._ttl_s, on_change=self._lease_changed, clock=self._clock)
        self._keeper.start()
        if self._alone:
            holder = self.lead({})
            if holder is not None:
                raise BusyError(
                    f"run {self._run} is led by another launcher{_describe(holder.value)}",
                    safe="everything; nothing was started",
                    hint="wait for it or stop it, or choose another name with --rdzv-id",
                )
        me = self._about_me()
        self._keeper.register(f"{self._prefix}/members/{me['host']}-{me['pid']}", json.dumps(me))
        self._opened = True

    def lead(self, facts: Mapping[str, Any]) -> KeyValue | None:
        """Take the lead, or say who has it. facts: what the other nodes have to know of the leader."""
        assert self._keeper is not None and self._store is not None
        key = f"{self._prefix}/leader"
        try:
            self._keeper.register(key, json.dumps({**self._about_me(), **facts}), exclusive=True)
        except BusyError:
            holder = self._store.get(key)
            if holder is None:
                raise CoordError("the leader has just gone") from None
            return holder
        self._claim_incarnation()
        return None

    def has_lost_the_lead(self) -> bool:
        """Whether somebody else leads by now, as far as etcd can be asked."""
        assert self._store is not None
        with contextlib.suppress(CoordError):
            self.deposed = self.deposed or _incarnation(self._store.get(self._incarnation_key))[1] not in ("", self._id)
        return self.deposed

    def depose(self, holder: KeyValue) -> None:
        """Take the lead from a process that is known to be dead, before its lease ends."""
        assert self._store is not None
        self._store.delete(holder.key, holder.mod_revision)

    def retire(self) -> None:
        """Give up the lead and the lease, and register anew."""
        self._opened = self.deposed = False
        if self._keeper is not None:
            self._keeper.stop()
        if self._store is not None:
            self._store.close()
        self._id = uuid.uuid4().hex
        self.open()

    def read_job(self) -> dict[str, Any] | None:
        """What the last leader has noted; None if there is nothing that can be read."""
        assert self._store is not None
        item = self._store.get(f"{self._prefix}/job")
        with contextlib.suppress(ValueError):
            noted = json.loads(item.value) if item else None
            return noted if isinstance(noted, dict) else None
        return None

    def write_job(self, noted: Mapping[str, Any]) -> None:
        assert self._store is not None
        self._store.put(f"{self._prefix}/job", json.dumps(noted))

    def _about_me(self) -> dict[str, Any]:
        return {"host": socket.gethostname(), "pid": os.getpid(), "since": self._clock.wall_iso(), "id": self._id}

    def _start_own(self) -> None:
        """An etcd of our own, or, where none is installed, a store in this process: enough for a job of one node."""
        try:
            self._etcd = EmbeddedEtcd()
        except UsageError as error:
            if env.etcd_binary():
                raise  # the one that was asked for by name doesn't run: nothing else will do
            self._memory = MemoryCoord(self._clock)
            self.note = f"{error.what}; membership is kept in this process, which is enough for one node"
            return
        self.note = self._etcd.server.note
        self._etcd.start()

    def raise_incarnation(self, above: int) -> tuple[int, str]:
        """A number above `above` and above all that this job has used, and a warning if etcd could not be asked.

        BusyError if somebody else leads by now.
        """
        above = max(above, self._local_incarnation)
        deadline_s = self._clock.monotonic_s() + _RAISE_PATIENCE_S
        while True:
            try:
                self._local_incarnation = self._swap(above)
                return self._local_incarnation, ""
            except CoordError as error:
                self.check()
                if self._alone and self._clock.monotonic_s() >= deadline_s:
                    _log.warning("event=incarnation_without_etcd run=%s: %s", self._run, error.what)
                    self._local_incarnation = above + 1
                    return above + 1, f"etcd can't be reached ({error.what}); the fences alone keep the order"
                if self._closed.is_set():
                    raise
                self._clock.sleep_s(0.1)

    def check(self) -> None:
        """Bring our own etcd back if it has died, and tell that it had."""
        if self._etcd is None or not self._opened or self._closed.is_set():
            return
        try:
            if self._etcd.ensure_running():
                self._notify(LinkNotice(kind="respawned", text="etcd died and runs again; training went on"))
        except CoordError as error:
            self._notify(LinkNotice(kind="lost", text=f"etcd died and can't be started again: {error.what}"))

    def close(self) -> None:
        """Give up the lead and stop our own etcd."""
        self._closed.set()
        if self._keeper is not None:
            self._keeper.stop()
        if self._store is not None:
            self._store.close()
        if self._etcd is not None:
            self._etcd.stop()

    def _connect_etcd(self, request_timeout_s: float) -> CoordStore:
        if self._memory is not None:
            return MemoryCoordStore(self._memory)
        endpoints = ",".join(self._endpoints) or (self._etcd.endpoint if self._etcd else "")
        return EtcdAccess(endpoints=endpoints).connect(request_timeout_s)

    def _claim_incarnation(self) -> None:
        assert self._store is not None
        while True:
            item = self._store.get(self._incarnation_key)
            number, _ = _incarnation(item)
            revision = item.mod_revision if item else 0
            if self._store.compare_and_swap(self._incarnation_key, f"{number} {self._id}", revision) is not None:
                return

    def _swap(self, above: int) -> int:
        assert self._store is not None
        while True:
            item = self._store.get(self._incarnation_key)
            number, owner = _incarnation(item)
            if owner not in ("", self._id):
                self.deposed = True
                raise BusyError(f"another launcher leads run {self._run} now", safe="all that was committed")
            number = max(above, number) + 1
            revision = item.mod_revision if item else 0
            if self._store.compare_and_swap(self._incarnation_key, f"{number} {self._id}", revision) is not None:
                return number

    @property
    def _incarnation_key(self) -> str:
        return f"{self._prefix}/incarnation"

    def _lease_changed(self, change: LeaseChange) -> None:
        if self._closed.is_set():
            return
        if change.kind == "back":
            self._notify(LinkNotice(kind="back", text=f"etcd answers again: {change.reason}"))
        elif f"{self._prefix}/leader" in change.reason and "held by another" in change.reason:
            self.deposed = True
            self._notify(
                LinkNotice(kind="evicted", text=f"another launcher leads run {self._run} now: {change.reason}")
            )
        else:
            self._notify(LinkNotice(kind="lost", text=f"etcd lost, training goes on: {change.reason}"))


def _incarnation(item: KeyValue | None) -> tuple[int, str]:
    """The number, and the id of the leader that has raised it last."""
    number, _, owner = (item.value if item else "0").partition(" ")
    return int(number), owner


def _describe(value: str) -> str:
    try:
        owner = json.loads(value)
        return f": pid {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return ""
