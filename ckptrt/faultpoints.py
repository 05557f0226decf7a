"""Named places at which a test may kill, stop, delay or fail this process.

Code calls `faultpoint("staging", rank=1, step=20)` at the moments that matter. Without `CKPTRT_FAULTS` in the
environment at import, that is one call and one test of an empty list. With it, the variable holds one or more specs,
joined by `;`:

    spec    = name [ "@" fact "=" value { "," fact "=" value } ] ":" action
    action  = kill              SIGKILL to this process
            | kill-pid          SIGKILL to the process that the call names in its fact `pid`
            | stop              SIGSTOP to this process; it goes on at SIGCONT
            | sleep=SECONDS     wait, then go on
            | error=ENOSPC      raise OSError with that errno (any name of the errno module)

    CKPTRT_FAULTS='staging@rank=1,step=20,incarnation=2:kill;fsync@rank=0:error=EIO'

A spec matches a call of its name whose facts have, as text, every value that the spec asks for; a fact that the call
doesn't give never matches. Each spec fires at most once per process (a forked child starts with what its parent had
left), those that match one call in the order in which they are written. A spec that can't be read is a UsageError at
import.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ckptrt import env
from ckptrt.errors import UsageError

__all__ = ["arm", "faultpoint"]

_log = logging.getLogger(__name__)

_SPEC = re.compile(r"(?P<name>[\w.-]+)(?:@(?P<facts>[^:;]+))?:(?P<action>[a-z-]+)(?:=(?P<value>[\w.+-]+))?")
_FACT = re.compile(r"(?P<key>[A-Za-z_]\w*)=(?P<value>[^,:;=]+)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fault:
    """One spec. Compared by identity, so that two equal specs are two faults and taking one off the list is atomic."""

    text: str
    name: str
    facts: tuple[tuple[str, str], ...]
    action: str
    delay_s: float = 0.0
    errno: int = 0

    def matches(self, name: str, facts: Mapping[str, object]) -> bool:
        return name == self.name and all(key in facts and str(facts[key]) == value for key, value in self.facts)


_armed: list[_Fault] = []


def faultpoint(name: str, **facts: object) -> None:
    """A place called `name`; does nothing unless a test asked for a fault here.

    facts: what a spec may select by (rank, step, incarnation, ...), compared as text.
    Raises OSError for `error=`, and UsageError when `kill-pid` meets a call without a usable `pid`.
    """
    if _armed:
        _visit(name, facts)


def arm(text: str) -> None:
    """Replace the armed faults by those in `text`; an empty text disarms. For tests that run inside one process."""
    _armed[:] = _parse(text)


def _visit(name: str, facts: Mapping[str, object]) -> None:
    for fault in tuple(_armed):
        if not fault.matches(name, facts):
            continue
        try:
            _armed.remove(fault)  # one thread only gets past this line
        except ValueError:
            continue
        _log.warning("fault point fires: %s", fault.text)
        _fire(fault, facts)


def _fire(fault: _Fault, facts: Mapping[str, object]) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "kill-pid":
        os.kill(_victim(fault, facts), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "sleep":
        time.sleep(fault.delay_s)
    else:
        raise OSError(fault.errno, os.strerror(fault.errno), f"fault point {fault.name}")


def _victim(fault: _Fault, facts: Mapping[str, object]) -> int:
    pid = facts.get("pid")
    if not isinstance(pid, int) or pid <= 1:  # 0 and negative numbers are process groups, 1 is init
        raise UsageError(
            f"fault spec {fault.text!r}: the call of {fault.name!r} gives no usable fact pid (got {pid!r})"
        )
    return pid


def _parse(text: str) -> list[_Fault]:
    return [_parse_spec(spec.strip()) for spec in text.split(";") if spec.strip()]


def _parse_spec(text: str) -> _Fault:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise _malformed(text, "it must read name[@fact=value,...]:action")
    facts = _parse_facts(text, match["facts"])
    action, value = match["action"], match["value"]
    delay_s, code = 0.0, 0
    if action == "sleep":
        delay_s = _parse_delay(text, value)
    elif action == "error":
        code = _parse_errno(text, value)
    elif action not in ("kill", "kill-pid", "stop"):
        raise _malformed(text, f"there is no action {action!r}")
    elif value is not None:
        raise _malformed(text, f"{action} takes no value")
    return _Fault(text=text, name=match["name"], facts=facts, action=action, delay_s=delay_s, errno=code)


def _parse_facts(text: str, facts: str | None) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for fact in facts.split(",") if facts else ():
        match = _FACT.fullmatch(fact)
        if match is None:
            raise _malformed(text, f"{fact!r} is not fact=value")
        if match["key"] in pairs:
            raise _malformed(text, f"{match['key']} is given twice")
        pairs[match["key"]] = match["value"]
    return tuple(pairs.items())


def _parse_delay(text: str, value: str | None) -> float:
    try:
        delay_s = float(value or "")
    except ValueError:
        raise _malformed(text, "sleep needs seconds, as in sleep=0.5") from None
    if not (math.isfinite(delay_s) and delay_s >= 0):
        raise _malformed(text, "sleep needs a finite number of seconds, 0 or more")
    return delay_s


def _parse_errno(text: str, value: str | None) -> int:
    code = getattr(errno, value or "", None)
    if not isinstance(code, int):
        raise _malformed(text, "error needs the name of an errno, as in error=ENOSPC")
    return code


def _malformed(text: str, why: str) -> UsageError:
    return UsageError(
        f"{env.FAULTS}: can't read the fault spec {text!r}: {why}",
        hint="see the head of ckptrt/faultpoints.py for the syntax, or unset the variable",
    )


arm(env.faults())
