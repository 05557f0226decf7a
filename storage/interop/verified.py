"""Ranges of a checkpoint's shard files, each chunk compared with its digest; what was read last is kept."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from ckptrt.errors import CorruptError, NotFoundError
from ckptrt.storage.layout import DATA
from ckptrt.storage.records import ShardRecord
from ckptrt.storage.shardfile import bad_chunks
from ckptrt.storage.tiers import Tier

__all__ = ["Stretch", "VerifiedFiles"]

_KEPT_BYTES = 64 << 20
_KEPT_MAX_BYTES = 1 << 30
_READERS = 4
_UNTOUCHED = "the checkpoint was only read, and the output is as it was"
_LOOK = "`ckptrt verify --read-data` says what is hit, and the newest good step"
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
        kept = self._kept.get((shard.name, start // chunk))
        if kept is not None and start % chunk + len(out) <= len(kept):  # many small tensors lie in one chunk
            out[:] = kept[start % chunk : start % chunk + len(out)]
            return
        step = max(1, min(_READERS, self._kept_max)) * chunk
        for low in range(start // chunk * chunk, end, step):
            numbers = range(low // chunk, -(-min(low + step, end) // chunk))
            found = {number: self._kept.get((shard.name, number)) for number in numbers}
            missing = [number for number, data in found.items() if data is None]
            loaded = self._pool.map(lambda number: self._load(shard, number, start, out), missing)
            for number, data in {**found, **dict(zip(missing, loaded, strict=True))}.items():
                if data is None:
                    continue  # all of it is in `out` already
                at = number * chunk
                first, last = max(at, start), min(at + len(data), end)
                out[first - start : last - start] = data[first - at : last - at]
                self._keep((shard.name, number), data)

    def _keep(self, key: _Key, data: memoryview) -> None:
        self._kept[key] = data
        self._kept.move_to_end(key)
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)

    def _load(self, shard: ShardRecord, number: int, start: int, out: memoryview) -> memoryview | None:
        """A chunk of the file; None if it is wholly in `out`, which holds what lies from byte `start` on."""
        at = number * shard.chunk_bytes
        size_bytes = min(shard.chunk_bytes, shard.size_bytes - at)
        if size_bytes <= 0:
            raise CorruptError(f"{DATA}{shard.name} is damaged: its receipt names bytes beyond its end")
        is_inside = start <= at and at + size_bytes <= start + len(out)
        data = out[at - start : at - start + size_bytes] if is_inside else memoryview(bytearray(size_bytes))
        try:
            self._tier.read_into(DATA + shard.name, at, data)
        except NotFoundError as error:
            raise CorruptError(error.what, safe=_UNTOUCHED, hint=_LOOK) from None
        if bad_chunks(shard, number, data):
            raise CorruptError(
                f"{self._tier.url}/{DATA}{shard.name} is damaged: bytes {at} to {at + size_bytes - 1} don't have their "
                "digest",
                safe=_UNTOUCHED,
                hint=_LOOK,
            )
        return None if is_inside else data


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
