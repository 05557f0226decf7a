"""What real ranks saved is exported; what torch saved on real ranks is imported; trainings start from an import."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import support_reshard
import torch
import torch.distributed.checkpoint as dcp
from support_interop import ckptrt, expected, held, raw
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptrt as library
from ckptrt.errors import MismatchError
from ckptrt.storage.catalog import open_catalog

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def wanted() -> dict[str, torch.Tensor]:
    """The state that every layout holds."""
    state = support_reshard.Model(0).state_dict()
    return {
        name: support_reshard.value(support_reshard.canonical(name), tuple(tensor.shape), tensor.dtype)
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(("size", "layout"), [(2, "fsdp"), (2, "ddp"), (3, "fsdp")])
def test_what_ranks_saved_is_exported_whole(worlds, tmp_path, size, layout):
    worlds(size).run(support_reshard.save, str(tmp_path / "run"), layout)
    assert ckptrt("export", "hf", f"{tmp_path}/run@3", tmp_path / "hf").exit_code == 0
    fresh = support_reshard.Model(1)
    safetensors.torch.load_model(fresh, tmp_path / "hf" / "model.safetensors", strict=True)
    assert expected(fresh.state_dict()) == expected(wanted())
    assert ckptrt("export", "torch", f"{tmp_path}/run@3", tmp_path / "all.pt").exit_code == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert expected(found["model"]) == expected(wanted())
    moment = found["optim"]["state"]["middle.weight"]["exp_avg"]
    assert raw(moment) == raw(support_reshard.value("middle.weight/exp_avg", (6, 6), torch.float32))


def dcp_save(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = support_reshard.build("fsdp", seed=0)
    support_reshard.fill(model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def dcp_load(rank: int, world_size: int, folder: str) -> list[str]:
    """Names of parameters that aren't what they should be."""
    model, optimizer = support_reshard.build("fsdp", seed=9)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return [name for name in support_reshard.differences(model, optimizer) if name in model.state_dict()]


def start(rank: int, world_size: int, url: str, layout: str, with_optimizer: bool = False) -> tuple[list[str], int]:
    """Restore from what was imported, with plain data (and, unless told, an optimizer) that it doesn't hold."""
    model, optimizer = support_reshard.build(layout, seed=9)
    with library.init(url, model=model, optim=optimizer, loop={"n": 0}) as rt:
        restored = rt.restore()
        assert restored is not None
        names = support_reshard.inner(model).state_dict()
        wrong = [n for n in support_reshard.differences(model, optimizer) if with_optimizer or n in names]
        rt.step()
        rt.save(wait=True)
        rt.wait(60)
        return wrong, restored.step


def test_torch_and_ckptrt_take_each_others_sharded_checkpoints(worlds, tmp_path):
    worlds(2).run(dcp_save, str(tmp_path / "dcp"))
    args = ("import", "dcp", tmp_path / "dcp", tmp_path / "run", "--step", 40)
    assert ckptrt(*args, "--tie", "head.weight=embedding.weight").exit_code == 0
    assert held(tmp_path / "run", 40) == expected(wanted())
    assert worlds(2).run(start, str(tmp_path / "run"), "fsdp") == [([], 40), ([], 40)]
    assert "optim, loop, rng: not in this checkpoint, which was imported; left as it is" in worlds(2).said(0)
    assert [c.step for c in open_catalog(str(tmp_path / "run")).path().commits] == [41, 40]
    assert ckptrt("export", "dcp", f"{tmp_path}/run@40", tmp_path / "back").exit_code == 0
    assert worlds(2).run(dcp_load, str(tmp_path / "back")) == [[], []]


def dcp_save_all(rank: int, world_size: int, folder: str, flat: bool) -> None:
    model, optimizer = support_reshard.build("fsdp", seed=0)
    support_reshard.fill(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_an_optimizer_comes_along(worlds, tmp_path, flat):
    worlds(2).run(dcp_save_all, str(tmp_path / "dcp"), flat)
    args = ("import", "dcp", tmp_path / "dcp", tmp_path / "run", "--step", 7, "--tie", "head.weight=embedding.weight")
    result = ckptrt(*args, "--optimizer", "optimizer:AdamW:optim")
    assert result.exit_code == 0, result.output
    assert "left out" not in result.stdout
    for size, layout in ((2, "fsdp"), (2, "ddp")):
        shutil.copytree(tmp_path / "run", tmp_path / layout)
        for found, step in worlds(size).run(start, str(tmp_path / layout), layout, with_optimizer=True):
            assert (found, step) == ([], 7)
    assert "loop, rng: not in this checkpoint" in worlds(2).said(0)


def test_what_was_exported_with_its_optimizer_comes_back(worlds, tmp_path):
    worlds(2).run(support_reshard.save, str(tmp_path / "run"), "fsdp")
    for format in ("torch", "dcp"):
        assert ckptrt("export", format, f"{tmp_path}/run@3", tmp_path / format).exit_code == 0
        args = ("import", format, tmp_path / format, tmp_path / f"{format}2", "--step", 3, "--optimizer", "optim:AdamW")
        assert ckptrt(*args, "--tie", "head.weight=embedding.weight").exit_code == 0
        assert held(tmp_path / f"{format}2", 3, "optim") == held(tmp_path / "run", 3, "optim")
        pair = ("diff", f"{tmp_path}/run@3", f"{tmp_path}/{format}2@3", "--data", "--json")
        objects = json.loads(ckptrt(*pair).stdout)["objects"]
        assert {found["key"] for found in objects if found["rank"] == 0} == {"loop", "rng"}, json.dumps(objects)


def test_a_training_starts_from_an_imported_model_and_resumes_as_any_other(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "CKPTRT_AGENT_SOCKET", "CKPTRT_DIR"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(1)
    source = torch.nn.Linear(3, 2)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    run = str(tmp_path / "run")
    assert ckptrt("import", "safetensors", tmp_path / "model.safetensors", run, "--step", 0).exit_code == 0

    def job() -> tuple[Any, int]:
        torch.manual_seed(2)
        model = torch.nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters())
        with library.init(run, model=model, optim=optim) as rt:
            rt.restore()
            begun = {name: value.clone() for name, value in model.state_dict().items()}
            model(torch.ones(1, 3)).sum().backward()
            optim.step()
            rt.step()
            rt.save(wait=True)
            rt.wait(60)
            return begun, rt.start_step

    begun, first = job()
    assert first == 0 and expected(begun) == expected(source.state_dict())
    assert job()[1] == 1
    with library.init(run, other=torch.nn.Linear(3, 2)) as rt, pytest.raises(MismatchError):
        rt.restore()


def test_an_imported_checkpoint_must_still_fit(tmp_path):
    safetensors.torch.save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    for component, model in (("model", torch.nn.Linear(3, 2)), ("other", torch.nn.Linear(3, 2, bias=False))):
        run = Path(tmp_path, component)
        args = ("import", "safetensors", tmp_path / "model.safetensors", run, "--step", 0, "--component", component)
        assert ckptrt(*args).exit_code == 0
        with library.init(str(run), model=model) as rt, pytest.raises(MismatchError):
            rt.restore()
