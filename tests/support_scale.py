"""Checkpoints of very many tensors: real records, manifest and commit; shard files are holes of the right size."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptrt.clock import FakeClock
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import DATA, CommitId, data_dir, receipt_name, shard_name
from ckptrt.storage.records import ObjectRecord, Owner, ReceiptRecord, ShardRecord, TensorRecord, seal
from ckptrt.storage.shardfile import CHUNK_BYTES, PAGE_BYTES
from ckptrt.storage.tiers.local import LocalTier

__all__ = ["Scale", "make_scaled_run"]

_PARTS = ("attn.q.weight", "attn.k.weight", "attn.o.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
_SLOTS = ("model", "optim.exp_avg", "optim.exp_avg_sq", "optim.step")
_OBJECT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many regions lie where: `entries` in all, over `ranks`.

    sharded: every rank holds its rows of the same tensors; otherwise each rank has tensors of its own.
    """

    entries: int
    ranks: int
    sharded: bool = False

    def __str__(self) -> str:
        kind = "regions of the same tensors" if self.sharded else "tensors"
        return f"{self.ranks} x {self.entries // self.ranks:,} {kind}"

    def tensors(self, rank: int) -> Iterator[TensorRecord]:
        """What a rank holds, laid out one after another from the first page on."""
        per_rank = self.entries // self.ranks
        at = PAGE_BYTES
        for number in range(per_rank):
            index = number if self.sharded else rank * per_rank + number
            layer, part = divmod(index // len(_SLOTS), len(_PARTS))
            slot = _SLOTS[index % len(_SLOTS)]
            rows = (64, 192, 128)[index % 3]
            shape = () if slot == "optim.step" and not self.sharded else (rows, 1024 if index % 5 else 64)
            mine = rows // self.ranks if self.sharded else rows
            offsets, sizes = ((rank * mine if self.sharded else 0, 0), (mine, shape[1])) if shape else ((), ())
            dtype = "bfloat16" if slot == "model" else "float32"
            yield TensorRecord(f"{slot}.layers.{layer}.{_PARTS[part]}", dtype, shape, offsets, sizes, at)
            at += prod(sizes) * (2 if slot == "model" else 4)


def make_scaled_run(path: Path, scales: list[Scale], changed: float = 1.0) -> None:
    """A run with one step (1, 2 ...) for each scale. changed: share of chunks that differ from step to step."""
    tier = LocalTier(str(path))
    clock = FakeClock()
    catalog = Catalog(tier, clock)
    catalog.create_run("scale")
    catalog.write_fence(1, None, scales[0].ranks, Owner(host="node-a", pid=1))
    for step, scale in enumerate(scales, start=1):
        folder = data_dir(CommitId(step, 1), "0a")
        (path / folder).mkdir(parents=True)
        receipts = {rank: _write_rank(path, folder, step, scale, rank, changed) for rank in range(scale.ranks)}
        commit(tier, catalog, step, 1, folder.removeprefix(DATA).rstrip("/"), receipts, "tests", clock)


def _write_rank(path: Path, folder: str, step: int, scale: Scale, rank: int, changed: float) -> bytes:
    tensors = tuple(scale.tensors(rank))
    end = tensors[-1].start + prod(tensors[-1].sizes) * 4
    size_bytes = end + _OBJECT_BYTES
    name = folder + shard_name(rank)
    with (path / name).open("wb") as file:
        os.truncate(file.fileno(), size_bytes)  # a hole: nothing here reads it
    steady, rng = random.Random(rank), random.Random(f"{step} {rank}")
    digests = [
        f"{(rng if steady.random() < changed else steady).getrandbits(64):016x}"
        for _ in range(-(-size_bytes // CHUNK_BYTES))
    ]
    shard = ShardRecord(
        name=name.removeprefix(DATA), size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES, chunks="".join(digests)
    )
    receipt = seal(
        ReceiptRecord(
            rank=rank, world_size=scale.ranks, step=step, incarnation=1, shard=shard, tensors=tensors,
            objects=(ObjectRecord("loop", end, _OBJECT_BYTES),),
        )
    )  # fmt: skip
    (path / folder / receipt_name(rank)).write_bytes(receipt)
    return receipt
