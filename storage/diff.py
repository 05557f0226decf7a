"""What differs between two checkpoints, as far as their receipts tell: names, shapes, layout and digests, no data.

Data are compared by the digests of chunks where the same bytes lie at the same place: a region is the same if all its
chunks are, or if both checkpoints borrow it from one file; it differs if a chunk wholly inside it does. Else the
digests can't tell: a neighbour in the chunk may have changed, or the region lies elsewhere now.

Made for a million regions: ranks are read one after another, and where a rank laid out its file as before, which two
strings of JSON tell, its tensors are decoded once. Only what has no counterpart yet is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, zip_longest
from math import prod
from typing import NamedTuple

from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.contents import TensorId, Widths, tensor_id
from ckptrt.storage.records import ReceiptOutline, ShardRecord, TensorRecord
from ckptrt.storage.shardfile import DIGEST_DIGITS, item_bytes

__all__ = ["Comparison", "Data", "Form", "Pair", "Plain", "Region", "compare"]

_Place = tuple[str, tuple[int, ...]]  # key, offsets
_Two = tuple[TensorRecord, TensorRecord]


class Data(IntEnum):
    """Whether the bytes are equal; of several parts the highest counts."""

    SAME = 0
    UNKNOWN = 1
    DIFFERS = 2


_SAME, _UNKNOWN, _DIFFERS = Data  # looking a member up takes as long as all else that is done for a tensor


class Form(NamedTuple):
    """Which part of what."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Region(NamedTuple):
    """A part of a tensor and where it lies. xxh3: of its bytes, if the rank noted it."""

    form: Form
    shard: ShardRecord
    start: int
    xxh3: str | None = None

    @property
    def end(self) -> int:
        return self.start + prod(self.form.sizes) * item_bytes(self.form.dtype)


class Pair(NamedTuple):
    """The same part of a tensor in both checkpoints, which isn't known to be the same."""

    tensor: TensorId
    a: Region
    b: Region


@dataclass(slots=True)
class Plain:
    """A rank's plain data: where they lie in a and in b."""

    a: tuple[ShardRecord, int, int] | None = None
    b: tuple[ShardRecord, int, int] | None = None

    @property
    def data(self) -> Data:
        if self.a is None or self.b is None or self.a[2] != self.b[2]:
            return _DIFFERS
        return _Chunks(self.a[0], self.b[0]).verdict(self.a[1], self.b[1], self.a[1] + self.a[2])


@dataclass(slots=True)
class Comparison:
    """What differs. `data` has every tensor that both hold in equal shape and dtype.

    removed, added: in a only, in b only. changed: of another dtype or shape, a and b. relaid: cut into other regions.
    pairs: what isn't known to be the same, kept if asked for; `rest` the regions of relaid tensors without counterpart.
    """

    removed: dict[TensorId, Region] = field(default_factory=dict)
    added: dict[TensorId, Region] = field(default_factory=dict)
    changed: dict[TensorId, tuple[Region, Region]] = field(default_factory=dict)
    relaid: dict[TensorId, tuple[int, int]] = field(default_factory=dict)
    data: dict[TensorId, Data] = field(default_factory=dict)
    objects: dict[tuple[str, int], Plain] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    rest: dict[TensorId, tuple[list[Region], list[Region]]] = field(default_factory=dict)


def compare(a: Checkpoint, b: Checkpoint, keep_pairs: bool = False) -> Comparison:
    """Compare by metadata alone. Raises CorruptError or NotFoundError if a manifest can't be read."""
    found = Comparison()
    join = _Join(found, keep_pairs)
    for receipt_a, receipt_b in zip_longest(a.outlines(), b.outlines()):
        join.take(receipt_a, receipt_b)
    join.finish()
    return found


class _Join:
    """Finds the counterpart of each region, in the same place of the same rank's file or wherever else it is."""

    def __init__(self, found: Comparison, keep_pairs: bool) -> None:
        self._found = found
        self._keep_pairs = keep_pairs
        self._waiting: tuple[dict[TensorId, list[Region]], dict[TensorId, list[Region]]] = ({}, {})
        self._tables: dict[tuple[str, str], _Chunks] = {}
        self._one: dict[tuple[object, ...], Form] = {}  # equal forms as one object: a few recur a million times

    def take(self, a: ReceiptOutline | None, b: ReceiptOutline | None) -> None:
        """What one rank stored in each of the checkpoints."""
        if a is not None and b is not None:
            self._walk(a, b)
        for receipt, is_b in ((a, False), (b, True)):
            if receipt is None:
                continue
            self._take_objects(receipt, is_b)
            digests = _digests(receipt)
            if a is None or b is None:
                self._match(receipt.rank, receipt.shard, map(receipt.decode, receipt.tensors), digests, is_b)
            for borrowed in receipt.borrowed:
                self._match(receipt.rank, borrowed.shard, borrowed.tensors, digests, is_b)

    def _walk(self, a: ReceiptOutline, b: ReceiptOutline) -> None:
        """Compare the two own files of a rank."""
        data, rank, keep_pairs, widths = self._found.data, a.rank, self._keep_pairs, Widths()
        table, digests_a, digests_b = self._table(a.shard, b.shard), _digests(a), _digests(b)
        if a.tensors == b.tensors:  # as text: laid out as before, which is the rule
            in_step: Iterable[_Two] = ((tensor, tensor) for tensor in map(a.decode, a.tensors))
        else:
            in_step = self._in_step(a, b, digests_a, digests_b)
        for mine, other in in_step:
            start = mine.start
            verdict = table.verdict(start, other.start, start + prod(mine.sizes) * widths[mine.dtype])
            if verdict and digests_a:
                place = (mine.key, mine.offsets)
                verdict = _by_digest(verdict, digests_a.get(place), digests_b.get(place))
            name = (mine.key, rank) if mine.rank_only else mine.key
            if verdict > data.get(name, -1):
                data[name] = verdict
            if verdict and keep_pairs:
                form = Form(mine.dtype, mine.shape, mine.offsets, mine.sizes)
                self._found.pairs.append(Pair(name, Region(form, a.shard, start), Region(form, b.shard, other.start)))

    def _in_step(
        self, a: ReceiptOutline, b: ReceiptOutline, digests_a: dict[_Place, str], digests_b: dict[_Place, str]
    ) -> Iterator[_Two]:
        """Counterparts in two lists that run in the same order but for some that are new, gone or changed.

        Those wait to be matched; as soon as the one list comes to what waits of the other, it alone goes on, until
        both are in step again.
        """
        (waiting_a, waiting_b), rank = self._waiting, a.rank
        left, right = map(a.decode, a.tensors), map(b.decode, b.tensors)
        mine, other = next(left, None), next(right, None)
        while mine is not None and other is not None:
            if _is_same_part(mine, other):
                yield mine, other
                mine, other = next(left, None), next(right, None)
                continue
            is_b_behind = tensor_id(rank, other) in waiting_a
            is_a_behind = not is_b_behind and tensor_id(rank, mine) in waiting_b
            if not is_b_behind:
                self._match(rank, a.shard, [mine], digests_a, is_b=False)
                mine = next(left, None)
            if not is_a_behind:
                self._match(rank, b.shard, [other], digests_b, is_b=True)
                other = next(right, None)
        self._match(rank, a.shard, [] if mine is None else [mine, *left], digests_a, is_b=False)
        self._match(rank, b.shard, [] if other is None else [other, *right], digests_b, is_b=True)

    def finish(self) -> None:
        """Tell what the regions without counterpart mean."""
        found, (waiting_a, waiting_b) = self._found, self._waiting
        for name in waiting_a.keys() | waiting_b.keys():
            rest_a, rest_b = waiting_a.pop(name, []), waiting_b.pop(name, [])
            if not rest_b and name not in found.data:
                found.removed[name] = rest_a[0]
            elif not rest_a and name not in found.data:
                found.added[name] = rest_b[0]
            elif rest_a and rest_b and rest_a[0].form[:2] != rest_b[0].form[:2]:
                found.changed[name] = (rest_a[0], rest_b[0])
                found.data.pop(name, None)
            else:
                found.relaid[name] = (len(rest_a), len(rest_b))
                found.data[name] = max(found.data.get(name, _SAME), _UNKNOWN)
                if self._keep_pairs:
                    found.rest[name] = (rest_a, rest_b)

    def _match(
        self, rank: int, shard: ShardRecord, tensors: Iterable[TensorRecord], digests: dict[_Place, str], is_b: bool
    ) -> None:
        """Find what waits for these regions of one file, and let the others wait."""
        mine, others, one = self._waiting[is_b], self._waiting[not is_b], self._one
        for tensor in tensors:
            name = (tensor.key, rank) if tensor.rank_only else tensor.key
            plain = (tensor.dtype, tensor.shape, tensor.offsets, tensor.sizes)
            form = one.get(plain)
            if form is None:
                form = one[plain] = Form(*plain)
            xxh3 = digests.get((tensor.key, tensor.offsets)) if digests else None
            region = Region(form, shard, tensor.start, xxh3)
            other = _take(others, name, form)
            if other is None:
                mine.setdefault(name, []).append(region)
            elif is_b:
                self._tell(name, other, region)
            else:
                self._tell(name, region, other)

    def _tell(self, name: TensorId, a: Region, b: Region) -> None:
        verdict = self._table(a.shard, b.shard).verdict(a.start, b.start, a.end)
        if verdict:
            verdict = _by_digest(verdict, a.xxh3, b.xxh3)
        self._found.data[name] = max(self._found.data.get(name, _SAME), verdict)
        if verdict and self._keep_pairs:
            self._found.pairs.append(Pair(name, a, b))

    def _table(self, a: ShardRecord, b: ShardRecord) -> _Chunks:
        table = self._tables.get((a.name, b.name))
        if table is None:
            table = self._tables[a.name, b.name] = _Chunks(a, b)
        return table

    def _take_objects(self, receipt: ReceiptOutline, is_b: bool) -> None:
        for plain in receipt.objects:
            both = self._found.objects.setdefault((plain.key, receipt.rank), Plain())
            place = (receipt.shard, plain.start, plain.size_bytes)
            if is_b:
                both.b = place
            else:
                both.a = place


def _is_same_part(a: TensorRecord, b: TensorRecord) -> bool:
    return (a.key, a.dtype, a.shape, a.offsets, a.sizes, a.rank_only) == (
        b.key, b.dtype, b.shape, b.offsets, b.sizes, b.rank_only,
    )  # fmt: skip


def _take(waiting: dict[TensorId, list[Region]], name: TensorId, form: tuple[object, ...]) -> Region | None:
    """The region of this form that waits under this name, which waits no longer."""
    regions = waiting.get(name)
    if regions is None:
        return None
    for index, region in enumerate(regions):
        if region[0] == form:
            if len(regions) == 1:
                del waiting[name]
            else:
                del regions[index]
            return region
    return None


class _Chunks:
    """The chunk digests of two files side by side."""

    def __init__(self, a: ShardRecord, b: ShardRecord) -> None:
        self._is_one_file = a == b
        self._chunk_bytes = a.chunk_bytes if a.chunk_bytes == b.chunk_bytes else 0
        size = DIGEST_DIGITS
        count = max(len(a.chunks), len(b.chunks)) // size
        differ = (a.chunks[i * size : (i + 1) * size] != b.chunks[i * size : (i + 1) * size] for i in range(count))
        self._num_before = [0, *accumulate(differ)]  # how many differ before each

    def verdict(self, a: int, b: int, a_end: int) -> Data:
        """Of the bytes from `a` to `a_end` of the one and as many from `b` of the other."""
        if a == a_end or (self._is_one_file and a == b):
            return _SAME
        size, before = self._chunk_bytes, self._num_before
        if a != b or not size:
            return _UNKNOWN
        first, end = a // size, -(-a_end // size)
        if first < 0 or end >= len(before):
            return _UNKNOWN
        if before[first] == before[end]:
            return _SAME
        # The last chunk of a file may be shorter than its counterpart: it never counts as wholly inside.
        inner, inner_end = -(-a // size), a_end // size
        return _DIFFERS if inner < inner_end and before[inner] != before[inner_end] else _UNKNOWN


def _digests(receipt: ReceiptOutline) -> dict[_Place, str]:
    return {(digest.key, digest.offsets): digest.xxh3 for digest in receipt.digests}


def _by_digest(verdict: Data, a: str | None, b: str | None) -> Data:
    """What the digests of the very bytes say, where both ranks noted them, else the verdict so far."""
    if a is None or b is None:
        return verdict
    return _SAME if a == b else _DIFFERS
