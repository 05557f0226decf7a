"""Saved by any number of ranks in any layout, restored by any other: real gloo ranks, on one machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import support_reshard
import torch
from safetensors import safe_open

from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.layout import DATA
from ckptrt.storage.shardfile import tensor_name

pytestmark = pytest.mark.processes

CASES = [(size, layout) for size, layouts in support_reshard.LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """One run for each world size and layout."""
    runs = {}
    for size, layout in CASES:
        runs[size, layout] = tmp_path_factory.mktemp("runs") / f"{layout}{size}"
        worlds(size).run(support_reshard.save, str(runs[size, layout]), layout)
    return runs


def restored(worlds, run: Path, size: int, layout: str) -> None:
    saved_size = open_catalog(str(run)).commits()[0].record.world_size
    for rank, (differences, step, loop) in enumerate(worlds(size).run(support_reshard.restore, str(run), layout)):
        assert not differences, f"rank {rank}"
        assert step == 3
        assert loop == (100 + rank % saved_size, [rank % saved_size] * 3)


@pytest.mark.parametrize("now", CASES, ids=lambda c: f"on-{c[1]}{c[0]}")
def test_every_layout_is_restored_from_every_other(worlds, saved, now, tmp_path):
    for before, run in saved.items():
        copy = tmp_path / "-".join(map(str, before))
        shutil.copytree(run, copy)
        restored(worlds, copy, *now)


def test_a_tied_weight_is_stored_once_and_every_byte_once(saved):
    for (size, layout), run in saved.items():
        catalog = open_catalog(str(run))
        keys: dict[str, int] = {}
        for receipt in catalog.open_checkpoint(catalog.commits()[0]).receipts():
            for record in receipt.tensors:
                count = 1
                for length in record.sizes:
                    count *= length
                keys[record.key] = keys.get(record.key, 0) + count
        assert "model.head.weight" not in keys
        assert keys["model.embedding.weight"] == 42, (size, layout)
        assert keys["optim.state.middle.weight.exp_avg"] == 36, (size, layout)
        assert keys["optim.state.single.step"] == 1, (size, layout)
        assert keys["model.count"] == (size if layout in ("fsdp", "hsdp") else 1)


def test_every_shard_file_opens_with_safetensors_and_equals_the_state(saved):
    for run in saved.values():
        catalog = open_catalog(str(run))
        for receipt in catalog.open_checkpoint(catalog.commits()[0]).receipts():
            path = Path(run, DATA + receipt.shard.name)
            with safe_open(path, framework="pt") as file:
                names = {tensor_name(t.key, t.shape, t.offsets, t.sizes): t for t in receipt.tensors}
                assert set(file.keys()) == set(names) | {f"object/{o.key}" for o in receipt.objects}
                for name, record in names.items():
                    part = tuple(slice(o, o + s) for o, s in zip(record.offsets, record.sizes, strict=True))
                    found = file.get_tensor(name)
                    expected = expected_value(record.key, record.shape, found.dtype)
                    if expected is not None:
                        assert torch.equal(found, expected[part]), name


def expected_value(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    component, _, name = key.partition(".")
    if component == "model":
        return support_reshard.value(name, shape, dtype)
    if component == "optim" and not name.endswith(".step"):
        parameter, _, entry = name.removeprefix("state.").rpartition(".")
        return support_reshard.value(f"{parameter}/{entry}", shape, dtype)
    return torch.tensor(4.0) if component == "optim" else None


def damage(run: Path, rank: int, how: str) -> Path:
    """Harm a rank's shard of the newest checkpoint."""
    (path,) = sorted(run.glob("data/s*"))[-1].glob(f"r{rank:05d}.safetensors")
    data = bytearray(path.read_bytes())
    if how == "flip":
        at = len(data) // 2
        data[at] ^= 1
        path.write_bytes(data)
    elif how == "truncate":
        path.write_bytes(data[:-5000])
    else:
        path.unlink()
    return path


def two_steps(rank: int, world_size: int, url: str) -> None:
    model, optimizer = support_reshard.build("fsdp", seed=0)
    support_reshard.fill(model, optimizer)
    loop: dict[str, Any] = {"samples": 7, "seen": torch.zeros(1)}
    with support_reshard.ckptrt.init(url, model=model, optim=optimizer, loop=loop, every=1) as rt:
        rt.restore()
        rt.step()
        rt.wait()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(9.0)
        rt.step()


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_shard_is_named_and_all_ranks_fall_back_together(worlds, tmp_path, how):
    run = tmp_path / "run"
    worlds(2).run(two_steps, str(run))
    path = damage(run, 1, how)
    for size in (2, 3):
        copy = tmp_path / f"copy{size}"
        shutil.copytree(run, copy)
        results = worlds(size).run(support_reshard.restore, str(copy), "fsdp")
        assert [(r[0], r[1]) for r in results] == [([], 1)] * size
        said = worlds(size).said()
        assert said.count("step 2 from stored can't be loaded") == 1, said
        line = next(line for line in said.splitlines() if "step 2 from stored" in line)
        assert str(path.name) in line
        assert "rank 1" in line
        assert "model." in line or "optim." in line or "tensors" in line, line
        assert "all ranks go back to the next older checkpoint" in said
        assert said.count("resume       step 1 ") == 1


def test_a_run_without_any_whole_checkpoint_is_an_error_on_all_ranks(worlds, tmp_path):
    run = tmp_path / "run"
    worlds(2).run(support_reshard.save, str(run), "fsdp")
    damage(run, 0, "flip")
    errors = worlds(2).run(restore_error, str(run), "fsdp")
    assert all("none of its 1 checkpoints can be loaded" in error for error in errors)
    assert all("CorruptError" in error for error in errors)


def restore_error(rank: int, world_size: int, url: str, layout: str, odd: str = "", odd_rank: int = 1) -> str:
    """The error of a restore into a state that is odd on one rank."""
    model, optimizer = support_reshard.build(layout, seed=1)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "loop": {"samples": 0}}
    mine = rank == odd_rank
    if odd == "buffer" and mine:
        support_reshard.inner(model).register_buffer("odd", torch.zeros(1))
    elif odd == "component" and mine:
        state["odd"] = {}
    elif odd in ("crash", "crash-late"):
        state["loop"] = Crashing(odd if mine else "")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with support_reshard.ckptrt.init(url, **state) as rt:
        try:
            rt.restore()
        except Exception as error:  # noqa: BLE001 the test looks at it
            if odd != "crash-late":
                for key, tensor in model.state_dict().items():
                    assert torch.equal(
                        getattr(tensor, "_local_tensor", tensor), getattr(before[key], "_local_tensor", before[key])
                    )
            return f"{type(error).__name__}: {error}"
    return ""


class Crashing:
    """A user's object that fails where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def state_dict(self) -> dict[str, Any]:
        if self.where == "crash":
            raise ZeroDivisionError("in the user's state_dict")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.where == "crash-late":
            raise ZeroDivisionError("in the user's load_state_dict")


@pytest.mark.parametrize(("odd", "words"), [
    ("buffer", ["MismatchError", "rank 1", "missing   model.odd"]),
    ("component", ["MismatchError", "rank 1", "component odd"]),
    ("crash", ["rank 1", "ZeroDivisionError", "in the user's state_dict"]),
    ("crash-late", ["rank 1", "ZeroDivisionError", "in the user's load_state_dict"]),
])  # fmt: skip
def test_what_fails_on_one_rank_is_an_error_on_all_and_no_hang(worlds, saved, tmp_path, odd, words):
    run = tmp_path / "run"
    shutil.copytree(saved[2, "fsdp"], run)
    errors = worlds(2).run(restore_error, str(run), "fsdp", odd, timeout_s=20)
    for error in errors:
        for word in words:
            assert word in error
    # The world is still of use, and nothing was loaded or harmed.
    restored(worlds, run, 2, "fsdp")


def buffers_under_ddp(rank: int, world_size: int, url: str, broadcast: bool) -> list[float]:
    model: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=broadcast)
    with support_reshard.ckptrt.init(url, model=wrapped, rng=False) as rt:
        if rt.restore() is None:
            model[0].running_mean.fill_(10.0 + rank)
            model[0].running_var.fill_(10.0 + rank)
            rt.step()
            rt.save()
            rt.wait()
        return [model[0].running_mean[0].item(), model[0].running_var[2].item()]


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_under_ddp_are_those_that_the_next_forward_would_use(worlds, tmp_path, broadcast):
    url = str(tmp_path / "run")
    worlds(2).run(buffers_under_ddp, url, broadcast)
    found = worlds(2).run(buffers_under_ddp, url, broadcast)
    assert found == ([[10.0, 10.0], [10.0, 10.0]] if broadcast else [[10.0, 10.0], [11.0, 11.0]])


def skipping(rank: int, world_size: int, url: str) -> tuple[int | None, int]:
    """Rank 0 saves at steps 1 and 2 only, rank 1 at 3 and 4 only, both at 5."""
    with support_reshard.ckptrt.init(url, loop={"n": 1}) as rt:
        rt.restore()
        for step in range(1, 6):
            rt.step()
            if step == 5 or (step in (1, 2)) == (rank == 0):
                rt.save().staged.result()
                wait_until_written(url, step, rank)
        rt.save().committed.result(20)
        return rt.last_committed, rt.stats.failed


def wait_until_written(url: str, step: int, rank: int) -> None:
    import time

    while not list(Path(url).glob(f"data/s{step:09d}.*/r{rank:05d}.receipt.json")):
        time.sleep(0.01)


def test_ranks_that_skip_different_steps_do_not_block_each_other(worlds, tmp_path):
    assert worlds(2).run(skipping, str(tmp_path / "run"), timeout_s=40) == [(5, 2), (5, 2)]


def rng_of(rank: int, world_size: int, url: str) -> tuple[float, float]:
    torch.manual_seed(100 + rank)
    with support_reshard.ckptrt.init(url, loop={"n": rank}) as rt:
        if rt.restore() is None:
            rt.step()
            rt.save()
            rt.wait()
        return torch.rand(()).item(), torch.rand(()).item()


def test_generators_are_each_ranks_own_and_new_ranks_get_their_own(worlds, tmp_path):
    url = str(tmp_path / "run")
    saved = worlds(2).run(rng_of, url)
    shutil.copytree(url, tmp_path / "more")
    assert worlds(2).run(rng_of, url) == saved
    more = worlds(4).run(rng_of, str(tmp_path / "more"))
    assert more[:2] == saved
    assert len(set(more)) == 4
    assert "ranks 2 to 3 are new" in worlds(4).said(0)


def not_as_chunked(rank: int, world_size: int, url: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    odd = DTensor.from_local(torch.ones(3 - 2 * rank, 2), mesh, [Shard(0)], run_check=False)
    loop: dict[str, Any] = {"odd": odd}
    with support_reshard.ckptrt.init(url, loop=loop, rng=False) as rt:
        rt.restore()
        rt.step()
        failing = rt.save()
        if rank == 0:
            failing.committed.exception(20)
        loop["odd"] = torch.ones(1)
        rt.step()
        rt.save().committed.result(20)  # the next save overtakes the one that failed, on every rank
        error = failing.committed.exception(0)
        return "" if error is None else str(error)


def test_shards_of_uneven_from_local_are_refused_by_name(worlds, tmp_path):
    errors = worlds(2).run(not_as_chunked, str(tmp_path / "run"))
    assert "'loop.odd' is float32 (6, 2) on rank 0 but float32 (2, 2) on rank 1" in errors[0]
    # The other rank hears that it was given up, or that the next save has overtaken it, whichever comes first.
    assert "can't be committed" in errors[1] or "committed before all ranks had written" in errors[1]
