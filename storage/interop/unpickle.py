"""The index of a torch.distributed.checkpoint folder, which is a pickle, read without running anything of it.

A pickle can only use what it is given here: stand-ins for the dozen classes that such an index consists of, which hold
values and do nothing.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251  the format of others; nothing of ours is pickled
from typing import Any, TypeVar

from ckptrt.errors import CorruptError, UsageError

__all__ = ["Chunk", "Metadata", "StorageInfo", "TensorEntry", "UnpicklingError", "read_index"]


UnpicklingError = pickle.UnpicklingError
_T = TypeVar("_T")


class _Plain:
    """Takes whatever fields a pickle gives it."""

    def __init__(self, *fields: Any) -> None:
        self.fields = fields

    def __setstate__(self, state: Any) -> None:
        # Frozen classes with slots come as (None, fields), others as their fields or a tuple.
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
            state = state[1]
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})
        else:
            self.fields = state


class Metadata(_Plain):
    """state_dict_metadata: name -> TensorEntry, or _Bytes if it is no tensor. storage_data: _Place -> StorageInfo."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    planner_data: Any = None


class TensorEntry(_Plain):
    """A tensor: its global size and its chunks."""

    properties: Any
    size: tuple[int, ...]
    chunks: list[Any]

    @property
    def dtype(self) -> str:
        return _expect(self.properties.fields[0], str)


class Chunk(_Plain):
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StorageInfo(_Plain):
    """Where a chunk lies: file, first byte, bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


class _Bytes(_Plain):
    pass


class _Place(_Plain):
    """Which chunk of which tensor."""

    fqn: str
    offset: tuple[int, ...] | None = None


class _Properties(_Plain):
    pass


class _Other(_Plain):
    pass


def _dtype_or_size(name: str) -> Any:
    if name == "Size":
        return _size
    return name if name.startswith(_DTYPES) else None


def _size(*values: Any) -> tuple[Any, ...]:
    return tuple(values[0]) if values else ()


def _text(*parts: Any) -> str:
    return "/".join(_expect(part, str) for part in parts)


def _expect(value: Any, kind: type[_T]) -> _T:
    """What stands where a plain value must. Another object isn't even shown: a few bytes can make one of any size."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


_DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex", "q", "bits")
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorEntry,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "MetadataIndex"): _Place,
    (_METADATA, "StorageMeta"): _Other,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Other,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch.serialization", "_get_layout"): _text,
    ("pathlib", "PosixPath"): _text,
    ("pathlib", "WindowsPath"): _text,
    ("pathlib._local", "PosixPath"): _text,
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _dtype_or_size(name) if module == "torch" else _KNOWN.get((module, name))
        if found is None:
            raise _Refused(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"object outside the file ({str(pid)[:80]})")


class _Refused(Exception):
    pass


def read_index(data: bytes, where: str) -> Metadata:
    """What a `.metadata` file says. UsageError, by name, for anything else in it; CorruptError if it is damaged."""
    try:
        found: Metadata = _Unpickler(io.BytesIO(data)).load()
    except _Refused as error:
        raise UsageError(
            f"{where} holds a pickled {error}, which no such index needs",
            safe="nothing of it was run, and nothing was written",
            hint="it wasn't written by torch.distributed.checkpoint: don't load it with that either",
        ) from None
    except Exception as error:  # noqa: BLE001  what a damaged pickle raises has no limits
        raise CorruptError(
            f"{where} is damaged: it can't be read ({type(error).__name__}: {str(error)[:200]})",
            safe="nothing was written",
        ) from None
    try:
        _check(found)
    except (AttributeError, LookupError, TypeError) as error:
        raise CorruptError(
            f"{where} is damaged: it is no index of a checkpoint ({error})", safe="nothing was written"
        ) from None
    return found


def _check(index: Any) -> None:
    """Every field that is used must be of its kind. Whether they fit together is for others to say."""
    for name, entry in _expect(_expect(index, Metadata).state_dict_metadata, dict).items():
        _expect(name, str)
        if isinstance(entry, TensorEntry):
            _ = entry.dtype
            for numbers in (entry.size, *(box for c in entry.chunks for box in (c.offsets, c.sizes))):
                _counts(numbers)
    for place, info in _expect(index.storage_data, dict).items():
        _expect(place.fqn, str)
        _counts(place.offset or ())
        _expect(info.relative_path, str)
        _counts((info.offset, info.length))
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    if any(type(step) not in (str, int) for path in paths.values() for step in path):
        raise TypeError("a path of other things than names and numbers")


def _counts(numbers: Any) -> None:
    for number in _expect(numbers, tuple):
        if _expect(number, int) < 0:
            raise TypeError("a number below zero")
