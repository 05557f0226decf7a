"""Folders of torch.distributed.checkpoint: `.metadata`, and `.distcp` files of torch.save files one after another.

torch's own reader takes a changed byte for the right one. Each of those inner files is a zip whose CRCs torch has
written, so it is told here.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import IO, Any

from ckptrt.errors import CorruptError, NotFoundError, UsageError
from ckptrt.storage.interop.blobs import Assembled, Blob, Bytes, Named, Part, Span
from ckptrt.storage.interop.foreign import Foreign
from ckptrt.storage.interop.optimizer import ForeignOptimizer, read_optimizer
from ckptrt.storage.interop.torchfile import (
    TorchTensor,
    check_zip,
    data_range,
    encode_plain,
    full_disk_told,
    load_plain,
    torch_module,
)
from ckptrt.storage.interop.unpickle import Metadata, StorageInfo, TensorEntry, read_index
from ckptrt.storage.shardfile import item_bytes
from ckptrt.storage.tiers import Tier, open_tier
from ckptrt.storage.tiers.local import local_path

__all__ = ["open_dcp", "open_dcp_optimizer", "save_dcp"]

_INDEX = ".metadata"
_BUFFER_BYTES = 1 << 20
_UNCHECKED = "{} was saved without checksums, so a changed byte of a tensor's data can't be told"


def save_dcp(state: Any, path: str) -> None:
    """A folder that torch.distributed.checkpoint.load reads, on any number of ranks."""
    torch_module()
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(path, thread_count=1, sync_files=True)
    with full_disk_told(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this is a single process
        save(state, storage_writer=writer, no_dist=True)


def open_dcp(place: str, key: str, component: str) -> Foreign:
    """The tensors of a folder whose names begin with `key` or, if none was given, with the component's name.

    Raises UsageError, by name, if the index needs foreign code, and CorruptError for a folder that isn't whole.
    """
    with _index(place) as (tier, index):
        return _open(tier, index, key, component, place)


def open_dcp_optimizer(place: str, key: str) -> ForeignOptimizer:
    """An optimizer's state in such a folder, under `key`."""
    with _index(place) as (tier, index):
        prefix = _prefix(index, key, "", place)
        infos = _infos(index)
        tree: dict[Any, Any] = {}
        items: list[_Item] = []
        for name, entry in index.state_dict_metadata.items():
            if not name.startswith(prefix):
                continue
            mine = _items_of(tier, name, entry, infos)
            items += mine
            _check_files(tier, mine)
            value = _named(tier, name, entry, mine) if isinstance(entry, TensorEntry) else mine[0].load()
            _put(tree, index.planner_data[name], prefix, value)
    if isinstance(tree.get("param_groups"), dict):
        tree["param_groups"] = [tree["param_groups"][number] for number in sorted(tree["param_groups"])]
    check_bytes = sum(item.length for item in items)
    return read_optimizer(tree, place, key, encode_plain, lambda progress: _check(items, place, progress), check_bytes)


def _put(tree: dict[Any, Any], path: tuple[Any, ...], prefix: str, value: Any) -> None:
    """Put a value where its path leads from the prefix on."""
    steps = list(path)
    while prefix and steps:
        prefix = prefix.removeprefix(f"{steps.pop(0)}.")
    for step in steps[:-1]:
        tree = tree.setdefault(step, {})
    tree[steps[-1]] = value


@contextmanager
def _index(place: str) -> Iterator[tuple[Tier, Metadata]]:
    """A folder's index; what contradicts itself in it is damage."""
    tier = open_tier(local_path(place))
    where = f"{place.rstrip('/')}/{_INDEX}"
    try:
        index = read_index(tier.read(_INDEX), where)
    except NotFoundError:
        raise NotFoundError(
            f"{place} is no checkpoint of torch.distributed: it has no {_INDEX}",
            safe="nothing was written",
            hint="name the folder that dcp.save wrote, or another format",
        ) from None
    try:
        yield tier, index
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptError(f"{where} is damaged: {type(error).__name__}: {error}", safe="nothing was written") from None


def _infos(index: Metadata) -> dict[Any, StorageInfo]:
    return {(at.fqn, at.offset or ()): info for at, info in index.storage_data.items()}


def _open(tier: Tier, index: Metadata, key: str, component: str, place: str) -> Foreign:
    prefix = _prefix(index, key, component, place)
    infos = _infos(index)
    tensors: dict[str, Named] = {}
    items: list[_Item] = []
    others: Counter[str] = Counter()
    for name, entry in index.state_dict_metadata.items():
        if not name.startswith(prefix):
            others[name.partition(".")[0]] += 1
        elif isinstance(entry, TensorEntry):
            mine = _items_of(tier, name, entry, infos)
            items += mine
            tensors[name[len(prefix) :]] = _named(tier, name, entry, mine)
        else:
            others[name] += 1
    _check_files(tier, items)
    return Foreign(
        tensors=tensors,
        left_out=tuple(name if count == 1 else f"{name}.* ({count})" for name, count in others.items()),
        check=lambda progress: _check(items, place, progress),
        check_bytes=sum(item.length for item in items),
    )


def _prefix(index: Metadata, key: str, component: str, place: str) -> str:
    names = list(index.state_dict_metadata)
    if key == "." or (not key and _is_flat(index)):
        return ""
    if any(name.startswith(f"{key or component}.") for name in names):
        return f"{key or component}."
    tops = sorted({name.partition(".")[0] for name in names})
    there = ", ".join(tops[:12]) + (" ..." if len(tops) > 12 else "")
    what = f"nothing under {key!r}" if key else f"nothing called {component!r}"
    raise UsageError(
        f"{place} has {what}", safe="nothing was written", hint=f"name a part with --key (. for all): there is {there}"
    )


def _is_flat(index: Metadata) -> bool:
    """Whether one state_dict was saved by itself: then no name is a path of several steps."""
    paths = index.planner_data
    return isinstance(paths, dict) and bool(paths) and all(len(path) == 1 for path in paths.values())


def _items_of(tier: Tier, name: str, entry: Any, infos: dict[Any, StorageInfo]) -> list[_Item]:
    """The inner files of a tensor or, of a plain value, the one."""
    if not isinstance(entry, TensorEntry):
        return [_item(tier, name, "", (), (), infos[name, ()])]
    return [_item(tier, name, entry.dtype, c.offsets, c.sizes, infos[name, c.offsets]) for c in entry.chunks]


def _item(
    tier: Tier, name: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: StorageInfo
) -> _Item:
    if info.transform_descriptors:
        raise UsageError(f"{name} is stored with extensions ({info.transform_descriptors}), which can't be undone here")
    if os.path.basename(info.relative_path) != info.relative_path:
        raise ValueError(f"{name} is said to lie in {info.relative_path!r}")
    return _Item(tier, name, dtype, Part(offsets=offsets, sizes=sizes, data=Bytes(b"")), info)


def _named(tier: Tier, name: str, entry: TensorEntry, items: list[_Item]) -> Named:
    shape = entry.size
    parts = [Part(offsets=item.offsets, sizes=item.sizes, data=item) for item in items]
    data = Assembled(f"{tier.url}/{_INDEX} is damaged: {name}", entry.dtype, shape, parts)
    return Named(name=name, dtype=entry.dtype, shape=shape, data=data)


class _Item:
    """A torch.save file within a file: a chunk, whose elements are a blob, or (without a dtype) a plain value."""

    def __init__(self, tier: Tier, name: str, dtype: str, box: Part, info: StorageInfo) -> None:
        self.name, self.file, self.start, self.length = name, info.relative_path, info.offset, info.length
        self.offsets, self.sizes = box.offsets, box.sizes
        self.size_bytes = prod(box.sizes) * item_bytes(dtype) if dtype else 0
        self.is_tensor = bool(dtype)
        self._tier = tier
        self._dtype = dtype
        self._data: Blob | None = None

    def open(self) -> IO[bytes]:
        return io.BufferedReader(_View(self._tier, self.file, self.start, self.length), _BUFFER_BYTES)

    def load(self) -> Any:
        """What it holds, by torch."""
        with self.open() as stream:
            return load_plain(stream, f"{self.file} ({self.name})")

    def resolve(self) -> Blob:
        """Find the elements. Where they don't lie in row-major order, they are loaded when they are read."""
        if self._data is None:
            with self.open() as stream:
                found = data_range(stream, f"{self.file} ({self.name})", self._dtype, self.sizes)
            self._data = Span(self._tier, self.file, self.start + found, self.size_bytes) if found else _Loaded(self)
        return self._data

    def read_into(self, start: int, out: memoryview) -> None:
        self.resolve().read_into(start, out)


class _Loaded:
    """The elements of an item that isn't stored in row-major order."""

    def __init__(self, item: _Item) -> None:
        self._item = item
        self._tensor: TorchTensor | None = None
        self.size_bytes = item.size_bytes

    def read_into(self, start: int, out: memoryview) -> None:
        if self._tensor is None:
            self._tensor = TorchTensor(self._item.load())
        self._tensor.read_into(start, out)
        if start + len(out) == self.size_bytes:
            self._tensor = None


class _View(io.RawIOBase):
    """A stretch of a file as a file."""

    def __init__(self, tier: Tier, name: str, start: int, length: int) -> None:
        self._span = Span(tier, name, start, length)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._span.size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._span.size_bytes - self._at))
        self._span.read_into(self._at, out[:count])
        self._at += count
        return count


def _check_files(tier: Tier, items: list[_Item]) -> None:
    sizes = {entry.name: entry.size_bytes for entry in tier.list("")}
    for item in items:
        if item.file not in sizes:
            raise CorruptError(
                f"{tier.url}/{item.file}, which holds {item.name}, is missing", safe="nothing was written"
            )
        if item.start + item.length > sizes[item.file]:
            raise CorruptError(
                f"{tier.url}/{item.file} is damaged: it ends within {item.name}", safe="nothing was written"
            )


def _check(items: list[_Item], place: str, progress: Callable[[int], None]) -> str:
    unchecked = ""
    for item in items:
        with item.open() as stream:
            if not check_zip(stream, f"{place.rstrip('/')}/{item.file} ({item.name})", progress):
                unchecked = _UNCHECKED.format(place)
        if item.is_tensor:
            item.resolve()
    return unchecked
