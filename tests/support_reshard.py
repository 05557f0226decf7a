"""The model that resharding tests save and restore, in every parallel layout, with values that its names decide."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckptrt

LAYOUTS = {1: ["plain"], 2: ["fsdp", "ddp"], 3: ["fsdp"], 4: ["fsdp", "hsdp", "ddp"]}


class Model(nn.Module):
    """Uneven rows, dims smaller than any world, one element, a scalar, tied weights, bf16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 2)
        self.single = nn.Parameter(torch.randn(1))
        self.brief = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.embedding(ids)))
        extra = self.narrow(hidden).sum() + self.brief.float().sum() * self.single.sum()
        return self.head(hidden).square().sum() + extra


def build(layout: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Model(seed)
    if layout in ("fsdp", "hsdp"):
        size = dist.get_world_size()
        shape, names = ((2, size // 2), ("replica", "shard")) if layout == "hsdp" else ((size,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    parameters: list[Any] = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    return model, torch.optim.AdamW(groups, lr=0.25)


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The one value of the tensor of that name, in any layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.rand(shape, generator=generator) * 64).to(dtype)


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give everything its value, optimizer state included, in the layout that it has."""
    with torch.no_grad():
        for name, tensor in inner(model).state_dict().items():
            put(tensor, value(canonical(name), tuple(tensor.shape), tensor.dtype))
        for name, parameter in inner(model).named_parameters():
            state = {
                entry: put(
                    torch.empty_like(parameter), value(f"{name}/{entry}", tuple(parameter.shape), parameter.dtype)
                )
                for entry in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[parameter] = {"step": torch.tensor(4.0), **state}


def canonical(name: str) -> str:
    return "embedding.weight" if name == "head.weight" else name


def put(target: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if isinstance(target, DTensor):
        local = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target.to_local().copy_(local)
    else:
        target.copy_(full)
    return target


def differences(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of what isn't as `fill` makes it."""
    found = []
    for name, tensor in inner(model).state_dict().items():
        if not same(tensor, value(canonical(name), tuple(tensor.shape), tensor.dtype)):
            found.append(name)
    for name, parameter in inner(model).named_parameters():
        state = optimizer.state.get(parameter, {})
        if set(state) != {"step", "exp_avg", "exp_avg_sq"} or state["step"].tolist() != 4.0:
            found.append(f"{name}: {sorted(state)}")
            continue
        for entry in ("exp_avg", "exp_avg_sq"):
            if type(state[entry]) is not type(parameter.data):
                found.append(f"{name}/{entry} is a {type(state[entry]).__name__}")
            elif not same(state[entry], value(f"{name}/{entry}", tuple(parameter.shape), parameter.dtype)):
                found.append(f"{name}/{entry}")
    if [group["lr"] for group in optimizer.param_groups] != [0.5, 0.25]:
        found.append("lr")
    return found


def same(tensor: torch.Tensor, full: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor):
        expected = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        return torch.equal(tensor.to_local(), expected)
    return torch.equal(tensor, full)


def save(rank: int, world_size: int, url: str, layout: str, options: dict[str, Any] | None = None) -> int:
    """One committed checkpoint of everything, at step 3."""
    model, optimizer = build(layout, seed=0)
    fill(model, optimizer)
    loop = {"samples": 100 + rank, "seen": torch.full((3,), float(rank))}
    with ckptrt.init(url, model=model, optim=optimizer, loop=loop, storage_options=options) as rt:
        rt.restore()
        for _ in range(3):
            rt.step()
        rt.save()
        rt.wait(60)
        return rt.incarnation


def restore(
    rank: int, world_size: int, url: str, layout: str, options: dict[str, Any] | None = None
) -> tuple[list[str], int, Any]:
    """What differs from what `save` saved, the step, and the rank's own plain data."""
    model, optimizer = build(layout, seed=1)
    loop: dict[str, Any] = {"samples": 0}
    with ckptrt.init(url, model=model, optim=optimizer, loop=loop, storage_options=options) as rt:
        rt.restore()
        return differences(model, optimizer), rt.start_step, (loop["samples"], loop["seen"].tolist())
