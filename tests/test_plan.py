"""Save and restore plans, held against a naive twin that moves single elements.

CKPTRT_TEST_PAIRS=50000 tries that many random pairs of layouts instead of 2,000.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support_plan import (
    execute,
    holdings_of,
    mesh_regions,
    naive_bytes,
    numbered,
    part,
    pieces_of_all,
    read_only,
    times_written,
    write_files,
)

from ckptrt import plan
from ckptrt.errors import MismatchError
from ckptrt.plan import (
    Holding,
    Missing,
    Piece,
    Read,
    Stored,
    Wanted,
    chunk_aligned,
    find_missing,
    needed_bytes,
    plan_restore,
    plan_save,
    read_amplification,
)
from ckptrt.regions import Region, covers, flat_boxes, overlaps, subtract, uncovered, whole

PAIRS = int(os.environ.get("CKPTRT_TEST_PAIRS", "2000"))
BATCHES = 20

Shape = tuple[int, ...]


# Random pairs of layouts against the twin.


def random_shape(rng: random.Random) -> Shape:
    top = (1, 40, 12, 7, 5)[ndim := rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))]
    return tuple(0 if rng.random() < 0.03 else rng.randint(1, top) for _ in range(ndim))


def random_regions(rng: random.Random, shape: Shape) -> list[Region]:
    """One region per rank, from a random mesh and random placements."""
    mesh = [rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    while np.prod(mesh) > 8:
        mesh.pop()
    placements = [rng.choice((None, *range(len(shape)))) for _ in mesh]
    return mesh_regions(shape, mesh, placements)


def random_cuts(rng: random.Random, region: Region, depth: int) -> list[Region]:
    """A random partition into boxes that no mesh would make."""
    dims = [dim for dim, size in enumerate(region.sizes) if size > 1]
    if depth == 0 or not dims:
        return [region]
    dim = rng.choice(dims)
    at = rng.randint(1, region.sizes[dim] - 1)
    parts = []
    for start, size in ((0, at), (at, region.sizes[dim] - at)):
        offsets, sizes = list(region.offsets), list(region.sizes)
        offsets[dim] += start
        sizes[dim] = size
        parts += random_cuts(rng, Region(tuple(offsets), tuple(sizes)), depth - 1)
    return parts


def random_contents(rng: random.Random, tensors: dict[str, Shape], item_bytes: int) -> list[list[tuple[str, Region]]]:
    """What lies in each file: the save plan's pieces, or every rank's own region (replicas), or boxes at random."""
    kind = rng.choice(("planned", "planned", "replicas", "boxes"))
    if kind == "boxes":
        files: list[list[tuple[str, Region]]] = [[] for _ in range(rng.randint(1, 3))]
        for _ in range(rng.choice((1, 1, 2))):  # the second time it is another copy, cut elsewhere
            for key, shape in tensors.items():
                for box in random_cuts(rng, whole(shape), rng.randint(0, 5)):
                    rng.choice(files).append((key, box))
        return files
    ranks = max(tensors, key=lambda key: len(tensors[key]))
    regions = {key: random_regions(rng, shape) for key, shape in tensors.items()}
    count = len(regions[ranks])
    layouts = [(key, item_bytes, shape, (regions[key] * count)[:count]) for key, shape in tensors.items()]
    if kind == "planned" and all(len(regions[key]) == count for key in tensors):
        return pieces_of_all(holdings_of(layouts))
    return [[(key, regions[key][rank]) for key in tensors if rank < len(regions[key])] for rank in range(8)]


def check_pair(seed: int) -> None:
    rng = random.Random(seed)
    item_bytes = rng.choice((1, 2, 4, 8))
    shapes = {name: random_shape(rng) for name in ("a", "b")[: rng.choice((1, 1, 2))]}
    tensors = {key: numbered(shape, item_bytes) for key, shape in shapes.items()}
    files, stored = write_files(tensors, random_contents(rng, shapes, item_bytes), rng)
    rng.shuffle(stored)
    wanted = [Wanted(key, shape, region) for key, shape in shapes.items() for region in random_regions(rng, shape)]
    if rng.random() < 0.5:
        wanted = [rng.choice(wanted)]  # one rank alone, else a whole node
    gap_bytes = rng.choice((0, 0, 2, 16, 65536))
    cost = {file: rng.randint(0, 2) for file in range(3)} if rng.random() < 0.3 else None

    result = plan_restore(stored, wanted, cost=cost, gap_bytes=gap_bytes)
    filled = execute(result, read_only(files, result), wanted, item_bytes)
    for one, found in zip(wanted, filled, strict=True):
        assert np.array_equal(found, part(tensors[one.key], one.region)), one
    needed: dict[object, set[int]] = {}
    for copy in result.copies:
        needed.setdefault(copy.file, set()).update(naive_bytes(copy))
    assert needed_bytes(result) == sum(map(len, needed.values()))
    assert {file: naive_reads(its, gap_bytes) for file, its in needed.items()} == dict(result.reads)


def naive_reads(needed: set[int], gap_bytes: int) -> tuple[Read, ...]:
    reads: list[Read] = []
    for byte in sorted(needed):
        if reads and byte - sum(reads[-1]) <= gap_bytes:
            reads[-1] = Read(reads[-1].start, byte + 1 - reads[-1].start)
        else:
            reads.append(Read(byte, 1))
    return tuple(reads)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_any_layout_restores_from_any_other_element_for_element(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_GRAIN_MIN_BYTES", 1 + batch % 4 * 8)  # so that tensors of this size are cut too
    for seed in range(batch, PAIRS, BATCHES):
        try:
            check_pair(seed)
        except Exception as error:
            error.args = (f"check_pair({seed}) with grain {plan._GRAIN_MIN_BYTES}: {error}",)
            raise


# Save plans.


def gpt(width: int, layers: int, vocab: int) -> list[tuple[str, Shape]]:
    """Parameters and AdamW moments of a GPT, with its many tiny tensors."""
    shapes = [("wte", (vocab, width)), ("wpe", (1024, width)), ("ln_f.weight", (width,)), ("ln_f.bias", (width,))]
    for layer in range(layers):
        for name, shape in (
            ("ln_1.weight", (width,)), ("ln_1.bias", (width,)), ("ln_2.weight", (width,)), ("ln_2.bias", (width,)),
            ("attn.weight", (3 * width, width)), ("attn.bias", (3 * width,)), ("proj.weight", (width, width)),
            ("fc.weight", (4 * width, width)), ("fc.bias", (4 * width,)), ("out.weight", (width, 4 * width)),
        ):  # fmt: skip
            shapes.append((f"h.{layer}.{name}", shape))
    moments = [(f"optim.{name}.{moment}", shape) for name, shape in shapes for moment in ("exp_avg", "exp_avg_sq")]
    return shapes + moments + [(f"optim.{name}.step", ()) for name, _ in shapes]


def layout(tensors: Sequence[tuple[str, Shape]], mesh: Sequence[int], shard_axis: int | None) -> list[list[Holding]]:
    """Holdings of each rank; every tensor of one dim or more has its rows sharded over `shard_axis`."""
    return holdings_of(
        (
            key,
            4,
            shape,
            mesh_regions(shape, mesh, [0 if axis == shard_axis and shape else None for axis in range(len(mesh))]),
        )
        for key, shape in tensors
    )


def check_exactly_once(ranks: Sequence[Sequence[Holding]], written: Sequence[Sequence[tuple[str, Region]]]) -> None:
    by_key: dict[str, list[Region]] = {}
    for rank, pieces in enumerate(written):
        mine: dict[str, list[Region]] = {}
        for holding in ranks[rank]:
            mine.setdefault(holding.key, []).append(holding.region)
        for key, region in pieces:
            assert any(covers(held, region) for held in mine[key]), f"rank {rank} writes what it doesn't hold"
            by_key.setdefault(key, []).append(region)
    for holding in {holding.key: holding for own in ranks for holding in own}.values():
        assert uncovered(holding.shape, by_key[holding.key]) == []
        assert list(overlaps(by_key[holding.key])) == []


def loads(written: Sequence[Sequence[tuple[str, Region]]]) -> list[int]:
    return [sum(region.numel for _, region in pieces) for pieces in written]


MEDIUM = gpt(1024, 24, 50257)


@pytest.mark.parametrize(
    ("tensors", "mesh", "shard_axis"),
    [
        (MEDIUM, [4], None),
        (MEDIUM, [2], None),
        (MEDIUM, [64], None),
        (MEDIUM, [2, 2], 1),
        (MEDIUM, [2, 3], 1),
        (MEDIUM, [3], 0),
        (gpt(256, 4, 8192), [4], None),
        (gpt(384, 6, 100), [2, 2], 1),
        ([(f"experts.{layer}", (8, 4096, 14336)) for layer in range(3)], [128], None),
        ([("stacked", (2, 50_000_000))], [7], None),
        ([("flat", (123_456_789,))], [5], None),
    ],
    ids=[
        "ddp4",
        "ddp2",
        "ddp64",
        "hsdp2x2",
        "hsdp2x3",
        "fsdp3",
        "small-ddp4",
        "small-hsdp",
        "moe128",
        "two-rows",
        "flat",
    ],
)
def test_save_plan_is_exact_and_balanced(
    tensors: Sequence[tuple[str, Shape]], mesh: Sequence[int], shard_axis: int | None
) -> None:
    ranks = layout(tensors, mesh, shard_axis)
    written = pieces_of_all(ranks)
    check_exactly_once(ranks, written)
    assert max(loads(written)) <= 1.05 * sum(loads(written)) / len(written)


def test_cuts_are_few_and_leave_no_slivers() -> None:
    ranks = layout(MEDIUM, [4], None)
    pieces = [piece for pieces in pieces_of_all(ranks) for piece in pieces]
    assert len(pieces) <= len(MEDIUM) + 3
    shapes = dict(MEDIUM)
    assert all(region.numel * 4 >= 512 * 1024 or region.sizes == shapes[key] for key, region in pieces)
    assert all(region.sizes[1:] == shapes[key][1:] for key, region in pieces)


def test_small_tensors_stay_whole() -> None:
    tensors = [(f"t{number}", (64, 16)) for number in range(40)]
    ranks = layout(tensors, [4], None)
    written = pieces_of_all(ranks)
    check_exactly_once(ranks, written)
    assert all(region == whole((64, 16)) for pieces in written for _, region in pieces)
    assert [len(pieces) for pieces in written] == [10, 10, 10, 10]


def test_groups_with_one_small_tensor_do_not_all_load_one_holder() -> None:
    """Eight pairs of ranks in which both hold one scalar: the writers are not always the first."""
    ranks: list[list[Holding]] = [[] for _ in range(16)]
    for pair in range(8):
        for rank in (pair, pair + 8):
            ranks[rank].append(Holding(f"scale.{pair}", 4, (), whole(()), (pair, pair + 8)))
    written = pieces_of_all(ranks)
    assert sum(map(len, written)) == 8
    assert 0 < sum(map(len, written[:8])) < 8


def test_rank_only_tensors_are_written_by_their_rank() -> None:
    ranks = [[Holding("rng", 1, (5056,), whole((5056,)), None)] for _ in range(3)]
    assert pieces_of_all(ranks) == [[("rng", whole((5056,)))]] * 3


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((), [3], [None]),
        ((1,), [2], [None]),
        ((1,), [2], [0]),
        ((3,), [4], [0]),
        ((5, 2), [4], [0]),
        ((2, 3), [2, 4], [None, 0]),
        ((4, 6), [2, 2], [0, 0]),
        ((4, 6), [2, 2], [1, 0]),
    ],
)
@pytest.mark.parametrize("grain", [1, 64 * 1024])
def test_edge_shapes_are_written_exactly_once(
    shape: Shape, mesh: list[int], placements: list[int | None], grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_GRAIN_MIN_BYTES", grain)
    written = pieces_of_all(holdings_of([("t", 4, shape, mesh_regions(shape, mesh, placements))]))
    regions = [region for pieces in written for _, region in pieces]
    assert (times_written(shape, regions) == 1).all()
    assert not any(region.is_empty for region in regions)


@pytest.mark.parametrize("others", ["", "a", "z", "az", "abcopqrs"])
def test_a_tensor_without_elements_is_written_once_for_its_name(others: str) -> None:
    tensors = [("none", 4, (3, 0), [whole((3, 0))] * 4)]
    tensors += [(key, 4, (3, 5), [whole((3, 5))] * 4) for key in others]
    written = [piece for pieces in pieces_of_all(holdings_of(tensors)) for piece in pieces]
    assert sorted(written) == sorted((key, whole(shape)) for key, _, shape, _ in tensors)


def test_no_rank_is_two_grains_off_the_mean() -> None:
    rng = random.Random(13)
    for _ in range(200):
        shapes = [(rng.randint(1, 300), rng.randint(1, 30_000)) for _ in range(rng.randint(1, 12))]
        count = rng.randint(2, 9)
        tensors = [(f"t{number}", 4, shape, [whole(shape)] * count) for number, shape in enumerate(shapes)]
        written = [4 * load for load in loads(pieces_of_all(holdings_of(tensors)))]
        mean = sum(written) / count
        grain = min(max(mean / 64, 64 * 1024), 1024 * 1024)
        assert all(abs(load - mean) <= 2 * grain for load in written), (shapes, written)


def test_the_pieces_come_in_order_whatever_the_order_of_the_holdings() -> None:
    own = layout(MEDIUM, [2, 2], 1)[2]
    own.append(Holding("a.rank", 8, (2,), whole((2,)), None))
    pieces = plan_save(own, 2)
    assert list(pieces) == sorted(pieces)
    assert plan_save(own[::-1], 2) == pieces
    assert all(isinstance(piece, Piece) for piece in pieces)


def test_what_cannot_be_a_layout_is_refused() -> None:
    one = Holding("t", 4, (2,), whole((2,)), (0, 1))
    with pytest.raises(ValueError, match="twice"):
        plan_save([one, one], 0)
    with pytest.raises(ValueError, match="holders"):
        plan_save([one], 2)
    with pytest.raises(ValueError, match="twice"):
        plan_save([one._replace(holders=(1,)), one._replace(holders=None)], 1)


@pytest.mark.processes
def test_the_plan_does_not_depend_on_hash_seeds() -> None:
    code = (
        "from ckptrt.plan import Holding, plan_save; from ckptrt.regions import whole\n"
        "own = [Holding(f't{n}', 4, (n, 7), whole((n, 7)), (0, n % 5 + 1)) for n in range(99)]\n"
        "print(plan_save(own, 0))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


# Restore plans.


def shards(count: int, rows: int = 4, columns: int = 6, file: str = "f{}") -> list[Stored]:
    shape = (count * rows, columns)
    return [
        Stored("t", shape, 4, Region((place * rows, 0), (rows, columns)), file.format(place), 100)
        for place in range(count)
    ]


def test_the_same_layout_reads_exactly_its_own_bytes() -> None:
    result = plan_restore(shards(4), [Wanted("t", (16, 6), Region((8, 0), (4, 6)))])
    assert dict(result.reads) == {"f2": (Read(100, 96),)}
    (copy,) = result.copies
    assert (copy.wanted, copy.source, copy.target, copy.sizes) == (0, whole((4, 6)), whole((4, 6)), (4, 6))


def test_one_region_that_has_all_is_preferred_to_parts() -> None:
    stored = [*shards(4), Stored("t", (16, 6), 4, whole((16, 6)), "all", 0)]
    assert set(plan_restore(stored, [Wanted("t", (16, 6), Region((2, 0), (4, 6)))]).reads) == {"all"}


def test_a_cheaper_file_is_preferred_to_one_that_has_all() -> None:
    stored = [*shards(4), Stored("t", (16, 6), 4, whole((16, 6)), "all", 0)]
    wanted = [Wanted("t", (16, 6), Region((2, 0), (4, 6)))]
    result = plan_restore(stored, wanted, cost={"all": 1})
    assert set(result.reads) == {"f0", "f1"}
    result = plan_restore([one for one in stored if one.file != "f1"], wanted, cost={"all": 1}, gap_bytes=0)
    assert dict(result.reads) == {"f0": (Read(100 + 48, 48),), "all": (Read(96, 48),)}


@pytest.mark.parametrize("count", [2, 8, 9, 300])
def test_among_many_shards_the_right_ones_are_found(count: int) -> None:
    rng = random.Random(count)
    stored = shards(count, rows=3, columns=1)
    rng.shuffle(stored)
    shape = stored[0].shape
    for _ in range(50):
        start = rng.randrange(shape[0])
        size = rng.randint(1, shape[0] - start)
        result = plan_restore(stored, [Wanted("t", shape, Region((start, 0), (size, 1)))])
        assert set(result.reads) == {f"f{place}" for place in range(start // 3, (start + size - 1) // 3 + 1)}


def test_a_long_region_before_many_short_ones_is_found() -> None:
    stored = [*shards(20), Stored("t", (80, 6), 4, Region((0, 0), (70, 6)), "long", 0)]
    result = plan_restore(stored, [Wanted("t", (80, 6), Region((50, 0), (18, 6)))])
    assert set(result.reads) == {"long"}


def test_bytes_that_several_ranks_want_are_read_once() -> None:
    stored = shards(4)
    wanted = [Wanted("t", (16, 6), whole((16, 6))) for _ in range(3)]
    result = plan_restore(stored, wanted)
    assert sum(read.size_bytes for reads in result.reads.values() for read in reads) == 16 * 6 * 4
    assert read_amplification(result) == 1.0
    assert len(result.copies) == 12


def test_read_amplification_counts_gaps_and_chunks() -> None:
    stored = [Stored("t", (8, 8), 1, whole((8, 8)), "f", 0)]
    half = [Wanted("t", (8, 8), Region((0, 0), (8, 4)))]
    assert read_amplification(plan_restore(stored, half, gap_bytes=0)) == 1.0
    result = plan_restore(stored, half, gap_bytes=4)
    assert read_amplification(result) == 60 / 32
    aligned = replace(result, reads={"f": chunk_aligned(result.reads["f"], 16, 64)})
    assert read_amplification(aligned) == 2.0
    assert read_amplification(plan_restore(stored, [])) == 1.0
    overlapping = [*half, Wanted("t", (8, 8), Region((0, 2), (8, 4)))]
    assert needed_bytes(plan_restore(stored, overlapping)) == 8 * 6


MESHES: dict[str, tuple[list[int], list[int | None]]] = {
    "dp4": ([4], [None]), "fsdp3": ([3], [0]), "fsdp4": ([4], [0]), "tp2": ([2], [1]), "tp4": ([4], [1]),
    "dp2xtp2": ([2, 2], [None, 1]), "fsdp2xtp2": ([2, 2], [0, 1]), "hsdp2x2": ([2, 2], [None, 0]),
}  # fmt: skip


@pytest.mark.parametrize("source", MESHES)
@pytest.mark.parametrize("target", MESHES)
def test_a_node_reads_hardly_more_than_it_needs(source: str, target: str) -> None:
    tensors = gpt(512, 2, 1000)
    plans = pieces_of_all(
        holdings_of((key, 4, shape, placed_regions(shape, *MESHES[source])) for key, shape in tensors)
    )
    shapes, stored = dict(tensors), []
    for rank, pieces in enumerate(plans):
        start = 4096
        for key, region in pieces:
            stored.append(Stored(key, shapes[key], 4, region, rank, start))
            start += region.numel * 4
    wanted = [Wanted(key, shape, region) for key, shape in tensors for region in placed_regions(shape, *MESHES[target])]
    result = plan_restore(stored, wanted)
    assert needed_bytes(result) == sum(region.numel * 4 for pieces in plans for _, region in pieces)
    assert read_amplification(result) <= 1.02


def placed_regions(shape: Shape, mesh: list[int], placements: list[int | None]) -> list[Region]:
    return mesh_regions(shape, mesh, [dim if dim is not None and dim < len(shape) else None for dim in placements])


def test_what_is_missing_is_named_to_the_row() -> None:
    stored = [one for one in shards(4) if one.file not in ("f1", "f3")]
    wanted = [
        Wanted("t", (16, 6), Region((0, 0), (4, 6))),
        Wanted("t", (16, 6), Region((2, 1), (5, 2))),
        Wanted("gone", (2,), whole((2,))),
    ]
    assert find_missing(stored, wanted) == (
        Missing(1, "t", (Region((4, 1), (3, 2)),)),
        Missing(2, "gone", (whole((2,)),)),
    )
    with pytest.raises(MismatchError) as caught:
        plan_restore(stored, wanted)
    assert "'t' [4:7, 1:3] of (16, 6); 'gone' [0:2] of (2,)" in caught.value.what
    assert find_missing(shards(4), wanted[:2]) == ()


def test_missing_parts_are_exact_for_random_holes() -> None:
    rng = random.Random(11)
    for _ in range(200):
        boxes = random_cuts(rng, whole((6, 5, 4)), 5)
        kept = [box for box in boxes if rng.random() < 0.7]
        stored = [Stored("t", (6, 5, 4), 2, box, 0, 0) for box in kept]
        box = rng.choice(boxes)
        wanted = [Wanted("t", (6, 5, 4), region) for region in (box, whole((6, 5, 4)))]
        for one in find_missing(stored, wanted):
            expected = times_written((6, 5, 4), [wanted[one.wanted].region]) - times_written((6, 5, 4), kept)
            assert np.array_equal(times_written((6, 5, 4), one.regions), np.maximum(expected, 0))
        assert {one.wanted for one in find_missing(stored, wanted)} == {
            index for index, one in enumerate(wanted) if subtract(one.region, kept)
        }


def test_another_shape_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"'t'.*\(16, 6\).*\(16, 5\)"):
        plan_restore(shards(4), [Wanted("t", (16, 5), whole((16, 5)))])


@pytest.mark.parametrize("change", [{"shape": (17, 6)}, {"item_bytes": 2}])
def test_a_checkpoint_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    stored = shards(4)
    stored[2] = stored[2]._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="f2"):
        plan_restore(stored, [Wanted("t", (16, 6), Region((0, 0), (4, 6)))])


def test_nothing_is_read_for_empty_regions() -> None:
    wanted = [
        Wanted("t", (16, 6), Region((16, 0), (0, 6))),
        Wanted("t", (16, 6), Region((3, 0), (0, 6))),
        Wanted("unknown", (0,), whole((0,))),
    ]
    result = plan_restore(shards(4), wanted)
    assert (dict(result.reads), result.copies) == ({}, ())
    result = plan_restore([Stored("t", (0, 3), 4, whole((0, 3)), 0, 0)], [Wanted("t", (0, 3), whole((0, 3)))])
    assert (dict(result.reads), result.copies) == ({}, ())


def test_a_flat_shard_restores_as_the_boxes_it_is() -> None:
    """A ZeRO rank's slice of a flattened tensor isn't a box, but a few of them."""
    wanted = [Wanted("t", (16, 6), box) for box in flat_boxes((16, 6), 21, 75)]
    result = plan_restore(shards(4), wanted, gap_bytes=0)
    assert sum(read.size_bytes for reads in result.reads.values() for read in reads) == (75 - 21) * 4
    assert result.reads["f1"] == (Read(100, 96),)


def test_chunks_are_read_whole_and_once() -> None:
    rng = random.Random(12)
    for _ in range(300):
        file_size, chunk_bytes = rng.randint(1, 200), rng.randint(1, 40)
        reads = []
        for _ in range(rng.randint(0, 5)):
            start = rng.randrange(file_size)
            reads.append(Read(start, rng.randint(1, file_size - start)))
        chunks = {byte // chunk_bytes for start, size in reads for byte in range(start, start + size)}
        expected = {byte for byte in range(file_size) if byte // chunk_bytes in chunks}
        assert chunk_aligned(reads, chunk_bytes, file_size) == naive_reads(expected, 0)


def test_a_read_past_the_end_of_the_file_is_refused() -> None:
    with pytest.raises(ValueError, match="of 9 bytes"):
        chunk_aligned([Read(5, 5)], 4, 9)


# Time grows with the number of tensors, not with its square.


def best_s(act: Callable[[], object]) -> float:
    """Seconds of processor time, without pauses for garbage."""
    return min(timeit.Timer(act, timer=time.process_time).repeat(repeat=5, number=1))


def save_job(count: int) -> Callable[[], object]:
    holders = [(0, 2), (0, 1, 2, 3), (0,)]
    own = [Holding(f"t{n}", 4, (64, 64), Region((0, 0), (32, 64)), holders[n % 3]) for n in range(count)]
    return lambda: plan_save(own, 0)


def restore_job(count: int) -> Callable[[], object]:
    shape = (64, 64)
    stored = [
        Stored(f"t{n}", shape, 4, Region((place * 16, 0), (16, 64)), place, n * 4096)
        for n in range(count)
        for place in range(4)
    ]
    wanted = [Wanted(f"t{n}", shape, Region((0, 0), (22, 64))) for n in range(count)]
    return lambda: plan_restore(stored, wanted)


def shards_job(count: int) -> Callable[[], object]:
    stored = shards(count, file="f")
    wanted = [Wanted("t", stored[0].shape, Region((place * 4 + 2, 0), (2, 6))) for place in range(count)]
    return lambda: plan_restore(stored, wanted)


@pytest.mark.parametrize("job", [save_job, restore_job, shards_job])
def test_ten_times_the_tensors_take_about_ten_times_as_long(job: Callable[[int], Callable[[], object]]) -> None:
    """Measured 10 to 12 times; a plan that compares each with each would take a hundred times as long."""
    assert best_s(job(20_000)) < 25 * best_s(job(2_000))
