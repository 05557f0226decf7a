"""A restore: choose a checkpoint, read and verify all that this rank needs, and only then touch live tensors.

Every rank does the same with the same candidate. If any rank finds it damaged or gone, all go on together to the next
older one, and a line says so; if it simply doesn't fit the state, all stop with that error.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ckptrt import say
from ckptrt.adapters.base import Adapter, Loading, SavedComponent, SavedTensor, Want
from ckptrt.adapters.wants import mismatch
from ckptrt.errors import CorruptError, Error, NoCheckpointError, StorageError, TransientError, UsageError
from ckptrt.plan import Copy, Read, Stored, Wanted, plan_restore
from ckptrt.ranks import RankGroup
from ckptrt.regions import Region
from ckptrt.session import Candidate, Session
from ckptrt.sources import MemorySource, Part, Source, StoredSource
from ckptrt.storage.layout import CommitId
from ckptrt.storage.records import TensorRecord
from ckptrt.storage.shardfile import item_bytes

__all__ = ["Restored", "read_all", "restore_newest"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was loaded, and from where (`tier` is memory, local or stored), and whether that step is committed."""

    step: int
    incarnation: int
    tier: str
    committed: bool
    world_size: int  # of the job that saved it


def restore_newest(session: Session, adapters: Sequence[Adapter]) -> Restored | None:
    """Load the newest checkpoint that all ranks can have; None if the run has none at all.

    Raises MismatchError (and others that no older checkpoint would cure) on every rank alike, and CorruptError if
    there are checkpoints but none of them is whole.
    """
    skipped: list[str] = []
    candidates = session.candidates()
    for candidate in candidates:
        loaded, mine = _try(lambda at=candidate: _load(session, adapters, at))  # type: ignore[misc]
        errors = session.ranks.errors(mine)
        if not errors:
            assert loaded is not None
            source, loadings = loaded
            _apply(session.ranks, loadings)
            for note in (note for loading in loadings for note in loading.notes):
                if source.partial and session.ranks.rank == 0:
                    say.line("warn", note)
            return Restored(
                step=candidate.step,
                incarnation=candidate.incarnation,
                tier=candidate.tier,
                committed=any(other.tier != "memory" and other.commit == candidate.commit for other in candidates),
                world_size=source.world_size,
            )
        _raise_incurable(errors)
        skipped.append(_tell_fallback(session.ranks, candidate, errors))
    if candidates:
        raise CorruptError(
            f"run {session.url}: none of its {len(candidates)} checkpoints can be loaded: {'; '.join(skipped[:3])}",
            safe="nothing was loaded, changed or deleted",
            hint="`ckptrt verify --read-data` shows what is left of them; start in another directory to begin anew",
        )
    return None


def _apply(ranks: RankGroup, loadings: Sequence[Loading]) -> None:
    """Move everything in. Only the user's own code can fail here, and then no rank goes on as if nothing were amiss."""

    def apply_all() -> None:
        for loading in loadings:
            loading.apply()

    _, mine = _try(apply_all)
    errors = ranks.errors(mine)
    if errors:
        rank, error = errors[0]
        raise type(error)(
            f"rank {rank}: {error.what}",
            safe="the checkpoint is untouched; the live state is partly loaded, so this process must not go on with it",
            hint=error.hint,
        ) from (mine and mine.__cause__)


def _try(work: Callable[[], _T]) -> tuple[_T | None, Error | None]:
    """What `work` returns, or its error. Other ranks wait for this rank's word, so nothing else may get out."""
    try:
        return work(), None
    except Error as error:
        return None, error
    except Exception as cause:  # noqa: BLE001 the user's own state_dict() and load_state_dict() may raise anything
        foreign = Error(f"restoring failed with {type(cause).__name__}: {cause}", safe="the checkpoint is untouched")
        foreign.__cause__ = cause
        return None, foreign


def _raise_incurable(errors: Sequence[tuple[int, Error]]) -> None:
    """Damage is cured by an older checkpoint; a state that doesn't fit, or a store that is down, isn't."""
    for rank, error in errors:
        curable = isinstance(error, (CorruptError, NoCheckpointError, StorageError))
        if not curable or isinstance(error, TransientError):
            raise type(error)(f"rank {rank}: {error.what}", safe=error.safe, hint=error.hint) from error.__cause__


def _tell_fallback(ranks: RankGroup, candidate: Candidate, errors: Sequence[tuple[int, Error]]) -> str:
    rank, error = errors[0]
    more = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
    text = f"step {candidate.step} from {candidate.tier} can't be loaded: rank {rank}{more}: {error.what}"
    if ranks.rank == 0:
        say.block("warn", f"{text}\nall ranks go back to the next older checkpoint")
    return text


def _load(session: Session, adapters: Sequence[Adapter], candidate: Candidate) -> tuple[Source, list[Loading]]:
    source = _open(session, candidate)
    return source, read_all(source, session.ranks.rank, adapters)


def read_all(source: Source, rank: int, adapters: Sequence[Adapter]) -> list[Loading]:
    """Plan what `rank` needs of a checkpoint, read and verify it; what is left to do is to apply each loading."""
    parts = source.parts()
    mine = parts[rank % source.world_size]
    with _distrust():
        saved = _components(source, parts, mine, adapters)
    loadings = [adapter.prepare(saved[adapter.name]) for adapter in adapters if adapter.name in saved]
    left = [adapter.name for adapter in adapters if adapter.name not in saved]
    if left:
        note = f"{', '.join(left)}: not in this checkpoint, which was imported; left as it is"
        loadings.append(Loading(wants=(), apply=lambda: None, notes=(note,)))
    wants = [want for loading in loadings for want in loading.wants]
    with _distrust():
        _fill(source, parts, mine, wants)
    return loadings


@contextmanager
def _distrust() -> Iterator[None]:
    """What a receipt says may have its digest and still make no sense: damage, which an older step cures."""
    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, TypeError, UsageError, ValueError) as cause:
        raise CorruptError(
            f"the checkpoint contradicts itself: {type(cause).__name__}: {cause}", safe="nothing of it was loaded"
        ) from cause


def _open(session: Session, candidate: Candidate) -> Source:
    if candidate.tier == "memory":
        assert session.agent is not None
        return MemorySource(session.agent.holdings(), candidate.step, candidate.incarnation)
    commit = CommitId(candidate.step, candidate.incarnation)
    place = session.catalog if candidate.tier == "local" else session.catalog.places()[-1]
    return StoredSource(place.open_checkpoint(commit))


def _components(
    source: Source, parts: Sequence[Part], mine: Part, adapters: Sequence[Adapter]
) -> dict[str, SavedComponent]:
    """What the checkpoint holds of each component, as this rank sees it."""
    data = _plain_data(source, mine)
    here, there = {adapter.name for adapter in adapters}, set(data)
    missing = set() if source.partial else here - there
    problems = [f"missing   component {name}   not in the checkpoint" for name in sorted(missing)]
    problems += [f"extra     component {name}   in the checkpoint only" for name in sorted(there - here)]
    if problems:
        raise mismatch("state", problems)
    tensors: defaultdict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for part in parts:
        for record in part.tensors:
            if record.rank_only and part.rank != mine.rank:
                continue
            component = _component_of(record.key, there)
            tensors[component][record.key[len(component) + 1 :]] = SavedTensor(
                dtype=_dtype(record), shape=record.shape, rank_only=record.rank_only
            )
    return {
        name: SavedComponent(
            tensors=tensors[name], data=data[name], world_size=source.world_size, source_rank=mine.rank
        )
        for name in there
    }


def _component_of(key: str, names: set[str]) -> str:
    """The component that a tensor belongs to: names may hold dots themselves, so the longest that fits."""
    end = len(key)
    while (end := key.rfind(".", 0, end)) > 0:
        if key[:end] in names:
            return key[:end]
    raise CorruptError(f"tensor {key!r} belongs to no component of its checkpoint")


def _dtype(record: TensorRecord) -> torch.dtype:
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"tensor {record.key!r} has a dtype that this torch lacks: {record.dtype!r}")
    return dtype


def _plain_data(source: Source, mine: Part) -> dict[str, Any]:
    reads = [Read(record.start, record.size_bytes) for record in mine.objects]
    if not reads:
        return {}
    with source.mapped(mine, reads) as buffer:
        return {
            record.key: json.loads(bytes(buffer[record.start : record.start + record.size_bytes]))
            for record in mine.objects
        }


def _fill(source: Source, parts: Sequence[Part], mine: Part, wants: Sequence[Want]) -> None:
    """Read every wanted region into its host tensor, file by file."""
    shapes: dict[str, tuple[int, ...]] = {}
    stored: list[Stored] = []
    for number, part in enumerate(parts):
        for record in part.tensors:
            if record.rank_only and part.rank != mine.rank:
                continue
            shapes[record.key] = record.shape
            region = Region(record.offsets, record.sizes)
            size = item_bytes(record.dtype)
            stored.append(Stored(record.key, record.shape, size, region, number, record.start))
    wanted = [Wanted(want.key, shapes[want.key], want.region) for want in wants]
    plan = plan_restore(stored, wanted)
    copies: defaultdict[int, list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        copies[int(copy.file)].append(copy)
    for number, copies_of_file in copies.items():
        with source.mapped(parts[number], plan.reads[number]) as buffer:
            _scatter(buffer, copies_of_file, wants)


def _scatter(buffer: memoryview, copies: Sequence[Copy], wants: Sequence[Want]) -> None:
    for copy in copies:
        out = wants[copy.wanted].out
        count = 1
        for size in copy.sizes:
            count *= size
        stored = torch.frombuffer(buffer, dtype=out.dtype, count=count, offset=copy.start).view(copy.sizes)
        out[_slices(copy.target)].copy_(stored[_slices(copy.source)])


def _slices(box: Region) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
