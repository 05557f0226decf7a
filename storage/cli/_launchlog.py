"""What `ckptrt-launch` noted in its log directory, as events of a run: failures, restarts, recoveries, ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptrt.errors import Error, NotFoundError
from ckptrt.storage.cli._documents import Event
from ckptrt.storage.cli._output import count
from ckptrt.storage.tiers import open_tier

__all__ = ["launch_events"]

_WORDS = {"respawned": "recovery", "give_up": "done", "etcd": "note"}  # others are their own first words
_TOLD_BY_FENCES = ("opened", "started")


def launch_events(folder: str, url: str) -> list[Event]:
    """Of all launches whose events.jsonl lies in a folder or right below it, those that had to do with a run.

    url: of the run's tier. NotFoundError if there is no such file at all. Lines that can't be read are left out: the
    last one of a launch that was killed may be cut off.
    """
    paths = sorted((*Path(folder).glob("events.jsonl"), *Path(folder).glob("*/events.jsonl")))
    if not paths:
        raise NotFoundError(
            f"there is no events.jsonl in {folder}", hint="name the directory that ckptrt-launch had as --log-dir"
        )
    found: list[Event] = []
    for path in paths:
        records = list(_records(path))
        if any(record["event"] == "opened" and _is_of(str(record.get("url", "")), url) for record in records):
            found += [_event(record) for record in records if record["event"] not in _TOLD_BY_FENCES]
    return found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"event", "wall"} <= record.keys():
            yield record


def _is_of(named: str, url: str) -> bool:
    try:
        return bool(named) and open_tier(named).url == url
    except Error:
        return False


def _event(record: dict[str, Any]) -> Event:
    kind = str(record["event"])
    return Event(
        at=str(record["wall"]),
        event=_WORDS.get(kind, kind),
        incarnation=record.get("incarnation"),
        step=record.get("step"),
        text=_text(kind, record),
    )


def _text(kind: str, record: dict[str, Any]) -> str:
    get = record.get
    if kind == "failure":
        step = f" after step {get('step')}" if get("step") is not None else ""
        why = get("note") or get("error") or "killed from outside, or silent"
        return f"rank {get('rank')} (pid {get('pid')}), exit {get('code')}{step}: {why}"
    if kind == "restart":
        return f"number {get('number')}, {get('left')} left"
    if kind in ("recovery", "respawned"):
        parts = " + ".join(f"{name} {float(value):.2f}" for name, value in dict(get("parts") or {}).items())
        return f"{float(get('total_s') or 0):.2f} s = {parts}"
    if kind == "done":
        return f"exit {get('exit_code')} after {count(int(get('restarts') or 0), 'restart')}"
    if kind == "give_up":
        return f"failed: {get('why')}"
    return str(get("what") or get("text") or get("signal") or "")
