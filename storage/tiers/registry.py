"""From a path or an url to the tier that keeps its bytes. Loads no client library before a url asks for it."""

from __future__ import annotations

import threading

from ckptrt.errors import UsageError
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryBucket, MemoryTier

__all__ = ["open_tier"]

_buckets: dict[str, MemoryBucket] = {}
_buckets_lock = threading.Lock()


def open_tier(url: str, **storage_options: object) -> Tier:
    """Open a run's place: a path, file:///path, memory://name/run, s3://bucket/run; others of fsspec to read only.

    `storage_options` are those of the fsspec file system of that protocol (for s3: key, secret, endpoint_url ...);
    what isn't given comes from the environment, as for fsspec (FSSPEC_S3_*) and botocore (AWS_*). Nothing is
    contacted yet. Every tier of one memory:// bucket in this process sees the same objects.
    """
    protocol, found, rest = url.partition("://")
    if not found or protocol == "file":
        if storage_options:
            raise UsageError(f"a local directory takes no storage options, but {url} got {sorted(storage_options)}")
        return LocalTier(url)
    if protocol == "memory":
        return _open_memory(rest)
    if protocol not in ("s3", "s3a"):
        from ckptrt.storage.tiers.readonly import ReadOnlyTier

        return ReadOnlyTier(url, **storage_options)
    from ckptrt.storage.tiers.object import ObjectTier
    from ckptrt.storage.tiers.retry import RetryTier

    return RetryTier(ObjectTier(url, **storage_options))


def _open_memory(rest: str) -> MemoryTier:
    bucket_name, _, root = rest.strip("/").partition("/")
    with _buckets_lock:
        bucket = _buckets.setdefault(bucket_name, MemoryBucket())
    url = "memory://" + "/".join(part for part in (bucket_name, root) if part)
    return MemoryTier(url, bucket=bucket, root=f"{root}/" if root else "")
