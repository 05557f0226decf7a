"""Any other place that fsspec can read, such as gs:// or az://: to look at and to load from, never to write to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from ckptrt.errors import AccessError, Error, NotFoundError, StorageError, TransientError, UsageError
from ckptrt.storage.tiers.base import Entry
from ckptrt.storage.tiers.checks import check_range, short_object
from ckptrt.storage.tiers.names import check_name, check_prefix, join_url
from ckptrt.storage.tiers.oserrors import not_found_error

__all__ = ["ReadOnlyTier"]


class ReadOnlyTier:
    """Reads by fsspec. A commit needs a create-only write that is known to be atomic, which fsspec promises nowhere."""

    def __init__(self, url: str, **storage_options: Any) -> None:
        import fsspec

        self.url = url.rstrip("/")
        protocol, _, _ = url.partition("://")
        try:
            self._fs = fsspec.filesystem(protocol, use_listings_cache=False, **storage_options)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"{url} can't be opened: {error}", hint="use a directory or s3://, or install what fsspec asks for"
            ) from error
        self._base = str(self._fs._strip_protocol(self.url)).rstrip("/")

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(self.url, name, start, size_bytes)
        actual_bytes = self.size(name)
        end = max(start, actual_bytes) if size_bytes is None else start + size_bytes
        if max(start, end) > actual_bytes:
            raise short_object(self.url, name, start, end, actual_bytes)
        if start == end:
            return b""
        with self._mapped(name, "read"):
            data: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
        if len(data) != end - start:
            raise short_object(self.url, name, start, end, start + len(data))
        return data

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with out.cast("B") as flat:
            flat[:] = self.read(name, start, flat.nbytes)

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in names:
            try:
                found[name] = self.read(name)
            except NotFoundError:
                continue
        return found

    def size(self, name: str) -> int:
        check_name(self.url, name)
        with self._mapped(name, "look up"):
            found = self._fs.info(self._path(name))
        if found["type"] != "file":
            raise not_found_error(self.url, name)
        return int(found["size"])

    def list(self, prefix: str) -> list[Entry]:
        folder = f"{self._base}/{check_prefix(self.url, prefix)}".rstrip("/")
        try:
            with self._mapped(prefix, "list"):
                found = self._fs.ls(folder, detail=True)
        except NotFoundError:
            return []
        entries = [_entry(item, prefix) for item in found if str(item["name"]).strip("/") != folder.strip("/")]
        return sorted(entries, key=lambda entry: entry.name)

    def create(self, name: str, data: bytes) -> None:
        self._refuse("written to")

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        self._refuse("written to")

    def delete(self, name: str) -> None:
        self._refuse("deleted from")

    def delete_prefix(self, prefix: str) -> None:
        self._refuse("deleted from")

    def settle(self, prefix: str) -> None:
        """Who only reads builds nothing on what is there."""

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        self._refuse("deleted from")

    def probe(self) -> None:
        """Nothing to prove."""

    def close(self) -> None:
        """The file system is fsspec's to close."""

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self.url} can't be {what}: ckptrt knows of no atomic create-only write there, so nobody could commit",
            safe="nothing was touched; what is there can be read",
            hint="use a directory, or s3:// with an endpoint_url that speaks S3",
        )

    @contextmanager
    def _mapped(self, name: str, doing: str) -> Iterator[None]:
        """Every backend raises errors of its own; the standard ones tell enough."""
        try:
            yield
        except Error:
            raise
        except FileNotFoundError as error:
            raise not_found_error(self.url, name) from error
        except Exception as error:
            kind: type[StorageError] = StorageError
            if isinstance(error, (ConnectionError, TimeoutError)):
                kind = TransientError
            elif isinstance(error, PermissionError):
                kind = AccessError
            text = f"{type(error).__name__}: {error}"
            raise kind(f"can't {doing} {join_url(self.url, name)}: {text}", hint="check the storage options") from error


def _entry(item: dict[str, Any], prefix: str) -> Entry:
    name = prefix + str(item["name"]).rstrip("/").rpartition("/")[2]
    if item["type"] == "directory":
        return Entry(name=f"{name}/")
    modified = next((item[key] for key in ("LastModified", "updated", "mtime", "created") if key in item), 0.0)
    modified_s = modified.timestamp() if isinstance(modified, datetime) else modified
    return Entry(
        name=name, size_bytes=int(item["size"]), modified_s=modified_s if isinstance(modified_s, float) else 0.0
    )
