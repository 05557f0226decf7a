"""The one door for lines to the user: one line an event, a fixed first word, on stderr.

The words: start resume commit flush skip warn restart recovery failure done. They stand first, so that logs grep well.
"""

from __future__ import annotations

import contextlib
import sys

__all__ = ["block", "line"]


def line(word: str, text: str) -> None:
    """Write one event's line."""
    _write(f"{word:<12} {text}\n")


def block(word: str, text: str) -> None:
    """Write an event that needs several lines; those after the first are indented."""
    first, *rest = text.splitlines() or [""]
    _write("\n".join([f"{word:<12} {first}", *(" " * 13 + more for more in rest)]) + "\n")


def _write(text: str) -> None:
    # A closed or broken stderr (ValueError, OSError) must not end the training that a line is about.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
