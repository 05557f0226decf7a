"""`ckptrt show`: what one checkpoint holds, told by its manifest alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from itertools import starmap
from typing import Literal

import click

from ckptrt.errors import CorruptError, NotFoundError
from ckptrt.storage.catalog import Catalog, Checkpoint, CommitId, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, Target, common_options, complete_place, pass_settings
from ckptrt.storage.contents import Contents, Tensor, TensorId, id_order, no_gc
from ckptrt.storage.pins import pins
from ckptrt.storage.plain import PlainData, PlainValue
from ckptrt.storage.records import PinRecord

__all__ = ["choose", "command"]

_LISTED_MAX = 50
_VALUE_MAX = 200
_NOT_PINNED: Literal["no"] = "no"

_EXAMPLES = """\b
Examples:
  ckptrt show runs/gpt@1200
  ckptrt -C s3://bucket/runs/gpt show latest --tensors
  ckptrt show runs/gpt@1200 --tensors --all | grep embed
"""


@click.command("show", epilog=_EXAMPLES)
@click.argument("target", metavar="[STEP|latest|URL@STEP]", required=False, shell_complete=complete_place)
@click.option("--tensors", is_flag=True, help="List tensors with dtype, shape and size.")
@click.option("--all", "show_all", is_flag=True, help=f"With --tensors: all of them, not only the first {_LISTED_MAX}.")
@common_options
@pass_settings
@click.pass_context
@no_gc()
def command(ctx: click.Context, settings: Settings, target: str | None, tensors: bool, show_all: bool) -> None:
    """Show what a checkpoint holds: the latest good one if no step is named. No tensor data are read, and
    of plain data only what is small.

    JSON always lists all tensors if --tensors is given.
    """
    where = settings.target(target)
    catalog = open_catalog(where.url)
    checkpoint = catalog.open_checkpoint(choose(catalog, where))
    held = pins(catalog).get(checkpoint.id, _NOT_PINNED)
    plain = PlainData()
    contents = Contents(plain.watch(checkpoint.outlines()), max_listed=_max_listed(settings, tensors, show_all))
    values = plain.values(catalog.tier)
    lists = {"tensors": starmap(_tensor, contents.tensors.items())} if tensors else {}
    _output.emit(
        _document(where.url, checkpoint, contents, values, _pin(held)),
        lambda: _print(where.url, checkpoint, contents, values, _pin(held), tensors),
        (id_order(name)[0] for name in contents.tensors) if tensors else [checkpoint.id.step],
        lists,
    )
    damaged = [value for value in values if value.is_damaged]
    for value in damaged:
        _output.warn(f"{value.key} of {_ranks_text(value.ranks)} can't be shown: {value.problem}")
    if damaged:
        ctx.exit(CorruptError.exit_code)


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
        raise NotFoundError(f"{where.url} has no good checkpoint", hint="`ckptrt ls` shows what is there")
    return selection.commit.id


def _print(
    url: str,
    checkpoint: Checkpoint,
    contents: Contents,
    values: Sequence[PlainValue],
    pin: dict[str, str] | None,
    list_tensors: bool,
) -> None:
    record = checkpoint.record
    name = url.rstrip("/").rpartition("/")[2]
    click.echo(f"{name} @ step {record.step}  committed {record.created_at} by incarnation {record.incarnation}")
    files, ranks = _output.count(len(contents.files), "file"), _output.count(record.world_size, "rank")
    _line("size", f"{_output.size(record.size_bytes)} in {files} of {ranks}")
    label = "state"
    for component, totals in sorted(contents.branches.items()):
        tensors, elements = _output.count(totals.num_tensors, "tensor"), _output.count(totals.num_elements, "element")
        dtypes = ", ".join(sorted(totals.dtypes))
        _line(label, f"{component}: {tensors}, {elements}, {_output.size(totals.size_bytes)} {dtypes}")
        label = ""
    label = "objects"
    for key, num_ranks in sorted(contents.objects.items()):
        _line(label, f"{key} ({_output.count(num_ranks, 'rank')}){_value_text(key, values)}")
        label = ""
    if record.metrics:
        _line("metrics", ", ".join(f"{name} {value:.6g}" for name, value in record.metrics.items()))
    if pin is not None:
        by = f"by {pin['by']}, {pin['created_at']}" if pin else "its pin is damaged, and still pins"
        _line("pinned", f"{by}: {pin['reason']}" if pin.get("reason") else by)
    if record.references:
        _line("needs", ", ".join(record.references))
    _line("made by", record.made_by)
    _line("data", checkpoint.folder)
    if list_tensors:
        click.echo()
        rows = [_row(name, tensor) for name, tensor in contents.tensors.items()]
        _output.print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "RANKS"), rows, right=(3,))
        more = contents.total.num_tensors - len(rows)
        if more:
            click.echo(f"... {more:,} more; --all lists them, `ckptrt tree` sums them up")


def _value_text(key: str, values: Sequence[PlainValue]) -> str:
    """The value that the ranks share, or that of the first of them."""
    mine = [value for value in values if value.key == key]
    if not mine or (len(mine) == 1 and mine[0].value is None and not mine[0].problem):
        return ""  # an object that had nothing but tensors
    text = json.dumps(mine[0].value, ensure_ascii=False) if not mine[0].problem else mine[0].problem
    text = text if len(text) <= _VALUE_MAX else text[: _VALUE_MAX - 1] + "…"
    return f": {text}" if len(mine) == 1 else f": {text} on {_ranks_text(mine[0].ranks)}, others differ"


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_ranges(ranks)}"


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


def _pin(held: PinRecord | Literal["no"] | None) -> dict[str, str] | None:
    if held == "no" or held is None:
        return None if held == "no" else {}
    by = f"{held.owner.user} on {held.owner.host}"
    return {"reason": held.reason, "by": by, "created_at": held.created_at}


def _document(
    url: str,
    checkpoint: Checkpoint,
    contents: Contents,
    values: Sequence[PlainValue],
    pin: dict[str, str] | None,
) -> _documents.Show:
    record = checkpoint.record
    return _documents.Show(
        url=url,
        step=record.step,
        incarnation=record.incarnation,
        created_at=record.created_at,
        made_by=record.made_by,
        world_size=record.world_size,
        size_bytes=record.size_bytes,
        data=checkpoint.folder,
        references=list(record.references),
        files=sorted(contents.files),
        num_tensors=contents.total.num_tensors,
        components={
            component: _documents.ComponentSums(num_tensors=totals.num_tensors, size_bytes=totals.size_bytes)
            for component, totals in sorted(contents.branches.items())
        },
        objects=contents.objects,
        metrics=record.metrics,
        pin=pin,
        values=[
            _documents.ShowValue(key=value.key, ranks=value.ranks, value=value.value, problem=value.problem)
            for value in values
        ],
    )


def _tensor(name: TensorId, tensor: Tensor) -> _documents.ShowTensor:
    key, rank_only = (name, False) if isinstance(name, str) else (name[0], True)
    return _documents.ShowTensor(
        key=key,
        dtype=tensor.dtype,
        shape=tensor.shape,
        size_bytes=tensor.size_bytes,
        ranks=tensor.ranks,
        rank_only=rank_only,
    )
