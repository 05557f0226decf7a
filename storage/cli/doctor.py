"""`ckptrt doctor`: is a place, and this machine, fit for a run?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import click

from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.doctor import Place
from ckptrt.storage.machine import Check, check_etcd, check_machine

__all__ = ["command"]

_FAILED = 1

_EXAMPLES = """\b
Examples:
  ckptrt doctor runs/gpt
  ckptrt doctor s3://bucket/runs/gpt --write-test
  ckptrt doctor runs/gpt --etcd node0:2379 --json
"""


@click.command("doctor", epilog=_EXAMPLES)
@click.argument("path", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@click.option("--write-test", is_flag=True, help="Also write a few small objects there, and remove them.")
@click.option("--etcd", metavar="HOST:PORT", help="Also ask this etcd whether it is well.")
@common_options
@pass_settings
@click.pass_context
def command(ctx: click.Context, settings: Settings, path: str | None, write_test: bool, etcd: str | None) -> None:
    """Check a place and this machine before a run: is the store there and keeps its promises, is there room, what did
    earlier jobs leave, are limits and versions right.

    Nothing is changed, but for --write-test. Exit code 1 if something would keep a run from working.
    """
    url = settings.url(path)
    found = _all(Place(url, time.time()), write_test, etcd)
    checks = list(_told(found) if settings.is_for_people else found)
    failed = [check for check in checks if check.result == "fail"]
    parts = [_documents.Check(name=c.name, result=c.result, what=c.what, do=c.do) for c in checks]
    document = _documents.Doctor(url=url, is_ok=not failed, checks=parts)
    _output.emit(document, lambda: _sum_up(checks), (check.name for check in failed))
    if failed:
        ctx.exit(_FAILED)


def _all(place: Place, write_test: bool, etcd: str | None) -> Iterator[Check]:
    yield from place.checks(write_test)
    newest = place.newest
    yield from check_machine(newest.size_bytes // newest.world_size if newest else None)
    if etcd:
        yield check_etcd(etcd)


def _told(checks: Iterable[Check]) -> Iterator[Check]:
    """The same, each printed as soon as it is known: some take a while."""
    for check in checks:
        mark = click.style(f"{check.result:4}", fg=_COLORS.get(check.result))
        click.echo(f"{mark}  {check.name:13}  {check.what}", color=_output.wants_color())
        if check.do:
            click.echo(f"      {'':13}  do: {check.do}")
        yield check


_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


def _sum_up(checks: list[Check]) -> None:
    numbers = {word: sum(check.result == word for check in checks) for word in ("fail", "warn")}
    failed, warned = _output.count(numbers["fail"], "failure"), _output.count(numbers["warn"], "warning")
    click.echo("all is well" if not any(numbers.values()) else f"{failed}, {warned}")
