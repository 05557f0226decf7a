"""What each kind of state holds, and how it becomes what was saved."""

from __future__ import annotations

from typing import Any

import torch

from ckptrt.adapters.base import Adapter
from ckptrt.adapters.module import ModuleAdapter, replicated_parameters
from ckptrt.adapters.optimizer import OptimizerAdapter, parameter_names
from ckptrt.adapters.rng import RngState
from ckptrt.adapters.tree import Stateful, TreeAdapter
from ckptrt.errors import UsageError

__all__ = ["adapt"]

_RNG = "rng"


def adapt(state: dict[str, Any], rank: int, world_size: int, *, rng: bool) -> list[Adapter]:
    """An adapter for each component, in the order of restoring: as given, then the random generators.

    A dict with modules, optimizers or other stateful values in it is taken apart: each becomes a component
    `name.key`. Raises UsageError, by name, for what can't be state.
    """
    flat = _take_apart(state)
    for name in flat:
        for other in flat:
            if other.startswith(f"{name}."):
                raise UsageError(f"{name!r} and {other!r} could hold tensors of one name", hint="rename one of them")
    if rng and _RNG in flat:
        raise UsageError(f"{_RNG!r} is the name of the random generators", hint="rename it, or pass rng=False")
    ranks = tuple(range(world_size))
    modules = {name: part for name, part in flat.items() if isinstance(part, torch.nn.Module)}
    names = parameter_names(modules)
    replicated = frozenset(id(p) for module in modules.values() for p in replicated_parameters(module))
    adapters: list[Adapter] = []
    for name, part in flat.items():
        if isinstance(part, torch.nn.Module):
            adapters.append(ModuleAdapter(name, part, rank, ranks))
        elif isinstance(part, torch.optim.Optimizer):
            adapters.append(OptimizerAdapter(name, part, names, replicated, ranks))
        else:
            adapters.append(TreeAdapter(name, part, rank, ranks))
    if rng:
        adapters.append(TreeAdapter(_RNG, RngState(), rank, ranks))
    return adapters


def _take_apart(state: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, part in state.items():
        if type(part) is dict and any(isinstance(value, Stateful) for value in part.values()):
            rest = {key: value for key, value in part.items() if not isinstance(value, Stateful)}
            for key in [key for key, value in part.items() if isinstance(value, Stateful)]:
                if f"{name}.{key}" in state:
                    raise UsageError(f"{f'{name}.{key}'!r} is given twice", hint="rename one of them")
                flat[f"{name}.{key}"] = part[key]
            if rest:
                raise UsageError(
                    f"{name!r} mixes objects that have a state_dict with plain values ({', '.join(map(str, rest))})",
                    hint="pass the plain values as a dict of their own",
                )
        elif isinstance(part, (dict, Stateful)) and not isinstance(part, type):
            flat[name] = part
        else:
            raise UsageError(
                f"{name!r} is a {type(part).__name__}: state is a dict, or has state_dict and load_state_dict",
                hint="put plain values into a dict, such as progress={'samples': 0}",
            )
    return flat
