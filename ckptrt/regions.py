"""Boxes in a tensor's global coordinates, and the bytes that a box is in row-major storage. Pure arithmetic.

A region is `sizes` elements at `offsets`. A 0-dim tensor is the region of no dims and one element; a region with a zero
size is legal and holds nothing. Everything here works on whole boxes: no function loops over elements.

Regions are named tuples and not dataclasses because a plan makes tens of thousands of them in the time of one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add, sub
from typing import NamedTuple

__all__ = [
    "Region", "around", "covers", "flat_boxes", "intersect", "overlaps", "runs", "shared_runs", "subtract", "uncovered",
    "whole",
]  # fmt: skip


class Region(NamedTuple):
    """A box: `sizes[d]` indices from `offsets[d]` on in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    def shifted(self, offsets: Sequence[int]) -> Region:
        """The same box seen from an origin that lies `offsets` before the present one."""
        return Region(tuple(map(add, self.offsets, offsets)), self.sizes)

    def inside(self, outer: Region) -> Region:
        """The same box counted from the first element of `outer`."""
        return Region(tuple(map(sub, self.offsets, outer.offsets)), self.sizes)

    def __str__(self) -> str:
        slices = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(slices)}]"


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor of that shape."""
    return Region((0,) * len(shape), tuple(shape))


def intersect(a: Region, b: Region) -> Region | None:
    """The elements in both, or None if there are none."""
    offsets: list[int] = []
    sizes: list[int] = []
    for a_start, a_size, b_start, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = a_start if a_start > b_start else b_start
        a_end, b_end = a_start + a_size, b_start + b_size
        size = (a_end if a_end < b_end else b_end) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Region(tuple(offsets), tuple(sizes))


def covers(outer: Region, inner: Region) -> bool:
    """Whether every element of `inner` is in `outer`; an empty region is covered by any."""
    return inner.is_empty or intersect(outer, inner) == inner


def around(box: Region, inner: Region) -> list[Region]:
    """What of `box` lies around `inner`, a non-empty region inside it, as disjoint boxes."""
    slabs: list[Region] = []
    offsets, sizes = box
    for dim, (start, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
        before, after = offsets[:dim], offsets[dim + 1 :]
        box_start, box_size = offsets[dim], sizes[dim]
        for slab_start, slab_end in ((box_start, start), (start + size, box_start + box_size)):
            if slab_start < slab_end:
                slab_sizes = (*sizes[:dim], slab_end - slab_start, *sizes[dim + 1 :])
                slabs.append(Region((*before, slab_start, *after), slab_sizes))
        # What is left for the other dims is as thin as the inner region here.
        offsets, sizes = (*before, start, *after), (*sizes[:dim], size, *sizes[dim + 1 :])
    return slabs


def subtract(region: Region, holes: Iterable[Region]) -> list[Region]:
    """What is left of `region` without the holes, as disjoint boxes."""
    left = [] if region.is_empty else [region]
    for hole in holes:
        rest: list[Region] = []
        for box in left:
            common = intersect(box, hole)
            rest += [box] if common is None else around(box, common)
        left = rest
        if not left:
            break
    return left


def uncovered(shape: Sequence[int], regions: Iterable[Region]) -> list[Region]:
    """The parts of a tensor that none of the regions holds, as disjoint boxes; empty if all is there."""
    return subtract(whole(shape), sorted(regions))  # in order, the rest stays one box or a few


def overlaps(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Every pair of indices (i < j) of regions that share an element."""
    if not regions:
        return
    ndim = len(regions[0].sizes)
    # Sweep along the dim that tells the regions apart best, else column shards would all be compared with each other.
    axis = max(range(ndim), key=lambda dim: len({region.offsets[dim] for region in regions}), default=None)
    order = list(range(len(regions)))
    if axis is not None:
        order.sort(key=lambda index: regions[index].offsets[axis])
    for place, first in enumerate(order):
        for second in order[place + 1 :] if axis is None else _reached(regions, order, place, axis):
            if intersect(regions[first], regions[second]) is not None:
                yield min(first, second), max(first, second)


def _reached(regions: Sequence[Region], order: Sequence[int], place: int, axis: int) -> Iterator[int]:
    current = regions[order[place]]
    end = current.offsets[axis] + current.sizes[axis]
    for other in range(place + 1, len(order)):
        if regions[order[other]].offsets[axis] >= end:
            return
        yield order[other]


def flat_boxes(sizes: Sequence[int], begin: int, end: int) -> list[Region]:
    """The elements `begin` to `end` of a row-major tensor, as at most 2 * ndim - 1 boxes in that order."""
    if begin >= end:
        return []
    if not sizes:
        return [Region((), ())]
    inner = sizes[1:]
    row_numel = math.prod(inner)
    first, head = divmod(begin, row_numel)
    last, tail = divmod(end, row_numel)
    if first == last:
        return _in_row(first, flat_boxes(inner, head, tail))
    boxes: list[Region] = []
    if head:
        boxes += _in_row(first, flat_boxes(inner, head, row_numel))
        first += 1
    if first < last:
        boxes.append(Region((first, *(0,) * len(inner)), (last - first, *inner)))
    if tail:
        boxes += _in_row(last, flat_boxes(inner, 0, tail))
    return boxes


def _in_row(row: int, boxes: Iterable[Region]) -> list[Region]:
    return [Region((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]


def runs(sizes: Sequence[int], box: Region, item_bytes: int, gap_bytes: int = 0) -> list[tuple[int, int]]:
    """The byte runs (offset, length) of `box` in a row-major tensor of `sizes`, in ascending order.

    Runs with at most `gap_bytes` between them are one. Only dims outside of a run are looped over.
    """
    if box.is_empty:
        return []
    offset, length, stride = 0, item_bytes, item_bytes
    loops: list[tuple[int, int]] = []
    for size, start, count in zip(reversed(sizes), reversed(box.offsets), reversed(box.sizes), strict=True):
        offset += start * stride
        # The gaps of an outer dim are never smaller than those further in: after one loop dim come only loop dims.
        if stride - length <= gap_bytes:
            length += (count - 1) * stride
        else:
            loops.append((count, stride))
        stride *= size
    return [(start, length) for start in _spread(offset, loops)]


def shared_runs(
    source_sizes: Sequence[int], source: Region, target_sizes: Sequence[int], target: Region, item_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Runs (source offset, target offset, length) of bytes that lie together in both of two row-major tensors.

    source, target: boxes of equal sizes inside tensors of `source_sizes` and `target_sizes`.
    """
    if source.is_empty:
        return
    split = len(source.sizes)  # the dims from here on are one run
    while split and source.sizes[split:] == tuple(source_sizes[split:]) == tuple(target_sizes[split:]):
        split -= 1
    length = item_bytes * math.prod(source.sizes[split:])
    starts = _run_starts(source_sizes, source, split, item_bytes)
    for start, landing in zip(starts, _run_starts(target_sizes, target, split, item_bytes), strict=True):
        yield start, landing, length


def _run_starts(sizes: Sequence[int], box: Region, split: int, item_bytes: int) -> list[int]:
    """Byte offsets of the runs of `box` if its dims from `split` on are one run."""
    offset, stride = 0, item_bytes
    loops: list[tuple[int, int]] = []
    for dim in range(len(sizes) - 1, -1, -1):
        offset += box.offsets[dim] * stride
        if dim < split:
            loops.append((box.sizes[dim], stride))
        stride *= sizes[dim]
    return _spread(offset, loops)


def _spread(offset: int, loops: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets of all turns of nested loops (count, stride), the innermost given first."""
    offsets = [offset]
    for count, stride in reversed(loops):
        offsets = [base + index * stride for base in offsets for index in range(count)]
    return offsets
