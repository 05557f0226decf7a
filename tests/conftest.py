"""Order of the tests, fast ones first, and a last look for processes that a test left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["support_worlds"]  # its ranks are started once for all modules

# Helpers of multiprocessing that live as long as the interpreter.
_LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_leaked: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Plain tests, then those that start processes, then slow ones; within each the order in the files."""
    items.sort(key=_weight)


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 2
    return 1 if item.get_closest_marker("processes") else 0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A child that is still alive when every fixture is gone was forgotten: the run fails and names it."""
    _leaked.extend(_children())
    if _leaked and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for child in _leaked:
        terminalreporter.write_line(f"LEAKED process {child}", red=True)


def _children() -> list[str]:
    """Direct children of this process that are alive, as 'pid command'."""
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            try:
                state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
                command = Path("/proc", pid, "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue  # it has just ended
            if state != "Z" and not any(name in command for name in _LASTING):
                found.append(f"{pid} {command}")
    return found
