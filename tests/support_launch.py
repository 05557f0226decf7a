"""Real launches for tests: start `ckptrt-launch`, follow its steps and events, kill what it started, clean up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Launch", "alive", "descendants", "eventually"]

T = TypeVar("T")
DEADLINE_S = 60.0


def eventually(condition: Callable[[], T], what: str, timeout_s: float = DEADLINE_S) -> T:
    """The condition's value as soon as it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    return _stat(pid) not in ("", "Z")


def _stat(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def descendants(pid: int) -> set[int]:
    """All processes below this one, without it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


class Launch:
    """One run of `ckptrt-launch` in a folder of its own; `script` is the text of train.py there.

    prefix: a command that runs another in its own place, such as `ip netns exec`.
    """

    def __init__(
        self,
        folder: Path,
        args: Sequence[str],
        *,
        script: str = "",
        environ: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if script:
            (folder / "train.py").write_text(script)
        base = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTRT_", "PET_", "TORCHELASTIC_"))}
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "ckptrt.agents.launch", *args],
                cwd=folder,
                env={**base, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What the launcher noted, oldest first."""
        events = []
        for path in self.folder.glob("ckptrt-logs/*/events.jsonl"):
            lines = path.read_text().split("\n")[:-1]  # the last one may be half written
            events += [json.loads(line) for line in lines]
        return [event for event in events if not name or event["event"] == name]

    def event(self, name: str, number: int) -> dict[str, Any]:
        """The number-th event of that name, waited for."""
        eventually(lambda: len(self.events(name)) > number or self.process.poll() is not None, f"event {name} {number}")
        events = self.events(name)
        assert len(events) > number, f"no event {name} {number}\n{self.err}"
        return events[number]

    def pids(self, restarts: int) -> list[int]:
        """The workers' pids after so many restarts, by rank."""
        pids: list[int] = self.event("started", restarts)["pids"]
        return pids

    def says(self, text: str) -> str:
        """Wait until the launcher has written that; all it wrote."""
        eventually(lambda: text in self.err or self.process.poll() is not None, f"{text!r} in\n{self.err}")
        assert text in self.err, f"{text!r} is not in\n{self.err}"
        return self.err

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End what is left of it."""
        if self.process.poll() is None:
            below = descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
