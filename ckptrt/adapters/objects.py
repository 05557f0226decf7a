"""Plain Python data as JSON and back, value and type alike, without pickle.

What JSON has is written as it is; everything else is `{"$kind": ...}`. A type that isn't listed here is refused at
save time, by its path, so that nothing is lost in silence. Tensors may be taken out of the tree by the caller.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable
from typing import Any

import torch

from ckptrt.errors import CorruptError, UsageError

__all__ = ["TakeTensor", "decode", "encode"]

TakeTensor = Callable[[str, torch.Tensor], Any]  # path, tensor -> JSON-able reference
GiveTensor = Callable[[Any], torch.Tensor]


def encode(value: Any, path: str, take: TakeTensor | None = None) -> Any:
    """A JSON-able tree equal to `value`.

    path: where the value is, for messages. take: what to do with a tensor; without it, its bytes go into the tree.
    Raises UsageError, naming path and type, for what can't be stored.
    """
    try:
        return _encode(value, path, take)
    except RecursionError:
        raise UsageError(
            f"{path} holds itself, or is nested too deep to be stored",
            safe="nothing was saved in its place",
            hint="leave the part that leads back out of state_dict()",
        ) from None


def _encode(value: Any, path: str, take: TakeTensor | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:  # Python refuses to write or read very long ones in decimal digits
        return value if value.bit_length() < _DECIMAL_BITS else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple, set, frozenset, collections.deque):
        return _encode_sequence(value, path, take)
    if kind in (dict, collections.OrderedDict, collections.Counter):
        return _encode_dict(value, path, take)
    if isinstance(value, torch.Tensor):
        return take(path, value) if take else {"$tensor": _tensor_text(value, path)}
    if kind in _SCALARS:
        name, to_text, _ = _SCALARS[kind]
        return {name: to_text(value)}
    if kind.__module__.partition(".")[0] == "numpy":
        return _encode_numpy(value, path)
    raise UsageError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which can't be stored as plain data",
        safe="nothing was saved in its place",
        hint="leave it out of state_dict(), or give it state_dict/load_state_dict of plain data and tensors",
    )


def decode(tree: Any, give: GiveTensor | None = None) -> Any:
    """The value that `encode` was given. give: what makes a tensor of a reference that `take` had returned."""
    if isinstance(tree, list):
        return [decode(item, give) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (tag, content) = next(iter(tree.items()))
        if tag.startswith("$"):
            return _decode_tagged(tag, content, give)
    return {key: decode(item, give) for key, item in tree.items()}


def _encode_sequence(value: Any, path: str, take: TakeTensor | None) -> Any:
    # A set has no order: sorting by text makes equal sets equal bytes.
    members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    items = [_encode(item, f"{path}.{index}", take) for index, item in enumerate(members)]
    if type(value) is list:
        return items
    if type(value) is collections.deque:
        return {"$deque": [items, value.maxlen]}
    return {f"${type(value).__name__}": items}


def _encode_dict(value: dict[Any, Any], path: str, take: TakeTensor | None) -> Any:
    plain = type(value) is dict and all(type(key) is str for key in value)
    if plain and not any(key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}.{key}", take) for key, item in value.items()}
    pairs = [[_encode(k, f"{path}.<key>", None), _encode(item, f"{path}.{k}", take)] for k, item in value.items()]
    return {_DICTS[type(value)][0]: pairs}


def _encode_numpy(value: Any, path: str) -> Any:
    import numpy  # only where the value is already one of numpy's

    if (type(value) is numpy.ndarray or isinstance(value, numpy.generic)) and value.dtype.kind in "biufc":
        array = numpy.ascontiguousarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        tag = "$ndarray" if isinstance(value, numpy.ndarray) else "$npscalar"
        return {tag: [value.dtype.str, list(value.shape), text]}
    raise UsageError(
        f"{path} is a {type(value).__name__} of dtype {getattr(value, 'dtype', '?')}, which can't be stored",
        hint="use an array of numbers, or plain Python values",
    )


def _decode_numpy(content: Any, scalar: bool) -> Any:
    import numpy

    dtype, shape, text = content
    array = numpy.frombuffer(base64.b64decode(text), dtype=numpy.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


def _tensor_text(tensor: torch.Tensor, path: str) -> Any:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UsageError(
            f"{path} is a {type(tensor).__qualname__} ({tensor.dtype}, {tensor.layout}, on {tensor.device}), which "
            "can't be stored as plain data",
            safe="nothing was saved in its place",
            hint="convert it to a plain dense tensor, or leave it out",
        )
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    data = bytes(flat.reshape(-1).view(torch.uint8).tolist()) if flat.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data).decode()]


def _text_tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    dtype = getattr(torch, name)
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(shape)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


_SCALARS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("$bytes", lambda v: base64.b64encode(v).decode(), base64.b64decode),
    bytearray: ("$bytearray", lambda v: base64.b64encode(v).decode(), lambda t: bytearray(base64.b64decode(t))),
    complex: ("$complex", lambda v: [repr(v.real), repr(v.imag)], lambda t: complex(float(t[0]), float(t[1]))),
    torch.dtype: ("$dtype", lambda v: str(v).removeprefix("torch."), _torch_dtype),
    torch.device: ("$device", str, torch.device),
    torch.Size: ("$size", list, torch.Size),
}
_DICTS: dict[type, tuple[str, Callable[[list[Any]], Any]]] = {
    dict: ("$dict", dict),
    collections.OrderedDict: ("$odict", collections.OrderedDict),
    collections.Counter: ("$counter", lambda pairs: collections.Counter(dict(pairs))),
}
_DECIMAL_BITS = 4096
_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": lambda text: int(text, 16),
    **{name: build for name, _, build in _SCALARS.values()},
    "$ndarray": lambda content: _decode_numpy(content, scalar=False),
    "$npscalar": lambda content: _decode_numpy(content, scalar=True),
    "$tensor": _text_tensor,
}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def _decode_tagged(tag: str, content: Any, give: GiveTensor | None) -> Any:
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(item, give) for item in content])
    for name, build in _DICTS.values():
        if tag == name:
            return build([(decode(key), decode(item, give)) for key, item in content])
    if tag == "$deque":
        return collections.deque([decode(item, give) for item in content[0]], maxlen=content[1])
    if tag == "$ref" and give is not None:
        return give(content)
    if tag not in _BUILDERS:
        raise CorruptError(f"plain data of an unknown kind {tag!r}", hint="it may have been written by a newer ckptrt")
    return _BUILDERS[tag](content)
