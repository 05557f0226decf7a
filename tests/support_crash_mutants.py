"""Bugs planted in the storage, one at a time, to show that the crash harness finds them.

Each is a patch of the product that a tired author could have written. `hunt` looks for it with the very probes that
the product has to pass; a bug that isn't found is a hole in the harness.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
import zstandard
from support_crash_explore import Explorer, Finding
from support_crash_faults import FAULTS, FaultLoop, damage_loop
from support_crash_scenarios import SCENARIOS, scenario_named

from ckptrt import sources
from ckptrt.errors import ExistsError, NotFoundError, StorageError
from ckptrt.storage import catalog, checkpoint, commit, gather, lineage, manifest, persister, prune, verify
from ckptrt.storage import copy as copying
from ckptrt.storage.catalog import Catalog, CommitInfo
from ckptrt.storage.layout import DATA, PINS, RUN, fence_name
from ckptrt.storage.tiers.filewriter import FileWriter
from ckptrt.storage.tiers.fs import Fs
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier

__all__ = ["MUTANTS", "Mutant", "hunt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted bug.

    probes: where it is looked for first: a scenario's states, failing `calls in` a scenario (or but its `unlinks in`),
    or `damage`.
    """

    name: str
    plant: Callable[[], AbstractContextManager[Any]]
    probes: tuple[str, ...]


def hunt(mutant: Mutant, everywhere: bool = True) -> Finding | None:
    """Plant the bug and look until something is found; None if it isn't."""
    with mutant.plant():
        for probe in (*mutant.probes, *(_ALL if everywhere else ())):
            found = _probe(probe)
            if found:
                return found
    return None


def _probe(probe: str) -> Finding | None:
    if probe == "damage":
        # Whether a flipped bit of compressed JSON still decodes is luck: more bits are tried until one does.
        findings = next((found for seed in range(8) if (found := damage_loop(flips=12, seed=seed)[1])), [])
    elif "s in " in probe:
        loop = FaultLoop(max_findings=1)
        kinds = tuple(fault for fault in FAULTS if fault.name in ("EIO", "ENOSPC", "short"))
        call, _, name = probe.partition("s in ")
        loop.run(scenario_named(name), kinds, only=None if call == "call" else call)
        findings = loop.findings
    else:
        scenario = scenario_named(probe)
        explorer = Explorer(limit=40, max_findings=1)
        for form in range(scenario.forms):
            if not explorer.explore(scenario, form) or explorer.findings:
                break
        findings = explorer.findings
    return findings[0] if findings else None


_ALL = (*(s.name for s in SCENARIOS), "calls in save", "calls in prune by hand", "damage")


# --- writing files


def _no_file_sync() -> AbstractContextManager[Any]:
    def write_all(self: FileWriter, pieces: Iterable[memoryview]) -> None:
        try:
            self._prepare()
            for piece in pieces:
                self._write_piece(piece)
        except BaseException:
            self._close_condemned()
            raise
        self._fs.close(self._fd)

    return patch.object(FileWriter, "write_all", write_all)


def _sync_after_link() -> AbstractContextManager[Any]:
    """The file gets its name first and is synced, by another descriptor, after that."""

    def link(self: LocalTier, temp: str, path: str) -> bool:
        done = _link(self, temp, path)
        fd = self._fs.open(temp, os.O_RDONLY)
        try:
            self._fs.fsync(fd)
        finally:
            self._fs.close(fd)
        return done

    _link = LocalTier._link
    return _both(_no_file_sync(), patch.object(LocalTier, "_link", link))


def _retried_sync() -> AbstractContextManager[Any]:
    """A failed fsync is tried again on the same file: the second one says that all is well."""
    fsync = FileWriter.write_all

    def write_all(self: FileWriter, pieces: Iterable[memoryview]) -> None:
        self._fs = _RetryingFs(self._fs)  # type: ignore[assignment]
        fsync(self, pieces)

    return patch.object(FileWriter, "write_all", write_all)


class _RetryingFs:
    def __init__(self, fs: Fs) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def fsync(self, fd: int) -> None:
        try:
            self._fs.fsync(fd)
        except OSError:
            self._fs.fsync(fd)


def _no_folder_sync() -> AbstractContextManager[Any]:
    """A new name isn't made durable (but new folders are)."""

    def publish(self: LocalTier, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        with patch.object(self, "_sync_dir", lambda folder: None):
            real(self, name, pieces, size_bytes)

    def make_dirs(self: LocalTier, folder: str) -> None:
        with patch.object(self, "_sync_dir", lambda at: LocalTier._sync_dir(self, at)):
            real_dirs(self, folder)

    real, real_dirs = LocalTier._publish, LocalTier._make_dirs
    return _both(patch.object(LocalTier, "_publish", publish), patch.object(LocalTier, "_make_dirs", make_dirs))


def _no_parent_sync() -> AbstractContextManager[Any]:
    return patch.object(LocalTier, "_make_dirs", lambda self, folder: LocalTier._mkdir(self, folder))


def _folder_sync_may_fail() -> AbstractContextManager[Any]:
    def sync(self: LocalTier, folder: str) -> None:
        with suppress(OSError):
            self._fs.fsync_dir(folder)

    return patch.object(LocalTier, "_sync_dir", sync)


def _rename() -> AbstractContextManager[Any]:
    def link(self: LocalTier, temp: str, path: str) -> bool:
        getattr(self._fs, "rename", os.rename)(temp, path)
        return True

    return patch.object(LocalTier, "_link", link)


def _temp_stays() -> AbstractContextManager[Any]:
    def unlink(self: LocalTier, path: str) -> None:
        if "/.tmp-" not in path:
            self._fs.unlink(path)

    return patch.object(LocalTier, "_unlink", unlink)


def _descriptor_leaks() -> AbstractContextManager[Any]:
    return patch.object(FileWriter, "_close_condemned", lambda self: None)


def _write_in_place() -> AbstractContextManager[Any]:
    """Written under its own name from the start."""

    def publish(self: LocalTier, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        path = self._path(name)
        with self._errors(name, "write"):
            self._make_dirs(os.path.dirname(path))
            fd = self._fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            FileWriter(self._fs, fd, size_bytes).write_all(pieces)
            self._sync_dir(os.path.dirname(path))

    return patch.object(LocalTier, "_publish", publish)


def _taken_is_safe() -> AbstractContextManager[Any]:
    """What is there already is taken for durable."""
    return patch.object(LocalTier, "_settle", lambda self, folder: None)


# --- order and checks of a commit


def _commit_before_manifest() -> AbstractContextManager[Any]:
    later: list[tuple[Any, str, bytes]] = []

    def create(tier: Any, commit_id: Any, record: Any) -> Any:
        done = real_commit(tier, commit_id, record)
        real_manifest(*later.pop())
        return done

    real_commit, real_manifest = commit._create_commit, commit._create_manifest
    return _both(
        patch.object(commit, "_create_manifest", lambda *args: later.append(args)),
        patch.object(commit, "_create_commit", create),
    )


def _receipt_before_shard() -> AbstractContextManager[Any]:
    def write_shard(tier: Any, folder: str, header: Any, parcel: Any, **more: Any) -> bytes:
        aside = MemoryTier()
        receipt = real(aside, folder, header, parcel, **more)
        for entry in reversed(aside.list(folder)):
            if entry.name.endswith("receipt.json"):
                tier.create(entry.name, receipt)
        for entry in aside.list(folder):
            if not entry.name.endswith("receipt.json"):
                tier.write(entry.name, parcel.pieces, parcel.pieces.size_bytes)
        return receipt

    real = persister.write_shard
    return patch.object(persister, "write_shard", write_shard)


def _commit_replaces() -> AbstractContextManager[Any]:
    """A commit that finds its name taken says that it was done."""

    def create(tier: Any, commit_id: Any, record: Any) -> Any:
        with suppress(ExistsError):
            return real(tier, commit_id, record)
        return record

    def quiet(tier: Any, commit_id: Any, record: Any) -> Any:
        try:
            return create(tier, commit_id, record)
        except StorageError as error:
            if "already committed" in error.what:
                return record
            raise

    real = commit._create_commit
    return patch.object(commit, "_create_commit", quiet)


def _failed_commit_is_fine() -> AbstractContextManager[Any]:
    def create(tier: Any, commit_id: Any, record: Any) -> Any:
        with suppress(StorageError):
            return real(tier, commit_id, record)
        return record

    real = commit._create_commit
    return patch.object(commit, "_create_commit", create)


def _no_fence_check() -> AbstractContextManager[Any]:
    """Neither before the commit nor after it."""
    return _both(
        patch.object(commit, "_check_fence", lambda *_: None), patch.object(commit, "_check_counts", lambda *_: None)
    )


def _no_receipt_check() -> AbstractContextManager[Any]:
    """Whatever lies under a receipt's name is taken for it."""

    def adopt(tier: Any, name: str, snapshot: Any) -> tuple[bytes, int]:
        data = tier.read(name)
        return data, _receipt(data).shard.size_bytes

    def check(commit_id: Any, receipts: Any) -> Any:
        return {rank: _receipt(data) for rank, data in receipts.items()}

    unchecked = _both(
        patch.object(commit, "_check_receipts", check), patch.object(commit, "check_head", lambda *_: None)
    )
    return _both(patch.object(persister, "adopt", adopt), unchecked)


def _receipt(data: bytes) -> Any:
    return commit.unseal(commit.ReceiptRecord, data, "it")


# --- reading


def _no_manifest_digest() -> AbstractContextManager[Any]:
    """What the manifest says is believed: neither its own digest nor those of the records in it are looked at."""

    def open_head(frame: bytes, reference: Any, where: str) -> Any:
        return _believe(manifest.ManifestHead, manifest._expand(frame, where))

    return _both(
        patch.object(checkpoint, "open_head", open_head),
        patch.object(checkpoint, "unseal", lambda kind, data, where: _believe(kind, data)),
        patch.object(checkpoint, "section_bytes", lambda frame, section, where: manifest._expand(frame, where)),
    )


def _believe(kind: Any, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data[data.index(b'"body":') + 7 : -2], type=kind)
    except (msgspec.MsgspecError, ValueError, zstandard.ZstdError) as error:
        raise manifest.CorruptError(str(error)) from None


def _no_chunk_digests() -> AbstractContextManager[Any]:
    def read(tier: Any, shard: Any, tensors: Any, reads: Sequence[Any], out: memoryview, rank: int) -> None:
        for start, size in reads:
            tier.read_into(DATA + shard.name, start, out[start : start + size])

    return patch.object(sources, "read_verified", read)


def _blind_verify() -> AbstractContextManager[Any]:
    return patch.object(verify, "bad_chunks", lambda *_: [])


def _short_reads_pass() -> AbstractContextManager[Any]:
    """The count that read(2) gives back isn't looked at, nor are digests of what was read."""

    def fill(self: LocalTier, fd: int, name: str, start: int, out: memoryview) -> None:
        self._fs.pread_into(fd, out, start)

    return patch.object(LocalTier, "_fill", fill)


def _anything_is_good() -> AbstractContextManager[Any]:
    """A commit whose record is there is taken for whole."""

    def examine(self: Catalog, commit_id: Any) -> CommitInfo:
        return CommitInfo(id=commit_id, state="committed")

    return patch.object(Catalog, "examine", examine)


def _every_commit_counts() -> AbstractContextManager[Any]:
    """The reader doesn't stop at the step from which a newer incarnation went on."""
    return patch.object(lineage.Segment, "covers", lambda self, step: True)


# --- borrowing, pins and copies


def _references_are_forgotten() -> AbstractContextManager[Any]:
    """Prune keeps the folder that a kept commit owns, not those that it borrows from."""

    def needed(at: Any, kept: Any, folders: Any) -> set[str]:
        return {f"{DATA}{at.read_commit(commit_id).data}/" for commit_id in kept}

    return patch.object(prune, "_needed_folders", needed)


def _no_look_at_the_base() -> AbstractContextManager[Any]:
    return patch.object(commit, "_check_borrowed", lambda tier, head, record: None)


def _no_look_at_pins() -> AbstractContextManager[Any]:
    return patch.object(prune, "pinned_ids", lambda at: set())


def _pin_is_left_to_the_cache() -> AbstractContextManager[Any]:
    """A pin is told as soon as it is written."""

    def create(self: LocalTier, name: str, data: bytes) -> None:
        if not name.startswith(PINS):
            real(self, name, data)
            return
        with _no_folder_sync():
            real(self, name, data)

    real = LocalTier.create
    return patch.object(LocalTier, "create", create)


def _fences_first() -> AbstractContextManager[Any]:
    """A copy brings the fences before the commits behind them."""

    def copy_run(source: Any, target: Any) -> None:
        real(source, target)
        for number in sorted(source.fences()):
            with suppress(ExistsError):
                target.create(fence_name(number), source.tier.read(fence_name(number)))

    real = copying._copy_run
    return patch.object(copying, "_copy_run", copy_run)


def _copied_names_are_believed() -> AbstractContextManager[Any]:
    """A copy that goes on from a killed one takes the names that it sees for durable."""
    return _both(_taken_is_safe(), patch.object(LocalTier, "settle", lambda self, prefix: None))


def _commit_comes_first() -> AbstractContextManager[Any]:
    """A copy brings the commit's record before the data that it needs."""

    def copy_records(found: Any, target: Any, check: Any) -> None:
        records(found, target, check)
        while waiting:
            files(*waiting.pop())

    waiting: list[Any] = []
    files, records = copying._copy_files, copying._copy_records
    later = patch.object(copying, "_copy_files", lambda *arguments: waiting.append(arguments))
    return _both(later, patch.object(copying, "_copy_records", copy_records))


# --- prune and restart


def _data_before_records() -> AbstractContextManager[Any]:
    def execute(at: Any, plan: Any) -> Any:
        result = prune.PruneResult()
        for folder in plan.folders:
            prune._try(result, folder, at.tier.delete_prefix)
        for removed in plan.commits:
            prune._try(result, removed, at.tier.delete)
        prune._sweep(at, plan, result)
        return result

    return _in_prune(execute)


def _prune_goes_on() -> AbstractContextManager[Any]:
    """Data are deleted although the record of their commit could not be."""

    def execute(at: Any, plan: Any) -> Any:
        result = prune.PruneResult()
        for removed in plan.commits:
            prune._try(result, removed, at.tier.delete)
        for folder in plan.folders:
            prune._try(result, folder, at.tier.delete_prefix)
        prune._sweep(at, plan, result)
        return result

    return _in_prune(execute)


def _in_prune(execute: Callable[[Any, Any], Any]) -> AbstractContextManager[Any]:
    """Patch what both the running job and the command line call."""
    from ckptrt.storage.cli import prune as cli_prune

    return _both(patch.object(prune, "execute", execute), patch.object(cli_prune, "execute", execute))


def _prune_takes_the_newest() -> AbstractContextManager[Any]:
    """The newest good one is looked for by its name alone, among all commits."""

    def newest(path: Any, count: int, examine: Any) -> tuple[list[Any], dict[Any, Any]]:
        return sorted(path.commits)[:count], {}

    return patch.object(prune, "_newest_good", newest)


def _unsynced_delete() -> AbstractContextManager[Any]:
    def delete(self: LocalTier, name: str) -> None:
        with self._errors(name, "delete", writing=False), suppress(FileNotFoundError):
            self._fs.unlink(self._path(name))

    return _both(patch.object(LocalTier, "delete", delete), _gone_is_gone())


def _no_sweep() -> AbstractContextManager[Any]:
    return patch.object(prune, "_unfinished", lambda *_: ())


def _heard_is_safe() -> AbstractContextManager[Any]:
    """A node that sees the commit of another one reports it, durable or not."""

    def is_committed(self: gather.RunWriter, step: int) -> bool:
        name = gather.layout.commit_name(gather.CommitId(step, self.attempt.incarnation))
        return name in self.tier.read_many([name])

    return patch.object(gather.RunWriter, "_is_committed", is_committed)


def _found_run_is_safe() -> AbstractContextManager[Any]:
    def create_run(self: Catalog, run_id: str | None = None) -> Any:
        try:
            self.tier.size(RUN)
            return self.open_run()
        except NotFoundError:
            return real(self, run_id)

    real = Catalog.create_run
    return patch.object(catalog.Catalog, "create_run", create_run)


def _gone_is_gone() -> AbstractContextManager[Any]:
    """A prune takes a record that it doesn't see for gone for good, whoever removed it."""

    def execute(at: Any, plan: Any) -> Any:
        with patch.object(at.tier, "settle", lambda prefix: None):
            return real(at, plan)

    real = prune.execute
    return _in_prune(execute)


@contextmanager
def _both(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


MUTANTS = (
    Mutant(name="a file isn't synced", plant=_no_file_sync, probes=("save",)),
    Mutant(name="a file is synced after it has its name", plant=_sync_after_link, probes=("save",)),
    Mutant(name="a failed fsync is tried again", plant=_retried_sync, probes=("calls in save",)),
    Mutant(name="a new name isn't synced", plant=_no_folder_sync, probes=("save",)),
    Mutant(name="a new folder's name isn't synced", plant=_no_parent_sync, probes=("new run",)),
    Mutant(name="a failed sync of a folder is ignored", plant=_folder_sync_may_fail, probes=("calls in save",)),
    Mutant(name="published by rename", plant=_rename, probes=("two fencers",)),
    Mutant(name="written under its own name", plant=_write_in_place, probes=("save",)),
    Mutant(name="the temporary file stays", plant=_temp_stays, probes=("calls in save",)),
    Mutant(name="a failed write leaks its descriptor", plant=_descriptor_leaks, probes=("calls in save",)),
    Mutant(name="a taken name is thought durable", plant=_taken_is_safe, probes=("killed in the first save",)),
    Mutant(name="commit before manifest", plant=_commit_before_manifest, probes=("save",)),
    Mutant(name="receipt before shard file", plant=_receipt_before_shard, probes=("two nodes",)),
    Mutant(name="a taken commit is thought ours", plant=_commit_replaces, probes=("two coordinators",)),
    Mutant(name="a failed commit is reported as done", plant=_failed_commit_is_fine, probes=("calls in save",)),
    Mutant(name="the fence isn't checked", plant=_no_fence_check, probes=("commit of a deposed one",)),
    Mutant(name="a receipt is adopted unchecked", plant=_no_receipt_check, probes=("stale receipt",)),
    Mutant(name="the manifest's digest isn't checked", plant=_no_manifest_digest, probes=("damage",)),
    Mutant(name="chunk digests aren't checked", plant=_no_chunk_digests, probes=("damage",)),
    Mutant(name="verify doesn't compare digests", plant=_blind_verify, probes=("damage",)),
    Mutant(name="a short read passes", plant=_short_reads_pass, probes=("calls in save",)),
    Mutant(name="a commit is good if its record is", plant=_anything_is_good, probes=("damage",)),
    Mutant(name="commits beyond the parent count", plant=_every_commit_counts, probes=("commit of a sleeper",)),
    Mutant(name="prune forgets what is borrowed", plant=_references_are_forgotten, probes=("borrow",)),
    Mutant(name="the base isn't looked for", plant=_no_look_at_the_base, probes=("the base goes",)),
    Mutant(name="prune doesn't look at pins", plant=_no_look_at_pins, probes=("pin",)),
    Mutant(name="a pin's name isn't synced", plant=_pin_is_left_to_the_cache, probes=("pin",)),
    Mutant(name="copy: fences before commits", plant=_fences_first, probes=("flush",)),
    Mutant(name="copy: the commit before its data", plant=_commit_comes_first, probes=("flush",)),
    Mutant(name="copy: what is seen is durable", plant=_copied_names_are_believed, probes=("killed in a copy",)),
    Mutant(name="prune: data before records", plant=_data_before_records, probes=("prune after commits",)),
    Mutant(name="prune goes on after a failed delete", plant=_prune_goes_on, probes=("unlinks in prune by hand",)),
    Mutant(name="prune takes the newest", plant=_prune_takes_the_newest, probes=("prune after commits",)),
    Mutant(name="prune: deletes aren't synced", plant=_unsynced_delete, probes=("prune after commits",)),
    Mutant(name="prune: a record unseen is thought gone", plant=_gone_is_gone, probes=("killed in a prune",)),
    Mutant(name="prune leaves unfinished files", plant=_no_sweep, probes=("new run",)),
    Mutant(name="a commit heard of is thought durable", plant=_heard_is_safe, probes=("two nodes",)),
    Mutant(name="a run found is thought durable", plant=_found_run_is_safe, probes=("killed in a new run",)),
)
