"""One node's tie to the coordination store: who runs the job, who is in it, and the number of its incarnation.

    /ckptrt/<run>/leader          the launcher that runs the job, by create; the second one gets BusyError
    /ckptrt/<run>/members/<node>  this node, under its lease
    /ckptrt/<run>/incarnation     a number that only grows, by compare-and-swap

Losing etcd stops nothing here: one node alone needs no view of others, and the fences in the storage keep a second job
out. A launcher of many nodes decides otherwise in `restart.py`; this module only tells what it sees.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptrt import env
from ckptrt.agents.connect import EtcdAccess
from ckptrt.agents.coord import CoordStore, MemoryCoord, MemoryCoordStore
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
    ) -> None:
        self.note = ""  # a sentence for the user on the etcd that was chosen
        self._prefix = f"/ckptrt/{run}"
        self._run = run
        self._endpoints = list(endpoints)
        self._notify = notify
        self._clock = clock or SystemClock()
        self._connect = connect or self._connect_etcd
        self._etcd: EmbeddedEtcd | None = None
        self._memory: MemoryCoord | None = None
        self._store: CoordStore | None = None
        self._keeper: LeaseKeeper | None = None
        self._local_incarnation = 0  # the highest that this process has used
        self._closed = threading.Event()

    @property
    def etcd_pid(self) -> int:
        """Process id of the embedded etcd, 0 if there is none."""
        return self._etcd.pid if self._etcd else 0

    def open(self) -> None:
        """Start etcd if none was named, take the lead, register. BusyError names the holder; CoordError: no etcd."""
        if not self._endpoints and self._connect == self._connect_etcd:
            self._start_own()
        self._store = self._connect(2.0)
        self._keeper = LeaseKeeper(self._connect, ttl_s=_TTL_S, on_change=self._lease_changed, clock=self._clock)
        self._keeper.start()
        me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._clock.wall_iso(),
            "id": uuid.uuid4().hex,
        }
        self._lead(json.dumps(me))
        self._keeper.register(f"{self._prefix}/members/{me['host']}-{me['pid']}", json.dumps(me))

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
        """A number above `above` and above all that this job has used, and a warning if etcd could not be asked."""
        above = max(above, self._local_incarnation)
        deadline_s = self._clock.monotonic_s() + _RAISE_PATIENCE_S
        while True:
            try:
                self._local_incarnation = self._swap(above)
                return self._local_incarnation, ""
            except CoordError as error:
                self.check()
                if self._clock.monotonic_s() >= deadline_s:
                    _log.warning("event=incarnation_without_etcd run=%s: %s", self._run, error.what)
                    self._local_incarnation = above + 1
                    return above + 1, f"etcd can't be reached ({error.what}); the fences alone keep the order"
                self._clock.sleep_s(0.1)

    def check(self) -> None:
        """Bring our own etcd back if it has died, and tell that it had."""
        if self._etcd is None or self._closed.is_set():
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

    def _lead(self, me: str) -> None:
        assert self._keeper is not None and self._store is not None
        key = f"{self._prefix}/leader"
        try:
            self._keeper.register(key, me, exclusive=True)
        except BusyError:
            holder = self._store.get(key)
            raise BusyError(
                f"run {self._run} is led by another launcher{_describe(holder.value if holder else '')}",
                safe="everything; nothing was started",
                hint="wait for it or stop it, or choose another name with --rdzv-id",
            ) from None

    def _swap(self, above: int) -> int:
        assert self._store is not None
        key = f"{self._prefix}/incarnation"
        while True:
            item = self._store.get(key)
            number = max(above, int(item.value) if item else 0) + 1
            if self._store.compare_and_swap(key, str(number), item.mod_revision if item else 0) is not None:
                return number

    def _lease_changed(self, change: LeaseChange) -> None:
        if self._closed.is_set():
            return
        if change.kind == "back":
            self._notify(LinkNotice(kind="back", text=f"etcd answers again: {change.reason}"))
        elif f"{self._prefix}/leader" in change.reason and "held by another" in change.reason:
            self._notify(
                LinkNotice(kind="evicted", text=f"another launcher leads run {self._run} now: {change.reason}")
            )
        else:
            self._notify(LinkNotice(kind="lost", text=f"etcd lost, training goes on: {change.reason}"))


def _describe(value: str) -> str:
    try:
        owner = json.loads(value)
        return f": pid {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return ""
