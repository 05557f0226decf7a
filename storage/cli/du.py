"""`ckptrt du`: what the checkpoints of a run take."""

from __future__ import annotations

import click

from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.usage import CheckpointUsage, Usage, usage

__all__ = ["command"]

_HEADER = ("STEP", "SIZE", "STORED", "FREES", "NEEDED BY", "STATE")

_EXAMPLES = """\b
Examples:
  ckptrt du runs/gpt
  ckptrt -C s3://bucket/runs/gpt du --json
"""


@click.command("du", epilog=_EXAMPLES)
@click.argument("path", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@common_options
@pass_settings
def command(settings: Settings, path: str | None) -> None:
    """Show what each checkpoint takes, newest first.

    SIZE is all that it holds, STORED what lies in its own folder (the rest is in older ones'), FREES what would come
    free if it alone were removed, NEEDED BY how many others refer to its folder.
    """
    url = settings.url(path)
    found = usage(open_catalog(url))
    document = _documents.Du(
        url=url,
        checkpoints=[_part(each) for each in found.checkpoints],
        uncommitted_bytes=found.uncommitted_bytes,
        num_uncommitted=found.num_uncommitted,
        total_bytes=found.total_bytes,
    )
    _output.emit(document, lambda: _print(found), [found.total_bytes])


def _print(found: Usage) -> None:
    rows = []
    for each in found.checkpoints:
        record = each.commit.record
        size = _output.size(record.size_bytes) if record else ""
        needed = str(each.needed_by) if each.needed_by else ""
        sizes = (size, _output.size(each.own_bytes), _output.size(each.frees_bytes))
        rows.append((str(each.commit.step), *sizes, needed, each.commit.state))
    if rows:
        _output.print_table(_HEADER, rows, right=(0, 1, 2, 3, 4))
    if found.num_uncommitted:
        folders = _output.count(found.num_uncommitted, "folder")
        click.echo(f"loose      {_output.size(found.uncommitted_bytes)} in {folders} without a commit")
    click.echo(f"total      {_output.size(found.total_bytes)}")


def _part(each: CheckpointUsage) -> _documents.DuCheckpoint:
    return _documents.DuCheckpoint(
        step=each.commit.step,
        incarnation=each.commit.incarnation,
        state=each.commit.state,
        size_bytes=each.commit.record.size_bytes if each.commit.record else None,
        own_bytes=each.own_bytes,
        frees_bytes=each.frees_bytes,
        borrows=each.borrows,
        needed_by=each.needed_by,
    )
