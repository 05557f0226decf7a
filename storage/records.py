r"""Small JSON records that prove themselves: run, fence, commit, receipt, manifest head. Pure.

A record is one line, written only in this form:

    {"ckptrt":"1.0","kind":"fence","xxh3":"<16 hex digits>","body":{...}}\n

The version stands first. The digest (xxh3-64) covers version, kind and the body's bytes; all the rest must equal
what a writer would have written, so any changed byte of the file is found. A newer major version is refused; a newer
minor one may add fields to a body, which older readers ignore.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import xxhash

from ckptrt.errors import CorruptError, VersionError

__all__ = [
    "VERSION", "BorrowedFile", "BorrowedRecord", "CommitRecord", "DigestRecord", "FenceRecord", "ManifestHead",
    "ManifestRef", "ObjectRecord", "Owner", "Parent", "PinRecord", "ReceiptOutline", "ReceiptRecord", "RunRecord",
    "Section", "ShardRecord", "TensorRecord", "seal", "unseal",
]  # fmt: skip

VERSION = (1, 0)

_HEAD = re.compile(rb'\{"ckptrt":"(\d{1,6})\.(\d{1,6})","kind":"([a-z]+)","xxh3":"([0-9a-f]{16})","body":')
_VERSION = re.compile(rb'\{"ckptrt":"(\d{1,6})\.(\d{1,6})"')


class Owner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who wrote a record, for people: where to look when two jobs meet.

    token: drawn by each process, so that two writers' records differ even where two containers give their processes
    equal names, pids and seconds.
    """

    host: str
    pid: int
    user: str = ""
    token: str = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    created_at: str
    made_by: str


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The step from which an incarnation goes on, and the incarnation that had reached it."""

    step: int
    incarnation: int


class FenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int
    parent: Parent | None
    world_size: int
    owner: Owner
    created_at: str


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit says of its manifest: sizes and xxh3-128 digests of the whole file and of its head frame."""

    size_bytes: int
    xxh3: str
    head_bytes: int
    head_xxh3: str


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`data` is the folder's name below data/. Sizes and counts are a summary for lists; the manifest holds.

    size_bytes: of all that the checkpoint holds; new_bytes: of the shard files that were written for it, the rest is
    borrowed. references: other folders below data/ that hold shard files of this checkpoint, so that none is removed
    too early. metrics: numbers of the training loop at this step, such as its loss.
    """

    step: int
    incarnation: int
    world_size: int
    data: str
    manifest: ManifestRef
    size_bytes: int
    num_tensors: int
    created_at: str
    made_by: str
    references: tuple[str, ...] = ()
    new_bytes: int = 0
    metrics: dict[str, float] = {}


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a checkpoint from being pruned; `reason` and `owner` are for people."""

    step: int
    incarnation: int
    reason: str
    owner: Owner
    created_at: str


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """One region of one tensor, `sizes` elements at `offsets` of the global `shape`, at byte `start` of the file.

    rank_only: the tensor belongs to the writing rank alone and isn't a part of something global.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    rank_only: bool = False


class ObjectRecord(msgspec.Struct, frozen=True, array_like=True):
    """A rank's plain data (JSON text, UTF-8), at byte `start` of its file."""

    key: str
    start: int
    size_bytes: int


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A shard file: its name below data/ (so that it may lie in an older checkpoint's folder) and its digests.

    `chunks` are the xxh3-64 digests of the file's pieces of `chunk_bytes`, 16 hex digits each, joined.
    """

    name: str
    size_bytes: int
    chunk_bytes: int
    chunks: str


class BorrowedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that haven't changed since an older checkpoint, and that one's shard file, where they still lie."""

    shard: ShardRecord
    tensors: tuple[TensorRecord, ...]


class DigestRecord(msgspec.Struct, frozen=True, array_like=True):
    """xxh3-128 of a region's bytes (32 hex digits), by which a later save knows that it hasn't changed."""

    key: str
    offsets: tuple[int, ...]
    xxh3: str


class ReceiptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank stored: its own file with `tensors` and `objects`, and what it `borrowed` from older files.

    digests: of the tensors that seldom change. metrics: numbers of the training loop at this step (rank 0 only).
    partial: it holds some components of a state only, and a restore leaves the others as they are.
    """

    rank: int
    world_size: int
    step: int
    incarnation: int
    shard: ShardRecord
    tensors: tuple[TensorRecord, ...]
    objects: tuple[ObjectRecord, ...]
    borrowed: tuple[BorrowedRecord, ...] = ()
    digests: tuple[DigestRecord, ...] = ()
    metrics: dict[str, float] = {}
    partial: bool = False

    def files(self) -> Iterator[tuple[ShardRecord, tuple[TensorRecord, ...]]]:
        """Each file that holds tensors of this rank, its own first, with what lies in it."""
        yield self.shard, self.tensors
        for borrowed in self.borrowed:
            yield borrowed.shard, borrowed.tensors

    def all_tensors(self) -> Iterator[TensorRecord]:
        """Every region that the rank holds a part in, its own and borrowed ones."""
        for _, tensors in self.files():
            yield from tensors


class ReceiptOutline(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt whose own tensors are still text, for who looks at a million of them one by one.

    That takes a quarter of the memory and less time than to decode them all at once; equal text is equal tensors.
    """

    rank: int
    world_size: int
    step: int
    incarnation: int
    shard: ShardRecord
    tensors: tuple[msgspec.Raw, ...]
    objects: tuple[ObjectRecord, ...]
    borrowed: tuple[BorrowedRecord, ...] = ()
    digests: tuple[DigestRecord, ...] = ()

    def files(self) -> Iterator[tuple[ShardRecord, Iterator[TensorRecord]]]:
        """As of a receipt; each tensor is decoded when it is asked for."""
        yield self.shard, map(self.decode, self.tensors)
        for borrowed in self.borrowed:
            yield borrowed.shard, iter(borrowed.tensors)

    def decode(self, tensor: msgspec.Raw) -> TensorRecord:
        try:
            return _TENSOR_DECODER.decode(tensor)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _damaged(f"the receipt of rank {self.rank} for step {self.step}", f"a tensor's {error}") from None


class BorrowedFile(msgspec.Struct, frozen=True, array_like=True):
    """An older checkpoint's shard file that a rank borrows from: name below data/, its bytes, bytes borrowed."""

    shard: str
    shard_bytes: int
    used_bytes: int


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's receipt lies in the manifest, counted from the end of the head frame; xxh3-128 of its frame.

    The shard file's name below data/ and its size stand here too, and the files that the rank borrows from: the head
    alone tells whether all files are there.
    """

    rank: int
    start: int
    size_bytes: int
    xxh3: str
    shard: str
    shard_bytes: int
    borrowed: tuple[BorrowedFile, ...] = ()

    def files(self) -> Iterator[tuple[str, int]]:
        """Name below data/ and size of every file that holds something of this rank, its own first."""
        yield self.shard, self.shard_bytes
        for file in self.borrowed:
            yield file.shard, file.shard_bytes

    @property
    def logical_bytes(self) -> int:
        """What the rank would have written without borrowing, but for the longer header of its file."""
        return self.shard_bytes + sum(file.used_bytes for file in self.borrowed)


class ManifestHead(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    incarnation: int
    world_size: int
    sections: tuple[Section, ...]


Record = RunRecord | FenceRecord | CommitRecord | ReceiptRecord | ManifestHead | PinRecord
_T = TypeVar("_T", RunRecord, FenceRecord, CommitRecord, ReceiptRecord, ReceiptOutline, ManifestHead, PinRecord)
_KINDS: dict[type, str] = {
    RunRecord: "run",
    FenceRecord: "fence",
    CommitRecord: "commit",
    ReceiptRecord: "receipt",
    ReceiptOutline: "receipt",
    ManifestHead: "manifest",
    PinRecord: "pin",
}
_ENCODER = msgspec.json.Encoder()
_TENSOR_DECODER = msgspec.json.Decoder(TensorRecord)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}


def seal(record: Record) -> bytes:
    """The bytes of a record's file."""
    body = _ENCODER.encode(record)
    return _head(f"{VERSION[0]}.{VERSION[1]}", _KINDS[type(record)], body) + body + b"}\n"


def unseal(kind: type[_T], data: bytes | memoryview, where: str) -> _T:
    """The record in `data`, whole and unchanged.

    where: the file's name, for messages. Raises VersionError for a newer major version and CorruptError for
    anything that `seal` did not write.
    """
    raw = bytes(data)
    version = _VERSION.match(raw)
    if version and int(version[1]) > VERSION[0] and not _is_ours_with_changed_version(raw):
        raise VersionError(
            f"{where} was written in format {int(version[1])}.{int(version[2])}; this one reads up to {VERSION[0]}.x",
            safe="nothing was read or changed",
            hint="install a newer ckptrt",
        )
    head = _HEAD.match(raw)
    if head is None or not raw.endswith(b"}\n"):
        raise _damaged(where, f"not a ckptrt {_KINDS[kind]} record")
    body = memoryview(raw)[head.end() : -2]  # no copy: a receipt of a million tensors is 100 MB
    if head[3].decode() != _KINDS[kind] or int(head[1]) != VERSION[0]:
        raise _damaged(
            where, f"a {head[3].decode()} record of format {int(head[1])} where a {_KINDS[kind]} was expected"
        )
    # Leading zeros or another minor spelling can't hide a flipped digit: what isn't canonical is damage.
    if head[0] != _head(f"{int(head[1])}.{int(head[2])}", head[3].decode(), body):
        raise _damaged(where, "its digest doesn't fit its contents")
    try:
        return _DECODERS[kind].decode(body)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(where, f"its fields are not those of a {_KINDS[kind]} ({error})") from None


def _is_ours_with_changed_version(raw: bytes) -> bool:
    """Whether a record that claims a newer major version is one of ours but for a damaged digit."""
    head = _HEAD.match(raw)
    if head is None or not raw.endswith(b"}\n"):
        return False
    ours = _head(f"{VERSION[0]}.{int(head[2])}", head[3].decode(), memoryview(raw)[head.end() : -2])
    return ours.partition(b",")[2] == head[0].partition(b",")[2]


def _head(version: str, kind: str, body: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_64(f"{version} {kind} ".encode())
    digest.update(body)
    return f'{{"ckptrt":"{version}","kind":"{kind}","xxh3":"{digest.hexdigest()}","body":'.encode()


def _damaged(where: str, why: str) -> CorruptError:
    return CorruptError(f"{where} is damaged: {why}", hint="`ckptrt verify` names the newest good step")
