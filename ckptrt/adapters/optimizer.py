"""Optimizers: state by the names of parameters, groups by the names that they hold.

Positions in `param_groups` change with the code; names don't. State that an optimizer has not built yet is built
here from what was stored, without a dummy step (which would count as one).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptrt.adapters import sharding
from ckptrt.adapters.base import Capture, Loading, SavedComponent, SavedTensor, TensorItem, Want
from ckptrt.adapters.module import plain_name, unwrap
from ckptrt.adapters.objects import decode, encode
from ckptrt.adapters.wants import check_tensor, landing, mismatch
from ckptrt.errors import UsageError

__all__ = ["OptimizerAdapter", "parameter_names"]

_TENSOR = {"$here": "tensor"}  # in a parameter's plain data: this entry is a stored tensor


def parameter_names(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """id of a parameter -> its name; with several modules, the component's name stands before it."""
    names: dict[int, str] = {}
    for component, module in modules.items():
        inner, _ = unwrap(module)
        for key, parameter in inner.named_parameters():
            name = plain_name(key)
            names.setdefault(id(parameter), name if len(modules) == 1 else f"{component}.{name}")
    return names


class OptimizerAdapter:
    """A torch.optim.Optimizer.

    replicated: ids of the parameters that DDP keeps equal on all ranks; their state is stored once.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        replicated: frozenset[int],
        ranks: tuple[int, ...],
    ) -> None:
        self.name = name
        self._optimizer = optimizer
        self._names = names
        self._replicated = replicated
        self._ranks = ranks

    @property
    def _kind(self) -> str:
        return type(self._optimizer).__qualname__

    def capture(self) -> Capture:
        items: list[TensorItem] = []
        plain: dict[str, Any] = {}
        named = self._named()
        for name, parameter in named.items():
            state = self._optimizer.state.get(parameter)
            if not state:
                continue
            plain[name] = {
                entry: self._capture_entry(name, parameter, entry, value, items) for entry, value in state.items()
            }
        for name, parameter in named.items():
            if name.startswith("#"):  # in no module of the state: nobody else stores its value
                own = sharding.item(f"{self.name}.value.{name}", parameter, self._replicas(parameter, parameter))
                items += [own] if own is not None else []
        groups = [
            {
                "names": [self._name_of(p, g, i) for i, p in enumerate(group["params"])],
                "options": {
                    k: encode(v, f"{self.name}.param_groups.{g}.{k}") for k, v in group.items() if k not in _NAMED
                },
            }
            for g, group in enumerate(self._optimizer.param_groups)
        ]
        data = {"kind": self._kind, "groups": groups, "state": plain, "other": self._capture_other(named)}
        return Capture(items=tuple(items), data=data)

    def prepare(self, saved: SavedComponent) -> Loading:
        if saved.data["kind"] != self._kind:
            # Many share names of options and state: one would go on with numbers that mean something else to it.
            raise mismatch(self.name, [f"kind      {self.name}   saved {saved.data['kind']}, here {self._kind}"])
        named = self._named()
        stored_state: Mapping[str, Mapping[str, Any]] = saved.data["state"]
        options = self._match_groups(saved.data["groups"], set(named))
        other = {key: decode(value) for key, value in saved.data["other"].items()}
        wants: list[Want] = []
        problems: list[str] = []
        new_state: dict[torch.Tensor, dict[str, Any]] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in named.items():
            key = f"value.{name}"
            if key in saved.tensors:
                problem = check_tensor(f"{self.name}.{key}", parameter, saved.tensors[key])
                problems += [problem] if problem else []
                want, out = landing(f"{self.name}.{key}", parameter)
                wants += [want] if want is not None and not problem else []
                copies.append((parameter, out))
        for name, entries in stored_state.items():
            parameter = named[name]
            new_state[parameter] = {}
            for entry, value in entries.items():
                if value != _TENSOR:
                    new_state[parameter][entry] = decode(value)
                    continue
                key = f"state.{name}.{entry}"
                target = self._target(parameter, entry, saved.tensors[key])
                problem = check_tensor(f"{self.name}.{key}", target, saved.tensors[key])
                if problem:
                    problems.append(problem)
                    continue
                want, out = landing(f"{self.name}.{key}", target)
                wants += [want] if want is not None else []
                copies.append((target, out))
                new_state[parameter][entry] = target
        if problems:
            raise mismatch(self.name, problems)
        return Loading(wants=tuple(wants), apply=lambda: self._apply({**new_state, **other}, options, copies))

    def _apply(
        self,
        new_state: dict[Any, Any],
        options: list[dict[str, Any]],
        copies: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        with torch.no_grad():
            for target, out in copies:
                sharding.local_of(target).copy_(out)
            for group, values in zip(self._optimizer.param_groups, options, strict=True):
                for key, value in values.items():
                    if isinstance(value, torch.Tensor) and key in group:
                        group[key].copy_(value)  # schedulers and compiled steps hold this very tensor
                    else:
                        group[key] = value
        self._optimizer.state.clear()
        self._optimizer.state.update(new_state)

    def _named(self) -> dict[str, torch.Tensor]:
        return {
            self._name_of(parameter, g, i): parameter
            for g, group in enumerate(self._optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        }

    def _name_of(self, parameter: torch.Tensor, group: int, index: int) -> str:
        return self._names.get(id(parameter), f"#{group}.{index}")

    def _capture_entry(
        self, name: str, parameter: torch.Tensor, entry: str, value: Any, items: list[TensorItem]
    ) -> Any:
        if not isinstance(value, torch.Tensor):
            return encode(value, f"{self.name}.state.{name}.{entry}")
        found = sharding.item(f"{self.name}.state.{name}.{entry}", value, self._replicas(parameter, value))
        if found is not None:
            items.append(found)
        return dict(_TENSOR)

    def _capture_other(self, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """State that some optimizers keep beside that of their parameters, under names of their own."""
        known = set(map(id, named.values()))
        other: dict[str, Any] = {}
        state: Mapping[Any, Any] = self._optimizer.state
        for key, value in state.items():
            if type(key) is str:
                other[key] = encode(value, f"{self.name}.state.{key}")
            elif id(key) not in known:
                what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
                raise UsageError(
                    f"{self.name} holds state of {what}, which is no parameter of its groups",
                    safe="nothing was saved in its place",
                    hint="remove that state, or add the parameter to a group",
                )
        return other

    def _replicas(self, parameter: torch.Tensor, value: torch.Tensor) -> tuple[int, ...] | None:
        """Who holds an equal copy of a plain state tensor."""
        if len(self._ranks) == 1 or id(parameter) in self._replicated:
            return self._ranks
        if isinstance(parameter, DTensor) and value.dim() == 0:
            # A counter beside a sharded parameter: every shard of the parameter takes every step.
            return tuple(sorted(parameter.device_mesh.mesh.reshape(-1).tolist()))
        return None

    def _target(self, parameter: torch.Tensor, entry: str, saved: SavedTensor) -> torch.Tensor:
        """The live tensor to fill, or a new one where the optimizer has none yet."""
        live = self._optimizer.state.get(parameter, {}).get(entry)
        if isinstance(live, torch.Tensor):
            return live
        if tuple(parameter.shape) == saved.shape and saved.shape:
            return sharding.like(parameter.detach(), saved.dtype)
        defaults = self._optimizer.defaults
        on_device = defaults.get("capturable") or defaults.get("fused") or saved.shape
        device = parameter.device if on_device else torch.device("cpu")
        return torch.empty(saved.shape, dtype=saved.dtype, device=device)

    def _match_groups(self, stored: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
        """The options of each live group, found by the names that it holds."""
        held = {name for group in stored for name in group["names"]}
        problems = [f"missing   {self.name}: parameter {name}   not in the checkpoint" for name in sorted(names - held)]
        problems += [
            f"extra     {self.name}: parameter {name}   in the checkpoint only" for name in sorted(held - names)
        ]
        by_names: defaultdict[frozenset[str], list[Any]] = defaultdict(list)
        for group in stored:
            by_names[frozenset(group["names"])].append(group["options"])
        matched: list[dict[str, Any]] = []
        for g, group in enumerate(self._optimizer.param_groups):
            here = frozenset(self._name_of(p, g, i) for i, p in enumerate(group["params"]))
            if by_names[here]:
                options = by_names[here].pop(0)  # groups with the same names (several empty ones) keep their order
                matched.append({key: decode(value) for key, value in options.items()})
                problems += self._check_options(g, group, matched[-1])
            elif not problems:
                problems.append(f"groups    {self.name}: group {g} holds other parameters than any stored group")
        if problems:
            raise mismatch(self.name, problems)
        return matched

    def _check_options(self, g: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """Nothing is turned from a number into a tensor, or back, unasked."""
        problems: list[str] = []
        for key, value in saved.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor) != isinstance(value, torch.Tensor) and live is not None:
                kinds = f"saved {type(value).__name__}, here {type(live).__name__}"
                problems.append(f"kind      {self.name}: group {g} {key}   {kinds}")
            elif isinstance(live, torch.Tensor) and (live.shape, live.dtype) != (value.shape, value.dtype):
                kinds = f"saved {value.dtype} {tuple(value.shape)}, here {live.dtype} {tuple(live.shape)}"
                problems.append(f"kind      {self.name}: group {g} {key}   {kinds}")
        return problems


_NAMED = ("params", "param_names")
