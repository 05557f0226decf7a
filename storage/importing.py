"""Files of another format made into a committed checkpoint, from which training goes on through `rt.restore()`.

open_source() looks at the files, plan_import() checks them and decides about names, and import_checkpoint() writes. So
whatever can be told to be damaged is found before the first byte is written. An import is an incarnation of its own: it
is fenced, and goes on from the newest checkpoint of the run, if there is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import xxhash

from ckptrt.clock import SystemClock
from ckptrt.errors import BusyError, MismatchError, NotFoundError, UsageError
from ckptrt.storage import layout
from ckptrt.storage.catalog import Catalog, CommitInfo, hold_run, open_catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.interop.blobs import Blob, Bytes, Image, Named, digest
from ckptrt.storage.interop.foreign import Foreign
from ckptrt.storage.interop.hub import open_hub
from ckptrt.storage.interop.names import rename
from ckptrt.storage.interop.optimizer import ForeignOptimizer
from ckptrt.storage.layout import CommitId
from ckptrt.storage.owner import made_by, this_owner
from ckptrt.storage.records import Parent, ReceiptRecord, ShardRecord, seal
from ckptrt.storage.shardfile import CHUNK_BYTES, TensorSpec, chunk_digests, lay_out
from ckptrt.storage.tiers import open_tier

__all__ = [
    "Component", "ForeignOptimizer", "Format", "ImportPlan", "check_target", "import_checkpoint", "open_optimizer",
    "open_source", "plan_import",
]  # fmt: skip

Format = Literal["safetensors", "hf", "torch", "dcp"]
Progress = Callable[[int], None]

_FENCES_MAX = 8
_FILE_MAX_BYTES = 32 << 30  # of one shard file: object stores have limits, and several are written and read faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of the state that is imported: tensors by its own names, and its plain data as an adapter has them."""

    name: str
    tensors: dict[str, Named]
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """What will be imported, from files that were checked.

    ties: names that share a tensor, with its name. unchecked: a sentence about the damage that the files can't show, or
    ''. left_out and warnings are for people.
    """

    components: tuple[Component, ...]
    ties: dict[str, str]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    unchecked: str

    @property
    def tensors(self) -> dict[str, Named]:
        """By full name."""
        return {f"{part.name}.{name}": tensor for part in self.components for name, tensor in part.tensors.items()}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def open_source(format: Format, place: str, *, key: str = "", component: str = "model") -> Foreign:
    """Look at files of another format; no data are read yet.

    key: which part of a torch.save file or DCP folder (`.` for all of it); by default the one of the component's name.
    Raises CorruptError for files that aren't whole or contradict themselves, UsageError for what can't be taken over.
    """
    if format in ("safetensors", "hf"):
        if key:
            raise UsageError(f"--key can't be used with {format}: its tensors have no parts")
        return open_hub(place)
    if "://" in place and not place.startswith("file:"):
        raise UsageError(f"can't import from {place}: torch reads local files", hint="copy them here first")
    if format == "torch":
        from ckptrt.storage.interop.torchfile import open_torch

        return open_torch(place, key, component)
    from ckptrt.storage.interop.dcp import open_dcp

    return open_dcp(place, key, component)


def open_optimizer(format: Format, place: str, key: str) -> ForeignOptimizer:
    """Look at the optimizer's state under `key` in a torch.save file or DCP folder."""
    if format == "torch":
        from ckptrt.storage.interop.torchfile import open_torch_optimizer

        return open_torch_optimizer(place, key)
    if format == "dcp":
        from ckptrt.storage.interop.dcp import open_dcp_optimizer

        return open_dcp_optimizer(place, key)
    raise UsageError(f"--optimizer can't be used with {format}: it holds none")


def plan_import(
    source: Foreign,
    component: str = "model",
    rules: Sequence[str] = (),
    tied: Sequence[str] = (),
    optimizer: tuple[ForeignOptimizer, str, str] | None = None,
    progress: Progress = lambda done: None,
) -> ImportPlan:
    """Check all that has a checksum, and decide about names.

    rules: as for --map. tied: `NAME=KEPT`, after the rules: NAME shares the tensor KEPT, which the source doesn't say.
    optimizer: what open_optimizer() found, its name in ckptrt.init(), and its class. progress: called with bytes
    checked. Raises MismatchError for names that no rule fits, for tied tensors that differ and for an optimizer of
    other parameters, and CorruptError for damage.
    """
    names = [component, *(optimizer[1:2] if optimizer else ())]
    for name in names:
        _check_name(name)
    if len(set(names)) != len(names):
        raise UsageError(f"model and optimizer can't both be called {component!r}", safe="nothing was written")
    renaming = rename([*source.tensors, *source.ties, *source.extra], rules)
    new_of = {old: new for new, old in renaming.names.items()}
    pairs = renaming.names.items()
    tensors = {new: replace(source.tensors[old], name=new) for new, old in pairs if old in source.tensors}
    if not tensors:
        raise UsageError("there are no tensors to import", safe="nothing was written")
    ties = {new: new_of[source.ties[old]] for new, old in pairs if old in source.ties and source.ties[old] in new_of}
    extra = {new: source.extra[old] for new, old in pairs if old in source.extra}
    unchecked = source.check(progress)
    if optimizer is not None:
        optimizer[0].check(progress)
    _tie(tensors, ties, tied)
    data = {name: part for name, part in (("ties", ties), ("extra", extra)) if part}
    left_out = (*source.left_out, *(f"{name} (dropped by --map)" for name in renaming.dropped))
    components = [Component(name=component, tensors=tensors, data=data or None)]
    if optimizer is not None:
        found, name, kind = optimizer
        theirs, plain = found.component(kind, new_of)
        components.append(Component(name=name, tensors=theirs, data=plain))
        left_out = tuple(text for text in left_out if text != found.key and not text.startswith(f"{found.key}."))
    return ImportPlan(
        components=tuple(components),
        ties=ties,
        left_out=left_out,
        warnings=tuple(f"--map {rule!r} met no name" for rule in renaming.unused),
        unchecked=unchecked,
    )


def _check_name(component: str) -> None:
    if not component or component == "rng" or "/" in component:
        raise UsageError(
            f"{component!r} can't be the name of a component",
            safe="nothing was written",
            hint="use its name in ckptrt.init()",
        )


def _tie(tensors: dict[str, Named], ties: dict[str, str], tied: Sequence[str]) -> None:
    """Make names share a tensor. One that was stored by itself all the same must have the same bytes."""
    for text in tied:
        name, _, kept = text.partition("=")
        if kept not in tensors or name == kept or not name:
            raise UsageError(f"--tie {text!r} isn't NAME=KEPT with a tensor KEPT", safe="nothing was written")
        apart = tensors.pop(name, None)
        if apart is not None and _facts(apart) != _facts(tensors[kept]):
            raise MismatchError(f"--tie {text!r}: these two tensors differ", safe="nothing was written")
        ties.update({alias: kept for alias, other in ties.items() if other == name})
        ties[name] = kept


def _facts(tensor: Named) -> tuple[str, tuple[int, ...], str]:
    return tensor.dtype, tensor.shape, digest(tensor.data)


def check_target(url: str, step: int) -> None:
    """UsageError if the run at `url` (if there is one) can't take a checkpoint of that step."""
    if layout.parse_commit_name(layout.commit_name(CommitId(step, 1))) is None:
        raise UsageError(f"{step} is too large for a step", safe="nothing was written")
    catalog = Catalog(open_tier(url))
    try:
        catalog.open_run()
    except NotFoundError:
        return
    _parent(catalog, step, None)


def import_checkpoint(plan: ImportPlan, url: str, step: int, progress: Progress) -> CommitInfo:
    """Write the checkpoint, and commit it.

    progress: called with bytes written. Raises BusyError if a job runs there, and UsageError if it has a step that
    isn't older.
    """
    with hold_run(url):
        catalog = open_catalog(url, create=True)
        parts = _deal_out(plan)
        incarnation, nonce = _open_incarnation(catalog, step, len(parts))
        commit_id = CommitId(step, incarnation)
        folder = layout.data_dir(commit_id, nonce)
        plain = {part.name: json.dumps(part.data, separators=(",", ":")).encode() for part in plan.components}
        receipts = {}
        for rank, tensors in enumerate(parts):
            image = _Image(rank, tensors, plain, progress)
            name = folder + layout.shard_name(rank)
            catalog.tier.write(name, image, image.size_bytes)
            receipts[rank] = seal(image.receipt(name, commit_id, len(parts)))
            catalog.tier.create(folder + layout.receipt_name(rank), receipts[rank])
        data = folder.removeprefix(layout.DATA).rstrip("/")
        return commit(catalog.tier, catalog, step, incarnation, data, receipts, made_by(), SystemClock())


def _parent(catalog: Catalog, step: int, before: int | None) -> Parent | None:
    """What the import goes on from: the newest checkpoint of the path, which must be of an older step."""
    newest = next(iter(catalog.path(before).commits), None)
    if newest is not None and newest.step >= step:
        raise UsageError(
            f"{catalog.tier.url} already has step {newest.step}, so step {step} would not be its newest",
            safe="nothing was written",
            hint=f"import as a step above {newest.step}, or into a run of its own",
        )
    return Parent(step=newest.step, incarnation=newest.incarnation) if newest is not None else None


def _open_incarnation(catalog: Catalog, step: int, world_size: int) -> tuple[int, str]:
    """Fence the run. If something was committed meanwhile, choose again: that must stay on the path."""
    first: int | None = None
    for _ in range(_FENCES_MAX):
        known = frozenset(catalog.commit_ids())
        parent = _parent(catalog, step, first)
        incarnation = catalog.next_incarnation()
        catalog.write_fence(incarnation, parent, world_size, this_owner())
        first = first or incarnation
        if known.issuperset(catalog.commit_ids()):
            record = catalog.tier.read(layout.fence_name(incarnation))
            return incarnation, xxhash.xxh3_64_hexdigest(record)[:8]
    raise BusyError(f"{catalog.tier.url}: another job commits as fast as this import can begin")


def _deal_out(plan: ImportPlan) -> list[dict[str, Named]]:
    """The tensors of each shard file by full name, in order."""
    parts: list[dict[str, Named]] = [{}]
    filled = 0
    for name, tensor in plan.tensors.items():
        if parts[-1] and filled + tensor.size_bytes > _FILE_MAX_BYTES:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.size_bytes
    return parts


class _Image(Image):
    """A shard file, whose digests are noted as it passes: a piece holds whole chunks."""

    def __init__(self, rank: int, tensors: Mapping[str, Named], plain: Mapping[str, bytes], progress: Progress) -> None:
        specs = [
            TensorSpec(key=name, dtype=t.dtype, shape=t.shape, offsets=(0,) * len(t.shape), sizes=t.shape)
            for name, t in tensors.items()
        ]
        self._rank = rank
        self._layout = lay_out(rank, specs, [(name, len(text)) for name, text in plain.items()])
        data = [tensor.data for tensor in tensors.values()]
        blobs: list[Blob] = [Bytes(self._layout.header), *(data[index] for index in self._layout.order)]
        super().__init__([*blobs, *map(Bytes, plain.values())], progress)
        self._chunks: list[str] = []

    def __iter__(self) -> Iterator[memoryview]:
        self._chunks = []
        for piece in super().__iter__():
            self._chunks.append(chunk_digests(piece))
            yield piece

    def receipt(self, name: str, commit_id: CommitId, world_size: int) -> ReceiptRecord:
        """What the file, which was written as `name`, holds."""
        shard = ShardRecord(
            name=name.removeprefix(layout.DATA),
            size_bytes=self.size_bytes,
            chunk_bytes=CHUNK_BYTES,
            chunks="".join(self._chunks),
        )
        return ReceiptRecord(
            rank=self._rank,
            world_size=world_size,
            step=commit_id.step,
            incarnation=commit_id.incarnation,
            shard=shard,
            tensors=self._layout.tensors,
            objects=self._layout.objects,
            partial=True,
        )
