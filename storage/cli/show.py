"""`ckptrt show`: what one checkpoint holds, told by its manifest alone."""

from __future__ import annotations

import functools
from itertools import starmap

import click
import msgspec

from ckptrt.errors import NoCheckpointError
from ckptrt.storage.catalog import Catalog, Checkpoint, CommitId, open_catalog
from ckptrt.storage.cli import _output
from ckptrt.storage.cli._settings import Settings, Target, common_options, pass_settings
from ckptrt.storage.contents import Contents, Tensor, TensorId, no_gc

__all__ = ["choose", "command"]

_LISTED_MAX = 50

_EXAMPLES = """\b
Examples:
  ckptrt show runs/gpt@1200
  ckptrt -C s3://bucket/runs/gpt show latest --tensors
  ckptrt show runs/gpt@1200 --tensors --all | grep embed
"""


@click.command("show", epilog=_EXAMPLES)
@click.argument("target", metavar="[STEP|latest|URL@STEP]", required=False)
@click.option("--tensors", is_flag=True, help="List tensors with dtype, shape and size.")
@click.option("--all", "show_all", is_flag=True, help=f"With --tensors: all of them, not only the first {_LISTED_MAX}.")
@common_options
@pass_settings
@no_gc()
def command(settings: Settings, target: str | None, tensors: bool, show_all: bool) -> None:
    """Show what a checkpoint holds: the latest good one if no step is named. No tensor data are read.

    JSON always lists all tensors if --tensors is given.
    """
    where = settings.target(target)
    catalog = open_catalog(where.url)
    checkpoint = catalog.open_checkpoint(choose(catalog, where))
    contents = Contents(checkpoint.outlines(), max_listed=_max_listed(settings, tensors, show_all))
    if settings.is_json:
        lists = {"tensors": starmap(_tensor_as_json, contents.tensors.items())} if tensors else {}
        _output.print_json(_document(where.url, checkpoint, contents), lists)
        return
    _print(where.url, checkpoint, contents)
    if tensors:
        click.echo()
        rows = [_row(name, tensor) for name, tensor in contents.tensors.items()]
        _output.print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "RANKS"), rows, right=(3,))
        more = contents.total.num_tensors - len(rows)
        if more:
            click.echo(f"... {more:,} more; --all lists them, `ckptrt tree` sums them up")


def _max_listed(settings: Settings, tensors: bool, show_all: bool) -> int | None:
    if not tensors:
        return 0
    return None if show_all or settings.is_json else _LISTED_MAX


def choose(catalog: Catalog, where: Target) -> CommitId:
    """The commit that a target names, or the newest good one, with a warning for each that was passed over."""
    if where.step is not None:
        return catalog.find(where.step)
    selection = catalog.newest_good()
    for passed_over in selection.skipped:
        _output.warn(f"step {passed_over.step} is passed over: {passed_over.reason}")
    if selection.commit is None:
        raise NoCheckpointError(f"{where.url} has no good checkpoint", hint="`ckptrt ls` shows what is there")
    return selection.commit.id


def _print(url: str, checkpoint: Checkpoint, contents: Contents) -> None:
    record = checkpoint.record
    name = url.rstrip("/").rpartition("/")[2]
    click.echo(f"{name} @ step {record.step}  committed {record.created_at} by incarnation {record.incarnation}")
    size = _output.size(record.size_bytes)
    _line("size", f"{size} in {_output.count(len(contents.files), 'file')} of {record.world_size} ranks")
    label = "state"
    for component, totals in sorted(contents.branches.items()):
        tensors, elements = _output.count(totals.num_tensors, "tensor"), _output.count(totals.num_elements, "element")
        dtypes = ", ".join(sorted(totals.dtypes))
        _line(label, f"{component}: {tensors}, {elements}, {_output.size(totals.size_bytes)} {dtypes}")
        label = ""
    if contents.objects:
        _line("objects", ", ".join(f"{key} ({_output.count(n, 'rank')})" for key, n in contents.objects.items()))
    if record.references:
        _line("needs", ", ".join(record.references))
    _line("made by", record.made_by)
    _line("data", checkpoint.folder)


def _line(label: str, text: str) -> None:
    click.echo(f"  {label:9}{text}")


def _row(name: TensorId, tensor: Tensor) -> tuple[str, ...]:
    key, ranks = (name, _ranges(tensor.ranks)) if isinstance(name, str) else (name[0], f"{name[1]} only")
    return key, tensor.dtype, _shape(tensor.shape), _size(tensor.size_bytes), ranks


_size = functools.cache(_output.size)  # of a million tensors few differ in shape


@functools.cache
def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@functools.cache
def _ranges(ranks: tuple[int, ...]) -> str:
    """0-3,5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _document(url: str, checkpoint: Checkpoint, contents: Contents) -> dict[str, object]:
    record = checkpoint.record
    return {
        "url": url,
        "step": record.step,
        "incarnation": record.incarnation,
        "created_at": record.created_at,
        "made_by": record.made_by,
        "world_size": record.world_size,
        "size_bytes": record.size_bytes,
        "data": checkpoint.folder,
        "references": list(record.references),
        "files": sorted(contents.files),
        "num_tensors": contents.total.num_tensors,
        "components": {
            component: {"num_tensors": totals.num_tensors, "size_bytes": totals.size_bytes}
            for component, totals in sorted(contents.branches.items())
        },
        "objects": contents.objects,
    }


class _TensorAsJson(msgspec.Struct):
    key: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    ranks: tuple[int, ...]
    rank_only: bool


def _tensor_as_json(name: TensorId, tensor: Tensor) -> _TensorAsJson:
    key, rank_only = (name, False) if isinstance(name, str) else (name[0], True)
    return _TensorAsJson(key, tensor.dtype, tensor.shape, tensor.size_bytes, tensor.ranks, rank_only)
