r"""A small training job for the public crash judge `ckpt-chaos`, which kills it at every file operation of a save.

    ckpt-chaos run --modes before --step-regex "resumed from step ([0-9]+)" --result-file "{out}/final" \\
        -- python tests/chaos_job.py {out}

It saves in its own process, since only that is watched: two ranks' files, receipts, manifest and commit are written by
the code that the persister runs, and old checkpoints are pruned. The job fails if what it
resumes from is older than what was reported before: to the judge that is a hard failure.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import sys
from pathlib import Path

from ckptrt.clock import SystemClock
from ckptrt.plan import Read
from ckptrt.sources import StoredSource
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import CommitId, data_dir
from ckptrt.storage.owner import this_owner
from ckptrt.storage.persister import write_shard
from ckptrt.storage.prune import prune_committed
from ckptrt.storage.records import Parent
from ckptrt.storage.retention import Keep
from ckptrt.storage.shardfile import TensorSpec, lay_out
from ckptrt.storage.slots import SlotHeader, SlotMeta
from ckptrt.storage.tiers.local import LocalTier

WORLD_SIZE = 2
ROWS = 32
STEPS = 6
EVERY = 2


def main() -> None:
    # The judge knows an event again by its file's name, so temporary files get the same names in every run.
    numbers = itertools.count()
    secrets.token_hex = lambda size=8: f"{next(numbers):0{2 * (size or 8)}x}"  # type: ignore[assignment]
    out = Path(sys.argv[1])
    tier = LocalTier(str(out / "run"))
    catalog = Catalog(tier)
    catalog.create_run()
    step, state, parent = load(catalog)
    sys.stdout.write(f"resumed from step {step}\n")
    told = Path(f"{out}.reported")  # beside the folder that the judge watches, so that it isn't a part of the save
    reported = int(told.read_text()) if told.exists() else 0
    if step < reported:
        sys.exit(f"step {reported} was reported as committed, but only step {step} is there")
    incarnation = catalog.newest_incarnation() + 1
    catalog.write_fence(incarnation, parent, WORLD_SIZE, this_owner())
    while step < STEPS:
        step += 1
        state = b"".join(hashlib.sha256(row + bytes([step])).digest() for row in rows(state))
        if step % EVERY == 0:
            save(tier, catalog, step, incarnation, state)
            told.write_text(str(step))
            prune_committed(catalog, Keep(last=2))
    Path(out, "final").write_bytes(state)


def rows(state: bytes) -> list[bytes]:
    return [state[at : at + 32] for at in range(0, len(state), 32)]


def save(tier: LocalTier, catalog: Catalog, step: int, incarnation: int, state: bytes) -> None:
    commit_id = CommitId(step, incarnation)
    folder = data_dir(commit_id, "0a")
    receipts = {rank: write_rank(tier, folder, commit_id, rank, state) for rank in range(WORLD_SIZE)}
    name = folder.removeprefix("data/").rstrip("/")
    commit(tier, catalog, step, incarnation, name, receipts, "chaos", SystemClock())


def write_rank(tier: LocalTier, folder: str, commit_id: CommitId, rank: int, state: bytes) -> bytes:
    half = ROWS // WORLD_SIZE
    spec = TensorSpec(key="state", dtype="uint8", shape=(ROWS, 32), offsets=(rank * half, 0), sizes=(half, 32))
    layout = lay_out(rank, [spec], [("loop", 2)])
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    (tensor,) = layout.tensors
    image[tensor.start : tensor.start + half * 32] = state[rank * half * 32 : (rank + 1) * half * 32]
    image[-2:] = b"{}"
    header = SlotHeader(
        rank=rank, world_size=WORLD_SIZE, step=commit_id.step, incarnation=commit_id.incarnation,
        image_bytes=len(image), meta_start=0, meta_bytes=0, meta_xxh3=0,
    )  # fmt: skip
    meta = SlotMeta(tensors=layout.tensors, objects=layout.objects)
    return write_shard(tier, folder, header, pack(rank, meta, memoryview(image), None))


def load(catalog: Catalog) -> tuple[int, bytes, Parent | None]:
    """Step, state and parent of the newest checkpoint that is whole, or a fresh start."""
    found = catalog.newest_good().commit
    if found is None:
        return 0, bytes(ROWS * 32), None
    source = StoredSource(catalog.open_checkpoint(found))
    state = b""
    for part in source.parts():
        (tensor,) = part.tensors
        with source.mapped(part, [Read(tensor.start, tensor.sizes[0] * 32)]) as buffer:
            state += bytes(buffer[tensor.start : tensor.start + tensor.sizes[0] * 32])
    return found.step, state, Parent(step=found.step, incarnation=found.incarnation)


if __name__ == "__main__":
    main()
