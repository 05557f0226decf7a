"""Files and checkpoints that are odd, contradict themselves, or were made to do harm, in both directions."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle  # noqa: TID251  what others write
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from support_interop import Writer, ckptrt, expected, flip, held, raw

from ckptrt.errors import CorruptError, ExistsError, MismatchError, StorageError, UsageError
from ckptrt.storage.export import Output
from ckptrt.storage.importing import open_source, plan_import
from ckptrt.storage.interop.blobs import Bytes, Named
from ckptrt.storage.interop.dcp import save_dcp
from ckptrt.storage.interop.quant import DEFAULT_SKIP, is_weight
from ckptrt.storage.interop.tensorfile import deal_out
from ckptrt.storage.interop.torchfile import save_torch
from ckptrt.storage.interop.verified import VerifiedFiles
from ckptrt.storage.tiers.fs import Fs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FORMATS = ["safetensors", "hf", "torch", "dcp"]


def save(path: Path, tensors: dict[str, torch.Tensor], data: dict[str, Any] | None = None, step: int = 1) -> str:
    Writer(path, 2).save(step, {f"model.{name}": value for name, value in tensors.items()}, data)
    return f"{path}@{step}"


def shard(run: Path) -> Path:
    return max(run.rglob("r0*.safetensors"), key=lambda path: path.stat().st_size)


# --- a damaged checkpoint is refused before the first byte is written


class WatchedFs(Fs):
    """Notes every call that makes or changes a name."""

    made: list[str]

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & os.O_CREAT:
            self.made.append(path)
        return super().open(path, flags, mode)

    def mkdir(self, path: str) -> None:
        self.made.append(path)
        super().mkdir(path)


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_found_before_anything_is_made(tmp_path, format, monkeypatch):
    # Two chunks and more, so that plain data, which are read first, are whole.
    source = save(tmp_path / "run", {"big": torch.zeros(3 << 20), "small": torch.ones(2)})
    flip(shard(tmp_path / "run"), 5000)
    monkeypatch.setattr(WatchedFs, "made", [], raising=False)
    monkeypatch.setattr("ckptrt.storage.interop.output.Fs", WatchedFs)
    result = ckptrt("export", format, source, tmp_path / "new" / "out")
    assert result.exit_code == 4 and "don't have their digest" in result.stderr
    assert WatchedFs.made == []
    assert ckptrt("export", format, source, tmp_path / "out", "--dry-run").exit_code == 4
    assert ckptrt("export", format, save(tmp_path / "good", {"w": torch.ones(2)}), tmp_path / "out").exit_code == 0
    assert WatchedFs.made  # so it would have been seen


def test_a_shard_of_another_size_and_a_missing_manifest_are_damage(tmp_path):
    source = save(tmp_path / "run", {"w": torch.randn(50)})
    file = shard(tmp_path / "run")
    data = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(data + b"x")
    assert ckptrt("export", "hf", source, tmp_path / "out").exit_code == 4
    file.write_bytes(data)
    manifest = next((tmp_path / "run").rglob("manifest.json.zst"))
    manifest.rename(tmp_path / "away")
    result = ckptrt("export", "hf", source, tmp_path / "out")
    assert result.exit_code == 4 and "nothing was written" in result.stderr
    assert not (tmp_path / "out").exists()


def test_latest_says_which_checkpoints_it_passes_over(tmp_path):
    writer = Writer(tmp_path / "run")
    writer.save(1, {"model.w": torch.zeros(9)})
    writer.save(2, {"model.w": torch.ones(9)})
    next((tmp_path / "run" / "data").glob("s000000002*/r00000.safetensors")).unlink()
    result = ckptrt("export", "hf", f"{tmp_path}/run@latest", tmp_path / "out")
    assert result.exit_code == 0 and "step 2 is passed over" in result.stderr and "is missing" in result.stderr
    next((tmp_path / "run" / "data").glob("s000000001*/r00000.safetensors")).unlink()
    assert ckptrt("export", "hf", f"{tmp_path}/run@latest", tmp_path / "out2").exit_code == 4
    Writer(tmp_path / "none")
    assert ckptrt("export", "hf", f"{tmp_path}/none@latest", tmp_path / "out2").exit_code == 10


def test_a_checkpoint_that_is_pruned_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    source = save(tmp_path / "run", {"big": torch.zeros(3 << 20)})
    read = VerifiedFiles.read_into

    def late(self: VerifiedFiles, *args: Any) -> None:
        for path in [*(tmp_path / "run" / "commits").iterdir(), *(tmp_path / "run").rglob("r0*.safetensors")]:
            path.unlink()
        read(self, *args)

    monkeypatch.setattr(VerifiedFiles, "read_into", late)
    result = ckptrt("export", "hf", source, tmp_path / "out")
    assert result.exit_code == 10 and "step 1 was pruned while it was exported" in result.stderr
    assert not (tmp_path / "out").exists()


# --- names and parts


def test_names_that_mean_something_in_a_header_are_refused(tmp_path):
    w = torch.ones(2)
    for number, (tensors, ties) in enumerate(
        [({"__metadata__": w}, {}), *(({"w": w}, {name: "w"}) for name in ("format", "ckptrt.raw", "tensor_names"))]
    ):
        source = save(tmp_path / f"run{number}", tensors, {"model": {"ties": ties}})
        refused = ckptrt("export", "safetensors", source, tmp_path / "out")
        assert refused.exit_code == 1 and "give it another name with --map" in refused.stderr
        mapped = ckptrt("export", "safetensors", source, tmp_path / f"out{number}", "--map", r"(.*)=x.\1")
        assert mapped.exit_code == 0, mapped.output
    assert not (tmp_path / "out").exists()
    # A text in a header that happens to be a tensor's name makes no second name of it.
    safetensors.torch.save_file({"pt": w}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert open_source("safetensors", str(tmp_path / "m.safetensors")).ties == {}


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_odd_names_go_out_and_come_back(tmp_path, format):
    names = ["a/b", "ü.é😀", "x" * 5000, "A", "a", "..", "w@0:2", " ", "model", "object/model"]
    state = {name: torch.full((3,), float(number)) for number, name in enumerate(names)}
    source = save(tmp_path / "run", state)
    assert ckptrt("export", format, source, tmp_path / "out").exit_code == 0
    assert ckptrt("import", format, tmp_path / "out", tmp_path / "new", "--step", 1).exit_code == 0
    assert held(tmp_path / "new", 1) == expected(state)


def test_plain_data_that_look_like_a_modules_are_exported_as_what_they_are(tmp_path):
    trees: dict[str, Any] = {"loop": {"ties": 5}, "x": {"extra": [1]}, "y": {"ties": {"a": "b"}}, "empty": {}}
    source = save(tmp_path / "run", {"w": torch.ones(2)}, {"model": None, **trees})
    assert ckptrt("export", "torch", source, tmp_path / "all.pt").exit_code == 0
    assert set(torch.load(tmp_path / "all.pt", weights_only=True)) == {"model"}
    for name, tree in trees.items():
        file = tmp_path / f"{name}.pt"
        assert ckptrt("export", "torch", source, file, "--component", name).exit_code == 0
        assert torch.load(file, weights_only=True) == {name: tree}
        assert ckptrt("export", "hf", source, tmp_path / "hf", "--component", name).exit_code == 2


def test_a_cast_leaves_optimizers_alone(tmp_path):
    optim = {
        "kind": "AdamW",
        "groups": [{"names": ["w"], "options": {"lr": 1}}],
        "state": {"w": {"exp_avg": {"$here": "tensor"}}},
        "other": {},
    }
    tensors = {"model.w": torch.ones(2), "optim.state.w.exp_avg": torch.full((2,), 1e10)}
    Writer(tmp_path / "run").save(1, tensors, {"model": None, "optim": optim})
    args = ("--component", "model", "--component", "optim", "--dtype", "fp16")
    assert ckptrt("export", "safetensors", f"{tmp_path}/run@1", tmp_path / "out", *args).exit_code == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {
        "model.w": torch.float16, "optim.state.w.exp_avg": torch.float32,
    }  # fmt: skip


def test_folders_of_config_are_told(tmp_path):
    source = save(tmp_path / "run", {"w": torch.ones(2)})
    (tmp_path / "config" / "1_Pooling").mkdir(parents=True)
    result = ckptrt("export", "hf", source, tmp_path / "out", "--config", tmp_path / "config")
    assert "left out   folder 1_Pooling/ of --config" in result.stdout


def test_many_small_tensors_are_dealt_out_in_no_time():
    calls = 0

    class Counted(Bytes):
        @property
        def size_bytes(self) -> int:  # type: ignore[override]
            nonlocal calls
            calls += 1
            return 1

        @size_bytes.setter
        def size_bytes(self, value: int) -> None: ...

    groups = [[Named(name=str(i), dtype="uint8", shape=(1,), data=Counted(b"x"))] for i in range(1000)]
    files = deal_out(groups, 1 << 40)
    assert len(files) == 1 and calls <= 2000


# --- 8-bit weights


def test_what_is_no_linear_weight_stays():
    def is_taken(name: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 4)) -> bool:
        return is_weight(Named(name=name, dtype=dtype, shape=shape, data=Bytes(bytes(64))), DEFAULT_SKIP)

    assert is_taken("layers.0.mlp.down_proj.weight") and is_taken("blocks.0.qkv.weight", "bfloat16")
    for name in (
        "token.weight", "position.weight", "model.embed_tokens.weight", "transformer.wte.weight", "emb.weight",
        "tok_embeddings.weight", "vocab.weight", "lm_head.weight", "head.weight", "score_head.weight", "norm.weight",
        "layers.0.q_proj.bias", "layers.0.q_proj.lora_A", "w",
    ):  # fmt: skip
        assert not is_taken(name), name
    for dtype, shape in (
        ("float64", (4, 4)),
        ("int8", (4, 4)),
        ("float32", (4,)),
        ("float32", (4, 4, 1)),
        ("float32", (0, 4)),
    ):
        assert not is_taken("l.weight", dtype, shape)


@pytest.mark.slow
def test_8_bit_weights_that_can_not_be_are_refused_or_left(tmp_path):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(8, 8), "b.weight": torch.randn(8, 8), "z.weight": torch.zeros(3, 3)}
    source = save(tmp_path / "run", tensors, {"model": {"ties": {"c.weight": "b.weight"}}})
    result = ckptrt("export", "hf", source, tmp_path / "out", "--quant", "int8", "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["quantised"] == ["a.weight", "z.weight"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata()["c.weight"] == "b.weight"  # the other name still finds its tensor
        assert raw(opened.get_tensor("b.weight")) == raw(tensors["b.weight"].bfloat16())
    for number, value in enumerate((float("nan"), float("inf"))):
        bad = {"a.weight": torch.full((2, 2), value)}
        source = save(tmp_path / f"bad{number}", bad)
        refused = ckptrt("export", "hf", source, tmp_path / "bad", "--quant", "int8")
        assert refused.exit_code == 1 and "a.weight holds NaN or infinite values" in refused.stderr
        assert not (tmp_path / "bad").exists()


# --- places


def test_names_of_any_length_that_a_disk_takes_are_taken(tmp_path):
    source = save(tmp_path / "run", {"w": torch.ones(2)})
    for name in ("😀" * 63, "x" * 255, "é" * 127):
        assert ckptrt("export", "hf", source, tmp_path / name).exit_code == 0
    assert ckptrt("export", "hf", source, tmp_path / ("x" * 256)).exit_code == 1


def test_a_folder_that_is_no_export_is_not_searched(tmp_path):
    (tmp_path / "home" / "deep").mkdir(parents=True)
    looked: list[str] = []

    class Searched(Fs):
        def scandir(self, path: str) -> Any:
            looked.append(path)
            return super().scandir(path)

    with pytest.raises(ExistsError, match="no earlier export"):
        Output(str(tmp_path / "home"), fs=Searched())
    assert looked == [f"{tmp_path}/home"]


def test_an_earlier_export_stays_if_the_new_one_can_not_take_its_place(tmp_path):
    source = save(tmp_path / "run", {"w": torch.ones(2)})
    assert ckptrt("export", "hf", source, tmp_path / "out").exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    class Stuck(Fs):
        renames = 0

        def rename(self, old: str, new: str) -> None:
            self.renames += 1
            if self.renames in (1, 3):
                raise OSError(39 if self.renames == 1 else 5, "made up")
            super().rename(old, new)

    with Output(str(tmp_path / "out"), force=True, fs=Stuck()) as output:
        output.tier.create("x", b"new")
        with pytest.raises(StorageError, match="EIO"):
            output.publish()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


# --- sources of imports


def header(path: Path, text: bytes | dict[str, Any], data: bytes = bytes(8)) -> Path:
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def test_headers_of_odd_kinds_are_damage(tmp_path):
    def entry(**fields: Any) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}

    def as_raw(shape: list[Any]) -> dict[str, Any]:
        return {"__metadata__": {"ckptrt.raw": json.dumps({"a": {"dtype": "uint8", "shape": shape}})},
                "a": entry(dtype="U8", shape=[8])}  # fmt: skip

    for wrong in (
        {"a": entry(dtype=[])}, {"a": entry(dtype={"x": 1})}, {"a": entry(dtype=None)},
        {"a": entry(shape=[1 << 70, 0], data_offsets=[0, 0]), "b": entry()},
        as_raw([-2, -4]), as_raw([8.0]), as_raw([True, 8]),
    ):  # fmt: skip
        with pytest.raises(CorruptError):
            open_source("hf", str(header(tmp_path / "x.safetensors", wrong)))


def test_half_a_character_is_no_name(tmp_path):
    text = b'{"a\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    source = header(tmp_path / "x.safetensors", text)
    result = ckptrt("import", "hf", source, tmp_path / "run", "--step", 1)
    assert result.exit_code == 1 and "no text" in result.stderr and not (tmp_path / "run").exists()
    assert ckptrt("import", "hf", source, tmp_path / "run", "--step", 1, "--map", ".*=a").exit_code == 0


def folder(path: Path, files: dict[str, dict[str, torch.Tensor]], index: str = "") -> Path:
    path.mkdir()
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, path / name)
    if index:
        (path / "model.safetensors.index.json").write_text('{"weight_map":' + index + "}")
    return path


def test_folders_that_can_be_read_in_two_ways(tmp_path):
    one, two = torch.ones(2), torch.zeros(2)
    twice = folder(
        tmp_path / "a", {"a.safetensors": {"x": one}, "b.safetensors": {"x": two, "y": one}},
        '{"x":"a.safetensors","y":"b.safetensors"}',
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"x in b\.safetensors"):
        open_source("hf", str(twice))
    keys = folder(
        tmp_path / "b", {"a.safetensors": {"x": one}, "b.safetensors": {"x": two}},
        '{"x":"a.safetensors","x":"b.safetensors"}',
    )  # fmt: skip
    with pytest.raises(CorruptError, match="twice"):
        open_source("hf", str(keys))
    stale = folder(
        tmp_path / "c", {"a.safetensors": {"x": one}, "model.safetensors": {"x": two}}, '{"x":"a.safetensors"}'
    )
    assert open_source("hf", str(stale)).left_out == ("file model.safetensors",)
    single = folder(tmp_path / "d", {"model.safetensors": {"x": one}, "adapter.safetensors": {"y": two}})
    assert open_source("hf", str(single)).left_out == ("file adapter.safetensors",)


def torch_file(path: Path, value: Any) -> str:
    torch.save(value, path)
    return str(path)


def rezip(source: str, target: Path, packed: str) -> str:
    """The same records, of which those whose names end so are compressed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for record in old.infolist():
            kind = zipfile.ZIP_DEFLATED if record.filename.endswith(packed) else zipfile.ZIP_STORED
            new.writestr(record.filename, old.read(record), kind)
    return str(target)


def test_torch_files_that_hide_their_size_are_refused(tmp_path):
    plain = torch_file(tmp_path / "a.pt", {"w": torch.arange(1000.0)})
    for packed in ("pkl", "/0", ""):
        with pytest.raises(UsageError, match="compressed"):
            open_source("torch", rezip(plain, tmp_path / "b.pt", packed))
    same = open_source("torch", rezip(plain, tmp_path / "b.pt", "nothing"))
    assert set(plan_import(same).tensors) == {"model.w"}
    with pytest.raises(UsageError, match=r"64\.0 GiB, which are 4 B over and over"):
        open_source("torch", torch_file(tmp_path / "c.pt", {"w": torch.ones(1).expand(1 << 34)}))
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "d", no_dist=True)
    packed = rezip(torch_file(tmp_path / "e.pt", torch.ones(3)), tmp_path / "f.pt", "")
    data = Path(packed).read_bytes()
    (tmp_path / "d" / "__0_0.distcp").write_bytes(data)
    index = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = 0, len(data)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UsageError, match="compressed"):
        plan_import(open_source("dcp", str(tmp_path / "d")))


def test_names_that_become_one_are_refused(tmp_path):
    one = torch.ones(2)
    for tree in ({"a.b": one, "a": {"b": one * 2}}, {1: one, "1": one * 2}):
        with pytest.raises(MismatchError, match="two values would both be called"):
            open_source("torch", torch_file(tmp_path / "a.pt", tree))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_opened(tmp_path, make):
    make(tmp_path / "x")
    result = ckptrt("import", "torch", tmp_path / "x", tmp_path / "run", "--step", 1)
    assert result.exit_code == 2 and "there is no file" in result.stderr


def test_nobody_is_advised_to_run_what_is_in_a_file(tmp_path):
    (tmp_path / "x.pt").write_text("not a pickle")
    result = ckptrt("import", "torch", tmp_path / "x.pt", tmp_path / "run", "--step", 1)
    assert result.exit_code == 4 and "weights_only" not in result.output
    torch.save({}, tmp_path / "x.pt")
    assert "holds nothing" in ckptrt("import", "torch", tmp_path / "x.pt", tmp_path / "run", "--step", 1).stderr


def laughs() -> Any:
    """A few bytes of pickle, and 10 ** 9 words when shown."""
    value: Any = "ha"
    for _ in range(9):
        value = [value] * 10
    return value


def _set(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for info in index.storage_data.values():
            setattr(info, name, value())

    return change


def _set_dtype(index: Any) -> None:
    index.state_dict_metadata["model.w"].properties.dtype = laughs()


def _set_path(index: Any) -> None:
    index.planner_data["model.w"] = ("model", laughs())


def _set_size(index: Any) -> None:
    index.state_dict_metadata["model.w"].size = torch.Size([-4])


def _set_name(index: Any) -> None:
    index.state_dict_metadata[5] = index.state_dict_metadata["model.w"]


@pytest.mark.parametrize(
    "change",
    [
        _set_dtype, _set_path, _set_size, _set_name, _set("offset", lambda: "x"), _set("offset", lambda: -1),
        _set("relative_path", laughs), _set("length", lambda: 1.0),
    ],
)  # fmt: skip
def test_an_index_of_odd_kinds_is_damage_and_is_not_even_shown(tmp_path, change):
    dcp.save({"model": {"w": torch.arange(4.0)}}, checkpoint_id=tmp_path / "d", no_dist=True)
    index = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    change(index)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CorruptError) as caught:
        open_source("dcp", str(tmp_path / "d"))
    assert len(str(caught.value)) < 500


def test_chunks_that_overlap_and_leave_a_gap_are_damage(tmp_path):
    dcp.save({"model": {"w": torch.arange(4.0)}}, checkpoint_id=tmp_path / "d", no_dist=True)
    index = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    entry = index.state_dict_metadata["model.w"]
    at, info = next((at, info) for at, info in index.storage_data.items() if at.fqn == "model.w")
    boxes = [
        dataclasses.replace(entry.chunks[0], offsets=torch.Size([start]), sizes=torch.Size([2])) for start in (0, 1)
    ]
    stream = io.BytesIO()
    torch.save(torch.arange(2.0), stream)
    (tmp_path / "d" / "x.distcp").write_bytes(stream.getvalue())
    for box in boxes:
        index.storage_data[type(at)(at.fqn, box.offsets)] = type(info)("x.distcp", 0, len(stream.getvalue()))
    entry.chunks = boxes
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CorruptError, match="isn't whole"):
        open_source("dcp", str(tmp_path / "d"))


def test_steps_and_names_that_can_not_be(tmp_path):
    source = header(tmp_path / "x.safetensors", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    assert ckptrt("import", "hf", source, tmp_path / "run", "--step", 10**18).exit_code == 2
    assert ckptrt("import", "hf", source, tmp_path / "run", "--step", 10**18 - 1).exit_code == 0
    torch.save({"o": {"a": torch.ones(2)}, "p": {"state": {}, "param_groups": []}}, tmp_path / "x.pt")
    args = ("import", "torch", tmp_path / "x.pt", tmp_path / "new", "--step", 1, "--component", "o", "--optimizer")
    assert ckptrt(*args, "p:AdamW:o").exit_code == 2
    assert not (tmp_path / "new").exists()
    assert ckptrt(*args, "p:AdamW").exit_code == 0


@pytest.mark.parametrize("save_it", [save_torch, save_dcp])
def test_a_full_disk_is_called_one(tmp_path, save_it):
    """torch's own errors say `unexpected pos`, and those of DCP aren't even an Exception."""
    state, limits = {"w": torch.ones(1 << 20)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StorageError, match="EFBIG"):
            save_it(state, str(tmp_path / "x"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
