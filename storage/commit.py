"""The commit: receipts of all ranks become a manifest, and one create-only write makes the checkpoint exist.

Order: the fence is checked, the receipts are checked, the manifest is written, then the commit record. A crash before
the last of these leaves no checkpoint; after it there is one. A writer that was paused between check and commit lands
off the path of the newer fence: see lineage.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod

from ckptrt.clock import Clock
from ckptrt.errors import CorruptError, ExistsError, MismatchError, PersistError, StorageError
from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.checkpoint import check_commit, check_head
from ckptrt.storage.layout import DATA, MANIFEST, CommitId, commit_name, fence_name, parse_shard_path
from ckptrt.storage.manifest import build
from ckptrt.storage.records import CommitRecord, ManifestHead, ReceiptRecord, seal, unseal
from ckptrt.storage.tiers import Tier

__all__ = ["commit"]


def commit(
    tier: Tier,
    catalog: Catalog,
    step: int,
    incarnation: int,
    data: str,
    receipts: Mapping[int, bytes],
    made_by: str,
    clock: Clock,
) -> CommitInfo:
    """Make the checkpoint of `step` exist; all shard files that the receipts name must be durable already.

    data: the folder's name below data/. receipts: rank -> sealed receipt, of all ranks. May be repeated after an
    error: what is there already and equal is taken for done. Raises FencedError if a newer incarnation owns the run and
    doesn't go on from this checkpoint, CorruptError if the receipts don't belong together and MismatchError if their
    tensors don't (nothing is written then), StorageError otherwise.
    """
    commit_id = CommitId(step, incarnation)
    _check_fence(catalog, incarnation)
    records = _check_receipts(commit_id, receipts)
    manifest, head, reference = build(step, incarnation, receipts, records)
    folders = {name.partition("/")[0] for section in head.sections for name, _ in section.files()}
    record = CommitRecord(
        step=step,
        incarnation=incarnation,
        world_size=len(receipts),
        data=data,
        manifest=reference,
        size_bytes=sum(section.logical_bytes for section in head.sections),
        num_tensors=_count_tensors(records.values()),
        created_at=clock.wall_iso(),
        made_by=made_by,
        references=tuple(sorted(folders - {data})),
        new_bytes=sum(section.shard_bytes for section in head.sections),
        metrics=records[0].metrics,
    )
    check_commit(record, commit_id, commit_name(commit_id))
    check_head(head, record, f"the manifest of step {step}")
    _check_borrowed(tier, head, record)
    _create_manifest(tier, f"{DATA}{data}/{MANIFEST}", manifest)
    record = _create_commit(tier, commit_id, record)
    _check_counts(catalog, commit_id)
    return CommitInfo(id=commit_id, state="committed", record=record)


def _count_tensors(receipts: Iterable[ReceiptRecord]) -> int:
    return len({(t.key, r.rank if t.rank_only else None) for r in receipts for t in r.all_tensors()})


def _check_borrowed(tier: Tier, head: ManifestHead, record: CommitRecord) -> None:
    """Files of older checkpoints must still be there: somebody may have pruned those since they were borrowed from."""
    sizes = {e.name: e.size_bytes for folder in record.references for e in tier.list(f"{DATA}{folder}/")}
    for section in head.sections:
        for file in section.borrowed:
            if sizes.get(DATA + file.shard) != file.shard_bytes:
                raise PersistError(
                    f"step {record.step} can't be committed: {tier.url}/{DATA}{file.shard}, which holds unchanged "
                    f"tensors of rank {section.rank}, is gone or has another size",
                    safe="what was committed before, as far as it doesn't need that file",
                    hint="nothing need be done: the next save writes these tensors anew",
                )


def _check_fence(catalog: Catalog, incarnation: int) -> None:
    newest = catalog.newest_incarnation()
    if newest > incarnation:
        raise catalog.fenced_error(incarnation, newest)
    if newest < incarnation:
        raise StorageError(
            f"incarnation {incarnation} may not commit: {catalog.tier.url}/{fence_name(incarnation)} is missing",
            safe="all checkpoints committed before",
            hint="a fence is written before an incarnation starts; find out who removed it",
        )


def _check_counts(catalog: Catalog, commit_id: CommitId) -> None:
    """Whether the commit counts, now that it is there.

    Between the look at the fences and the commit, this process may have slept through a take-over. Who takes over looks
    at the commits again once the fence is written, so either it has seen this one, or we see its fence now.
    """
    newest = catalog.newest_incarnation()
    if newest > commit_id.incarnation and commit_id not in catalog.path().commits:
        raise catalog.fenced_error(commit_id.incarnation, newest)


def _check_receipts(commit_id: CommitId, receipts: Mapping[int, bytes]) -> dict[int, ReceiptRecord]:
    """Every rank's receipt, read back and found to belong to this checkpoint."""
    world_size = len(receipts)
    missing = sorted(set(range(max(receipts, default=0) + 1)) - set(receipts))
    if missing:
        raise CorruptError(f"step {commit_id.step} can't be committed: no receipt of rank {missing[0]}")
    found: dict[int, ReceiptRecord] = {}
    for rank in sorted(receipts):
        where = f"the receipt of rank {rank} for step {commit_id.step}"
        receipt = unseal(ReceiptRecord, receipts[rank], where)
        if (receipt.step, receipt.incarnation) != commit_id or receipt.rank != rank:
            raise CorruptError(
                f"{where} is of step {receipt.step}, incarnation {receipt.incarnation}, rank {receipt.rank}"
            )
        if receipt.world_size != world_size:
            raise CorruptError(f"{where} is of a world of {receipt.world_size} ranks, but {world_size} sent one")
        if parse_shard_path(receipt.shard.name) is None:
            raise CorruptError(f"{where} names a shard file outside data/: {receipt.shard.name!r}")
        found[rank] = receipt
    _check_tensors(commit_id, found)
    return found


def _check_tensors(commit_id: CommitId, receipts: Mapping[int, ReceiptRecord]) -> None:
    """Every tensor that ranks share must be one tensor to all of them, and be there to the last element."""
    seen: dict[str, tuple[int, tuple[int, ...], str]] = {}
    held: defaultdict[str, int] = defaultdict(int)
    for rank, receipt in receipts.items():
        for tensor in receipt.all_tensors():
            if tensor.rank_only:
                continue
            first, shape, dtype = seen.setdefault(tensor.key, (rank, tensor.shape, tensor.dtype))
            if (shape, dtype) != (tensor.shape, tensor.dtype):
                raise MismatchError(
                    f"step {commit_id.step} can't be committed: tensor {tensor.key!r} is {dtype} {shape} on rank "
                    f"{first} but {tensor.dtype} {tensor.shape} on rank {rank}",
                    safe="all checkpoints committed before",
                    hint="all ranks must shard one and the same tensor under that name",
                )
            held[tensor.key] += prod(tensor.sizes)
    for key, (first, shape, _) in seen.items():
        if held[key] != prod(shape):
            raise MismatchError(
                f"step {commit_id.step} can't be committed: of tensor {key!r} {shape} (rank {first} and others) the "
                f"ranks wrote {held[key]} elements instead of {prod(shape)}",
                safe="all checkpoints committed before",
                hint="every rank that has a part of it must save it",
            )


def _create_manifest(tier: Tier, name: str, data: bytes) -> None:
    try:
        tier.create(name, data)
    except ExistsError:
        if tier.read(name) != data:
            raise StorageError(
                f"{tier.url}/{name} is there already with other contents",
                safe="all committed checkpoints; nothing was changed",
                hint="every attempt at a checkpoint needs a data folder of its own",
            ) from None


def _create_commit(tier: Tier, commit_id: CommitId, record: CommitRecord) -> CommitRecord:
    """The commit point. Gives the record that is in the store: ours, or our own of an earlier try."""
    name = commit_name(commit_id)
    try:
        tier.create(name, seal(record))
    except ExistsError:
        there = unseal(CommitRecord, tier.read(name), f"{tier.url}/{name}")
        if (there.data, there.manifest) != (record.data, record.manifest):
            raise StorageError(
                f"step {commit_id.step} of incarnation {commit_id.incarnation} is already committed, with other data "
                f"({there.data} by {there.made_by} at {there.created_at})",
                safe="the checkpoint that is there; this one was not published",
                hint="two writers act for one incarnation: stop one of them",
            ) from None
        return there
    return record
