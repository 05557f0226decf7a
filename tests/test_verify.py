"""Verify finds every changed bit and says what it hits."""

from __future__ import annotations

import contextlib
import itertools
import json
import random

import msgspec
import pytest
from click.testing import CliRunner
from support_runs import FakeRun, flip_bit, make_run, overwrite
from support_tensors import floats, write_run

from ckptrt.errors import CorruptError, TransientError, VersionError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.cli import cli
from ckptrt.storage.layout import CommitId
from ckptrt.storage.records import ReceiptRecord, TensorRecord, seal, unseal
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import Report, _cover_problem, verify, verify_commit, verify_records

FOLDER = "data/s000000010.i00000001.0a/"


@pytest.fixture
def run() -> FakeRun:
    return make_run(MemoryTier(), [10])


def check(run: FakeRun, read_data: bool = False) -> Report:
    return verify_commit(run.catalog, CommitId(10, 1), read_data)


def test_a_whole_checkpoint_has_no_findings(run):
    report = check(run, read_data=True)
    assert report.is_ok
    assert report.is_loadable
    assert (report.num_files, report.num_tensors) == (2, 4)
    assert report.bytes_read == run.catalog.read_commit(CommitId(10, 1)).size_bytes
    assert check(run).bytes_read == 0
    assert not verify_records(run.catalog)


def test_every_flipped_bit_of_every_record_is_reported():
    run = make_run(MemoryTier(), [10], world_size=1, columns=1)
    tier = run.tier
    objects = tier._bucket.objects
    names = [name for name in objects if not name.endswith(".safetensors")]
    assert sorted(name.rpartition("/")[2] for name in names) == [
        "i00000001.json", "manifest.json.zst", "r00000.receipt.json", "run.json", "s000000010.i00000001.json",
    ]  # fmt: skip
    for name in names:
        data, when_s = objects[name]
        for bit in range(8 * len(data)):
            objects[name] = (flip_bit(data, bit), when_s)
            assert name in damaged_files(tier), f"bit {bit} of {name}"
        objects[name] = (data, when_s)
    assert damaged_files(tier) == set()


def damaged_files(tier: MemoryTier) -> set[str]:
    catalog = Catalog(tier)
    catalog.open_run()
    report = verify_commit(catalog, CommitId(10, 1))
    return {finding.file for finding in (*verify_records(catalog), *report.findings)}


@pytest.mark.parametrize("name", ["r00000.safetensors", "r00001.safetensors"])
def test_a_flipped_bit_anywhere_in_a_shard_file_is_reported_when_data_are_read(name):
    run = make_run(MemoryTier(), [10], columns=1)
    objects = run.tier._bucket.objects
    data, when_s = objects[FOLDER + name]
    for bit in range(0, 8 * len(data), 37):  # coprime to 8: each of a byte's bits gets its turn
        objects[FOLDER + name] = (flip_bit(data, bit), when_s)
        assert [f.file for f in check(run, read_data=True).findings] == [FOLDER + name]
    assert check(run).is_ok


def test_a_flipped_byte_names_file_range_tensors_rows_and_rank():
    run = FakeRun(tier=MemoryTier(), columns=1 << 20)  # rows of 4 MiB: one row a chunk, but for the header's 4 KiB
    run.fence(1)
    run.save(10)
    receipt = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(1)
    name = FOLDER + "r00001.safetensors"
    weight = next(tensor for tensor in receipt.tensors if tensor.key == "model.weight")
    data = run.tier.read(name)
    in_row_2 = weight.start + 2 * (4 << 20) + 100_000
    overwrite(run.tier, name, flip_bit(flip_bit(data, 8 * in_row_2), 8 * (in_row_2 + (4 << 20))))
    report = check(run, read_data=True)
    (finding,) = report.findings  # two chunks side by side are one finding
    assert (finding.file, finding.start, finding.end) == (name, 2 * (4 << 20), 4 * (4 << 20))
    # A chunk begins 4 KiB before its row: the end of the row before may be hit as well.
    assert [(a.key, a.rows) for a in finding.affects] == [("model.weight", (5 + 1, 5 + 3))]
    assert finding.ranks == (1,)
    assert not report.is_loadable
    overwrite(run.tier, name, flip_bit(data, 8 * (len(data) - 1)))
    (finding,) = check(run, read_data=True).findings
    assert [(a.key, a.rows) for a in finding.affects] == [("model.weight", (11, 11)), ("rng", (0, 4)), ("loop", None)]


def test_files_that_are_missing_or_have_another_size_are_found_without_reading(run):
    name = FOLDER + "r00001.safetensors"
    data = run.tier.read(name)
    for cut, what in ((b"", "0 bytes"), (data[:4200], "4200 bytes"), (data + b"x", f"{len(data) + 1} bytes")):
        overwrite(run.tier, name, cut)
        (finding,) = check(run, read_data=True).findings
        assert finding.file == name
        assert what in finding.what
    run.tier.delete(name)
    (finding,) = check(run).findings
    assert finding.what == "it is missing"
    assert {a.key for a in finding.affects} == {"model.weight", "rng", "loop"}
    # Cut within the plain data at its end, no tensor is hit.
    run.tier.create(name, data[:-3])
    assert [a.key for a in check(run).findings[0].affects] == ["loop"]


def test_a_damaged_receipt_file_is_a_damaged_spare(run):
    overwrite(run.tier, FOLDER + "r00001.receipt.json", b"{}")
    report = check(run)
    assert not report.is_ok
    assert report.is_loadable
    run.tier.delete(FOLDER + "r00001.receipt.json")
    assert check(run).is_ok


def test_damage_to_one_ranks_section_names_the_rank_and_checks_the_others(run):
    checkpoint = run.catalog.open_checkpoint(CommitId(10, 1))
    at = checkpoint.record.manifest.head_bytes + checkpoint.head().sections[1].start + 20
    overwrite(run.tier, checkpoint.manifest_name, flip_bit(run.tier.read(checkpoint.manifest_name), 8 * at))
    overwrite(run.tier, FOLDER + "r00000.receipt.json", b"{}")
    found = {
        (finding.file, finding.ranks) for finding in check(run).findings if finding.file != checkpoint.manifest_name
    }
    assert found == {(FOLDER + "r00000.receipt.json", (0,))}
    assert any(finding.ranks == (1,) for finding in check(run).findings)


def rewritten(run: FakeRun, **tensors: TensorRecord | None) -> Report:
    """The findings after rank 1's receipt says something else of a tensor; digests are right, as a bad writer's are."""
    receipts = run.write_data(20)
    receipt = unseal(ReceiptRecord, receipts[1], "")
    kept = tuple(tensors.get(t.key.partition(".")[2], t) for t in receipt.tensors)
    receipts[1] = seal(msgspec.structs.replace(receipt, tensors=tuple(t for t in kept if t is not None)))
    overwrite(run.tier, "data/s000000020.i00000001.0a/r00001.receipt.json", receipts[1])
    with pytest.MonkeyPatch.context() as patch:
        # Our own commit would refuse most of these; verify must find what a worse writer has let through.
        patch.setattr("ckptrt.storage.commit._check_tensors", lambda *_: None)
        return verify(run.catalog.open_checkpoint(run.commit(20, 1, receipts)))


def weight(run: FakeRun) -> TensorRecord:
    receipt = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(1)
    return next(tensor for tensor in receipt.tensors if tensor.key == "model.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": (4, 0)}, "overlap"),
        ({"offsets": (6, 0), "sizes": (6, 16)}, "has 176 of its 192 elements"),
        ({"sizes": (0, 16)}, "has 80 of its 192 elements"),
        ({"shape": (13, 16)}, "more than one shape or dtype"),
        ({"dtype": "int32"}, "more than one shape or dtype"),
        ({"offsets": (6, 0)}, "outside its file or its shape"),
        ({"offsets": (-1, 0)}, "outside its file or its shape"),
        ({"start": 1 << 40}, "outside its file or its shape"),
        ({"start": -1}, "outside its file or its shape"),
        ({"sizes": (7,)}, "another number of dimensions"),
        ({"dtype": "float99"}, "unknown dtype 'float99'"),
    ],
)
def test_regions_that_do_not_cover_their_tensor_once_are_found(run, change, message):
    report = rewritten(run, weight=msgspec.structs.replace(weight(run), **change))
    assert any(message in finding.what for finding in report.findings)
    assert not report.is_loadable


def test_a_region_that_no_rank_wrote_is_missed(run):
    assert any("has 80 of its 192" in finding.what for finding in rewritten(run, weight=None).findings)


def test_regions_cut_along_columns_and_in_grids_are_understood():
    def grid(rows: list[int], columns: list[int]) -> list[TensorRecord]:
        boxes = []
        for top, bottom in itertools.pairwise(rows):
            for left, right in itertools.pairwise(columns):
                boxes.append(TensorRecord("w", "int8", (8, 9), (top, left), (bottom - top, right - left), 0))
        return boxes

    for rows, columns in (([0, 8], [0, 3, 9]), ([0, 8], list(range(10))), ([0, 3, 8], [0, 4, 4, 9])):
        assert _cover_problem(grid(rows, columns)) == ""
        assert "has" in _cover_problem(grid(rows, columns)[1:])
        assert _cover_problem([*grid(rows, columns), grid(rows, columns)[-1]]) == "has regions that overlap"
    scalar = TensorRecord("s", "int8", (), (), (), 0)
    assert _cover_problem([scalar]) == ""
    assert _cover_problem([scalar, scalar]) == "has regions that overlap"
    assert _cover_problem([TensorRecord("e", "int8", (0, 4), (0, 0), (0, 4), 0)]) == ""


def test_chunk_tables_that_can_not_be_true_are_refused(run):
    for fields in ({"chunk_bytes": 0}, {"chunk_bytes": 1 << 40}, {"chunks": "0" * 32}, {"chunks": ""}):
        step = run.clock.advance(1) or 20 + int(run.clock.monotonic_s())
        receipts = run.write_data(step)
        receipt = unseal(ReceiptRecord, receipts[1], "")
        shard = msgspec.structs.replace(receipt.shard, **fields)
        receipts[1] = seal(msgspec.structs.replace(receipt, shard=shard))
        report = verify(run.catalog.open_checkpoint(run.commit(step, 1, receipts)), read_data=True)
        assert any("chunk" in finding.what and finding.ranks == (1,) for finding in report.findings)


def test_a_summary_that_does_not_fit_is_found(run):
    checkpoint = run.catalog.open_checkpoint(CommitId(10, 1))
    checkpoint.record = msgspec.structs.replace(checkpoint.record, size_bytes=1)
    (finding,) = verify(checkpoint).findings
    assert "it says 1 bytes" in finding.what
    assert not finding.is_fatal


def test_an_unreachable_store_is_not_taken_for_damage(run):
    def read_into(name, start, out):
        raise TransientError("503")

    run.tier.read_into = read_into
    with pytest.raises(TransientError):
        check(run, read_data=True)


def test_a_file_that_goes_while_it_is_read_is_damage(run):
    def read_into(name, start, out):
        raise CorruptError("ends too early")

    run.tier.read_into = read_into
    report = check(run, read_data=True)
    assert [(f.start, f.end) for f in report.findings] == [(0, len(run.tier.read(f.file))) for f in report.findings]
    assert len(report.findings) == 2


def test_a_newer_format_is_reported(run):
    name = "commits/s000000010.i00000001.json"
    overwrite(run.tier, name, run.tier.read(name).replace(b'"ckptrt":"1.0","kind"', b'"ckptrt":"2.0","sort"'))
    assert "format 2.0" in check(run).findings[0].what
    assert [f.file for f in verify_records(run.catalog)] == [name]
    overwrite(run.tier, "fences/i00000001.json", b'{"ckptrt":"2.0"}\n')
    with pytest.raises(VersionError):
        verify_records(run.catalog)


def test_random_bytes_in_any_record_never_raise_anything_else():
    rng = random.Random(7)
    run = make_run(MemoryTier(), [10], world_size=1, columns=1)
    objects = run.tier._bucket.objects
    names = [name for name in objects if not name.endswith(".safetensors")]
    for _ in range(300):
        name = rng.choice(names)
        data, when_s = objects[name]
        start, length = rng.randrange(len(data)), rng.randrange(40)
        objects[name] = (data[:start] + rng.randbytes(rng.randrange(40)) + data[start + length :], when_s)
        if objects[name][0] != data:
            with contextlib.suppress(VersionError):  # random bytes don't spell one, but if they do, that's fine
                assert name in damaged_files(run.tier), (name, objects[name][0])
        objects[name] = (data, when_s)


# --- parts, and values


def test_all_parts_together_find_what_one_part_finds_or_not(tmp_path):
    run = make_run(LocalTier(str(tmp_path)), [10], columns=400_000)  # several pieces of 8 MiB
    checkpoint = run.catalog.open_checkpoint(CommitId(10, 1))
    total = verify(checkpoint, read_data=True).bytes_read
    assert sum(verify(checkpoint, True, part=(n, 3)).bytes_read for n in (1, 2, 3)) == total
    name = "data/s000000010.i00000001.0a/r00001.safetensors"
    overwrite(run.tier, name, flip_bit(run.tier.read(name), 8 * 5_000_000))
    assert sum(not verify(checkpoint, True, part=(n, 3)).is_ok for n in (1, 2, 3)) == 1


@pytest.mark.parametrize(("text", "parts"), [("2/7", 7), ("10%", 10), ("100%", 1), ("30%", 3)])
def test_a_part_is_named(tmp_path, text, parts):
    make_run(LocalTier(str(tmp_path)), [10])
    result = CliRunner().invoke(cli, ["verify", str(tmp_path), "--read-data-subset", text, "--json"])
    assert result.exit_code == 0
    number, of = json.loads(result.stdout)["part"]
    assert of == parts and 1 <= number <= of


@pytest.mark.parametrize("text", ["0/3", "4/3", "0%", "101%", "3", "a/b"])
def test_parts_that_mean_nothing_are_refused(tmp_path, text):
    assert CliRunner().invoke(cli, ["verify", str(tmp_path), "--read-data-subset", text]).exit_code == 2


def test_deep_tells_which_tensors_hold_what_isnt_finite(tmp_path):
    url = str(tmp_path / "run")
    nan, inf = float("nan"), float("inf")
    good, bad = floats(*range(8)), floats(0, 1, 2, nan, inf, 5, 6, nan)
    tensors = {"a": ("float32", (4, 2), good), "b": ("float32", (4, 2), bad), "c": ("int32", (8,), bad)}
    write_run(LocalTier(url), {1: (tensors, [1, 1]), 2: ({"a": tensors["a"]}, [1])})
    result = CliRunner().invoke(cli, ["verify", f"{url}@1", "--deep"])
    assert result.exit_code == 0, "it was written so"
    assert "values   b: 1 NaN, 0 inf, first at [1, 1], rank 0\n" in result.stdout
    assert "values   b: 1 NaN, 1 inf, first at [2, 0], rank 1\n" in result.stdout
    assert "values   a" not in result.stdout and "values   c" not in result.stdout
    assert "@ 2  every value is finite" in CliRunner().invoke(cli, ["verify", f"{url}@2", "--deep"]).stdout
