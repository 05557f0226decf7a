"""Copying committed checkpoints from one run's place to another: the same names, the same bytes, the commit last.

The target becomes (or stays) a replica: it has the source's run record and the fences up to the copied commits, so that
the reader's rule says there what it says here. Fences come last and newest first: a commit without a fence counts for
nothing, and when its fence appears it is there at once, so the target's newest checkpoint never goes back, not even for
a moment. Every byte is compared with its digest while it passes. A copy that was killed is gone on with by
the next one: files that are there are read and compared instead of written.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import xxhash

from ckptrt.errors import CorruptError, ExistsError, MismatchError, NotFoundError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.layout import COMMITS, DATA, FENCES, RUN, CommitId, commit_name, fence_name, receipt_name
from ckptrt.storage.records import FenceRecord, RunRecord, ShardRecord, unseal
from ckptrt.storage.shardfile import bad_chunks
from ckptrt.storage.tiers.base import Tier

__all__ = ["CopyPlan", "copy", "plan_copy"]

_PIECE_BYTES = 8 << 20
_PARALLEL = 4  # files at a time; each takes two pieces of memory and reads ahead
_TRUSTED_COMMITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """What a copy has to do. commits: those that the target lacks, oldest first. fences: incarnations whose fences it
    lacks. size_bytes: of the shard files, of which those that are in the target already are only compared.
    """

    commits: tuple[CommitId, ...]
    there: tuple[CommitId, ...]
    fences: tuple[int, ...]
    num_files: int
    size_bytes: int


def plan_copy(source: Catalog, target: Tier, commits: list[CommitId]) -> CopyPlan:
    """See what of these commits the target lacks; changes nothing.

    Raises MismatchError if the target belongs to another run, or has gone its own way since.
    """
    _check_run(source, Catalog(target))
    theirs = _check_fences(source, Catalog(target))
    known = target.read_many([commit_name(commit) for commit in commits])
    newest = max((commit.incarnation for commit in commits), default=0)
    missing = sorted(commit for commit in commits if commit_name(commit) not in known)
    files = {file for commit in missing for s in source.open_checkpoint(commit).head().sections for file in s.files()}
    return CopyPlan(
        commits=tuple(missing),
        there=tuple(sorted(set(commits) - set(missing))),
        fences=tuple(i for i in source.fences() if i <= newest and i not in theirs),
        num_files=len(files),
        size_bytes=sum(size for _, size in files),
    )


def copy(
    source: Catalog,
    target: Tier,
    plan: CopyPlan,
    progress: Callable[[int], None] | None = None,
    num_parallel: int = _PARALLEL,
) -> None:
    """Copy what the plan names. May be killed at any point and repeated; nothing partial is ever seen in the target.

    progress: called with bytes copied or compared, from several threads in turn. num_parallel: files at a time. Raises
    CorruptError, naming file and bytes, for a source that isn't as it was written (its commit doesn't appear in the
    target then), and MismatchError as `plan_copy` does.
    """
    for prefix in ("", FENCES, COMMITS):
        target.settle(prefix)  # what a killed copy has left can be seen before it is safe
    if not plan.commits and not plan.fences:
        return
    _copy_run(source, target)
    check = _OwnWay(source, Catalog(target))
    done = _trusted(target)
    for commit in plan.commits:
        checkpoint = source.open_checkpoint(commit)
        receipts = (checkpoint.receipt(rank) for rank in range(checkpoint.record.world_size))
        shards = {shard.name: shard for receipt in receipts for shard, _ in receipt.files()}
        new = [shard for shard in shards.values() if done.get(shard.name) != shard.size_bytes]
        _copy_files(source.tier, target, new, progress, num_parallel)
        done.update((shard.name, shard.size_bytes) for shard in shards.values())
        _copy_records(checkpoint, target, check)
    check()
    _copy_fences(source, target, plan.fences)
    check()  # a job that has begun before the last fence was there doesn't go on from what was copied


def _trusted(target: Tier) -> dict[str, int]:
    """Files, with their sizes, that the target's newest commits name: they were compared when those were copied.

    A frozen base model is borrowed by every commit, and isn't read again for each of them.
    """
    catalog = Catalog(target)
    found: dict[str, int] = {}
    for commit in sorted(catalog.commit_ids(), reverse=True)[:_TRUSTED_COMMITS]:
        with contextlib.suppress(CorruptError, NotFoundError):  # then its files are compared
            for section in catalog.open_checkpoint(commit).head().sections:
                found.update((file, size) for file, size in section.files() if target.size(DATA + file) == size)
    return found


# --- records


def _check_run(source: Catalog, target: Catalog) -> None:
    try:
        theirs = target.open_run()
    except NotFoundError:
        return
    if source.run is None or theirs is None:  # one of the records is damaged: then the fences must tell
        if set(source.fences()) & set(target.fences()):
            return
    elif theirs.run_id == source.run.run_id:
        return
    raise MismatchError(
        f"{target.tier.url} holds another run ({theirs.run_id if theirs else 'its record is damaged'}) than "
        f"{source.tier.url}",
        safe="both; nothing was copied",
        hint="copy to an empty place",
    )


def _check_fences(source: Catalog, target: Catalog) -> Collection[int]:
    """Every fence in the target must be one of the source's. Gives their incarnations, damaged ones too.

    Of one that is damaged in one place, the other place's is as good.
    """
    ours, theirs, numbers = source.fences(), target.fences(), target.fence_numbers()
    known = {*ours, *source.fence_numbers()}
    for number in numbers:
        if number not in known or (number in ours and number in theirs and ours[number] != theirs[number]):
            raise MismatchError(
                f"{target.tier.url} has gone its own way: its incarnation {number} isn't that of {source.tier.url}",
                safe="both; nothing was copied",
                hint="copy to an empty place, or copy the other way round",
            )
    return numbers


class _OwnWay:
    """Raises MismatchError if the target has gone its own way. Cheap to call again while nothing happens there.

    This process may sleep anywhere, and a job may start in the target meanwhile, as of a run that is empty yet.
    """

    def __init__(self, source: Catalog, target: Catalog) -> None:
        self._source = source
        self._target = target
        _check_run(source, target)  # the run's record never changes once it is there
        self._fences: set[int] | None = None
        self()

    def __call__(self) -> None:
        fences = set(self._target.fence_numbers())
        if fences != self._fences:
            _check_fences(self._source, self._target)
            self._fences = fences


def _copy_run(source: Catalog, target: Tier) -> None:
    if RUN in target.read_many([RUN]):
        return
    record = source.tier.read(RUN)
    unseal(RunRecord, record, f"{source.tier.url}/{RUN}")
    _create(target, RUN, record)


def _copy_fences(source: Catalog, target: Tier, incarnations: Iterable[int]) -> None:
    """Newest first: it decides, and its own commits are there by now. What is older is found again by and by."""
    for incarnation in sorted(incarnations, reverse=True):
        name = fence_name(incarnation)
        record = source.tier.read(name)
        unseal(FenceRecord, record, f"{source.tier.url}/{name}")
        _create(target, name, record)


def _copy_records(checkpoint: Checkpoint, target: Tier, check: Callable[[], None]) -> None:
    """Receipts, the manifest, and, once everything else is durable, the commit.

    check: raises if the target has gone its own way. What it says before the commit may be over a moment later. So it
    is asked once more, and the commit taken back: a job that starts after that has chosen an incarnation above it.
    """
    for rank in range(checkpoint.record.world_size):
        _create(target, checkpoint.folder + receipt_name(rank), checkpoint.receipt_bytes(rank))
    manifest = checkpoint.tier.read(checkpoint.manifest_name)
    if xxhash.xxh3_128_hexdigest(manifest) != checkpoint.record.manifest.xxh3:
        raise CorruptError(
            f"{checkpoint.tier.url}/{checkpoint.manifest_name} is damaged: it doesn't have the digest of its commit",
            safe="it wasn't copied",
        )
    _create(target, checkpoint.manifest_name, manifest)
    for folder in (checkpoint.record.data, *checkpoint.record.references):
        target.settle(f"{DATA}{folder}/")  # a copy that was killed may have left names that aren't durable
    name = commit_name(checkpoint.id)
    record = checkpoint.tier.read(name)
    check()
    _create(target, name, record)
    try:
        check()
    except MismatchError:
        target.delete(name)
        raise
    target.settle(COMMITS)


def _create(target: Tier, name: str, data: bytes) -> None:
    try:
        target.create(name, data)
    except ExistsError:
        if target.read(name) != data:
            raise _other_contents(target, name) from None


def _other_contents(target: Tier, name: str) -> MismatchError:
    return MismatchError(
        f"{target.url}/{name} is there already with other contents",
        safe="it was left as it is, and what isn't committed there can't be seen",
        hint="remove it if it is damaged (`ckptrt verify`), or copy to an empty place",
    )


# --- shard files


def _copy_files(
    source: Tier,
    target: Tier,
    shards: Sequence[ShardRecord],
    progress: Callable[[int], None] | None,
    num_parallel: int,
) -> None:
    """Several at a time; the first error ends it once the files under way are done."""
    if num_parallel == 1 or len(shards) == 1:
        for shard in shards:
            _copy_file(source, target, shard, progress)
        return
    lock = threading.Lock()

    def in_turn(size_bytes: int) -> None:
        if progress is not None:
            with lock:
                progress(size_bytes)

    with ThreadPoolExecutor(num_parallel, thread_name_prefix="ckptrt-copy-file") as pool:
        copies = [pool.submit(_copy_file, source, target, shard, in_turn) for shard in shards]
        try:
            for done in as_completed(copies):
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _copy_file(source: Tier, target: Tier, shard: ShardRecord, progress: Callable[[int], None] | None) -> None:
    name = DATA + shard.name
    try:
        target.write(name, _Verified(source, shard, progress), shard.size_bytes)
    except ExistsError:
        try:
            whole = target.size(name) == shard.size_bytes and all(True for _ in _Verified(target, shard, progress))
        except CorruptError:
            whole = False
        if not whole:
            raise _other_contents(target, name) from None


class _Verified:
    """A shard file in pieces, each compared with its digests; the next one is read while this one is written."""

    def __init__(self, tier: Tier, shard: ShardRecord, progress: Callable[[int], None] | None) -> None:
        self._tier = tier
        self._shard = shard
        self._progress = progress
        chunks = max(1, _PIECE_BYTES // shard.chunk_bytes)
        self._step = chunks * shard.chunk_bytes

    def __iter__(self) -> Iterator[memoryview]:
        # Page-aligned, so that a local disk takes them as they are.
        size_bytes = max(1, min(self._step, self._shard.size_bytes))
        buffers = [memoryview(mmap.mmap(-1, size_bytes)) for _ in range(2)]
        starts = range(0, self._shard.size_bytes, self._step)
        with ThreadPoolExecutor(1, thread_name_prefix="ckptrt-copy") as reader:
            ahead: Future[memoryview] | None = None
            for number, start in enumerate(starts):
                piece = (ahead or reader.submit(self._read, start, buffers[number % 2])).result()
                following = start + self._step
                ahead = None
                if following < self._shard.size_bytes:
                    ahead = reader.submit(self._read, following, buffers[(number + 1) % 2])
                yield piece
                if self._progress is not None:
                    self._progress(len(piece))

    def _read(self, start: int, buffer: memoryview) -> memoryview:
        shard = self._shard
        piece = buffer[: min(self._step, shard.size_bytes - start)]
        self._tier.read_into(DATA + shard.name, start, piece)
        for number in bad_chunks(shard, start // shard.chunk_bytes, piece):
            at = number * shard.chunk_bytes
            raise CorruptError(
                f"{self._tier.url}/{DATA}{shard.name} is damaged: bytes {at} to "
                f"{min(at + shard.chunk_bytes, shard.size_bytes) - 1} don't have their digest",
                safe="nothing of its checkpoint was copied as committed",
                hint="`ckptrt verify --read-data` says what is hit, and the newest good step",
            )
        return piece
