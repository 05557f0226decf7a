"""Made-up runs with real shard files, for tests of whatever reads, checks and prunes checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptrt.clock import FakeClock
from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import DATA, CommitId, data_dir, receipt_name, shard_name
from ckptrt.storage.records import BorrowedRecord, Owner, Parent, ReceiptRecord, ShardRecord, seal
from ckptrt.storage.shardfile import CHUNK_BYTES, TensorSpec, chunk_digests, lay_out, tensor_bytes
from ckptrt.storage.tiers import Tier

OWNER = Owner(host="node-a", pid=4711, user="ada")
ROWS = 6


@dataclass
class FakeRun:
    """A run on a tier, written the way a job writes it."""

    tier: Any  # a Tier, whose insides tests may reach into
    world_size: int = 2
    columns: int = 16
    clock: Any = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.catalog = Catalog(self.tier, self.clock)
        self.catalog.create_run("fake")

    def fence(self, incarnation: int, parent: tuple[int, int] | None = None) -> None:
        """Open an incarnation; parent is (step, incarnation)."""
        origin = Parent(step=parent[0], incarnation=parent[1]) if parent else None
        self.catalog.write_fence(incarnation, origin, self.world_size, OWNER)

    def save(
        self, step: int, incarnation: int = 1, nonce: str = "0a", metrics: dict[str, float] | None = None
    ) -> CommitInfo:
        receipts = self.write_data(step, incarnation, nonce, metrics or {})
        return self.commit(step, incarnation, receipts, nonce)

    def zombie_save(self, step: int, incarnation: int, nonce: str = "0a") -> CommitInfo:
        """Commit as a writer does that was paused between its look at the fence and its commit."""
        receipts = self.write_data(step, incarnation, nonce)
        self.catalog.newest_incarnation = lambda: incarnation  # type: ignore[method-assign]
        try:
            return self.commit(step, incarnation, receipts, nonce)
        finally:
            del self.catalog.newest_incarnation

    def commit(self, step: int, incarnation: int, receipts: dict[int, bytes], nonce: str = "0a") -> CommitInfo:
        folder = data_dir(CommitId(step, incarnation), nonce).removeprefix(DATA).rstrip("/")
        return commit(self.tier, self.catalog, step, incarnation, folder, receipts, "tests", self.clock)

    def write_data(
        self, step: int, incarnation: int = 1, nonce: str = "0a", metrics: dict[str, float] | None = None
    ) -> dict[int, bytes]:
        """Shard files and receipts of all ranks, not yet committed."""
        return {
            rank: self.write_rank(step, incarnation, rank, nonce, metrics=metrics) for rank in range(self.world_size)
        }

    def write_rank(
        self,
        step: int,
        incarnation: int,
        rank: int,
        nonce: str = "0a",
        borrow: ReceiptRecord | None = None,
        metrics: dict[str, float] | None = None,
    ) -> bytes:
        """One rank's shard file and receipt; with `borrow` the tensor model.weight stays where that one has it."""
        folder = data_dir(CommitId(step, incarnation), nonce)
        borrowed = borrowed_weight(borrow) if borrow else ()
        taken = {tensor.key for b in borrowed for tensor in b.tensors}
        layout = lay_out(rank, [spec for spec in self.specs(rank) if spec.key not in taken], [("loop", 9)])
        image = bytearray(layout.size_bytes)
        image[: len(layout.header)] = layout.header
        rng = random.Random(f"{step} {incarnation} {rank}")
        for tensor in layout.tensors:
            image[tensor.start : tensor.start + tensor_bytes(tensor)] = rng.randbytes(tensor_bytes(tensor))
        image[layout.objects[0].start :] = b'{"lr": 5}'
        name = folder + shard_name(rank)
        self.tier.write(name, [memoryview(image)], len(image))
        shard = ShardRecord(
            name=name.removeprefix(DATA),
            size_bytes=len(image),
            chunk_bytes=CHUNK_BYTES,
            chunks=chunk_digests(memoryview(image)),
        )
        receipt = seal(
            ReceiptRecord(
                rank=rank,
                world_size=self.world_size,
                step=step,
                incarnation=incarnation,
                shard=shard,
                tensors=layout.tensors,
                objects=layout.objects,
                borrowed=borrowed,
                metrics=metrics or {},
            )
        )
        self.tier.create(folder + receipt_name(rank), receipt)
        return receipt

    def specs(self, rank: int) -> list[TensorSpec]:
        """A sharded matrix of uneven rows, a bias that rank 0 stores alone, and a generator's state of each rank."""
        bounds = [ROWS * self.world_size * r // self.world_size - (r % 2) for r in range(self.world_size)]
        bounds.append(ROWS * self.world_size)
        shape = (ROWS * self.world_size, self.columns)
        rows = bounds[rank + 1] - bounds[rank]
        specs = [
            TensorSpec(
                key="model.weight", dtype="float32", shape=shape, offsets=(bounds[rank], 0), sizes=(rows, self.columns)
            ),
            TensorSpec(key="rng", dtype="uint8", shape=(5,), offsets=(0,), sizes=(5,), rank_only=True),
        ]
        if rank == 0:
            specs.append(TensorSpec(key="model.bias", dtype="bfloat16", shape=(3,), offsets=(0,), sizes=(3,)))
        return specs


def borrowed_weight(receipt: ReceiptRecord) -> tuple[BorrowedRecord, ...]:
    """The part of an older receipt that tells where model.weight lies."""
    return tuple(
        BorrowedRecord(shard=shard, tensors=mine)
        for shard, tensors in receipt.files()
        if (mine := tuple(tensor for tensor in tensors if tensor.key == "model.weight"))
    )


def make_run(tier: Tier, steps: Iterable[int], world_size: int = 2, columns: int = 16) -> FakeRun:
    """A run of one incarnation that has committed `steps`."""
    run = FakeRun(tier=tier, world_size=world_size, columns=columns)
    run.fence(1)
    for step in steps:
        run.save(step)
    return run


def flip_bit(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def overwrite(tier: Tier, name: str, data: bytes) -> None:
    """Damage an object: what no writer does."""
    tier.delete(name)
    tier.create(name, data)
