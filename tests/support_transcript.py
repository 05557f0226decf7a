"""Transcript tests: a text file of commands and what came of them, compared or rewritten.

    # a comment
    command key=value key=value
    ----
    what is expected, up to an empty line

With CKPTRT_REWRITE=1 in the environment the file is rewritten with what really comes out; read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Step", "check_transcript"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a transcript."""

    line: int
    command: str
    options: dict[str, str]
    expected: str
    before: str  # comments and empty lines in front of it, kept when the file is rewritten


def read(path: Path) -> tuple[list[Step], str]:
    """The steps, and what follows the last one."""
    steps: list[Step] = []
    lines = path.read_text().splitlines()
    before: list[str] = []
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith("#"):
            before.append(lines[at])
            at += 1
            continue
        command, *words = lines[at].split()
        assert lines[at + 1] == "----", f"{path.name}:{at + 2}: expected ----"
        end = at + 2
        while end < len(lines) and lines[end].strip():
            end += 1
        steps.append(
            Step(
                line=at + 1,
                command=command,
                options=dict(word.split("=", 1) for word in words),
                expected="\n".join(lines[at + 2 : end]),
                before="".join(f"{text}\n" for text in before),
            )
        )
        before = []
        at = end
    return steps, "".join(f"{text}\n" for text in before)


def check_transcript(path: Path, run: Callable[[Step], str]) -> None:
    """Run each command and compare, or rewrite the file."""
    steps, rest = read(path)
    results = [run(step).strip("\n") for step in steps]
    if os.environ.get("CKPTRT_REWRITE"):
        source = path.read_text().splitlines()
        path.write_text(
            "".join(
                f"{step.before}{source[step.line - 1]}\n----\n{result}\n"
                for step, result in zip(steps, results, strict=True)
            )
            + rest
        )
        return
    for step, result in zip(steps, results, strict=True):
        assert result == step.expected, f"{path.name}:{step.line}: {step.command}\nwant\n{step.expected}\ngot\n{result}"
