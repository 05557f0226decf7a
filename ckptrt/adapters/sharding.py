"""Where a local tensor lies in its global one, and who else holds it: DTensor, DDP, plain."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptrt.adapters.base import TensorItem
from ckptrt.errors import UsageError
from ckptrt.regions import Region, whole
from ckptrt.storage.shardfile import item_bytes

__all__ = ["chunk_of", "dtype_name", "is_writable", "item", "like", "local_of", "require_storable"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def chunk_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of a part as torch.chunk cuts it: equal parts, rounded up; the last ones short or empty."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own data, without autograd."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own, which an expanded tensor's haven't."""
    local = local_of(tensor)
    if local.layout is not torch.strided:
        return True
    return all(stride or size < 2 for size, stride in zip(local.shape, local.stride(), strict=True))


def item(key: str, tensor: torch.Tensor, replicas: tuple[int, ...] | None) -> TensorItem | None:
    """The item of a live tensor; None if this rank has no part in it.

    replicas: the ranks that hold an equal copy if it is a plain tensor; None if it is this rank's alone.
    """
    if not isinstance(tensor, DTensor):
        require_storable(key, tensor)
        shape = tuple(tensor.shape)
        return TensorItem(key=key, tensor=tensor.detach(), shape=shape, region=whole(shape), holders=replicas)
    placed = _place(key, tensor)
    if placed is None:
        return None
    region, holders = placed
    local = local_of(tensor)
    require_storable(key, local)
    if tuple(local.shape) != region.sizes:
        raise UsageError(
            f"{key}: this rank's part has shape {tuple(local.shape)}, its placement {tensor.placements} of "
            f"{tuple(tensor.shape)} says {region.sizes}",
            safe="nothing was saved in its place",
            hint="shards must be cut as torch.chunk does (DTensor.from_local with uneven parts needs `shape=`)",
        )
    return TensorItem(key=key, tensor=local, shape=tuple(tensor.shape), region=region, holders=holders)


def like(pattern: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of the pattern's layout and device with another dtype, contents undefined."""
    return torch.empty_like(pattern, dtype=dtype, memory_format=torch.contiguous_format)


def require_storable(key: str, tensor: torch.Tensor) -> None:
    """UsageError, naming the key, for tensors whose bytes aren't simply there."""
    problem = ""
    if tensor.is_meta:
        problem = "is on the meta device and has no data"
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"is quantized ({tensor.dtype})"
    elif type(tensor) not in _PLAIN_TYPES:
        problem = f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which may hide its data"
    elif tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        problem = "has had its storage freed"
    if problem:
        raise UsageError(
            f"{key} {problem}: it can't be stored",
            safe="nothing was saved in its place",
            hint="leave it out of the state",
        )
    try:
        item_bytes(dtype_name(tensor))
    except UsageError as error:
        raise UsageError(f"{key}: {error.what}", safe="nothing was saved in its place", hint=error.hint) from None


def _place(key: str, tensor: DTensor) -> tuple[Region, tuple[int, ...]] | None:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    same: list[int | slice] = []
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            dim = placement.dim
            start, sizes[dim] = chunk_of(sizes[dim], mesh.size(axis), coordinate[axis])
            offsets[dim] += start
            same.append(coordinate[axis])
        elif type(placement) is Replicate:
            same.append(slice(None))
        else:
            raise UsageError(
                f"{key} has placement {placement}, which isn't supported",
                safe="nothing was saved in its place",
                hint="redistribute it to Shard or Replicate before saving",
            )
    holders = mesh.mesh[tuple(same)].reshape(-1).tolist()
    return Region(offsets=tuple(offsets), sizes=tuple(sizes)), tuple(sorted(holders))
