"""Names of things in a run's directory. Pure: text in, text out.

    run.json                                          format version, run id; create-only
    fences/i00000004.json                             one incarnation's fence; create-only
    commits/s000001000.i00000004.json                 the commit; create-only
    data/s000001000.i00000004.<nonce>/manifest.json.zst
    data/s000001000.i00000004.<nonce>/r00000.safetensors
    data/s000001000.i00000004.<nonce>/r00000.receipt.json

Names sort as their numbers do; a number too large for its field makes it wider and is still read back.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "COMMITS", "DATA", "FENCES", "MANIFEST", "RUN", "CommitId", "commit_name", "data_dir", "fence_name",
    "parse_commit_name", "parse_data_dir", "parse_fence_name", "receipt_name", "shard_name",
]  # fmt: skip

RUN = "run.json"
FENCES = "fences/"
COMMITS = "commits/"
DATA = "data/"
MANIFEST = "manifest.json.zst"

_FENCE = re.compile(r"fences/i(\d{8,})\.json")
_COMMIT = re.compile(r"commits/s(\d{9,})\.i(\d{8,})\.json")
_DATA = re.compile(r"data/s(\d{9,})\.i(\d{8,})\.([0-9a-z]{1,32})/?")


class CommitId(NamedTuple):
    """What names a checkpoint: its step and the incarnation that wrote it."""

    step: int
    incarnation: int


def fence_name(incarnation: int) -> str:
    return f"fences/i{incarnation:08d}.json"


def commit_name(commit: CommitId) -> str:
    return f"commits/s{commit.step:09d}.i{commit.incarnation:08d}.json"


def data_dir(commit: CommitId, nonce: str) -> str:
    """The folder of one attempt at a checkpoint, with its closing slash. The nonce makes every attempt a new one."""
    return f"data/s{commit.step:09d}.i{commit.incarnation:08d}.{nonce}/"


def shard_name(rank: int) -> str:
    return f"r{rank:05d}.safetensors"


def receipt_name(rank: int) -> str:
    return f"r{rank:05d}.receipt.json"


def parse_fence_name(name: str) -> int | None:
    match = _FENCE.fullmatch(name)
    return int(match[1]) if match else None


def parse_commit_name(name: str) -> CommitId | None:
    match = _COMMIT.fullmatch(name)
    return CommitId(int(match[1]), int(match[2])) if match else None


def parse_data_dir(name: str) -> tuple[CommitId, str] | None:
    match = _DATA.fullmatch(name)
    return (CommitId(int(match[1]), int(match[2])), match[3]) if match else None
