"""The plain data of a checkpoint (step counters, the data's position, ...), read and verified while they are small."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptrt.errors import CorruptError
from ckptrt.storage.records import ObjectRecord, ReceiptOutline, ShardRecord
from ckptrt.storage.tiers import Tier
from ckptrt.storage.values import Reader

__all__ = ["PlainData", "PlainValue"]

_RANKS_MAX = 8
_VALUE_MAX_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainValue:
    """What some ranks stored under a name. `problem` says why there is no value; `is_damaged` if it should have one."""

    key: str
    ranks: tuple[int, ...]
    value: object = None
    problem: str = ""
    is_damaged: bool = False


class PlainData:
    """Notes where the plain data of the first ranks lie while somebody else looks through the receipts."""

    def __init__(self) -> None:
        self._found: list[tuple[int, ShardRecord, ObjectRecord]] = []

    def watch(self, receipts: Iterable[ReceiptOutline]) -> Iterator[ReceiptOutline]:
        """The same receipts."""
        for receipt in receipts:
            if receipt.rank < _RANKS_MAX:
                self._found += [(receipt.rank, receipt.shard, plain) for plain in receipt.objects]
            yield receipt

    def values(self, tier: Tier) -> list[PlainValue]:
        """Read them; what several ranks have alike comes once. Sorted by name."""
        reader = Reader(tier)
        ranks: dict[tuple[str, str, str, bool], list[int]] = {}
        for rank, shard, plain in self._found:
            text, problem, is_damaged = _read(reader, shard, plain)
            ranks.setdefault((plain.key, text, problem, is_damaged), []).append(rank)
        found = [
            PlainValue(
                key=key, ranks=tuple(who), value=json.loads(text) if text else None, problem=why, is_damaged=is_damaged
            )
            for (key, text, why, is_damaged), who in ranks.items()
        ]
        return sorted(found, key=lambda value: (value.key, value.ranks))


def _read(reader: Reader, shard: ShardRecord, plain: ObjectRecord) -> tuple[str, str, bool]:
    """JSON text, or why there is none and whether that is damage."""
    if plain.size_bytes > _VALUE_MAX_BYTES:
        return "", f"{plain.size_bytes:,} bytes", False
    try:
        text = bytes(reader.read(shard, plain.start, plain.start + plain.size_bytes)).decode()
        json.loads(text)
    except CorruptError as error:
        return "", error.what, True
    except ValueError:
        return "", "it isn't JSON", True
    return text, "", False
