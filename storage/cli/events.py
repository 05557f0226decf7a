"""`ckptrt events`: the story of a run, told by what is stored."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import click

from ckptrt.clock import SystemClock
from ckptrt.storage.catalog import Catalog, CommitInfo, open_catalog
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._documents import Event
from ckptrt.storage.cli._launchlog import launch_events
from ckptrt.storage.cli._settings import Duration, Settings, common_options, complete_place, pass_settings
from ckptrt.storage.pins import pins
from ckptrt.storage.records import FenceRecord, PinRecord

__all__ = ["command"]

# Of what happened within one second.
_ORDER = {"restart": 1, "start": 2, "resume": 2, "recovery": 3, "pin": 4, "commit": 5, "done": 6}

_EXAMPLES = """\b
Examples:
  ckptrt events runs/gpt
  ckptrt events runs/gpt --logs ckptrt-logs
  ckptrt -C s3://bucket/runs/gpt events --since 1h --json
"""

_Event = dict[str, object]
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@click.command("events", epilog=_EXAMPLES)
@click.argument("path", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@click.option("--since", type=Duration(), help="Only what is younger than this, such as 1h.")
@click.option("--logs", metavar="DIR", help="Also what ckptrt-launch noted in this log directory of its.")
@common_options
@pass_settings
def command(settings: Settings, path: str | None, since: float | None, logs: str | None) -> None:
    """Tell what happened to a run, oldest first: starts, resumes, commits, pins, and what is damaged.

    All of it comes from the run's own records, so it works without a running job; --logs adds failures, restarts and
    recoveries. Times are the writers' own clocks; what can't be read has none and comes last.
    """
    url = settings.url(path)
    catalog = open_catalog(url)
    launched = launch_events(logs, catalog.tier.url) if logs else []
    if logs and not launched:
        _output.warn(f"no launch that wrote to {logs} opened this run")
    found = _events(catalog, launched)
    if since is not None:
        # As text: the records' times all have one form, and sort as they follow one another.
        now = datetime.strptime(SystemClock().wall_iso(), _TIME).replace(tzinfo=timezone.utc)
        after = (now - timedelta(seconds=since)).strftime(_TIME)
        found = [event for event in found if event.at is None or event.at >= after]
    _output.emit(_documents.Events(url=url, events=found), lambda: _print(url, found))


def _print(url: str, found: list[Event]) -> None:
    for event in found:
        click.echo(f"{event.at or '':20}  {event.event:8}  {event.text}")
    if not found:
        click.echo(f"nothing happened in {url}", err=True)


def _events(catalog: Catalog, launched: list[Event]) -> list[Event]:
    overview = catalog.overview()
    found = [_fence(fence) for fence in overview.fences.values()]
    found += [_commit(commit) for commit in overview.commits if commit.record is not None]
    found += [_pin(pin) for pin in pins(catalog).values() if pin is not None]
    found += launched
    found.sort(key=lambda event: (event.at, _ORDER.get(event.event, 0), event.incarnation or 0, event.step or 0))
    bad = [*overview.problems, *(commit.reason for commit in overview.commits if commit.record is None)]
    return found + [Event(at=None, event="warn", incarnation=None, step=None, text=text) for text in bad]


def _fence(fence: FenceRecord) -> Event:
    owner = fence.owner
    who = f"{_output.count(fence.world_size, 'rank')}, pid {owner.pid} of {owner.user or '?'} on {owner.host}"
    origin, word = "fresh", "start"
    if fence.parent is not None:
        origin, word = f"from step {fence.parent.step} of incarnation {fence.parent.incarnation}", "resume"
    return Event(
        at=fence.created_at,
        event=word,
        incarnation=fence.incarnation,
        step=fence.parent.step if fence.parent else 0,
        text=f"incarnation {fence.incarnation} {origin}; {who}",
    )


def _commit(commit: CommitInfo) -> Event:
    record = commit.record
    assert record is not None
    new = "" if record.new_bytes == record.size_bytes else f", {_output.size(record.new_bytes)} of it new"
    metrics = "".join(f", {name} {value:.6g}" for name, value in record.metrics.items())
    aside = "" if commit.state == "committed" else f"; {commit.state}: {commit.reason}"
    return Event(
        at=record.created_at,
        event="commit",
        incarnation=commit.incarnation,
        step=commit.step,
        text=f"step {commit.step}, {_output.size(record.size_bytes)}{new}{metrics}{aside}",
    )


def _pin(pin: PinRecord) -> Event:
    reason = f": {pin.reason}" if pin.reason else ""
    who = pin.owner.user or "?"
    return Event(
        at=pin.created_at,
        event="pin",
        incarnation=pin.incarnation,
        step=pin.step,
        text=f"step {pin.step} by {who} on {pin.owner.host}{reason}",
    )
