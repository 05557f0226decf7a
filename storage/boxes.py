"""Boxes of one tensor: whether any two share an element. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Box", "overlap"]


class Box(Protocol):
    """`sizes` elements at `offsets`, in as many dims."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two of these boxes, none of them empty, share an element."""
    if len(boxes) < 2:
        return False
    dims = range(len(boxes[0].offsets))
    if not dims:
        return True
    # Sweep along the dim that is cut most often: few boxes are then open at a time.
    axis = max(dims, key=lambda d: len({box.offsets[d] for box in boxes}))
    opened: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        opened = [o for o in opened if o.offsets[axis] + o.sizes[axis] > box.offsets[axis]]
        if any(_meet(other, box) for other in opened):
            return True
        opened.append(box)
    return False


def _meet(a: Box, b: Box) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
