"""Random generators: Python, NumPy (if the program uses it), torch on the CPU and on accelerators."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["RngState"]


class RngState:
    """The process's global generators as one Stateful; always the last component to be restored.

    A rank that the saved world didn't have can't take over another rank's generators, or two ranks would draw equal
    numbers: it seeds its own from what was loaded and from its rank, so that a second resume draws the same again.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if "numpy" in state_dict:
            import numpy

            numpy.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"].cpu())

    def reseed(self, rank: int, world_size: int) -> str:
        """Seeds of this rank's own; `world_size` doesn't enter, so that growing again gives the same."""
        base = random.getrandbits(62)
        seed = (base * 1_000_003 + rank) % (1 << 63)
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        return f"rank {rank} of {world_size} seeds its generators anew"
