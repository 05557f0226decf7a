"""What every CoordStore must do: the contract of ckptrt.agents.coord.CoordStore as tests.

A subclass gives `connect`, a fixture with a function that makes one more client of the same store, and `compact`, one
that makes the store forget the revisions before a given one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptrt.agents.coord import CoordStore, KeyValue, Watch, WatchEvent
from ckptrt.errors import CompactedError, CoordError, LeaseGoneError

__all__ = ["CoordStoreConformance", "collect"]

Connect = Callable[[], CoordStore]


def collect(watch: Watch, count: int, timeout_s: float = 10.0) -> list[WatchEvent]:
    """The next events, at least count of them, or the test fails."""
    events: list[WatchEvent] = []
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        events += watch.poll(deadline_s - time.monotonic())
        if len(events) >= count:
            return events
    raise AssertionError(f"{len(events)} events of {count}: {events}")


class CoordStoreConformance:
    @pytest.fixture
    def store(self, connect: Connect) -> CoordStore:
        return connect()

    # Keys.

    def test_a_missing_key_is_none(self, store: CoordStore, prefix: str) -> None:
        assert store.get(prefix + "nothing") is None

    @pytest.mark.parametrize("value", ["", "plain", "zwei\nZeilen \u00e4\u20ac\U0001f600", "\x00\x7f", "a" * 100_000])
    def test_what_is_put_is_what_is_got(self, store: CoordStore, prefix: str, value: str) -> None:
        revision = store.put(prefix + "k", value)
        expected = KeyValue(key=prefix + "k", value=value, mod_revision=revision, create_revision=revision)
        assert store.get(prefix + "k") == expected

    def test_keys_may_hold_any_character(self, store: CoordStore, prefix: str) -> None:
        key = prefix + "sp ace/\u00fc/\U0001f600"
        store.put(key, "v")
        assert [item.key for item in store.get_prefix(prefix)[0]] == [key]

    def test_a_second_put_keeps_the_create_revision(self, store: CoordStore, prefix: str) -> None:
        first, second = store.put(prefix + "k", "1"), store.put(prefix + "k", "2")
        item = store.get(prefix + "k")
        assert second > first
        assert item == KeyValue(key=prefix + "k", value="2", mod_revision=second, create_revision=first)

    def test_a_prefix_is_listed_in_order_and_without_its_neighbours(self, store: CoordStore, prefix: str) -> None:
        inside = prefix + "p/"
        for key in (inside + "b", inside + "a", inside + "\u00fc", prefix + "p", prefix + "p0", prefix + "o"):
            last = store.put(key, key)
        items, revision = store.get_prefix(inside)
        assert [item.key for item in items] == [inside + "a", inside + "b", inside + "\u00fc"]
        assert [item.value for item in items] == [item.key for item in items]
        assert revision >= last

    def test_an_empty_prefix_has_a_revision_to_watch_from(self, store: CoordStore, prefix: str) -> None:
        last = store.put(prefix + "k", "v")
        assert store.get_prefix(prefix + "none/") == ([], last)

    def test_every_key_is_under_the_empty_prefix(self, store: CoordStore, prefix: str) -> None:
        store.put(prefix + "k", "v")
        assert prefix + "k" in [item.key for item in store.get_prefix("")[0]]

    def test_clients_see_each_others_writes(self, connect: Connect, prefix: str) -> None:
        one, other = connect(), connect()
        revision = one.put(prefix + "k", "v")
        item = other.get(prefix + "k")
        assert item is not None
        assert (item.value, item.mod_revision) == ("v", revision)

    # Conditional writes.

    def test_create_takes_a_free_key(self, store: CoordStore, prefix: str) -> None:
        revision = store.create(prefix + "k", "mine")
        item = store.get(prefix + "k")
        assert item is not None
        assert revision == item.mod_revision == item.create_revision

    def test_create_leaves_a_taken_key(self, store: CoordStore, prefix: str) -> None:
        store.put(prefix + "k", "theirs")
        assert store.create(prefix + "k", "mine") is None
        item = store.get(prefix + "k")
        assert item is not None
        assert item.value == "theirs"

    def test_a_deleted_key_can_be_created_again(self, store: CoordStore, prefix: str) -> None:
        first = store.create(prefix + "k", "1")
        assert store.delete(prefix + "k")
        second = store.create(prefix + "k", "2")
        item = store.get(prefix + "k")
        assert first is not None
        assert second is not None
        assert item is not None
        assert item.create_revision == second > first

    def test_swap_needs_the_revision_of_the_last_write(self, store: CoordStore, prefix: str) -> None:
        first = store.put(prefix + "k", "1")
        second = store.compare_and_swap(prefix + "k", "2", first)
        assert second is not None
        assert second > first
        assert store.compare_and_swap(prefix + "k", "late", first) is None
        item = store.get(prefix + "k")
        assert item is not None
        assert (item.value, item.mod_revision) == ("2", second)

    def test_swap_of_revision_zero_needs_a_free_key(self, store: CoordStore, prefix: str) -> None:
        assert store.compare_and_swap(prefix + "k", "1", 0) is not None
        assert store.compare_and_swap(prefix + "k", "2", 0) is None

    def test_swap_does_not_bring_a_deleted_key_back(self, store: CoordStore, prefix: str) -> None:
        revision = store.put(prefix + "k", "1")
        store.delete(prefix + "k")
        assert store.compare_and_swap(prefix + "k", "2", revision) is None
        assert store.get(prefix + "k") is None

    def test_delete_says_whether_there_was_anything(self, store: CoordStore, prefix: str) -> None:
        store.put(prefix + "k", "v")
        assert store.delete(prefix + "k") is True
        assert store.delete(prefix + "k") is False
        assert store.get(prefix + "k") is None

    def test_delete_of_a_revision_needs_that_revision(self, store: CoordStore, prefix: str) -> None:
        first, second = store.put(prefix + "k", "1"), store.put(prefix + "k", "2")
        assert store.delete(prefix + "k", first) is False
        assert store.get(prefix + "k") is not None
        assert store.delete(prefix + "k", second) is True
        assert store.delete(prefix + "k", second) is False
        assert store.delete(prefix + "k", 0) is False

    def test_of_racing_creates_one_wins(self, connect: Connect, prefix: str) -> None:
        stores = [connect() for _ in range(3)]
        start = threading.Barrier(9)

        def race(number: int) -> int | None:
            start.wait(10)
            return stores[number % 3].create(prefix + "k", str(number))

        with ThreadPoolExecutor(9) as pool:
            revisions = list(pool.map(race, range(9)))
        (winner,) = [number for number, revision in enumerate(revisions) if revision is not None]
        item = stores[0].get(prefix + "k")
        assert item is not None
        assert (item.value, item.mod_revision) == (str(winner), revisions[winner])

    def test_no_swap_is_lost(self, store: CoordStore, prefix: str) -> None:
        store.put(prefix + "n", "0")

        def count() -> None:
            done = 0
            while done < 10:
                item = store.get(prefix + "n")
                assert item is not None
                if store.compare_and_swap(prefix + "n", str(int(item.value) + 1), item.mod_revision):
                    done += 1

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(count) for _ in range(4)]:
                future.result()
        item = store.get(prefix + "n")
        assert item is not None
        assert item.value == "40"

    # Leases.

    def test_a_lease_lives_at_least_as_long_as_asked(self, store: CoordStore) -> None:
        lease_id, ttl_s = store.grant(29.5)
        assert lease_id > 0
        assert ttl_s >= 30
        assert store.keepalive(lease_id) == ttl_s
        assert store.grant(30)[0] != lease_id
        store.revoke(lease_id)

    def test_keys_name_their_lease(self, store: CoordStore, prefix: str) -> None:
        lease_id, _ = store.grant(30)
        store.put(prefix + "p", "v", lease_id)
        store.create(prefix + "c", "v", lease_id)
        free = store.put(prefix + "s", "v")
        store.compare_and_swap(prefix + "s", "w", free, lease_id)
        assert [item.lease_id for item in store.get_prefix(prefix)[0]] == [lease_id] * 3

    def test_revoking_deletes_the_keys_of_the_lease_alone(self, store: CoordStore, prefix: str) -> None:
        lease_id, _ = store.grant(30)
        store.put(prefix + "with", "v", lease_id)
        store.put(prefix + "freed", "v", lease_id)
        store.put(prefix + "freed", "w")
        store.put(prefix + "without", "v")
        store.revoke(lease_id)
        assert [item.key for item in store.get_prefix(prefix)[0]] == [prefix + "freed", prefix + "without"]

    def test_a_dead_lease_is_told(self, store: CoordStore, prefix: str) -> None:
        lease_id, _ = store.grant(30)
        revision = store.put(prefix + "k", "v")
        store.revoke(lease_id)
        store.revoke(lease_id)
        assert store.keepalive(lease_id) == 0
        with pytest.raises(LeaseGoneError):
            store.put(prefix + "k", "w", lease_id)
        with pytest.raises(LeaseGoneError):
            store.create(prefix + "new", "w", lease_id)
        with pytest.raises(LeaseGoneError):
            store.compare_and_swap(prefix + "k", "w", revision, lease_id)
        assert [item.value for item in store.get_prefix(prefix)[0]] == ["v"]

    def test_a_lease_that_is_not_renewed_takes_its_keys(
        self, store: CoordStore, prefix: str, let_lease_end: Callable[[float], None]
    ) -> None:
        lease_id, ttl_s = store.grant(1)
        kept_id, _ = store.grant(60)
        revision = store.put(prefix + "a", "v", lease_id)
        store.put(prefix + "b", "v", lease_id)
        store.put(prefix + "kept", "v", kept_id)
        let_lease_end(ttl_s)
        with store.watch(prefix, revision) as watch:
            events = collect(watch, 5)
        assert [(event.kind, event.key) for event in events[3:]] == [("delete", prefix + "a"), ("delete", prefix + "b")]
        assert events[3].mod_revision == events[4].mod_revision
        assert store.keepalive(lease_id) == 0
        store.revoke(kept_id)

    # Watches.

    def test_a_watch_sees_each_change_once_and_in_order(self, store: CoordStore, prefix: str) -> None:
        before = store.put(prefix + "a", "0")
        with store.watch(prefix, before + 1) as watch:
            assert watch.poll(0.05) == []
            revisions = [store.put(prefix + "a", "1"), store.put(prefix + "b", "")]
            store.put("/elsewhere" + prefix, "unseen")
            store.delete(prefix + "a")
            events = collect(watch, 3)
            assert watch.poll(0.05) == []
        assert [(e.kind, e.key, e.value) for e in events] == [
            ("put", prefix + "a", "1"), ("put", prefix + "b", ""), ("delete", prefix + "a", ""),
        ]  # fmt: skip
        assert [e.mod_revision for e in events[:2]] == revisions
        assert events[2].mod_revision > revisions[1]

    def test_a_watch_starts_in_the_past(self, store: CoordStore, prefix: str) -> None:
        first = store.put(prefix + "k", "1")
        second = store.put(prefix + "k", "2")
        with store.watch(prefix, first) as watch:
            assert [event.value for event in collect(watch, 2)] == ["1", "2"]
        with store.watch(prefix, second) as watch:
            assert [event.value for event in collect(watch, 1)] == ["2"]

    def test_a_list_and_a_watch_after_it_miss_nothing(self, connect: Connect, prefix: str) -> None:
        writer, reader = connect(), connect()
        done = threading.Event()

        def write() -> None:
            for number in range(60):
                writer.put(f"{prefix}{number:02d}", "v")
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            items, revision = reader.get_prefix(prefix)
            while not items and not done.is_set():
                items, revision = reader.get_prefix(prefix)
            with reader.watch(prefix, revision + 1) as watch:
                events = collect(watch, 60 - len(items)) if len(items) < 60 else []
            writing.result()
        assert [i.key for i in items] + [e.key for e in events] == [f"{prefix}{number:02d}" for number in range(60)]

    def test_changes_of_one_revision_come_together(self, store: CoordStore, prefix: str) -> None:
        lease_id, _ = store.grant(30)
        for name in "abc":
            last = store.put(prefix + name, "v", lease_id)
        with store.watch(prefix, last + 1) as watch:
            store.revoke(lease_id)
            events = watch.poll(10.0)
        assert [event.key for event in events] == [prefix + "a", prefix + "b", prefix + "c"]
        assert len({event.mod_revision for event in events}) == 1

    def test_a_watch_goes_on_where_another_ended(self, store: CoordStore, prefix: str) -> None:
        first = store.put(prefix + "k", "1")
        with store.watch(prefix, first) as watch:
            assert len(collect(watch, 1)) == 1
        store.put(prefix + "k", "2")
        with store.watch(prefix, watch.next_revision) as successor:
            assert [event.value for event in collect(successor, 1)] == ["2"]

    def test_a_watch_of_what_was_compacted_away_says_so(
        self, store: CoordStore, prefix: str, compact: Callable[[int], None]
    ) -> None:
        first = store.put(prefix + "k", "1")
        last = [store.put(prefix + "k", str(number)) for number in range(2, 5)][-1]
        compact(last)
        with store.watch(prefix, first) as watch, pytest.raises(CompactedError) as caught:
            collect(watch, 1)
        assert caught.value.compact_revision == last
        with store.watch(prefix, last) as watch:
            assert [event.value for event in collect(watch, 1)] == ["4"]

    def test_a_watch_beyond_the_end_of_history_says_so(self, store: CoordStore, prefix: str) -> None:
        last = store.put(prefix + "k", "1")
        # What a client knows that has seen more than the store has: a store that has lost its data.
        with store.watch(prefix, last + 100) as watch, pytest.raises(CompactedError):
            collect(watch, 1)

    def test_a_watch_does_not_start_from_now(self, store: CoordStore, prefix: str) -> None:
        with pytest.raises(ValueError, match="revision"):
            store.watch(prefix, 0)

    def test_iteration_ends_when_nothing_happens(self, store: CoordStore, prefix: str) -> None:
        first = store.put(prefix + "k", "1")
        store.put(prefix + "k", "2")
        with store.watch(prefix, first, idle_timeout_s=0.3) as watch:
            assert [event.value for event in watch] == ["1", "2"]

    def test_closing_a_watch_ends_a_poll_in_another_thread(self, store: CoordStore, prefix: str) -> None:
        first = store.put(prefix + "k", "1")
        watch = store.watch(prefix, first)
        reading = threading.Event()

        def read() -> Iterator[WatchEvent]:
            for event in watch:
                reading.set()
                yield event

        with ThreadPoolExecutor(1) as pool:
            events = pool.submit(lambda: list(read()))
            assert reading.wait(10)
            watch.close()
            assert [event.value for event in events.result(10)] == ["1"]
        assert watch.closed
        assert watch.poll(10.0) == []

    def test_a_closed_client_refuses_and_ends_its_watches(self, connect: Connect, prefix: str) -> None:
        store = connect()
        first = store.put(prefix + "k", "1")
        watch = store.watch(prefix, first)
        assert len(collect(watch, 1)) == 1
        store.close()
        store.close()
        assert watch.poll(10.0) == []
        with pytest.raises(CoordError, match="closed"):
            store.get(prefix + "k")
        with pytest.raises(CoordError, match="closed"):
            store.put(prefix + "k", "2")
