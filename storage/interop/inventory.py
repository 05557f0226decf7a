"""What a checkpoint holds, by component: each tensor put together from the ranks' parts, and plain data.

A component is a part of the state that has a name of its own, such as model or optim.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptrt.errors import CorruptError, UsageError
from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.contents import no_gc
from ckptrt.storage.interop.blobs import Assembled, Blob, Named, Part, digest
from ckptrt.storage.interop.verified import Stretch, VerifiedFiles
from ckptrt.storage.records import ObjectRecord, ShardRecord, TensorRecord
from ckptrt.storage.shardfile import CHUNK_BYTES, tensor_bytes

__all__ = ["Component", "Inventory"]

_OPTIMIZER = {"kind", "groups", "state", "other"}
_MODULE = {"ties", "extra"}


@dataclass(slots=True)
class _Stored:
    record: TensorRecord
    parts: list[tuple[ShardRecord, TensorRecord]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of the state.

    tensors: by name without the component's, in the order in which they were stored. ties: another name -> the tensor
    that it shares. data: plain data of rank 0, as stored. differing: tensors and data that each rank has for itself,
    and that differ; rank 0's are given.
    """

    name: str
    tensors: dict[str, Named]
    data: Any
    ties: dict[str, str]
    differing: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def is_optimizer(self) -> bool:
        return isinstance(self.data, dict) and set(self.data) == _OPTIMIZER

    @property
    def is_module(self) -> bool:
        return self.data is None or _is_modules(self.data, self.tensors)


def _is_modules(data: Any, tensors: Mapping[str, Named]) -> bool:
    """Whether plain data are what the adapter of modules stores, and not a dict of the user's that looks like it."""
    if not isinstance(data, dict) or not data or not set(data) <= _MODULE:
        return False
    ties, extra = data.get("ties", {}), data.get("extra", {})
    has_ties = isinstance(ties, dict) and all(isinstance(kept, str) and kept in tensors for kept in ties.values())
    return has_ties and isinstance(extra, dict)


class Inventory:
    """All components of one checkpoint. Receipts are read at once, data when they are asked for; close() it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._global: dict[str, _Stored] = {}
        self._own: defaultdict[str, dict[int, _Stored]] = defaultdict(dict)  # key -> rank -> that rank's own tensor
        self._plain: defaultdict[str, dict[int, tuple[ShardRecord, ObjectRecord]]] = defaultdict(dict)
        self.world_size = checkpoint.record.world_size
        names = {name for section in checkpoint.head().sections for name, _ in section.files()}
        chunk_bytes = CHUNK_BYTES
        with no_gc():
            for receipt in checkpoint.receipts():
                for shard, tensors in receipt.files():
                    chunk_bytes = max(chunk_bytes, shard.chunk_bytes)
                    for tensor in tensors:
                        self._add(receipt.rank, shard, tensor)
                for plain in receipt.objects:
                    self._plain[plain.key][receipt.rank] = (receipt.shard, plain)
        self._files = VerifiedFiles(checkpoint.tier, len(names), chunk_bytes)
        self._made: dict[str, Component] = {}
        self._keys: defaultdict[str, list[str]] = defaultdict(list)  # component -> its tensors' full names
        for key in {**self._global, **self._own}:
            self._keys[self._component_of(key)].append(key)
        for name in self._plain:
            self._keys[name] += []

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Inventory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The components, sorted."""
        return sorted(self._keys)

    def describe(self) -> str:
        """One line about all components: what somebody who has to choose must know."""
        return ", ".join(f"{name} ({len(self._keys[name])} tensors)" for name in self.names)

    def component(self, name: str) -> Component:
        """UsageError names those that there are."""
        if name not in self._keys:
            raise UsageError(f"there is no component {name!r}", hint=f"there are: {self.describe()}")
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Component:
        differing: list[str] = []
        tensors: dict[str, Named] = {}
        for key in self._keys[name]:
            mine = self._global[key] if key in self._global else self._one_of(key, differing)
            tensors[key[len(name) + 1 :]] = self._named(key, mine)
        texts = [self._text(*where) for where in self._plain[name].values()] if name in self._plain else ["null"]
        data = _tree(name, texts[0])
        if any(text != texts[0] for text in texts):
            differing.append(f"{name} (plain data)")
        ties = data.get("ties", {}) if _is_modules(data, tensors) else {}
        return Component(name=name, tensors=tensors, data=data, ties=ties, differing=tuple(differing))

    def _add(self, rank: int, shard: ShardRecord, tensor: TensorRecord) -> None:
        if tensor.rank_only:
            self._own[tensor.key][rank] = _Stored(tensor, [(shard, tensor)])
            return
        self._global.setdefault(tensor.key, _Stored(tensor)).parts.append((shard, tensor))

    def _component_of(self, key: str) -> str:
        """The longest name of plain data that the key begins with: every component has some."""
        end = len(key)
        while (end := key.rfind(".", 0, end)) > 0:
            if key[:end] in self._plain:
                return key[:end]
        return key.partition(".")[0]

    def _named(self, key: str, stored: _Stored) -> Named:
        record = stored.record
        parts = [
            Part(offsets=t.offsets, sizes=t.sizes, data=Stretch(self._files, shard, t.start, tensor_bytes(t)))
            for shard, t in stored.parts
        ]
        data: Blob = Assembled(key, record.dtype, record.shape, parts)
        return Named(name=key, dtype=record.dtype, shape=record.shape, data=data)

    def _one_of(self, key: str, differing: list[str]) -> _Stored:
        """Rank 0's copy of a tensor that each rank stores for itself (buffers beside sharded parameters)."""
        held = self._own[key]
        first = held[min(held)]
        forms = {(stored.record.dtype, stored.record.shape) for stored in held.values()}
        if len(held) < self.world_size or len(forms) > 1 or len(set(self._digests(key))) > 1:
            differing.append(key)
        return first

    def _digests(self, key: str) -> Iterator[str]:
        for stored in self._own[key].values():
            yield digest(self._named(key, stored).data)

    def _text(self, shard: ShardRecord, plain: ObjectRecord) -> bytes:
        out = memoryview(bytearray(plain.size_bytes))
        Stretch(self._files, shard, plain.start, plain.size_bytes).read_into(0, out)
        return bytes(out)


def _tree(name: str, text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CorruptError(
            f"the plain data of {name} aren't JSON", hint="`ckptrt verify` checks the checkpoint"
        ) from None
