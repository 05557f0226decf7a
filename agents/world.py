"""Which nodes make up the next set of workers, and which ranks each of them has. Pure: time is passed in.

Nodes that were in the last world keep their order, so that most ranks stay where they were; newcomers follow in the
order in which they came. What is too much for the world is kept as a spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Member", "Place", "Rules", "Wait", "World", "blamed", "choose", "placed", "strikes_at"]

_QUARANTINE_STRIKES = 3.0
_STRIKE_HALF_LIFE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How many nodes, and how many ranks they may make up.

    multiple: the number of ranks is one of its multiples (of tensor times pipeline parallelism, say). last_call_s: how
    long the first world waits for more nodes after the last one came, and a new leader for those of the last world.
    patience_s: how long it waits for the least.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    multiple: int = 1
    last_call_s: float = 2.0
    patience_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that could take part. came: a number that grows with each newcomer. leaving: it has asked to go.

    strikes: for how many failures it was the cause, each halved every half hour; as of struck_at_s.
    """

    node: str
    slots: int
    came: int
    came_at_s: float = 0.0
    leaving: bool = False
    strikes: float = 0.0
    struck_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's ranks: as many as it has slots, from first_rank on."""

    node: str
    first_rank: int
    num_local: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        return sum(place.num_local for place in self.places)

    def node_of(self, rank: int) -> str:
        return next(place.node for place in self.places if rank in place.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """No world yet. until_s: when to ask again at the latest. over: the patience is at its end."""

    why: str
    until_s: float
    over: bool = False


def strikes_at(member: Member, now_s: float) -> float:
    """What is left of its strikes."""
    return member.strikes * math.pow(0.5, max(0.0, now_s - member.struck_at_s) / _STRIKE_HALF_LIFE_S)


def blamed(member: Member, now_s: float) -> Member:
    """The member after one more failure that it was the cause of."""
    return replace(member, strikes=strikes_at(member, now_s) + 1.0, struck_at_s=now_s)


def choose(
    rules: Rules, members: Sequence[Member], last: World | None, since_s: float, now_s: float, *, awaited: int = 0
) -> World | Wait:
    """The next world. since_s: since when it is being looked for. awaited: nodes that are about to come back."""
    usable = _usable(rules, members, last, now_s)
    world = _largest(rules, usable[: rules.max_nodes])
    if world is None:
        until_s = since_s + rules.patience_s
        return Wait(why=_lacking(rules, usable), until_s=until_s, over=now_s >= until_s)
    full = len(world.places) == rules.max_nodes
    if last is None and not full:
        called_at_s = max(member.came_at_s for member in usable) + rules.last_call_s
        if now_s < called_at_s:
            return Wait(why=f"{len(usable)} nodes are here, up to {rules.max_nodes} may be", until_s=called_at_s)
    if awaited and not full and now_s < since_s + rules.last_call_s:
        return Wait(why=f"{awaited} more nodes are about to come back", until_s=since_s + rules.last_call_s)
    return world


def _usable(rules: Rules, members: Sequence[Member], last: World | None, now_s: float) -> list[Member]:
    """Those that may take part, in order of rank; one that keeps failing only if there are too few without it."""
    places = {place.node: number for number, place in enumerate(last.places if last else ())}
    staying = [member for member in members if not member.leaving and member.slots > 0]
    in_order = sorted(staying, key=lambda member: (places.get(member.node, len(places)), member.came))
    sound = [member for member in in_order if strikes_at(member, now_s) < _QUARANTINE_STRIKES]
    if len(sound) >= rules.min_nodes:
        return sound
    spare = sorted((m for m in in_order if m not in sound), key=lambda member: strikes_at(member, now_s))
    return sound + spare[: rules.min_nodes - len(sound)]


def _largest(rules: Rules, members: Sequence[Member]) -> World | None:
    """The world of as many of these as the rules allow."""
    for count in range(len(members), rules.min_nodes - 1, -1):
        taken = members[:count]
        if sum(member.slots for member in taken) % rules.multiple == 0:
            return placed([(member.node, member.slots) for member in taken])
    return None


def placed(nodes: Sequence[tuple[str, int]]) -> World:
    """The world of these nodes, in order, with so many ranks each."""
    places: list[Place] = []
    first = 0
    for node, num_local in nodes:
        places.append(Place(node=node, first_rank=first, num_local=num_local))
        first += num_local
    return World(places=tuple(places))


def _lacking(rules: Rules, usable: Sequence[Member]) -> str:
    if len(usable) < rules.min_nodes:
        return f"{len(usable)} of at least {rules.min_nodes} nodes are here"
    ranks = sum(member.slots for member in usable[: rules.max_nodes])
    return f"the {ranks} ranks of the nodes that are here can't make up a multiple of {rules.multiple}"
