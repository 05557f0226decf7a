"""`ckptrt unpin`: let a pinned checkpoint be pruned again."""

from __future__ import annotations

import click

from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.cli.pin import pinnable, report
from ckptrt.storage.pins import pinned_ids, unpin

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  ckptrt unpin runs/gpt@1200
"""


@click.command("unpin", epilog=_EXAMPLES)
@click.argument("what", metavar="[URL@]STEP", shell_complete=complete_place)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be unpinned and change nothing.")
@common_options
@pass_settings
def command(settings: Settings, what: str, dry_run: bool) -> None:
    """Take a checkpoint's pin away. Nothing is removed; the rules of the next prune hold for it again."""
    catalog, commit = pinnable(settings, what)
    was_pinned = commit in pinned_ids(catalog) if dry_run else unpin(catalog, commit)
    report(catalog, commit, "unpinned", was_pinned, dry_run)
