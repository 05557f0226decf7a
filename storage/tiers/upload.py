"""One multipart upload, a few parts in flight, which appears as a whole or not at all."""

from __future__ import annotations

import io
import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from typing import Any

from ckptrt.errors import Error, NotFoundError
from ckptrt.storage.tiers.names import join_url
from ckptrt.storage.tiers.s3client import S3Client

__all__ = ["MultipartUpload", "part_size_bytes"]

_log = logging.getLogger(__name__)

_PART_MIN_BYTES = 8 << 20  # S3 asks for 5 MiB; fewer requests cost less
_CHECKSUMS = ("ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256")
_PARTS_MAX = 9_000  # S3 allows 10,000
_IN_FLIGHT_MAX = 4
_BUFFERED_MAX_BYTES = 256 << 20


def part_size_bytes(size_bytes: int) -> int:
    """Bytes of every part but the last, so that any size fits into the number of parts allowed."""
    return max(_PART_MIN_BYTES, -(-size_bytes // _PARTS_MAX))


class MultipartUpload:
    """Streams pieces into parts. Bytes are copied, so a piece may be reused as soon as the next is asked for."""

    def __init__(self, client: S3Client, pool: Executor, name: str, metadata: dict[str, str]) -> None:
        self._client = client
        self._pool = pool
        self._name = name
        started = client.call("create_multipart_upload", name, "start the upload of", Metadata=metadata)
        self._id = started["UploadId"]
        self._futures: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._numbers = 0

    def send(self, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Upload everything; nothing is to be seen under the name yet."""
        part_bytes = part_size_bytes(size_bytes)
        in_flight = max(1, min(_IN_FLIGHT_MAX, _BUFFERED_MAX_BYTES // part_bytes))
        part = io.BytesIO()
        for piece in pieces:
            done = 0
            while done < piece.nbytes:
                done += part.write(piece[done : done + part_bytes - part.tell()])
                if part.tell() == part_bytes:
                    self._submit(part, in_flight)
                    part = io.BytesIO()
        if part.tell():
            self._submit(part, in_flight)
        self._drain(0)

    def _submit(self, part: io.BytesIO, in_flight: int) -> None:
        self._drain(in_flight - 1)
        part.seek(0)
        self._numbers += 1
        self._futures.append(self._pool.submit(self._put_part, self._numbers, part))

    def _drain(self, leave: int) -> None:
        while len(self._futures) > leave:
            self._parts.append(self._futures.popleft().result())

    def _put_part(self, number: int, part: io.BytesIO) -> dict[str, Any]:
        answer = self._client.call("upload_part", self._name, "write", UploadId=self._id, PartNumber=number, Body=part)
        checksums = {
            key: value for key, value in answer.items() if key.startswith("Checksum") and key != "ChecksumType"
        }
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def complete(self) -> None:
        """Make the object appear, unless its name is taken (ExistsError)."""
        parts = {"Parts": self._parts}
        self._client.call(
            "complete_multipart_upload", self._name, "write", UploadId=self._id, MultipartUpload=parts, IfNoneMatch="*"
        )

    def abort(self) -> None:
        """Give the parts back. A failure is logged: delete_prefix or the bucket's lifecycle rule removes them later."""
        for future in self._futures:
            future.cancel()
        for future in self._futures:
            if not future.cancelled():
                future.exception()  # a part that lands after the abort would stay
        try:
            self._client.call("abort_multipart_upload", self._name, "abort the upload of", UploadId=self._id)
        except NotFoundError:
            pass  # it was completed or aborted after all
        except Error as error:
            where = join_url(self._client.url, self._name)
            _log.warning("upload left behind object=%s upload_id=%s error=%s", where, self._id, error.what)
