"""The one door for lines to the user: one line an event, a fixed first word, on stderr.

The words: start resume commit skip warn restart recovery failure done. They stand first, so that logs grep well.
"""

from __future__ import annotations

import sys

__all__ = ["block", "line"]


def line(word: str, text: str) -> None:
    """Write one event's line."""
    sys.stderr.write(f"{word:<12} {text}\n")
    sys.stderr.flush()


def block(word: str, text: str) -> None:
    """Write an event that needs several lines; those after the first are indented."""
    first, *rest = text.splitlines() or [""]
    sys.stderr.write("\n".join([f"{word:<12} {first}", *(" " * 13 + more for more in rest)]) + "\n")
    sys.stderr.flush()
