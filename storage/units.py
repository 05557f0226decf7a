"""Quantities as people read them."""

from __future__ import annotations

__all__ = ["size_text"]


def size_text(size_bytes: int) -> str:
    """Bytes for people: 1.2 MiB."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
