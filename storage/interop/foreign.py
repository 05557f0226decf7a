"""What was found in files of another format, before any of it is taken over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptrt.storage.interop.blobs import Named

__all__ = ["Check", "Foreign", "nothing"]

Check = Callable[[Callable[[int], None]], str]


def nothing(progress: Callable[[int], None]) -> str:
    """The check of files without checksums that are known to have none."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Tensors by name, in the source's order.

    ties: another name -> the tensor that it shares. extra: plain values by name, as ckptrt stores them. left_out: names
    of what isn't tensors and can't be taken over. check: compares all that has a checksum, raises CorruptError, and
    returns a sentence about the damage that can't be told, or ''. check_bytes: how much it reads.
    """

    tensors: dict[str, Named]
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    check: Check = nothing
    check_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())
