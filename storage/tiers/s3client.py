"""The requests that ObjectTier makes, by way of s3fs: options, time-outs, and errors in ckptrt's words."""

from __future__ import annotations

import copy
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


_SLOWEST_BYTES_PER_S = 256 << 10  # a body that moves more slowly than this is taken for stuck
_MAY_TAKE_LONG = {"complete_multipart_upload"}  # S3 joins many parts for minutes, and sends blanks meanwhile


class S3Client:
    """One connection pool, made at the first request. Objects are named as in the tier: relative to `root`."""

    def __init__(self, url: str, bucket: str, root: str, storage_options: dict[str, Any]) -> None:
        self.url = url
        self.root = root
        self._bucket = bucket
        self._options = storage_options
        self._fs: Any = None
        self._idle_s = 0.0
        self._lock = threading.Lock()

    def call(self, method: str, name: str, doing: str, **kwargs: Any) -> dict[str, Any]:
        """One operation on an object, by its botocore name."""
        return self.call_bucket(method, name, doing, Key=self.root + name, **kwargs)

    def call_bucket(self, method: str, name: str, doing: str, **kwargs: Any) -> dict[str, Any]:
        """One operation on the bucket; `name` is for the error's text only."""
        with self._mapped(name, doing):
            fs = self._connect()
            body = kwargs.get("Body")
            timeout_s = None if method in _MAY_TAKE_LONG else self._patience_s(len(body.getbuffer()) if body else 0)
            answer: dict[str, Any] = fs.call_s3(method, Bucket=self._bucket, timeout=timeout_s, **kwargs)
        return answer

    def get(self, name: str, **limits: int) -> bytes:
        """An object's bytes (or those from `start` to `end`) in one request; s3fs reads them on its event loop."""
        with self._mapped(name, "read"):
            fs = self._connect()
            path = f"{self._bucket}/{self.root}{name}"
            timeout_s = self._patience_s(limits["end"] - limits["start"]) if limits else None
            body: bytes = fs.cat_file(path, max_concurrency=1, timeout=timeout_s, **limits)
        return body

    def _patience_s(self, size_bytes: int) -> float:
        """How long a whole request may take.

        The HTTP client's own read time-out begins when a request is sent, so a server that accepts a connection and
        takes no body would be waited for without end.
        """
        return self._idle_s + size_bytes / _SLOWEST_BYTES_PER_S

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
        config = {**copy.deepcopy(_CONFIG), **given}  # botocore writes into what it is given
        self._idle_s = float(config["connect_timeout"]) + float(config["read_timeout"])
        options = {**self._options, "config_kwargs": config}
        fs = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
        fs.retries = 1  # of s3fs' own loop around every request
        return fs
