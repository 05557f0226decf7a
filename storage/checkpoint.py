"""One committed checkpoint, read piece by piece: the manifest's head, then the sections that somebody asks for."""

from __future__ import annotations

from collections.abc import Iterator

from ckptrt.errors import CorruptError, UsageError
from ckptrt.storage.layout import DATA, MANIFEST, CommitId, parse_data_dir, parse_shard_path
from ckptrt.storage.manifest import borrowed_files, open_head, section_bytes
from ckptrt.storage.records import CommitRecord, ManifestHead, ReceiptOutline, ReceiptRecord, Section, unseal
from ckptrt.storage.tiers import Tier

__all__ = ["Checkpoint", "check_commit", "check_head", "check_receipt"]

_SECTIONS_READ_BYTES = 16 << 20


class Checkpoint:
    """A checkpoint behind a verified commit record. Every byte that is handed out has been verified.

    Methods raise CorruptError (or NotFoundError for a file that is gone) and name the file. Threads may share it.
    """

    def __init__(self, tier: Tier, record: CommitRecord) -> None:
        self.tier = tier
        self.record = record
        self.id = CommitId(record.step, record.incarnation)
        self.folder = f"{DATA}{record.data}/"
        self.manifest_name = self.folder + MANIFEST
        self._head: ManifestHead | None = None

    def head(self) -> ManifestHead:
        """World size and where each rank's receipt and shard file lie; read once."""
        if self._head is None:
            reference = self.record.manifest
            actual_bytes = self.tier.size(self.manifest_name)
            if actual_bytes != reference.size_bytes:
                raise CorruptError(
                    f"{self.manifest_name} is damaged: it has {actual_bytes} bytes instead of {reference.size_bytes}"
                )
            frame = self.tier.read(self.manifest_name, 0, reference.head_bytes)
            head = open_head(frame, reference, self.manifest_name)
            check_head(head, self.record, self.manifest_name)
            self._head = head
        return self._head

    def receipt(self, rank: int) -> ReceiptRecord:
        """What one rank stored; reads that rank's section only."""
        return self.open_record(rank, self.receipt_bytes(rank))

    def receipt_bytes(self, rank: int) -> bytes:
        """The same as the rank wrote it, byte for byte."""
        section = self._section(rank)
        frame = self.tier.read(self.manifest_name, self._start(section), section.size_bytes)
        return section_bytes(frame, section, self.manifest_name)

    def receipts(self) -> Iterator[ReceiptRecord]:
        """What every rank stored, in order of ranks; reads the manifest in a few large pieces."""
        for rank, data in enumerate(self.records()):
            yield self.open_record(rank, data)

    def records(self) -> Iterator[bytes]:
        """The same as the ranks wrote it, byte for byte: for who needn't decode all of it."""
        batch: list[Section] = []
        for section in self.head().sections:
            if batch and section.start + section.size_bytes - batch[0].start > _SECTIONS_READ_BYTES:
                yield from self._read(batch)
                batch = []
            batch.append(section)
        yield from self._read(batch)

    def open_record(self, rank: int, data: bytes) -> ReceiptRecord:
        """A rank's receipt from the bytes of its record, checked against what the manifest's head says of it."""
        receipt = unseal(ReceiptRecord, data, self.manifest_name)
        check_receipt(receipt, self._section(rank), self.record, self.manifest_name)
        return receipt

    def outlines(self) -> Iterator[ReceiptOutline]:
        """What every rank stored, in order of ranks, the tensors not yet decoded."""
        for section, data in zip(self.head().sections, self.records(), strict=True):
            outline = unseal(ReceiptOutline, data, self.manifest_name)
            check_receipt(outline, section, self.record, self.manifest_name)
            yield outline

    def file_sizes(self) -> dict[str, int]:
        """Names and bytes of everything in the folders that hold this checkpoint's shard files."""
        folders = sorted({name.partition("/")[0] for section in self.head().sections for name, _ in section.files()})
        return {e.name: e.size_bytes for folder in folders for e in self.tier.list(f"{DATA}{folder}/")}

    def problems(self) -> list[str]:
        """Why this checkpoint can't be whole, as far as names and sizes tell: empty if all files are there."""
        found: list[str] = []
        sizes = self.file_sizes()
        for section in self.head().sections:
            for shard, size_bytes in section.files():
                name = DATA + shard
                if name not in sizes:
                    found.append(f"{name} (rank {section.rank}) is missing")
                elif sizes[name] != size_bytes:
                    found.append(f"{name} (rank {section.rank}) has {sizes[name]} bytes instead of {size_bytes}")
        return found

    def _section(self, rank: int) -> Section:
        sections = self.head().sections
        if not 0 <= rank < len(sections):
            raise UsageError(f"step {self.id.step} was written by {len(sections)} ranks; there is no rank {rank}")
        return sections[rank]

    def _start(self, section: Section) -> int:
        return self.record.manifest.head_bytes + section.start

    def _read(self, batch: list[Section]) -> Iterator[bytes]:
        if not batch:
            return
        first = batch[0].start
        data = self.tier.read(self.manifest_name, self._start(batch[0]), batch[-1].start + batch[-1].size_bytes - first)
        for section in batch:
            frame = data[section.start - first : section.start - first + section.size_bytes]
            yield section_bytes(frame, section, self.manifest_name)


def check_commit(record: CommitRecord, commit: CommitId, where: str) -> None:
    """A commit must say what its name says, and point into data/ only. Raises CorruptError."""
    if (record.step, record.incarnation) != commit:
        raise CorruptError(
            f"{where} is damaged: it is the commit of step {record.step}, incarnation {record.incarnation}"
        )
    folder = parse_data_dir(DATA + record.data)
    if folder is None or folder[0] != commit or "/" in record.data:
        raise CorruptError(f"{where} is damaged: {record.data!r} can't be its data folder")
    for name in record.references:
        if "/" in name or parse_data_dir(DATA + name) is None:
            raise CorruptError(f"{where} is damaged: {name!r} can't be a data folder")
    reference = record.manifest
    if (
        record.world_size < 1
        or not 0 <= record.new_bytes <= record.size_bytes
        or not 0 < reference.head_bytes <= reference.size_bytes
    ):
        raise CorruptError(f"{where} is damaged: its sizes can't be true")


def check_head(head: ManifestHead, record: CommitRecord, where: str) -> None:
    """A manifest's head must belong to its commit, with one section a rank, back to back. Raises CorruptError."""
    if (head.step, head.incarnation, head.world_size) != (record.step, record.incarnation, record.world_size):
        raise CorruptError(f"{where} is damaged: it belongs to another checkpoint than its commit")
    position = 0
    for rank, section in enumerate(head.sections):
        if section.rank != rank or section.start != position or section.size_bytes < 1 or section.shard_bytes < 0:
            raise CorruptError(f"{where} is damaged: the section of rank {rank} is out of place")
        if any(file.shard_bytes < 0 or not 0 <= file.used_bytes <= file.shard_bytes for file in section.borrowed):
            raise CorruptError(f"{where} is damaged: the sizes of rank {rank}'s borrowed files can't be true")
        for number, (shard, _) in enumerate(section.files()):
            _check_shard(shard, record, where, is_own=number == 0)
        position += section.size_bytes
    if len(head.sections) != head.world_size or record.manifest.head_bytes + position != record.manifest.size_bytes:
        raise CorruptError(f"{where} is damaged: its sections don't add up to it")


def check_receipt(receipt: ReceiptRecord | ReceiptOutline, section: Section, record: CommitRecord, where: str) -> None:
    """A receipt must belong to its checkpoint and rank, and name the shard that the head names. Raises CorruptError."""
    shard = receipt.shard
    mine = (record.step, record.incarnation, record.world_size, section.rank, section.shard, section.shard_bytes)
    if (receipt.step, receipt.incarnation, receipt.world_size, receipt.rank, shard.name, shard.size_bytes) != mine:
        raise CorruptError(f"{where} is damaged: the receipt of rank {section.rank} belongs to something else")
    try:
        borrowed = borrowed_files(receipt)
    except UsageError as error:
        raise CorruptError(f"{where} is damaged: in the receipt of rank {section.rank}, {error.what}") from None
    if borrowed != section.borrowed:
        raise CorruptError(f"{where} is damaged: rank {section.rank} borrows from other files than its head says")


def _check_shard(name: str, record: CommitRecord, where: str, is_own: bool) -> None:
    path = parse_shard_path(name)
    if path is None:
        raise CorruptError(f"{where} is damaged: {name!r} can't be a shard file")
    if path[0] not in ((record.data,) if is_own else record.references):
        raise CorruptError(f"{where} is damaged: its commit doesn't name the folder of {name!r}")
