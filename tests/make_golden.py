"""Golden runs: small runs of each version of the format, kept for ever in tests/golden/.

    python tests/make_golden.py tests/golden/1.0

writes the run of the present version, and refuses to touch one that is there. All of it follows from formulas and
fixed clocks, so that a test can say what a reader must find, and that a writer still writes the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from ckptrt.clock import FakeClock
from ckptrt.storage import catalog as catalog_module
from ckptrt.storage import pins as pins_module
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import DATA, CommitId, data_dir
from ckptrt.storage.persister import write_shard
from ckptrt.storage.pins import pin
from ckptrt.storage.records import Owner, Parent, ReceiptRecord, unseal
from ckptrt.storage.shardfile import _DTYPES, TensorSpec, lay_out, tensor_bytes
from ckptrt.storage.slots import SlotHeader, SlotMeta
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.local import LocalTier

__all__ = ["OBJECT", "PATH", "WORLD_SIZE", "element", "region", "specs", "write_run"]

WORLD_SIZE = 2
OBJECT = b'{"seen":1280,"lr":[0.1,null]}'
OWNER = Owner(host="golden", pid=1, user="ada", token="00")
# Steps on the path with the incarnation that committed them, newest first. Step 30 was committed late, by a zombie.
PATH = (CommitId(40, 2), CommitId(20, 1), CommitId(10, 1))
_ROWS = {0: (0, 5), 1: (5, 8)}  # of model.weight: uneven, and rank 1 has the smaller part


def element(step: int, key: str, index: int) -> int:
    """The byte at `index` of a tensor's global bytes. A frozen tensor is the same at each step."""
    return (len(key) * 31 + index * 7 + (0 if key.startswith("frozen") else step)) % 251


def specs(rank: int) -> list[TensorSpec]:
    """What a rank stores: rows of a matrix, a generator of its own, and on rank 0 each dtype and a frozen tensor."""
    first, end = _ROWS[rank]
    found = [
        TensorSpec(key="model.weight", dtype="float32", shape=(8, 3), offsets=(first, 0), sizes=(end - first, 3)),
        TensorSpec(key="rng", dtype="uint8", shape=(5,), offsets=(0,), sizes=(5,), rank_only=True),
    ]
    if rank == 0:
        kinds = [(f"dtypes.{dtype}", dtype, (3,)) for dtype in sorted(_DTYPES)]
        others = [("scalar", "int64", ()), ("empty", "float16", (0, 4)), ("frozen.base", "bfloat16", (4, 8))]
        found += [
            TensorSpec(key=key, dtype=dtype, shape=shape, offsets=(0,) * len(shape), sizes=shape)
            for key, dtype, shape in (*kinds, *others)
        ]
    return found


def region(step: int, spec: TensorSpec, width: int) -> bytes:
    """The bytes of a spec's region: whole rows, so one run of the global tensor's bytes."""
    row = width
    for size in spec.shape[1:]:
        row *= size
    count = row
    for size in spec.sizes[:1]:
        count *= size
    start = spec.offsets[0] * row if spec.offsets else 0
    return bytes(element(step, spec.key, start + i) for i in range(count))


def write_run(tier: Tier) -> None:
    """The golden run of the present version."""
    clock = FakeClock(3600.0)
    catalog = Catalog(tier, clock)
    with (
        patch.object(catalog_module, "made_by", lambda: "golden"),
        patch.object(pins_module, "this_owner", lambda: OWNER),
    ):
        catalog.create_run("golden")
        catalog.write_fence(1, None, WORLD_SIZE, OWNER)
        base = _save(tier, catalog, clock, CommitId(10, 1), None)
        _save(tier, catalog, clock, CommitId(20, 1), None)
        catalog.write_fence(2, Parent(step=20, incarnation=1), WORLD_SIZE, OWNER)
        with patch.object(catalog, "newest_incarnation", lambda: 1):
            _save(tier, catalog, clock, CommitId(30, 1), None)
        _save(tier, catalog, clock, CommitId(40, 2), base)
        pin(catalog, CommitId(10, 1), "golden", clock)


def _save(
    tier: Tier, catalog: Catalog, clock: FakeClock, commit_id: CommitId, base: ReceiptRecord | None
) -> ReceiptRecord:
    clock.advance(60.0)
    folder = data_dir(commit_id, "0a")
    receipts = {rank: _write_rank(tier, folder, commit_id, rank, base if rank == 0 else None) for rank in (0, 1)}
    name = folder.removeprefix(DATA).rstrip("/")
    commit(tier, catalog, commit_id.step, commit_id.incarnation, name, receipts, "golden", clock)
    return unseal(ReceiptRecord, receipts[0], "golden")


def _write_rank(tier: Tier, folder: str, commit_id: CommitId, rank: int, base: ReceiptRecord | None) -> bytes:
    wanted = specs(rank)
    layout = lay_out(rank, wanted, [("loop", len(OBJECT))])
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    for record, index in zip(layout.tensors, layout.order, strict=True):
        data = region(commit_id.step, wanted[index], _DTYPES[record.dtype][0])
        image[record.start : record.start + tensor_bytes(record)] = data
    image[layout.objects[0].start :] = OBJECT
    steady = tuple(i for i, record in enumerate(layout.tensors) if record.key.startswith("frozen"))
    metrics = {"loss": 4.0 / commit_id.step} if rank == 0 else {}
    meta = SlotMeta(tensors=layout.tensors, objects=layout.objects, steady=steady, metrics=metrics)
    header = SlotHeader(
        rank=rank, world_size=WORLD_SIZE, step=commit_id.step, incarnation=commit_id.incarnation,
        image_bytes=len(image), meta_start=0, meta_bytes=0, meta_xxh3=0,
    )  # fmt: skip
    return write_shard(tier, folder, header, pack(rank, meta, memoryview(image), base))


def main() -> None:
    place = Path(sys.argv[1])
    if place.exists():
        sys.exit(f"{place} is there already: a golden run is never changed, a new version of the format gets its own")
    write_run(LocalTier(str(place)))


if __name__ == "__main__":
    main()
