"""Retries and faults around a tier, each the other's test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tier_conformance import MIB, body, pieces_of

from ckptrt.clock import FakeClock
from ckptrt.errors import ExistsError, NoSpaceError, NotFoundError, StorageError, TransientError
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.tiers.retry import RetryTier


def make(*plan: Fault, attempts: int = 4, timeout_s: float = 20.0) -> tuple[RetryTier, FaultyTier, MemoryTier]:
    memory = MemoryTier("memory://run")
    memory.create("data/x", b"0123")
    faulty = FaultyTier(memory, plan)
    return RetryTier(faulty, attempts, timeout_s, wait_initial_s=0.001, wait_max_s=0.002), faulty, memory


CALLS: list[tuple[str, Callable[[RetryTier], Any], Any]] = [
    ("create", lambda tier: tier.create("new", b"1"), None),
    ("write", lambda tier: tier.write("new", [memoryview(b"1")], 1), None),
    ("read", lambda tier: tier.read("data/x", 1, 2), b"12"),
    ("read_into", lambda tier: tier.read_into("data/x", 0, memoryview(bytearray(4))), None),
    ("read_many", lambda tier: tier.read_many(iter(["data/x"])), {"data/x": b"0123"}),
    ("size", lambda tier: tier.size("data/x"), 4),
    ("list", lambda tier: [entry.name for entry in tier.list("data/")], ["data/x"]),
    ("delete", lambda tier: tier.delete("data/x"), None),
    ("delete_prefix", lambda tier: tier.delete_prefix("data/"), None),
]


# --- retries


@pytest.mark.parametrize(("method", "call", "result"), CALLS, ids=[method for method, _, _ in CALLS])
def test_every_call_is_tried_again_and_says_so_from_the_second_attempt(
    method: str, call: Callable[[RetryTier], Any], result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier, faulty, _ = make(Fault(method=method, times=2))
    assert call(tier) == result
    assert [called for called, _ in faulty.calls].count(method) == 3
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("ckptrt")]
    assert [f"attempt={number}" in line for number, line in zip((2, 3), ours, strict=True)] == [True, True]
    assert all("memory://run" in line and method in line for line in ours)


@pytest.mark.parametrize(("method", "call", "result"), CALLS, ids=[method for method, _, _ in CALLS])
def test_every_call_gives_up_after_the_last_attempt(method: str, call: Callable[[RetryTier], Any], result: Any) -> None:
    tier, faulty, _ = make(Fault(method=method, times=None), attempts=3)
    with pytest.raises(TransientError):
        call(tier)
    assert len(faulty.calls) == 3


@pytest.mark.parametrize("error", [NoSpaceError, NotFoundError, StorageError, ExistsError])
def test_nothing_else_is_tried_again(error: type[StorageError]) -> None:
    tier, faulty, _ = make(Fault(error=error, times=None))
    for call in (lambda: tier.create("new", b"1"), lambda: tier.read("data/x")):
        faulty.calls.clear()
        with pytest.raises(error):
            call()
        assert len(faulty.calls) == 1


def test_no_attempt_begins_after_the_time_is_up() -> None:
    tier, faulty, _ = make(Fault(times=None), attempts=10_000, timeout_s=0.05)
    started_s = time.monotonic()
    with pytest.raises(TransientError):
        tier.read("data/x")
    assert time.monotonic() - started_s < 5
    assert 2 <= len(faulty.calls) < 1000


def test_an_attempt_that_had_arrived_after_all_is_a_success() -> None:
    tier, faulty, memory = make(Fault(method="create", after=True), Fault(method="write", after=True))
    tier.create("commits/x", b"mine")
    assert memory.read("commits/x") == b"mine"
    data = body(2 * MIB + 1)
    tier.write("data/big", list(pieces_of(data)), len(data))
    assert memory.read("data/big") == data
    assert [method for method, _ in faulty.calls].count("create") == 2


@pytest.mark.parametrize("theirs", [b"", b"min", b"mime", b"mine-and-more"])
@pytest.mark.parametrize(
    "call",
    [
        lambda tier: tier.create("commits/x", b"mine"),
        lambda tier: tier.write("commits/x", [memoryview(b"mi"), memoryview(b"ne")], 4),
    ],
    ids=["create", "write"],
)
def test_an_attempt_that_had_not_arrived_may_find_another_winner(
    call: Callable[[RetryTier], None], theirs: bytes
) -> None:
    class Contested(MemoryTier):
        """Between the first attempt, which fails, and the second somebody else takes the name."""

        def create(self, name: str, data: bytes) -> None:
            self._take(name)
            super().create(name, data)

        def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
            self._take(name)
            super().write(name, pieces, size_bytes)

        def _take(self, name: str) -> None:
            if not self.read_many([name]):
                super().create(name, theirs)
                raise TransientError("lost")

    tier = RetryTier(Contested(), 3, wait_initial_s=0.001, wait_max_s=0.001)
    with pytest.raises(ExistsError):
        call(tier)
    assert tier.read("commits/x") == theirs


def test_a_tier_that_knows_its_own_attempts_is_believed() -> None:
    class Knowing(MemoryTier):
        resolves_creates = True
        failed = False

        def create(self, name: str, data: bytes) -> None:
            if not self.failed:
                self.failed = True
                super().create(name, data)  # by somebody else, with equal bytes
                raise TransientError("lost")
            super().create(name, data)

    with pytest.raises(ExistsError):
        RetryTier(Knowing(), 3, wait_initial_s=0.001).create("x", b"1")


def test_a_name_that_was_taken_from_the_start_is_not_read_back() -> None:
    tier, faulty, _ = make()
    with pytest.raises(ExistsError):
        tier.create("data/x", b"0123")
    assert faulty.calls == [("create", "data/x")]


def test_a_write_from_an_iterator_is_tried_once() -> None:
    tier, faulty, _ = make(Fault(method="write"))
    data = body(MIB)
    with pytest.raises(TransientError):
        tier.write("data/new", pieces_of(data), len(data))
    assert faulty.calls == [("write", "data/new")]
    tier.write("data/new", pieces_of(data), len(data))
    assert tier.read("data/new") == data


# --- faults


def test_a_fault_befalls_the_calls_it_names() -> None:
    _, faulty, memory = make()
    faulty.add(Fault(method="create", name="commits/*", first=2, times=2, error=NoSpaceError))
    results = []
    for number in range(5):
        faulty.create(f"other/{number}", b"")
        try:
            faulty.create(f"commits/{number}", b"")
            results.append("ok")
        except NoSpaceError as error:
            results.append("full")
            where = error.what
    assert results == ["ok", "full", "full", "ok", "ok"]
    assert "memory://run/commits/2" in where
    assert [entry.name for entry in memory.list("commits/")] == ["commits/0", "commits/3", "commits/4"]
    assert ("create", "commits/1") in faulty.calls


def test_a_fault_may_go_on_until_it_is_cleared() -> None:
    _, faulty, _ = make(Fault(method="read*", times=None))
    for call in (
        lambda: faulty.read("data/x"),
        lambda: faulty.read_many(["a", "data/x"]),
        lambda: faulty.read("data/x"),
    ):
        with pytest.raises(TransientError):
            call()
    assert faulty.size("data/x") == 4
    faulty.clear()
    assert faulty.read("data/x") == b"0123"


def test_a_delay_passes_by_the_clock_that_was_given() -> None:
    clock = FakeClock()
    faulty = FaultyTier(MemoryTier(), [Fault(method="create", delay_s=30.0, error=None)], clock=clock)
    faulty.create("x", b"1")
    faulty.create("y", b"1")
    assert clock.monotonic_s() == 30.0
    assert faulty.read_many(["x", "y"]).keys() == {"x", "y"}


def test_a_lost_answer_comes_after_the_call_was_made() -> None:
    _, faulty, memory = make(Fault(method="create", after=True), Fault(method="write"))
    with pytest.raises(TransientError):
        faulty.create("made", b"1")
    with pytest.raises(TransientError):
        faulty.write("not made", [memoryview(b"1")], 1)
    assert memory.read_many(["made", "not made"]) == {"made": b"1"}
