"""What whoever leads a job of many nodes notes in etcd, for the next one to go on from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ckptrt.agents.restart import Budget, Phase, State
from ckptrt.agents.world import World, placed

__all__ = ["JobNote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNote:
    """id: of this job, not of the run: the same command later is another job. ended: its exit code, once it has one.

    nodes: of the present world, in order, with their numbers of ranks. started: a set of workers was started.
    handed_over: the last leader went because it was asked to, at a saved step. The others are those of `restart.State`.
    """

    id: str
    url: str = ""
    local_dir: str = ""
    nodes: tuple[tuple[str, int], ...] = ()
    ended: int | None = None
    started: bool = False
    handed_over: bool = False
    restarts: int = 0
    no_progress: int = 0
    has_run: bool = False
    committed_step: int = -1
    progressed: bool = False
    stepped: bool = False
    last_error: str = ""

    @staticmethod
    def read(noted: Mapping[str, Any] | None) -> JobNote | None:
        """The note in what etcd has; None if that is none."""
        known = {field.name for field in fields(JobNote)}
        if not noted or not isinstance(noted.get("id"), str):
            return None
        facts = {name: value for name, value in noted.items() if name in known}
        nodes = tuple((str(node), int(slots)) for node, slots in facts.get("nodes", ()))
        return JobNote(**{**facts, "nodes": nodes})

    def world(self) -> World | None:
        """The last world, as far as it was noted."""
        return placed(self.nodes) if self.nodes else None

    def after(self, state: State) -> JobNote:
        """The note as it is now."""
        return replace(
            self,
            restarts=state.restarts,
            no_progress=state.no_progress,
            has_run=state.has_run,
            committed_step=state.committed_step,
            progressed=state.progressed,
            stepped=state.stepped,
            last_error=state.last_error,
        )

    def state(self, budget: Budget) -> State:
        """Where the next leader begins: with the judgement of a set of workers that is lost, if there was one."""
        return State(
            budget=budget,
            num_workers=0,
            phase=Phase.JUDGING if self.started and not self.handed_over else Phase.NEW,
            restarts=self.restarts,
            no_progress=self.no_progress,
            has_run=self.has_run,
            committed_step=self.committed_step,
            progressed=self.progressed,
            stepped=self.stepped,
            last_error=self.last_error,
        )
