"""`ckptrt prune`: remove checkpoints that are no longer wanted."""

from __future__ import annotations

import re
import sys
import time
from typing import Literal

import click

from ckptrt.errors import UsageError
from ckptrt.storage.catalog import CommitId, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Duration, ParamType, Settings, common_options, complete_place, pass_settings
from ckptrt.storage.prune import GRACE_S, PrunePlan, PrunePolicy, PruneResult, Removal, execute, plan_prune
from ckptrt.storage.retention import Keep
from ckptrt.storage.verify import DataExaminer

__all__ = ["command"]

_PARTIAL = 3

_EXAMPLES = """\b
Examples:
  ckptrt prune runs/gpt --keep-last 3 --dry-run
  ckptrt prune runs/gpt --keep-last 3 --keep-best 2:loss --yes
  ckptrt prune s3://bucket/runs/gpt --keep-last 3 --yes
"""


class _Best(ParamType[tuple[int, str, Literal["min", "max"]]]):
    """How many of the best stay, and by which metric: 2:loss, or 3:accuracy:max."""

    name = "best"
    _FORM = re.compile(r"([1-9][0-9]*):([^:]+?)(?::(min|max))?")

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str, Literal["min", "max"]]:
        match = self._FORM.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} isn't of the form 2:loss or 3:accuracy:max", param, ctx)
        return int(match[1]), match[2], "max" if match[3] == "max" else "min"


@click.command("prune", epilog=_EXAMPLES)
@click.argument("path", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@click.option("--keep-last", type=click.IntRange(min=1), help="How many good checkpoints stay.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="STEPS", help="One in so many steps stays.")
@click.option("--keep-within", type=Duration(), help="Those younger than this stay, such as 24h.")
@click.option(
    "--keep-best", type=_Best(), metavar="K:METRIC[:max]", help="The K with the smallest (or largest) metric stay."
)
@click.option(
    "--grace", type=Duration(), default=GRACE_S, show_default="1h",
    help="Data younger than this stay until a later prune; 0 frees them at once.",
)  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="Say what would go and change nothing.")
@click.option("--trust", is_flag=True, help="Don't read the newest checkpoint's data before older ones may go.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@common_options
@pass_settings
@click.pass_context
def command(
    ctx: click.Context,
    settings: Settings,
    path: str | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_within: float | None,
    keep_best: tuple[int, str, Literal["min", "max"]] | None,
    grace: float,
    dry_run: bool,
    trust: bool,
    yes: bool,
) -> None:
    """Remove old checkpoints, branches that were cut off, and data that were never committed.

    The newest good checkpoint always stays: before any goes, the newest is read whole, and if it is damaged the next
    older one, until one proves to be good. Damaged ones among the newest don't count and stay too.
    """
    if not (keep_last or keep_every or keep_within or keep_best):
        raise click.UsageError(
            "what is to stay? Give --keep-last, --keep-every, --keep-within or --keep-best; nothing was removed"
        )
    url = settings.url(path)
    catalog = open_catalog(url)
    best, metric, mode = keep_best or (None, "loss", "min")
    keep = Keep(last=keep_last or 1, every=keep_every, within_s=keep_within, best=best, metric=metric, mode=mode)
    policy = PrunePolicy(keep=keep, grace_s=grace, removed_grace_s=grace)
    now_s = time.time()
    plan = plan_prune(catalog, policy, now_s)
    if plan.commits and not trust:
        plan = plan_prune(catalog, policy, now_s, DataExaminer(catalog))
    if settings.is_for_people:
        _print_plan(plan)
    result = None
    if not dry_run and not plan.is_empty:
        if not yes and not _confirmed(plan):
            click.echo("nothing was removed", err=True)
            ctx.exit(1)
        result = execute(catalog, plan)
    _output.emit(
        _document(url, plan, result), lambda: _print_result(plan, result, dry_run), result.deleted if result else ()
    )
    if result is not None and result.errors:
        for error in result.errors:
            _output.show_error(error, settings)
        ctx.exit(_PARTIAL)


def _confirmed(plan: PrunePlan) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "prune won't remove anything without being asked to",
            safe="everything; nothing was removed",
            hint="add --yes, or --dry-run to see what would go",
        )
    return click.confirm(f"Remove {_total(plan)} and free {_output.size(plan.freed_bytes)}?", err=True)


def _print_result(plan: PrunePlan, result: PruneResult | None, dry_run: bool) -> None:
    if result is not None:
        total = len(plan.commits) + len(plan.folders) + len(plan.pins) + len(plan.unfinished)
        done = _total(plan) if len(result.deleted) == total else f"{len(result.deleted)} of {total} things"
        click.echo(f"removed    {done}, {_output.size(result.freed_bytes)} freed")
    elif dry_run:
        click.echo("dry run    nothing was removed")


def _total(plan: PrunePlan) -> str:
    commits, folders = len(plan.commits), len(plan.folders)
    unfinished = f" and {_output.count(len(plan.unfinished), 'unfinished file')}" if plan.unfinished else ""
    pins = f" and {_output.count(len(plan.pins), 'pin')}" if plan.pins else ""
    return f"{_output.count(commits, 'commit')} and {_output.count(folders, 'data folder')}{pins}{unfinished}"


def _print_plan(plan: PrunePlan) -> None:
    rows = [("keep", str(kept.id.step), str(kept.id.incarnation), "", kept.reason) for kept in plan.kept]
    for word, removals in (("remove", (*plan.commits, *plan.folders, *plan.pins)), ("later", plan.waiting)):
        by_commit: dict[CommitId, list[Removal]] = {}
        for removal in removals:
            by_commit.setdefault(removal.id, []).append(removal)
        for commit, parts in by_commit.items():
            size = _output.size(sum(part.size_bytes for part in parts))
            rows.append((word, str(commit.step), str(commit.incarnation), size, parts[0].reason))
    if rows:
        _output.print_table(("DO", "STEP", "INCARNATION", "SIZE", "WHY"), rows, right=(1, 2, 3))
    if plan.unfinished:
        left = _output.size(sum(entry.size_bytes for entry in plan.unfinished))
        click.echo(f"remove     {_output.count(len(plan.unfinished), 'unfinished file')} of interrupted writes, {left}")
    click.echo(f"rule       {plan.rule}")
    click.echo(f"frees      {_output.size(plan.freed_bytes)}")
    if plan.waiting:
        waiting = _output.size(sum(removal.size_bytes for removal in plan.waiting))
        click.echo(f"later      {waiting} younger than the grace time; --grace 0 frees them at once")


def _document(url: str, plan: PrunePlan, result: PruneResult | None) -> _documents.Prune:
    return _documents.Prune(
        url=url,
        rule=plan.rule,
        kept=[_documents.Kept(step=k.id.step, incarnation=k.id.incarnation, reason=k.reason) for k in plan.kept],
        commits=[_removal(removal) for removal in plan.commits],
        folders=[_removal(removal) for removal in plan.folders],
        waiting=[_removal(removal) for removal in plan.waiting],
        pins=[_removal(removal) for removal in plan.pins],
        unfinished=[_documents.Unfinished(name=e.name, size_bytes=e.size_bytes) for e in plan.unfinished],
        freed_bytes=plan.freed_bytes if result is None else result.freed_bytes,
        deleted=None if result is None else result.deleted,
        errors=[] if result is None else [error.what for error in result.errors],
    )


def _removal(removal: Removal) -> _documents.Removal:
    return _documents.Removal(
        name=removal.name,
        step=removal.id.step,
        incarnation=removal.id.incarnation,
        reason=removal.reason,
        size_bytes=removal.size_bytes,
    )
