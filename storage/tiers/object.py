"""An S3 bucket, or anything that speaks S3, by way of fsspec's s3fs.

Every request goes through s3fs' own door to botocore (`call_s3`), since its file interface loses what a checkpoint
needs: it replaces an empty object even in mode "x", leaves a refused multipart upload behind, answers listings from
a cache, and says nothing of objects that a bulk delete didn't delete.
"""

from __future__ import annotations

import io
import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import xxhash

from ckptrt.errors import Error, ExistsError, NotFoundError, StorageError, TransientError, UsageError
from ckptrt.storage.tiers.base import Entry
from ckptrt.storage.tiers.checks import CountedPieces, check_range, short_object
from ckptrt.storage.tiers.names import check_name, check_prefix, join_url
from ckptrt.storage.tiers.oserrors import exists_error, not_found_error
from ckptrt.storage.tiers.s3client import THREADS, S3Client
from ckptrt.storage.tiers.s3errors import from_s3_error, s3_code, s3_status
from ckptrt.storage.tiers.upload import MultipartUpload, part_size_bytes

__all__ = ["ObjectTier"]

_log = logging.getLogger(__name__)

_RANGE_BYTES = 8 << 20
_DELETES_MAX = 1000  # in one request, by S3's own limit
_WRITER = "ckptrt-writer"  # metadata of every object: which attempt wrote it


class ObjectTier:
    """Objects below s3://bucket/prefix. Contacts nothing before the first call.

    A create is a conditional put (`If-None-Match: *`), and so is the end of a multipart upload. Every object carries
    in its metadata a number drawn for the attempt that wrote it. When an answer is lost (time-out, reset, 5xx) the
    object is looked up: it is there and carries our number, so we won, or another's, so we lost, even if both wrote
    equal bytes. If it is not there, the request may still arrive: TransientError, and the number is remembered, so
    that a repeated create with the same bytes through this instance knows its own earlier attempt. Of writers of one
    name exactly one is told that it won, unless one dies before it can ask.
    """

    resolves_creates = True

    def __init__(self, url: str, **storage_options: Any) -> None:
        protocol, _, rest = url.partition("://")
        if protocol not in ("s3", "s3a"):
            raise UsageError(
                f"{url} can't be written to: ckptrt knows of no atomic create-only write through {protocol}://",
                hint="use a directory, or s3:// with an endpoint_url that speaks S3",
            )
        bucket, _, root = rest.strip("/").partition("/")
        if not bucket:
            raise UsageError(f"{url!r} names no bucket", hint="write s3://bucket/run")
        self.url = f"s3://{bucket}/{root}".rstrip("/")
        self._root = f"{root}/" if root else ""
        self._client = S3Client(self.url, bucket, self._root, storage_options)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptrt-s3")
        self._lock = threading.Lock()
        self._unsure: dict[tuple[str, str], set[str]] = {}  # (name, digest) -> writers of attempts without an answer

    # --- writing

    def create(self, name: str, data: bytes) -> None:
        check_name(self.url, name)
        self._put(name, bytes(data))

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        check_name(self.url, name)
        counted = CountedPieces(pieces, size_bytes, self.url, name)
        if size_bytes <= part_size_bytes(size_bytes):
            data = bytearray()
            for piece in counted:
                data += piece
            self._put(name, bytes(data))
            return
        if not self._unsure and self._find(name) is not None:
            raise exists_error(self.url, name)  # before many bytes are sent for nothing
        self._write_parts(name, counted, size_bytes)

    def _put(self, name: str, data: bytes) -> None:
        writer = secrets.token_hex(16)
        try:
            self._client.call(
                "put_object", name, "write", Body=io.BytesIO(data), IfNoneMatch="*", Metadata={_WRITER: writer}
            )
        except (TransientError, ExistsError) as error:
            self._resolve(name, writer, xxhash.xxh3_128_hexdigest(data), error)

    def _write_parts(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        writer = secrets.token_hex(16)
        digest = xxhash.xxh3_128()
        upload = MultipartUpload(self._client, self._pool, name, {_WRITER: writer})
        try:
            upload.send(_digested(pieces, digest), size_bytes)
            try:
                upload.complete()
            except (TransientError, ExistsError) as error:
                self._resolve(name, writer, digest.hexdigest(), error)
                if isinstance(error, ExistsError):
                    upload.abort()  # an earlier attempt had won, and this one's parts are still there
        except BaseException:
            upload.abort()
            raise

    def _resolve(self, name: str, writer: str, digest: str, error: StorageError) -> None:
        """Return if this attempt, or an earlier one of ours with these bytes, did write the object; else raise."""
        key = (name, digest)
        try:
            found = self._find(name)
        except TransientError:
            found = None
        if found is not None:
            with self._lock:
                ours = self._unsure.pop(key, set()) | {writer}
            if _writer_of(found) in ours:
                return
            raise exists_error(self.url, name) from error
        with self._lock:
            self._unsure.setdefault(key, set()).add(writer)
        raise TransientError(
            f"can't tell whether {join_url(self.url, name)} was written: {error.what}",
            safe="if it was, it is whole; what was stored before is untouched",
            hint="create it again with the same bytes, or read it to see",
        ) from error

    # --- reading

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        check_range(self.url, name, start, size_bytes)
        if size_bytes is None and start == 0:
            return self._client.get(check_name(self.url, name))
        if size_bytes is None or size_bytes == 0:
            actual_bytes = self.size(name)
            end = max(start, actual_bytes) if size_bytes is None else start
            if max(start, end) > actual_bytes:
                raise short_object(self.url, name, start, end, actual_bytes)
            size_bytes = end - start
        return self._get_range(name, start, size_bytes) if size_bytes else b""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        check_range(self.url, name, start, out.nbytes)
        with out.cast("B") as flat:
            if not flat.nbytes:
                self.read(name, start, 0)
                return
            ranges = [(at, min(_RANGE_BYTES, flat.nbytes - at)) for at in range(0, flat.nbytes, _RANGE_BYTES)]
            if len(ranges) == 1:
                flat[:] = self._get_range(name, start, flat.nbytes)
                return
            futures = [self._pool.submit(self._get_range, name, start + at, size) for at, size in ranges]
            try:
                for (at, size), future in zip(ranges, futures, strict=True):
                    flat[at : at + size] = future.result()
            finally:
                for future in futures:
                    future.cancel()

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(dict.fromkeys(check_name(self.url, name) for name in names))
        bodies = self._pool.map(self._get_if_there, wanted)
        return {name: body for name, body in zip(wanted, bodies, strict=True) if body is not None}

    def _get_if_there(self, name: str) -> bytes | None:
        try:
            return self._client.get(name)
        except NotFoundError as error:
            if error.__cause__ is not None and s3_code(error.__cause__) == "NoSuchBucket":
                raise
            return None

    def _get_range(self, name: str, start: int, size_bytes: int) -> bytes:
        try:
            data = self._client.get(check_name(self.url, name), start=start, end=start + size_bytes)
        except StorageError as error:
            if error.__cause__ is None or s3_status(error.__cause__) != 416:
                raise
            raise short_object(self.url, name, start, start + size_bytes, self.size(name)) from error
        if len(data) == size_bytes:
            return data
        actual_bytes = self.size(name)
        if actual_bytes >= start + size_bytes:
            raise TransientError(
                f"{join_url(self.url, name)}: {len(data)} bytes came from offset {start} instead of {size_bytes}",
                safe="the object was only read",
                hint="the answer was cut short; trying again is right",
            )
        raise short_object(self.url, name, start, start + size_bytes, actual_bytes)

    def size(self, name: str) -> int:
        found = self._find(check_name(self.url, name))
        if found is None:
            raise not_found_error(self.url, name)
        return int(found["ContentLength"])

    def _find(self, name: str) -> dict[str, Any] | None:
        """What the store says of an object, without its bytes."""
        try:
            return self._client.call("head_object", name, "look up")
        except NotFoundError:
            return None

    def list(self, prefix: str) -> list[Entry]:
        check_prefix(self.url, prefix)
        base = self._root + prefix
        entries: list[Entry] = []
        for page in self._pages(prefix, "list", Delimiter="/"):
            folders = (str(item["Prefix"])[len(self._root) :] for item in page.get("CommonPrefixes", []))
            entries += [Entry(name=folder) for folder in folders]
            for item in page.get("Contents", []):
                if item["Key"] != base:  # some tools mark a folder by an empty object of its name
                    entries.append(_entry(item, self._root))
        return sorted(entries, key=lambda entry: entry.name)

    def _pages(self, prefix: str, doing: str, **kwargs: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self._client.call_bucket(
                "list_objects_v2", prefix, doing, Prefix=self._root + prefix, **kwargs, **more
            )
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    # --- deleting

    def delete(self, name: str) -> None:
        check_name(self.url, name)
        with suppress(NotFoundError):
            self._client.call("delete_object", name, "delete")

    def delete_prefix(self, prefix: str) -> None:
        """Remove everything below a prefix, unfinished uploads included."""
        check_prefix(self.url, prefix, may_be_empty=False)
        self._abort_uploads(prefix)
        found = [{"Key": item["Key"]} for page in self._pages(prefix, "delete") for item in page.get("Contents", [])]
        for at in range(0, len(found), _DELETES_MAX):
            wanted = {"Objects": found[at : at + _DELETES_MAX], "Quiet": True}
            answer = self._client.call_bucket("delete_objects", prefix, "delete", Delete=wanted)
            for fault in answer.get("Errors", []):
                if fault.get("Code") != "NoSuchKey":
                    raise self._undeleted(fault)
        self._drop_folders(prefix)

    def _drop_folders(self, prefix: str) -> None:
        """Delete what stays listed on stores that keep real folders below (SeaweedFS); elsewhere nothing does."""
        for page in self._pages(prefix, "delete", Delimiter="/"):
            for item in page.get("CommonPrefixes", []):
                self._drop_folders(str(item["Prefix"])[len(self._root) :])
            if page.get("CommonPrefixes") or page.get("Contents"):
                self._client.call("delete_object", prefix, "delete")  # only if it is empty, by that store's rule

    def _undeleted(self, fault: dict[str, Any]) -> Error:
        """The error for one object that a bulk delete didn't delete."""
        cause = StorageError(str(fault.get("Message", "")))
        cause.response = {"Error": fault}  # type: ignore[attr-defined]
        return from_s3_error(cause, self.url, str(fault.get("Key", ""))[len(self._root) :], "delete")

    def settle(self, prefix: str) -> None:
        """An object is durable as soon as anybody can see it."""

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        """End uploads that were begun before then and never completed."""
        check_prefix(self.url, prefix)
        found = []
        with self._uploads_are_optional(prefix):
            for upload in self._uploads(prefix):
                name, begun_s = str(upload["Key"])[len(self._root) :], upload["Initiated"].timestamp()
                if "/" in name[len(prefix) :] or begun_s >= before_s:
                    continue
                found.append(Entry(name=name, modified_s=begun_s))
                if not dry_run:
                    self._abort(name, upload["UploadId"])
        return found

    def _abort_uploads(self, prefix: str) -> None:
        with self._uploads_are_optional(prefix):
            for upload in self._uploads(prefix):
                self._abort(str(upload["Key"])[len(self._root) :], upload["UploadId"])

    def _uploads(self, prefix: str) -> Sequence[dict[str, Any]]:
        found = self._client.call_bucket(
            "list_multipart_uploads", prefix, "list the uploads of", Prefix=self._root + prefix
        )
        uploads: Sequence[dict[str, Any]] = found.get("Uploads", [])
        return uploads

    def _abort(self, name: str, upload_id: str) -> None:
        with suppress(NotFoundError):
            self._client.call("abort_multipart_upload", name, "abort the upload of", UploadId=upload_id)

    @contextmanager
    def _uploads_are_optional(self, prefix: str) -> Iterator[None]:
        try:
            yield
        except TransientError:
            raise
        except StorageError as error:  # not every store or key allows this; the objects can be deleted all the same
            _log.warning("unfinished uploads not removed prefix=%s error=%s", join_url(self.url, prefix), error.what)

    # --- the store itself

    def probe(self) -> None:
        """Prove that of several creates of one name one wins, in one request and in parts; StorageError if not.

        Some stores accept `If-None-Match: *` and overwrite all the same: nothing could be committed there.
        """
        name = f".probe-{secrets.token_hex(8)}"
        try:
            racers = list(self._pool.map(lambda number: self._probe_put(name, number), range(2)))
            if racers.count(True) != 1 or self._probe_put(name, 2) or self._probe_parts(name):
                raise StorageError(
                    f"the store behind {self.url} let a second create replace an object: it ignores If-None-Match",
                    safe="nothing of yours was written",
                    hint="use a store with conditional writes (AWS S3, MinIO, SeaweedFS from 4.48), or a directory",
                )
        finally:
            self.delete(name)

    def _probe_put(self, name: str, number: int) -> bool:
        try:
            self.create(name, b"%d" % number)
        except ExistsError:
            return False
        return True

    def _probe_parts(self, name: str) -> bool:
        try:
            self._write_parts(name, [memoryview(b"parts")], 5)
        except ExistsError:
            return False
        return True

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()


def _entry(item: dict[str, Any], root: str) -> Entry:
    modified: datetime = item["LastModified"]
    return Entry(name=str(item["Key"])[len(root) :], size_bytes=int(item["Size"]), modified_s=modified.timestamp())


def _writer_of(found: dict[str, Any]) -> str:
    """The number of the attempt that wrote an object; empty if another program did."""
    return str(found.get("Metadata", {}).get(_WRITER, ""))


def _digested(pieces: Iterable[memoryview], digest: xxhash.xxh3_128) -> Iterator[memoryview]:
    for piece in pieces:
        digest.update(piece)
        yield piece
