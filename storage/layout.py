"""Names of things in a run's directory. Pure: text in, text out.

    run.json                                          format version, run id; create-only
    fences/i00000004.json                             one incarnation's fence; create-only
    commits/s000001000.i00000004.json                 the commit; create-only
    pins/s000001000.i00000004.json                    keeps that checkpoint from being pruned; create-only
    data/s000001000.i00000004.<nonce>/manifest.json.zst
    data/s000001000.i00000004.<nonce>/r00000.safetensors
    data/s000001000.i00000004.<nonce>/r00000.receipt.json

Names sort as their numbers do; a number too large for its field makes it wider and is still read back.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "ABANDONED", "COMMITS", "DATA", "FENCES", "MANIFEST", "PINS", "RUN", "CommitId", "commit_name", "data_dir",
    "fence_name", "parse_commit_name", "parse_data_dir", "parse_fence_name", "parse_pin_name", "parse_shard_path",
    "pin_name", "receipt_name", "shard_name",
]  # fmt: skip

RUN = "run.json"
FENCES = "fences/"
COMMITS = "commits/"
PINS = "pins/"
DATA = "data/"
MANIFEST = "manifest.json.zst"
ABANDONED = "abandoned"  # in an attempt's data folder: a rank that others can't hear will not write its part

_FENCE = re.compile(r"fences/i([0-9]{8,18})\.json")
_COMMIT = re.compile(r"commits/s([0-9]{9,18})\.i([0-9]{8,18})\.json")
_PIN = re.compile(r"pins/s([0-9]{9,18})\.i([0-9]{8,18})\.json")
_DATA = re.compile(r"data/s([0-9]{9,18})\.i([0-9]{8,18})\.([0-9a-z]{1,32})/?")
_SHARD_FILE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")


class CommitId(NamedTuple):
    """What names a checkpoint: its step and the incarnation that wrote it."""

    step: int
    incarnation: int


def fence_name(incarnation: int) -> str:
    return f"fences/i{incarnation:08d}.json"


def commit_name(commit: CommitId) -> str:
    return f"commits/s{commit.step:09d}.i{commit.incarnation:08d}.json"


def pin_name(commit: CommitId) -> str:
    return f"pins/s{commit.step:09d}.i{commit.incarnation:08d}.json"


def data_dir(commit: CommitId, nonce: str) -> str:
    """The folder of one attempt at a checkpoint, with its closing slash. The nonce makes every attempt a new one."""
    return f"data/s{commit.step:09d}.i{commit.incarnation:08d}.{nonce}/"


def shard_name(rank: int, attempt: int = 0) -> str:
    """A rank's shard file; a later attempt after a failed write has a name of its own."""
    return f"r{rank:05d}.safetensors" if attempt == 0 else f"r{rank:05d}.a{attempt}.safetensors"


def receipt_name(rank: int) -> str:
    return f"r{rank:05d}.receipt.json"


def parse_fence_name(name: str) -> int | None:
    """The incarnation that a fence's name says, or None if no writer would have given it that name."""
    match = _FENCE.fullmatch(name)
    incarnation = int(match[1]) if match else 0
    return incarnation if match and fence_name(incarnation) == name else None


def parse_commit_name(name: str) -> CommitId | None:
    """What a commit's name says, or None if no writer would have given it that name."""
    match = _COMMIT.fullmatch(name)
    commit = CommitId(int(match[1]), int(match[2])) if match else None
    return commit if commit and commit_name(commit) == name else None


def parse_pin_name(name: str) -> CommitId | None:
    """Which commit a pin's name says, or None if no writer would have given it that name."""
    match = _PIN.fullmatch(name)
    commit = CommitId(int(match[1]), int(match[2])) if match else None
    return commit if commit and pin_name(commit) == name else None


def parse_data_dir(name: str) -> tuple[CommitId, str] | None:
    """Commit and nonce of a data folder, with or without its closing slash; None for any other name."""
    match = _DATA.fullmatch(name)
    if match is None:
        return None
    commit = CommitId(int(match[1]), int(match[2]))
    return (commit, match[3]) if data_dir(commit, match[3]) == name.rstrip("/") + "/" else None


def parse_shard_path(name: str) -> tuple[str, str] | None:
    """Folder and file of a shard's name below data/; None for whatever could point elsewhere."""
    folder, _, file = name.partition("/")
    if parse_data_dir(DATA + folder) is None or _SHARD_FILE.fullmatch(file) is None:
        return None
    return folder, file
