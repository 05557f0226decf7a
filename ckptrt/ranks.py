"""How the ranks agree while they start or restore: through the job's own key-value store, never by a collective.

Only the foreground uses this (ckptrt.init and restore); a rank that dies here is the supervisor's business.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from ckptrt.errors import Error, UsageError, from_data

__all__ = ["LoneRank", "RankGroup", "StoreRanks", "find_ranks"]

_TIMEOUT_S = 1800.0
_groups = itertools.count()


class RankGroup(Protocol):
    """All ranks of the job; every rank must make the same calls in the same order."""

    rank: int
    world_size: int

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make` (JSON-able) returns on rank 0, on every rank. An Error that it raises is raised on every rank."""
        ...

    def errors(self, mine: Error | None) -> list[tuple[int, Error]]:
        """(rank, error) of every rank that has one, the same list on every rank."""
        ...


class LoneRank:
    """A job of one rank."""

    rank = 0
    world_size = 1

    def share(self, make: Callable[[], Any]) -> Any:
        return make()

    def errors(self, mine: Error | None) -> list[tuple[int, Error]]:
        return [(0, mine)] if mine is not None else []


class StoreRanks:
    """Ranks that meet in a torch.distributed store, under keys that start with `name`, which no other group has."""

    def __init__(self, store: Any, rank: int, world_size: int, name: str = "ckptrt") -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._name = name
        self._turn = 0
        self._timeout = timedelta(seconds=_TIMEOUT_S)

    def share(self, make: Callable[[], Any]) -> Any:
        key = self._next_key()
        if self.rank == 0:
            try:
                answer = {"value": make()}
            except Exception as error:
                told = error if isinstance(error, Error) else Error(f"rank 0 failed with {error!r}")
                self._store.set(key, json.dumps({"error": told.data()}))
                raise
            self._store.set(key, json.dumps(answer))
            return answer["value"]
        answer = self._read(key)
        if "error" in answer:
            raise from_data(answer["error"])
        return answer["value"]

    def errors(self, mine: Error | None) -> list[tuple[int, Error]]:
        # Rank 0 reads everybody's word once and publishes the sum: two messages a rank, not one for each pair.
        key = self._next_key()
        if self.rank != 0:
            self._store.set(f"{key}/{self.rank}", json.dumps(mine.data() if mine else None))
            found = self._read(key)
        else:
            found = [[0, mine.data()]] if mine else []
            for rank in range(1, self.world_size):
                word = self._read(f"{key}/{rank}")
                found += [[rank, word]] if word else []
            self._store.set(key, json.dumps(found))
        return [(rank, from_data(word)) for rank, word in found]

    def _next_key(self) -> str:
        self._turn += 1
        return f"{self._name}/{self._turn}"

    def _read(self, key: str) -> Any:
        self._store.wait([key], self._timeout)
        return json.loads(self._store.get(key))


def find_ranks(rank: int, world_size: int) -> RankGroup:
    """The group of this process: of torch.distributed if it is initialised, else alone.

    rank, world_size: what the environment says, to notice a job that has not made its process group yet.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return LoneRank()
        store = dist.distributed_c10d._get_default_store()
        # A program may make one runtime after another, always on all ranks: the later one must not read old words.
        return StoreRanks(store, dist.get_rank(), dist.get_world_size(), f"ckptrt/{next(_groups)}")
    if world_size > 1:
        raise UsageError(
            f"this is rank {rank} of {world_size}, but torch.distributed has no process group yet",
            hint="call torch.distributed.init_process_group() before ckptrt.init()",
        )
    return LoneRank()
