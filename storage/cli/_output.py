"""How verbs print: data on stdout, all else on stderr, and escape codes only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import islice

import click
import msgspec

from ckptrt.errors import Error

__all__ = [
    "age", "count", "print_json", "print_table", "progress", "show_error", "show_usage_error", "size", "warn",
]  # fmt: skip

SCHEMA = 1
_JSON_BATCH = 1000
_STEPS = (("d", 86400), ("h", 3600), ("m", 60))


def print_json(document: dict[str, object], lists: Mapping[str, Iterable[object]] | None = None) -> None:
    """One JSON document with its schema's version. `lists` are further fields, written item by item, a line each."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=2)
    if not lists:
        click.echo(text)
        return
    out = sys.stdout
    out.write(text.removesuffix("\n}"))
    for name, items in lists.items():
        out.write(f',\n  "{name}": [')
        separator = "\n    "
        rest = iter(items)
        while batch := list(islice(rest, _JSON_BATCH)):
            out.write(separator + ",\n    ".join(msgspec.json.encode(item).decode() for item in batch))
            separator = ",\n    "
        out.write("]" if separator == "\n    " else "\n  ]")
    out.write("\n}\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """An aligned table; `right` are the columns aligned to the right. Columns without any text are left out."""
    shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
    if sys.stdout.isatty():
        _print_rich(header, rows, right, shown)
        return
    widths = {i: max(len(header[i]), *(len(row[i]) for row in rows)) for i in shown}
    line = "  ".join(f"{{{i}:{'>' if i in right else '<'}{widths[i]}}}" for i in shown)
    click.echo("\n".join(line.format(*row).rstrip() for row in (header, *rows)))


def _print_rich(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], shown: Sequence[int]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i in shown:
        table.add_column(header[i], justify="right" if i in right else "left", overflow="fold", no_wrap=i in right)
    for row in rows:
        table.add_row(*(Text(row[i], style=_style(row[i])) for i in shown))
    Console(highlight=False).print(table)


def _style(text: str) -> str:
    return {"damaged": "red", "too-new": "red", "off-path": "dim", "ok": "green", "DAMAGED": "bold red"}.get(text, "")


def warn(text: str) -> None:
    """A line on stderr about something that isn't as it should be but doesn't stop the verb."""
    click.echo(f"warn       {text}", err=True)


def show_error(error: Error, as_json: bool) -> None:
    """What happened, what is safe and what to do, on stderr."""
    if as_json:
        fields = {"code": error.code, "exit": error.exit_code, "message": error.what}
        fields.update({key: text for key, text in (("safe", error.safe), ("hint", error.hint)) if text})
        _show_exit(fields)
        return
    click.echo(f"error[{error.code}]: {error.what}", err=True)
    for word, text in (("safe", error.safe), ("do", error.hint)):
        if text:
            click.echo(f"  {word:8}  {text}", err=True)


def show_usage_error(message: str) -> None:
    """The JSON form of a wrong command line."""
    _show_exit({"code": "usage", "exit": 2, "message": message})


def _show_exit(fields: dict[str, object]) -> None:
    click.echo(json.dumps({"type": "exit_error", "schema": SCHEMA, **fields}), err=True)


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr if that is a terminal, else nothing. Yields what to call with bytes done, from any thread."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done: bar.advance(task, done)


def size(size_bytes: int) -> str:
    """Bytes for people: 1.2 MiB."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def age(created_at: str) -> str:
    """How long ago a record says that it was written: 4s, 5m, 3h, 2d."""
    try:
        created = datetime.strptime(created_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return "?"
    seconds = max(0, int((datetime.now(timezone.utc) - created).total_seconds()))
    for unit, length in _STEPS:
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def count(number: int, what: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
