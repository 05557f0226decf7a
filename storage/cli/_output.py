"""How verbs print: data on stdout, all else on stderr, and escape codes only on a terminal."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import islice
from typing import Any

import click
import msgspec

from ckptrt import env
from ckptrt.errors import Error
from ckptrt.storage.cli._documents import SCHEMA, Document
from ckptrt.storage.cli._settings import Settings, current
from ckptrt.storage.units import size_text as size

__all__ = [
    "age", "age_s", "count", "emit", "log_to_stderr", "print_table", "progress", "show_bug", "show_error",
    "show_usage_error", "size",
    "wants_color", "warn",
]  # fmt: skip

_JSON_BATCH = 1000
_STEPS = (("d", 86400), ("h", 3600), ("m", 60))
_LINE_EVERY_S = 30.0
_LINE_AT_MOST_S = 5.0
_Lists = Mapping[str, Iterable[object]]


def emit(
    document: Document, show: Callable[[], None], names: Iterable[object] = (), lists: _Lists | None = None
) -> None:
    """Print what a verb found, in the form that was asked for.

    document: for JSON. show: prints it for people. names: all that is left of it in quiet, a line each. lists: fields
    of the document that may be too long to be held in memory, printed item by item; the document leaves them unset.
    """
    settings = current()
    if settings.format == "json":
        _print_json(document, lists or {})
    elif settings.format == "jsonl":
        _print_lines(document, lists or {})
    elif settings.format == "quiet":
        for name in names:
            click.echo(str(name))
    else:
        show()


def _print_json(document: Document, lists: _Lists) -> None:
    """One JSON document with its schema's version."""
    out = sys.stdout
    out.write(msgspec.json.format(msgspec.json.encode(_fields(document)), indent=2).decode().removesuffix("\n}"))
    for name, items in lists.items():
        out.write(f',\n  "{name}": [')
        separator = "\n    "
        rest = iter(items)
        while batch := list(islice(rest, _JSON_BATCH)):
            out.write(separator + ",\n    ".join(msgspec.json.encode(item).decode() for item in batch))
            separator = ",\n    "
        out.write("]" if separator == "\n    " else "\n  ]")
    out.write("\n}\n")


def _fields(document: Document) -> dict[str, Any]:
    """The version first, so that a reader knows what follows."""
    fields = msgspec.to_builtins(document)
    return {"schema": fields.pop("schema"), **fields}


def _print_lines(document: Document, lists: _Lists) -> None:
    """The same as lines: first all that is no list, then each list's items, each with its list's name as `type`."""
    fields = _fields(document)
    inner = {name: fields.pop(name) for name, value in list(fields.items()) if isinstance(value, list)}
    _print_line({"type": "head", **fields})
    for name, items in (*inner.items(), *lists.items()):
        for item in items:
            fields = msgspec.to_builtins(item)
            _print_line({"type": name, **(fields if isinstance(fields, dict) else {"value": fields})})


def _print_line(fields: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")


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
    Console(highlight=False, no_color=current().no_color or None).print(table)


def _style(text: str) -> str:
    return {"damaged": "red", "too-new": "red", "off-path": "dim", "ok": "green", "DAMAGED": "bold red"}.get(text, "")


def wants_color() -> bool | None:
    """For click.echo: None lets it look whether stdout is a terminal."""
    return False if current().no_color or env.no_color() else None


def warn(text: str) -> None:
    """A line on stderr about something that isn't as it should be but doesn't stop the verb."""
    click.echo(f"warn       {text}", err=True)


class _WarnHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            click.echo(f"debug      {record.name}: {record.getMessage()}", err=True)


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Print what the library logs as the verbs print theirs: warnings, and with -v all of it."""
    logger, retries = logging.getLogger("ckptrt"), logging.getLogger("stamina")
    handler, silent, level = _WarnHandler(), logging.NullHandler(), logger.level
    logger.addHandler(handler)
    retries.addHandler(silent)  # the tiers tell of retries themselves
    try:
        yield
    finally:
        logger.removeHandler(handler)
        retries.removeHandler(silent)
        logger.setLevel(level)


def show_error(error: Error, settings: Settings) -> None:
    """What happened, what is safe and what to do, on stderr."""
    if settings.is_json:
        fields = {"code": error.code, "exit": error.exit_code, "message": error.what}
        fields.update({key: text for key, text in (("safe", error.safe), ("hint", error.hint)) if text})
        _show_exit(fields)
    else:
        click.echo(f"error[{error.code}]: {error.what}", err=True)
        for word, text in (("safe", error.safe), ("do", error.hint)):
            if text:
                click.echo(f"  {word:8}  {text}", err=True)
    if settings.verbose:
        traceback.print_exception(error)


def show_usage_error(message: str) -> None:
    """The JSON form of a wrong command line."""
    _show_exit({"code": "usage", "exit": 2, "message": message})


def show_bug(error: Exception, settings: Settings) -> None:
    """An exception that nobody foresaw, as one line with what to do about it."""
    what = f"{type(error).__name__}: {error}".replace("\n", " ")
    hint = "this is a bug in ckptrt; please report it with what `-v` shows"
    quiet = Settings(format=settings.format)
    show_error(Error(what, hint="" if settings.verbose else hint), quiet)
    if settings.verbose:
        traceback.print_exception(error)


def _show_exit(fields: dict[str, object]) -> None:
    click.echo(json.dumps({"type": "exit_error", "schema": SCHEMA, **fields}), err=True)


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Tell on stderr how far something is, as --progress says. Yields what to call with bytes done, from any thread."""
    settings = current()
    kind = settings.progress or "auto"
    is_pace_free = kind != "auto"
    if kind == "auto":
        kind = "none" if not settings.is_for_people else "bar" if sys.stderr.isatty() else "line"
    if kind == "bar":
        with _bar(label, total_bytes) as advance:
            yield advance
    elif kind == "none":
        yield lambda _: None
    else:
        yield _Lines(label, total_bytes, as_json=kind == "json", at_most_s=0 if is_pace_free else _LINE_AT_MOST_S).add


@contextmanager
def _bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    console = Console(stderr=True, no_color=current().no_color or None)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done: bar.advance(task, done)


class _Lines:
    """A line at each tenth (not more often than `at_most_s`), and at least every half minute while there is news."""

    def __init__(self, label: str, total_bytes: int, *, as_json: bool, at_most_s: float) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._as_json = as_json
        self._at_most_s = at_most_s
        self._done_bytes = 0
        self._tenth = 0
        self._begun_s = self._told_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            tenth = 10 * self._done_bytes // max(1, self._total_bytes)
            since_s = time.monotonic() - self._told_s
            if (tenth > self._tenth and since_s >= self._at_most_s) or since_s >= _LINE_EVERY_S:
                self._tenth = tenth
                self._told_s += since_s
                self._tell()

    def _tell(self) -> None:
        total, elapsed_s = self._total_bytes, self._told_s - self._begun_s
        done = min(self._done_bytes, total)  # a reader of whole files reads a little more than what was asked for
        if self._as_json:
            fields = {"type": "progress", "schema": SCHEMA, "label": self._label, "done_bytes": done}
            click.echo(json.dumps({**fields, "total_bytes": total, "elapsed_s": round(elapsed_s, 3)}), err=True)
            return
        speed = f", {size(int(done / elapsed_s))}/s" if elapsed_s >= 1 else ""
        click.echo(
            f"progress   {self._label} {size(done)} of {size(total)} ({100 * done // max(1, total)} %{speed})", err=True
        )


def age(created_at: str) -> str:
    """How long ago a record says that it was written: 4s, 5m, 3h, 2d."""
    seconds = age_s(created_at)
    if seconds is None:
        return "?"
    for unit, length in _STEPS:
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def age_s(created_at: str) -> int | None:
    """The same in seconds; None if the time can't be read. A writer whose clock is ahead wrote just now."""
    try:
        created = datetime.strptime(created_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return max(0, int((datetime.now(timezone.utc) - created).total_seconds()))


def count(number: int, what: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
