"""Weights as 8-bit integers, by torchao (`pip install ckptrt[quant]`), in the layout in which torchao saves them.

A row of a matrix has one scale. A weight `m.weight` becomes `m._weight_qdata`, `m._weight_scale` and so on, and a text
in `__metadata__` says how torchao puts them together again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptrt.errors import MismatchError, UsageError
from ckptrt.storage.interop.blobs import Bytes, Named
from ckptrt.storage.interop.casting import Loss
from ckptrt.storage.interop.torchfile import TorchTensor, torch_module

__all__ = ["DEFAULT_SKIP", "Quantised", "index_metadata", "is_weight", "plain_metadata", "quantise"]

DEFAULT_SKIP = r"emb|wte|wpe|token|position|vocab|head|norm"

_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """What a weight became. metadata: how to put `tensors` together."""

    name: str
    tensors: list[Named]
    metadata: str
    loss: Loss


def is_weight(tensor: Named, skip: str) -> bool:
    """Whether a tensor is the weight of a linear layer, as far as its name and shape tell: skip is searched for."""
    is_matrix = len(tensor.shape) == 2 and tensor.dtype in _FLOATS and prod(tensor.shape) > 0
    return is_matrix and tensor.name.endswith(".weight") and not (skip and re.search(skip, tensor.name))


def quantise(tensor: Named) -> Quantised:
    """The weight as 8-bit integers. All of it is in memory meanwhile; the integers are computed again when written."""
    parts, metadata, loss = _quantise(tensor)
    tensors = []
    for name, part in parts.items():
        dtype, shape = str(part.dtype).removeprefix("torch."), tuple(part.shape)
        data = TorchTensor(part)
        if shape == tensor.shape:
            tensors.append(Named(name=name, dtype=dtype, shape=shape, data=_Again(tensor, name, data.size_bytes)))
            continue
        small = memoryview(bytearray(data.size_bytes))
        data.read_into(0, small)
        tensors.append(Named(name=name, dtype=dtype, shape=shape, data=Bytes(small)))
    return Quantised(name=tensor.name, tensors=tensors, metadata=metadata, loss=loss)


def plain_metadata() -> str:
    """What torchao says of a tensor that it left alone."""
    return json.dumps({"_type": "Tensor"})


def index_metadata(names: list[str]) -> str:
    """The text `tensor_names`."""
    return json.dumps(names)


class _Again:
    """The integers, computed when they are read and dropped when they have been."""

    def __init__(self, tensor: Named, name: str, size_bytes: int) -> None:
        self._tensor = tensor
        self._name = name
        self._data: TorchTensor | None = None
        self.size_bytes = size_bytes

    def read_into(self, start: int, out: memoryview) -> None:
        if self._data is None:
            self._data = TorchTensor(_quantise(self._tensor)[0][self._name])
        self._data.read_into(start, out)
        if start + len(out) == self.size_bytes:
            self._data = None


def _quantise(tensor: Named) -> tuple[dict[str, Any], str, Loss]:
    torch = torch_module()
    try:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import Int8Tensor, PerRow
    except ImportError as error:
        raise UsageError(
            f"--quant int8 needs torchao, which can't be loaded ({error})",
            safe="nothing was written",
            hint="pip install 'ckptrt[quant]'",
        ) from None
    data = bytearray(tensor.size_bytes)
    tensor.data.read_into(0, memoryview(data))
    weight = torch.frombuffer(data, dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)
    if not bool(weight.isfinite().all()):
        raise MismatchError(
            f"{tensor.name} holds NaN or infinite values, which 8-bit integers can't hold",
            safe="nothing was written",
            hint="leave it as it is with --quant-skip; `ckptrt verify --deep` lists such tensors",
        )
    whole = Int8Tensor.from_hp(weight, granularity=PerRow())
    parts, metadata = flatten_tensor_state_dict({tensor.name: whole})
    off = (whole.dequantize().double() - weight.double()).abs()
    size = weight.double().abs()
    loss = Loss(
        max_abs=float(off.max()),
        max_rel=float((off[size > 0] / size[size > 0]).max()) if bool((size > 0).any()) else 0.0,
    )
    return parts, metadata[tensor.name], loss
