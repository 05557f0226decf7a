"""A job on a watched disk that saves, restarts and prunes by way of the product's own code, and notes what it knows.

The notes are what a user could have been told: `committed` when a commit was reported, `fenced`, `pruned`. A judge
takes them, up to any point of the log, for promises (support_crash_judge.py).
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from unittest.mock import patch

import msgspec
from click.testing import CliRunner
from support_crash_log import WatchedFs

from ckptrt.clock import FakeClock
from ckptrt.errors import CorruptError, Error, NotFoundError
from ckptrt.plan import Read
from ckptrt.sources import Part, StoredSource
from ckptrt.storage import persister
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.cli import cli
from ckptrt.storage.commit import commit
from ckptrt.storage.copy import copy, plan_copy
from ckptrt.storage.layout import DATA, CommitId, data_dir, parse_data_dir, receipt_name
from ckptrt.storage.pins import pin, unpin
from ckptrt.storage.prune import prune_committed
from ckptrt.storage.records import Owner, Parent, ReceiptRecord, TensorRecord, unseal
from ckptrt.storage.retention import Keep
from ckptrt.storage.shardfile import TensorSpec, lay_out, tensor_bytes
from ckptrt.storage.slots import SlotHeader, SlotMeta
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.local import LocalTier

__all__ = [
    "COLUMNS",
    "WORLD_SIZE",
    "Job",
    "Shard",
    "Violation",
    "load",
    "make_shard",
    "publish",
    "save_on",
    "write_rank",
]

Attempts: TypeAlias = Mapping[CommitId, Mapping[str, int]]  # nonce -> columns, of each step that was begun

WORLD_SIZE = 2
COLUMNS = 200  # so that a shard file has a header page, a whole page of data, and a part of one


class Violation(Exception):
    """An invariant is broken."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank saves: the bytes of its shard file and what lies where."""

    image: bytes
    tensors: tuple[TensorRecord, ...]
    meta: SlotMeta


@functools.lru_cache(maxsize=512)
def make_shard(commit_id: CommitId, nonce: str, rank: int, columns: int = COLUMNS) -> Shard:
    """The rank's state, unlike that of any other step, incarnation, attempt or rank, but for one frozen tensor."""
    rows = 7
    shape = (rows * WORLD_SIZE, columns)
    specs = [
        TensorSpec(key="model.weight", dtype="float32", shape=shape, offsets=(rows * rank, 0), sizes=(rows, columns)),
        TensorSpec(key="rng", dtype="uint8", shape=(5,), offsets=(0,), sizes=(5,), rank_only=True),
        TensorSpec(key="base", dtype="float16", shape=(40 * WORLD_SIZE,), offsets=(40 * rank,), sizes=(40,)),
    ]
    layout = lay_out(rank, specs, [("loop", 9)])
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    moving, frozen = random.Random(f"{commit_id} {nonce} {rank}"), random.Random(f"base {rank}")
    for tensor in layout.tensors:
        rng = frozen if tensor.key == "base" else moving
        image[tensor.start : tensor.start + tensor_bytes(tensor)] = rng.randbytes(tensor_bytes(tensor))
    image[layout.objects[0].start :] = b'{"lr": 5}'
    steady = tuple(index for index, tensor in enumerate(layout.tensors) if tensor.key == "base")
    meta = SlotMeta(tensors=layout.tensors, objects=layout.objects, steady=steady)
    return Shard(image=bytes(image), tensors=layout.tensors, meta=meta)


def write_rank(
    tier: Tier,
    commit_id: CommitId,
    nonce: str,
    rank: int,
    columns: int = COLUMNS,
    base: ReceiptRecord | None = None,
) -> bytes:
    """What the persister does with a rank's slot; returns the receipt. base: of the commit to borrow from."""
    shard = make_shard(commit_id, nonce, rank, columns)
    header = SlotHeader(
        rank=rank,
        world_size=WORLD_SIZE,
        step=commit_id.step,
        incarnation=commit_id.incarnation,
        image_bytes=len(shard.image),
        meta_start=0,
        meta_bytes=0,
        meta_xxh3=0,
    )
    folder = data_dir(commit_id, nonce)
    return persister.write_shard(tier, folder, header, pack(rank, shard.meta, memoryview(shard.image), base))


def save_on(
    tier: Tier,
    catalog: Catalog,
    commit_id: CommitId,
    nonce: str,
    bases: Mapping[int, ReceiptRecord] | None = None,
) -> None:
    """A whole save by all ranks, one after another."""
    bases = bases or {}
    receipts = {rank: write_rank(tier, commit_id, nonce, rank, base=bases.get(rank)) for rank in range(WORLD_SIZE)}
    publish(tier, catalog, commit_id, nonce, receipts)


def publish(tier: Tier, catalog: Catalog, commit_id: CommitId, nonce: str, receipts: dict[int, bytes]) -> None:
    data = data_dir(commit_id, nonce).removeprefix(DATA).rstrip("/")
    commit(tier, catalog, commit_id.step, commit_id.incarnation, data, receipts, "tests", FakeClock())


def load(catalog: Catalog, commit: CommitId, begun: Attempts, reported: str | None = None) -> None:
    """Read all of a checkpoint as a restore does, and compare it with what was saved. CorruptError if it can't be.

    begun: what may be there. reported: the attempt that was said to have been committed.
    """
    checkpoint = catalog.open_checkpoint(commit)
    attempts = begun.get(commit, {})
    parsed = parse_data_dir(DATA + checkpoint.record.data)
    nonce = parsed[1] if parsed else ""
    if nonce not in attempts or nonce != (reported or nonce):
        raise Violation("I4", f"{commit} points to {checkpoint.record.data}; there were attempts {sorted(attempts)}")
    source = StoredSource(checkpoint)
    if source.world_size != WORLD_SIZE:
        raise Violation("I6", f"{commit} has {source.world_size} ranks")
    for rank in range(WORLD_SIZE):
        _compare(source, rank, make_shard(commit, nonce, rank, attempts[nonce]), commit)


def _compare(source: StoredSource, rank: int, saved: Shard, commit: CommitId) -> None:
    """Whatever lies in the rank's own file or is borrowed: all of its state, and nothing else."""
    wanted = {tensor.key: (tensor, tensor_bytes(tensor)) for tensor in saved.meta.tensors}
    for part in source.parts():
        if part.rank != rank:
            continue
        for tensor in part.tensors:
            there, size = wanted.pop(tensor.key, (None, 0))
            if there is None or msgspec.structs.replace(tensor, start=there.start) != there:
                raise Violation("I4", f"{commit}: {tensor.key} of rank {rank} is not what it saved")
            _compare_bytes(source, part, Read(tensor.start, size), saved.image[there.start :], commit)
        for plain, record in zip(saved.meta.objects, part.objects, strict=False):
            read = Read(record.start, record.size_bytes)
            _compare_bytes(source, part, read, saved.image[plain.start :], commit)
    if wanted or len(source.parts()[rank].objects) != len(saved.meta.objects):
        raise Violation("I4", f"{commit}: {sorted(wanted) or 'plain data'} of rank {rank} is missing")


def _compare_bytes(source: StoredSource, part: Part, read: Read, saved: bytes, commit: CommitId) -> None:
    start, size = read
    with source.mapped(part, [read]) as buffer:
        if buffer[start : start + size] != saved[:size]:
            raise Violation("I6", f"{commit}: wrong bytes of rank {part.rank} were loaded at {start}")


class Job:
    """What happens in a scenario. `root` lies two folders below the disk's durable one.

    lenient: a step that fails with one of ckptrt's errors is put down and the job goes on, as a real one would.
    borrows: whether what is frozen stays where the last commit has it.
    """

    borrows = False

    def __init__(self, fs: WatchedFs, lenient: bool = False) -> None:
        self.fs = fs
        self.lenient = lenient
        self.root = f"{fs.base}/runs/a"
        self.errors: list[Error] = []
        self.tier = LocalTier(self.root, fs=fs)
        self.catalog = Catalog(self.tier, FakeClock())
        self._columns = COLUMNS
        self._bases: dict[int, ReceiptRecord] = {}
        self._begun: dict[CommitId, dict[str, int]] = {}

    def restart(self, columns: int = COLUMNS) -> None:
        """Go on as a new process: nothing is remembered but what lies on the disk."""
        self.fs.revive()
        self.tier = LocalTier(self.root, fs=self.fs)
        self.catalog = Catalog(self.tier, FakeClock())
        self._columns = columns
        self._bases.clear()

    def attempt(self, work: Callable[[], None]) -> bool:
        """Do a step of the job; False if it failed and that is no surprise."""
        try:
            work()
        except Error as error:
            if not self.lenient:
                raise
            self.errors.append(error)
            return False
        return True

    # --- what a job does

    def create(self) -> bool:
        def work() -> None:
            self.fs.note("creating")
            record = self.catalog.create_run("crash")
            if record is not None:
                self.fs.note("run", record.run_id)

        return self.attempt(work)

    def fence(self, incarnation: int, parent: tuple[int, int] | None = None, pid: int = 4711) -> bool:
        owner = Owner(host="node-a", pid=pid, user="ada")
        origin = Parent(step=parent[0], incarnation=parent[1]) if parent else None

        def work() -> None:
            self.fs.note("fencing", incarnation, parent)
            self.catalog.write_fence(incarnation, origin, WORLD_SIZE, owner)
            self.fs.note("fenced", incarnation)
            if self.borrows and parent is not None:
                checkpoint = self.catalog.open_checkpoint(CommitId(*parent))
                self._bases = {rank: checkpoint.receipt(rank) for rank in range(WORLD_SIZE)}

        return self.attempt(work)

    def save(self, step: int, incarnation: int = 1, nonce: str = "0a") -> bool:
        """All ranks' shard files, then the commit; reported when it returns."""
        commit_id = CommitId(step, incarnation)

        if self.lenient and ("fenced", incarnation) not in (op.note for op in self.fs.log):
            return False  # a job whose fence could not be written doesn't start

        def work() -> None:
            receipts = {rank: self.write(commit_id, rank, nonce) for rank in range(WORLD_SIZE)}
            self.publish(commit_id, receipts, nonce)

        return self.attempt(work)

    def write(self, commit_id: CommitId, rank: int, nonce: str = "0a") -> bytes:
        self.fs.note("saving", commit_id, nonce, self._columns)
        self._begun.setdefault(commit_id, {})[nonce] = self._columns
        return write_rank(self.tier, commit_id, nonce, rank, self._columns, self._bases.get(rank))

    def publish(self, commit_id: CommitId, receipts: dict[int, bytes], nonce: str = "0a") -> None:
        publish(self.tier, self.catalog, commit_id, nonce, receipts)
        self.fs.note("committed", commit_id, nonce)
        if self.borrows:
            self._bases = {rank: unseal(ReceiptRecord, data, "a receipt") for rank, data in receipts.items()}

    def resume(self, step: int, incarnation: int = 1, nonce: str = "0a") -> None:
        """What a persister does that is given the slots again after another one died over them."""
        commit_id = CommitId(step, incarnation)
        folder, receipts = data_dir(commit_id, nonce), {}
        for rank in range(WORLD_SIZE):
            try:
                receipts[rank], _ = persister.adopt(self.tier, folder + receipt_name(rank), (*commit_id, rank))
            except NotFoundError:
                receipts[rank] = self.write(commit_id, rank, nonce)
        self.publish(commit_id, receipts, nonce)

    def prune(
        self, keep_last: int = 1, keeps: tuple[tuple[int, int], ...] = (), incarnation: int | None = None
    ) -> bool:
        """What a running job does after a commit. keeps: what this may not remove."""

        def work() -> None:
            self.fs.note("pruning", keeps)
            result = prune_committed(self.catalog, Keep(last=keep_last), incarnation=incarnation)
            self.fs.note("pruned", tuple(result.deleted))

        return self.attempt(work)

    def prune_by_hand(self, keep_last: int = 1, keeps: tuple[tuple[int, int], ...] = ()) -> bool:
        """`ckptrt prune`, all the way through the command line."""
        self.fs.note("pruning", keeps)
        with patch("ckptrt.storage.tiers.local.Fs", lambda: self.fs):
            arguments = ["prune", self.root, "--keep-last", str(keep_last), "--grace", "0s", "--yes"]
            result = CliRunner().invoke(cli, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code == 0:
            self.fs.note("pruned", ())
        return result.exit_code == 0

    def pin(self, commit_id: CommitId) -> bool:
        def work() -> None:
            pin(self.catalog, commit_id, clock=FakeClock())
            self.fs.note("pinned", commit_id)

        return self.attempt(work)

    def unpin(self, commit_id: CommitId) -> bool:
        def work() -> None:
            self.fs.note("unpinning", commit_id)
            unpin(self.catalog, commit_id)
            self.fs.note("unpinned", commit_id)

        return self.attempt(work)

    def copy_from(self, source: Catalog, commits: Sequence[CommitId]) -> bool:
        """Bring checkpoints of another place here, of the first attempts at them."""
        parents = {i: fence.parent for i, fence in source.fences().items()}
        for incarnation, parent in parents.items():
            self.fs.note("fencing", incarnation, (parent.step, parent.incarnation) if parent else None)
        for commit_id in commits:
            self.fs.note("saving", commit_id, "0a", COLUMNS)

        def work() -> None:
            plan = plan_copy(source, self.tier, list(commits))
            copy(source, self.tier, plan, num_parallel=1)
            self.fs.note("run", "crash")
            for incarnation in plan.fences:
                self.fs.note("fence copied", incarnation)
            for commit_id in commits:
                self.fs.note("committed", commit_id, "0a")

        return self.attempt(work)

    def restore(self) -> bool:
        """Load the newest checkpoint, or the next older one if it turns out to be damaged."""

        def work() -> None:
            bad = {op.note[1] for op in self.fs.log if op.note and op.note[0] == "damaged"}
            tried: set[CommitId] = set()
            while (selection := self.catalog.newest_good(besides=tried)).commit is not None:
                tried.add(selection.commit.id)
                try:
                    load(self.catalog, selection.commit.id, self._begun)
                except CorruptError as error:
                    if selection.commit.id not in bad:
                        raise Violation("I3", f"a good checkpoint is passed over: {error.what}") from error
                else:
                    break
            if selection.skipped:
                raise Violation("I3", f"{selection.skipped[0].id} is passed over: {selection.skipped[0].reason}")

        return self.attempt(work)

    def damage(self, name: str, commit_id: CommitId) -> None:
        """The disk changes a file by itself: not a crash, but what a fallback needs."""
        self.fs.note("damaged", commit_id)
        hook, self.fs.on_call = self.fs.on_call, lambda call, number: None
        with open(f"{self.root}/{name}", "rb") as file:
            data = file.read()
        fd = self.fs.open(f"{self.root}/{name}", os.O_WRONLY)
        self.fs.pwrite(fd, memoryview(bytes(255 - byte for byte in data[-64:])), len(data) - 64)
        self.fs.fsync(fd)
        self.fs.close(fd)
        self.fs.on_call = hook
