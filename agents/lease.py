"""The lease keeper: keys that exist for as long as this process lives and can reach the coordination store.

At a glance:

    keeper = LeaseKeeper(connect, ttl_s=5.0, on_change=print_it)     connect(request_timeout_s) -> CoordStore
    keeper.start()                                      grants the lease; CoordError when the store can't be reached
    keeper.register(key, value)                         written under the lease now, and again after every loss
    keeper.register(key, value, exclusive=True)         BusyError, naming the holder, when somebody else has the key
    keeper.lease_id, keeper.held, keeper.valid_until_s
    keeper.stop()                                       revokes: the keys are gone at once

`on_change` hears "lost" when the lease has ended or can't be proven alive any longer, and "back" when the keys are
there again. What to do about it is the caller's business. Whoever must act before others see the lease end (stop the
workers) shall not wait for the callback, which is late while a call to the store hangs: `valid_until_s` is the moment
on this machine's monotonic clock before which no other machine can have seen it end, counted from the sending of the
last renewal that was answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from ckptrt.agents.coord import CoordStore
from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import BusyError, CoordError

__all__ = ["Action", "LeaseChange", "LeaseKeeper", "LeaseState", "decide"]

_log = logging.getLogger(__name__)


class Action(Enum):
    """What the keeper does next."""

    GRANT = "grant"  # get a new lease
    CLAIM = "claim"  # write the keys under it
    RENEW = "renew"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """What is known of the lease; all that decisions are made from."""

    ttl_s: float
    lease_id: int = 0  # 0: there is none
    renewed_at_s: float = 0.0  # when the last grant or renewal that was answered was sent
    failed_at_s: float | None = None  # when the last call failed; None when it went well
    claimed: bool = False  # the keys are written under this lease

    @property
    def valid_until_s(self) -> float:
        """The store can't have ended the lease before this; minus infinity without one."""
        return self.renewed_at_s + self.ttl_s if self.lease_id else float("-inf")

    @property
    def retry_s(self) -> float:
        return min(0.5, self.ttl_s / 10)

    def held(self, now_s: float) -> bool:
        return self.claimed and now_s < self.valid_until_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChange:
    """A transition that `on_change` is told of, on the keeper's thread."""

    kind: Literal["lost", "back"]
    lease_id: int  # for "lost" the one that was; for "back" the one that is
    same_lease: bool  # "back": the old lease had lived on, and nobody saw the keys go
    reason: str


def decide(state: LeaseState, now_s: float) -> tuple[Action, float]:
    """What to do now, and for WAIT how many seconds until there is something to do."""
    if state.failed_at_s is not None and now_s < state.failed_at_s + state.retry_s:
        return Action.WAIT, state.failed_at_s + state.retry_s - now_s
    if not state.lease_id:
        return Action.GRANT, 0.0
    renew_at_s = state.renewed_at_s + state.ttl_s / 3
    if now_s >= renew_at_s:
        return Action.RENEW, 0.0
    if not state.claimed:
        return Action.CLAIM, 0.0
    return Action.WAIT, renew_at_s - now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    value: str
    exclusive: bool


class LeaseKeeper:
    """Renews one lease every third of its time to live, from a thread and a store connection of its own.

    A lease that has ended (the store lost its data, this process was paused for too long) is replaced by a new one,
    and all keys are written again; an exclusive key that somebody else took meanwhile stays theirs and the keeper
    stays "lost" until it is free.
    `connect` makes the keeper's own CoordStore; it is called once, with the request time-out that the lease allows.
    """

    def __init__(
        self,
        connect: Callable[[float], CoordStore],
        *,
        ttl_s: float,
        on_change: Callable[[LeaseChange], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._store = connect(min(2.0, ttl_s / 6))
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._state = LeaseState(ttl_s=ttl_s)
        self._entries: dict[str, _Entry] = {}
        self._writing = threading.Lock()  # one writer of keys at a time, so that an old value can't overtake a new one
        self._stopping = threading.Event()
        self._lost: LeaseChange | None = None
        self._known_lease_id = 0  # the last one that was held
        self._problem = ""  # the last call's, for the reason of a loss
        self._thread: threading.Thread | None = None

    @property
    def lease_id(self) -> int:
        """The lease, for other keys that shall go with it; 0 while there is none."""
        return self._state.lease_id

    @property
    def held(self) -> bool:
        """Whether the lease is certainly alive and the keys are written under it."""
        return self._state.held(self._clock.monotonic_s())

    @property
    def valid_until_s(self) -> float:
        """Monotonic time before which nobody can have seen the lease end; minus infinity while there is none."""
        return self._state.valid_until_s

    def start(self, *, thread: bool = True) -> None:
        """Grant the lease and begin to renew it. Without a thread, the caller has to call `tick`.

        Raises CoordError when the store can't be reached.
        """
        self._grant()
        self._state = replace(self._state, claimed=True)
        if thread:
            self._thread = threading.Thread(target=self._run, name="ckptrt-lease", daemon=True)
            self._thread.start()

    def register(self, key: str, value: str, *, exclusive: bool = False) -> None:
        """Write key under the lease and keep it there; a second call for a key changes its value.

        An exclusive key is only taken when it is free or was ours (same value). Raises BusyError when it isn't, and
        CoordError when the store or the lease is lost just now. A key that is new is not kept then; one that was
        registered before keeps its new value, which is written when the store is back.
        """
        with self._writing:
            before = self._entries.get(key)
            entry = self._entries[key] = _Entry(value=value, exclusive=exclusive)
            state = self._state
            try:
                if state.lease_id and state.claimed:
                    self._claim(key, entry, state.lease_id)
                elif before is None:
                    raise CoordError(f"there is no lease just now to register {key} under: {self._problem}")
            except (BusyError, CoordError):
                if before is None:
                    del self._entries[key]
                raise

    def stop(self) -> None:
        """Revoke the lease, so that others see the keys go now; close the store. Never raises CoordError."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        lease_id, self._state = self._state.lease_id, LeaseState(ttl_s=self._ttl_s)
        if lease_id:
            try:
                self._store.revoke(lease_id)
            except CoordError as error:
                _log.warning("event=revoke_failed lease=%x: it ends by itself; %s", lease_id, error.what)
        self._store.close()

    def tick(self) -> float:
        """Do what is due, tell of changes, and return the seconds until the next tick is."""
        action, wait_s = decide(self._state, self._clock.monotonic_s())
        if action is not Action.WAIT:
            wait_s = 0.0
            try:
                self._do(action)
            except (BusyError, CoordError) as error:
                self._problem = error.what
                self._state = replace(self._state, failed_at_s=self._clock.monotonic_s())
        self._tell()
        now_s = self._clock.monotonic_s()
        return min(wait_s, self._state.valid_until_s - now_s) if self._state.held(now_s) else wait_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self.tick())

    def _do(self, action: Action) -> None:
        if action is Action.GRANT:
            self._grant()
        elif action is Action.RENEW:
            self._renew()
        else:
            with self._writing:
                # A key that somebody else holds must not keep the others from being written.
                for key, entry in sorted(self._entries.items(), key=lambda item: item[1].exclusive):
                    self._claim(key, entry, self._state.lease_id)
                self._state = replace(self._state, claimed=True, failed_at_s=None)

    def _grant(self) -> None:
        sent_at_s = self._clock.monotonic_s()
        lease_id, ttl_s = self._store.grant(self._ttl_s)
        self._state = LeaseState(ttl_s=ttl_s, lease_id=lease_id, renewed_at_s=sent_at_s)

    def _renew(self) -> None:
        sent_at_s = self._clock.monotonic_s()
        ttl_s = self._store.keepalive(self._state.lease_id)
        if ttl_s <= 0:
            self._problem = f"the store has no lease {self._state.lease_id:x} any more"
            self._state = LeaseState(ttl_s=self._ttl_s)
        else:
            self._state = replace(self._state, ttl_s=ttl_s, renewed_at_s=sent_at_s, failed_at_s=None)

    def _claim(self, key: str, entry: _Entry, lease_id: int) -> None:
        if not entry.exclusive:
            self._store.put(key, entry.value, lease_id)
            return
        if self._store.create(key, entry.value, lease_id) is not None:
            return
        holder = self._store.get(key)
        revision = holder.mod_revision if holder else 0
        # Ours: from before the loss, from a write that got no answer, or about to get a new value.
        ours = holder is None or holder.value == entry.value or holder.lease_id == lease_id
        if not ours or self._store.compare_and_swap(key, entry.value, revision, lease_id) is None:
            raise BusyError(f"{key} is held by another process: {holder.value if holder else 'it came just now'}")

    def _tell(self) -> None:
        state = self._state
        held = state.held(self._clock.monotonic_s())
        if held == (self._lost is None):
            self._known_lease_id = state.lease_id if held else self._known_lease_id
            return
        if held:
            same = state.lease_id == self._known_lease_id
            reason = "the store answers again and the lease had lived on" if same else "registered under a new lease"
            change = LeaseChange(kind="back", lease_id=state.lease_id, same_lease=same, reason=reason)
            self._lost, self._known_lease_id = None, state.lease_id
        else:
            reason = self._problem or "this process did not get to renew it in time"
            change = self._lost = LeaseChange(
                kind="lost", lease_id=self._known_lease_id, same_lease=False, reason=reason
            )
        self._problem = ""
        _log.warning("event=lease_%s lease=%x: %s", change.kind, change.lease_id, change.reason)
        if self._on_change is not None:
            try:
                self._on_change(change)
            except Exception:  # noqa: BLE001 - a mistake in the callback must not end the renewals
                _log.exception("event=lease_callback_failed change=%s", change.kind)
