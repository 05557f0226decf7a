"""Ranges of a checkpoint's shard files, each chunk compared with its digest; what was read last is kept."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import xxhash

from ckptrt.errors import CorruptError, NotFoundError
from ckptrt.storage.layout import DATA
from ckptrt.storage.records import ShardRecord
from ckptrt.storage.tiers import Tier

__all__ = ["Stretch", "VerifiedFiles"]

_KEPT_BYTES = 64 << 20
_KEPT_MAX_BYTES = 1 << 30
_READERS = 4
_DIGEST_DIGITS = 16
_Key = tuple[str, int]  # shard file, number of a chunk


class VerifiedFiles:
    """Reads by whole chunks, several at a time. Neighbours in a tensor lie in one chunk of each rank's file, so a chunk
    of every file is kept, as far as that is reasonable. Not for use by several threads.
    """

    def __init__(self, tier: Tier, num_files: int, chunk_bytes: int) -> None:
        self._tier = tier
        self._kept_max = max(1, min(_KEPT_BYTES + num_files * chunk_bytes, _KEPT_MAX_BYTES) // max(1, chunk_bytes))
        self._kept: OrderedDict[_Key, memoryview] = OrderedDict()
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ckptrt-read")

    def close(self) -> None:
        self._pool.shutdown()
        self._kept.clear()

    def read_into(self, shard: ShardRecord, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of a shard file. CorruptError for a chunk that differs from its digest."""
        chunk = shard.chunk_bytes
        end = start + len(out)
        step = max(1, min(_READERS, self._kept_max)) * chunk
        for low in range(start // chunk * chunk, end, step):
            numbers = range(low // chunk, -(-min(low + step, end) // chunk))
            found = {number: self._kept.get((shard.name, number)) for number in numbers}
            missing = [number for number, data in found.items() if data is None]
            found.update(zip(missing, self._pool.map(lambda number: self._load(shard, number), missing), strict=True))
            for number, data in found.items():
                assert data is not None
                at = number * chunk
                first, last = max(at, start), min(at + len(data), end)
                out[first - start : last - start] = data[first - at : last - at]
                self._keep((shard.name, number), data)

    def _keep(self, key: _Key, data: memoryview) -> None:
        self._kept[key] = data
        self._kept.move_to_end(key)
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)

    def _load(self, shard: ShardRecord, number: int) -> memoryview:
        at = number * shard.chunk_bytes
        size_bytes = min(shard.chunk_bytes, shard.size_bytes - at)
        if size_bytes <= 0:
            raise CorruptError(f"{DATA}{shard.name} is damaged: its receipt names bytes beyond its end")
        data = memoryview(bytearray(size_bytes))
        try:
            self._tier.read_into(DATA + shard.name, at, data)
        except NotFoundError as error:
            raise CorruptError(error.what, hint=error.hint) from None
        expected = shard.chunks[number * _DIGEST_DIGITS : (number + 1) * _DIGEST_DIGITS]
        if xxhash.xxh3_64_hexdigest(data) != expected:
            raise CorruptError(
                f"{self._tier.url}/{DATA}{shard.name} is damaged: bytes {at} to {at + size_bytes - 1} don't have their "
                "digest",
                hint="`ckptrt verify --read-data` says what is hit, and the newest good step",
            )
        return data


class Stretch:
    """Bytes of one shard file, as a blob."""

    def __init__(self, files: VerifiedFiles, shard: ShardRecord, start: int, size_bytes: int) -> None:
        self._files = files
        self._shard = shard
        self._start = start
        self.size_bytes = size_bytes

    def read_into(self, start: int, out: memoryview) -> None:
        if len(out):
            self._files.read_into(self._shard, self._start + start, out)
