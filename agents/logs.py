"""Where the ranks' output goes: files for all of them, and which of it is shown.

Without -r or -t every stream goes to <log-dir>/<run>/i<incarnation>/<local rank>/{stdout,stderr}.log and rank 0's are
shown as well. With them, and with --local-ranks-filter, it is as torchrun has it. A directory is never used twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckptrt.agents.console import Follow

__all__ = ["LogOptions", "SetLogs", "open_set_logs", "parse_streams"]

_OUT, _ERR = 1, 2  # as in torchrun's -r and -t
_TAIL_BYTES = 1 << 16
_LINE_MAX = 240
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """directory: of this run, or None for no files at all (--log-dir=/dev/null).

    redirects, tee: local rank -> mask of 1 (stdout) and 2 (stderr), None for what the user left to us.
    shown: local ranks that may be shown, None for what `tee` says. prefix: template of a tee'd line's start.
    """

    directory: str | None
    redirects: Mapping[int, int] | None
    tee: Mapping[int, int] | None
    shown: frozenset[int] | None
    role: str
    prefix: str | None
    filters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # --duplicate-stdout-filters and -stderr-


@dataclass(slots=True, kw_only=True)
class SetLogs:
    """The files of one set of workers. Close the streams once the workers have them."""

    directory: str | None
    streams: dict[int, tuple[int, int]] = field(default_factory=dict)  # local rank -> stdout, stderr
    files: dict[int, tuple[str, str]] = field(default_factory=dict)  # paths, empty where there is none
    follows: list[Follow] = field(default_factory=list)
    shown: set[int] = field(default_factory=set)  # whose stderr people have seen
    _opened: list[int] = field(default_factory=list)

    def error_file(self, local_rank: int) -> str:
        return os.path.join(self.directory, str(local_rank), "error.json") if self.directory else ""

    def stacks_file(self, local_rank: int) -> str:
        """Where a worker writes its stacks when it is asked to; empty if there is no directory."""
        return os.path.join(self.directory, str(local_rank), "stacks.txt") if self.directory else ""

    def close_streams(self) -> None:
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    def error(self, local_rank: int) -> tuple[str, float | None]:
        """The exception that ended a worker, as one line, and the monotonic time at which it noted it."""
        data: object = None
        with contextlib.suppress(OSError, ValueError), open(self.error_file(local_rank), encoding="utf-8") as file:
            data = json.load(file)
        message = data.get("message") if isinstance(data, dict) else None
        if isinstance(message, str):
            return _one_line(message), None
        if not isinstance(message, dict):
            return self._last_line(local_rank), None
        extra = message.get("extraInfo")
        at_s = extra.get("monotonic_s") if isinstance(extra, dict) else None
        return _one_line(str(message.get("message", ""))), at_s if isinstance(at_s, float) else None

    def tail(self, local_rank: int, num_lines: int) -> list[str]:
        """The last lines of a worker's stderr, without terminal colours."""
        path = self.files.get(local_rank, ("", ""))[1]
        if not path:
            return []
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = _ANSI.sub("", file.read().decode(errors="replace"))
            return [line.rsplit("\r", 1)[-1] for line in text.rstrip().splitlines()[-num_lines:]]
        return []

    def _last_line(self, local_rank: int) -> str:
        lines = [line for line in self.tail(local_rank, 20) if line.strip()]
        return _one_line(lines[-1]) if lines else ""

    def _open(self, path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._opened.append(fd)
        return fd


def _one_line(text: str) -> str:
    """The first line of a message; what follows is in the log."""
    text = " ".join(text.strip().partition("\n")[0].split())
    return text if len(text) <= _LINE_MAX else text[: _LINE_MAX - 1] + "…"


def parse_streams(text: str, num_workers: int) -> dict[int, int]:
    """torchrun's "3" or "0:3,1:2" as a mask for each local rank. ValueError for anything else."""
    if re.fullmatch(r"[0123]", text):
        return dict.fromkeys(range(num_workers), int(text))
    if not re.fullmatch(r"(\d+:[0123],)*\d+:[0123]", text):
        raise ValueError(f"{text!r} is neither 0, 1, 2 or 3 nor a list such as 0:3,1:2")
    given = {int(rank): int(mask) for rank, mask in (item.split(":") for item in text.split(","))}
    return {rank: given.get(rank, 0) for rank in range(num_workers)}


def open_set_logs(options: LogOptions, incarnation: int, num_workers: int) -> SetLogs:
    """Make the directory and files of one set of workers."""
    logs = SetLogs(directory=_new_directory(options.directory, incarnation) if options.directory else None)
    defaults = options.redirects is None and options.tee is None
    sinks = _filter_sinks(options, logs)
    for rank in range(num_workers):
        tee = (options.tee or {}).get(rank, 0)
        to_file = _OUT | _ERR if defaults else (options.redirects or {}).get(rank, 0) | tee
        may_show = options.shown is None or rank in options.shown
        if defaults:
            to_show = _OUT | _ERR if may_show and (rank == 0 or options.shown is not None) else 0
        else:
            to_show = (tee | (_OUT | _ERR) & ~to_file) if may_show else 0
        prefix = b"" if defaults else _prefix(options, rank)
        _open_rank(logs, rank, to_file, to_show, prefix, sinks if tee else {})
    return logs


def _open_rank(
    logs: SetLogs,
    rank: int,
    to_file: int,
    to_show: int,
    prefix: bytes,
    sinks: Mapping[int, Callable[[bytes], None]],
) -> None:
    folder = os.path.join(logs.directory, str(rank)) if logs.directory else ""
    if folder:
        os.mkdir(folder)
    if to_show & _ERR:
        logs.shown.add(rank)
    fds: list[int] = []
    paths: list[str] = []
    for stream, (mask, name) in enumerate(((_OUT, "stdout.log"), (_ERR, "stderr.log")), 1):
        path = os.path.join(folder, name) if folder and to_file & mask else ""
        if path:
            fds.append(logs._open(path))
            if to_show & mask:
                logs.follows.append(Follow(path=path, sink=stream, prefix=prefix))
            if mask in sinks:
                logs.follows.append(Follow(path=path, sink=sinks[mask]))
        else:
            # Without a file it goes straight to our own stream; what is not to be shown goes nowhere.
            fds.append(stream if to_show & mask or not folder else logs._open(os.devnull))
        paths.append(path)
    logs.streams[rank] = (fds[0], fds[1])
    logs.files[rank] = (paths[0], paths[1])


def _new_directory(base: str, incarnation: int) -> str:
    """`i3`, or `i3.2` and so on when an earlier launch of the same name was here."""
    for attempt in range(1, 10_000):
        path = os.path.join(base, f"i{incarnation}" if attempt == 1 else f"i{incarnation}.{attempt}")
        with contextlib.suppress(FileExistsError):
            os.makedirs(path)
            return path
    raise FileExistsError(f"{base} holds ten thousand directories of incarnation {incarnation}")


def _prefix(options: LogOptions, rank: int) -> bytes:
    if options.prefix is None:
        return f"[{options.role}{rank}]:".encode()
    text = options.prefix
    for name, value in (("role_name", options.role), ("local_rank", str(rank)), ("rank", str(rank))):
        text = text.replace("${" + name + "}", value)
    return text.encode()


def _filter_sinks(options: LogOptions, logs: SetLogs) -> dict[int, Callable[[bytes], None]]:
    """For --duplicate-*-filters: all ranks' tee'd lines that hold one of the words, in one file for each stream."""
    sinks: dict[int, Callable[[bytes], None]] = {}
    for mask, words, name in (
        (_OUT, options.filters[0], "filtered_stdout.log"),
        (_ERR, options.filters[1], "filtered_stderr.log"),
    ):
        if not words or not logs.directory:
            continue
        sinks[mask] = _line_filter(os.path.join(logs.directory, name), [word.encode() for word in words])
    return sinks


def _line_filter(path: str, words: list[bytes]) -> Callable[[bytes], None]:
    def write(line: bytes) -> None:
        if any(word in line for word in words):
            with open(path, "ab") as file:
                file.write(line)

    return write
