"""A sample of `make syscalls`: calls fail on real processes, and planted bugs are seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support_syscalls import FAULTS, Call, calls_in, faults_of, injected, refusal
from syscalls import BUGS, HISTORIES, Result, Task, report, tasks

PROGRAM = Path(__file__).with_name("syscalls.py")


@pytest.mark.processes
def test_calls_fail_on_real_processes_and_planted_bugs_are_seen() -> None:
    if reason := refusal():
        pytest.skip(reason)
    places = ("save", "commits", "writes rank 0")
    only = [word for place in places for word in ("--only", place)]
    # In a process of its own: it forks, and this one may have the threads of many tests.
    done = subprocess.run(
        [sys.executable, PROGRAM, "--stride", "97", "--seed", "5", *only],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CKPTRT_FAULTS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bugs = sum(bug.place in places for bug in BUGS)
    assert f"bugs caught {bugs}/{bugs}   violations 0" in done.stdout


# --- what the program makes of a trace

TRACE = """\
7 openat(AT_FDCWD</w>, "/lib/x", O_RDONLY) = 3</lib/x>
7 openat(AT_FDCWD</w>, "/run/a", O_RDONLY) = 3</run/a>
8 openat(AT_FDCWD</w>, "/run/b", O_RDONLY <unfinished ...>
7 fsync(3</run/a>) = -1 EIO (Input/output error) (INJECTED)
8 <... openat resumed>) = 4</run/b>
7 openat(AT_FDCWD</w>, "/run/c", O_RDONLY) = 3</run/c>
7 +++ exited with 0 +++
"""


def test_calls_about_the_run_are_counted_by_threads_as_strace_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(TRACE)
    assert sorted(calls_in(str(log), "/run/")) == [
        Call(syscall="fsync", number=1),
        Call(syscall="openat", number=1),
        Call(syscall="openat", number=2),
        Call(syscall="openat", number=3),
    ]
    assert injected(str(log)) == ["7 fsync(3</run/a>) = -1 EIO (Input/output error) (INJECTED)"]


def test_every_call_can_fail_and_be_the_last_one() -> None:
    assert [fault.name for fault in faults_of("unlink")] == ["EIO", "killed"]
    assert {fault.name for fault in faults_of("pwrite64")} == {fault.name for fault in FAULTS} - {"EMFILE"}


def test_the_work_is_dealt_without_a_gap_or_a_second_time() -> None:
    dealt = [task for task in tasks(2, 0, 3) if task.place == HISTORIES[0] and not task.bug]
    numbers = sorted(n for task in dealt for n in range(100)[task.first :: task.stride])
    assert numbers == list(range(0, 100, 2))
    assert sorted(task.bug for task in tasks(1, 0, 1) if task.bug) == sorted(bug.name for bug in BUGS)


def test_the_report_is_bad_if_a_bug_was_missed_or_something_is_wrong() -> None:
    place, bug = Task(place="save"), Task(place="save", bug=BUGS[0].name)
    fine = Result(task=place, struck=Counter({("fsync", "EIO"): 3}))
    said: list[str] = []
    assert report([fine, Result(task=bug, caught_by="I1")], said.append)
    assert said[-1] == "\nsystem calls failed 3   bugs caught 1/1   violations 0"
    assert not report([fine, Result(task=bug)], said.append)
    assert not report([Result(task=place, findings=["it was lost"])], said.append)
    assert "VIOLATION it was lost" in said
