"""Is every byte of a checkpoint still what was written? Metadata alone, or all data too.

Nothing is changed. Memory is bounded by a few buffers of 8 MiB and the metadata of one rank, plus one small entry per
region for the check that the regions of each tensor cover it exactly once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from ckptrt.errors import CorruptError, NotFoundError, UsageError, VersionError
from ckptrt.storage.boxes import overlap
from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.layout import DATA, RUN, CommitId, commit_name, fence_name, pin_name, receipt_name
from ckptrt.storage.pins import pins
from ckptrt.storage.records import ReceiptRecord, ShardRecord, TensorRecord
from ckptrt.storage.shardfile import DIGEST_DIGITS, bad_chunks, tensor_bytes

__all__ = ["Affected", "DataExaminer", "Finding", "Report", "verify", "verify_commit", "verify_records"]

_READ_BYTES = 8 << 20
_CHUNK_MAX_BYTES = 64 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Affected:
    """What may be hit by damage: a tensor (rows of its global first dimension, if it has any) or plain data."""

    key: str
    rows: tuple[int, int] | None = None  # first and last, both included


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that isn't as written.

    ranks: whose data it is about.
    start, end: the damaged bytes of the file, end excluded; None if it is about the file as a whole.
    is_fatal: the checkpoint can't be loaded. Otherwise a spare copy is damaged, and what it copies is whole.
    """

    file: str
    what: str
    start: int | None = None
    end: int | None = None
    affects: tuple[Affected, ...] = ()
    ranks: tuple[int, ...] = ()
    is_fatal: bool = True


@dataclass(slots=True, kw_only=True)
class Report:
    """What was checked and what was found. Findings are in the order of ranks and offsets."""

    commit: CommitId
    num_files: int = 0
    num_tensors: int = 0
    bytes_read: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.findings

    @property
    def is_loadable(self) -> bool:
        return not any(finding.is_fatal for finding in self.findings)


def verify_records(catalog: Catalog) -> list[Finding]:
    """Check the run record and every fence, pin and commit record of a run.

    Raises VersionError if a fence is of a newer format. Commits off the path are checked too.
    """
    findings: list[Finding] = []
    if catalog.run_problem:
        findings.append(Finding(file=RUN, what=catalog.run_problem, is_fatal=False))
    overview = catalog.overview()
    for incarnation, problem in overview.bad_fences.items():
        findings.append(Finding(file=fence_name(incarnation), what=problem, is_fatal=False))
    findings.extend(
        Finding(file=pin_name(commit), what="it is damaged; it still pins", is_fatal=False)
        for commit, record in pins(catalog).items()
        if record is None
    )
    findings.extend(
        Finding(file=commit_name(commit.id), what=commit.reason)
        for commit in overview.commits
        if commit.state in ("damaged", "too-new")
    )
    return findings


def verify_commit(
    catalog: Catalog,
    commit: CommitId,
    read_data: bool = False,
    progress: Callable[[int], None] | None = None,
    part: tuple[int, int] | None = None,
) -> Report:
    """verify() of a commit whose record may itself be damaged."""
    try:
        checkpoint = catalog.open_checkpoint(commit)
    except (CorruptError, NotFoundError, VersionError) as error:
        return Report(commit=commit, findings=[Finding(file=commit_name(commit), what=error.what)])
    return verify(checkpoint, read_data, progress, part)


class DataExaminer:
    """Tells good commits from damaged ones, for prune. The first good one is read whole, the others only looked at.

    So at least one of what stays is known to load, and a flipped bit in it can't cost the older ones that still do.
    """

    def __init__(self, catalog: Catalog, progress: Callable[[int], None] | None = None) -> None:
        self._catalog = catalog
        self._progress = progress
        self._proven = False

    def __call__(self, commit: CommitId) -> CommitInfo:
        info = self._catalog.examine(commit)
        if info.state != "committed" or self._proven:
            return info
        report = verify_commit(self._catalog, commit, read_data=True, progress=self._progress)
        if report.is_loadable:
            self._proven = True
            return info
        finding = next(finding for finding in report.findings if finding.is_fatal)
        return CommitInfo(id=commit, state="damaged", reason=f"{finding.file}: {finding.what}", record=info.record)


def verify(
    checkpoint: Checkpoint,
    read_data: bool = False,
    progress: Callable[[int], None] | None = None,
    part: tuple[int, int] | None = None,
) -> Report:
    """Check a checkpoint's manifest, receipts, regions and files' sizes, and all bytes of its files if asked to.

    progress: called with the number of bytes each time some were read, from several threads. part: of the data read
    only this one of so many parts, such as (3, 10); all parts together are all data. Damage is reported;
    raised is only what says nothing about the data (the store can't be reached, access denied).
    """
    report = Report(commit=checkpoint.id)
    try:
        checkpoint.head()
    except (CorruptError, NotFoundError) as error:
        report.findings.append(Finding(file=checkpoint.manifest_name, what=error.what))
        return report
    cover = _Cover()
    ranks = range(checkpoint.record.world_size)
    shards = {shard.name: shard for rank in ranks for shard in _check_rank(checkpoint, rank, report, cover)}
    report.findings.extend(cover.findings(checkpoint.manifest_name))
    report.num_tensors = cover.num_tensors
    report.num_files = len({name for section in checkpoint.head().sections for name, _ in section.files()})
    _check_summary(checkpoint, report)
    whole = _check_sizes(checkpoint, report)
    if read_data:
        _read_all(checkpoint, {name: shard for name, shard in shards.items() if name in whole}, report, progress, part)
    return report


# --- metadata


def _check_rank(checkpoint: Checkpoint, rank: int, report: Report, cover: _Cover) -> list[ShardRecord]:
    """Check a rank's section; gives the files that it names."""
    try:
        receipt = checkpoint.receipt(rank)
        _check_places(receipt, checkpoint.manifest_name)
    except (CorruptError, NotFoundError) as error:
        report.findings.append(Finding(file=checkpoint.manifest_name, what=error.what, ranks=(rank,)))
        return []
    cover.add(receipt)
    # The rank's own receipt file is the source of its section; where it is still there, it must say the same.
    name = checkpoint.folder + receipt_name(rank)
    copy = checkpoint.tier.read_many([name]).get(name)
    if copy is not None and copy != checkpoint.receipt_bytes(rank):
        what = "it differs from its copy in the manifest, which is whole"
        report.findings.append(Finding(file=name, what=what, ranks=(rank,), is_fatal=False))
    return [shard for shard, _ in receipt.files()]


def _check_places(receipt: ReceiptRecord, where: str) -> None:
    """Everything that a receipt names must lie inside its file and its tensor. Raises CorruptError."""
    whose = f"{where} is damaged: in the receipt of rank {receipt.rank}"
    for shard, tensors in receipt.files():
        _check_file(shard, tensors, whose)
    for plain in receipt.objects:
        if plain.start < 0 or plain.size_bytes < 0 or plain.start + plain.size_bytes > receipt.shard.size_bytes:
            raise CorruptError(f"{whose} {plain.key} lies outside its file")


def _check_file(shard: ShardRecord, tensors: tuple[TensorRecord, ...], whose: str) -> None:
    if not 0 < shard.chunk_bytes <= _CHUNK_MAX_BYTES:
        raise CorruptError(f"{whose} a chunk has {shard.chunk_bytes} bytes")
    if len(shard.chunks) != DIGEST_DIGITS * -(-shard.size_bytes // shard.chunk_bytes):
        raise CorruptError(f"{whose} the digests are not as many as the chunks of {shard.name}")
    for tensor in tensors:
        if not len(tensor.shape) == len(tensor.offsets) == len(tensor.sizes):
            raise CorruptError(f"{whose} {tensor.key} has a region of another number of dimensions")
        inside = all(at >= 0 and size >= 0 and at + size <= n for n, at, size in _dims(tensor))
        if not inside or tensor.start < 0 or tensor.start + _size(tensor, whose) > shard.size_bytes:
            raise CorruptError(f"{whose} {tensor.key} lies outside its file or its shape")


def _dims(tensor: TensorRecord) -> Iterator[tuple[int, int, int]]:
    return zip(tensor.shape, tensor.offsets, tensor.sizes, strict=True)


def _size(tensor: TensorRecord, whose: str) -> int:
    try:
        return tensor_bytes(tensor)
    except UsageError:
        raise CorruptError(f"{whose} {tensor.key} has the unknown dtype {tensor.dtype!r}") from None


def _check_summary(checkpoint: Checkpoint, report: Report) -> None:
    """What the commit record says for lists and for prune must fit the manifest."""
    record, sections = checkpoint.record, checkpoint.head().sections
    folders = {name.partition("/")[0] for section in sections for name, _ in section.files()} - {record.data}
    size_bytes, new_bytes = sum(s.logical_bytes for s in sections), sum(s.shard_bytes for s in sections)
    if (record.size_bytes, record.new_bytes, set(record.references)) != (size_bytes, new_bytes, folders):
        what = f"it says {record.size_bytes} bytes ({record.new_bytes} new) and other folders "
        what += f"{sorted(record.references)}, the manifest says {size_bytes} ({new_bytes} new) and {sorted(folders)}"
        report.findings.append(Finding(file=commit_name(checkpoint.id), what=what, is_fatal=False))


def _check_sizes(checkpoint: Checkpoint, report: Report) -> set[str]:
    """Names below data/ of the shard files that are there with their sizes."""
    sizes = checkpoint.file_sizes()
    whole: set[str] = set()
    for name, size_bytes in sorted({file for section in checkpoint.head().sections for file in section.files()}):
        actual = sizes.get(DATA + name)
        if actual == size_bytes:
            whole.add(name)
            continue
        what = "it is missing" if actual is None else f"it has {actual} bytes instead of {size_bytes}"
        report.findings.append(_data_finding(checkpoint, name, min(actual or 0, size_bytes), size_bytes, what))
    return whole


class _Cover:
    """Do the regions of every tensor cover it exactly once? Gathered rank by rank, told at the end."""

    def __init__(self) -> None:
        self._regions: dict[str, list[tuple[int, TensorRecord]]] = {}
        self._num_rank_only = 0

    @property
    def num_tensors(self) -> int:
        return len(self._regions) + self._num_rank_only

    def add(self, receipt: ReceiptRecord) -> None:
        for tensor in receipt.all_tensors():
            if tensor.rank_only:
                self._num_rank_only += 1
            else:
                self._regions.setdefault(tensor.key, []).append((receipt.rank, tensor))

    def findings(self, file: str) -> Iterator[Finding]:
        for key, regions in self._regions.items():
            what = _cover_problem([tensor for _, tensor in regions])
            if what:
                ranks = tuple(sorted({rank for rank, _ in regions}))
                yield Finding(file=file, what=f"tensor {key} {what}", affects=(Affected(key=key),), ranks=ranks)


def _cover_problem(regions: list[TensorRecord]) -> str:
    """Why these regions of one tensor don't cover it exactly once; empty if they do."""
    first = regions[0]
    if any((region.shape, region.dtype) != (first.shape, first.dtype) for region in regions):
        return "has more than one shape or dtype"
    filled = [region for region in regions if prod(region.sizes)]
    # Of regions inside the shape that don't overlap, the sum tells whether they leave anything out.
    if overlap(filled):
        return "has regions that overlap"
    count, total = sum(prod(region.sizes) for region in filled), prod(first.shape)
    return "" if count == total else f"has {count} of its {total} elements"


# --- data


def _read_all(
    checkpoint: Checkpoint,
    shards: dict[str, ShardRecord],
    report: Report,
    progress: Callable[[int], None] | None,
    part: tuple[int, int] | None,
) -> None:
    """Read every file in large pieces on a few threads and report runs of chunks that differ."""
    local = threading.local()

    def check(piece: _Piece) -> list[int]:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(_READ_BYTES)
        bad = _bad_chunks(checkpoint, piece, local)
        if progress is not None:
            progress(piece.size_bytes)
        return bad

    bad_of: dict[str, list[int]] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptrt-verify") as pool:
        for piece, bad in _in_order(pool, check, _pieces(shards.values(), part)):
            report.bytes_read += piece.size_bytes
            bad_of.setdefault(piece.shard.name, []).extend(bad)
    for name, bad in bad_of.items():
        shard = shards[name]
        for first, last in _runs(bad):
            start, end = first * shard.chunk_bytes, min((last + 1) * shard.chunk_bytes, shard.size_bytes)
            what = "it doesn't have the bytes that were written"
            report.findings.append(_data_finding(checkpoint, name, start, end, what))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some whole chunks of a shard file."""

    shard: ShardRecord
    first_chunk: int
    size_bytes: int


def _pieces(shards: Iterable[ShardRecord], part: tuple[int, int] | None) -> Iterator[_Piece]:
    pieces = _all_pieces(shards)
    return pieces if part is None else islice(pieces, part[0] - 1, None, part[1])


def _all_pieces(shards: Iterable[ShardRecord]) -> Iterator[_Piece]:
    for shard in shards:
        chunks = max(1, _READ_BYTES // shard.chunk_bytes)
        for start in range(0, shard.size_bytes, chunks * shard.chunk_bytes):
            size_bytes = min(chunks * shard.chunk_bytes, shard.size_bytes - start)
            yield _Piece(shard=shard, first_chunk=start // shard.chunk_bytes, size_bytes=size_bytes)


def _in_order(
    pool: ThreadPoolExecutor, check: Callable[[_Piece], list[int]], pieces: Iterator[_Piece]
) -> Iterator[tuple[_Piece, list[int]]]:
    """Like pool.map, but no more than a few pieces are under way, however many there are."""
    pending = deque((piece, pool.submit(check, piece)) for piece in islice(pieces, 2 * _THREADS))
    while pending:
        piece, future = pending.popleft()
        yield piece, future.result()
        pending.extend((piece, pool.submit(check, piece)) for piece in islice(pieces, 1))


def _bad_chunks(checkpoint: Checkpoint, piece: _Piece, local: threading.local) -> list[int]:
    """Numbers of the chunks in this piece that differ from their digests; all of them if it can't be read in full."""
    shard, first = piece.shard, piece.first_chunk
    if len(local.buffer) < piece.size_bytes:
        local.buffer = bytearray(piece.size_bytes)
    with memoryview(local.buffer)[: piece.size_bytes] as data:
        try:
            checkpoint.tier.read_into(DATA + shard.name, first * shard.chunk_bytes, data)
        except (CorruptError, NotFoundError):
            return list(range(first, first + -(-piece.size_bytes // shard.chunk_bytes)))
        return bad_chunks(shard, first, data)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1]
            start = i


def _data_finding(checkpoint: Checkpoint, shard: str, start: int, end: int, what: str) -> Finding:
    """A finding about bytes of a shard file, with what lies there by the receipts of the ranks that use the file."""
    sections = checkpoint.head().sections
    ranks = tuple(section.rank for section in sections if any(name == shard for name, _ in section.files()))
    affects: list[Affected] = []
    for rank in ranks:
        try:
            affects.extend(_affected(checkpoint.receipt(rank), shard, start, end))
        except (CorruptError, NotFoundError):
            affects.append(Affected(key="?"))  # reported already: the rank's own section can't be read
    return Finding(file=DATA + shard, what=what, start=start, end=end, affects=tuple(affects), ranks=ranks)


def _affected(receipt: ReceiptRecord, file: str, start: int, end: int) -> Iterator[Affected]:
    for tensor in (tensor for shard, tensors in receipt.files() if shard.name == file for tensor in tensors):
        size_bytes = tensor_bytes(tensor)
        first, last = max(start, tensor.start) - tensor.start, min(end, tensor.start + size_bytes) - tensor.start - 1
        if first > last:
            continue
        rows = None
        if tensor.sizes:
            row_bytes = size_bytes // tensor.sizes[0]
            rows = (tensor.offsets[0] + first // row_bytes, tensor.offsets[0] + last // row_bytes)
        yield Affected(key=tensor.key, rows=rows)
    for plain in receipt.objects if receipt.shard.name == file else ():
        if max(start, plain.start) < min(end, plain.start + plain.size_bytes):
            yield Affected(key=plain.key)
