"""`ckptrt ls`: the checkpoints of a run, or the runs in a directory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import click

from ckptrt.errors import NotFoundError, VersionError
from ckptrt.storage.catalog import Catalog, CommitId, CommitInfo, Overview
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.layout import RUN
from ckptrt.storage.pins import pins
from ckptrt.storage.presence import check_presence
from ckptrt.storage.tiers import Tier, open_tier

_HEADER = ("STEP", "AGE", "SIZE", "NEW", "WORLD", "INCARNATION", "STATE", "KEEP", "NOTE")
_RUNS_HEADER = ("RUN", "CHECKPOINTS", "LATEST", "AGE", "SIZE", "NOTE")

_EXAMPLES = """\b
Examples:
  ckptrt ls runs/gpt
  ckptrt ls s3://bucket/runs
  ckptrt -C runs/gpt ls --json
"""


@click.command("ls", epilog=_EXAMPLES)
@click.argument("path", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@common_options
@pass_settings
def command(settings: Settings, path: str | None) -> None:
    """List the checkpoints of a run, newest first, or the runs in a directory.

    NEW is what was written for a checkpoint, where it refers to older ones for the rest of its SIZE. STATE is
    `committed`, `off-path` (a branch that was cut off by a restart), `damaged` or `too-new`. Records are read and files
    listed; `ckptrt verify` looks at what is in them.
    """
    url = settings.url(path)
    catalog = Catalog(open_tier(url))
    try:
        catalog.open_run()
    except NotFoundError:
        runs = _runs(catalog.tier, url)
        if not runs:
            raise
        _print_runs(url, runs)
        return
    overview = catalog.overview()
    _print_checkpoints(url, catalog, replace(overview, commits=tuple(check_presence(catalog, overview.commits))))


def _print_checkpoints(url: str, catalog: Catalog, overview: Overview) -> None:
    pinned = pins(catalog)
    bad_pins = [f"the pin of step {commit.step} is damaged; it still pins" for commit, pin in pinned.items() if not pin]
    overview = replace(overview, problems=(*overview.problems, *bad_pins))
    document = _documents.Ls(
        url=url,
        run_id=catalog.run.run_id if catalog.run else None,
        newest_incarnation=max((*overview.fences, *overview.bad_fences), default=0),
        checkpoints=[_part(commit, commit.id in pinned) for commit in overview.commits],
        problems=list(overview.problems),
    )
    _output.emit(document, lambda: _show(url, overview, pinned), (commit.step for commit in overview.valid))


def _show(url: str, overview: Overview, pinned: Collection[CommitId]) -> None:
    for problem in overview.problems:
        _output.warn(problem)
    if not overview.commits:
        click.echo(f"no checkpoints in {url}", err=True)
        return
    rows = [_row(commit, commit.id in pinned) for commit in overview.commits]
    _output.print_table(_HEADER, rows, right=(0, 1, 2, 3, 4, 5))


def _row(commit: CommitInfo, is_pinned: bool) -> tuple[str, ...]:
    record = commit.record
    facts = ("", "", "", "")
    if record is not None:
        new = "" if record.new_bytes == record.size_bytes else _output.size(record.new_bytes)
        facts = (_output.age(record.created_at), _output.size(record.size_bytes), new, str(record.world_size))
    keep = "pinned" if is_pinned else ""
    return (str(commit.step), *facts, str(commit.incarnation), commit.state, keep, commit.reason)


def _part(commit: CommitInfo, is_pinned: bool) -> _documents.LsCheckpoint:
    record = commit.record
    return _documents.LsCheckpoint(
        step=commit.step,
        incarnation=commit.incarnation,
        state=commit.state,
        reason=commit.reason,
        pinned=is_pinned,
        size_bytes=record.size_bytes if record else None,
        new_bytes=record.new_bytes if record else None,
        metrics=record.metrics if record else None,
        world_size=record.world_size if record else None,
        num_tensors=record.num_tensors if record else None,
        created_at=record.created_at if record else None,
        age_s=_output.age_s(record.created_at) if record else None,
        made_by=record.made_by if record else None,
        data=record.data if record else None,
    )


def _runs(tier: Tier, url: str) -> dict[str, Catalog]:
    """Catalogs of the folders that are runs, by name."""
    found: dict[str, Catalog] = {}
    folders = [entry.name for entry in tier.list("") if entry.is_folder]
    there = tier.read_many(folder + RUN for folder in folders)
    for folder in folders:
        if folder + RUN in there:
            found[folder.rstrip("/")] = Catalog(open_tier(f"{url.rstrip('/')}/{folder.rstrip('/')}"))
    return found


def _print_runs(url: str, runs: dict[str, Catalog]) -> None:
    rows = []
    parts = []
    for name, catalog in runs.items():
        commits, problem = _look(catalog)
        latest = commits[0] if commits else None
        record = latest.record if latest else None
        facts = (_output.age(record.created_at), _output.size(record.size_bytes)) if record else ("", "")
        rows.append((name, str(len(commits)), str(latest.step) if latest else "", *facts, problem))
        parts.append(
            _documents.LsRun(
                name=name,
                num_checkpoints=len(commits),
                latest_step=latest.step if latest else None,
                latest_size_bytes=record.size_bytes if record else None,
                latest_created_at=record.created_at if record else None,
                latest_age_s=_output.age_s(record.created_at) if record else None,
                problem=problem,
            )
        )
    document = _documents.LsRuns(url=url, runs=parts)
    _output.emit(document, lambda: _output.print_table(_RUNS_HEADER, rows, right=(1, 2, 3, 4)), runs)


def _look(catalog: Catalog) -> tuple[list[CommitInfo], str]:
    """A run's good commits and what is wrong with it; one bad run must not hide the others."""
    try:
        catalog.open_run()
        overview = catalog.overview()
    except VersionError as error:
        return [], error.what
    return overview.valid, "; ".join(overview.problems)
