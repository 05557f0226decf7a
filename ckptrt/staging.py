"""From live tensors to a sealed slot: what this rank writes, where it lies in the image, and the copies.

What doesn't change from save to save (the plan, the file's header, the views into a slot) is made once and kept as
long as the captured state has the same keys, shapes, dtypes and holders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch

from ckptrt.adapters.base import Adapter, TensorItem
from ckptrt.adapters.sharding import dtype_name
from ckptrt.arena import Arena, populate
from ckptrt.faultpoints import faultpoint
from ckptrt.plan import Holding, plan_save
from ckptrt.regions import Region
from ckptrt.storage.shardfile import ShardLayout, TensorSpec, item_bytes, lay_out
from ckptrt.storage.slots import SlotMeta

__all__ = ["CopyStager", "Staged", "Stager", "capture_all"]

_STEADY_MIN_BYTES = 64 << 10  # smaller ones aren't worth a digest

Signature = tuple[tuple[str, tuple[int, ...], Region, torch.dtype, tuple[int, ...] | None], ...]
_LayoutKey = tuple[tuple[tuple[str, int], ...], frozenset[int]]  # plain data's sizes, items that are steady


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A sealed slot."""

    slot: int
    size_bytes: int


class Stager(Protocol):
    """Turns the present state into a snapshot.

    `stage` returns a sealed slot, or None if no slot is free; when it returns, the state may change again. Raises
    UsageError for state that can't be stored and NoSpaceError if there is no memory; then no slot is taken.
    """

    def stage(
        self, adapters: Sequence[Adapter], arena: Arena, step: int, incarnation: int, metrics: Mapping[str, float]
    ) -> Staged | None: ...

    def release(self) -> None:
        """Forget all that is kept between saves, and with it the arena's memory."""
        ...


@dataclass(slots=True)
class _Kept:
    """What is kept between saves of the same layout."""

    signature: Signature
    pieces: tuple[tuple[int, tuple[slice, ...] | None], ...]  # (item, part of it or all), in the order of specs
    specs: tuple[TensorSpec, ...]
    layouts: dict[_LayoutKey, tuple[ShardLayout, bytes]] = field(default_factory=dict)
    views: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    versions: list[tuple[int, int]] = field(default_factory=list)  # of each item at the last snapshot


class CopyStager:
    """Copies at once, on the calling thread: the stall is the copy."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._kept: _Kept | None = None

    def stage(
        self, adapters: Sequence[Adapter], arena: Arena, step: int, incarnation: int, metrics: Mapping[str, float]
    ) -> Staged | None:
        items, data = capture_all(adapters)
        kept = self._plan(items)
        versions = [(item.tensor.data_ptr(), item.tensor._version) for item in items]
        layout, meta = _layout(kept, self._rank, data, _steady(kept, items, versions))
        if metrics:  # the rest is kept encoded
            meta = b'%s,"metrics":%s}' % (meta[:-1], msgspec.json.encode(metrics))
        if arena.ensure(layout.size_bytes, len(meta)):
            kept.views.clear()
            assert arena.view is not None
            populate(arena.view)
        slot = arena.lease()
        if slot is None:
            return None
        self._copy(kept, layout, arena, slot, items, data, step, incarnation)
        kept.versions = versions
        assert arena.view is not None
        arena.view.seal(
            slot,
            world_size=self._world_size,
            step=step,
            incarnation=incarnation,
            image_bytes=layout.size_bytes,
            meta=meta,
        )
        arena.sealed(slot, step, incarnation)
        return Staged(slot=slot, size_bytes=layout.size_bytes)

    def release(self) -> None:
        self._kept = None

    def _plan(self, items: Sequence[TensorItem]) -> _Kept:
        signature = tuple((i.key, i.shape, i.region, i.tensor.dtype, i.holders) for i in items)
        if self._kept is None or self._kept.signature != signature:
            self._kept = _make_plan(items, signature, self._rank)
        return self._kept

    def _copy(
        self,
        kept: _Kept,
        layout: ShardLayout,
        arena: Arena,
        slot: int,
        items: Sequence[TensorItem],
        data: Sequence[tuple[str, bytes]],
        step: int,
        incarnation: int,
    ) -> None:
        assert arena.view is not None
        image = arena.view.image(slot, layout.size_bytes)
        image[: len(layout.header)] = layout.header
        for (_, text), record in zip(data, layout.objects, strict=True):
            image[record.start : record.start + record.size_bytes] = text
        key = (slot, len(layout.header))  # plain data lies behind the tensors and doesn't move them
        if key not in kept.views:
            kept.views[key] = _views(image, layout)
        sources = [_part(items[index], part) for index, part in (kept.pieces[i] for i in layout.order)]
        pairs = [(v, s) for v, s in zip(kept.views[key], sources, strict=True) if s.numel()]
        half = len(pairs) // 2
        with torch.no_grad():
            # Two calls, so that a test can end the process between them: in the middle of a snapshot.
            _copy_all(pairs[:half])
            faultpoint("staging", rank=self._rank, step=step, incarnation=incarnation)
            _copy_all(pairs[half:])


def capture_all(adapters: Sequence[Adapter]) -> tuple[list[TensorItem], list[tuple[str, bytes]]]:
    """Every component's tensors, and its plain data as JSON text."""
    items: list[TensorItem] = []
    data: list[tuple[str, bytes]] = []
    for adapter in adapters:
        captured = adapter.capture()
        items.extend(captured.items)
        text = json.dumps(captured.data, separators=(",", ":"), allow_nan=False).encode()
        data.append((adapter.name, text))
    return items, data


def _make_plan(items: Sequence[TensorItem], signature: Signature, rank: int) -> _Kept:
    by_key = {item.key: index for index, item in enumerate(items)}
    holdings = [
        Holding(item.key, item_bytes(dtype_name(item.tensor)), item.shape, item.region, item.holders) for item in items
    ]
    pieces: list[tuple[int, tuple[slice, ...] | None]] = []
    specs: list[TensorSpec] = []
    for key, region in plan_save(holdings, rank):
        item = items[by_key[key]]
        inside = region.inside(item.region)
        whole = region == item.region
        part = tuple(slice(o, o + s) for o, s in zip(inside.offsets, inside.sizes, strict=True))
        pieces.append((by_key[key], None if whole else part))
        specs.append(
            TensorSpec(
                key=key,
                dtype=dtype_name(item.tensor),
                shape=item.shape,
                offsets=region.offsets,
                sizes=region.sizes,
                rank_only=item.holders is None,
            )
        )
    return _Kept(signature=signature, pieces=tuple(pieces), specs=tuple(specs))


def _steady(kept: _Kept, items: Sequence[TensorItem], versions: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Items that are probably what they were at the last snapshot; a wrong guess costs a digest, no more."""
    last = kept.versions or [(-1, -1)] * len(items)
    return frozenset(
        index
        for index, item in enumerate(items)
        if (item.steady or versions[index] == last[index]) and item.tensor.nbytes >= _STEADY_MIN_BYTES
    )


def _layout(
    kept: _Kept, rank: int, data: Sequence[tuple[str, bytes]], steady: frozenset[int]
) -> tuple[ShardLayout, bytes]:
    sizes = tuple((name, len(text)) for name, text in data)
    key = (sizes, steady)
    if key not in kept.layouts:
        layout = lay_out(rank, kept.specs, sizes)
        marked = tuple(i for i, spec in enumerate(layout.order) if kept.pieces[spec][0] in steady)
        meta = msgspec.json.encode(SlotMeta(tensors=layout.tensors, objects=layout.objects, steady=marked))
        kept.layouts.clear()  # plain data changes its size now and then; only the last is likely to come again
        kept.layouts[key] = (layout, meta)
    return kept.layouts[key]


def _views(image: memoryview, layout: ShardLayout) -> list[torch.Tensor]:
    """A tensor over each region's bytes in the image; they keep the arena mapped."""
    views: list[torch.Tensor] = []
    for record in layout.tensors:
        dtype: Any = getattr(torch, record.dtype)
        count = 1
        for size in record.sizes:
            count *= size
        if count == 0:
            views.append(torch.empty(record.sizes, dtype=dtype))
            continue
        flat = torch.frombuffer(image, dtype=dtype, count=count, offset=record.start)
        views.append(flat.view(record.sizes))
    return views


def _part(item: TensorItem, part: tuple[slice, ...] | None) -> torch.Tensor:
    return item.tensor if part is None else item.tensor[part]


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [source for _, source in pairs])
