"""What a run's checkpoints take in their store, and what would come free without each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.layout import DATA, parse_data_dir

__all__ = ["CheckpointUsage", "Usage", "usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUsage:
    """One commit. own_bytes: all in its own folder. borrows: folders of other checkpoints that it needs.

    needed_by: how many other commits need files of its folder. frees_bytes: what comes free if only this one goes.
    """

    commit: CommitInfo
    own_bytes: int
    borrows: int
    needed_by: int
    frees_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Newest first. uncommitted_bytes: in data folders that no commit needs (some may be in the making)."""

    checkpoints: tuple[CheckpointUsage, ...]
    uncommitted_bytes: int
    num_uncommitted: int
    total_bytes: int


def usage(catalog: Catalog) -> Usage:
    """Add up what lies below data/. Reads records and listings only.

    A commit that can't be read counts as holding nothing, so its folder counts as uncommitted.
    """
    folders = {
        entry.name: sum(file.size_bytes for file in catalog.tier.list(entry.name))
        for entry in catalog.tier.list(DATA)
        if entry.is_folder and parse_data_dir(entry.name) is not None
    }
    commits = catalog.overview().commits
    needs = {
        commit.id: {f"{DATA}{name}/" for name in (commit.record.data, *commit.record.references)}
        for commit in commits
        if commit.record is not None
    }
    users = Counter(folder for needed in needs.values() for folder in needed)
    found = []
    for commit in commits:
        if commit.record is None:
            continue
        own = f"{DATA}{commit.record.data}/"
        alone = [folder for folder in needs[commit.id] if users[folder] == 1]
        found.append(
            CheckpointUsage(
                commit=commit,
                own_bytes=folders.get(own, 0),
                borrows=len(commit.record.references),
                needed_by=users[own] - 1,
                frees_bytes=sum(folders.get(folder, 0) for folder in alone),
            )
        )
    loose = [size for folder, size in folders.items() if folder not in users]
    return Usage(
        checkpoints=tuple(found),
        uncommitted_bytes=sum(loose),
        num_uncommitted=len(loose),
        total_bytes=sum(folders.values()),
    )
