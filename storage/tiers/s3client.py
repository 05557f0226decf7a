"""The requests that ObjectTier makes, by way of s3fs: options, time-outs, and errors in ckptrt's words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptrt.errors import Error, UsageError
from ckptrt.storage.tiers.s3errors import from_s3_error

__all__ = ["THREADS", "S3Client"]

THREADS = 8
_CONFIG: dict[str, Any] = {
    # Short, and one try: the retry wrapper counts and logs every attempt, and it alone knows which may be repeated.
    "connect_timeout": 3,
    "read_timeout": 10,
    "retries": {"total_max_attempts": 1},
    "max_pool_connections": 2 * THREADS,
}


class S3Client:
    """One connection pool, made at the first request. Objects are named as in the tier: relative to `root`."""

    def __init__(self, url: str, bucket: str, root: str, storage_options: dict[str, Any]) -> None:
        self.url = url
        self.root = root
        self._bucket = bucket
        self._options = storage_options
        self._fs: Any = None
        self._lock = threading.Lock()

    def call(self, method: str, name: str, doing: str, **kwargs: Any) -> dict[str, Any]:
        """One operation on an object, by its botocore name."""
        return self.call_bucket(method, name, doing, Key=self.root + name, **kwargs)

    def call_bucket(self, method: str, name: str, doing: str, **kwargs: Any) -> dict[str, Any]:
        """One operation on the bucket; `name` is for the error's text only."""
        with self._mapped(name, doing):
            answer: dict[str, Any] = self._connect().call_s3(method, Bucket=self._bucket, **kwargs)
        return answer

    def get(self, name: str, **limits: int) -> bytes:
        """An object's bytes (or those from `start` to `end`) in one request; s3fs reads them on its event loop."""
        with self._mapped(name, "read"):
            path = f"{self._bucket}/{self.root}{name}"
            body: bytes = self._connect().cat_file(path, max_concurrency=1, **limits)
        return body

    def close(self) -> None:
        with self._lock:
            fs, self._fs = self._fs, None
        creator = getattr(fs, "_s3creator", None)
        if creator is not None:
            fs.close_session(fs.loop, creator)

    @contextmanager
    def _mapped(self, name: str, doing: str) -> Iterator[None]:
        try:
            yield
        except Error:
            raise
        except Exception as error:
            raise from_s3_error(error, self.url, name, doing) from error

    def _connect(self) -> Any:
        with self._lock:
            if self._fs is None:
                self._fs = self._open()
            return self._fs

    def _open(self) -> Any:
        try:
            import fsspec.config
            import s3fs
        except ImportError as error:
            raise UsageError(f"{self.url} needs the package s3fs: {error}", hint="pip install s3fs") from error
        given = self._options.get("config_kwargs") or fsspec.config.conf.get("s3", {}).get("config_kwargs") or {}
        options = {**self._options, "config_kwargs": {**_CONFIG, **given}}
        fs = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
        fs.retries = 1  # of s3fs' own loop around every request
        return fs
