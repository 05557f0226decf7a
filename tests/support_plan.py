"""A naive twin of the plans: tensors whose elements are their own global numbers, moved element by element."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ckptrt.plan import Copy, File, Holding, RestorePlan, Stored, Wanted, copy_runs, plan_save
from ckptrt.regions import Region, whole

Array = npt.NDArray[np.generic]
DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xA5


def numbered(shape: Sequence[int], item_bytes: int) -> Array:
    """A tensor of which each element holds its own row-major number (modulo what the type can hold)."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.arange(1, count + 1, dtype=np.uint64).astype(DTYPES[item_bytes]).reshape(tuple(shape))


def part(tensor: Array, region: Region) -> Array:
    slices = tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))
    return np.ascontiguousarray(tensor[slices]).reshape(region.sizes)


def chunk(region: Region, dim: int, parts: int, place: int) -> Region:
    """What torch gives to coordinate `place` of `parts` when it shards `dim`: rounded up first, the rest last."""
    per_part = -(-region.sizes[dim] // parts)
    start = min(per_part * place, region.sizes[dim])
    size = min(per_part, region.sizes[dim] - start)
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return Region(tuple(offsets), tuple(sizes))


def mesh_regions(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[int | None]) -> list[Region]:
    """The region of every rank of a mesh; a placement is the dim that this axis shards, or None to replicate."""
    regions = []
    for rank in range(int(np.prod(mesh, dtype=np.int64))):
        region, rest = whole(shape), rank
        for axis in range(len(mesh) - 1, -1, -1):
            rest, place = divmod(rest, mesh[axis])
            if (dim := placements[axis]) is not None:
                region = chunk(region, dim, mesh[axis], place)
        regions.append(region)
    return regions


def holdings_of(tensors: Iterable[tuple[str, int, Sequence[int], Sequence[Region]]]) -> list[list[Holding]]:
    """Every rank's holdings, from (key, item_bytes, shape, region of each rank)."""
    ranks: list[list[Holding]] = []
    for key, item_bytes, shape, regions in tensors:
        ranks = ranks or [[] for _ in regions]
        for rank, region in enumerate(regions):
            holders = tuple(other for other, its in enumerate(regions) if its == region)
            ranks[rank].append(Holding(key, item_bytes, tuple(shape), region, holders))
    return ranks


def write_files(
    tensors: dict[str, Array], contents: Sequence[Iterable[tuple[str, Region]]], rng: random.Random
) -> tuple[list[bytes], list[Stored]]:
    """Files that hold these (key, region)s row-major one after the other with gaps, and what a receipt would say."""
    files, stored = [], []
    for file, pieces in enumerate(contents):
        data = bytearray(rng.randbytes(rng.randrange(9)))
        for key, region in pieces:
            stored.append(
                Stored(key, tensors[key].shape, tensors[key].itemsize, region, file, len(data)),
            )
            data += part(tensors[key], region).tobytes() + rng.randbytes(rng.choice((0, 0, 3, 40)))
        files.append(bytes(data))
    return files, stored


def read_only(files: Sequence[bytes], plan: RestorePlan) -> dict[File, bytes]:
    """The files with every byte poisoned that the plan doesn't read."""
    images: dict[File, bytes] = {}
    for file, data in enumerate(files):
        image = bytearray([POISON]) * len(data)
        for start, size_bytes in plan.reads.get(file, ()):
            image[start : start + size_bytes] = data[start : start + size_bytes]
        images[file] = bytes(image)
    return images


def execute(plan: RestorePlan, images: dict[File, bytes], wanted: Sequence[Wanted], item_bytes: int) -> list[Array]:
    """The wanted regions, filled run by run; also checks that no element is written twice."""
    buffers = [bytearray(one.region.numel * item_bytes) for one in wanted]
    writes = [bytearray(len(buffer)) for buffer in buffers]
    for copy in plan.copies:
        for source, target, length in copy_runs(copy, wanted[copy.wanted]):
            buffers[copy.wanted][target : target + length] = images[copy.file][source : source + length]
            assert not any(writes[copy.wanted][target : target + length]), f"written twice: {copy}"
            writes[copy.wanted][target : target + length] = b"\1" * length
    return [
        np.frombuffer(bytes(buffer), DTYPES[item_bytes]).reshape(one.region.sizes)
        for buffer, one in zip(buffers, wanted, strict=True)
    ]


def naive_bytes(copy: Copy) -> set[int]:
    """Every byte of the file that a copy needs, element by element."""
    numbers = np.arange(int(np.prod(copy.sizes, dtype=np.int64)), dtype=np.int64).reshape(copy.sizes)
    return {
        copy.start + int(number) * copy.item_bytes + byte
        for number in part(numbers, copy.source).ravel()
        for byte in range(copy.item_bytes)
    }


def times_written(shape: Sequence[int], regions: Iterable[Region]) -> npt.NDArray[np.int64]:
    """How many of the regions hold each element."""
    counts = np.zeros(tuple(shape), dtype=np.int64)
    for region in regions:
        slices = tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))
        counts[slices] += 1
    return counts


def pieces_of_all(ranks: Sequence[Sequence[Holding]]) -> list[list[tuple[str, Region]]]:
    """What each rank writes, each computed alone from its own list in an order of its own."""
    rng = random.Random(len(ranks))
    return [
        [(piece.key, piece.region) for piece in plan_save(rng.sample(list(own), len(own)), rank)]
        for rank, own in enumerate(ranks)
    ]
