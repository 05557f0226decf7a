"""Every golden run is read to the values that its formulas give, and the present writer still writes its newest one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zstandard
from flips import names
from make_golden import OBJECT, PATH, WORLD_SIZE, region, specs, write_run

from ckptrt.plan import Read
from ckptrt.sources import StoredSource
from ckptrt.storage.catalog import Catalog, open_catalog
from ckptrt.storage.layout import CommitId
from ckptrt.storage.pins import pins
from ckptrt.storage.records import VERSION, CommitRecord, unseal
from ckptrt.storage.shardfile import _DTYPES
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import verify_commit, verify_records

GOLDEN = Path(__file__).with_name("golden")
RUNS = sorted(path.name for path in GOLDEN.iterdir())
NOW = f"{VERSION[0]}.{VERSION[1]}"


@pytest.mark.parametrize("version", RUNS)
def test_a_golden_run_verifies_and_its_path_is_known(version: str) -> None:
    catalog = open_catalog(str(GOLDEN / version))
    overview = catalog.overview()
    assert not overview.problems
    assert not verify_records(catalog)
    assert [info.id for info in overview.valid] == list(PATH)
    assert [info.id for info in overview.commits if info.state == "off-path"] == [CommitId(30, 1)]
    for info in overview.commits:
        assert verify_commit(catalog, info.id, read_data=True).is_ok
        assert info.record is not None and info.record.metrics == {"loss": 4.0 / info.step}
    assert [(commit, pin.reason) for commit, pin in pins(catalog).items() if pin] == [(CommitId(10, 1), "golden")]


@pytest.mark.parametrize("version", RUNS)
@pytest.mark.parametrize("commit", [*PATH, CommitId(30, 1)])
def test_a_golden_run_holds_what_its_formulas_say(version: str, commit: CommitId) -> None:
    source = StoredSource(open_catalog(str(GOLDEN / version)).open_checkpoint(commit))
    assert source.world_size == WORLD_SIZE
    expected = {
        (rank, spec.key): (spec, region(commit.step, spec, _DTYPES[spec.dtype][0]))
        for rank in range(WORLD_SIZE)
        for spec in specs(rank)
    }
    seen = set()
    for part in source.parts():
        for tensor in part.tensors:
            spec, data = expected[part.rank, tensor.key]
            known = (spec.dtype, spec.shape, spec.offsets, spec.sizes, spec.rank_only)
            assert (tensor.dtype, tensor.shape, tensor.offsets, tensor.sizes, tensor.rank_only) == known
            with source.mapped(part, [Read(tensor.start, len(data))] if data else []) as buffer:
                assert bytes(buffer[tensor.start : tensor.start + len(data)]) == data
            seen.add((part.rank, tensor.key))
        for plain in part.objects:
            with source.mapped(part, [Read(plain.start, plain.size_bytes)]) as buffer:
                assert bytes(buffer[plain.start : plain.start + plain.size_bytes]) == OBJECT
    assert seen == set(expected)


def test_the_newest_checkpoint_borrows_its_frozen_tensor() -> None:
    receipt = open_catalog(str(GOLDEN / NOW)).open_checkpoint(PATH[0]).receipt(0)
    assert [[tensor.key for tensor in borrowed.tensors] for borrowed in receipt.borrowed] == [["frozen.base"]]
    assert receipt.borrowed[0].shard.name.startswith("s000000010.i00000001.")


def test_the_present_writer_writes_the_golden_run_of_its_version() -> None:
    """Byte for byte, but for what the zstd library makes of the manifests: those are compared unpacked."""
    written, golden = MemoryTier(), LocalTier(str(GOLDEN / NOW))
    write_run(written)
    assert names(written) == names(golden)  # type: ignore[arg-type]
    for name in names(written):
        new, old = written.read(name), golden.read(name)
        if name.endswith(".zst"):
            new, old = b"".join(unpacked(new)[1:]), b"".join(unpacked(old)[1:])
        elif name.startswith("commits/"):
            new, old = without_manifest(new), without_manifest(old)
        assert new == old, name


def unpacked(data: bytes) -> list[bytes]:
    """The lines of a manifest: its head, then each rank's receipt."""
    reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
    return reader.read().splitlines(keepends=True)


def without_manifest(data: bytes) -> bytes:
    record = unseal(CommitRecord, data, "commit")
    nothing = {"size_bytes": 0, "xxh3": "", "head_bytes": 0, "head_xxh3": ""}
    return msgspec.json.encode({**msgspec.to_builtins(record), "manifest": nothing})


def test_a_restore_prefers_the_newest_one() -> None:
    found = Catalog(LocalTier(str(GOLDEN / NOW))).newest_good().commit
    assert found is not None and found.id == PATH[0]
