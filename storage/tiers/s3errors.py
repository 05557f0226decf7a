"""From what s3fs and botocore raise to an error that says what, where, what is safe and what to do."""

from __future__ import annotations

from typing import Any

from ckptrt.errors import (
    AccessError,
    ExistsError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    TransientError,
    UsageError,
)
from ckptrt.storage.tiers.names import join_url

__all__ = ["from_s3_error", "s3_code", "s3_status"]

_ACCESS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "XMinioAdminBucketQuotaExceeded"}
_BUSY = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling",
    "ThrottlingException", "RequestThrottled", "TooManyRequests", "OperationAborted", "ConditionalRequestConflict",
    "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "503", "500",
}  # fmt: skip
_UNREACHABLE = {
    "HTTPClientError", "ConnectionError", "ResponseParserError", "IncompleteReadError", "ClientPayloadError",
    "ServerDisconnectedError", "ClientConnectionError", "TimeoutError",
}  # fmt: skip
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")
_WRONG_CALL = ("ParamValidationError", "InvalidRegionError", "NoRegionError")

_SAFE = "what was stored before is untouched"


def s3_code(error: BaseException) -> str:
    """The store's own code, such as NoSuchKey; empty if no answer came from a store."""
    response = _response(error)
    return str(response.get("Error", {}).get("Code", "")) if response else ""


def s3_status(error: BaseException) -> int:
    """The HTTP status of the store's answer, or 0."""
    response = _response(error)
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if response else 0


def from_s3_error(error: BaseException, url: str, name: str, doing: str) -> StorageError | UsageError:
    """The ckptrt error for whatever s3fs raised while `doing` (such as 'write') the object `name`."""
    code, status = s3_code(error), s3_status(error)
    kind, hint = _from_answer(code, status) if (code or status) else _from_client(error)
    label = f"{code} ({status})" if code or status else type(error).__name__
    text = str(error).strip() or "no answer in time"
    return kind(f"can't {doing} {join_url(url, name)}: {label}: {text}", safe=_SAFE, hint=hint)


def _response(error: BaseException) -> dict[str, dict[str, Any]] | None:
    """The answer that botocore parsed, from the error itself or from what it was translated from."""
    at: BaseException | None = error
    while at is not None:
        response = getattr(at, "response", None)
        if isinstance(response, dict):
            return response
        at = at.__cause__
    return None


def _from_answer(code: str, status: int) -> tuple[type[StorageError], str]:
    if code in _FULL or status == 507:
        return NoSpaceError, "raise the quota, prune old checkpoints, or point the run elsewhere"
    if code == "RequestTimeTooSkewed":
        return AccessError, "set this machine's clock: it is too far from the store's"
    if status == 501 or code == "NotImplemented":
        return StorageError, "this store lacks an operation that ckptrt needs: use another store"
    if code in _BUSY or status in (408, 409, 429) or status >= 500:
        return TransientError, "the store is busy or failing; trying again is right"
    if code in _ACCESS or status in (401, 403):
        return AccessError, "check the credentials, and that they may read, write, list and delete there"
    if code == "NoSuchBucket":
        return NotFoundError, "create the bucket first, or check its name and the endpoint"
    if status == 404 or code.startswith("NoSuch"):
        return NotFoundError, "list what is there, or check the name"
    if code == "PreconditionFailed" or status == 412:
        return ExistsError, "choose another name; a stored object is never replaced"
    return StorageError, "check the endpoint, the region and the storage options"


def _from_client(error: BaseException) -> tuple[type[StorageError] | type[UsageError], str]:
    """By class names along the inheritance, so that botocore and aiohttp need not be imported for it."""
    classes = {base.__name__ for base in type(error).__mro__}
    if classes.intersection(_NO_CREDENTIALS):
        return AccessError, "give key and secret as storage options, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if classes.intersection(_WRONG_CALL):
        return UsageError, "check the url and the storage options"
    if classes.intersection(_UNREACHABLE):
        return TransientError, "check that the endpoint is up and can be reached from here"
    if isinstance(error, PermissionError):
        return AccessError, "check the credentials, and that they may read, write, list and delete there"
    return StorageError, "check the endpoint, the region and the storage options"
