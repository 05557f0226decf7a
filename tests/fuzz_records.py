"""A coverage-guided fuzzer (https://github.com/google/atheris) for all that is parsed: records, manifests, receipts.

    python tests/fuzz_records.py -max_total_time=600 FOLDER tests/fuzz_corpus

An input's first byte says what it is. Bodies are sealed with a right digest before they are read, as an adversary would
do, so that the fuzzer gets past the digests. Whatever comes in, readers may end in our own errors only, within the
limits of time and memory that libFuzzer's options set (-timeout, -rss_limit_mb; sensible ones are set below).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

try:
    import atheris  # type: ignore[import-untyped]
except ImportError:  # no wheel for this Python: the corpus is still played, without guidance
    atheris = None

if atheris is not None and __name__ == "__main__":
    with atheris.instrument_imports(include=["ckptrt"]):  # whatever these import is watched too
        import ckptrt.storage.catalog
        import ckptrt.storage.contents
        import ckptrt.storage.prune
        import ckptrt.storage.verify  # noqa: F401

import msgspec
import zstandard

from ckptrt.errors import Error
from ckptrt.storage import records
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.contents import Contents
from ckptrt.storage.layout import CommitId
from ckptrt.storage.manifest import ManifestRef
from ckptrt.storage.prune import PrunePolicy, plan_prune
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import verify_commit, verify_records

__all__ = ["KINDS", "try_input"]

KINDS: dict[int, type] = {
    ord("r"): records.RunRecord,
    ord("f"): records.FenceRecord,
    ord("c"): records.CommitRecord,
    ord("p"): records.PinRecord,
    ord("t"): records.ReceiptRecord,
    ord("m"): records.ManifestHead,
}
_NAMES = {"r": "run.json", "f": "fences/i00000001.json", "c": "commits/s000000010.i00000001.json",
          "p": "pins/s000000010.i00000001.json"}  # fmt: skip
_FOLDER = "data/s000000010.i00000001.0a/"
_FENCE = b'{"incarnation":1,"parent":null,"world_size":1,"owner":{"host":"h","pid":1},"created_at":""}'
_COMPRESSOR = zstandard.ZstdCompressor(level=1)


def try_input(data: bytes) -> None:
    """Read one input in every way that there is. Raises whatever isn't an error of ours."""
    kind, body = data[:1], data[1:]
    if kind == b"x":  # a checkpoint: head and receipt, by a NUL, behind a commit that names their true digests
        _try_run(_checkpoint(*_split(body)))
    elif kind.decode("latin-1") in _NAMES:
        files = {"fences/i00000001.json": _seal("fence", _FENCE)}
        _try_run({**files, _NAMES[kind.decode()]: _seal(records._KINDS[KINDS[kind[0]]], body)})
    elif kind == b"z":  # raw bytes in the place of a manifest
        _try_run(_behind_commit(body, len(body) // 2 or 1))
    else:
        for record in KINDS.values():
            _allow(lambda record=record: records.unseal(record, data, "input"))


def _split(body: bytes) -> tuple[bytes, bytes]:
    head, _, receipt = body.partition(b"\0")
    return head, receipt


def _seal(kind: str, body: bytes) -> bytes:
    return records._head("1.0", kind, body) + body + b"}\n"


def _checkpoint(head: bytes, receipt: bytes) -> dict[str, bytes]:
    """Files of a run of one checkpoint; a head that can be decoded gets the true place and digest of the receipt."""
    frame = _COMPRESSOR.compress(_seal("receipt", receipt))
    try:
        decoded = msgspec.json.decode(head)
        decoded["sections"][0][1:4] = [0, len(frame), records.xxhash.xxh3_128_hexdigest(frame)]
        head = msgspec.json.encode(decoded)
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError, RecursionError, ValueError):
        pass
    head_frame = _COMPRESSOR.compress(_seal("manifest", head))
    return _behind_commit(head_frame + frame, len(head_frame))


def _behind_commit(manifest: bytes, head_bytes: int) -> dict[str, bytes]:
    reference = ManifestRef(
        size_bytes=len(manifest),
        xxh3=records.xxhash.xxh3_128_hexdigest(manifest),
        head_bytes=head_bytes,
        head_xxh3=records.xxhash.xxh3_128_hexdigest(manifest[:head_bytes]),
    )
    commit = records.CommitRecord(
        step=10, incarnation=1, world_size=1, data="s000000010.i00000001.0a", manifest=reference, size_bytes=8192,
        num_tensors=1, created_at="", made_by="", references=("s000000005.i00000001.0a",), new_bytes=4096,
    )  # fmt: skip
    return {
        "run.json": _seal("run", b'{"run_id":"r","created_at":"","made_by":""}'),
        "fences/i00000001.json": _seal("fence", _FENCE),
        _NAMES["c"]: records.seal(commit),
        _FOLDER + "manifest.json.zst": manifest,
        _FOLDER + "r00000.safetensors": bytes(4200),
    }


def _try_run(files: dict[str, bytes]) -> None:
    tier = MemoryTier()
    for name, data in files.items():
        tier.create(name, data)
    catalog = Catalog(tier)
    commit = CommitId(10, 1)
    _allow(catalog.open_run)
    _allow(catalog.overview)
    _allow(catalog.newest_good)
    _allow(lambda: verify_records(catalog))
    _allow(lambda: verify_commit(catalog, commit, read_data=True))
    _allow(lambda: Contents(catalog.open_checkpoint(commit).outlines(), max_listed=None))
    _allow(lambda: list(catalog.open_checkpoint(commit).receipts()))
    _allow(lambda: plan_prune(catalog, PrunePolicy(keep=Keep(best=1)), 1e9))


def _allow(read: Any) -> None:
    with contextlib.suppress(Error):  # what bad input deserves
        read()


def main() -> None:
    if atheris is None:
        sys.exit("atheris isn't installed")
    logging.disable(logging.CRITICAL)
    limits = ["-timeout=5", "-rss_limit_mb=1024", "-max_len=4096", f"-artifact_prefix={os.getcwd()}/"]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[1:]], try_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
