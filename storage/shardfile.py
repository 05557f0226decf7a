"""The shard file: one rank's tensors as a valid safetensors file. Pure bytes in and out.

    8 bytes  little-endian length of the header
    header   JSON, padded with spaces so that the data starts at a multiple of 4 KiB
    data     tensors back to back, larger elements first (so each is aligned to its element), then plain data

A tensor is named by its key where the file holds the whole of it, else `key@0:128,0:64`. dtypes that safetensors
lacks are stored as U8; the receipt has the true dtype. Plain data (JSON text) lies in U8 `object/<component>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import xxhash

from ckptrt.errors import UsageError
from ckptrt.storage.records import ObjectRecord, ShardRecord, TensorRecord

__all__ = [
    "CHUNK_BYTES", "DIGEST_DIGITS", "PAGE_BYTES", "ShardLayout", "TensorSpec", "bad_chunks", "chunk_digests",
    "item_bytes", "lay_out", "tensor_bytes", "tensor_name",
]  # fmt: skip

PAGE_BYTES = 4096
CHUNK_BYTES = 4 << 20
DIGEST_DIGITS = 16  # of a chunk's xxh3-64, in hexadecimal

# dtype (torch's name) -> bytes of an element, safetensors' name for it or None
_DTYPES: dict[str, tuple[int, str | None]] = {
    "complex128": (16, None),
    "float64": (8, "F64"), "int64": (8, "I64"), "uint64": (8, "U64"), "complex64": (8, None),
    "float32": (4, "F32"), "int32": (4, "I32"), "uint32": (4, "U32"), "complex32": (4, None),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "int16": (2, "I16"), "uint16": (2, "U16"),
    "int8": (1, "I8"), "uint8": (1, "U8"), "bool": (1, "BOOL"),
    "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, None), "float8_e5m2fnuz": (1, None), "float8_e8m0fnu": (1, None),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One region to be stored: `sizes` elements at `offsets` of a tensor of global `shape`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Where everything lies in a shard file. `header` holds the file's bytes up to the data."""

    header: bytes
    tensors: tuple[TensorRecord, ...]
    order: tuple[int, ...]  # tensors[i] is the spec number order[i]
    objects: tuple[ObjectRecord, ...]
    size_bytes: int


def item_bytes(dtype: str) -> int:
    """Bytes of one element; UsageError for a dtype that can't be stored."""
    try:
        return _DTYPES[dtype][0]
    except KeyError:
        raise UsageError(
            f"dtype {dtype} can't be stored", hint=f"convert it to one of: {', '.join(sorted(_DTYPES))}"
        ) from None


def tensor_bytes(record: TensorRecord) -> int:
    return prod(record.sizes) * item_bytes(record.dtype)


def tensor_name(key: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The tensor's name in the safetensors header."""
    if sizes == shape:
        return key
    return key + "@" + ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))


def lay_out(rank: int, specs: Sequence[TensorSpec], objects: Sequence[tuple[str, int]]) -> ShardLayout:
    """Place tensors and plain data in a shard file.

    objects: (component, bytes of its JSON text). Raises UsageError if two things would have one name.
    """
    order = sorted(range(len(specs)), key=lambda i: -item_bytes(specs[i].dtype))
    header: dict[str, object] = {"__metadata__": {"ckptrt": "1.0", "rank": str(rank)}}
    position = 0
    placed: list[tuple[TensorSpec, int]] = []
    for index in order:
        spec = specs[index]
        width, stored = _DTYPES[spec.dtype]
        size = prod(spec.sizes) * width
        shape = list(spec.sizes) if stored else [size]
        name = tensor_name(spec.key, spec.shape, spec.offsets, spec.sizes)
        _put(header, name, {"dtype": stored or "U8", "shape": shape, "data_offsets": [position, position + size]})
        placed.append((spec, position))
        position += size
    data_end = position
    for component, size in objects:
        entry = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        _put(header, f"object/{component}", entry)
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    start = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    head = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    records = tuple(
        TensorRecord(s.key, s.dtype, s.shape, s.offsets, s.sizes, start + at, s.rank_only) for s, at in placed
    )
    return ShardLayout(
        header=head,
        tensors=records,
        order=tuple(order),
        objects=_object_records(objects, start + data_end),
        size_bytes=start + position,
    )


def _put(header: dict[str, object], name: str, entry: object) -> None:
    if name in header:
        raise UsageError(f"two parts of the state have the name {name!r}", hint="rename one of them")
    header[name] = entry


def _object_records(objects: Sequence[tuple[str, int]], start: int) -> tuple[ObjectRecord, ...]:
    records = []
    for component, size in objects:
        records.append(ObjectRecord(component, start, size))
        start += size
    return tuple(records)


def chunk_digests(data: memoryview) -> str:
    """xxh3-64 of each 4 MiB of `data` (the last may be shorter), 16 hex digits each, joined."""
    pieces = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    return "".join(xxhash.xxh3_64_hexdigest(piece) for piece in pieces)


def bad_chunks(shard: ShardRecord, first: int, data: memoryview) -> list[int]:
    """Numbers of the chunks in `data` that differ from their digests.

    data: whole chunks of the shard file, from number `first` on. It stays the caller's.
    """
    bad = []
    for number, at in enumerate(range(0, len(data), shard.chunk_bytes), start=first):
        with data[at : at + shard.chunk_bytes] as chunk:
            if xxhash.xxh3_64_hexdigest(chunk) != shard.chunks[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]:
                bad.append(number)
    return bad
