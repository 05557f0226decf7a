"""Unchanged tensors stay where they are: what is borrowed, what is written, and what is read back."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import support_reshard
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ckptrt
from ckptrt import staging
from ckptrt.errors import PersistError
from ckptrt.storage.borrow import PIECE_BYTES, Pieces, pack
from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.layout import DATA, CommitId, shard_name
from ckptrt.storage.prune import PrunePolicy, execute, plan_prune
from ckptrt.storage.records import ReceiptRecord, ShardRecord
from ckptrt.storage.retention import Keep
from ckptrt.storage.shardfile import TensorSpec, chunk_digests, lay_out, tensor_bytes
from ckptrt.storage.slots import SlotMeta
from ckptrt.storage.verify import verify_commit

_FROZEN_BYTES = 1 << 20


# --- the pure part, against a twin that stores everything


class Store:
    """Files by name, and the receipt of the last save: one rank of a run."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.receipt: ReceiptRecord | None = None

    def save(self, step: int, tensors: dict[str, bytes], steady: set[str]) -> int:
        """Store these tensors; gives how many bytes were written."""
        specs = [
            TensorSpec(key=key, dtype="uint8", shape=(len(data),), offsets=(0,), sizes=(len(data),))
            for key, data in tensors.items()
        ]
        layout = lay_out(0, specs, [("loop", 2)])
        image = bytearray(layout.size_bytes)
        image[: len(layout.header)] = layout.header
        for record in layout.tensors:
            image[record.start : record.start + tensor_bytes(record)] = tensors[record.key]
        image[-2:] = b"{}"
        marks = tuple(number for number, record in enumerate(layout.tensors) if record.key in steady)
        meta = SlotMeta(tensors=layout.tensors, objects=layout.objects, steady=marks)
        parcel = pack(0, meta, memoryview(image), self.receipt)
        name = f"s{step:09d}.i00000001.0a/{shard_name(0)}"
        self.files[name] = b"".join(bytes(piece) for piece in parcel.pieces)
        shard = ShardRecord(name=name, size_bytes=parcel.pieces.size_bytes, chunk_bytes=1 << 22, chunks="")
        self.receipt = ReceiptRecord(
            rank=0, world_size=1, step=step, incarnation=1, shard=shard, tensors=parcel.tensors,
            objects=parcel.objects, borrowed=parcel.borrowed, digests=parcel.digests,
        )  # fmt: skip
        assert parcel.pieces.digests() == chunk_digests(memoryview(self.files[name]))
        return parcel.pieces.size_bytes

    def load(self) -> dict[str, bytes]:
        assert self.receipt is not None
        return {
            tensor.key: self.files[shard.name][tensor.start : tensor.start + tensor_bytes(tensor)]
            for shard, tensors in self.receipt.files()
            for tensor in tensors
        }


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_whatever_changes_and_whatever_is_marked_all_is_read_back(saves, seed):
    rng = random.Random(seed)
    tensors = {f"t{n}": rng.randbytes(rng.choice([0, 1, 7, 4096, 10_000])) for n in range(6)}
    store = Store()
    for step, (changed, marked) in enumerate(saves):
        for n in changed:
            tensors[f"t{n}"] = rng.randbytes(rng.choice([len(tensors[f"t{n}"]), 5000]))
        store.save(step, tensors, {f"t{n}" for n in marked})
        assert store.load() == tensors
        assert store.receipt is not None
        for borrowed in store.receipt.borrowed:
            assert borrowed.shard.name != store.receipt.shard.name


def test_a_reference_names_the_file_in_which_the_bytes_have_always_been():
    store = Store()
    tensors = {"base": bytes(range(256)) * 400, "adapter": b"0"}
    sizes = []
    for step in range(3):
        tensors["adapter"] = bytes([step])
        sizes.append(store.save(step, tensors, {"base"}))
    assert sizes[0] > 100_000 > 5000 > sizes[1] == sizes[2]
    assert store.receipt is not None
    assert [b.shard.name for b in store.receipt.borrowed] == ["s000000000.i00000001.0a/r00000.safetensors"]


def test_a_tensor_of_another_shape_or_dtype_is_not_borrowed():
    store = Store()
    store.save(0, {"base": bytes(8)}, {"base"})
    specs = [TensorSpec(key="base", dtype="float32", shape=(2,), offsets=(0,), sizes=(2,))]
    layout = lay_out(0, specs, [])
    image = memoryview(bytearray(layout.size_bytes))
    meta = SlotMeta(tensors=layout.tensors, objects=(), steady=(0,))
    assert pack(0, meta, image, store.receipt).borrowed == ()


def test_pieces_are_put_together_across_segments_and_handed_out_uncopied_where_they_lie_in_one():
    rng = random.Random(0)
    parts = [rng.randbytes(size) for size in (4096, PIECE_BYTES - 4096 - 5, 10, 3 * PIECE_BYTES)]
    whole = b"".join(parts)
    starts = [sum(map(len, parts[:n])) for n in range(len(parts))]
    pieces = Pieces([(start, memoryview(part)) for start, part in zip(starts, parts, strict=True)])
    assert len(pieces) == 5
    assert pieces.size_bytes == len(whole)
    for _ in range(2):  # a second write after a failed one
        assert b"".join(bytes(piece) for piece in pieces) == whole
    assert pieces.digests() == chunk_digests(memoryview(whole))
    assert pieces[2].obj is parts[3]


# --- the runtime


def lora(seed: int = 0) -> dict[str, Any]:
    """A frozen base of 1 MiB, and an adapter that trains."""
    torch.manual_seed(seed)
    base, adapter = torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 2)
    base.requires_grad_(False)
    model = torch.nn.Sequential(base, adapter)
    return {"model": model, "optim": torch.optim.AdamW(adapter.parameters(), lr=0.1)}


def train(state: dict[str, Any]) -> None:
    loss = (state["model"](torch.rand(4, 512)) ** 2).sum()
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()


def job(url: str, steps: int, state: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    state = state or lora()
    with ckptrt.init(url, **state, **more) as rt:
        rt.restore()
        for _ in range(rt.start_step, steps):
            train(state)
            rt.step()
            rt.save().committed.result(30)
        state["borrowed"] = rt.stats.borrowed_bytes
    return state


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RANK", "WORLD_SIZE", "CKPTRT_AGENT_SOCKET", "CKPTRT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return str(tmp_path / "run")


def records(url: str) -> dict[int, Any]:
    return {info.step: info.record for info in open_catalog(url).commits()}


@pytest.mark.processes
def test_a_frozen_base_is_written_once_and_outlives_the_checkpoint_that_wrote_it(url: str) -> None:
    state = job(url, 3)
    job(url, 4, lora(1))
    found = records(url)
    assert [found[step].new_bytes > _FROZEN_BYTES for step in (1, 2, 3, 4)] == [True, False, False, False]
    assert all(found[step].size_bytes > _FROZEN_BYTES for step in found)
    assert state["borrowed"] == 2 * _FROZEN_BYTES
    catalog = open_catalog(url)
    execute(catalog, plan_prune(catalog, PrunePolicy(keep=Keep(last=1), grace_s=0, removed_grace_s=0), 2e9))
    assert list(records(url)) == [4]
    assert len(list(Path(url, "data").iterdir())) == 2
    assert verify_commit(catalog, CommitId(4, 2), read_data=True).is_ok
    resumed = lora(2)
    with ckptrt.init(url, **resumed) as rt:
        assert rt.restore() is not None
    assert torch.equal(resumed["model"][0].weight, state["model"][0].weight)
    for file in Path(url, "data").glob("*/*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert ("model.0.weight" in tensors.keys()) == ("s000000001" in str(file))  # noqa: SIM118


@pytest.mark.processes
def test_a_tensor_that_stopped_changing_is_borrowed_and_one_that_changes_again_is_not(url: str) -> None:
    state = lora()
    extra = {"table": torch.zeros(512, 512)}
    with ckptrt.init(url, **state, extra=extra) as rt:
        for change in (False, False, False, True, False):
            if change:
                extra["table"] += change
            train(state)
            rt.step()
            rt.save().committed.result(30)
    # The first look can't know, the second takes the digest, from the third on it is borrowed, until it changes.
    sizes = [records(url)[step].new_bytes // _FROZEN_BYTES for step in range(1, 6)]
    assert sizes == [2, 1, 0, 1, 1]
    assert verify_commit(open_catalog(url), CommitId(5, 1), read_data=True).is_ok


@pytest.mark.processes
def test_nothing_is_borrowed_if_the_user_says_so(url: str) -> None:
    assert job(url, 2, dedup=False)["borrowed"] == 0
    assert all(record.new_bytes == record.size_bytes > _FROZEN_BYTES for record in records(url).values())


@pytest.mark.processes
def test_a_borrowed_file_that_is_gone_fails_one_save_and_the_next_writes_all(url: str) -> None:
    state = lora()
    with ckptrt.init(url, **state) as rt:
        rt.step()
        rt.save().committed.result(30)
        (file,) = Path(url, "data").glob("*/*.safetensors")
        file.unlink()
        rt.step()
        with pytest.raises(PersistError, match="holds unchanged tensors of rank 0, is gone"):
            rt.save().committed.result(30)
        rt.step()
        rt.save().committed.result(30)
    assert records(url)[3].new_bytes > _FROZEN_BYTES


@pytest.mark.processes
def test_damage_in_a_borrowed_file_is_found_by_every_checkpoint_that_needs_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    job(url, 3)
    (file,) = Path(url, "data").glob("s000000001*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    catalog = open_catalog(url)
    for step in (1, 2, 3):
        report = verify_commit(catalog, CommitId(step, 1), read_data=True)
        assert [finding.file for finding in report.findings] == [DATA + str(file.relative_to(Path(url, "data")))]
        assert [affected.key for affected in report.findings[0].affects][:1] == ["model.0.weight"]
    caplog.set_level(logging.CRITICAL)
    with ckptrt.init(url, **lora()) as rt, pytest.raises(ckptrt.CorruptError):
        rt.restore()


def save_unchanged(rank: int, world_size: int, url: str, layout: str) -> int:
    """Three checkpoints of the same state, so that the last borrows all of it; gives how many bytes that is."""
    with patch.object(staging, "_STEADY_MIN_BYTES", 1):
        model, optimizer = support_reshard.build(layout, seed=0)
        support_reshard.fill(model, optimizer)
        loop = {"samples": 100 + rank, "seen": torch.full((3,), float(rank))}
        with ckptrt.init(url, model=model, optim=optimizer, loop=loop) as rt:
            rt.restore()
            for _ in range(3):
                rt.step()
                rt.save().committed.result(60)
            return rt.stats.borrowed_bytes


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_what_several_ranks_borrow_is_restored_on_any_number_of_them(worlds: Any, tmp_path: Path, layout: str) -> None:
    url = str(tmp_path / "run")
    assert all(count > 100 for count in worlds(2).run(save_unchanged, url, layout))
    newest = records(url)[3]
    assert newest.references == (records(url)[2].data,)
    assert verify_commit(open_catalog(url), CommitId(3, 1), read_data=True).is_ok
    for size, now in ((2, layout), (1, "plain"), (3, "fsdp"), (4, "hsdp")):
        for rank, (differences, step, loop) in enumerate(worlds(size).run(support_reshard.restore, url, now)):
            assert (differences, step) == ([], 3)
            assert loop == (100 + rank % 2, [float(rank % 2)] * 3)
