"""Own child processes: they die with their parent, are signalled by group, and no pid is used after it was reaped.

A child is the leader of its own session, so a ctrl-C at the terminal reaches the parent alone, and whatever the child
starts can be signalled with it. Its exit is looked at without reaping first (WNOWAIT): as long as the dead leader is
unreaped, its number can't go to another process, and the group can be killed without touching a stranger.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

__all__ = ["ChildTable", "death_signal", "die_with_parent", "name_process"]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; die at once if it is dead already.

    The kernel means the *thread* that created this process, so parents create children from their main thread only.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def death_signal() -> Callable[[], None]:
    """`die_with_parent` as a preexec_fn for subprocess: all that it needs is looked up now, before the fork."""
    parent_pid = os.getpid()
    return lambda: die_with_parent(parent_pid)


def name_process(name: str) -> None:
    """What `ps -e` and `top` show for this process, 15 bytes at most."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class ChildTable:
    """The live children of this process that were added to it, each the leader of its own group."""

    def __init__(self) -> None:
        self._pids: set[int] = set()

    def add(self, pid: int) -> None:
        self._pids.add(pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._pids

    def __len__(self) -> int:
        return len(self._pids)

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a child's whole group; nothing happens when the child isn't ours or is reaped."""
        if pid not in self._pids:
            return
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:
            # Forked, but not yet the leader of its own group. The pid is ours until we reap it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def reap(self) -> list[tuple[int, int]]:
        """The children that ended since the last call, as (pid, code); code is the exit status or minus the signal.

        What a failed child leaves behind in its group is killed; a child that ended with 0 may leave others running.
        """
        ended: list[tuple[int, int]] = []
        for pid in tuple(self._pids):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is None:
                continue
            if result.si_status != 0 or result.si_code != os.CLD_EXITED:
                self.signal(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self._pids.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
        return ended
