"""Which exit was the cause and which were its consequences. Pure.

Order in time decides, as far as it is known: a forked worker notes the moment of the exception that ends it, for the
others there is the moment at which their exit was seen. What only says that a peer went away is a consequence even
if it comes first: a process that dies may hold its sockets' ends closed for a while before its parent hears of it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Exit", "Verdict", "describe_code", "judge"]

# Signals that a program brings upon itself; the others come from outside and say nothing about the next time.
_OWN_FAULT = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"}
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket (closed|timeout)|peer .*(went away|is dead)"
    r"|DistNetworkError|remote process (exited|has)|ncclRemoteError|Application timeout caused pair closure",
    re.IGNORECASE,
)
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One worker's end. at_s: when it was seen; error: the exception's last line, noted at error_at_s if it is known.

    by_us: the code is that of a signal which the supervisor had sent.
    """

    rank: int
    pid: int
    code: int
    at_s: float
    by_us: bool = False
    error: str = ""
    error_at_s: float | None = None
    note: str = ""

    @property
    def is_failure(self) -> bool:
        return self.code != 0 and (not self.by_us or self.error_at_s is not None)

    @property
    def began_at_s(self) -> float:
        return self.at_s if self.error_at_s is None else min(self.at_s, self.error_at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The cause, those that failed because of it, those that were stopped, and what to recognise the cause by."""

    cause: Exit
    consequences: tuple[Exit, ...]
    stopped: tuple[Exit, ...]
    fingerprint: str


def judge(exits: Sequence[Exit]) -> Verdict:
    """The verdict on a set of exits, of which at least one is a failure."""
    failures = sorted((e for e in exits if e.is_failure), key=lambda e: (_is_consequence(e), e.began_at_s, e.rank))
    cause, *rest = failures
    stopped = [e for e in exits if e.by_us and e not in failures]
    return Verdict(
        cause=cause,
        consequences=tuple(sorted(rest, key=lambda e: e.rank)),
        stopped=tuple(sorted(stopped, key=lambda e: e.rank)),
        fingerprint=_fingerprint(cause),
    )


def describe_code(code: int) -> str:
    """`SIGKILL (exit -9)` or `exit 1`."""
    if code >= 0:
        return f"exit {code}"
    return f"{_signal_name(-code)} (exit {code})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_consequence(exit_: Exit) -> bool:
    return bool(_PEER_GONE.search(exit_.error))


def _fingerprint(exit_: Exit) -> str:
    """Equal for the same mistake made again; empty when the worker was killed from outside."""
    if exit_.error_at_s is None and exit_.code < 0:
        name = _signal_name(-exit_.code)
        return name if name in _OWN_FAULT else ""
    if _is_consequence(exit_):
        return ""
    error = _VARYING.sub("#", exit_.error)
    # With its own exception noted, the code may be that of the signal by which it was stopped on its way out.
    return error if exit_.error_at_s is not None else f"{describe_code(exit_.code)}: {error}"
