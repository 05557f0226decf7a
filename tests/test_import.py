"""Imports: bit-equal, refused before anything is written if damaged, fenced, and nothing foreign is ever run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle  # noqa: TID251  what others write
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_interop import DTYPES, Writer, blob_bytes, ckptrt, expected, flip, held, random_tensor, raw
from support_s3 import S3Server, s3_server

from ckptrt.errors import CorruptError, Error, UsageError
from ckptrt.storage.catalog import Catalog, hold_run, open_catalog
from ckptrt.storage.cli import _documents
from ckptrt.storage.importing import open_source, plan_import
from ckptrt.storage.interop.unpickle import read_index
from ckptrt.storage.records import Parent
from ckptrt.storage.tiers import open_tier

__all__ = ["s3_server"]  # a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

FORMATS = ["safetensors", "torch", "dcp"]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "a.weight": torch.randn(7, 5),
        "a.bias": torch.randn(7).bfloat16(),
        "n": torch.tensor(4),
        "e": torch.empty(0, 2),
    }


def write(format: str, path: Path, state: dict[str, torch.Tensor]) -> Path:
    if format == "safetensors":
        path.mkdir()
        safetensors.torch.save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors")
    elif format == "torch":
        torch.save(state, path)
    else:
        dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    return path


def no_run(path: Path) -> bool:
    return not path.exists()


# --- what goes in comes out


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    forms=st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=6),
    world_size=st.integers(1, 4),
    format=st.sampled_from(FORMATS),
    seed=st.integers(0, 1 << 30),
    shard=st.sampled_from(["1B", "100B", "5GB"]),
)
def test_export_then_import_is_bit_equal(tmp_path_factory, forms, world_size, format, seed, shard):
    folder = tmp_path_factory.mktemp("trip")
    rng = random.Random(seed)
    state = {f"t{i}.x": random_tensor(dtype, shape, rng) for i, (dtype, shape) in enumerate(forms)}
    ties = {"tied.x": "t0.x"}
    Writer(folder / "run", world_size, seed).save(
        1, {f"model.{k}": v for k, v in state.items()}, {"model": {"ties": ties}}
    )
    out = folder / "out"
    size = ("--max-shard-size", shard) if format == "safetensors" else ()
    result = ckptrt("export", format, f"{folder}/run@1", out, *size)
    assert result.exit_code == 0, result.output
    result = ckptrt("import", format, out, folder / "new", "--step", 9)
    assert result.exit_code == 0, result.output
    assert held(folder / "new", 9) == expected(state | {"tied.x": state["t0.x"]})
    if format == "safetensors":
        checkpoint = open_catalog(f"{folder}/new").open_checkpoint(open_catalog(f"{folder}/new").find(9))
        assert checkpoint.record.num_tensors == len(state)  # the tied one is stored once
    shutil.rmtree(folder)


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_others_wrote_are_taken_as_they_are(tmp_path, format):
    source = write(format, tmp_path / "src", tensors())
    result = ckptrt("import", format, source, tmp_path / "run", "--step", 4, "--json")
    assert result.exit_code == 0, result.output
    document = msgspec.json.decode(result.stdout, type=_documents.Import)
    assert (document.num_tensors, document.incarnation, document.left_out) == (4, 1, [])
    assert bool(document.unchecked) == (format == "safetensors")
    assert held(tmp_path / "run", 4) == expected(tensors())
    assert ckptrt("verify", tmp_path / "run", "--read-data").exit_code == 0


def test_views_transposed_conjugated_and_tied_tensors(tmp_path):
    base = torch.randn(6, 4)
    state = {
        "t": base.t(), "row": base[2], "whole": base, "again": base,
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "expanded": torch.ones(1, 3).expand(2, 3), "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    torch.save(state, tmp_path / "src.pt")
    assert ckptrt("import", "torch", tmp_path / "src.pt", tmp_path / "run", "--step", 1).exit_code == 0
    assert held(tmp_path / "run", 1) == expected(state)
    checkpoint = open_catalog(f"{tmp_path}/run").open_checkpoint(open_catalog(f"{tmp_path}/run").find(1))
    assert checkpoint.record.num_tensors == len(state) - 1
    dcp.save({"model": {"t": base.t()}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ckptrt("import", "dcp", tmp_path / "dcp", tmp_path / "run", "--step", 2).exit_code == 0
    assert held(tmp_path / "run", 2) == expected({"t": base.t()})


def test_parts_are_named_and_what_stays_behind_is_told(tmp_path):
    optim = {"state": {}, "param_groups": [{"lr": 0.1}]}
    torch.save({"model": tensors(), "optim": optim, "epoch": 3}, tmp_path / "src.pt")
    result = ckptrt("import", "torch", tmp_path / "src.pt", tmp_path / "run", "--step", 1)
    assert result.exit_code == 0
    assert "left out   optim" in result.stdout and "left out   epoch" in result.stdout
    torch.save({"net": {"core": tensors()}, "epoch": 3}, tmp_path / "src.pt")
    unclear = ckptrt("import", "torch", tmp_path / "src.pt", tmp_path / "run", "--step", 2)
    assert unclear.exit_code == 2 and "net, epoch" in unclear.stderr and "--key" in unclear.stderr
    for key in ("net.core", "net"):
        args = ("import", "torch", tmp_path / "src.pt", tmp_path / key, "--step", 2, "--key", key)
        assert ckptrt(*args).exit_code == 0
    assert held(tmp_path / "net.core", 2) == expected(tensors())
    assert set(held(tmp_path / "net", 2)) == {f"core.{name}" for name in tensors()}
    assert ckptrt("import", "torch", tmp_path / "src.pt", tmp_path / "x", "--step", 2, "--key", "nat").exit_code == 2
    dcp.save({"net": tensors(), "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ckptrt("import", "dcp", tmp_path / "dcp", tmp_path / "x", "--step", 2).exit_code == 2
    result = ckptrt("import", "dcp", tmp_path / "dcp", tmp_path / "x", "--step", 2, "--key", "net")
    assert "left out   epoch" in result.stdout
    assert held(tmp_path / "x", 2) == expected(tensors())
    dcp.save(tensors(), checkpoint_id=tmp_path / "flat", no_dist=True)
    assert ckptrt("import", "dcp", tmp_path / "flat", tmp_path / "y", "--step", 2).exit_code == 0
    assert held(tmp_path / "y", 2) == expected(tensors())


def test_names_may_be_changed_and_tied(tmp_path):
    state = {"module.a": torch.ones(2, 2), "module.b": torch.ones(2, 2), "module.c": torch.zeros(2, 2)}
    source = write("safetensors", tmp_path / "src", state)
    args = ("import", "hf", source, tmp_path / "run", "--step", 1, "--map", r"module\.(.*)=\1")
    assert ckptrt(*args, "--tie", "b=a", "--tie", "d=c").exit_code == 0
    assert set(held(tmp_path / "run", 1)) == {"a", "b", "c", "d"}
    checkpoint = open_catalog(f"{tmp_path}/run").open_checkpoint(open_catalog(f"{tmp_path}/run").find(1))
    assert checkpoint.record.num_tensors == 2
    differ = ckptrt("import", "hf", source, tmp_path / "new", "--step", 1, "--map", r"module\.(.*)=\1", "--tie", "c=a")
    assert differ.exit_code == 1 and "these two tensors differ" in differ.stderr
    assert ckptrt("import", "hf", source, tmp_path / "new", "--step", 1, "--tie", "c=a").exit_code == 2
    assert no_run(tmp_path / "new")


def test_a_dry_run_checks_the_source_and_writes_nothing(tmp_path):
    source = write("torch", tmp_path / "src.pt", tensors())
    result = ckptrt("import", "torch", source, tmp_path / "run", "--step", 1, "--dry-run")
    assert result.exit_code == 0 and "nothing was written" in result.stdout
    flip(source, zip_data_byte(source))
    assert ckptrt("import", "torch", source, tmp_path / "run", "--step", 1, "--dry-run").exit_code == 4
    assert no_run(tmp_path / "run")


# --- damage


def zip_data_byte(path: Path) -> int:
    """A byte of a tensor's data within a torch.save file."""
    with zipfile.ZipFile(path) as archive:
        record = max((r for r in archive.infolist() if "/data/" in r.filename), key=lambda r: r.file_size)
        data = archive.read(record)
    return path.read_bytes().find(data)


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_a_changed_byte_that_torch_would_load_is_refused(tmp_path, format):
    source = write(format, tmp_path / "src", tensors())
    file = source if format == "torch" else source / "__0_0.distcp"
    flip(file, file.read_bytes().find(raw(tensors()["a.weight"])))
    if format == "torch":
        assert not torch.equal(torch.load(file, weights_only=True)["a.weight"], tensors()["a.weight"])
    else:
        state = {"model": {name: torch.zeros_like(value) for name, value in tensors().items()}}
        dcp.load(state, checkpoint_id=source, no_dist=True)
        assert not torch.equal(state["model"]["a.weight"], tensors()["a.weight"])
    result = ckptrt("import", format, source, tmp_path / "run", "--step", 1)
    assert result.exit_code == 4 and "damaged" in result.stderr
    assert no_run(tmp_path / "run")


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_are_cut_off_anywhere_are_refused(tmp_path, format):
    source = write(format, tmp_path / "src", tensors())
    file = {"safetensors": source / "model.safetensors", "torch": source, "dcp": source / "__0_0.distcp"}[format]
    data = file.read_bytes()
    for length in sorted({0, 1, 7, 8, 9, 40, len(data) // 2, len(data) - 40, len(data) - 1}):
        file.write_bytes(data[:length])
        result = ckptrt("import", format, source, tmp_path / "run", "--step", 1)
        assert result.exit_code == 4, (length, result.output)
        assert format != "dcp" or "it ends within" in result.stderr
        assert no_run(tmp_path / "run")


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_no_flipped_bit_changes_a_value_in_silence(tmp_path, format):
    """Some bits of a zip file mean nothing, so an import may succeed; then all values are right."""
    source = write(format, tmp_path / "src", {"w": torch.arange(3.0)})
    files = [source] if format == "torch" else [source / "__0_0.distcp", source / ".metadata"]
    rng, refused = random.Random(11), 0
    for file in files:
        data = file.read_bytes()
        for _ in range(60):
            flip(file, rng.randrange(len(data)))
            found = None
            try:
                foreign = open_source(format, str(source))  # type: ignore[arg-type]
                found = {n: (t.dtype, t.shape) for n, t in plan_import(foreign).tensors.items()}
                values = {n: blob_bytes(t.data) for n, t in foreign.tensors.items()}
            except Error:
                refused += 1
            else:
                assert values == {"w": raw(torch.arange(3.0))} or found != {"w": ("float32", (3,))}
            file.write_bytes(data)
    assert refused > 20


def test_folders_that_lack_a_file_are_refused(tmp_path):
    source = write("dcp", tmp_path / "dcp", tensors())
    (source / "__0_0.distcp").unlink()
    missing = ckptrt("import", "dcp", source, tmp_path / "run", "--step", 1)
    assert missing.exit_code == 4 and "is missing" in missing.stderr
    (source / ".metadata").unlink()
    assert ckptrt("import", "dcp", source, tmp_path / "run", "--step", 1).exit_code == 10
    for format in ("hf", "torch", "dcp"):
        assert ckptrt("import", format, tmp_path / "none", tmp_path / "run", "--step", 1).exit_code == 10
    assert no_run(tmp_path / "run")


def test_an_index_whose_chunks_are_not_the_tensor_is_damage(tmp_path):
    source = write("dcp", tmp_path / "dcp", tensors())
    good = (source / ".metadata").read_bytes()
    box = pickle.loads(good).state_dict_metadata["model.a.weight"].chunks[0]
    beyond = dataclasses.replace(box, offsets=torch.Size([1, 0]))
    for chunks in ([], [box, box], [beyond], [dataclasses.replace(box, sizes=torch.Size([5, 7]))]):
        index = pickle.loads(good)
        index.state_dict_metadata["model.a.weight"].chunks = chunks
        info = index.storage_data[next(at for at in index.storage_data if at.fqn == "model.a.weight")]
        index.storage_data.update({type(at)(at.fqn, c.offsets): info for c in chunks for at in index.storage_data})
        (source / ".metadata").write_bytes(pickle.dumps(index))
        assert ckptrt("import", "dcp", source, tmp_path / "run", "--step", 1).exit_code == 4, chunks
    for path in ("../x.distcp", "/etc/passwd"):
        index = pickle.loads(good)
        for info in index.storage_data.values():
            info.relative_path = path
        (source / ".metadata").write_bytes(pickle.dumps(index))
        assert ckptrt("import", "dcp", source, tmp_path / "run", "--step", 1).exit_code == 4
    assert no_run(tmp_path / "run")


def sharded(path: Path) -> dict[str, Any]:
    path.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, path / "x.safetensors")
    safetensors.torch.save_file({"b": torch.ones(3)}, path / "y.safetensors")
    return {"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}


def test_an_index_that_contradicts_its_files_is_refused(tmp_path):
    index = sharded(tmp_path / "src")
    where = tmp_path / "src" / "model.safetensors.index.json"
    bad: list[tuple[Any, int]] = [
        ({"a": "x.safetensors", "b": "z.safetensors"}, 4),
        ({"a": "x.safetensors", "b": "../y.safetensors"}, 4),
        ({"a": "x.safetensors", "b": "x.safetensors"}, 4),
        ({"a": "x.safetensors"}, 0),
        (7, 4),
    ]
    for weight_map, code in bad:
        where.write_text(json.dumps(index | {"weight_map": weight_map}))
        result = ckptrt("import", "hf", tmp_path / "src", tmp_path / f"run{code}", "--step", 1)
        assert result.exit_code == code, result.output
    safetensors.torch.save_file({"a": torch.ones(2), "c": torch.ones(1)}, tmp_path / "src" / "x.safetensors")
    where.write_text(json.dumps(index))
    unlisted = ckptrt("import", "hf", tmp_path / "src", tmp_path / "run4", "--step", 1)
    assert unlisted.exit_code == 2 and "such as c" in unlisted.stderr
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "src" / "x.safetensors")
    where.write_text("{")
    assert ckptrt("import", "hf", tmp_path / "src", tmp_path / "run4", "--step", 1).exit_code == 4
    assert no_run(tmp_path / "run4")
    where.unlink()
    assert ckptrt("import", "hf", tmp_path / "src", tmp_path / "run4", "--step", 1).exit_code == 10
    where.write_text(json.dumps(index))
    assert ckptrt("import", "hf", tmp_path / "src", tmp_path / "good", "--step", 1).exit_code == 0
    assert held(tmp_path / "good", 1) == expected({"a": torch.ones(2), "b": torch.ones(3)})


def entry(shape: list[Any], *offsets: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HEADERS: list[Any] = [
    [], {}, {"a": 3}, {"__metadata__": {"x": 1}}, {"a": {"dtype": "F32", "shape": [2]}},
    {"a": entry([2], 0, 4)}, {"a": entry([-2], 0, 8)}, {"a": entry([2], 8, 0)}, {"a": entry([True], 0, 8)},
    {"a": entry([2], 4, 12)}, {"a": entry([1 << 70], 0, 8)}, {"a": entry([1], 0, 4), "b": entry([2], 0, 8)},
    {"a": entry([1], 0, 4)}, {"a": entry([3], 0, 12)}, {"a": entry([2], 0, 8, 9)},
    {"__metadata__": {"ckptrt.raw": '{"a": 1}'}, "a": entry([8], 0, 8, dtype="U8")},
    {"__metadata__": {"ckptrt.raw": '{"a": {"dtype": "complex128", "shape": [3]}}'}, "a": entry([8], 0, 8, dtype="U8")},
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_headers_that_no_writer_would_write_are_damage(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CorruptError):
        open_source("safetensors", str(tmp_path / "x.safetensors"))


def test_a_header_that_claims_to_be_huge_or_deep_is_damage(tmp_path):
    deep = b"[" * 200_000
    twice = b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'
    for length, rest in ((1 << 62, b"{}"), (len(deep), deep), (len(twice), twice + bytes(8))):
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + rest)
        with pytest.raises(CorruptError):
            open_source("safetensors", str(tmp_path / "x.safetensors"))
    text = b'{"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(UsageError, match="F4"):
        open_source("safetensors", str(tmp_path / "x.safetensors"))


# --- foreign code


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_of_a_pickle_is_run(tmp_path):
    mark = tmp_path / "ran"
    torch.save({"model": {"w": torch.ones(2)}, "x": Evil(mark)}, tmp_path / "src.pt")
    result = ckptrt("import", "torch", tmp_path / "src.pt", tmp_path / "run", "--step", 1)
    assert result.exit_code == 2 and "mkdir" in result.stderr
    source = write("dcp", tmp_path / "dcp", tensors())
    index = pickle.loads((source / ".metadata").read_bytes())
    for at in ("planner_data", "storage_meta", "version"):
        setattr(index, at, Evil(mark))
        (source / ".metadata").write_bytes(pickle.dumps(index))
        result = ckptrt("import", "dcp", source, tmp_path / "run", "--step", 1)
        assert result.exit_code == 2 and "mkdir" in result.stderr
        setattr(index, at, None)
    assert not mark.exists() and no_run(tmp_path / "run")
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()  # so it would have been seen


@pytest.mark.parametrize(
    "name",
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "hub"),
        ("pathlib", "Path"),
        ("os", "x"),
    ],
)
def test_an_index_gets_no_other_name(name):
    class Named(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return NotImplemented

    data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in name) + b"\x93."
    with pytest.raises(UsageError, match=rf"{name[0]}\.{name[1]}"):
        read_index(data, "x")


# --- the run


def test_an_import_is_an_incarnation_of_its_own_that_goes_on_from_the_newest(tmp_path):
    source = write("safetensors", tmp_path / "src", tensors())
    run = tmp_path / "run"
    Writer(run).save(10, {"model.w": torch.ones(2)})
    assert ckptrt("import", "hf", source, run, "--step", 20).exit_code == 0
    catalog = open_catalog(str(run))
    assert [(c.step, c.incarnation) for c in catalog.path().commits] == [(20, 2), (10, 1)]
    assert catalog.fences()[2].parent == Parent(step=10, incarnation=1)
    for step in (20, 15, 3):
        refused = ckptrt("import", "hf", source, run, "--step", step)
        assert refused.exit_code == 2 and "already has step 20" in refused.stderr
    assert catalog.newest_incarnation() == 2


def test_a_running_job_is_left_alone(tmp_path):
    source = write("safetensors", tmp_path / "src", tensors())
    with hold_run(str(tmp_path / "run")):
        result = ckptrt("import", "hf", source, tmp_path / "run", "--step", 1)
    assert result.exit_code == 11
    assert os.listdir(tmp_path / "run") == ["run.lock"]


def test_a_commit_that_came_in_between_stays_on_the_path(tmp_path, monkeypatch):
    source = write("safetensors", tmp_path / "src", tensors())
    writer = Writer(tmp_path / "run")
    writer.save(10, {"model.w": torch.ones(2)})
    write_fence = Catalog.write_fence

    def late(self: Catalog, incarnation: int, *args: Any) -> Any:
        fence = write_fence(self, incarnation, *args)
        if incarnation == 2:  # a job that was looked at before the fence commits right after
            monkeypatch.setattr(writer.catalog, "newest_incarnation", lambda: 1)
            writer.save(11, {"model.w": torch.zeros(2)})
        return fence

    monkeypatch.setattr(Catalog, "write_fence", late)
    assert ckptrt("import", "hf", source, tmp_path / "run", "--step", 20).exit_code == 0
    assert [c.step for c in open_catalog(f"{tmp_path}/run").path().commits] == [20, 11, 10]


def test_an_optimizer_by_numbers_and_one_of_another_model_are_refused(tmp_path):
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, tmp_path / "src.pt")
    args = ("import", "torch", tmp_path / "src.pt", tmp_path / "run", "--step", 1, "--optimizer")
    numbered = ckptrt(*args, "optim:AdamW")
    assert numbered.exit_code == 2 and "get_optimizer_state_dict" in numbered.stderr
    other = {"state": {"x": {"m": torch.ones(2)}}, "param_groups": [{"params": ["x"], "lr": 1.0}]}
    torch.save({"model": model.state_dict(), "optim": other}, tmp_path / "src.pt")
    result = ckptrt(*args, "optim:AdamW")
    assert result.exit_code == 1 and "1 parameters that the model doesn't have, such as 'x'" in result.stderr
    for text in ("optim", "optim:", ":AdamW", "none:AdamW", "optim:AdamW:rng"):
        assert ckptrt(*args, text).exit_code == 2, text
    assert no_run(tmp_path / "run")
    mapped = ckptrt(*args, "optim:AdamW", "--map", "weight=x", "--map", "bias=")
    assert mapped.exit_code == 1  # the optimizer's name is the source's own
    other = {"state": {"weight": {"m": torch.ones(2)}}, "param_groups": [{"params": ["weight"], "lr": 1.0}]}
    torch.save({"model": model.state_dict(), "optim": other}, tmp_path / "src.pt")
    assert ckptrt(*args, "optim:AdamW", "--map", "weight=x", "--map", "bias=").exit_code == 0
    assert set(held(tmp_path / "run", 1, "optim")) == {"state.x.m"}


def test_bad_targets_and_names_are_refused(tmp_path):
    source = write("safetensors", tmp_path / "src", tensors())
    assert ckptrt("import", "hf", source, "--step", 1).exit_code == 2
    for component in ("rng", "", "a/b"):
        args = ("import", "hf", source, tmp_path / "run", "--step", 1, "--component", component)
        assert ckptrt(*args).exit_code == 2
    assert ckptrt("import", "hf", source, tmp_path / "run", "--step", 1, "--key", "x").exit_code == 2
    assert ckptrt("import", "torch", "s3://b/x.pt", tmp_path / "run", "--step", 1).exit_code == 2
    assert no_run(tmp_path / "run")


@pytest.mark.processes
def test_source_and_run_may_lie_on_an_object_store(s3_server: S3Server, tmp_path):
    place = f"{s3_server.url}/import-{tmp_path.name}"
    source = write("safetensors", tmp_path / "src", tensors()) / "model.safetensors"
    tier = open_tier(f"{place}/src", **s3_server.options)
    tier.create("model.safetensors", source.read_bytes())
    tier.close()
    for args in (
        ("import", "hf", f"{place}/src", f"{place}/run", "--step", "3"),
        ("export", "hf", f"{place}/run@3", str(tmp_path / "out")),
    ):
        command = [sys.executable, "-m", "ckptrt.storage.cli", *args]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **s3_server.env})
    assert expected(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == expected(tensors())
