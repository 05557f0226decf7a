"""The nodes that a supervisor has: which of them make up the present world, and orders to all of these at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckptrt.agents import world
from ckptrt.agents.job import Order
from ckptrt.agents.node import Account, NodeControl
from ckptrt.agents.world import Member, Place, Rules, Wait, World
from ckptrt.clock import Clock, SystemClock
from ckptrt.wire import Message

__all__ = ["Fleet"]


@dataclass(slots=True)
class _Seat:
    member: Member
    control: NodeControl


class Fleet:
    """Nodes by their ids. A world stands until the next one is chosen, also when nodes of it are gone."""

    def __init__(self, rules: Rules, last: World | None = None, clock: Clock | None = None) -> None:
        self.world = last
        # Whoever led the last world is lost; the others are looking for us just now.
        self._awaited = {place.node for place in last.places} if last else set[str]()
        self._rules = rules
        self._clock = clock or SystemClock()
        self._seats: dict[str, _Seat] = {}
        self._came = 0
        self._since_s: float | None = None  # since when a world is being looked for
        self._struck: dict[str, Member] = {}  # what is held against nodes, also while they are away

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, node: object) -> bool:
        return node in self._seats

    def add(self, node: str, slots: int, control: NodeControl) -> None:
        """A node is there and has nothing to do yet."""
        self._came += 1
        member = Member(node=node, slots=slots, came=self._came, came_at_s=self._clock.monotonic_s())
        known = self._struck.get(_host(node))
        if known is not None:
            member = replace(member, strikes=known.strikes, struck_at_s=known.struck_at_s)
        self._seats[node] = _Seat(member, control)
        self._awaited.discard(node)

    def remove(self, node: str) -> range:
        """A node is gone; the ranks that it has in the present world."""
        self._seats.pop(node, None)
        return next((place.ranks for place, _ in self._places() if place.node == node), range(0))

    def blame(self, rank: int) -> str:
        """The node of this rank was the cause of a failure; returns its id."""
        assert self.world is not None
        node = self.world.node_of(rank)
        now_s = self._clock.monotonic_s()
        seat = self._seats.get(node)
        before = seat.member if seat else self._struck.get(_host(node), Member(node=node, slots=0, came=0))
        self._struck[_host(node)] = world.blamed(before, now_s)
        if seat is not None:
            seat.member = self._struck[_host(node)]
        return node

    def leave(self, node: str) -> bool:
        """A node wants to go; whether there would be a world without it."""
        if node in self._seats:
            self._seats[node].member = replace(self._seats[node].member, leaving=True)
        return isinstance(self._choose(self.world), World)

    def left(self) -> list[str]:
        """Those that want to go and have no part in the present world, or none any more."""
        return [node for node, seat in self._seats.items() if seat.member.leaving]

    def choose(self) -> World | Wait:
        """Choose the next world, or say how long to wait for more nodes."""
        if self._since_s is None:
            self._since_s = self._clock.monotonic_s()
        chosen = self._choose(self.world)
        if isinstance(chosen, World):
            self.world, self._since_s = chosen, None
            self._awaited.clear()
        return chosen

    def can_grow(self) -> bool:
        """Whether the nodes that are here now would make up a larger world."""
        if self.world is None:
            return False
        chosen = self._choose(self.world)
        return isinstance(chosen, World) and chosen.size > self.world.size

    def _choose(self, last: World | None) -> World | Wait:
        members = [seat.member for seat in self._seats.values()]
        now_s = self._clock.monotonic_s()
        since_s = now_s if self._since_s is None else self._since_s
        awaited = max(0, len(self._awaited) - 1)  # all but the one that led
        return world.choose(self._rules, members, last, since_s, now_s, awaited=awaited)

    # --- orders to the nodes of the world

    def start(self, make_order: Callable[[Place, int], Order]) -> None:
        """make_order(place, number of the node in this world)."""
        for number, (place, control) in enumerate(list(self._places())):
            if control is not None:
                control.start(make_order(place, number))

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        for control in self._controls():
            control.stop(grace_s, signum)

    def drain(self, message: Message) -> None:
        for control in self._controls():
            control.drain(message)

    def look(self, but: int) -> int:
        """Have all nodes look at their workers but the one of this rank; how many do."""
        others = [control for place, control in self._places() if control is not None and but not in place.ranks]
        for control in others:
            control.look()
        return len(others)

    def account(self, rank: int) -> Account:
        control = next((control for place, control in self._places() if rank in place.ranks), None)
        return Account() if control is None else control.account(rank)

    def _controls(self) -> list[NodeControl]:
        return [control for _, control in self._places() if control is not None]

    def _places(self) -> Iterator[tuple[Place, NodeControl | None]]:
        for place in self.world.places if self.world else ():
            seat = self._seats.get(place.node)
            yield place, seat.control if seat else None


def _host(node: str) -> str:
    """What is held against a node is held against the machine, whichever process is its agent."""
    return node.partition("/")[0]
