"""A rank's side of a drain: the agent proposes a last step, the rank takes it or is beyond, and asks when there."""

from __future__ import annotations

from ckptrt.agentlink import AgentLink

__all__ = ["DrainWatch"]


class DrainWatch:
    """Follows the agent's proposals from step to step. Costs a look at a socket at each."""

    def __init__(self, agent: AgentLink) -> None:
        self._agent = agent
        self._target: int | None = None

    def is_over(self, step: int) -> bool:
        """Whether this rank, having done `step` steps, is to save and end: all ranks are, at this very step."""
        proposed = self._agent.proposal()
        if proposed is not None:
            taken = step <= proposed
            self._target = proposed if taken else None
            self._agent.reply_to_drain(step, proposed, taken)
        if self._target != step:
            return False
        self._target = None
        return self._agent.may_end(step)
