"""Receipts become commits: one coordinator, ranks on several nodes, steps that are overtaken, fences and lost ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support_persister import FakeRank, make_run
from test_persister import start  # noqa: F401 a fixture

from ckptrt.clock import FakeClock
from ckptrt.errors import Error, FencedError, NoSpaceError, PersistError, StorageError
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import Catalog, open_catalog
from ckptrt.storage.gather import Attempt, Notice, RunWriter
from ckptrt.storage.layout import receipt_name
from ckptrt.storage.owner import this_owner
from ckptrt.storage.persister import write_shard
from ckptrt.storage.records import ReceiptRecord, seal, unseal
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.tiers.memory import MemoryTier


class Node:
    """One node's writer, with its ranks, on a tier that it shares with others."""

    def __init__(self, tier: Any, ranks: list[int], world_size: int, clock: Any = None) -> None:
        self.notices: list[Notice] = []
        self.heard = threading.Condition()
        attempt = Attempt(
            url="memory://run", incarnation=1, world_size=world_size, nonce="0a", made_by="tests", keep=None
        )
        self.tier = tier
        self.num_after = 0
        self.writer = RunWriter(attempt, tier, self.note, self.after, clock)
        self.ranks = {rank: FakeRank(rank, world_size, rows=3) for rank in ranks}
        for rank in ranks:
            self.writer.join_rank(rank, 1000 + rank)

    def note(self, notice: Notice) -> None:
        with self.heard:
            self.notices.append(notice)
            self.heard.notify()

    def after(self, catalog: Catalog) -> None:
        with self.heard:
            self.num_after += 1
            self.heard.notify()

    def expect(self, step: int) -> None:
        for rank in self.ranks:
            assert self.writer.expect(step, rank)

    def write(self, step: int, *ranks: int) -> None:
        """What a persister does for some ranks of this node."""
        for rank in ranks or tuple(self.ranks):
            fake = self.ranks[rank]
            fake.stage(0, step)
            header = fake.view.header(0)
            assert header is not None
            image = fake.view.image(0, header.image_bytes)
            folder = self.writer.attempt.folder(step)
            receipt = write_shard(self.tier, folder, header, pack(rank, fake.view.meta(0, header), image, None))
            image.release()
            self.writer.add(step, rank, receipt)

    def hear(self, step: int) -> Error | None:
        """What became of a step; waits for it."""
        with self.heard:
            assert self.heard.wait_for(lambda: any(n.step == step for n in self.notices), 20), f"step {step}: no word"
            return next(n.error for n in self.notices if n.step == step)

    def leave(self) -> None:
        for rank in self.ranks:
            self.writer.leave_rank(rank, 1000 + rank)

    def close(self) -> None:
        self.leave()
        self.writer.close()
        for fake in self.ranks.values():
            fake.close()


@pytest.fixture
def tier() -> Any:
    tier = FaultyTier(MemoryTier())
    catalog = Catalog(tier)
    catalog.create_run()
    catalog.write_fence(1, None, 3, this_owner())
    return tier


@pytest.fixture
def node(tier) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(ranks: list[int], **kwargs: Any) -> Node:
        made.append(Node(tier, ranks, 3, **kwargs))
        return made[-1]

    yield make
    tier.clear()
    for one in made:
        if isinstance(one.writer._clock, FakeClock):
            one.writer._clock.advance(1000)
        else:
            one.writer._clock = FakeClock(1e9)
        one.close()


def committed(tier: Any) -> list[int]:
    return [commit.step for commit in Catalog(tier).commits()]


def test_one_node_commits_when_its_last_rank_has_written(node, tier):
    one = node([0, 1, 2])
    one.expect(5)
    one.write(5, 0, 2)
    assert committed(tier) == []
    one.write(5, 1)
    assert one.hear(5) is None
    assert committed(tier) == [5]


def test_three_nodes_commit_once_and_all_hear_of_it(node, tier):
    nodes = [node([rank]) for rank in range(3)]
    for one in reversed(nodes):
        one.expect(5)
        one.write(5)
    assert [one.hear(5) for one in nodes] == [None] * 3
    with nodes[0].heard:
        assert nodes[0].heard.wait_for(lambda: nodes[0].num_after == 1, 20), "the node with rank 0 coordinates"
    assert [one.num_after for one in nodes[1:]] == [0, 0]


def test_a_step_that_some_rank_never_wrote_is_overtaken_on_every_node(node, tier):
    nodes = [node([rank]) for rank in range(3)]
    for one in nodes[:2]:
        one.expect(5)
        one.write(5)
    for one in nodes:
        one.expect(6)
        one.write(6)
    assert [one.hear(6) for one in nodes] == [None] * 3
    for one in nodes[:2]:
        assert isinstance(one.hear(5), PersistError)
        assert [n.step for n in one.notices] == [5, 6], "first what is lost, then what is safe"
    assert committed(tier) == [6]


def test_a_late_receipt_of_an_overtaken_step_changes_nothing(node, tier):
    one = node([0, 1, 2])
    one.expect(5)
    one.expect(6)
    one.write(5, 0, 1)
    one.write(6)
    assert isinstance(one.hear(5), PersistError)
    one.write(5, 2)
    one.expect(7)
    one.write(7)
    assert one.hear(7) is None
    assert [n.step for n in one.notices] == [5, 6, 7]
    one.leave()
    assert one.writer.idle()


def test_a_commit_that_fails_is_told_to_all_ranks_of_the_node(node, tier):
    tier.add(Fault(method="create", name="commits/*", error=NoSpaceError))
    one = node([0, 1, 2])
    one.expect(5)
    one.write(5)
    assert isinstance(one.hear(5), NoSpaceError)
    one.expect(6)
    one.write(6)
    assert one.hear(6) is None
    assert committed(tier) == [6]


def test_an_unwell_store_is_waited_for_without_hurry(node, tier):
    tier.add(Fault(method="read_many", times=3, error=StorageError))
    first, second = node([0], clock=FakeClock()), node([1, 2])
    for one in (first, second):
        one.expect(5)
        one.write(5)
    assert first.hear(5) is None
    assert first.writer._clock.monotonic_s() >= 3, "a pause after each failure"


def test_a_newer_fence_ends_the_attempt_on_the_node_that_commits(node, tier):
    one = node([0, 1, 2])
    Catalog(tier).write_fence(2, None, 3, this_owner())
    one.expect(5)
    one.write(5)
    assert isinstance(one.hear(5), FencedError)
    assert committed(tier) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_newer_fence_ends_the_waiting_of_every_node(node, tier, rank):
    clock = FakeClock()
    one = node([rank], clock=clock)
    one.expect(5)
    one.write(5)
    Catalog(tier).write_fence(2, None, 3, this_owner())
    clock.advance(6)
    error = one.hear(5)
    assert isinstance(error, FencedError)
    assert "incarnation 2" in error.what


def test_what_a_lost_node_can_still_be_completed_with_is_waited_for_but_not_for_ever(node, tier):
    clock = FakeClock()
    one, other = node([0, 1], clock=clock), node([2])
    one.expect(5)
    one.write(5)
    one.expect(6)
    one.write(6)
    one.leave()
    other.expect(5)
    other.write(5)
    assert other.hear(5) is None
    assert not one.writer.idle(), "step 6 may still come"
    clock.advance(31)
    wait_until(one.writer.idle)


def test_a_lost_node_with_all_ranks_gives_up_at_once_what_cannot_come(node, tier):
    one = node([0, 1, 2], clock=FakeClock())
    one.expect(5)
    one.write(5, 0, 1)
    one.leave()
    wait_until(one.writer.idle)
    assert committed(tier) == []


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it never came true")


def test_ranks_that_disagree_on_a_tensor_are_not_committed(node, tier):
    one = node([0, 1, 2])
    one.ranks[2].rows = 4
    one.expect(5)
    one.write(5)
    error = one.hear(5)
    assert error is not None
    assert "'w' is int64 (9,) on rank 0 but int64 (12,) on rank 2" in error.what
    assert committed(tier) == []


def test_a_tensor_with_a_part_that_nobody_wrote_is_not_committed(node, tier):
    one = node([0, 1])  # the third rank's receipt lists no tensor at all
    one.expect(5)
    one.write(5)
    name = one.writer.attempt.folder(5) + receipt_name(1)
    receipt = unseal(ReceiptRecord, tier.read(name), name)
    shard = msgspec.structs.replace(receipt.shard, name=receipt.shard.name.replace("r00001", "r00002"))
    empty = msgspec.structs.replace(receipt, rank=2, tensors=(), shard=shard)
    tier.create(one.writer.attempt.folder(5) + receipt_name(2), seal(empty))
    error = one.hear(5)
    assert error is not None
    assert "wrote 6 elements instead of 9" in error.what
    assert committed(tier) == []


@pytest.mark.processes
def test_three_persisters_over_one_directory(start, tmp_path):  # noqa: F811
    url = str(tmp_path / "run")
    make_run(url, world_size=3)
    ranks = [FakeRank(rank, 3) for rank in range(3)]
    nodes = [start(f"p{rank}") for rank in range(3)]
    for one, process in zip(ranks, nodes, strict=True):
        one.hello(process.path, url)
    for step in (1, 2, 3):
        for one in ranks:
            if (one.rank, step) != (2, 2):  # one rank never writes step 2
                one.stage(step % 2, step)
                one.submit(step, step % 2)
        if step != 2:
            for one in ranks:
                assert one.hear_of(step, "committed", "failed")["op"] == "committed"
    assert [commit.step for commit in open_catalog(url).commits()] == [3, 1]
    for one in ranks:
        one.close()
    assert [process.end() for process in nodes] == [0, 0, 0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_step_that_a_rank_skips_is_given_up_on_every_node_at_once(node, tier, who):
    nodes = [node([rank]) for rank in range(3)]
    others = [one for one in nodes if who not in one.ranks]
    for one in others:
        one.expect(5)
        one.write(5)
    nodes[who].writer.fail(5, who, PersistError(f"rank {who} skipped step 5"))
    # Nothing newer comes that could overtake it: at the end of a training nobody would otherwise ever hear of it.
    for one in others:
        error = one.hear(5)
        assert isinstance(error, PersistError) and "another node skipped it" in error.what
    assert committed(tier) == []
    for one in nodes:
        one.expect(6)
        one.write(6)
    assert [one.hear(6) for one in nodes] == [None] * 3
