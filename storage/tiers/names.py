"""Which names and prefixes a tier takes. The same rule for every tier, so that a run can be moved between them."""

from __future__ import annotations

from ckptrt.errors import UsageError

__all__ = ["TEMP", "check_name", "check_prefix", "join_url"]

TEMP = ".tmp-"  # names with a part that starts so are half-written files of LocalTier, and nobody else's


def check_name(url: str, name: str) -> str:
    """Give the name back if it may name an object below `url`, else raise UsageError."""
    fault = _fault(name)
    if fault:
        raise UsageError(
            f"{name!r} can't name an object in {url}: {fault}",
            safe="nothing was touched",
            hint="use a relative name such as 'commits/s000001000.i00000004.json'",
        )
    return name


def check_prefix(url: str, prefix: str, *, may_be_empty: bool = True) -> str:
    """Give the prefix back if it is a name and a slash (or, where allowed, empty), else raise UsageError."""
    if not prefix:
        fault = "" if may_be_empty else "it is empty and would mean everything"
    elif not prefix.endswith("/"):
        fault = "it must end in '/'"
    else:
        fault = _fault(prefix[:-1])
    if fault:
        raise UsageError(
            f"{prefix!r} can't be a prefix in {url}: {fault}",
            safe="nothing was touched",
            hint="use a relative folder such as 'commits/'",
        )
    return prefix


def join_url(url: str, name: str) -> str:
    """Write a tier's url and a name as one, for messages."""
    return f"{url.rstrip('/')}/{name}"


def _fault(name: str) -> str:
    """Say what is wrong with a name, or nothing."""
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it is absolute"
    for part in name.split("/"):
        if not part:
            return "it has an empty part"
        if part in (".", ".."):
            return f"it has a {part!r} part"
        if part.startswith(TEMP):
            return f"parts that start with {TEMP!r} are kept for files being written"
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "it has a control character"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "it isn't valid Unicode"
    return ""
