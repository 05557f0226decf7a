"""Runs of given tensors: what they hold, and how ranks share it, is up to the test."""

from __future__ import annotations

import struct
from typing import Any

from ckptrt.clock import FakeClock
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import DATA, CommitId, data_dir
from ckptrt.storage.persister import write_shard
from ckptrt.storage.records import Owner
from ckptrt.storage.shardfile import TensorSpec, lay_out, tensor_bytes
from ckptrt.storage.slots import SlotHeader, SlotMeta

__all__ = ["Tensors", "floats", "write_run"]

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> dtype, shape, bytes


def write_run(
    tier: Any, steps: dict[int, tuple[Tensors, list[int]]], objects: dict[int, bytes] | None = None
) -> Catalog:
    """Checkpoints of whole tensors, cut by rows; step -> (tensors, in which proportion ranks share the rows)."""
    clock, catalog = FakeClock(), Catalog(tier)
    catalog.create_run("diff")
    catalog.write_fence(1, None, 1, Owner(host="h", pid=1))
    for step, (tensors, shares) in steps.items():
        folder = data_dir(CommitId(step, 1), "0a")
        text = (objects or {}).get(step, b"{}")
        receipts = {rank: _write_rank(tier, folder, step, rank, shares, tensors, text) for rank in range(len(shares))}
        commit(tier, catalog, step, 1, folder.removeprefix(DATA).rstrip("/"), receipts, "tests", clock)
    return catalog


def _write_rank(
    tier: Any, folder: str, step: int, rank: int, shares: list[int], tensors: Tensors, text: bytes
) -> bytes:
    wanted, data = [], {}
    for key, (dtype, shape, whole) in tensors.items():
        bounds = [shape[0] * sum(shares[:r]) // sum(shares) for r in range(len(shares) + 1)]
        first, end = bounds[rank], bounds[rank + 1]
        if first < end:
            offsets, sizes = (first, *[0] * (len(shape) - 1)), (end - first, *shape[1:])
            wanted.append(TensorSpec(key=key, dtype=dtype, shape=shape, offsets=offsets, sizes=sizes))
            row = len(whole) // shape[0]
            data[key] = whole[first * row : end * row]
    layout = lay_out(rank, wanted, [("loop", len(text))])
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    for record in layout.tensors:
        image[record.start : record.start + tensor_bytes(record)] = data[record.key]
    image[layout.objects[0].start :] = text
    header = SlotHeader(
        rank=rank, world_size=len(shares), step=step, incarnation=1, image_bytes=len(image), meta_start=0,
        meta_bytes=0, meta_xxh3=0,
    )  # fmt: skip
    meta = SlotMeta(tensors=layout.tensors, objects=layout.objects)
    return write_shard(tier, folder, header, pack(rank, meta, memoryview(image), None))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
