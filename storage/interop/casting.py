"""Values in another dtype, by rounding to the nearest (ties to even), with what that loses. Uses numpy when called."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ckptrt.errors import UsageError
from ckptrt.storage.interop.blobs import Blob, Named
from ckptrt.storage.shardfile import item_bytes

__all__ = ["CAST_DTYPES", "Cast", "Loss", "cast"]

CAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FROM = ("float64", "float32", "float16", "bfloat16")


@dataclass(slots=True)
class Loss:
    """How far values of a tensor are from what they were. Finite ones only; num_overflow became infinite."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    num_overflow: int = 0


def cast(tensor: Named, dtype: str) -> Named:
    """The tensor in that dtype if it is of another floating one (8-bit floats stay: they mean nothing without their
    scales), else itself. Its data are a `Cast`.
    """
    if tensor.dtype not in _FROM or tensor.dtype == dtype:
        return tensor
    return Named(name=tensor.name, dtype=dtype, shape=tensor.shape, data=Cast(tensor.data, tensor.dtype, dtype))


class Cast:
    """A blob whose elements are converted as they are read; `loss` grows while that goes on."""

    def __init__(self, source: Blob, old: str, new: str) -> None:
        _numpy()
        self._source = source
        self._old, self._new = old, new
        self._widths = item_bytes(old), item_bytes(new)
        self.size_bytes = source.size_bytes // self._widths[0] * self._widths[1]
        self.loss = Loss()

    def read_into(self, start: int, out: memoryview) -> None:
        """`start` and the length are multiples of an element, as in any file whose tensors are aligned."""
        np = _numpy()
        old, new = self._widths
        raw = memoryview(bytearray(len(out) // new * old))
        self._source.read_into(start // new * old, raw)
        values = _values(np.frombuffer(raw, dtype=np.uint8), self._old)
        with np.errstate(all="ignore"):  # numpy warns of NaN, overflow and underflow: all of them are meant here
            converted = _to_bfloat16(values) if self._new == "bfloat16" else values.astype(np.dtype(self._new))
            self._add_loss(values, _values(converted.view(np.uint8), self._new))
        out[:] = converted.view(np.uint8).data

    def _add_loss(self, values: Any, became: Any) -> None:
        np = _numpy()
        wide, loss = values.astype(np.float64), self.loss
        finite = np.isfinite(wide)
        loss.num_overflow += int(np.count_nonzero(finite & ~np.isfinite(became)))
        finite &= np.isfinite(became)
        error = np.abs(wide[finite] - became.astype(np.float64)[finite])
        if error.any():
            size = np.abs(wide[finite])
            loss.max_abs = max(loss.max_abs, float(error.max()))
            loss.max_rel = max(loss.max_rel, float((error[size > 0] / size[size > 0]).max(initial=0.0)))


def _values(raw: Any, dtype: str) -> Any:
    np = _numpy()
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.dtype(dtype))


def _to_bfloat16(values: Any) -> Any:
    """As 16-bit words. numpy has no such dtype."""
    np = _numpy()
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    if values.dtype == np.float64:
        # Rounded twice, a value could end on the wrong side of a tie. So the first rounding is towards zero, and what
        # it cuts off is kept as the last bit.
        inexact = single != values
        away = np.abs(single) > np.abs(values)
        bits = np.where(inexact & ~np.isnan(values), (bits - away) | 1, bits).astype(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # a NaN must not become an infinity
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


@functools.cache
def _numpy() -> ModuleType:
    try:
        import numpy
    except ImportError:
        raise UsageError("--dtype needs numpy", hint="pip install numpy, or export without --dtype") from None
    return numpy
