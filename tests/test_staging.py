"""Staging: what this rank writes, planned once for a layout, and a slot that is sealed whole or given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_state import bits, memfd

from ckptrt import staging
from ckptrt.adapters import adapt
from ckptrt.arena import Arena
from ckptrt.errors import UsageError
from ckptrt.staging import CopyStager
from ckptrt.storage.shardfile import tensor_bytes


class Bench:
    """A stager with an arena and a state that tests change."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.state: dict[str, Any] = {"d": {"a": torch.arange(5.0), "b": torch.ones(2, dtype=torch.int8), "n": 1}}
        self.arena = Arena(rank, memfd)
        self.stager = CopyStager(rank, world_size)

    def stage(self, step: int, settle: bool = True) -> int | None:
        adapters = adapt(self.state, self.rank, self.world_size, rng=False)
        staged = self.stager.stage(adapters, self.arena, step, 1, {})
        if staged is None:
            return None
        if settle:
            self.arena.settled(staged.slot, step)
        return staged.slot

    def held(self, slot: int) -> dict[str, bytes]:
        """What a sealed slot holds, by name."""
        view = self.arena.view
        assert view is not None
        header = view.header(slot)
        assert header is not None
        meta, image = view.meta(slot, header), bytes(view.image(slot, header.image_bytes))
        found = {t.key: image[t.start : t.start + tensor_bytes(t)] for t in meta.tensors}
        return found | {f"object/{o.key}": image[o.start : o.start + o.size_bytes] for o in meta.objects}


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stager.release()
    made.arena.close()


def test_a_slot_holds_the_state_of_its_step(bench):
    slots = {}
    for step in (1, 2, 3):
        bench.state["d"]["a"].fill_(step)
        bench.state["d"]["n"] = step
        slots[step] = bench.stage(step)
        held = bench.held(slots[step])
        assert held["d.a"] == bits(torch.full((5,), float(step)))
        assert json.loads(held["object/d"])["n"] == step
    assert slots[1] == slots[3] != slots[2]
    assert bench.held(slots[2])["d.a"] == bits(torch.full((5,), 2.0))


def test_the_plan_is_made_once_for_a_layout_and_anew_for_another(bench, monkeypatch):
    plans = []
    original = staging._make_plan

    def make_plan(*args: Any) -> Any:
        plans.append(1)
        return original(*args)

    monkeypatch.setattr(staging, "_make_plan", make_plan)
    for step in range(1, 5):
        bench.state["d"]["n"] = 10**step  # plain data of another size
        bench.stage(step)
    assert len(plans) == 1
    for step, change in enumerate([torch.arange(6.0), torch.arange(6), torch.ones(2, 3)], 5):
        bench.state["d"]["a"] = change
        assert bench.held(bench.stage(step))["d.a"] == bits(change)
    bench.state["d"]["c"] = torch.tensor(7.0)
    assert bench.held(bench.stage(9))["d.c"] == bits(torch.tensor(7.0))
    assert len(plans) == 5


def test_new_tensors_under_old_names_are_the_ones_that_are_copied(bench):
    bench.stage(1)
    bench.state["d"]["a"] = torch.arange(5.0) + 10
    assert bench.held(bench.stage(2))["d.a"] == bits(torch.arange(5.0) + 10)


def test_no_free_slot_is_none_and_harms_nothing(bench):
    first, second = bench.stage(1, settle=False), bench.stage(2, settle=False)
    before = bench.held(first), bench.held(second)
    bench.state["d"]["a"].fill_(9)
    assert bench.stage(3) is None
    assert (bench.held(first), bench.held(second)) == before
    bench.arena.settled(first, 1)
    assert bench.stage(4) == first


def test_a_copy_that_fails_leaves_the_other_snapshot_and_the_slot_usable(bench, monkeypatch):
    kept = bench.stage(1)

    def fail(pairs: Any) -> None:
        raise RuntimeError("in the middle of a copy")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_copy_all", fail)
        with pytest.raises(RuntimeError):
            bench.stage(2)
    assert bench.held(kept)["d.a"] == bits(torch.arange(5.0))
    view = bench.arena.view
    assert view.header(1 - kept) is None, "what is half copied isn't sealed"
    assert bench.stage(3) == 1 - kept


def test_state_that_cannot_be_stored_takes_no_slot(bench):
    first, second = bench.stage(1), bench.stage(2)
    before = bench.held(first), bench.held(second)
    bench.state["d"]["odd"] = object()
    with pytest.raises(UsageError):
        bench.stage(3)
    assert (bench.held(first), bench.held(second)) == before


def test_replicas_share_the_work_and_write_every_byte_once():
    model = torch.nn.Linear(300, 300)
    pieces: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank in range(3):
        made = Bench(rank, 3)
        made.state = {"model": model}
        adapters = adapt(made.state, rank, 3, rng=False)
        adapters[0]._holders = lambda key, is_buffer: (0, 1, 2)  # type: ignore[attr-defined]  # as DDP would have it
        staged = made.stager.stage(adapters, made.arena, 1, 1, {})
        assert staged is not None
        header = made.arena.view.header(staged.slot)
        assert header is not None
        for record in made.arena.view.meta(staged.slot, header).tensors:
            assert (record.key, record.offsets) not in pieces
            pieces[record.key, record.offsets] = tensor_bytes(record)
        made.stager.release()
        made.arena.close()
    assert sum(pieces.values()) == 4 * (300 * 300 + 300)
    assert len(pieces) > 2, "the weight is cut"
