"""Exports: what is written equals what was stored, whole or not at all, and a damaged source is refused."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from support_interop import Writer, ckptrt, expected, flip, random_tensor, raw

from ckptrt.adapters import adapt
from ckptrt.errors import CorruptError, MismatchError, StorageError, UsageError
from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.cli import _documents
from ckptrt.storage.export import ExportOptions, Inventory, Output, export, plan_export
from ckptrt.storage.interop import casting
from ckptrt.storage.interop import dcp as dcp_format
from ckptrt.storage.interop.blobs import Assembled, Bytes, Image, Named, Part
from ckptrt.storage.interop.names import rename
from ckptrt.storage.tiers.fs import Fs
from ckptrt.storage.tiers.local import LocalTier

FORMATS = ["safetensors", "hf", "torch", "dcp"]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.norm = torch.nn.LayerNorm(6, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def save_net(path: Path, world_size: int = 3, step: int = 5) -> Net:
    model = net()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
    Writer(path, world_size).save(step, tensors, {"model": {"ties": {"head.weight": "embed.weight"}}, "loop": {"n": 1}})
    return model


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in safetensors.torch.load_file(file).items()
    }


def leftovers(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if ".export-" in entry.name]


# --- safetensors and hf


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_safetensors_hold_the_state_of_any_number_of_ranks(tmp_path, world_size):
    model = save_net(tmp_path / "run", world_size)
    result = ckptrt("export", "safetensors", f"{tmp_path}/run@latest", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "left out   component loop" in result.stdout
    assert sorted(os.listdir(tmp_path / "out")) == ["ckptrt-export.json", "model.safetensors"]
    fresh = net(1)
    safetensors.torch.load_model(fresh, tmp_path / "out" / "model.safetensors", strict=True)
    assert expected(fresh.state_dict()) == expected(model.state_dict())
    assert fresh.head.weight is fresh.embed.weight
    assert not leftovers(tmp_path)


def test_hf_writes_shards_an_index_and_the_config_files(tmp_path):
    model = save_net(tmp_path / "run")
    config = tmp_path / "config"
    config.mkdir()
    for name in ("config.json", "tokenizer.json", "old.safetensors", ".hidden"):
        (config / name).write_text(name)
    args = ("export", "hf", f"{tmp_path}/run@5", tmp_path / "out", "--max-shard-size", "400B", "--config", config)
    result = ckptrt(*args, "--json")
    assert result.exit_code == 0, result.output
    document = msgspec.json.decode(result.stdout, type=_documents.Export)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) >= 3
    assert sorted(set(index["weight_map"].values())) == shards
    total = 0
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            value = opened.get_tensor(name)
        assert raw(value) == raw(model.state_dict()[name])
        total += value.numel() * value.element_size()
    assert index["metadata"]["total_size"] == total == document.size_bytes
    for file in shards:
        assert (
            sum(v.numel() * v.element_size() for v in safetensors.torch.load_file(tmp_path / "out" / file).values())
            <= 400
        )
    assert {file.name for file in document.files} == set(os.listdir(tmp_path / "out")) - {"ckptrt-export.json"}
    assert (tmp_path / "out" / "config.json").read_text() == "config.json"
    assert not (tmp_path / "out" / "old.safetensors").exists() and not (tmp_path / "out" / ".hidden").exists()


def test_tensors_are_taken_from_files_of_older_checkpoints_too(tmp_path):
    writer = Writer(tmp_path / "run", 3)
    base = random_tensor("float32", (7, 5), random.Random(1))
    receipts = writer.save(1, {"model.base": base})
    adapter = torch.randn(3, 4)
    writer.save(2, {"model.base": base, "model.adapter": adapter}, borrow=receipts)
    assert ckptrt("export", "hf", f"{tmp_path}/run@2", tmp_path / "out").exit_code == 0
    assert expected(load_folder(tmp_path / "out")) == expected({"adapter": adapter, "base": base})


def test_buffers_that_each_rank_stores_are_taken_once_and_told_if_they_differ(tmp_path):
    same, first, second = torch.arange(4.0), torch.ones(2), torch.zeros(2)
    own = {"model.same": [same, same], "model.stat": [first, second]}
    Writer(tmp_path / "run", 2).save(1, {"model.w": torch.ones(3)}, own=own)
    result = ckptrt("export", "safetensors", f"{tmp_path}/run@1", tmp_path / "out")
    assert expected(load_folder(tmp_path / "out")) == expected({"w": torch.ones(3), "same": same, "stat": first})
    assert "model.stat differs between ranks: rank 0's is taken" in result.stderr
    assert "model.same" not in result.stderr


def test_several_components_keep_their_names(tmp_path):
    tensors = {"model.w": torch.ones(2), "ema.w": torch.zeros(2)}
    Writer(tmp_path / "run").save(1, tensors, {"model": None, "ema": None})
    args = (
        "export",
        "safetensors",
        f"{tmp_path}/run@1",
        tmp_path / "out",
        "--component",
        "model",
        "--component",
        "ema",
    )
    assert ckptrt(*args).exit_code == 0
    assert set(load_folder(tmp_path / "out")) == {"model.w", "ema.w"}


def test_a_component_that_is_not_there_and_one_that_is_unclear_are_refused(tmp_path):
    Writer(tmp_path / "run").save(1, {"a.w": torch.ones(2), "b.w": torch.ones(2)}, {"a": None, "b": None})
    for args in ((), ("--component", "model")):
        result = ckptrt("export", "hf", f"{tmp_path}/run@1", tmp_path / "out", *args)
        assert result.exit_code == 2
        assert "a (1 tensors), b (1 tensors)" in result.stderr
    assert not (tmp_path / "out").exists()


def test_dtypes_that_safetensors_lacks_are_stored_as_bytes_or_refused(tmp_path):
    odd = torch.randn(3, 2, dtype=torch.complex128)
    Writer(tmp_path / "run", 2).save(1, {"model.odd": odd})
    refused = ckptrt("export", "hf", f"{tmp_path}/run@1", tmp_path / "out")
    assert refused.exit_code == 1 and "complex128" in refused.stderr
    result = ckptrt("export", "safetensors", f"{tmp_path}/run@1", tmp_path / "out")
    assert result.exit_code == 0 and "odd is stored as bytes" in result.stderr
    assert raw(load_folder(tmp_path / "out")["odd"]) == raw(odd)


def test_a_tensor_is_assembled_from_any_boxes_as_numpy_does_it():
    rng = random.Random(8)
    for _ in range(300):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        whole = numpy.frombuffer(rng.randbytes(int(numpy.prod(shape, dtype=int))), dtype=numpy.uint8).reshape(shape)
        boxes = [((0,) * len(shape), shape)]
        for _ in range(rng.randint(0, 5) if shape else 0):  # cut a box in two along some axis
            offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
            axis = rng.randrange(len(shape))
            at = rng.randint(0, sizes[axis])
            for low, size in ((0, at), (at, sizes[axis] - at)):
                begin = tuple(o + low * (i == axis) for i, o in enumerate(offsets))
                boxes.append((begin, tuple(size if i == axis else s for i, s in enumerate(sizes))))
        parts = []
        for offsets, sizes in boxes:
            box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            parts.append(Part(offsets=offsets, sizes=sizes, data=Bytes(box.tobytes())))
        tensor = Assembled("x", "uint8", shape, parts)
        start = rng.randint(0, whole.size - 1)
        out = memoryview(bytearray(rng.randint(1, whole.size - start)))
        tensor.read_into(start, out)
        assert bytes(out) == whole.tobytes()[start : start + len(out)]
        held = [part for part in parts if part.data.size_bytes]
        for wrong in (held[1:], [*held, held[0]]):
            with pytest.raises(CorruptError, match="x isn't whole"):
                Assembled("x", "uint8", shape, wrong)


# --- never a part, never damage


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_source_is_refused_and_nothing_appears(tmp_path, format):
    save_net(tmp_path / "run", 2)
    shard = max((tmp_path / "run" / "data").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(shard, shard.stat().st_size - 40)
    result = ckptrt("export", format, f"{tmp_path}/run@5", tmp_path / "out")
    assert result.exit_code == 4
    assert "damaged" in result.stderr and shard.name in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_missing_shard_file_is_damage(tmp_path):
    save_net(tmp_path / "run", 2)
    next((tmp_path / "run" / "data").rglob("r00001.safetensors")).unlink()
    assert ckptrt("export", "hf", f"{tmp_path}/run@5", tmp_path / "out").exit_code == 4
    assert sorted(os.listdir(tmp_path)) == ["run"]


class FailingFs(Fs):
    """Fails the n-th call that could fail."""

    def __init__(self, fail_at: int) -> None:
        self.calls = 0
        self.fail_at = fail_at


def _counted(name: str) -> Any:
    def call(self: FailingFs, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return getattr(Fs, name)(self, *args)

    return call


for _name in ("open", "pwrite", "fsync", "link", "rename", "mkdir", "fsync_dir", "pread_into", "scandir"):
    setattr(FailingFs, _name, _counted(_name))


def test_whichever_call_fails_the_folder_appears_whole_or_not_at_all(tmp_path):
    save_net(tmp_path / "run", 2)
    wanted = None
    for fail_at in range(10_000):
        out, fs = tmp_path / f"out{fail_at}", FailingFs(fail_at)
        options = ExportOptions(format="hf", max_shard_bytes=600)
        catalog = open_catalog(f"{tmp_path}/run")
        checkpoint = catalog.open_checkpoint(catalog.find(5))
        failed = False
        with Inventory(checkpoint) as inventory:
            try:
                with Output(str(out), fs=fs) as output:
                    export(plan_export(inventory, options), output, {}, lambda done: None)
            except StorageError:
                failed = True
        if out.exists():
            files = {path.name: path.read_bytes() for path in out.iterdir()}
            wanted = wanted or files
            assert files == wanted
        else:
            assert failed
        if fail_at and fs.calls < fail_at:
            break
    assert fail_at > 30
    assert wanted is not None


class LyingFs(Fs):
    """Gives back the last byte of a file other than it was written."""

    def pread_into(self, fd: int, out: memoryview, offset: int) -> int:
        count = super().pread_into(fd, out, offset)
        if count and offset + count == os.fstat(fd).st_size:
            out[count - 1] ^= 1
        return count


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_gives_back_something_else_is_found_out(tmp_path, format, monkeypatch):
    save_net(tmp_path / "run", 2)
    catalog = open_catalog(f"{tmp_path}/run")
    save = torch.save
    if format == "torch":  # torch reads the file by itself
        monkeypatch.setattr(torch, "save", lambda state, path: save({"model": torch.ones(3)}, path))
    checkpoint, out = catalog.open_checkpoint(catalog.find(5)), tmp_path / "out"
    output = Output(str(out), fs=LyingFs(), is_file=format == "torch")
    with output, Inventory(checkpoint) as inventory:
        plan = plan_export(inventory, ExportOptions(format=format))
        if format == "dcp":
            monkeypatch.setattr(dcp_format, "open_tier", lambda path: LocalTier(path, fs=LyingFs()))
        with pytest.raises((StorageError, CorruptError)):
            export(plan, output, {}, lambda done: None)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    save_net(tmp_path / "run")
    source = f"{tmp_path}/run@5"
    (tmp_path / "empty").mkdir()
    assert ckptrt("export", "hf", source, tmp_path / "empty").exit_code == 0
    again = ckptrt("export", "hf", source, tmp_path / "empty")
    assert again.exit_code == 1 and "--force replaces it" in again.stderr
    assert ckptrt("export", "hf", source, tmp_path / "empty", "--force", "--dtype", "bf16").exit_code == 0
    assert load_folder(tmp_path / "empty")["embed.weight"].dtype == torch.bfloat16
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    refused = ckptrt("export", "hf", source, tmp_path / "empty", "--force")
    assert refused.exit_code == 1 and "notes.txt" in refused.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    assert ckptrt("export", "hf", source, tmp_path / "other", "--force").exit_code == 1
    assert (tmp_path / "other" / "thesis.tex").read_text() == "mine"
    assert ckptrt("export", "hf", source, "s3://bucket/out").exit_code == 2
    assert not leftovers(tmp_path)


def test_a_dry_run_writes_nothing(tmp_path):
    save_net(tmp_path / "run")
    for format in FORMATS:
        result = ckptrt("export", format, f"{tmp_path}/run@5", tmp_path / "out", "--dry-run", "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["num_tensors"] == 11
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_an_export_of_safetensors_loads_neither_torch_nor_numpy(tmp_path):
    save_net(tmp_path / "run")
    script = (
        "import sys\nfrom ckptrt.storage.cli import cli\n"
        f"cli(['export', 'hf', '{tmp_path}/run@5', '{tmp_path}/out'], standalone_mode=False)\n"
        "print(*({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    assert (tmp_path / "out" / "model.safetensors").exists()


# --- other names


def test_rules_rename_drop_and_miss_nothing_in_silence(tmp_path):
    save_net(tmp_path / "run")
    args = ("export", "hf", f"{tmp_path}/run@5", tmp_path / "out", "--map", r"layers\.(\d+)\.(.*)=h.\1.\2")
    refused = ckptrt(*args)
    assert refused.exit_code == 1
    assert "no rule of --map fits 6 of 12 names" in refused.stderr and "norm.bias" in refused.stderr
    result = ckptrt(*args, "--map", "none=", "--map", r"(embed|norm|count|head)(.*)=\1\2", "--map", "x=y")
    assert result.exit_code == 0, result.output
    assert "--map 'x=y' met no name" in result.stderr
    assert "left out   none (dropped by --map)" in result.stdout
    assert set(load_folder(tmp_path / "out")) == {
        "count", "embed.weight", "norm.bias", "norm.weight",
        *(f"h.{i}.{w}" for i in range(3) for w in ("bias", "weight")),
    }  # fmt: skip


def test_rules_may_be_a_function(tmp_path):
    (tmp_path / "names.py").write_text("def to(name):\n    return None if name == 'b' else name.upper()\n")
    found = rename(["a", "b", "c"], [f"{tmp_path}/names.py:to"])
    assert (found.names, found.dropped) == ({"A": "a", "C": "c"}, ("b",))
    for rule in (f"{tmp_path}/names.py:no", f"{tmp_path}/none.py:to", "no rule", "(=x", r"(.*)=\2"):
        with pytest.raises(UsageError):
            rename(["a"], [rule])
    with pytest.raises(MismatchError, match="a and b would both be x"):
        rename(["a", "b"], [".=x"])


# --- casts


def cast_all(values: torch.Tensor, dtype: str) -> tuple[torch.Tensor, casting.Loss]:
    name = str(values.dtype).removeprefix("torch.")
    found = casting.cast(Named(name="x", dtype=name, shape=tuple(values.shape), data=Bytes(raw(values))), dtype)
    out = b"".join(bytes(piece) for piece in Image([found.data]))
    assert isinstance(found.data, casting.Cast)
    return torch.frombuffer(bytearray(out), dtype=getattr(torch, dtype)), found.data.loss


@pytest.mark.parametrize("new", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("old", ["float32", "float16", "bfloat16"])
def test_casts_round_as_torch_does(old, new):
    if old == new:
        return
    bits = numpy.random.default_rng(5).integers(0, 1 << 32, 1 << 18, dtype=numpy.uint32)
    edges = [
        0,
        1 << 31,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F7FFFFF,
        1,
        0x3F808000,
        0x3F818000,
    ]
    source = torch.from_numpy(numpy.concatenate([bits, numpy.array(edges, dtype=numpy.uint32)])).view(torch.float32)
    values = (
        source
        if old == "float32"
        else torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(getattr(torch, old))
    )
    found, loss = cast_all(values, new)
    wanted = values.to(getattr(torch, new))
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(wanted.isnan(), values.isnan())
    numbers = ~wanted.isnan()
    assert raw(found[numbers]) == raw(wanted[numbers])
    finite = values.isfinite() & wanted.isfinite()
    error = (values.double() - wanted.double())[finite].abs()
    assert loss.max_abs == float(error.max())
    assert loss.num_overflow == int((values.isfinite() & wanted.isinf()).sum())


def test_doubles_are_rounded_once():
    rng = random.Random(3)
    values = [
        1 + 2**-8 + 2**-40,
        1 + 2**-8 - 2**-40,
        1 + 2**-8,
        1 + 3 * 2**-8,
        -(1 + 2**-8 + 2**-50),
        3.4e38,
        1e39,
        1e-45,
    ]
    values += [rng.uniform(1, 2) * 2.0 ** rng.randint(-140, 127) for _ in range(2000)]
    found, _ = cast_all(torch.tensor(values, dtype=torch.float64), "bfloat16")
    words = found.view(torch.int16)
    for value, got, word in zip(values, found.tolist(), words.tolist(), strict=True):
        if got in (float("inf"), float("-inf")):
            assert abs(value) >= 2.0**128 - 2.0**119
            continue
        around = torch.tensor([word - 1, word + 1], dtype=torch.int16).view(torch.bfloat16).double().tolist()
        mine = abs(Fraction(value) - Fraction(got))
        others = [abs(Fraction(value) - Fraction(other)) for other in around if numpy.isfinite(other)]
        assert all(mine < other or (mine == other and word % 2 == 0) for other in others), value


def test_a_cast_is_told_with_the_largest_error(tmp_path):
    tensors = {"model.a": torch.tensor([1.0, 1.001]), "model.b": torch.tensor([70000.0]), "model.n": torch.tensor([3])}
    Writer(tmp_path / "run").save(1, tensors)
    result = ckptrt("export", "hf", f"{tmp_path}/run@1", tmp_path / "out", "--dtype", "fp16", "--json")
    exact = torch.tensor(1.001)
    losses = {loss["key"]: loss for loss in json.loads(result.stdout)["losses"]}
    assert set(losses) == {"a", "b"}
    assert losses["b"]["num_overflow"] == 1
    assert losses["a"]["max_abs"] == float(exact.double() - exact.half().double())
    told = ckptrt("export", "hf", f"{tmp_path}/run@1", tmp_path / "out2", "--dtype", "fp16")
    assert "in a" in told.stdout and "1 value of b became infinite in float16" in told.stderr
    quiet = ckptrt("export", "hf", f"{tmp_path}/run@1", tmp_path / "out3", "--dtype", "fp16", "-q")
    assert quiet.stdout == "model.safetensors\n" and "b became infinite" in quiet.stderr
    assert load_folder(tmp_path / "out")["n"].dtype == torch.int64


@pytest.mark.slow
def test_int8_weights_are_what_torchao_makes_of_them(tmp_path):
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.quantization import Int8Tensor, PerRow

    model = save_net(tmp_path / "run")
    args = ("export", "hf", f"{tmp_path}/run@5", tmp_path / "out", "--quant", "int8", "--max-shard-size", "300B")
    result = ckptrt(*args, "--json")
    assert result.exit_code == 0, result.output
    assert {loss["key"] for loss in json.loads(result.stdout)["losses"]} == {f"layers.{i}.weight" for i in range(3)}
    loaded: dict[str, Any] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            part, rest = unflatten_tensor_state_dict(
                {name: opened.get_tensor(name) for name in list(opened.keys())},
                opened.metadata(),
            )
        loaded.update(part | rest)
    state = model.state_dict()
    assert set(loaded) == set(state) - {"head.weight"}
    for name, value in loaded.items():
        if name.startswith("layers") and name.endswith("weight"):
            wanted = Int8Tensor.from_hp(state[name], granularity=PerRow())
            assert torch.equal(value.qdata, wanted.qdata) and torch.equal(value.scale, wanted.scale)
            assert float((value.dequantize() - state[name]).abs().max()) <= float(state[name].abs().max()) / 127
        else:
            assert raw(value) == raw(state[name])


# --- torch and dcp


def trained(path: Path) -> tuple[Net, torch.optim.Optimizer]:
    """A checkpoint of a model and an optimizer, as the adapters describe them."""
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    hidden = model.embed(torch.tensor([1, 2]))
    for layer in model.layers:
        hidden = layer(hidden)
    model.head(model.norm(hidden.bfloat16()).float()).sum().backward()
    optim.step()
    tensors, data = {}, {}
    for adapter in adapt({"model": model, "optim": optim, "loop": {"n": 3}}, 0, 1, rng=False):
        capture = adapter.capture()
        tensors.update({item.key: item.tensor.detach() for item in capture.items})
        data[adapter.name] = capture.data
    Writer(path, 3).save(1, tensors, data)
    return model, optim


def test_torch_export_loads_with_weights_only_and_restores_model_and_optimizer(tmp_path):
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model, optim = trained(tmp_path / "run")
    result = ckptrt("export", "torch", f"{tmp_path}/run@1", tmp_path / "out.pt")
    assert result.exit_code == 0, result.output
    assert "left out   component loop" in result.stdout
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert set(found) == {"model", "optim"}
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    fresh = net(1)
    fresh.load_state_dict(found["model"], strict=True)
    assert expected(fresh.state_dict()) == expected(model.state_dict())
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    set_optimizer_state_dict(fresh, other, found["optim"])
    assert other.param_groups[0]["lr"] == 0.1
    names = dict(model.named_parameters())
    for name, parameter in fresh.named_parameters():
        for entry, value in optim.state.get(names[name], {}).items():
            assert torch.equal(other.state[parameter][entry], value)
    assert ckptrt("export", "torch", f"{tmp_path}/run@1", tmp_path / "out.pt").exit_code == 1
    assert ckptrt("export", "torch", f"{tmp_path}/run@1", tmp_path / "out.pt", "--force").exit_code == 0
    (tmp_path / "folder").mkdir()
    assert ckptrt("export", "torch", f"{tmp_path}/run@1", tmp_path / "folder", "--force").exit_code == 1
    assert sorted(os.listdir(tmp_path)) == ["folder", "out.pt", "run"]


def test_other_components_come_as_their_state_dict_was(tmp_path):
    trained(tmp_path / "run")
    args = ("export", "torch", f"{tmp_path}/run@1", tmp_path / "out.pt", "--component", "loop")
    assert ckptrt(*args).exit_code == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"loop": {"n": 3}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_export_loads_with_torch(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, _ = trained(tmp_path / "run")
    assert ckptrt("export", "dcp", f"{tmp_path}/run@1", tmp_path / "out").exit_code == 0
    fresh = net(1)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert expected(fresh.state_dict()) == expected(model.state_dict())


def test_options_that_make_no_sense_are_refused(tmp_path):
    save_net(tmp_path / "run")
    source, out = f"{tmp_path}/run@5", tmp_path / "out"
    for args in (
        ("torch", source, out, "--map", "a=b"),
        ("dcp", source, out, "--config", tmp_path),
        ("hf", source, out, "--component", "model", "--component", "loop"),
        ("hf", source, out, "--max-shard-size", "five"),
        ("hf", source, out, "--max-shard-size", "0"),
    ):
        assert ckptrt("export", *args).exit_code == 2
    assert ckptrt("export", "hf", source, out, "--config", tmp_path / "none").exit_code == 10
    assert ckptrt("export", "hf", f"{tmp_path}/run@6", out).exit_code == 10
