"""Boxes against numpy: every operation on regions equals what single elements say."""

from __future__ import annotations

import random
import time
import timeit

import numpy as np
import pytest
from support_plan import part, times_written

from ckptrt.regions import (
    Region,
    covers,
    flat_boxes,
    intersect,
    overlaps,
    runs,
    shared_runs,
    subtract,
    uncovered,
    whole,
)

SHAPES = [(), (1,), (7,), (0,), (3, 5), (4, 0, 2), (2, 3, 4), (2, 1, 3, 2), (5, 4, 3)]


def random_box(rng: random.Random, shape: tuple[int, ...], *, empty: bool = True) -> Region:
    offsets, sizes = [], []
    for size in shape:
        low = 0 if empty or size == 0 else 1
        count = rng.randint(low, size)
        offsets.append(rng.randint(0, size - count))
        sizes.append(count)
    return Region(tuple(offsets), tuple(sizes))


def elements(shape: tuple[int, ...], region: Region) -> set[int]:
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    return set(part(numbers, region).ravel().tolist())


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    result: tuple[int, ...] = request.param
    return result


def test_zero_dims_hold_one_element_and_zero_sizes_none() -> None:
    assert (whole(()).numel, whole(()).is_empty) == (1, False)
    assert (whole((3, 0)).numel, whole((3, 0)).is_empty) == (0, True)
    assert intersect(whole(()), whole(())) == Region((), ())
    assert intersect(whole((0,)), whole((0,))) is None


def test_a_region_prints_as_slices() -> None:
    assert str(Region((4, 0), (4, 16))) == "[4:8, 0:16]"
    assert str(Region((), ())) == "[]"


def test_dims_must_agree() -> None:
    with pytest.raises(ValueError):
        intersect(whole((2,)), whole((2, 3)))


def test_intersect_and_covers(shape: tuple[int, ...]) -> None:
    rng = random.Random(1)
    for _ in range(60):
        a, b = random_box(rng, shape), random_box(rng, shape)
        common = intersect(a, b)
        both = elements(shape, a) & elements(shape, b)
        assert (elements(shape, common) if common else set()) == both
        assert covers(a, b) == (elements(shape, b) <= elements(shape, a))


def test_subtract_leaves_each_other_element_once(shape: tuple[int, ...]) -> None:
    rng = random.Random(2)
    for _ in range(60):
        box = random_box(rng, shape)
        holes = [random_box(rng, shape) for _ in range(rng.randint(0, 4))]
        expected = times_written(shape, [box]) * (times_written(shape, holes) == 0)
        left = subtract(box, holes)
        assert np.array_equal(times_written(shape, left), expected)
        assert not any(rest.is_empty for rest in left)


def test_uncovered_and_overlaps(shape: tuple[int, ...]) -> None:
    rng = random.Random(3)
    for _ in range(40):
        regions = [random_box(rng, shape) for _ in range(rng.randint(0, 6))]
        assert np.array_equal(times_written(shape, uncovered(shape, regions)), times_written(shape, regions) == 0)
        expected = {
            (i, j)
            for j in range(len(regions))
            for i in range(j)
            if elements(shape, regions[i]) & elements(shape, regions[j])
        }
        found = list(overlaps(regions))
        assert (set(found), len(found)) == (expected, len(expected))


def many_shards(count: int, by_column: bool) -> tuple[tuple[int, ...], list[Region]]:
    shards = [Region((place * 2, 0), (2, 4)) for place in range(count)]
    shape: tuple[int, ...] = (2 * count, 4)
    if by_column:
        shape, shards = shape[::-1], [Region(offsets[::-1], sizes[::-1]) for offsets, sizes in shards]
    random.Random(4).shuffle(shards)
    return shape, shards


@pytest.mark.parametrize("by_column", [False, True])
def test_one_lost_or_doubled_shard_of_many_is_found(by_column: bool) -> None:
    shape, shards = many_shards(1000, by_column)
    assert uncovered(shape, shards) == []
    assert list(overlaps(shards)) == []
    lost = shards.pop()
    assert uncovered(shape, shards) == [lost]
    assert list(overlaps([*shards, shards[5]])) == [(5, 999)]


@pytest.mark.parametrize("by_column", [False, True])
def test_ten_times_the_shards_take_about_ten_times_as_long(by_column: bool) -> None:
    """Comparing each with each would take a hundred times as long."""

    def best_s(count: int) -> float:
        shape, shards = many_shards(count, by_column)
        timer = timeit.Timer(lambda: (uncovered(shape, shards), list(overlaps(shards))), timer=time.process_time)
        return min(timer.repeat(repeat=5, number=1))

    assert best_s(5000) < 30 * best_s(500)


def test_flat_boxes_are_the_elements_in_order(shape: tuple[int, ...]) -> None:
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    for begin in range(numbers.size + 1):
        for end in range(begin, numbers.size + 1):
            boxes = flat_boxes(shape, begin, end)
            found = [number for box in boxes for number in part(numbers, box).ravel().tolist()]
            assert found == list(range(begin, end))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("gap_bytes", [0, 1, 5, 12, 1000])
def test_runs_are_the_bytes_of_a_box(shape: tuple[int, ...], gap_bytes: int) -> None:
    rng = random.Random(5)
    numbers = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)
    for item_bytes in (1, 2, 4):
        for _ in range(30):
            box = random_box(rng, shape)
            expected: list[tuple[int, int]] = []
            for number in part(numbers, box).ravel().tolist():
                start = number * item_bytes
                if expected and start - sum(expected[-1]) <= gap_bytes:
                    expected[-1] = (expected[-1][0], start + item_bytes - expected[-1][0])
                else:
                    expected.append((start, item_bytes))
            assert runs(shape, box, item_bytes, gap_bytes) == expected


def test_runs_of_a_huge_box_are_not_counted_by_element() -> None:
    rows = whole((100_000, 100_000))
    assert runs((100_000, 200_000), rows, 4, 400_000) == [(0, 100_000 * 800_000 - 400_000)]
    assert len(runs((300, 100_000), Region((0, 5), (300, 50_000)), 4)) == 300


def test_shared_runs_move_each_element_to_its_place(shape: tuple[int, ...]) -> None:
    rng = random.Random(6)
    for _ in range(60):
        source = random_box(rng, shape)
        target_shape = tuple(size + rng.randint(0, 2) for size in source.sizes)
        target = Region(
            tuple(rng.randint(0, t - s) for t, s in zip(target_shape, source.sizes, strict=True)), source.sizes
        )
        numbers = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint16).reshape(shape)
        buffer = bytearray(2 * int(np.prod(target_shape, dtype=np.int64)))
        moved = 0
        for start, landing, length in shared_runs(shape, source, target_shape, target, 2):
            buffer[landing : landing + length] = numbers.tobytes()[start : start + length]
            moved += length
            assert length > 0
        result = np.frombuffer(bytes(buffer), np.uint16).reshape(target_shape)
        assert moved == 2 * source.numel
        assert np.array_equal(part(result, target), part(numbers, source))


def test_shared_runs_are_as_long_as_they_can_be() -> None:
    assert list(shared_runs((4, 3), whole((4, 3)), (4, 3), whole((4, 3)), 2)) == [(0, 0, 24)]
    assert list(shared_runs((4, 3), Region((2, 0), (2, 3)), (2, 3), whole((2, 3)), 2)) == [(12, 0, 12)]
    assert list(shared_runs((4, 3), Region((2, 0), (2, 2)), (2, 2), whole((2, 2)), 2)) == [(12, 0, 4), (18, 4, 4)]
