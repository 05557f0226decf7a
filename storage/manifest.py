"""The manifest: all that a checkpoint holds. Pure bytes in and out.

A file of zstd frames, one after another: first the head (a `manifest` record: step, incarnation, where each rank's
section lies), then one frame per rank with that rank's receipt, byte for byte. `zstd -dc` shows it as JSON lines.
The commit names the size and digest of the whole and of the head, the head those of each section, so that a rank
can read and verify its own part alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash
import zstandard

from ckptrt.errors import CorruptError, PersistError
from ckptrt.storage.records import (
    BorrowedFile,
    ManifestHead,
    ManifestRef,
    ReceiptOutline,
    ReceiptRecord,
    Section,
    seal,
    unseal,
)
from ckptrt.storage.shardfile import tensor_bytes

__all__ = ["borrowed_files", "build", "open_head", "section_bytes"]

# A frame may claim any size, so it is bounded by its own: large receipts shrink to a twentieth, if their names are very
# regular to a fiftieth. Small ones may be anything: the digests of a file of zeros shrink to nothing.
_EXPANSION_MAX = 512
_EXPANDED_MIN_BYTES = 64 << 20


def build(
    step: int, incarnation: int, receipts: Mapping[int, bytes], records: Mapping[int, ReceiptRecord]
) -> tuple[bytes, ManifestHead, ManifestRef]:
    """The manifest file made of every rank's sealed receipt, its head, and what the commit must say of it.

    receipts: rank -> bytes of its receipt record; ranks must be 0 to n-1. records: the same, decoded.
    """
    if sorted(receipts) != list(range(len(receipts))):
        raise ValueError(f"receipts must come from ranks 0 to {len(receipts) - 1}, not {sorted(receipts)}")
    compressor = zstandard.ZstdCompressor(level=1)
    frames: list[bytes] = []
    sections: list[Section] = []
    position = 0
    for rank in sorted(receipts):
        frame = compressor.compress(receipts[rank])
        if len(receipts[rank]) > _expanded_max(frame):
            raise PersistError(f"the receipt of rank {rank} is so repetitive that no reader would believe its size")
        digest, shard = xxhash.xxh3_128_hexdigest(frame), records[rank].shard
        borrowed = borrowed_files(records[rank])
        sections.append(Section(rank, position, len(frame), digest, shard.name, shard.size_bytes, borrowed))
        frames.append(frame)
        position += len(frame)
    head = ManifestHead(step=step, incarnation=incarnation, world_size=len(receipts), sections=tuple(sections))
    head_frame = compressor.compress(seal(head))
    data = b"".join([head_frame, *frames])
    reference = ManifestRef(
        size_bytes=len(data),
        xxh3=xxhash.xxh3_128_hexdigest(data),
        head_bytes=len(head_frame),
        head_xxh3=xxhash.xxh3_128_hexdigest(head_frame),
    )
    return data, head, reference


def borrowed_files(receipt: ReceiptRecord | ReceiptOutline) -> tuple[BorrowedFile, ...]:
    """What a manifest's head says of the older files that a rank borrows from."""
    return tuple(
        BorrowedFile(b.shard.name, b.shard.size_bytes, sum(tensor_bytes(tensor) for tensor in b.tensors))
        for b in receipt.borrowed
    )


def open_head(frame: bytes, reference: ManifestRef, where: str) -> ManifestHead:
    """The head from the manifest's first `head_bytes`, verified against the commit."""
    if len(frame) != reference.head_bytes or xxhash.xxh3_128_hexdigest(frame) != reference.head_xxh3:
        raise CorruptError(f"{where} is damaged: its head doesn't have the digest that the commit names")
    return unseal(ManifestHead, _expand(frame, where), where)


def section_bytes(frame: bytes, section: Section, where: str) -> bytes:
    """The bytes of one rank's receipt record, as the rank wrote them, from its frame; verified against the head."""
    if len(frame) != section.size_bytes or xxhash.xxh3_128_hexdigest(frame) != section.xxh3:
        raise CorruptError(f"{where} is damaged: the section of rank {section.rank} doesn't have its digest")
    return _expand(frame, where)


def _expanded_max(frame: bytes) -> int:
    return max(_EXPANDED_MIN_BYTES, _EXPANSION_MAX * len(frame))


def _expand(frame: bytes, where: str) -> bytes:
    try:
        size_bytes = zstandard.frame_content_size(frame)
        if not 0 <= size_bytes <= _expanded_max(frame):
            raise CorruptError(f"{where} is damaged: a frame claims {size_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where} is damaged: {error}") from None
