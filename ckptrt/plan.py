"""Who writes which bytes at a save, and which bytes a restore reads and where they land. Pure arithmetic on regions.

Save. Ranks that hold the same region form a holder group, and each of them knows the group's whole list, so that all
can compute one and the same division alone. A group's regions are laid end to end in the order of their keys, and the
line is cut into as many equal stretches as there are holders. This balances as well as handing out small blocks to
the least loaded would, with one cut per holder instead of many: nearly every tensor stays whole, in one file. A cut
moves to the nearest edge of a region or row, by less than a grain: 1/64 of a stretch, but 64 KiB at least and 1 MiB at
most. So no holder is two grains off the mean, which is 3.2 % wherever a stretch has 4 MiB or more.

Restore. Each wanted region is covered by stored ones, each element by exactly one of them: from the cheapest file that
has it (memory before disk before network, as the caller says), then from the largest share. The byte runs that this
needs are merged per file where the gap between them is small; the copies say how stored boxes land in wanted ones.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ckptrt.errors import MismatchError
from ckptrt.regions import Region, around, flat_boxes, intersect, runs, shared_runs, subtract

__all__ = [
    "GAP_BYTES", "Copy", "Holding", "Missing", "Piece", "Read", "RestorePlan", "Stored", "Wanted",
    "chunk_aligned", "copy_runs", "find_missing", "needed_bytes", "plan_restore", "plan_save", "read_amplification",
]  # fmt: skip

GAP_BYTES = 64 * 1024  # reading on costs less than a second request
_GRAIN_MIN_BYTES = 64 * 1024
_GRAIN_MAX_BYTES = 1024 * 1024
_FEW = 8  # as many stored regions of one key are looked through without an index

File = int | str


class Holding(NamedTuple):
    """A region of a tensor that this rank holds.

    holders: the sorted ranks that hold the identical region, this one among them; None for a tensor that belongs to
    this rank alone and isn't a part of something global.
    """

    key: str
    item_bytes: int
    shape: tuple[int, ...]
    region: Region
    holders: tuple[int, ...] | None


class Piece(NamedTuple):
    """A region that this rank writes, in global coordinates."""

    key: str
    region: Region


class Stored(NamedTuple):
    """A region that a file holds, row-major, from byte `start` on. `file` is whatever names a file for the caller."""

    key: str
    shape: tuple[int, ...]
    item_bytes: int
    region: Region
    file: File
    start: int


class Wanted(NamedTuple):
    """A region to fill."""

    key: str
    shape: tuple[int, ...]
    region: Region


class Read(NamedTuple):
    """A byte range of a file."""

    start: int
    size_bytes: int


class Copy(NamedTuple):
    """Box `source` of a stored region goes to box `target` of wanted region number `wanted`; their sizes are equal.

    The stored region has `sizes` and lies at byte `start` of `file`. Both boxes count from their region's first
    element.
    """

    wanted: int
    file: File
    start: int
    sizes: tuple[int, ...]
    item_bytes: int
    source: Region
    target: Region


class Missing(NamedTuple):
    """Parts of wanted region number `wanted` that no file holds, as disjoint boxes in global coordinates."""

    wanted: int
    key: str
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What to read of each file (ascending, disjoint) and where it goes (in the order of what is wanted)."""

    reads: Mapping[File, tuple[Read, ...]]
    copies: tuple[Copy, ...]


def plan_save(holdings: Iterable[Holding], rank: int) -> tuple[Piece, ...]:
    """The regions that `rank` writes, in the order of keys and offsets.

    The pieces of all ranks hold every element of every region exactly once. An empty region of a tensor that has
    elements elsewhere is nobody's; a tensor without any elements is still written, for its name and shape. Two equal
    holdings are a ValueError.
    """
    pieces: list[Piece] = []
    groups: defaultdict[tuple[int, ...], list[Holding]] = defaultdict(list)
    for holding in holdings:
        if holding.region.is_empty and 0 not in holding.shape:
            continue
        groups[(rank,) if holding.holders is None else holding.holders].append(holding)
    for holders, group in groups.items():
        group.sort(key=_key_and_region)
        for one, other in pairwise(group):
            if one.key == other.key and one.region == other.region:
                raise ValueError(f"rank {rank} lists {one.key!r} {one.region} twice")
        pieces += _share(group, holders, rank)
    pieces.sort()
    return tuple(pieces)


def _key_and_region(holding: Holding) -> tuple[str, Region]:
    return holding.key, holding.region


def _share(group: Sequence[Holding], holders: tuple[int, ...], rank: int) -> Iterator[Piece]:
    """This rank's stretch of a group's regions, laid end to end."""
    if rank not in holders:
        raise ValueError(f"rank {rank} holds {group[0].key!r} but isn't among its holders {holders}")
    if len(holders) == 1:
        yield from (Piece(key, region) for key, _, _, region, _ in group)
        return
    # Groups with little to share would all load their first holder; start each at another one.
    turn = zlib.crc32(group[0].key.encode())
    place = (holders.index(rank) + turn) % len(holders)
    ends = list(accumulate(math.prod(holding.region.sizes) * holding.item_bytes for holding in group))
    grain = min(max(ends[-1] // len(holders) // 64, _GRAIN_MIN_BYTES), _GRAIN_MAX_BYTES)
    begin, end = (_cut(group, ends, ends[-1] * cut // len(holders), grain) for cut in (place, place + 1))
    for index in range(bisect_right(ends, begin), len(group)):
        base, item_bytes = ends[index - 1] if index else 0, group[index].item_bytes
        if base >= end:
            break
        yield from _part(group[index], (begin - base) // item_bytes, (end - base) // item_bytes)
    if place == 0:
        yield from (Piece(holding.key, holding.region) for holding in group if holding.region.is_empty)


def _cut(group: Sequence[Holding], ends: Sequence[int], position: int, grain: int) -> int:
    """The byte near `position` at which the line of regions is cut: an edge of a region, or of a row in it."""
    index = bisect_left(ends, position)
    base = ends[index - 1] if index else 0
    size_bytes, into = ends[index] - base, position - base
    if into < grain or size_bytes - into < grain:
        return base if 2 * into < size_bytes else ends[index]
    row_bytes = size_bytes
    for size in group[index].region.sizes:
        if row_bytes <= grain:
            break
        row_bytes //= size
    return base + (2 * into + row_bytes) // (2 * row_bytes) * row_bytes


def _part(holding: Holding, begin: int, end: int) -> Iterator[Piece]:
    """Elements `begin` to `end` of a holding; both may lie outside of it."""
    region = holding.region
    if begin <= 0 and end >= region.numel:
        if not region.is_empty:
            yield Piece(holding.key, region)
        return
    for box in flat_boxes(region.sizes, max(begin, 0), min(end, region.numel)):
        yield Piece(holding.key, box.shifted(region.offsets))


def plan_restore(
    stored: Iterable[Stored],
    wanted: Sequence[Wanted],
    *,
    cost: Mapping[Any, int] | None = None,
    gap_bytes: int = GAP_BYTES,
) -> RestorePlan:
    """The reads and copies that fill every wanted region from what is stored.

    stored: replicas and overlaps are welcome. Give the regions that can be had; keys that aren't wanted cost little.
    wanted: of one rank, or of all ranks of a node, to read once what several of them need.
    cost: files with a lower cost are taken first; a file not named costs 0.
    Raises MismatchError if any part is stored nowhere or with another shape. Nothing is wanted of an empty region.
    """
    copies, missing = _cover_all(stored, wanted, cost or {})
    if missing:
        raise _not_stored(missing, wanted)
    return RestorePlan(reads=_reads(copies, gap_bytes), copies=tuple(copies))


def find_missing(stored: Iterable[Stored], wanted: Sequence[Wanted]) -> tuple[Missing, ...]:
    """What `plan_restore` would lack, to choose a step or a tier before anything is read."""
    return tuple(_cover_all(stored, wanted, {})[1])


def _cover_all(
    stored: Iterable[Stored], wanted: Sequence[Wanted], cost: Mapping[Any, int]
) -> tuple[list[Copy], list[Missing]]:
    copies: list[Copy] = []
    missing: list[Missing] = []
    shelves = _shelves(stored, {one.key for one in wanted})
    for index, (key, shape, region) in enumerate(wanted):
        shelf = shelves.get(key)
        if shelf is not None and shelf.shape != shape:
            raise MismatchError(
                f"tensor {key!r} is stored with shape {shelf.shape} and wanted with shape {shape}",
                safe="nothing was loaded",
                hint="load it into a model of the stored shape, or leave this key out",
            )
        if region.is_empty:
            continue
        left = [region] if shelf is None else _cover(index, region, shelf.near(region), cost, copies)
        if left:
            missing.append(Missing(index, key, tuple(left)))
    return copies, missing


def _cover(
    index: int, region: Region, near: Sequence[Stored], cost: Mapping[Any, int], copies: list[Copy]
) -> list[Region]:
    """Append the copies that fill one wanted region; returns what of it is stored nowhere."""
    hits = [(box, one) for one in near if (box := intersect(one.region, region)) is not None]
    # Order matters only where something is stored more than once.
    if len(hits) > 1 and sum(box.numel for box, _ in hits) > region.numel:
        hits.sort(key=lambda hit: (cost.get(hit[1].file, 0), -hit[0].numel))
    left = [region]
    for box, (_, _, item_bytes, held, file, start) in hits:
        rest: list[Region] = []
        for part in left:
            taken = box if part is region else intersect(box, part)
            if taken is None:
                rest.append(part)
                continue
            source, target = taken.inside(held), taken.inside(region)
            copies.append(Copy(index, file, start, held.sizes, item_bytes, source, target))
            if taken != part:
                rest += around(part, taken)
        left = rest
        if not left:
            break
    return left


class _Shelf:
    """All stored regions of one key; finds those near a wanted one without looking at each."""

    __slots__ = ("_ends", "_starts", "_stored", "shape")

    def __init__(self, stored: list[Stored]) -> None:
        first = stored[0]
        for other in stored:
            if other.shape != first.shape or other.item_bytes != first.item_bytes:
                raise MismatchError(
                    f"tensor {first.key!r} is stored with shape {first.shape} and {first.item_bytes} bytes per element "
                    f"in {first.file}, but with {other.shape} and {other.item_bytes} in {other.file}",
                    safe="nothing was loaded",
                    hint="the checkpoint contradicts itself; `ckptrt verify` names the newest good step",
                )
        self.shape = first.shape
        self._stored = stored
        if len(stored) > _FEW and first.shape:
            stored.sort(key=lambda one: one.region.offsets)
            self._starts = [one.region.offsets[0] for one in stored]
            # The highest end so far is ascending even where regions overlap, so it can be searched too.
            self._ends = list(accumulate((one.region.offsets[0] + one.region.sizes[0] for one in stored), max))

    def near(self, region: Region) -> Sequence[Stored]:
        """The stored regions that may share rows with `region`."""
        if len(self._stored) <= _FEW or not self.shape:
            return self._stored
        first = bisect_right(self._ends, region.offsets[0])
        last = bisect_left(self._starts, region.offsets[0] + region.sizes[0])
        return self._stored[first:last]


def _shelves(stored: Iterable[Stored], keys: set[str]) -> dict[str, _Shelf]:
    by_key: defaultdict[str, list[Stored]] = defaultdict(list)
    for one in stored:
        if one.key in keys:
            by_key[one.key].append(one)
    return {key: _Shelf(found) for key, found in by_key.items()}


def _not_stored(missing: Sequence[Missing], wanted: Sequence[Wanted]) -> MismatchError:
    shown = [f"{key!r} {', '.join(map(str, regions))} of {wanted[index].shape}" for index, key, regions in missing[:5]]
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return MismatchError(
        f"{len(missing)} wanted tensor region(s) are not stored in full; what lacks: {'; '.join(shown)}{more}",
        safe="nothing was loaded",
        hint="`ckptrt show` lists what the checkpoint holds; `ckptrt verify` names the newest good step",
    )


def _reads(copies: Iterable[Copy], gap_bytes: int) -> dict[File, tuple[Read, ...]]:
    ranges: defaultdict[File, list[tuple[int, int]]] = defaultdict(list)
    for _, file, start, sizes, item_bytes, source, _ in copies:
        if source.sizes == sizes:
            ranges[file].append((start, start + math.prod(sizes) * item_bytes))
        else:
            found = runs(sizes, source, item_bytes, gap_bytes)
            ranges[file] += [(start + offset, start + offset + length) for offset, length in found]
    return {file: _merged(found, gap_bytes) for file, found in ranges.items()}


def _merged(ranges: list[tuple[int, int]], gap_bytes: int) -> tuple[Read, ...]:
    ranges.sort()
    reads: list[Read] = []
    begin, end = ranges[0]
    for next_begin, next_end in ranges:
        if next_begin - end > gap_bytes:
            reads.append(Read(begin, end - begin))
            begin = next_begin
        if next_end > end:
            end = next_end
    reads.append(Read(begin, end - begin))
    return tuple(reads)


def chunk_aligned(reads: Iterable[Read], chunk_bytes: int, file_size_bytes: int) -> tuple[Read, ...]:
    """The reads widened to whole digest chunks, each chunk once: a chunk is verified as a whole or not at all."""
    ranges: list[tuple[int, int]] = []
    for start, size_bytes in reads:
        if start + size_bytes > file_size_bytes:
            raise ValueError(f"bytes {start} to {start + size_bytes} of a file of {file_size_bytes} bytes")
        end = -(-(start + size_bytes) // chunk_bytes) * chunk_bytes
        ranges.append((start - start % chunk_bytes, min(end, file_size_bytes)))
    return _merged(ranges, 0) if ranges else ()


def copy_runs(copy: Copy, wanted: Wanted) -> Iterator[tuple[int, int, int]]:
    """A copy as runs (byte in the file, byte in the wanted region's row-major buffer, length)."""
    for source, target, length in shared_runs(
        copy.sizes, copy.source, wanted.region.sizes, copy.target, copy.item_bytes
    ):
        yield copy.start + source, target, length


def needed_bytes(plan: RestorePlan) -> int:
    """Distinct stored bytes that the copies use, however many wanted regions share them."""
    boxes: defaultdict[tuple[File, int], set[Region]] = defaultdict(set)
    item_bytes: dict[tuple[File, int], int] = {}
    for copy in plan.copies:
        boxes[copy.file, copy.start].add(copy.source)
        item_bytes[copy.file, copy.start] = copy.item_bytes
    return sum(_union_numel(sorted(found)) * item_bytes[at] for at, found in boxes.items())


def _union_numel(boxes: Sequence[Region]) -> int:
    return sum(rest.numel for place, box in enumerate(boxes) for rest in subtract(box, boxes[:place]))


def read_amplification(plan: RestorePlan) -> float:
    """Bytes read for each byte needed; 1.0 if nothing is needed."""
    needed = needed_bytes(plan)
    read = sum(size_bytes for reads in plan.reads.values() for _, size_bytes in reads)
    return read / needed if needed else 1.0
