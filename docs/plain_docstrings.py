"""A Sphinx extension for docstrings that are plain text and not reStructuredText.

The docstrings of ckptrt are written for the reader of the source. Shown as they are they would trip over every
indented line, so each becomes: its paragraphs as text, and what is indented in them as preformatted lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["as_rest", "setup"]


def as_rest(lines: list[str]) -> list[str]:
    """The same docstring as reStructuredText: indented blocks become literal ones, all else stays a paragraph."""
    result: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith(" ")
        if indented and not literal:
            result += ["", "::", ""]
        elif literal and line and not indented:
            result.append("")
            literal = False
        literal = literal or indented
        result.append(f"    {line}" if indented else _escape(line))
    return result


def _escape(line: str) -> str:
    """Stars and bars are text here; a word that ends in an underscore isn't a link."""
    return line.replace("\\", "\\\\").replace("*", "\\*").replace("|", "\\|").replace("_ ", "\\_ ")


def _process(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    lines[:] = as_rest(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
