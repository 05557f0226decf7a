"""Anything with state_dict/load_state_dict, and plain dicts: a tree of tensors and plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from ckptrt.adapters import sharding
from ckptrt.adapters.base import Capture, Loading, SavedComponent, TensorItem, Want
from ckptrt.adapters.objects import decode, encode
from ckptrt.adapters.wants import check_tensor, landing, mismatch

__all__ = ["Stateful", "TreeAdapter"]


@runtime_checkable
class Stateful(Protocol):
    """What torch.distributed.checkpoint.stateful calls so too."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@runtime_checkable
class Reseeding(Protocol):
    """State that a rank beyond the old world can't take over from another rank, such as random generators."""

    def reseed(self, rank: int, world_size: int) -> str:
        """Set a state of its own, a function of what was just loaded and of the rank; says so in one sentence."""
        ...


class TreeAdapter:
    """A dict, or an object with state_dict/load_state_dict.

    Plain tensors and data are the rank's own (several ranks may hold different ones); DTensors are global. On a
    changed world a rank takes what rank `rank % old world` had. A dict is updated in place and stays the same object.
    """

    def __init__(self, name: str, source: Stateful | dict[str, Any], rank: int, ranks: tuple[int, ...]) -> None:
        self.name = name
        self._source = source
        self._rank = rank
        self._ranks = ranks

    def check(self) -> None:
        """Refuse plain data that can't be stored before the training starts; asks nothing of the user's own objects."""
        if isinstance(self._source, dict):
            self.capture()

    def capture(self) -> Capture:
        items: dict[str, TensorItem] = {}
        seen: dict[int, str] = {}
        replicas = self._ranks if len(self._ranks) == 1 else None

        def take(path: str, tensor: torch.Tensor) -> Any:
            if id(tensor) in seen:
                return {"$ref": seen[id(tensor)]}
            key = path
            while key in items:  # a key with a dot in it may look like a nested one
                key += "~"
            seen[id(tensor)] = key
            found = sharding.item(key, tensor, replicas)
            if found is not None:
                items[key] = found
            return {"$ref": key}

        tree = self._state()
        data = encode(tree, self.name, take)
        return Capture(items=tuple(items.values()), data=data)

    def prepare(self, saved: SavedComponent) -> Loading:
        live = _tensors_by_path(self._state(), self.name)
        wants: list[Want] = []
        outs: dict[str, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        problems: list[str] = []

        def give(key: str) -> torch.Tensor:
            if key in outs:
                return outs[key]
            stored = saved.tensors[key.removeprefix(f"{self.name}.")]
            target = live.get(key)
            if isinstance(target, DTensor):
                problem = check_tensor(key, target, stored)
                if problem:
                    problems.append(problem)
                    return target
                target = sharding.like(target.detach(), stored.dtype)
            elif target is None or check_tensor(key, target, stored):
                # What isn't there yet, or has grown since, is made anew: load_state_dict decides what fits.
                target = torch.empty(stored.shape, dtype=stored.dtype)
            want, out = landing(key, target)
            wants.extend([want] if want is not None else [])
            if isinstance(target, DTensor):
                copies.append((target, out))
                out = target
            outs[key] = out
            return out

        tree = decode(saved.data, give)
        if problems:
            raise mismatch(self.name, problems)
        beyond = self._rank >= saved.world_size and isinstance(self._source, Reseeding)
        notes = (f"{self.name}: rank {self._rank} is new and got a state of its own",) if beyond else ()
        return Loading(wants=tuple(wants), apply=lambda: self._apply(tree, live, copies, beyond), notes=notes)

    def _apply(
        self,
        tree: Any,
        live: Mapping[str, torch.Tensor],
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        beyond: bool,
    ) -> None:
        with torch.no_grad():
            for target, out in copies:
                sharding.local_of(target).copy_(out)
        if not isinstance(self._source, dict):
            self._source.load_state_dict(tree)
            if beyond and isinstance(self._source, Reseeding):
                self._source.reseed(self._rank, len(self._ranks))
            return
        with torch.no_grad():
            _merge(self._source, tree)

    def _state(self) -> Any:
        return self._source if isinstance(self._source, dict) else self._source.state_dict()


def _merge(old: Any, new: Any) -> Any:
    """`new`, in the objects of `old` as far as they are of its kind: whoever holds one of them sees what was loaded."""
    if _same_kind(old, new):
        if old is not new:
            sharding.local_of(old).copy_(sharding.local_of(new))
        return old
    if type(old) is not type(new):
        return new
    if isinstance(new, dict):
        merged = {key: _merge(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(merged)
        return old
    if isinstance(new, list):
        old[:] = [_merge(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
        return old
    return new


def _same_kind(old: Any, new: Any) -> TypeGuard[torch.Tensor]:
    """Whether `old` is a tensor that can take over the values of `new`."""
    return (
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and isinstance(old, DTensor) == isinstance(new, DTensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and sharding.is_writable(old)
    )


def _tensors_by_path(tree: Any, path: str) -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    if isinstance(tree, dict):
        pairs = [(f"{path}.{key}", value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        pairs = [(f"{path}.{index}", value) for index, value in enumerate(tree)]
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, value in pairs:
        found.update(_tensors_by_path(value, name))
    return found
