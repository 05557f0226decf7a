"""`ckptrt cp`: copy checkpoints to another place."""

from __future__ import annotations

import click

from ckptrt.errors import NotFoundError, UsageError
from ckptrt.storage.catalog import Catalog, CommitId, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.copy import CopyPlan, copy, plan_copy
from ckptrt.storage.runlock import hold_run
from ckptrt.storage.tiers import open_tier

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  ckptrt cp runs/gpt@1200 s3://bucket/runs/gpt
  ckptrt cp runs/gpt /backup/gpt --all --dry-run
"""


@click.command("cp", epilog=_EXAMPLES)
@click.argument("source", metavar="URL[@STEP]", shell_complete=complete_place)
@click.argument("target", metavar="DIR|URL", shell_complete=complete_place)
@click.option("--all", "everything", is_flag=True, help="Every checkpoint of the path instead of the newest good one.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be copied and change nothing.")
@common_options
@pass_settings
def command(settings: Settings, source: str, target: str, everything: bool, dry_run: bool) -> None:
    """Copy a checkpoint (the newest good one unless a step is named) to another directory or store.

    The copy is a replica: same names, same bytes, same history, so that training can go on from it. Every byte is
    compared with its digest on the way, and the commit is written last. A copy that was stopped goes on where it was.
    """
    where = settings.target(source)
    catalog = open_catalog(where.url)
    if everything and where.step is not None:
        raise UsageError("--all and a step were both given", hint="leave one of them out")
    commits = list(catalog.path().commits) if everything else [_one(catalog, where.step)]
    tier = open_tier(target)
    plan = plan_copy(catalog, tier, commits)
    if not dry_run:
        # A job that runs there would be cut off by the fences; none may begin meanwhile.
        with hold_run(target), _output.progress("copying", plan.size_bytes) as advance:
            copy(catalog, tier, plan, advance)
    document = _documents.Cp(
        source=where.url,
        target=target,
        copied=[_ref(commit) for commit in plan.commits],
        already_there=[_ref(commit) for commit in plan.there],
        num_files=plan.num_files,
        size_bytes=plan.size_bytes,
        dry_run=dry_run,
    )
    _output.emit(document, lambda: _print(target, plan, dry_run), (commit.step for commit in plan.commits))


def _one(catalog: Catalog, step: int | None) -> CommitId:
    if step is not None:
        return catalog.find(step)
    newest = catalog.newest_good().commit
    if newest is None:
        raise NotFoundError(
            f"{catalog.tier.url} has no checkpoint that is whole", hint="`ckptrt ls` shows what there is"
        )
    return newest.id


def _ref(commit: CommitId) -> _documents.CommitRef:
    return _documents.CommitRef(step=commit.step, incarnation=commit.incarnation)


def _print(target: str, plan: CopyPlan, dry_run: bool) -> None:
    if plan.commits:
        steps = ", ".join(str(commit.step) for commit in plan.commits)
        files = _output.count(plan.num_files, "file")
        click.echo(f"copied     step {steps} to {target}: {files}, {_output.size(plan.size_bytes)}")
    if plan.there:
        click.echo(f"there      step {', '.join(str(commit.step) for commit in plan.there)} already")
    if dry_run:
        click.echo("dry run    nothing was copied")
