"""safetensors files: their headers written and read, and tensors dealt out to several files with an index.

    8 bytes  little-endian length of the header
    header   JSON: name -> dtype, shape, first and last byte; `__metadata__`: text -> text
    data     without gaps

What the format lacks (some dtypes, several names for one tensor) stands in `__metadata__`: `ckptrt.raw` says which U8
are what, and a name that is no tensor's but has a tensor's name for its value is another name of that tensor, as
safetensors' own save_model writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptrt.errors import CorruptError, MismatchError, UsageError
from ckptrt.storage.interop.blobs import Blob, Bytes, Named, Span
from ckptrt.storage.shardfile import item_bytes
from ckptrt.storage.tiers import Tier

__all__ = [
    "INDEX", "SINGLE", "File", "TensorFile", "check_names", "deal_out", "index_text", "lacks", "read_header",
    "unique",
]  # fmt: skip

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_HEADER_MAX_BYTES = 100_000_000  # as safetensors' own reader has it
_METADATA = "__metadata__"
_RAW = "ckptrt.raw"
_OWN = ("format", _RAW, "tensor_names")  # in `__metadata__`; never names of tensors
_COUNT_MAX = 1 << 63
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {"F8_E8M0": "float8_e8m0fnu"}


def check_names(names: Iterable[str], ties: Iterable[str]) -> None:
    """MismatchError for names of tensors, and of ties, that mean something else in a header."""
    taken = [name for name in names if name == _METADATA] + [name for name in ties if name in _OWN]
    if taken:
        raise MismatchError(
            f"safetensors files can't hold a tensor called {taken[0]!r}: the name means something else in them",
            safe="nothing was written",
            hint="give it another name with --map",
        )


def lacks(dtype: str) -> bool:
    """Whether safetensors has no such dtype."""
    return dtype not in _NAMES


# --- writing


@dataclass(slots=True)
class File:
    """A file to be written. ties: another name -> the tensor of this file that it means. metadata: further texts."""

    name: str
    tensors: list[Named] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def blobs(self) -> list[Blob]:
        """Header and tensors, those with larger elements first, so that each is aligned to its element."""
        self.tensors.sort(key=lambda tensor: -item_bytes(tensor.dtype))
        header: dict[str, Any] = {}
        raw: dict[str, Any] = {}
        position = 0
        for tensor in self.tensors:
            end = position + tensor.size_bytes
            dtype, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
            if dtype is None:
                raw[tensor.name] = {"dtype": tensor.dtype, "shape": shape}
                dtype, shape = "U8", [tensor.size_bytes]
            header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            position = end
        metadata = {"format": "pt", **self.metadata, **self.ties}
        if raw:
            metadata[_RAW] = json.dumps(raw)
        text = json.dumps({_METADATA: metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        if len(text) > _HEADER_MAX_BYTES:
            raise UsageError(
                f"{self.name} would have a header of {len(text)} bytes, which no reader takes",
                hint="give a smaller --max-shard-size",
            )
        return [Bytes(len(text).to_bytes(8, "little") + text), *(tensor.data for tensor in self.tensors)]


def deal_out(groups: Sequence[Sequence[Named]], max_bytes: int) -> list[File]:
    """Files of at most `max_bytes` of data, filled in order. Tensors of a group stay together.

    A tensor larger than that has a file of its own.
    """
    files, filled = [File(SINGLE)], 0
    for group in groups:
        size_bytes = sum(tensor.size_bytes for tensor in group)
        if files[-1].tensors and filled + size_bytes > max_bytes:
            files.append(File(SINGLE))
            filled = 0
        files[-1].tensors += group
        filled += size_bytes
    if len(files) > 1:
        for number, file in enumerate(files, start=1):
            file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


def index_text(files: Sequence[File]) -> bytes:
    """Which tensor lies in which file, and how much they are together."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(file.data_bytes for file in files)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"


# --- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """What a file says it holds. notes: what of it means nothing here."""

    tensors: dict[str, Named]
    ties: dict[str, str]
    metadata: dict[str, str]


def read_header(tier: Tier, name: str) -> TensorFile:
    """A file's tensors, whose data are read later. CorruptError for a file that no writer would have made."""
    where = f"{tier.url}/{name}"
    size_bytes = tier.size(name)
    length = int.from_bytes(tier.read(name, 0, 8), "little") if size_bytes >= 8 else _HEADER_MAX_BYTES + 1
    if length > min(_HEADER_MAX_BYTES, size_bytes - 8):
        raise _bad(where, "it is cut off within its header, or no safetensors file")
    try:
        header = json.loads(tier.read(name, 8, length), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"its header can't be read ({error})") from None
    if not isinstance(header, dict):
        raise _bad(where, "its header is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _bad(where, "its __metadata__ isn't text by name")
    raw = _raw(metadata, where)
    tensors: dict[str, Named] = {}
    spans: list[tuple[int, int]] = []
    for key, entry in header.items():
        dtype, shape, start, end = _entry(key, entry, where)
        spans.append((start, end))
        if key in raw:
            dtype, shape = raw[key]
        if prod(shape) * item_bytes(dtype) != end - start:
            raise _bad(where, f"{key} has {end - start} bytes, which isn't {dtype} {shape}")
        data = Span(tier, name, 8 + length + start, end - start)
        tensors[key] = Named(name=key, dtype=dtype, shape=shape, data=data)
    _check_spans(spans, size_bytes - 8 - length, where)
    texts = ((name, kept) for name, kept in metadata.items() if name not in tensors and name not in _OWN)
    ties = {name: kept for name, kept in texts if kept in tensors}
    return TensorFile(tensors=tensors, ties=ties, metadata=metadata)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: ValueError if a name stands twice in an object."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _raw(metadata: Mapping[str, str], where: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """True dtypes and shapes of tensors that are stored as bytes."""
    try:
        entries = json.loads(metadata.get(_RAW, "{}"))
        found = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
        for dtype, shape in found.values():
            item_bytes(dtype)
            if not _are_counts(shape):
                raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UsageError):
        raise _bad(where, f"its {_RAW} can't be read") from None
    return found


def _entry(key: str, entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    try:
        name, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _bad(where, f"the entry of {key} lacks dtype, shape or data_offsets") from None
    if not _are_counts((*shape, start, end)) or start > end:
        raise _bad(where, f"the entry of {key} holds numbers that can't be true")
    if not isinstance(name, str):
        raise _bad(where, f"the dtype of {key} isn't a name")
    if name not in _DTYPES:
        raise UsageError(f"{where}: {key} has the dtype {name!r}, which can't be stored", safe="nothing was written")
    return _DTYPES[name], shape, start, end


def _are_counts(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and 0 <= number < _COUNT_MAX for number in numbers)


def _check_spans(spans: Sequence[tuple[int, int]], data_bytes: int, where: str) -> None:
    at = 0
    for start, end in sorted(spans):
        if start != at:
            raise _bad(where, f"its tensors leave a gap or overlap at byte {min(at, start)} of its data")
        at = end
    if at != data_bytes:
        raise _bad(where, f"it has {data_bytes} bytes of data, but its header tells of {at}")


def _bad(where: str, why: str) -> CorruptError:
    return CorruptError(f"{where} is damaged: {why}", safe="nothing was written", hint="get the file anew")
