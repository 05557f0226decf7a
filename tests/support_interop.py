"""Checkpoints of real values, cut among ranks at random, and what lies in one, for tests of export and import."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from ckptrt.clock import FakeClock
from ckptrt.storage.catalog import Catalog, open_catalog
from ckptrt.storage.cli import cli
from ckptrt.storage.commit import commit
from ckptrt.storage.export import Inventory
from ckptrt.storage.interop.blobs import Blob
from ckptrt.storage.layout import DATA, CommitId, data_dir, receipt_name, shard_name
from ckptrt.storage.records import BorrowedRecord, ReceiptRecord, ShardRecord, seal
from ckptrt.storage.shardfile import CHUNK_BYTES, TensorSpec, chunk_digests, lay_out
from ckptrt.storage.tiers.local import LocalTier

DTYPES = [
    "complex128", "float64", "int64", "uint64", "complex64", "float32", "int32", "uint32", "float16", "bfloat16",
    "int16", "uint16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "complex32",
]  # fmt: skip


def ckptrt(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="ckptrt")


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def random_tensor(dtype: str, shape: tuple[int, ...], rng: random.Random) -> torch.Tensor:
    """Random bits: NaN, infinities and denormals included."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.tensor([rng.random() < 0.5 for _ in range(torch.Size(shape).numel())]).reshape(shape).bool()
    size_bytes = torch.Size(shape).numel() * kind.itemsize
    if not size_bytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(rng.randbytes(size_bytes)), dtype=kind).reshape(shape)


def _cut(length: int, ways: int, rng: random.Random) -> list[int]:
    return [0, *sorted(rng.randint(0, length) for _ in range(ways - 1)), length]


class Writer:
    """A run whose checkpoints hold given tensors, each cut unevenly along a random axis, some ranks with nothing."""

    def __init__(self, path: Path, world_size: int = 1, seed: int = 0) -> None:
        self.tier = LocalTier(str(path))
        self.world_size = world_size
        self.rng = random.Random(seed)
        self.catalog = Catalog(self.tier, FakeClock())
        self.catalog.create_run("made-up")
        self.catalog.write_fence(1, None, world_size)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        data: Mapping[str, Any] | None = None,
        own: Mapping[str, list[torch.Tensor]] | None = None,
        borrow: Mapping[int, ReceiptRecord] | None = None,
    ) -> dict[int, ReceiptRecord]:
        """data: component -> plain data. own: tensors that each rank has for itself. borrow: rank -> its older part."""
        data = {"model": None} if data is None else data
        taken = {t.key for r in (borrow or {}).values() for _, ts in r.files() for t in ts}
        held: list[list[tuple[TensorSpec, bytes]]] = [[] for _ in range(self.world_size)]
        for key, tensor in tensors.items():
            if key not in taken:
                self._spread(key, tensor, held)
        for key, copies in (own or {}).items():
            for rank, tensor in enumerate(copies):
                held[rank].append((_spec(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape), True), raw(tensor)))
        folder = data_dir(CommitId(step, 1), "0a")
        receipts = {
            rank: self._write(folder, step, rank, held[rank], data, (borrow or {}).get(rank))
            for rank in range(self.world_size)
        }
        name = folder.removeprefix(DATA).rstrip("/")
        sealed = {rank: seal(receipt) for rank, receipt in receipts.items()}
        commit(self.tier, self.catalog, step, 1, name, sealed, "tests", FakeClock())
        return receipts

    def _spread(self, key: str, tensor: torch.Tensor, held: list[list[tuple[TensorSpec, bytes]]]) -> None:
        shape = tuple(tensor.shape)
        axes = [axis for axis, size in enumerate(shape) if size > 1]
        if not axes or not tensor.numel():
            held[self.rng.randrange(self.world_size)].append(
                (_spec(key, tensor, (0,) * len(shape), shape), raw(tensor))
            )
            return
        axis = self.rng.choice(axes)
        bounds = _cut(shape[axis], self.world_size, self.rng)
        for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
            if low == high:
                continue
            part = tensor.narrow(axis, low, high - low)
            offsets = tuple(low if i == axis else 0 for i in range(len(shape)))
            held[rank].append((_spec(key, tensor, offsets, tuple(part.shape)), raw(part)))

    def _write(
        self,
        folder: str,
        step: int,
        rank: int,
        held: list[tuple[TensorSpec, bytes]],
        data: Mapping[str, Any],
        borrow: ReceiptRecord | None,
    ) -> ReceiptRecord:
        texts = [(name, json.dumps(tree).encode()) for name, tree in data.items()]
        layout = lay_out(rank, [spec for spec, _ in held], [(name, len(text)) for name, text in texts])
        image = bytearray(layout.size_bytes)
        image[: len(layout.header)] = layout.header
        for record, index in zip(layout.tensors, layout.order, strict=True):
            image[record.start : record.start + len(held[index][1])] = held[index][1]
        for plain, (_, text) in zip(layout.objects, texts, strict=True):
            image[plain.start : plain.start + len(text)] = text
        name = folder + shard_name(rank)
        self.tier.write(name, [memoryview(image)], len(image))
        shard = ShardRecord(
            name=name.removeprefix(DATA),
            size_bytes=len(image),
            chunk_bytes=CHUNK_BYTES,
            chunks=chunk_digests(memoryview(image)),
        )
        files = borrow.files() if borrow else ()
        receipt = ReceiptRecord(
            rank=rank,
            world_size=self.world_size,
            step=step,
            incarnation=1,
            shard=shard,
            tensors=layout.tensors,
            objects=layout.objects,
            borrowed=tuple(BorrowedRecord(shard=file, tensors=ts) for file, ts in files if ts),
        )
        self.tier.create(folder + receipt_name(rank), seal(receipt))
        return receipt


def _spec(
    key: str, tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...], rank_only: bool = False
) -> TensorSpec:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return TensorSpec(key=key, dtype=dtype, shape=shape, offsets=offsets, sizes=sizes, rank_only=rank_only)


def held(url: Path | str, step: int, component: str = "model") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of all tensors of a checkpoint's component, ties resolved."""
    catalog = open_catalog(str(url))
    with Inventory(catalog.open_checkpoint(catalog.find(step))) as inventory:
        found = inventory.component(component)
        tensors = {name: (t.dtype, t.shape, blob_bytes(t.data)) for name, t in found.tensors.items()}
        return tensors | {name: tensors[kept] for name, kept in found.ties.items()}


def blob_bytes(blob: Blob) -> bytes:
    out = memoryview(bytearray(blob.size_bytes))
    blob.read_into(0, out)
    return bytes(out)


def expected(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), raw(t)) for name, t in tensors.items()}


def flip(path: Path, byte: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.chmod(0o644)
    path.write_bytes(data)
