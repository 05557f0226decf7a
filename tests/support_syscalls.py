"""Faults in real system calls: strace attaches to a process, counts its calls, and fails one or kills it there.

What support_crash_faults.py does above the one door to the disk is done here below it: nothing of the product is
patched or wrapped, and what fails are the calls that the kernel gets to see.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support_crash_explore import bare_errors
from support_crash_job import Job, Violation
from support_crash_judge import Ledger, judge
from support_crash_log import WatchedFs
from support_crash_scenarios import Scenario

from ckptrt.storage.layout import CommitId

__all__ = [
    "FAULTS", "Call", "Fault", "Strace", "calls_in", "failed_syncs", "faults_of", "folder", "injected", "play_traced",
    "refusal",
]  # fmt: skip

# All by which a storage can come to its files; those that a machine hasn't are left out.
_TRACED = (
    "openat", "?open", "?creat", "read", "pread64", "preadv", "preadv2", "write", "writev", "pwrite64",
    "pwritev", "pwritev2", "fsync", "fdatasync", "sync_file_range", "?link", "linkat", "?rename", "renameat",
    "renameat2", "?unlink", "unlinkat", "?mkdir", "mkdirat", "?rmdir", "truncate", "ftruncate", "fallocate",
    "close", "fcntl", "getdents64", "?stat", "?lstat", "?fstat", "?newfstatat", "statx",
)  # fmt: skip
_HANG_S = 60.0
_NOTES_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What becomes of a call. inject: in strace's words. only: calls that can fail so, empty for all."""

    name: str
    inject: str
    only: tuple[str, ...] = ()

    @property
    def kills(self) -> bool:
        return self.inject.startswith("signal")


FAULTS = (
    Fault(name="EIO", inject="error=EIO"),
    Fault(name="killed", inject="signal=KILL"),
    Fault(
        name="ENOSPC",
        inject="error=ENOSPC",
        only=("openat", "pwrite64", "fsync", "link", "linkat", "mkdir", "fallocate"),
    ),
    Fault(name="EMFILE", inject="error=EMFILE", only=("openat",)),
    Fault(name="EINTR", inject="error=EINTR", only=("openat", "pwrite64", "fsync", "preadv", "preadv2", "close")),
    Fault(name="nothing done", inject="retval=0", only=("pwrite64",)),
)  # fmt: skip


def faults_of(syscall: str) -> Iterator[Fault]:
    return (fault for fault in FAULTS if not fault.only or syscall in fault.only)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Call:
    """The `number`-th call of one kind that a thread makes."""

    syscall: str
    number: int


class Strace:
    """strace on a running process, or on one of its threads: `inject` happens, and all calls are written to `log`."""

    def __init__(
        self, pid: int, log: str, call: Call | None = None, fault: Fault | None = None, *, follow: bool
    ) -> None:
        """follow: on all threads, now and later; each counts its own calls. Returns when the calls are being traced."""
        inject = [f"--inject={call.syscall}:{fault.inject}:when={call.number}"] if call and fault else []
        traced = call.syscall if call else ",".join(_TRACED)  # writing down what isn't asked for takes its time
        options = ["-y", *(["-f"] if follow else []), "-e", "signal=none", "-e", f"trace={traced}", *inject]
        command = ["strace", *options, "-o", log, "-p", str(pid)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        if "attached" not in said:
            self.detach()
            raise OSError(said.strip() or "strace ended at once")

    def detach(self) -> None:
        """Let go of the process, if it lives."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=_HANG_S)

    def wait(self) -> None:
        """Until all that is traced has ended."""
        self._process.communicate(timeout=_HANG_S)


def calls_in(log: str, below: str) -> list[Call]:
    """The calls of a trace that are about files below a folder, each kind counted by threads as strace counts them."""
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[Call, None] = {}
    with open(log) as lines:
        for line in lines:
            match = re.match(r"(\d+ +)?(\w+)\(", line)
            if match is None:
                continue
            counts[match[1], match[2]] += 1
            if below in line:
                found[Call(syscall=match[2], number=counts[match[1], match[2]])] = None
    return list(found)


def injected(log: str) -> list[str]:
    """The calls that were made to fail. (Of a kill there is no trace but the death.)"""
    with open(log) as lines:
        return [line.strip() for line in lines if "(INJECTED)" in line]


def failed_syncs(struck: Sequence[str]) -> list[str]:
    """Those of the failed calls after which nobody knows what is durable. (What is interrupted is called again.)"""
    return [line for line in struck if re.search(r"\bf(data)?sync\(", line) and "EINTR" not in line]


def _timed_out(pid: int) -> bool:
    """Wait for the end of a process, without reaping it; a process that doesn't end is killed."""
    handle = os.pidfd_open(pid)
    try:
        if select.select([handle], [], [], _HANG_S)[0]:
            return False
        os.kill(pid, signal.SIGKILL)
        return True
    finally:
        os.close(handle)


@contextmanager
def folder() -> Iterator[str]:
    """An empty folder in memory: no power is cut here, so nothing need reach a disk."""
    base = tempfile.mkdtemp(prefix="ckptrt-calls-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        yield base
    finally:
        shutil.rmtree(base)


def refusal() -> str:
    """Why no call can be made to fail here; empty if they can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return "only Linux has strace"
    if shutil.which("strace") is None:
        return "strace isn't installed"
    with folder() as base:
        log = f"{base}/log"
        try:
            _in_child(lambda: os.mkdir(f"{base}/x"), log, None, None)
        except OSError as error:
            return f"strace may not attach here: {error}"
        if not calls_in(log, base):
            return "strace shows no calls here"
    return ""


# --- histories in a process of their own


class _Notes:
    """What a process has noted, in memory that outlives it: no call is needed to write there."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTES_BYTES)
        self._end = 8

    def put(self, note: Sequence[Any]) -> None:
        data = json.dumps(note).encode() + b"\n"
        start, self._end = self._end, self._end + len(data)
        self._memory[start : self._end] = data
        self._memory[:8] = struct.pack("<q", self._end)  # last: a note is there as a whole, whenever the process dies

    def all(self) -> list[tuple[Any, ...]]:
        (end,) = struct.unpack("<q", self._memory[:8])
        return [_tuples(json.loads(line)) for line in self._memory[8 : max(end, 8)].splitlines()]


def _tuples(read: Any) -> Any:
    """What JSON has made lists of. A pair of numbers is a commit, or equal to one."""
    if not isinstance(read, list):
        return read
    parts = tuple(_tuples(part) for part in read)
    return CommitId(*parts) if len(parts) == 2 and all(isinstance(part, int) for part in parts) else parts


class _NotingFs(WatchedFs):
    """Real calls and real syncs; notes go to a memory that both processes see."""

    def __init__(self, base: str, notes: _Notes) -> None:
        super().__init__(base, syncs=True)
        self._notes = notes

    def note(self, *note: Any) -> None:
        super().note(*note)
        self._notes.put(note)


def play_traced(scenario: Scenario, call: Call | None = None, fault: Fault | None = None) -> tuple[list[Call], int]:
    """Play a scenario in a forked process of which one call fails, and judge what is left.

    Gives all calls that were about the run, and how many were made to fail. Raises Violation.
    """
    with folder() as base:
        live, log, notes = f"{base}/live", f"{base}/log", _Notes()
        os.mkdir(live)
        status = _in_child(lambda: _play(scenario, live, notes), log, call, fault)
        struck = injected(log)
        killed = os.WIFSIGNALED(status)
        if killed and not (fault and fault.kills):
            raise Violation("I7", f"the process died of signal {os.WTERMSIG(status)}")
        _check_end(notes.all(), struck, killed)
        ledger = Ledger()
        for note in notes.all():
            if not note[0].startswith("!"):
                ledger.take(*note)
        with bare_errors("judging the disk"):
            judge(f"{live}/runs/a", ledger)
        return calls_in(log, live), len(struck) + killed


def _play(scenario: Scenario, live: str, notes: _Notes) -> None:
    fs = _NotingFs(live, notes)
    job = Job(fs, lenient=True)
    try:
        scenario.play(job, 0)
        for error in job.errors:
            notes.put(("!error", error.what))
        notes.put(("!end", len(fs.reap())))
    except Violation as error:
        notes.put(("!violation", error.invariant, str(error)))
    except BaseException:  # noqa: BLE001 the parent tells
        notes.put(("!raised", traceback.format_exc(limit=-3)))


def _check_end(notes: Sequence[tuple[Any, ...]], struck: Sequence[str], killed: bool) -> None:
    """How the process ended, and whether it told of what failed."""
    by_kind = {note[0]: note for note in notes}
    if "!violation" in by_kind:
        raise Violation(*by_kind["!violation"][1:])
    if "!raised" in by_kind:
        raise Violation("I7", f"the job ended in a bare error: {by_kind['!raised'][1]}")
    if killed:
        return
    if "!end" not in by_kind:
        raise Violation("I7", "the process ended before its job did")
    if by_kind["!end"][1] and not any("close(" in line for line in struck):
        raise Violation("I8", f"{by_kind['!end'][1]} descriptors were left open")
    # Whoever prunes by hand hears of it by the exit status: then there is no note of its success.
    count = Counter(note[0] for note in notes)
    if (failed := failed_syncs(struck)) and not count["!error"] and count["pruned"] == count["pruning"]:
        raise Violation("I1", f"nobody was told that this failed: {failed[0]}")


def _in_child(work: Callable[[], None], log: str, call: Call | None, fault: Fault | None) -> int:
    """Do something in a forked process under strace; gives its wait status. OSError if strace can't attach."""
    gate, opener = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(opener)
        select.select([gate], [], [])  # no call of those that are counted
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)  # whatever it was, only the parent goes on from here
    os.close(gate)
    try:
        strace = Strace(pid, log, call, fault, follow=True)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(opener)
    hung = _timed_out(pid)
    status = os.waitpid(pid, 0)[1]
    strace.wait()
    if hung:
        raise Violation("I7", f"the process hung for {_HANG_S:g} s")
    return status
