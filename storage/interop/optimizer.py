"""Optimizers' state by names of parameters, as torch.distributed.checkpoint.state_dict gives it: nested or flat.

    {"state": {"layer.weight": {"exp_avg": ...}}, "param_groups": [{"params": ["layer.weight"], "lr": ...}]}
    {"state.layer.weight.exp_avg": ..., "param_groups.layer.weight.lr": ...}

`torch.optim.Optimizer.state_dict()` numbers the parameters instead, which says nothing about whose state is whose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptrt.errors import MismatchError, UsageError
from ckptrt.storage.interop.blobs import Named
from ckptrt.storage.interop.foreign import Check, nothing

__all__ = ["ForeignOptimizer", "read_optimizer"]

_IN_FILE = {"$here": "tensor"}  # as the optimizer's adapter marks an entry that is a stored tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptimizer:
    """state: parameter -> entry -> a tensor, or plain data as ckptrt stores them. groups: parameters and options.

    key: where in the source it was found.
    """

    key: str
    state: dict[str, dict[str, Any]]
    groups: list[tuple[list[str], dict[str, Any]]]
    check: Check = nothing
    check_bytes: int = 0

    def component(self, kind: str, new_of: Mapping[str, str]) -> tuple[dict[str, Named], Any]:
        """Tensors and plain data of a component. kind: the optimizer's class. new_of: parameters' other names.

        MismatchError for a parameter that isn't among those of the model.
        """
        names = {*self.state, *(name for held, _ in self.groups for name in held)}
        unknown = sorted(names - set(new_of))
        if unknown:
            raise MismatchError(
                f"the optimizer knows {len(unknown)} parameters that the model doesn't have, such as {unknown[0]!r}",
                safe="nothing was written",
                hint="name the right parts with --key and --optimizer",
            )
        tensors: dict[str, Named] = {}
        state: dict[str, Any] = {}
        for old, entries in self.state.items():
            new = new_of[old]
            state[new] = {}
            for entry, value in entries.items():
                if isinstance(value, Named):
                    name = f"state.{new}.{entry}"
                    tensors[name] = replace(value, name=name)
                state[new][entry] = dict(_IN_FILE) if isinstance(value, Named) else value
        groups = [{"names": [new_of[name] for name in held], "options": options} for held, options in self.groups]
        return tensors, {"kind": kind, "groups": groups, "state": state, "other": {}}


def read_optimizer(
    tree: Mapping[str, Any],
    place: str,
    key: str,
    encode: Callable[[Any, str], Any],
    check: Check = nothing,
    check_bytes: int = 0,
) -> ForeignOptimizer:
    """What a tree (its tensors as `Named`) says of an optimizer. encode: makes plain data of ckptrt's of a value."""
    try:
        nested = tree if "param_groups" in tree else _nested(tree)
        state = {
            _name(parameter): {
                str(entry): value if isinstance(value, Named) else encode(value, f"state.{parameter}.{entry}")
                for entry, value in entries.items()
            }
            for parameter, entries in nested.get("state", {}).items()
        }
        groups = [
            (
                [_name(name) for name in group["params"]],
                {option: encode(v, f"param_groups.{option}") for option, v in group.items() if option not in _NAMED},
            )
            for group in nested["param_groups"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{place} holds no optimizer's state by names of parameters ({type(error).__name__}: {error})",
            safe="nothing was written",
            hint="save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict() gives",
        ) from None
    return ForeignOptimizer(key=key, state=state, groups=groups, check=check, check_bytes=check_bytes)


_NAMED = ("params", "param_names")


def _name(parameter: Any) -> str:
    if not isinstance(parameter, str):
        raise TypeError(f"a parameter is called {parameter!r}")
    return parameter


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with equal options are one group."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        {"state": state, "param_groups": options}[part].setdefault(name, {})[entry] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, mine in options.items():
        group = groups.setdefault(json.dumps(mine, sort_keys=True, default=repr), {**mine, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": list(groups.values())}
