"""`ckptrt pin`: keep a checkpoint from being pruned."""

from __future__ import annotations

from typing import Literal

import click

from ckptrt.errors import NotFoundError, UsageError
from ckptrt.storage.catalog import Catalog, CommitId, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.pins import pin, pinned_ids

__all__ = ["command", "pinnable", "report"]

_EXAMPLES = """\b
Examples:
  ckptrt pin runs/gpt@1200 --reason "before the new data"
  ckptrt -C s3://bucket/runs/gpt pin latest
"""


@click.command("pin", epilog=_EXAMPLES)
@click.argument("what", metavar="[URL@]STEP", shell_complete=complete_place)
@click.option("--reason", default="", help="A note for whoever finds the pin.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be pinned and change nothing.")
@common_options
@pass_settings
def command(settings: Settings, what: str, reason: str, dry_run: bool) -> None:
    """Keep a checkpoint until it is unpinned: neither a running job nor `ckptrt prune` removes it.

    What it shares with others stays too. Pinning what is pinned changes nothing.
    """
    catalog, commit = pinnable(settings, what)
    is_new = commit not in pinned_ids(catalog) if dry_run else pin(catalog, commit, reason)
    report(catalog, commit, "pinned", is_new, dry_run)


def pinnable(settings: Settings, what: str) -> tuple[Catalog, CommitId]:
    """The run and the commit that were named."""
    target = settings.target(what)
    catalog = open_catalog(target.url)
    if target.step is not None:
        return catalog, catalog.find(target.step)
    if not target.is_latest:
        raise UsageError(f"no checkpoint of {target.url} was named", hint="name one, such as 1200 or latest")
    newest = catalog.newest_good().commit
    if newest is None:
        raise NotFoundError(f"{target.url} has no good checkpoint", hint="`ckptrt ls` shows what is there")
    return catalog, newest.id


def report(
    catalog: Catalog, commit: CommitId, done: Literal["pinned", "unpinned"], changed: bool, dry_run: bool
) -> None:
    """Say what became of a commit's pin."""
    document = _documents.Pin(
        url=catalog.tier.url,
        step=commit.step,
        incarnation=commit.incarnation,
        state=done,
        changed=changed and not dry_run,
        dry_run=dry_run,
    )

    def show() -> None:
        already = "" if changed else " already"
        click.echo(f"{done:10} step {commit.step} of {catalog.tier.url}{already}")
        if dry_run:
            click.echo("dry run    nothing was changed")

    _output.emit(document, show, [commit.step] if document.changed else [])
