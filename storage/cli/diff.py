"""`ckptrt diff`: what differs between two checkpoints."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

import click
from msgspec import UNSET

from ckptrt.storage.catalog import Checkpoint, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, Target, common_options, complete_place, pass_settings
from ckptrt.storage.cli.show import choose
from ckptrt.storage.contents import TensorId, id_order, no_gc
from ckptrt.storage.diff import Data, Form, Region, compare
from ckptrt.storage.diffdata import Result
from ckptrt.storage.values import NonFinite, ValueDiff

__all__ = ["command"]

_DIFFERENT = 5
_LISTED_MAX = 20
_LEAVES_MAX = 3
_Word = Literal["same", "unknown", "differs"]
_Change = Literal["removed", "added", "shape", "layout", "data"]
_DATA_WORDS: dict[Data, _Word] = {Data.SAME: "same", Data.UNKNOWN: "unknown", Data.DIFFERS: "differs"}

_EXAMPLES = """\b
Examples:
  ckptrt -C runs/gpt diff 1000 1040
  ckptrt diff runs/gpt@1000 s3://bucket/gpt@1000 --data --exit-code
  ckptrt -C runs/gpt diff 1000 latest --stat --all
"""


@click.command("diff", epilog=_EXAMPLES)
@click.argument("a", metavar="STEP|latest|URL[@STEP]", shell_complete=complete_place)
@click.argument("b", metavar="STEP|latest|URL[@STEP]", shell_complete=complete_place)
@click.option("--data", "read_data", is_flag=True, help="Read what the digests can't decide.")
@click.option("--stat", is_flag=True, help="Read all that changed: largest difference, norms, first NaN or infinity.")
@click.option("--all", "show_all", is_flag=True, help=f"List all that differs, not only the first {_LISTED_MAX}.")
@click.option("--exit-code", is_flag=True, help=f"End with {_DIFFERENT} unless both are known to hold the same.")
@common_options
@pass_settings
@click.pass_context
@no_gc()
def command(
    ctx: click.Context,
    settings: Settings,
    a: str,
    b: str,
    read_data: bool,
    stat: bool,
    show_all: bool,
    exit_code: bool,
) -> None:
    """Show what differs between two checkpoints: tensors, shapes, dtypes, layout, data and plain data.

    Data are compared by their digests, without reading any. Those can't decide where a tensor lies at another place
    now, or shares a changed chunk of 4 MiB with others; --data reads what is undecided.
    """
    where_a = settings.target(a)
    where_b = Settings(dir=where_a.url).target(b)
    one, other = _open(where_a), _open(where_b)
    result = Result(compare(one, other, keep_pairs=read_data or stat))
    if read_data or stat:
        with _output.progress("comparing", result.size_bytes(stat)) as tell:
            result.read(one.tier, other.tier, stat, tell)
    _output.emit(
        _document(result, (where_a, one), (where_b, other)),
        lambda: _print(result, (where_a, one), (where_b, other), _LISTED_MAX if not show_all else None),
        chain((part.key for part in _tensors(result)), (part.key for part in _objects(result))),
        {"tensors": _tensors(result), "objects": _objects(result)},
    )
    if exit_code and (result.differs or not result.is_decided):
        ctx.exit(_DIFFERENT)


def _open(where: Target) -> Checkpoint:
    catalog = open_catalog(where.url)
    return catalog.open_checkpoint(choose(catalog, where))


# --- for people


def _print(result: Result, a: tuple[Target, Checkpoint], b: tuple[Target, Checkpoint], max_rows: int | None) -> None:
    found = result.found
    same, undecided, differ = (len(result.tensors[data]) for data in Data)
    click.echo(f"a  {_describe(*a)}\nb  {_describe(*b)}")
    counts = (
        ("only in a", len(found.removed), "tensor"),
        ("only in b", len(found.added), "tensor"),
        ("shape", len(found.changed), "tensor"),
        ("layout", len(found.relaid), "tensor"),
        ("data", differ, "tensor"),
        ("objects", sum(data == Data.DIFFERS for data in result.objects.values()), "object"),
    )
    for label, number, what in counts:
        if number:
            click.echo(
                f"  {label:10} {_output.count(number, what)}" + (" differ" if label in ("data", "objects") else "")
            )
    undecided_objects = sum(data == Data.UNKNOWN for data in result.objects.values())
    if undecided or undecided_objects:
        parts = [(undecided, "tensor"), (undecided_objects, "object")]
        text = " and ".join(_output.count(number, what) for number, what in parts if number)
        click.echo(f"  {'undecided':10} {text}; --data reads them")
    if same or not found.data:
        everything = "" if result.differs or not result.is_decided else ": all that they hold"
        click.echo(f"  {'same':10} {_output.count(same, 'tensor')}{everything}")
    rows = list(_rows(result, max_rows))
    total = len(found.removed) + len(found.added) + len(found.changed) + len(found.relaid)
    total += differ + sum(data == Data.DIFFERS for data in result.objects.values())
    if rows:
        click.echo()
        _output.print_table(_HEADER, rows, right=(3, 4, 5))
    if total > len(rows):
        click.echo(f"... {total - len(rows):,} more; --all lists them")


_HEADER = ("WHAT", "NAME", "A -> B", "MAX DIFF", "NORM A", "NORM B", "NOT FINITE IN B")


def _describe(where: Target, checkpoint: Checkpoint) -> str:
    record = checkpoint.record
    ranks = _output.count(record.world_size, "rank")
    return f"{where.url} @ step {record.step}, {_output.size(record.size_bytes)} of {ranks}"


def _rows(result: Result, max_rows: int | None) -> Iterator[tuple[str, ...]]:
    """What differs, most important first."""
    found, left = result.found, max_rows
    kinds: tuple[tuple[str, Iterable[TensorId]], ...] = (
        ("only in a", found.removed), ("only in b", found.added), ("shape", found.changed),
        ("layout", found.relaid), ("data", result.tensors[Data.DIFFERS]),
    )  # fmt: skip
    for kind, names in kinds:
        if kind == "data":  # few and small, and often the reason for the rest
            objects = sorted(name for name, data in result.objects.items() if data == Data.DIFFERS)[:left]
            yield from (
                ("object", f"{key} (rank {rank})", _leaf_text(result, (key, rank)), *[""] * 4) for key, rank in objects
            )
            left = None if left is None else left - len(objects)
        chosen = sorted(names, key=id_order) if left is None else heapq.nsmallest(left, names, key=id_order)
        left = None if left is None else left - len(chosen)
        yield from (_row(result, kind, name) for name in chosen)


def _row(result: Result, kind: str, name: TensorId) -> tuple[str, ...]:
    found = result.found
    label = name if isinstance(name, str) else f"{name[0]} (rank {name[1]})"
    detail = ""
    if kind == "shape":
        one, other = found.changed[name]
        detail = f"{_form(one.form)} -> {_form(other.form)}"
    elif kind == "layout":
        one_count, other_count = found.relaid[name]
        detail = f"{_output.count(one_count, 'region')} -> {other_count}, data {_DATA_WORDS[found.data[name]]}"
    elif name in found.removed or name in found.added:
        detail = _form((found.removed.get(name) or found.added[name]).form)
    values = result.values.get(name)
    if values is None:
        return kind, label, detail, "", "", "", ""
    norms = (f"{values.squares_a**0.5:.4g}", f"{values.squares_b**0.5:.4g}")
    return kind, label, detail, f"{values.max_abs:.4g}", *norms, _bad_text(values.non_finite_b)


def _bad_text(bad: NonFinite) -> str:
    if not bad:
        return ""
    return f"{bad.num_nan:,} NaN, {bad.num_inf:,} inf, first at {list(bad.first or ())}"


def _leaf_text(result: Result, ident: tuple[str, int]) -> str:
    plain = result.found.objects[ident]
    if plain.a is None or plain.b is None:
        return "only in b" if plain.a is None else "only in a"
    leaves = result.leaves.get(ident, [])
    texts = [f"{path} {_short(one)} -> {_short(other)}" for path, one, other in leaves[:_LEAVES_MAX]]
    more = [f"and {len(leaves) - _LEAVES_MAX:,} more"] if len(leaves) > _LEAVES_MAX else []
    return ", ".join((*texts, *more))


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:23] + "…"


def _form(form: Form) -> str:
    return f"{form.dtype} {'x'.join(map(str, form.shape)) or 'scalar'}"


# --- for scripts


def _document(result: Result, a: tuple[Target, Checkpoint], b: tuple[Target, Checkpoint]) -> _documents.Diff:
    return _documents.Diff(
        a=_side(*a),
        b=_side(*b),
        differs=True if result.differs else (False if result.is_decided else None),
        num_same=len(result.tensors[Data.SAME]),
        num_unknown=sum(data == Data.UNKNOWN for data in result.found.data.values()),
    )


def _side(where: Target, checkpoint: Checkpoint) -> _documents.DiffSide:
    record = checkpoint.record
    return _documents.DiffSide(
        url=where.url,
        step=record.step,
        incarnation=record.incarnation,
        world_size=record.world_size,
        size_bytes=record.size_bytes,
    )


def _tensors(result: Result) -> Iterator[_documents.DiffTensor]:
    """Everything that isn't known to be the same."""
    found = result.found
    for name, region in sorted(found.removed.items(), key=lambda item: id_order(item[0])):
        yield _tensor(name, "removed", a=_form_part(region), b=None)
    for name, region in sorted(found.added.items(), key=lambda item: id_order(item[0])):
        yield _tensor(name, "added", a=None, b=_form_part(region))
    for name in sorted(found.changed, key=id_order):
        one, other = found.changed[name]
        yield _tensor(name, "shape", a=_form_part(one), b=_form_part(other))
    for name in sorted((name for name in found.data if found.data[name] or name in found.relaid), key=id_order):
        values = result.values.get(name)
        yield _tensor(
            name,
            "layout" if name in found.relaid else "data",
            data=_DATA_WORDS[found.data[name]],
            stat=UNSET if values is None else _stat(values),
        )


def _objects(result: Result) -> Iterator[_documents.DiffObject]:
    for (key, rank), data in sorted(result.objects.items()):
        if data != Data.SAME:
            plain = result.found.objects[key, rank]
            leaves = result.leaves.get((key, rank), ())
            yield _documents.DiffObject(
                key=key,
                rank=rank,
                change="added" if plain.a is None else "removed" if plain.b is None else "data",
                data=_DATA_WORDS[data],
                values=[_documents.DiffValue(path=path, a=one, b=other) for path, one, other in leaves],
            )


def _tensor(name: TensorId, change: _Change, **fields: Any) -> _documents.DiffTensor:
    key, rank = (name, None) if isinstance(name, str) else name
    return _documents.DiffTensor(key=key, rank=rank, change=change, **fields)


def _form_part(region: Region) -> _documents.Form:
    return _documents.Form(dtype=region.form.dtype, shape=region.form.shape)


def _stat(values: ValueDiff) -> _documents.DiffStat:
    return _documents.DiffStat(
        max_abs=values.max_abs,
        norm_a=values.squares_a**0.5,
        norm_b=values.squares_b**0.5,
        non_finite_a=_bad_part(values.non_finite_a),
        non_finite_b=_bad_part(values.non_finite_b),
    )


def _bad_part(bad: NonFinite) -> _documents.NotFinite:
    return _documents.NotFinite(num_nan=bad.num_nan, num_inf=bad.num_inf, first=bad.first)
