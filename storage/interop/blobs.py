"""Bytes that are had piece by piece, and files made of them in order: whatever is exported or imported."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Protocol

import xxhash

from ckptrt.errors import CorruptError
from ckptrt.storage.boxes import overlap
from ckptrt.storage.shardfile import item_bytes
from ckptrt.storage.tiers import Tier

__all__ = [
    "PIECE_BYTES", "Assembled", "Blob", "Bytes", "Digested", "DigestedImage", "Image", "Named", "Part", "Span",
    "digest", "read_through",
]  # fmt: skip

PIECE_BYTES = 8 << 20  # one write; two digest chunks


class Blob(Protocol):
    """`size_bytes` bytes, read in any order. Reading raises CorruptError for what isn't as it was written."""

    size_bytes: int

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with what lies from byte `start` on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A tensor: its elements in row-major order as a blob. dtype by torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Blob

    @property
    def size_bytes(self) -> int:
        return self.data.size_bytes


class Bytes:
    """Bytes that are there already."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size_bytes = len(data)

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._data[start : start + len(out)]


class Span:
    """A stretch of a tier's object."""

    def __init__(self, tier: Tier, name: str, start: int, size_bytes: int) -> None:
        self._tier = tier
        self._name = name
        self._start = start
        self.size_bytes = size_bytes

    def read_into(self, start: int, out: memoryview) -> None:
        if len(out):
            self._tier.read_into(self._name, self._start + start, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor, `sizes` elements at `offsets`, whose elements lie in row-major order in `data`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Blob


class Assembled:
    """A tensor put together from boxes: how ranks sharded it, evenly or not.

    CorruptError if the boxes aren't all of it, each element once.
    """

    def __init__(self, what: str, dtype: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
        width = item_bytes(dtype)
        self.size_bytes = prod(shape) * width
        filled = [part for part in parts if prod(part.sizes)]
        count = sum(prod(part.sizes) for part in filled)
        is_inside = all(
            at >= 0 and size > 0 and at + size <= whole
            for part in filled
            for at, size, whole in zip(part.offsets, part.sizes, shape, strict=True)
        )
        # Of boxes inside the shape that don't overlap, the sum tells whether they leave anything out.
        if count != prod(shape) or not is_inside or overlap(filled):
            raise CorruptError(
                f"{what} isn't whole: its parts ({count} elements) aren't {list(shape)}, each element once",
                safe="nothing was written",
            )
        self._boxes = sorted((_Box(shape, part, width) for part in filled), key=lambda box: box.base)

    def read_into(self, start: int, out: memoryview) -> None:
        for box in self._boxes:
            if box.touches(start, start + len(out)):
                box.copy_to(start, out)


class _Box:
    """A box as runs: stretches that are contiguous in the whole tensor and, one after another, in the box's blob."""

    def __init__(self, shape: tuple[int, ...], part: Part, width: int) -> None:
        axis = max((i for i, size in enumerate(part.sizes) if size != shape[i]), default=0)
        self._data = part.data
        self._length = prod(part.sizes[axis:]) * width
        self._counts = part.sizes[:axis]
        self._strides = [width * prod(shape[i + 1 :]) for i in range(axis)]
        self._num_runs = prod(self._counts)
        self.base = sum(at * width * prod(shape[i + 1 :]) for i, at in enumerate(part.offsets))
        self._end = self._start(self._num_runs - 1) + self._length

    def touches(self, start: int, end: int) -> bool:
        return self.base < end and start < self._end

    def _start(self, run: int) -> int:
        """Where in the whole tensor a run begins."""
        at = self.base
        for count, stride in zip(reversed(self._counts), reversed(self._strides), strict=True):
            run, index = divmod(run, count)
            at += index * stride
        return at

    def copy_to(self, start: int, out: memoryview) -> None:
        """Copy what of the whole tensor's bytes from `start` on lies in this box."""
        end, length = start + len(out), self._length
        if self._num_runs == 1:
            low, high = max(start, self.base), min(end, self._end)
            self._data.read_into(low - self.base, out[low - start : high - start])
            return
        first = max(bisect_right(range(self._num_runs), start, key=self._start) - 1, 0)
        last = bisect_right(range(self._num_runs), end - 1, key=self._start)
        block = memoryview(bytearray((last - first) * length))
        self._data.read_into(first * length, block)
        for run in range(first, last):
            at = self._start(run)
            low, high = max(start, at), min(end, at + length)
            if low < high:
                source = (run - first) * length + low - at
                out[low - start : high - start] = block[source : source + high - low]


class Digested:
    """A blob that is read from its first byte to its last; then `xxh3` has its xxh3-128."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._hash = xxhash.xxh3_128()
        self.size_bytes = blob.size_bytes

    def read_into(self, start: int, out: memoryview) -> None:
        if start == 0:
            self._hash = xxhash.xxh3_128()
        self._blob.read_into(start, out)
        self._hash.update(out)

    @property
    def xxh3(self) -> str:
        return self._hash.hexdigest()


class Image:
    """A file made of blobs, one after another, as pieces for a tier; the next piece is made while one is written.

    progress: called with bytes made.
    """

    def __init__(self, blobs: Sequence[Blob], progress: Callable[[int], None] | None = None) -> None:
        self._blobs = blobs
        self._progress = progress
        self.size_bytes = sum(blob.size_bytes for blob in blobs)

    def __iter__(self) -> Iterator[memoryview]:
        made = self._pieces()
        with ThreadPoolExecutor(1, thread_name_prefix="ckptrt-interop") as reader:
            ahead = reader.submit(next, made, None)
            while (piece := ahead.result()) is not None:
                ahead = reader.submit(next, made, None)
                yield piece
                if self._progress is not None:
                    self._progress(len(piece))

    def _pieces(self) -> Iterator[memoryview]:
        # Page-aligned, so that a local disk takes them as they are. One is written while the other is filled.
        size_bytes = max(1, min(PIECE_BYTES, self.size_bytes))
        buffers = [memoryview(mmap.mmap(-1, size_bytes)) for _ in range(2)]
        number, filled = 0, 0
        for blob in self._blobs:
            done = 0
            while done < blob.size_bytes:
                count = min(blob.size_bytes - done, size_bytes - filled)
                blob.read_into(done, buffers[number % 2][filled : filled + count])
                done, filled = done + count, filled + count
                if filled == size_bytes:
                    yield buffers[number % 2]
                    number, filled = number + 1, 0
        if filled:
            yield buffers[number % 2][:filled]


class DigestedImage(Image):
    """An image that, once all pieces have passed, has its xxh3-128 in `xxh3`."""

    xxh3 = ""

    def __iter__(self) -> Iterator[memoryview]:
        whole = xxhash.xxh3_128()
        for piece in super().__iter__():
            whole.update(piece)
            yield piece
        self.xxh3 = whole.hexdigest()


def read_through(blobs: Sequence[Blob], progress: Callable[[int], None]) -> None:
    """Read all bytes and drop them: what is damaged raises CorruptError."""
    for _ in Image(blobs, progress):
        pass


def digest(blob: Blob, progress: Callable[[int], None] | None = None) -> str:
    """xxh3-128 of all its bytes."""
    image = DigestedImage([blob], progress)
    for _ in image:
        pass
    return image.xxh3
