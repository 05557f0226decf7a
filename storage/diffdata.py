"""What the digests leave open between two checkpoints, decided by reading: tensors, and plain data as trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from ckptrt.errors import CorruptError
from ckptrt.storage.contents import TensorId
from ckptrt.storage.diff import Comparison, Data, Region
from ckptrt.storage.records import ShardRecord
from ckptrt.storage.tiers import Tier
from ckptrt.storage.values import Reader, ValueDiff, compare_values

__all__ = ["Leaf", "Result"]

Leaf = tuple[str, object, object]  # path in a tree of plain data, value in a, value in b
_Groups = list[tuple[list[Region], list[Region]]]  # regions that cover the same elements of a tensor


class Result:
    """What differs: by the receipts, and, after read(), by the bytes.

    tensors: names by what their data are, if shape and layout are equal. objects: (component, rank) -> its data.
    """

    def __init__(self, found: Comparison) -> None:
        self.found = found
        self.objects = {ident: plain.data for ident, plain in found.objects.items()}
        self.values: dict[TensorId, ValueDiff] = {}
        self.leaves: dict[tuple[str, int], list[Leaf]] = {}
        self.tensors: dict[Data, list[TensorId]] = {}
        self._sort()

    @property
    def differs(self) -> bool:
        """Whether anything is known to differ."""
        found = self.found
        if found.removed or found.added or found.changed or found.relaid or self.tensors[Data.DIFFERS]:
            return True
        return Data.DIFFERS in self.objects.values()

    @property
    def is_decided(self) -> bool:
        """Whether there is nothing of which it isn't known."""
        return Data.UNKNOWN not in self.found.data.values() and Data.UNKNOWN not in self.objects.values()

    def size_bytes(self, with_stat: bool) -> int:
        """What read() will read of either side."""
        return sum(_group_bytes(groups) for groups in self._to_read(with_stat).values())

    def read(self, a: Tier, b: Tier, with_stat: bool, progress: Callable[[int], None] | None = None) -> None:
        """Decide what is undecided; with stat, look at the values of all that isn't known to be the same.

        Raises CorruptError if bytes differ from what was written.
        """
        data, readers = self.found.data, (Reader(a), Reader(b))
        for name, groups in self._to_read(with_stat).items():
            values = compare_values(*readers, groups, with_stat)
            known = Data.SAME if data[name] == Data.UNKNOWN else data[name]
            data[name] = max(known, Data.DIFFERS if values.differs else Data.SAME)
            if with_stat:
                self.values[name] = values
            if progress is not None:
                progress(_group_bytes(groups))
        self._read_objects(*readers)
        self._sort()

    def _to_read(self, with_stat: bool) -> dict[TensorId, _Groups]:
        groups: dict[TensorId, _Groups] = {}
        for name, one, other in self.found.pairs:
            if with_stat or self.found.data[name] == Data.UNKNOWN:
                groups.setdefault(name, []).append(([one], [other]))
        for name, rest in self.found.rest.items():
            groups.setdefault(name, []).append(rest)
        return groups

    def _read_objects(self, reader_a: Reader, reader_b: Reader) -> None:
        for ident, plain in self.found.objects.items():
            if plain.a is None or plain.b is None or self.objects[ident] == Data.SAME:
                continue
            text_a, text_b = _text(reader_a, *plain.a), _text(reader_b, *plain.b)
            self.objects[ident] = Data.SAME if text_a == text_b else Data.DIFFERS
            self.leaves[ident] = list(_leaves(_tree(text_a), _tree(text_b)))

    def _sort(self) -> None:
        self.tensors = {data: [] for data in Data}
        relaid = self.found.relaid
        for name, data in self.found.data.items():
            if name not in relaid:
                self.tensors[data].append(name)


def _group_bytes(groups: _Groups) -> int:
    return sum(region.end - region.start for one, _ in groups for region in one)


def _text(reader: Reader, shard: ShardRecord, start: int, size_bytes: int) -> bytes:
    return bytes(reader.read(shard, start, start + size_bytes))


def _tree(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CorruptError("a rank's plain data aren't JSON", hint="`ckptrt verify` checks the checkpoint") from None


def _leaves(a: object, b: object, path: str = "") -> Iterator[Leaf]:
    """What differs in two trees."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _leaves(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _leaves(one, other, f"{path}[{number}]")
    elif a != b:
        yield path, a, b
