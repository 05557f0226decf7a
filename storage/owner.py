"""Who and what writes a record: for people who look for the other job."""

from __future__ import annotations

import functools
import os
import pwd
import secrets
import socket

from ckptrt.storage.records import Owner

__all__ = ["made_by", "this_owner"]


def this_owner() -> Owner:
    """This process."""
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # usual in containers
        user = str(uid)
    return Owner(host=socket.gethostname(), pid=os.getpid(), user=user, token=_token(os.getpid()))


@functools.cache
def _token(pid: int) -> str:
    """This process's own: a forked child has another pid and draws anew."""
    return secrets.token_hex(8)


def made_by() -> str:
    """The writing program and its version."""
    # Slow to load, and needed by writers only.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"ckptrt {version('ckptrt')}"
    except PackageNotFoundError:  # run from a bare source tree
        return "ckptrt"
