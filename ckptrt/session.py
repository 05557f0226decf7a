"""How a process joins a run: the run's records, the incarnation that it belongs to, and where to go on from.

Under `ckptrt-launch` the agent has raised the incarnation and written the fence before the workers ran. Alone or
under torchrun, rank 0 does it: it holds the run, picks the next incarnation, and writes the fence once it is known
which step was restored.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import xxhash

from ckptrt.agentlink import AgentLink
from ckptrt.env import STACKS_SIGNAL, WorkerEnv
from ckptrt.errors import BusyError, Error, ExistsError, NotFoundError, UsageError
from ckptrt.ranks import RankGroup
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.layout import CommitId, fence_name
from ckptrt.storage.owner import this_owner
from ckptrt.storage.records import Parent
from ckptrt.storage.tiered import RunPlace, hold_place, open_place, view_place

__all__ = ["Candidate", "Session", "join_run"]

_CALM_TRIES = 3  # so often is a moment waited for in which nothing was committed since the choice
_opened: set[tuple[str, int]] = set()  # by this process: an incarnation is one training, and resumes once
_RESUME = re.compile(r"(\d+)\.(\d+)\.(memory|stored)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that could be restored, and from where.

    tier: memory, stored (at the run's url), or local: in its local_dir, and what is damaged there, from the url.
    """

    step: int
    incarnation: int
    tier: str

    @property
    def commit(self) -> CommitId:
        return CommitId(self.step, self.incarnation)

    def data(self) -> list[Any]:
        return [self.step, self.incarnation, self.tier]

    @staticmethod
    def from_data(data: list[Any]) -> Candidate:
        return Candidate(step=data[0], incarnation=data[1], tier=data[2])


@dataclass(slots=True)
class Session:
    """This process's membership in one incarnation of a run."""

    place: RunPlace
    ranks: RankGroup
    catalog: Catalog
    agent: AgentLink | None
    incarnation: int
    resume: str | None  # what the agent decided; None without an agent
    hold: ExitStack | None = None
    nonce: str = ""
    fenced_first: int | None = None  # the first fence of this process's own, if it had to choose again
    tries: int = 0  # on rank 0: how often a fence was about to be written
    known: frozenset[CommitId] = frozenset()  # on rank 0: the commits when the candidates were listed

    @property
    def url(self) -> str:
        return self.place.url

    def candidates(self) -> list[Candidate]:
        """What may be restored, best first, the same list on every rank."""
        return [Candidate.from_data(data) for data in self.ranks.share(lambda: [c.data() for c in self._candidates()])]

    def _candidates(self) -> list[Candidate]:
        found: list[Candidate] = []
        limit: CommitId | None = None
        holders = self._holders()
        self.known = frozenset().union(*holders.values())
        if self.resume == "fresh":
            return found
        if self.resume is not None:
            match = _RESUME.fullmatch(self.resume)
            if match is None:
                raise UsageError(f"the agent's word on where to resume from is not understood: {self.resume!r}")
            limit = CommitId(int(match[1]), int(match[2]))
            if match[3] == "memory":
                found.append(Candidate(step=limit.step, incarnation=limit.incarnation, tier="memory"))
        found += [
            Candidate(step=commit.step, incarnation=commit.incarnation, tier=tier)
            # By name alone: a record that is damaged or of a newer format is met, and told of, when it is its turn.
            for commit in self.catalog.path(self.fenced_first).commits
            if commit.incarnation < self.incarnation and (limit is None or commit.step <= limit.step)
            for tier, there in holders.items()
            if commit in there
        ]
        if not found:
            self.catalog.check_fresh(self.fenced_first or self.incarnation)
        return found

    def _holders(self) -> dict[str, set[CommitId]]:
        """The commits that each tier has, nearest first."""
        names = ("local", "stored") if self.place.local_dir else ("stored",)
        return {name: set(at.commit_ids()) for name, at in zip(names, self.catalog.places(), strict=True)}

    def fence(self, parent: Candidate | None) -> bool:
        """Make sure that this incarnation's fence is there; data may be written afterwards.

        parent: what was restored. False if the last job's persister has committed something since the candidates were
        listed: what to go on from must be chosen again, and that job may have pruned the parent. From the fence on it
        can do neither. BusyError if another job has fenced the run meanwhile.
        """
        self.incarnation, self.nonce, settled = self.ranks.share(lambda: self._fence(parent))
        if settled and self.place.local_dir:
            self._check_local_dir()
        return bool(settled)

    def _fence(self, parent: Candidate | None) -> list[Any]:
        if self.agent is None:
            # A job that goes on committing has to be fenced in the midst of it: only then will it stop.
            self.tries += 1
            if self.tries <= _CALM_TRIES and not self.known.issuperset(self.catalog.commit_ids()):
                return [self.incarnation, "", False]
            self.fenced_first = self.fenced_first or self.incarnation
            origin = Parent(step=parent.step, incarnation=parent.incarnation) if parent else None
            try:
                self.catalog.write_fence(self.incarnation, origin, self.ranks.world_size, this_owner())
            except ExistsError as error:
                raise BusyError(
                    f"run {self.url}: another job has just started incarnation {self.incarnation} ({error.what})",
                    safe="nothing was written by this job",
                    hint="let one of the two go on",
                ) from None
        nonce = self._nonce(self.catalog.tier.read(fence_name(self.incarnation)))
        if self.agent is None and not self.known.issuperset(self.catalog.commit_ids()):
            return [self.catalog.next_incarnation(), "", False]
        return [self.incarnation, nonce, True]

    def _check_local_dir(self) -> None:
        """All ranks must write to one place: what each of several nodes has for itself alone can't be committed."""
        near = self.catalog.places()[0].tier
        mine: Error | None = None
        try:
            if self._nonce(near.read(fence_name(self.incarnation))) != self.nonce:
                raise NotFoundError(f"{near.url} holds another run")
        except Error as error:
            mine = UsageError(
                f"rank {self.ranks.rank}: {near.url} isn't where rank 0 has opened the run: {error.what}",
                safe="nothing was written",
                hint="local_dir must be one directory for all ranks: with several nodes, one that they share, or none",
            )
        for _, first in self.ranks.errors(mine):
            raise first

    @staticmethod
    def _nonce(fence: bytes) -> str:
        """All ranks of an incarnation put their files into one folder a step; its name must be no other attempt's."""
        return xxhash.xxh3_64_hexdigest(fence)[:8]

    def close(self) -> None:
        if self.hold is not None:
            self.hold.close()


def join_run(env: WorkerEnv, ranks: RankGroup, place: RunPlace) -> Session:
    """Open the run, made if it isn't there. Raises BusyError if another live job holds it."""
    if env.agent_socket:
        return _join_launched(env, env.agent_socket, ranks, place)
    holds: list[ExitStack] = []

    def open_as_first() -> int:
        holds.append(hold_place(place))
        try:
            return open_place(place).next_incarnation()
        except Error:
            holds.pop().close()
            raise

    incarnation = ranks.share(open_as_first)
    return Session(
        place=place,
        ranks=ranks,
        catalog=view_place(place),
        agent=None,
        incarnation=incarnation,
        resume=None,
        hold=holds[0] if holds else None,
    )


def _join_launched(env: WorkerEnv, agent_socket: str, ranks: RankGroup, place: RunPlace) -> Session:
    # A scheduler's notice may go to every process of the job; the agent has had it too, and decides.
    with contextlib.suppress(ValueError):  # not the main thread: then that has to mind its signals
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, signal.SIG_IGN)
    agent = AgentLink(agent_socket, ranks.rank, env.incarnation or 0)
    if agent.stacks:
        with contextlib.suppress(OSError):  # no stacks then, and nothing else is lost
            # Open for good: the handler writes to it whatever this process is stuck in.
            file = os.open(agent.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
    agent.phase("group")
    incarnation, resume = agent.open_run(place.data(), ranks.world_size)
    if (place.url, incarnation) in _opened:
        raise UsageError(
            f"run {place.url} is opened a second time by one worker of ckptrt-launch",
            safe="all that was committed",
            hint="call ckptrt.init() once in a process; start another launch for another training on the same run",
        )
    _opened.add((place.url, incarnation))
    return Session(
        place=place,
        ranks=ranks,
        catalog=view_place(place),
        agent=agent,
        incarnation=incarnation,
        resume=resume,
    )
