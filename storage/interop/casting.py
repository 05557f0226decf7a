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
_BLOCK = 1 << 16  # elements converted at once: they stay in the processor's cache
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
        self.source = source
        self._old, self._new = old, new
        self._widths = item_bytes(old), item_bytes(new)
        self.size_bytes = source.size_bytes // self._widths[0] * self._widths[1]
        self.loss = Loss()

    def read_into(self, start: int, out: memoryview) -> None:
        """`start` and the length are multiples of an element, as in any file whose tensors are aligned."""
        np = _numpy()
        old, new = self._widths
        raw = memoryview(bytearray(len(out) // new * old))
        self.source.read_into(start // new * old, raw)
        values, target = np.frombuffer(raw, dtype=np.uint8), np.frombuffer(out, dtype=np.uint8)
        with np.errstate(all="ignore"):  # numpy warns of NaN, overflow and underflow: all of them are meant here
            for at in range(0, len(out) // new, _BLOCK):
                block = _values(values[at * old : (at + _BLOCK) * old], self._old)
                converted = _to_bfloat16(block) if self._new == "bfloat16" else block.astype(np.dtype(self._new))
                target[at * new : (at + _BLOCK) * new] = converted.view(np.uint8)
                self._add_loss(block, _values(converted.view(np.uint8), self._new))

    def _add_loss(self, values: Any, became: Any) -> None:
        """What is subtracted are neighbours, or one is zero, so that the difference is exact in the wider dtype."""
        np = _numpy()
        loss = self.loss
        error = np.abs(np.subtract(values, became, dtype=np.promote_types(values.dtype, np.float32)))
        is_finite = np.isfinite(error)
        if not is_finite.all():
            loss.num_overflow += int(np.count_nonzero(np.isinf(became) & np.isfinite(values)))
            error = np.where(is_finite, error, 0)
        largest = float(error.max(initial=0.0))
        if largest:
            loss.max_abs = max(loss.max_abs, largest)
            loss.max_rel = max(loss.max_rel, float(np.fmax.reduce(error / np.abs(values))))  # 0 / 0 is passed over


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
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded = np.where(is_nan, (bits >> 16) | 0x40, rounded)  # a NaN must not become an infinity
    return rounded.astype(np.uint16)


@functools.cache
def _numpy() -> ModuleType:
    try:
        import numpy
    except ImportError:
        raise UsageError("--dtype needs numpy", hint="pip install numpy, or export without --dtype") from None
    return numpy
