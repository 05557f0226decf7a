"""`ckptrt verify`: are checkpoints as they were written?"""

from __future__ import annotations

import re
import secrets

import click

from ckptrt.errors import CorruptError, NotFoundError, UsageError
from ckptrt.storage.catalog import Catalog, CommitId, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import ParamType, Settings, Target, common_options, complete_place, pass_settings
from ckptrt.storage.deep import BadValues, find_non_finite
from ckptrt.storage.verify import Affected, Finding, Report, verify_commit, verify_records

__all__ = ["command"]

_AFFECTED_MAX = 8

_EXAMPLES = """\b
Examples:
  ckptrt verify runs/gpt
  ckptrt verify runs/gpt@1200 --read-data
  ckptrt verify runs/gpt@latest --deep
  ckptrt verify runs/gpt --read-data-subset 3/7  (each day another)
"""


class _Subset(ParamType[tuple[int, int]]):
    """A part of the data: 3/10, or 10% (of which one of ten parts is drawn)."""

    name = "subset"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})|([1-9][0-9]?|100)%", str(value))
        if match is None or (match[1] and int(match[1]) > int(match[2])):
            self.fail(f"{value!r} is neither a part such as 3/10 nor a share such as 10%", param, ctx)
        if match[1]:
            return int(match[1]), int(match[2])
        parts = max(1, 100 // int(match[3]))
        return secrets.randbelow(parts) + 1, parts


@click.command("verify", epilog=_EXAMPLES)
@click.argument("target", metavar="[URL|STEP|latest|URL@STEP]", required=False, shell_complete=complete_place)
@click.option("--read-data", is_flag=True, help="Read all data and compare every digest, not only metadata and sizes.")
@click.option(
    "--read-data-subset",
    type=_Subset(),
    metavar="N/M|P%",
    help="Read the N-th of M parts, or a part of so many percent drawn at random.",
)
@click.option("--deep", is_flag=True, help="Look into the values: where are NaN and infinities? Reads all data.")
@common_options
@pass_settings
@click.pass_context
def command(
    ctx: click.Context,
    settings: Settings,
    target: str | None,
    read_data: bool,
    read_data_subset: tuple[int, int] | None,
    deep: bool,
) -> None:
    """Check one checkpoint, or everything in a run if no step is named. Nothing is changed.

    Exit code 4 if anything differs from what was written; what can still be loaded is said. NaN and infinities are
    told by --deep and are no damage: they were written so.
    """
    part = read_data_subset
    read_data = read_data or deep or part is not None
    if deep and part is not None:
        raise UsageError("--deep reads all data", hint="leave out --read-data-subset")
    where = settings.target(target)
    catalog = open_catalog(where.url)
    findings = [] if _is_single(where) else verify_records(catalog)
    commits = _choose(catalog, where)
    with _output.progress("reading", _total_bytes(catalog, commits) if read_data else 0) as tell:
        reports = [verify_commit(catalog, commit, read_data, tell if read_data else None, part) for commit in commits]
    values = {r.commit: find_non_finite(catalog.open_checkpoint(r.commit)) for r in reports if deep and r.is_ok}
    bad = {report.commit for report in reports if not report.is_loadable}
    good = catalog.newest_good(besides=bad).commit
    good_step = good.step if good else None

    def show() -> None:
        _print(where.url, findings, reports, read_data, good_step)
        _print_values(where.url, values)
        if part is not None:
            click.echo(f"part       {part[0]} of {part[1]} parts of the data was read")

    document = _document(where.url, findings, reports, values, part, good_step)
    _output.emit(document, show, (report.commit.step for report in reports if not report.is_ok))
    if findings or any(not report.is_ok for report in reports):
        ctx.exit(CorruptError.exit_code)


def _is_single(where: Target) -> bool:
    return where.is_latest or where.step is not None


def _choose(catalog: Catalog, where: Target) -> list[CommitId]:
    if where.step is not None:
        return [catalog.find(where.step)]
    lineage = catalog.path()
    if not where.is_latest:
        return sorted((*lineage.commits, *lineage.off_path), reverse=True)
    if not lineage.commits:
        raise NotFoundError(f"{where.url} has no checkpoint", hint="`ckptrt ls` shows what is there")
    return [lineage.commits[0]]


def _total_bytes(catalog: Catalog, commits: list[CommitId]) -> int:
    wanted = set(commits)
    records = (commit.record for commit in catalog.overview().commits if commit.id in wanted)
    return sum(record.size_bytes for record in records if record is not None)


def _print(url: str, findings: list[Finding], reports: list[Report], read_data: bool, good: int | None) -> None:
    name = url.rstrip("/").rpartition("/")[2]
    if findings:
        click.echo(f"{name}  DAMAGED")
        _print_findings(findings)
    for report in reports:
        head = f"{name} @ {report.commit.step}"
        if report.is_ok:
            click.echo(f"{head}  ok  {_summary(report, read_data)}")
            continue
        click.echo(f"{head}  DAMAGED" + ("" if not report.is_loadable else " (can be loaded: what is hit is a spare)"))
        _print_findings(report.findings)
    if findings or any(not report.is_ok for report in reports):
        text = "none: no checkpoint of this run is whole" if good is None else f"step {good} is the newest good one"
        click.echo(f"  good     {text}")
    elif not reports:
        click.echo(f"{name}  no checkpoints")


def _print_values(url: str, values: dict[CommitId, list[BadValues]]) -> None:
    name = url.rstrip("/").rpartition("/")[2]
    for commit, found in values.items():
        if not found:
            click.echo(f"{name} @ {commit.step}  every value is finite")
        for bad in found[:_AFFECTED_MAX]:
            at = f"first at {list(bad.values.first or ())}, rank {bad.rank}"
            click.echo(f"  values   {bad.key}: {bad.values.num_nan:,} NaN, {bad.values.num_inf:,} inf, {at}")
        if len(found) > _AFFECTED_MAX:
            click.echo(f"  values   and {_output.count(len(found) - _AFFECTED_MAX, 'more tensor')}")


def _summary(report: Report, read_data: bool) -> str:
    parts = [f"metadata, {_output.count(report.num_files, 'file')}, {_output.count(report.num_tensors, 'tensor')}"]
    if read_data:
        parts.append(f"{_output.size(report.bytes_read)} read, every digest fits")
    return "; ".join(parts)


def _print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        place = (
            "" if finding.start is None or finding.end is None else f" (bytes {finding.start:,}-{finding.end - 1:,})"
        )
        click.echo(f"  file     {finding.file}: {finding.what}{place}")
        if finding.affects:
            listed = [_affected(affected) for affected in finding.affects[:_AFFECTED_MAX]]
            more = len(finding.affects) - len(listed)
            click.echo(f"  affects  {', '.join(listed)}" + (f" and {more} more" if more else ""))
        if finding.ranks:
            click.echo(f"  ranks    {', '.join(map(str, finding.ranks))}")


def _affected(affected: Affected) -> str:
    if affected.rows is None:
        return affected.key
    first, last = affected.rows
    return f"{affected.key} row {first}" if first == last else f"{affected.key} rows {first}-{last}"


def _document(
    url: str,
    findings: list[Finding],
    reports: list[Report],
    values: dict[CommitId, list[BadValues]],
    part: tuple[int, int] | None,
    good: int | None,
) -> _documents.Verify:
    return _documents.Verify(
        url=url,
        is_ok=not findings and all(report.is_ok for report in reports),
        newest_good_step=good,
        part=part,
        findings=[_finding(finding) for finding in findings],
        checkpoints=[_checkpoint(report, values.get(report.commit)) for report in reports],
    )


def _checkpoint(report: Report, values: list[BadValues] | None) -> _documents.VerifyCheckpoint:
    return _documents.VerifyCheckpoint(
        step=report.commit.step,
        incarnation=report.commit.incarnation,
        is_ok=report.is_ok,
        is_loadable=report.is_loadable,
        num_files=report.num_files,
        num_tensors=report.num_tensors,
        bytes_read=report.bytes_read,
        findings=[_finding(finding) for finding in report.findings],
        non_finite=None if values is None else [_bad(bad) for bad in values],
    )


def _bad(bad: BadValues) -> _documents.BadTensor:
    values = bad.values
    return _documents.BadTensor(
        key=bad.key, rank=bad.rank, num_nan=values.num_nan, num_inf=values.num_inf, first=values.first
    )


def _finding(finding: Finding) -> _documents.Finding:
    return _documents.Finding(
        file=finding.file,
        what=finding.what,
        start=finding.start,
        end=finding.end,
        affects=[_documents.Affected(key=affected.key, rows=affected.rows) for affected in finding.affects],
        ranks=list(finding.ranks),
        is_fatal=finding.is_fatal,
    )
