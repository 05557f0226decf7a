"""`ckptrt tree`: a checkpoint's tensors by the hierarchy of their names, added up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

import click

from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.cli.show import choose
from ckptrt.storage.contents import Contents, Totals, no_gc

__all__ = ["command"]

_DEPTH = 3
_NUMBERS = re.compile(r"(\d+)")

_EXAMPLES = """\b
Examples:
  ckptrt tree runs/gpt@1200
  ckptrt -C s3://bucket/runs/gpt tree latest --depth 5
"""


class _Fields(TypedDict):
    num_tensors: int
    num_elements: int
    size_bytes: int
    dtypes: dict[str, int]


@dataclass(slots=True)
class _Node:
    name: str = ""
    totals: Totals = field(default_factory=Totals)
    children: dict[str, _Node] = field(default_factory=dict)


@click.command("tree", epilog=_EXAMPLES)
@click.argument("target", metavar="[STEP|latest|URL@STEP]", required=False, shell_complete=complete_place)
@click.option("--depth", type=click.IntRange(1), default=_DEPTH, show_default=True, help="Levels of names to show.")
@common_options
@pass_settings
@no_gc()
def command(settings: Settings, target: str | None, depth: int) -> None:
    """Show what a checkpoint holds by module: tensors, elements, bytes and dtypes, added up.

    Numbered neighbours that are alike (the layers of a transformer) share a line. No tensor data are read.
    """
    where = settings.target(target)
    catalog = open_catalog(where.url)
    checkpoint = catalog.open_checkpoint(choose(catalog, where))
    root = _grow(Contents(checkpoint.outlines(), depth=depth))
    document = _documents.Tree(
        url=where.url, step=checkpoint.id.step, incarnation=checkpoint.id.incarnation, depth=depth, **_fields(root)
    )
    nodes = list(_parts(root)) if settings.format in ("json", "jsonl", "quiet") else []
    _output.emit(
        document, lambda: _print(where.url, checkpoint.id.step, root), (node.name for node in nodes), {"nodes": nodes}
    )


def _print(url: str, step: int, root: _Node) -> None:
    name = url.rstrip("/").rpartition("/")[2]
    rows = [(f"{name} @ step {step}", *_cells(root.totals)), *_rows(root, "")]
    _output.print_table(("NAME", "TENSORS", "ELEMENTS", "SIZE", "DTYPES"), rows, right=(1, 2, 3))


def _grow(contents: Contents) -> _Node:
    """The tree above the branches, each node with the sums of all below it."""
    root = _Node()
    for path, totals in contents.branches.items():
        node = root
        node.totals.add(totals)
        for part in path.split("."):
            node = node.children.setdefault(part, _Node(part))
            node.totals.add(totals)
    return root


def _rows(node: _Node, indent: str) -> Iterator[tuple[str, ...]]:
    groups = list(_groups(node))
    for number, group in enumerate(groups):
        is_last = number == len(groups) - 1
        first = group[0]
        label = first.name if len(group) == 1 else f"{first.name}-{group[-1].name}  {len(group):,} alike, each:"
        yield f"{indent}{'└─ ' if is_last else '├─ '}{label}", *_cells(first.totals)
        yield from _rows(first, indent + ("   " if is_last else "│  "))


def _groups(node: _Node) -> Iterator[list[_Node]]:
    """Children in order of their names, numbers by value; numbered ones in a row that are alike make one group."""
    group: list[_Node] = []
    for child in _sorted(node):
        if group and not (child.name.isdigit() and group[-1].name.isdigit() and _alike(child, group[-1])):
            yield group
            group = []
        group.append(child)
    if group:
        yield group


def _alike(a: _Node, b: _Node) -> bool:
    if a.totals != b.totals or a.children.keys() != b.children.keys():
        return False
    return all(_alike(child, b.children[name]) for name, child in a.children.items())


def _sorted(node: _Node) -> list[_Node]:
    return sorted(node.children.values(), key=lambda child: _natural(child.name))


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in _NUMBERS.split(name)]


def _cells(totals: Totals) -> tuple[str, ...]:
    if totals.num_tensors == 1:
        dtype = f"{next(iter(totals.dtypes))} {'x'.join(map(str, totals.shape)) or 'scalar'}"
    else:
        dtype = ", ".join(sorted(totals.dtypes, key=lambda dtype: -totals.dtypes[dtype]))
    return f"{totals.num_tensors:,}", f"{totals.num_elements:,}", _output.size(totals.size_bytes), dtype


def _parts(node: _Node, path: str = "") -> Iterator[_documents.TreeNode]:
    for child in _sorted(node):
        name = f"{path}.{child.name}" if path else child.name
        yield _documents.TreeNode(name=name, **_fields(child))
        yield from _parts(child, name)


def _fields(node: _Node) -> _Fields:
    totals = node.totals
    return {
        "num_tensors": totals.num_tensors,
        "num_elements": totals.num_elements,
        "size_bytes": totals.size_bytes,
        "dtypes": totals.dtypes,
    }
