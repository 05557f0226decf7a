"""The corpus of the fuzzer, input by input, and a short run of it: see tests/fuzz_records.py."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import xxhash
import zstandard
from fuzz_records import try_input

from ckptrt.errors import CorruptError, PersistError
from ckptrt.storage.manifest import build, open_head
from ckptrt.storage.records import ManifestRef, ReceiptRecord, ShardRecord, seal

CORPUS = sorted(Path(__file__).with_name("fuzz_corpus").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_hostile_input_ends_in_an_error_of_ours_in_little_time_and_memory(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    tracemalloc.start()
    try:
        try_input(path.read_bytes())
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python")
@pytest.mark.timeout(120)
def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fuzz_records.py")
    (tmp_path / "new").mkdir()
    fuzzed = subprocess.run(
        [sys.executable, script, "-max_total_time=8", "-seed=1", "-print_final_stats=1", "new", CORPUS[0].parent],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert fuzzed.returncode == 0, fuzzed.stderr[-3000:]
    assert "no interesting inputs" not in fuzzed.stderr, "the code must be watched for coverage"
    executed = re.search(r"stat::number_of_executed_units: (\d+)", fuzzed.stderr)
    assert executed and int(executed[1]) > 300, fuzzed.stderr[-2000:]


def test_a_frame_that_claims_far_more_than_its_own_size_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    digest = xxhash.xxh3_128_hexdigest(bomb)
    reference = ManifestRef(size_bytes=len(bomb), xxh3=digest, head_bytes=len(bomb), head_xxh3=digest)
    with pytest.raises(CorruptError, match="claims 268435456 bytes"):
        open_head(bomb, reference, "manifest")


def test_what_no_reader_would_believe_is_not_written() -> None:
    shard = ShardRecord(
        name="s000000001.i00000001.0a/r00000.safetensors", size_bytes=0, chunk_bytes=1, chunks="0" * (65 << 20)
    )
    receipt = ReceiptRecord(rank=0, world_size=1, step=1, incarnation=1, shard=shard, tensors=(), objects=())
    with pytest.raises(PersistError, match="so repetitive"):
        build(1, 1, {0: seal(receipt)}, {0: receipt})
