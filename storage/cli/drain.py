"""`ckptrt drain`: have a running job save its last step and end."""

from __future__ import annotations

import time

import click

from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.holder import ask_to_drain, find_launcher, is_alive

__all__ = ["command"]

_POLL_S = 0.1

_EXAMPLES = """\b
Examples:
  ckptrt drain runs/gpt
  ckptrt drain runs/gpt --wait && ckptrt ls runs/gpt
"""


@click.command("drain", epilog=_EXAMPLES)
@click.argument("path", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@click.option("--wait", is_flag=True, help="Return when the job has ended.")
@click.option("-n", "--dry-run", is_flag=True, help="Say who would be asked and ask nobody.")
@common_options
@pass_settings
def command(settings: Settings, path: str | None, wait: bool, dry_run: bool) -> None:
    """Ask the job on a run to finish its step, save it, and end with exit code 75.

    The job must have been started on this machine, with ckptrt-launch: it gets SIGUSR1.
    """
    catalog = open_catalog(settings.url(path))
    owner = find_launcher(catalog)
    if not dry_run:
        ask_to_drain(owner)
    while wait and not dry_run and is_alive(owner):
        time.sleep(_POLL_S)
    newest = catalog.newest_good().commit if wait and not dry_run else None
    document = _documents.Drain(
        url=catalog.tier.url,
        pid=owner.pid,
        ended=wait and not dry_run,
        step=newest.step if newest is not None else None,
        dry_run=dry_run,
    )

    def show() -> None:
        if dry_run:
            click.echo(f"dry run    pid {owner.pid} would be asked to drain {catalog.tier.url}")
        elif wait:
            step = f"the newest checkpoint is step {document.step}" if document.step is not None else "no checkpoint"
            click.echo(f"ended      pid {owner.pid}; {step}")
        else:
            click.echo(f"asked      pid {owner.pid} to drain {catalog.tier.url}")

    _output.emit(document, show, [owner.pid])
