"""Modules: parameters and buffers by name, as `state_dict()` gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ckptrt.adapters import sharding
from ckptrt.adapters.base import Capture, Loading, SavedComponent, TensorItem, Want
from ckptrt.adapters.objects import decode, encode
from ckptrt.adapters.wants import check_tensor, landing, mismatch

__all__ = ["ModuleAdapter", "plain_name", "replicated_parameters", "unwrap"]

_Ddp = torch.nn.parallel.DistributedDataParallel
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


def unwrap(module: torch.nn.Module) -> tuple[torch.nn.Module, _Ddp | None]:
    """The user's own module inside DDP and torch.compile wrappers, and the DDP that keeps it equal on all ranks."""
    ddp: _Ddp | None = None
    while True:
        if isinstance(module, _Ddp):
            ddp = module
            module = ddp.module
        elif "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return module, ddp


def plain_name(key: str) -> str:
    """A parameter's name as if no submodule were compiled by itself."""
    return _COMPILED.sub("", key)


def replicated_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters that DDP keeps equal on all ranks."""
    inner, ddp = unwrap(module)
    if ddp is not None:
        for name, parameter in inner.named_parameters(remove_duplicate=False):
            if name not in ddp.parameters_to_ignore:
                yield parameter


class ModuleAdapter:
    """An nn.Module.

    Under DDP, parameters are equal on all ranks and stored once, spread over them; buffers differ until the next
    forward sends rank 0's to all, so rank 0's are stored. A DTensor is stored by its shards. A plain tensor in an
    unwrapped module is taken as the rank's own unless there is one rank only. Tensors that share their memory (tied
    weights) are stored once, under the first name.
    """

    def __init__(self, name: str, module: torch.nn.Module, rank: int, ranks: tuple[int, ...]) -> None:
        self.name = name
        self._module, self._ddp = unwrap(module)
        self._rank = rank
        self._ranks = ranks

    def capture(self) -> Capture:
        items: list[TensorItem] = []
        first_of: dict[tuple[Any, ...], str] = {}
        ties: dict[str, str] = {}
        extra: dict[str, Any] = {}
        buffers = {name for name, _ in self._module.named_buffers(remove_duplicate=False)}
        parameters = self._module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        for live_key, value in self._module.state_dict().items():
            key = plain_name(live_key)
            if not isinstance(value, torch.Tensor):
                extra[key] = encode(value, f"{self.name}.{key}")
                continue
            identity = _identity(value)
            if identity in first_of:
                ties[key] = first_of[identity]
                continue
            if identity is not None:
                first_of[identity] = key
            holders = self._holders(live_key, live_key in buffers)
            found = sharding.item(f"{self.name}.{key}", value, holders)
            if found is not None and (found.holders is None or self._rank in found.holders):
                items.append(replace(found, steady=True) if live_key in frozen else found)
        data = {name: part for name, part in (("ties", ties), ("extra", extra)) if part}
        return Capture(items=tuple(items), data=data or None)

    def _holders(self, key: str, is_buffer: bool) -> tuple[int, ...] | None:
        """Who holds the plain tensor `key`, or stands for all that do; None if it is each rank's own."""
        if len(self._ranks) == 1:
            return self._ranks
        if self._ddp is None or key in self._ddp.parameters_to_ignore:
            return None
        if is_buffer:
            return (0,) if self._ddp.broadcast_buffers else None
        return self._ranks

    def prepare(self, saved: SavedComponent) -> Loading:
        data = saved.data or {}
        ties: Mapping[str, str] = data.get("ties", {})
        extra: Mapping[str, Any] = data.get("extra", {})
        state = self._module.state_dict()
        live_keys = {plain_name(key): key for key in state}
        live = {plain_name(key): value for key, value in state.items()}
        tensors = {key: value for key, value in live.items() if isinstance(value, torch.Tensor)}
        self._check_keys(set(live), set(saved.tensors) | set(ties) | set(extra))
        self._check_ties(tensors, ties)
        wants: list[Want] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        problems: list[str] = []
        for key, value in tensors.items():
            stored = ties.get(key, key)
            problem = check_tensor(f"{self.name}.{key}", value, saved.tensors[stored])
            if problem:
                problems.append(problem)
                continue
            want, out = landing(f"{self.name}.{stored}", value)
            if want is not None:
                wants.append(want)
            copies.append((value, out))
        if problems:
            raise mismatch(self.name, problems)
        extras = {key: decode(extra[key]) for key in extra}
        return Loading(wants=tuple(wants), apply=lambda: self._apply(live, live_keys, copies, extras))

    def _apply(
        self,
        live: dict[str, Any],
        live_keys: Mapping[str, str],
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        extras: Mapping[str, Any],
    ) -> None:
        # state_dict() gives views of the live tensors. Where a hook gives something else, writing to it would be lost.
        owned = {id_ for tensor in _tensors_of(self._module) if (id_ := _identity(tensor)) is not None}
        aliased = all(_identity(value) in owned or not value.numel() for value, _ in copies)
        with torch.no_grad():
            if aliased and not extras:
                for value, out in copies:
                    sharding.local_of(value).copy_(out)
                return
            loaded = dict(live)
            tensors = ((key, value) for key, value in live.items() if isinstance(value, torch.Tensor))
            for (key, value), (_, out) in zip(tensors, copies, strict=True):
                loaded[key] = value.detach().clone()
                sharding.local_of(loaded[key]).copy_(out)
            loaded.update(extras)
            self._module.load_state_dict({live_keys[key]: value for key, value in loaded.items()}, strict=True)

    def _check_keys(self, live: set[str], stored: set[str]) -> None:
        problems = [f"missing   {self.name}.{key}   not in the checkpoint" for key in sorted(live - stored)]
        problems += [f"extra     {self.name}.{key}   in the checkpoint only" for key in sorted(stored - live)]
        if problems:
            raise mismatch(self.name, problems)

    def _check_ties(self, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> None:
        """Names that share memory here must have been one tensor there, or one would overwrite the other."""
        stored_of: dict[tuple[Any, ...], tuple[str, str]] = {}
        for key, value in tensors.items():
            identity = _identity(value)
            if identity is None:
                continue
            stored = ties.get(key, key)
            first, first_stored = stored_of.setdefault(identity, (key, stored))
            if first_stored != stored:
                raise mismatch(
                    self.name, [f"tied      {self.name}.{key} shares memory with {first} here, but was stored apart"]
                )


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What two names of one piece of memory have in common; None for memory that nothing can share."""
    local = sharding.local_of(tensor)
    if local.is_meta or local.layout is not torch.strided or not tensor.numel():
        return None
    # A rank may have an empty part of a tied weight: no address, but a storage all the same.
    place = local.data_ptr() if local.numel() else local.untyped_storage()._cdata
    return (place, local.dtype, tuple(tensor.shape), local.stride())
