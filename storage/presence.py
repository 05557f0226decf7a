"""Whether the files of checkpoints are there, as far as a listing of their folders tells. Reads no file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.layout import DATA, MANIFEST, parse_shard_path
from ckptrt.storage.records import CommitRecord
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.local import LocalTier

__all__ = ["check_presence"]

_PARALLEL = 16  # an object store answers a listing in some tens of milliseconds, however many are asked for


def check_presence(catalog: Catalog, commits: Sequence[CommitInfo]) -> list[CommitInfo]:
    """The commits, damaged where their folder lacks its manifest, or has not the bytes that were written to it.

    One listing for each; `Catalog.examine` looks closer, at one. Those that are pruned meanwhile are left out.
    """
    if isinstance(catalog.tier, LocalTier):
        found = [_check(catalog.tier, info) for info in commits]  # quicker than a thread can be told of it
    else:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="ckptrt-presence") as pool:
            found = list(pool.map(lambda info: _check(catalog.tier, info), commits))
    if all(after is before for after, before in zip(found, commits, strict=True)):
        return found
    there = set(catalog.commit_ids())
    return [info for info in found if info.id in there]


def _check(tier: Tier, info: CommitInfo) -> CommitInfo:
    if info.state != "committed" or info.record is None:
        return info
    problem = _problem(tier, info.record)
    return replace(info, state="damaged", reason=problem) if problem else info


def _problem(tier: Tier, record: CommitRecord) -> str:
    there = {entry.name: entry.size_bytes for entry in tier.list(f"{DATA}{record.data}/")}
    if not there:
        return f"{DATA}{record.data}/ is gone"
    if f"{DATA}{record.data}/{MANIFEST}" not in there:
        return f"{DATA}{record.data}/{MANIFEST} is gone"
    shard_bytes = sum(size for name, size in there.items() if parse_shard_path(name.removeprefix(DATA)) is not None)
    if shard_bytes < record.new_bytes:
        return f"{record.new_bytes - shard_bytes} B of its shard files are gone; `ckptrt verify` says which"
    for folder in record.references:
        if not tier.list(f"{DATA}{folder}/"):
            return f"{DATA}{folder}/, which it borrows from, is gone"
    return ""
