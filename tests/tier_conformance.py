"""What every tier must do, sentence by sentence of the protocol in ckptrt/storage/tiers/base.py.

Subclass TierConformance and give it a fixture `tier`: a fresh, empty tier, closed afterwards.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ckptrt.errors import CorruptError, Error, ExistsError, NotFoundError, StorageError, UsageError
from ckptrt.storage.tiers.base import Entry, Tier

MIB = 1 << 20
SIZES = [0, 1, 511, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 9 * MIB]
BAD_NAMES = [
    "",
    "/",
    "/etc/passwd",
    ".",
    "..",
    "../x",
    "a/../b",
    "a/./b",
    "a//b",
    "a/",
    "a/..",
    "a\0b",
    "a\nb",
    "\ud800",
]
BAD_PREFIXES = ["/", "a", "../", "a/../", "a//", "/a/", "./", "a\0/"]

_POOL = random.Random(7).randbytes(MIB)


def body(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ at every place where a piece or a part could be swapped, dropped or doubled."""
    blocks = (index.to_bytes(8, "big") + seed.to_bytes(8, "big") + _POOL[16:] for index in range(-(-size_bytes // MIB)))
    return b"".join(blocks)[:size_bytes]


def pieces_of(data: bytes, piece_bytes: int = MIB) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[at : at + piece_bytes] for at in range(0, len(data), piece_bytes))


def outcomes(calls: list[Callable[[], None]]) -> list[Error | None]:
    """Run all calls at the same moment, and give the error of each, or None."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> Error | None:
        barrier.wait()
        try:
            call()
        except Error as error:
            return error
        return None

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class TierConformance:
    """The contract."""

    racers = 16

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        raise NotImplementedError

    # --- create and write

    def test_is_a_tier(self, tier: Tier) -> None:
        assert isinstance(tier, Tier)
        assert "://" in tier.url and not tier.url.endswith("/")

    def test_create_then_read(self, tier: Tier) -> None:
        tier.create("commits/one.json", b"{}")
        assert tier.read("commits/one.json") == b"{}"
        assert tier.size("commits/one.json") == 2

    def test_create_takes_no_bytes_at_all(self, tier: Tier) -> None:
        tier.create("empty", b"")
        assert tier.read("empty") == b""
        with pytest.raises(ExistsError):
            tier.create("empty", b"")

    @pytest.mark.parametrize("again", [b"first", b"second"])
    def test_create_never_replaces_even_by_equal_bytes(self, tier: Tier, again: bytes) -> None:
        tier.create("fences/x", b"first")
        with pytest.raises(ExistsError) as caught:
            tier.create("fences/x", again)
        assert tier.read("fences/x") == b"first"
        self._says_where(tier, caught.value, "fences/x")

    @pytest.mark.parametrize("equal", [True, False])
    def test_of_concurrent_creators_one_wins(self, tier: Tier, equal: bool) -> None:
        bodies = [b"same" if equal else b"writer %d" % number for number in range(self.racers)]
        results = outcomes([partial(tier.create, "commits/race", data) for data in bodies])
        assert results.count(None) == 1
        assert all(isinstance(result, ExistsError) for result in results if result is not None)
        assert tier.read("commits/race") == bodies[results.index(None)]

    @pytest.mark.parametrize("size_bytes", [100, 8 * MIB + 3])
    def test_of_concurrent_writers_one_wins(self, tier: Tier, size_bytes: int) -> None:
        bodies = [body(size_bytes, seed) for seed in range(3)]
        results = outcomes([partial(tier.write, "data/race", pieces_of(data), size_bytes) for data in bodies])
        assert results.count(None) == 1
        assert all(isinstance(result, ExistsError) for result in results if result is not None)
        assert tier.read("data/race") == bodies[results.index(None)]
        assert [entry.name for entry in tier.list("data/")] == ["data/race"]

    @pytest.mark.parametrize("size_bytes", SIZES)
    def test_write_then_read_any_size(self, tier: Tier, size_bytes: int) -> None:
        data = body(size_bytes)
        tier.write("data/s1/shard", pieces_of(data), size_bytes)
        assert tier.size("data/s1/shard") == size_bytes
        assert tier.read("data/s1/shard") == data

    def test_write_takes_pieces_at_any_address(self, tier: Tier) -> None:
        data = body(2 * MIB + 777)
        shifted = memoryview(b"x" + data)[1:]
        tier.write("data/odd", (shifted[at : at + MIB] for at in range(0, len(data), MIB)), len(data))
        assert tier.read("data/odd") == data

    def test_write_takes_one_piece_of_everything(self, tier: Tier) -> None:
        data = body(2 * MIB + 5)
        tier.write("data/whole", [memoryview(data)], len(data))
        assert tier.read("data/whole") == data

    def test_a_piece_is_done_with_when_the_next_is_asked_for(self, tier: Tier) -> None:
        data = body(9 * MIB)
        buffer = bytearray(MIB)

        def one_buffer() -> Iterator[memoryview]:
            for at in range(0, len(data), MIB):
                buffer[:] = data[at : at + MIB]
                yield memoryview(buffer)
                buffer[:] = bytes(MIB)

        tier.write("data/reused", one_buffer(), len(data))
        assert tier.read("data/reused") == data
        buffer.clear()  # a view still held would forbid this

    def test_write_never_replaces(self, tier: Tier) -> None:
        tier.create("data/x", b"first")
        for size_bytes in (6, 8 * MIB + 1):
            with pytest.raises(ExistsError) as caught:
                tier.write("data/x", pieces_of(bytes(size_bytes)), size_bytes)
            self._says_where(tier, caught.value, "data/x")
        assert tier.read("data/x") == b"first"

    @pytest.mark.parametrize("promised", [0, 1, 99, 101, MIB, 9 * MIB])
    def test_a_wrong_size_is_an_error_and_leaves_nothing(self, tier: Tier, promised: int) -> None:
        with pytest.raises(UsageError) as caught:
            tier.write("data/x", [memoryview(bytes(100))], promised)
        self._says_where(tier, caught.value, "data/x")
        self._has_nothing(tier, "data/x")

    def test_too_many_pieces_are_stopped_at_the_promised_size(self, tier: Tier) -> None:
        asked = iter(range(20))
        with pytest.raises(UsageError):
            tier.write("data/x", (memoryview(bytes(MIB)) for _ in asked), 2 * MIB)
        assert next(asked) <= 3
        self._has_nothing(tier, "data/x")

    def test_an_error_of_the_callers_pieces_goes_through_and_leaves_nothing(self, tier: Tier) -> None:
        def failing() -> Iterator[memoryview]:
            yield memoryview(bytes(9 * MIB))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            tier.write("data/x", failing(), 10 * MIB)
        self._has_nothing(tier, "data/x")
        tier.write("data/x", [memoryview(b"now")], 3)
        assert tier.read("data/x") == b"now"

    def test_nobody_sees_a_part_from_between_the_pieces(self, tier: Tier) -> None:
        data = body(9 * MIB + 1)

        def looking() -> Iterator[memoryview]:
            for piece in pieces_of(data):
                yield piece
                self._has_nothing(tier, "data/x")

        tier.write("data/x", looking(), len(data))
        assert tier.read("data/x") == data

    def test_nobody_sees_a_part_from_another_thread(self, tier: Tier) -> None:
        data = body(3 * MIB)
        done = threading.Event()
        seen: list[object] = []

        def watch() -> None:
            while True:
                last = done.is_set()
                seen.append(tier.read_many(["data/x"]).get("data/x"))
                if last:
                    return
                done.wait(0.002)

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                tier.write("data/x", pieces_of(data), len(data))
            finally:
                done.set()
            watching.result()
        assert all(found is None or found == data for found in seen)
        assert seen[-1] == data

    # --- read

    @pytest.mark.parametrize(("start", "size_bytes"), [(0, 5), (3, 4), (0, 0), (9, 1), (10, 0), (4, None), (10, None)])
    def test_read_a_range(self, tier: Tier, start: int, size_bytes: int | None) -> None:
        tier.create("x", b"0123456789")
        end = 10 if size_bytes is None else start + size_bytes
        assert tier.read("x", start, size_bytes) == b"0123456789"[start:end]

    @pytest.mark.parametrize(("start", "size_bytes"), [(0, 11), (9, 2), (10, 1), (50, 1), (11, None), (11, 0)])
    def test_reading_past_the_end_is_corrupt_and_says_the_offset(
        self, tier: Tier, start: int, size_bytes: int | None
    ) -> None:
        tier.create("data/x", b"0123456789")
        with pytest.raises(CorruptError, match="offset 10") as caught:
            tier.read("data/x", start, size_bytes)
        self._says_where(tier, caught.value, "data/x")

    @pytest.mark.parametrize(("start", "size_bytes"), [(-1, None), (0, -1)])
    def test_a_range_that_no_object_has_is_refused(self, tier: Tier, start: int, size_bytes: int | None) -> None:
        tier.create("x", b"0123456789")
        with pytest.raises(UsageError):
            tier.read("x", start, size_bytes)

    @pytest.mark.parametrize(("start", "size_bytes"), [(0, 0), (3, 100), (5, 9 * MIB)])
    def test_read_into_fills_just_the_view(self, tier: Tier, start: int, size_bytes: int) -> None:
        data = body(start + size_bytes + 3)
        tier.write("x", pieces_of(data), len(data))
        out = bytearray(b"." * (size_bytes + 2))
        tier.read_into("x", start, memoryview(out)[1:-1])
        assert out == b"." + data[start : start + size_bytes] + b"."

    def test_read_into_takes_views_of_other_types(self, tier: Tier) -> None:
        tier.create("x", bytes(range(16)))
        out = bytearray(16)
        tier.read_into("x", 0, memoryview(out).cast("I"))
        assert out == bytes(range(16))

    @pytest.mark.parametrize("size_bytes", [11, 17 * MIB])
    def test_read_into_past_the_end_is_corrupt(self, tier: Tier, size_bytes: int) -> None:
        tier.create("data/x", b"0123456789")
        with pytest.raises(CorruptError, match="offset 10") as caught:
            tier.read_into("data/x", 0, memoryview(bytearray(size_bytes)))
        self._says_where(tier, caught.value, "data/x")

    def test_what_is_not_there_is_not_found(self, tier: Tier) -> None:
        tier.create("data/s1/x", b"")
        for name in ("data/s1/y", "data/s1", "nothing/at/all"):  # a folder's name is no object either
            for call in (
                lambda name=name: tier.read(name),
                lambda name=name: tier.read(name, 0, 1),
                lambda name=name: tier.read(name, 0, 0),
                lambda name=name: tier.read_into(name, 0, memoryview(bytearray(1))),
                lambda name=name: tier.read_into(name, 0, memoryview(bytearray())),
                lambda name=name: tier.size(name),
            ):
                with pytest.raises(NotFoundError) as caught:
                    call()
                self._says_where(tier, caught.value, name)

    def test_read_many_leaves_out_what_is_missing(self, tier: Tier) -> None:
        wanted = {f"commits/{number}": b"%d" % number for number in range(12)}
        for name, data in wanted.items():
            tier.create(name, data)
        names = [*wanted, "commits/missing", "none/x", "commits", "commits/3"]
        assert tier.read_many(iter(names)) == wanted
        assert tier.read_many([]) == {}

    # --- list

    def test_list_shows_what_is_directly_below(self, tier: Tier) -> None:
        for name in ("run.json", "data/s2/r0", "data/s10/r0", "data/s10/deep/er", "data/x", "data.json"):
            tier.create(name, b"12345")
        tier.create("data/empty", b"")
        assert self._names(tier.list("")) == ["data.json", "data/", "run.json"]
        assert self._names(tier.list("data/")) == ["data/empty", "data/s10/", "data/s2/", "data/x"]
        assert self._names(tier.list("data/s10/")) == ["data/s10/deep/", "data/s10/r0"]

    def test_list_says_size_and_time_of_objects_only(self, tier: Tier) -> None:
        before_s = time.time()
        tier.create("data/x", b"12345")
        tier.create("data/folder/y", b"1")
        folder, item = tier.list("data/")
        assert folder == Entry(name="data/folder/") and folder.is_folder
        assert item.size_bytes == 5 and not item.is_folder
        assert abs(item.modified_s - before_s) < 60

    def test_list_of_nothing_is_empty(self, tier: Tier) -> None:
        assert tier.list("") == []
        tier.create("x", b"")
        assert tier.list("none/") == []
        assert tier.list("x/") == []
        assert tier.list("none/at/all/") == []

    def test_list_is_sorted_by_name(self, tier: Tier) -> None:
        names = ["b", "a", "B", "a-", "a.b", "a0", "aa", "ä", "Z", "\U0001f600", "\uffee", "_"]
        for name in names:
            tier.create(f"d/{name}", b"")
        tier.create("d/a+/x", b"")
        assert self._names(tier.list("d/")) == sorted([f"d/{name}" for name in names] + ["d/a+/"])

    # --- delete

    def test_delete_may_be_repeated(self, tier: Tier) -> None:
        tier.create("commits/x", b"1")
        tier.create("commits/y", b"2")
        for _ in range(2):
            tier.delete("commits/x")
            assert self._names(tier.list("commits/")) == ["commits/y"]
        tier.delete("never/was")
        tier.create("commits/x", b"new")
        assert tier.read("commits/x") == b"new"

    def test_delete_of_a_folders_name_deletes_nothing(self, tier: Tier) -> None:
        tier.create("data/s1/x", b"1")
        tier.delete("data/s1")
        tier.delete("data/s1/x/y")
        assert tier.read("data/s1/x") == b"1"

    def test_delete_prefix_removes_all_below_and_nothing_beside(self, tier: Tier) -> None:
        for name in ("data/s1/a", "data/s1/b/c/d", "data/s1/b/e", "data/s10/a", "data/s1.x", "commits/s1"):
            tier.create(name, b"1")
        for _ in range(2):
            tier.delete_prefix("data/s1/")
            assert self._names(tier.list("data/")) == ["data/s1.x", "data/s10/"]
            assert tier.list("data/s1/") == []
        tier.delete_prefix("never/was/")
        assert tier.read_many(["data/s10/a", "data/s1.x", "commits/s1"]).keys() == {
            "data/s10/a", "data/s1.x", "commits/s1",
        }  # fmt: skip
        tier.create("data/s1/a", b"again")
        assert tier.read("data/s1/a") == b"again"

    def test_delete_prefix_of_everything_is_refused(self, tier: Tier) -> None:
        tier.create("x", b"1")
        with pytest.raises(UsageError):
            tier.delete_prefix("")
        assert tier.read("x") == b"1"

    # --- names

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_no_call_takes_a_bad_name(self, tier: Tier, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: tier.create(name, b""),
            lambda: tier.write(name, [memoryview(b"x")], 1),
            lambda: tier.read(name),
            lambda: tier.read(name, 1, 1),
            lambda: tier.read_into(name, 0, memoryview(bytearray(1))),
            lambda: tier.read_many([name]),
            lambda: tier.size(name),
            lambda: tier.delete(name),
        ]
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            assert tier.url in str(caught.value)
        assert tier.list("") == []

    @pytest.mark.parametrize("prefix", BAD_PREFIXES)
    def test_no_call_takes_a_bad_prefix(self, tier: Tier, prefix: str) -> None:
        for call in (tier.list, tier.delete_prefix):
            with pytest.raises(UsageError) as caught:
                call(prefix)
            assert tier.url in str(caught.value)

    @pytest.mark.parametrize(
        "name", ["a b", "ünï/cødé", "x" * 200, "a.b-c_d~e", "a%20b", "a+b&c=d", "a#b?c", "*[x]", "..x"]
    )
    def test_good_names_are_kept_as_they_are(self, tier: Tier, name: str) -> None:
        tier.create(f"d/{name}", b"1")
        tier.create("d/other", b"2")
        assert tier.read(f"d/{name}") == b"1"
        assert tier.read_many([f"d/{name}"]) == {f"d/{name}": b"1"}
        first = f"d/{name.split('/')[0]}" + ("/" if "/" in name else "")
        assert self._names(tier.list("d/")) == sorted([first, "d/other"])
        tier.delete(f"d/{name}")
        assert tier.read_many([f"d/{name}", "d/other"]) == {"d/other": b"2"}

    # --- threads

    def test_threads_may_share_a_tier(self, tier: Tier) -> None:
        numbers = itertools.count()

        def work() -> None:
            for _ in range(5):
                number = next(numbers)
                name, data = f"t/{number % 3}/{number}", b"%d" % number * 100
                tier.create(name, data)
                assert tier.read(name) == data
                out = bytearray(50)
                tier.read_into(name, 10, memoryview(out))
                assert out == data[10:60]
                assert name in {entry.name for entry in tier.list(f"t/{number % 3}/")}
                if number % 2:
                    tier.delete(name)

        assert outcomes([work] * 6) == [None] * 6
        found = tier.read_many([f"t/{number % 3}/{number}" for number in range(30)])
        assert sorted(int(name.rpartition("/")[2]) for name in found) == list(range(0, 30, 2))

    # --- helpers

    @staticmethod
    def _names(entries: list[Entry]) -> list[str]:
        return [entry.name for entry in entries]

    @staticmethod
    def _says_where(tier: Tier, error: Error, name: str) -> None:
        assert tier.url in error.what and name in error.what
        assert error.hint

    @staticmethod
    def _has_nothing(tier: Tier, name: str) -> None:
        with pytest.raises(StorageError) as caught:
            tier.size(name)
        assert isinstance(caught.value, NotFoundError)
        assert tier.read_many([name]) == {}
        folder = name.rpartition("/")[0] + "/"
        assert name not in {entry.name for entry in tier.list(folder)}

    # --- what others left

    def test_settle_and_sweep_touch_no_object(self, tier: Tier) -> None:
        tier.create("a/x", b"1")
        for prefix in ("", "a/", "nothing/"):
            tier.settle(prefix)
            assert list(tier.sweep(prefix, 1e12, dry_run=True)) == list(tier.sweep(prefix, 1e12)) == []
        assert tier.read("a/x") == b"1"
