"""What the adapters share when they plan a restore: checks of one tensor, and where its bytes land."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckptrt.adapters import sharding
from ckptrt.adapters.base import SavedTensor, Want
from ckptrt.errors import MismatchError

__all__ = ["check_tensor", "landing", "mismatch"]

_SHOWN_MAX = 12


def check_tensor(key: str, live: torch.Tensor, saved: SavedTensor) -> str:
    """A sentence that says how a stored tensor doesn't fit a live one, or ''. Nothing is cast or reshaped unasked."""
    if tuple(live.shape) != saved.shape:
        return f"shape     {key}   saved {saved.shape}, here {tuple(live.shape)}"
    if live.dtype != saved.dtype:
        return f"dtype     {key}   saved {saved.dtype}, here {live.dtype}"
    if not sharding.is_writable(live):
        return f"shared    {key}   has elements that share memory here (an expanded tensor): give it memory of its own"
    if live.is_meta:
        return f"meta      {key}   is on the meta device here: materialise it with to_empty() first"
    return ""


def landing(key: str, live: torch.Tensor) -> tuple[Want | None, torch.Tensor]:
    """Host memory for this rank's part of a tensor, and what must be read into it (None: this rank has no part)."""
    local = sharding.local_of(live)
    out = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    item = sharding.item(key, live, ())
    want = Want(key=key, region=item.region, out=out) if item is not None else None
    return want, out


def mismatch(component: str, problems: Sequence[str]) -> MismatchError:
    """One error that lists everything that doesn't fit."""
    shown = [f"  {problem}" for problem in problems[:_SHOWN_MAX]]
    if len(problems) > _SHOWN_MAX:
        shown.append(f"  and {len(problems) - _SHOWN_MAX} more")
    what = f"the checkpoint doesn't fit {component!r}: {len(problems)} difference(s)\n" + "\n".join(shown)
    return MismatchError(
        what,
        safe="nothing was loaded; the checkpoint and the live state are as they were",
        hint="build the same model and optimizer as the saved one, or start in another directory",
    )
