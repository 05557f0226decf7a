"""`ckptrt show`: what one checkpoint holds, told by its manifest alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import click

from ckptrt.errors import NoCheckpointError
from ckptrt.storage.catalog import Catalog, Checkpoint, CommitId, open_catalog
from ckptrt.storage.cli import _output
from ckptrt.storage.cli._settings import Settings, Target, common_options, pass_settings
from ckptrt.storage.records import TensorRecord
from ckptrt.storage.shardfile import tensor_bytes

__all__ = ["command"]


@dataclass(slots=True)
class _Tensor:
    """A global tensor, or one rank's own."""

    dtype: str
    shape: tuple[int, ...]
    ranks: list[int] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(slots=True)
class _Contents:
    tensors: dict[tuple[str, int | None], _Tensor] = field(default_factory=dict)  # rank is None for global ones
    objects: dict[str, int] = field(default_factory=dict)  # component -> how many ranks have one
    files: list[str] = field(default_factory=list)

    @staticmethod
    def read(checkpoint: Checkpoint) -> _Contents:
        contents = _Contents()
        for receipt in checkpoint.receipts():
            contents.files.extend(shard.name for shard, _ in receipt.files())
            for tensor in (tensor for _, tensors in receipt.files() for tensor in tensors):
                contents.add(receipt.rank, tensor)
            for plain in receipt.objects:
                contents.objects[plain.key] = contents.objects.get(plain.key, 0) + 1
        return contents

    def add(self, rank: int, tensor: TensorRecord) -> None:
        key = (tensor.key, rank if tensor.rank_only else None)
        known = self.tensors.setdefault(key, _Tensor(dtype=tensor.dtype, shape=tensor.shape))
        known.ranks.append(rank)
        known.size_bytes += tensor_bytes(tensor)


_EXAMPLES = """\b
Examples:
  ckptrt show runs/gpt@1200
  ckptrt -C s3://bucket/runs/gpt show latest --tensors
"""


@click.command("show", epilog=_EXAMPLES)
@click.argument("target", metavar="[STEP|latest|URL@STEP]", required=False)
@click.option("--tensors", is_flag=True, help="List every tensor with dtype, shape and size.")
@common_options
@pass_settings
def command(settings: Settings, target: str | None, tensors: bool) -> None:
    """Show what a checkpoint holds: the latest good one if no step is named. No tensor data are read."""
    where = settings.target(target)
    catalog = open_catalog(where.url)
    checkpoint = catalog.open_checkpoint(_choose(catalog, where))
    contents = _Contents.read(checkpoint)
    if settings.is_json:
        _output.print_json(_document(where.url, checkpoint, contents, tensors))
        return
    _print(where.url, checkpoint, contents)
    if tensors:
        click.echo()
        rows = [_row(key, rank, tensor) for (key, rank), tensor in sorted(contents.tensors.items(), key=_order)]
        _output.print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "RANKS"), rows, right=(3,))


def _choose(catalog: Catalog, where: Target) -> CommitId:
    if where.step is not None:
        return catalog.find(where.step)
    selection = catalog.newest_good()
    for passed_over in selection.skipped:
        _output.warn(f"step {passed_over.step} is passed over: {passed_over.reason}")
    if selection.commit is None:
        raise NoCheckpointError(f"{where.url} has no good checkpoint", hint="`ckptrt ls` shows what is there")
    return selection.commit.id


def _print(url: str, checkpoint: Checkpoint, contents: _Contents) -> None:
    record = checkpoint.record
    name = url.rstrip("/").rpartition("/")[2]
    click.echo(f"{name} @ step {record.step}  committed {record.created_at} by incarnation {record.incarnation}")
    size = _output.size(record.size_bytes)
    _line("size", f"{size} in {_output.count(len(set(contents.files)), 'file')} of {record.world_size} ranks")
    label = "state"
    for component, members in _components(contents).items():
        dtypes = ", ".join(sorted({tensor.dtype for tensor in members}))
        elements = sum(prod(tensor.shape) for tensor in members)
        size = _output.size(sum(tensor.size_bytes for tensor in members))
        tensors = _output.count(len(members), "tensor")
        _line(label, f"{component}: {tensors}, {_output.count(elements, 'element')}, {size} {dtypes}")
        label = ""
    if contents.objects:
        _line("objects", ", ".join(f"{key} ({_output.count(n, 'rank')})" for key, n in contents.objects.items()))
    if record.references:
        _line("needs", ", ".join(record.references))
    _line("made by", record.made_by)
    _line("data", checkpoint.folder)


def _line(label: str, text: str) -> None:
    click.echo(f"  {label:9}{text}")


def _components(contents: _Contents) -> dict[str, list[_Tensor]]:
    found: dict[str, list[_Tensor]] = {}
    for (key, _rank), tensor in contents.tensors.items():
        found.setdefault(key.partition(".")[0].partition("/")[0], []).append(tensor)
    return dict(sorted(found.items()))


def _order(item: tuple[tuple[str, int | None], _Tensor]) -> tuple[str, int]:
    (key, rank), _ = item
    return key, -1 if rank is None else rank


def _row(key: str, rank: int | None, tensor: _Tensor) -> tuple[str, ...]:
    ranks = f"{rank} only" if rank is not None else _ranges(tensor.ranks)
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return key, tensor.dtype, shape, _output.size(tensor.size_bytes), ranks


def _ranges(ranks: Iterable[int]) -> str:
    """0-3,5."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _document(url: str, checkpoint: Checkpoint, contents: _Contents, with_tensors: bool) -> dict[str, object]:
    record = checkpoint.record
    document: dict[str, object] = {
        "url": url,
        "step": record.step,
        "incarnation": record.incarnation,
        "created_at": record.created_at,
        "made_by": record.made_by,
        "world_size": record.world_size,
        "size_bytes": record.size_bytes,
        "data": checkpoint.folder,
        "references": list(record.references),
        "files": sorted(set(contents.files)),
        "num_tensors": len(contents.tensors),
        "components": {
            component: {"num_tensors": len(members), "size_bytes": sum(tensor.size_bytes for tensor in members)}
            for component, members in _components(contents).items()
        },
        "objects": contents.objects,
    }
    if with_tensors:
        document["tensors"] = [
            {
                "key": key,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "size_bytes": tensor.size_bytes,
                "ranks": tensor.ranks,
                "rank_only": rank is not None,
            }
            for (key, rank), tensor in sorted(contents.tensors.items(), key=_order)
        ]
    return document
