"""The values of stored tensors: verified bytes as numpy arrays, compared or searched for what isn't finite.

The one module of storage that uses numpy, and only once it is asked for values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckptrt.errors import CorruptError, NotFoundError, UsageError
from ckptrt.storage.layout import DATA
from ckptrt.storage.records import ShardRecord
from ckptrt.storage.shardfile import bad_chunks, item_bytes
from ckptrt.storage.tiers import Tier

if TYPE_CHECKING:
    from ckptrt.storage.diff import Region

__all__ = ["NonFinite", "Reader", "ValueDiff", "compare_values", "find_non_finite", "is_float"]

_PIECE_BYTES = 16 << 20
_Index = tuple[int, ...]

# 8-bit floats: bits of exponent and mantissa, bias, and how NaN and infinity are written.
_SMALL = {
    "float8_e5m2": (5, 2, 15, "ieee"), "float8_e4m3fn": (4, 3, 7, "all ones"),
    "float8_e5m2fnuz": (5, 2, 16, "minus zero"), "float8_e4m3fnuz": (4, 3, 8, "minus zero"),
}  # fmt: skip


@functools.cache
def _numpy() -> ModuleType:
    try:
        import numpy
    except ImportError:
        raise UsageError(
            "values of tensors can't be looked at without numpy", hint="pip install numpy, or leave out the option"
        ) from None
    return numpy


def is_float(dtype: str) -> bool:
    """Whether values of this dtype may be NaN or infinite."""
    return dtype.startswith(("float", "bfloat", "complex"))


# --- reading


class Reader:
    """Verified bytes of one checkpoint's shard files. Not for use by several threads."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._file = ""
        self._start = 0
        self._data = memoryview(b"")  # what was read last; small tensors share chunks

    def read(self, shard: ShardRecord, start: int, end: int) -> memoryview:
        """Bytes of a shard file, good until the next call. CorruptError if a chunk differs from its digest."""
        if self._file != shard.name or start < self._start or end > self._start + len(self._data):
            self._load(shard, start, end)
        return self._data[start - self._start : end - self._start]

    def _load(self, shard: ShardRecord, start: int, end: int) -> None:
        chunk = shard.chunk_bytes
        first, last = start // chunk, -(-end // chunk)
        self._file, self._start = "", first * chunk
        self._data = memoryview(bytearray(min(last * chunk, shard.size_bytes) - first * chunk))
        try:
            self._tier.read_into(DATA + shard.name, self._start, self._data)
        except NotFoundError as error:
            raise CorruptError(error.what, hint=error.hint) from None
        for number in bad_chunks(shard, first, self._data):
            raise CorruptError(
                f"{DATA}{shard.name} is damaged between bytes {number * chunk} and {(number + 1) * chunk - 1}",
                hint="`ckptrt verify --read-data` says what that hits",
            )
        self._file = shard.name

    def box(self, region: Region, offsets: _Index, sizes: _Index) -> Any:
        """A box within a region, in the tensor's coordinates: bytes, with an axis more for those of an element."""
        np, width = _numpy(), item_bytes(region.form.dtype)
        strides = [width] * len(sizes)
        for axis in range(len(sizes) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * region.form.sizes[axis + 1]
        where = [at - origin for at, origin in zip(offsets, region.form.offsets, strict=True)]
        start = region.start + sum(at * stride for at, stride in zip(where, strides, strict=True))
        end = start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + width
        flat = np.frombuffer(self.read(region.shard, start, end), dtype=np.uint8)
        return np.lib.stride_tricks.as_strided(flat, shape=(*sizes, width), strides=(*strides, 1), writeable=False)


# --- decoding


def _decode(raw: Any, dtype: str) -> Any:
    """Values of an array of bytes whose last axis is one element."""
    np = _numpy()
    raw = np.ascontiguousarray(raw)
    shape = raw.shape[:-1]
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype in _SMALL or dtype == "float8_e8m0fnu":
        return _table(dtype)[raw].reshape(shape)
    if dtype == "complex32":
        halves = raw.view(np.float16).astype(np.float32)
        return halves.view(np.complex64).reshape(shape)
    return raw.view(np.dtype(dtype)).reshape(shape)


@functools.cache
def _table(dtype: str) -> Any:
    """Values of all 256 bytes."""
    values = [2.0 ** (byte - 127) if byte != 255 else float("nan") for byte in range(256)]
    if dtype in _SMALL:
        values = [_small(byte, *_SMALL[dtype]) for byte in range(256)]
    return _numpy().array(values, dtype="float32")


def _small(byte: int, exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if (special == "minus zero" and byte == 0x80) or (special == "all ones" and byte & 0x7F == 0x7F):
        return float("nan")
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    fraction = mantissa / (1 << mantissa_bits)
    return sign * float((fraction if exponent == 0 else 1 + fraction) * 2.0 ** (max(exponent, 1) - bias))


# --- what isn't finite


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """NaN and infinities of a tensor or of a part of it. `first` is the index of the first of them."""

    num_nan: int = 0
    num_inf: int = 0
    first: _Index | None = None

    def __bool__(self) -> bool:
        return self.first is not None

    def __add__(self, other: NonFinite) -> NonFinite:
        firsts = [found.first for found in (self, other) if found.first is not None]
        return NonFinite(
            num_nan=self.num_nan + other.num_nan,
            num_inf=self.num_inf + other.num_inf,
            first=min(firsts, default=None),
        )


def find_non_finite(data: memoryview, dtype: str) -> NonFinite:
    """Of the elements that these bytes hold, one after another: `first` has their number as its only coordinate."""
    np = _numpy()
    return _non_finite(_decode(np.frombuffer(data, dtype=np.uint8).reshape(-1, item_bytes(dtype)), dtype), (0,))


def _non_finite(values: Any, offsets: _Index) -> NonFinite:
    np = _numpy()
    if values.dtype.kind not in "fc":
        return NonFinite()
    bad = ~np.isfinite(values)
    count = int(np.count_nonzero(bad))
    if not count:
        return NonFinite()
    num_nan = int(np.count_nonzero(np.isnan(values)))
    where = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.ndim else ()
    first = tuple(int(at) + origin for at, origin in zip(where, offsets, strict=True))
    return NonFinite(num_nan=num_nan, num_inf=count - num_nan, first=first)


# --- comparing


@dataclass(slots=True, kw_only=True)
class ValueDiff:
    """How a tensor's values differ. Maximum and norms (2-norms) are of finite values."""

    differs: bool = False
    max_abs: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    non_finite_a: NonFinite = NonFinite()
    non_finite_b: NonFinite = NonFinite()


def compare_values(
    a: Reader, b: Reader, regions: Iterable[tuple[list[Region], list[Region]]], with_stat: bool
) -> ValueDiff:
    """Compare one tensor: groups of regions that cover the same elements of it in both checkpoints.

    without stat, bytes are compared and reading ends at the first difference. Raises CorruptError.
    """
    found = ValueDiff()
    for region_a, region_b, offsets, sizes in _boxes(regions):
        dtype = region_a.form.dtype
        raw_a, raw_b = a.box(region_a, offsets, sizes), b.box(region_b, offsets, sizes)
        differs = not _numpy().array_equal(raw_a, raw_b)
        found.differs |= differs
        if with_stat:
            # Bytes of any value may come, and what can't be computed shows in the result: no warning tells more.
            with _numpy().errstate(invalid="ignore", over="ignore"):
                values_a = _decode(raw_a, dtype)
                _add_stat(found, values_a, _decode(raw_b, dtype) if differs else values_a, offsets)
        elif differs:
            break
    return found


def _add_stat(found: ValueDiff, a: Any, b: Any, offsets: _Index) -> None:
    np = _numpy()
    found.non_finite_a += _non_finite(a, offsets)
    found.non_finite_b += _non_finite(b, offsets)
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    wide_a = a.astype(kind)
    found.squares_a += _squares(wide_a)
    if b is a:
        found.squares_b += _squares(wide_a)
        return
    wide_b = b.astype(kind)
    found.squares_b += _squares(wide_b)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b)
    found.max_abs = max(found.max_abs, float(np.abs(wide_b[finite] - wide_a[finite]).max(initial=0.0)))


def _squares(values: Any) -> float:
    np = _numpy()
    sizes = np.abs(values[np.isfinite(values)])
    return float(np.dot(sizes, sizes))


def _boxes(regions: Iterable[tuple[list[Region], list[Region]]]) -> Iterator[tuple[Region, Region, _Index, _Index]]:
    """Where regions of both sides meet, in pieces of a bounded size."""
    for group_a, group_b in regions:
        for region_a in group_a:
            for region_b in group_b:
                form_a, form_b = region_a.form, region_b.form
                offsets = tuple(map(max, form_a.offsets, form_b.offsets))
                ends = [
                    min(at + size, other + length)
                    for at, size, other, length in zip(*form_a[2:], *form_b[2:], strict=True)
                ]
                sizes = tuple(end - at for at, end in zip(offsets, ends, strict=True))
                if all(size > 0 for size in sizes):
                    for piece in _pieces(offsets, sizes, item_bytes(form_a.dtype)):
                        yield region_a, region_b, *piece


def _pieces(offsets: _Index, sizes: _Index, width: int) -> Iterator[tuple[_Index, _Index]]:
    """Cut a box along its first axes into boxes of at most 16 MiB."""
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), None)
    if axis is None or prod(sizes) * width <= _PIECE_BYTES:
        yield offsets, sizes
        return
    rows = max(1, _PIECE_BYTES // (prod(sizes[axis + 1 :]) * width))
    for at in range(0, sizes[axis], rows):
        part = min(rows, sizes[axis] - at)
        inner = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
        yield from _pieces(inner, (*sizes[:axis], part, *sizes[axis + 1 :]), width)
