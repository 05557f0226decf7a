"""The seam between ckptrt and any kind of state.

An adapter says what its component holds now (`capture`), and what it needs in order to become what was saved
(`prepare`). Preparing touches no live tensor: it allocates host tensors to be filled, and `apply` moves them in
once every rank has verified everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from ckptrt.regions import Region

__all__ = ["Adapter", "Capture", "Loading", "SavedComponent", "SavedTensor", "TensorItem", "Want"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorItem:
    """One local tensor: region `region` of a tensor of global `shape`.

    key: unique in the checkpoint. tensor: the live local data, the user's own; read until the snapshot is staged.
    holders: sorted ranks that hold this very region (this rank among them); None means that the tensor is this
    rank's alone and isn't a part of something global. steady: it isn't expected to change (a frozen parameter).
    """

    key: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    holders: tuple[int, ...] | None
    steady: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What a component holds: tensors, and plain data as a JSON-able tree (or None)."""

    items: tuple[TensorItem, ...]
    data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """What the manifest says of a tensor: the same on all ranks unless rank_only."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rank_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedComponent:
    """What a checkpoint holds of one component, as seen by this rank.

    tensors: by key without the component's name. data: this rank's plain data; on a changed world that of rank
    `source_rank`, which is rank modulo the old world size.
    """

    tensors: Mapping[str, SavedTensor]
    data: Any
    world_size: int
    source_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A region of a stored tensor that must be read into `out`, a contiguous host tensor of the region's sizes."""

    key: str
    region: Region
    out: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A restore that is planned and not yet done. `notes` are sentences for the user; `apply` can't fail halfway."""

    wants: tuple[Want, ...]
    apply: Callable[[], None]
    notes: tuple[str, ...] = field(default=())


@runtime_checkable
class Adapter(Protocol):
    """One component of the state. `name` is its key in ckptrt.init(); tensor keys start with `name` and a dot."""

    name: str

    def capture(self) -> Capture:
        """What the component holds now, copying no tensor. UsageError, by name, for anything that can't be stored."""
        ...

    def prepare(self, saved: SavedComponent) -> Loading:
        """Plan to become what was saved; touches no live tensor. MismatchError, by every key, if it doesn't fit."""
        ...
