"""The runtime in one process: what a training loop sees of saves, restores, failures and the end."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckptrt
from ckptrt import persisting
from ckptrt.errors import FencedError, MismatchError, PersistError, UsageError
from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.layout import DATA
from ckptrt.storage.owner import this_owner

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path, monkeypatch) -> str:
    """A run's directory; sockets go below a short temporary one, so that what is left there can be seen."""
    for name in ("RANK", "WORLD_SIZE", "CKPTRT_AGENT_SOCKET", "CKPTRT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return str(tmp_path / "run")


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1), "loop": {"seen": 0}}


def train(state: dict[str, Any]) -> float:
    state["loop"]["seen"] += 1
    loss = (state["model"](torch.rand(4, 3)) ** 2).sum()
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()
    return float(loss.detach())


def committed(url: str) -> list[int]:
    return [commit.step for commit in open_catalog(url).commits()]


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(run, tmp_path, capfd):
    def job(url: str, steps: int) -> dict[int, float]:
        state = training()
        losses = {}
        with ckptrt.init(url, **state, every=4) as rt:
            rt.restore()
            for step in range(rt.start_step, steps):
                losses[step] = train(state)
                rt.step(loss=losses[step])
                rt.wait()
        return losses

    unbroken = job(str(tmp_path / "unbroken"), 12)
    first = job(run, 6)  # stops after step 6; step 4 is committed
    assert job(run, 12) == {step: unbroken[step] for step in range(4, 12)}
    assert first == {step: unbroken[step] for step in range(6)}
    said = capfd.readouterr().err
    assert f"start        fresh: no committed checkpoint in {run} · incarnation 1" in said
    assert f"resume       step 4 from {run} · 1 rank (same as saved) · incarnation 1 -> 2 · newest committed" in said


def test_every_shard_file_opens_with_safetensors_and_equals_the_state(run):
    state = training()
    with ckptrt.init(run, **state, rng=False) as rt:
        rt.restore()
        train(state)
        rt.step()
        assert rt.save().committed.result(30) >= 0
        (folder,) = Path(run, DATA).iterdir()
    with safe_open(folder / "r00000.safetensors", framework="pt") as file:
        for name, tensor in state["model"].state_dict().items():
            assert torch.equal(file.get_tensor(f"model.{name}"), tensor)
        for name, parameter in state["model"].named_parameters():
            for entry, value in state["optim"].state[parameter].items():
                assert torch.equal(file.get_tensor(f"optim.state.{name}.{entry}"), value)


def test_handles_and_counts_tell_what_became_of_saves(run):
    state = training()
    with ckptrt.init(run, **state) as rt:
        assert rt.restore() is None
        rt.step()
        handle = rt.save()
        assert rt.save() is handle
        assert handle.staged.result(0) >= 0
        assert handle.committed.result(30) > 0
        assert rt.save() is handle, "the same step, and it is committed"
        assert rt.last_committed == 1
        assert (rt.stats.committed, rt.stats.failed, rt.stats.skipped) == (1, 0, 0)
        assert 0 < rt.stats.stall_s < 30
    with pytest.raises(UsageError, match="closed"):
        rt.step()
    rt.close()


def test_every_and_keep(run):
    with ckptrt.init(run, loop={"n": 1}, every=2, keep=2) as rt:
        for _ in range(8):
            rt.step()
            rt.wait()
    assert committed(run) == [8, 6]


def test_a_save_that_is_not_captured_in_time_is_not_mixed_with_later_state(run):
    big = torch.ones(2_000_000)
    with ckptrt.init(run, loop={"big": big}) as rt:
        rt.step()
        rt.save()
        big.fill_(2)
        rt.wait()
    loop = {"big": torch.zeros(2_000_000)}
    with ckptrt.init(run, loop=loop) as rt:
        rt.restore()
    assert loop["big"].min() == loop["big"].max() == 1


def test_no_free_slot_means_skipped_counted_and_said(run, monkeypatch, capfd):
    with ckptrt.init(run, loop={"n": 1}) as rt:
        rt.step()
        rt.save()
        rt.wait()
        (persister,) = children()
        os.kill(persister, signal.SIGSTOP)
        try:
            handles = []
            for _ in range(4):
                rt.step()
                handles.append(rt.save())
            assert rt.stats.skipped >= 2
            assert isinstance(handles[-1].committed.exception(0), PersistError)
            assert "both slots are still being written" in capfd.readouterr().err
            with pytest.raises(PersistError, match=r"step 2 of run .* isn't committed after 0\.1 s"):
                rt.wait(0.1)
        finally:
            os.kill(persister, signal.SIGCONT)
        rt.wait(30)
        rt.step()
        assert rt.save().committed.result(30)


def children() -> list[int]:
    # A child belongs to the thread that started it.
    pids = [pid for listing in Path("/proc/self/task").glob("*/children") for pid in listing.read_text().split()]
    return [int(pid) for pid in pids if b"ckptrt.storage.persister" in Path("/proc", pid, "cmdline").read_bytes()]


def test_state_may_grow_shrink_and_change_its_kind(run):
    loop: dict[str, Any] = {"t": torch.zeros(10)}
    expected: list[Any] = []
    with ckptrt.init(run, loop=loop, every=1) as rt:
        for size in (10, 500_000, 20, 2_000_000, 5):
            loop["t"] = torch.full((size,), float(size))
            loop["log"] = ["x" * 100] * (size % 1000)
            rt.step()
            rt.wait()
            expected.append(size)
    live: dict[str, Any] = {"t": torch.zeros(5)}
    with ckptrt.init(run, loop=live) as rt:
        rt.restore()
    assert live["t"].tolist() == [5.0] * 5
    assert live["log"] == ["x" * 100] * 5


def test_a_state_that_cannot_be_stored_fails_the_save_and_not_the_training(run, capfd):
    loop: dict[str, Any] = {"n": 1}
    with ckptrt.init(run, loop=loop, every=1) as rt:
        rt.step()
        rt.wait()
        loop["odd"] = object()
        rt.step()
        rt.step()
        assert rt.stats.failed == 2
        assert rt.stats.last_error == "usage"
        del loop["odd"]
        rt.step()
        rt.wait()
        assert (rt.stats.committed, rt.last_committed) == (2, 4)
    said = capfd.readouterr().err
    assert "warn         usage: step 2, rank 0: not saved (1 failed so far): loop.odd is a builtins.object" in said


class Failing:
    def __init__(self) -> None:
        self.error: Exception | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_an_error_of_the_users_own_state_dict_is_told(run, capfd, on_error):
    part = Failing()
    rt = ckptrt.init(run, part=part, every=1, on_error=on_error)
    rt.step()
    rt.wait()
    part.error = ZeroDivisionError("of the user's")
    rt.step()
    assert "ZeroDivisionError" in capfd.readouterr().err
    part.error = None
    if on_error == "raise":
        with pytest.raises(PersistError, match="ZeroDivisionError") as caught:
            rt.step()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    rt.step()
    rt.wait()
    assert rt.last_committed in (2, 3)
    rt.close()


def test_a_failure_of_the_last_save_is_raised_by_close_if_asked_for(run):
    def job(own_error: Exception | None) -> None:
        part = Failing()
        with ckptrt.init(run, part=part, on_error="raise") as rt:
            rt.step()
            part.error = ZeroDivisionError()
            rt.save()
            if own_error:
                raise own_error

    with pytest.raises(PersistError, match="ZeroDivisionError"):
        job(None)
    with pytest.raises(KeyError, match="the program's own error is the one to be seen"):
        job(KeyError("the program's own error is the one to be seen"))
    assert not children()


def test_a_failed_save_of_a_step_may_be_tried_again(run):
    part = Failing()
    with ckptrt.init(run, part=part) as rt:
        rt.step()
        part.error = ZeroDivisionError()
        first = rt.save()
        assert first.committed.exception(0)
        part.error = None
        second = rt.save()
        assert second is not first
        assert second.committed.result(30)
        for _ in range(4):
            rt.step()
            assert rt.save().committed.result(30)


def test_a_run_with_something_to_restore_is_not_started_over(run):
    with ckptrt.init(run, loop={"n": 1}) as rt:
        rt.step()
        rt.save()
    with ckptrt.init(run, loop={"n": 1}) as rt:
        with pytest.raises(UsageError, match=r"holds step 1, but restore\(\) was not called"):
            rt.step()
        rt.restore()
        rt.step()
        with pytest.raises(UsageError, match="before the first step"):
            rt.restore()


def test_a_checkpoint_that_does_not_fit_stops_the_job_and_is_left_alone(run):
    with ckptrt.init(run, model=torch.nn.Linear(3, 2)) as rt:
        rt.step()
        rt.save()
    before = sorted((str(p), p.stat().st_mtime_ns) for p in Path(run).rglob("*") if p.name != "run.lock")
    live = torch.nn.Linear(3, 4)
    weights = live.weight.detach().clone()
    fit = pytest.raises(MismatchError, match=r"model\.weight   saved \(2, 3\), here \(4, 3\)")
    with ckptrt.init(run, model=live) as rt, fit:
        rt.restore()
    assert torch.equal(live.weight, weights)
    assert sorted((str(p), p.stat().st_mtime_ns) for p in Path(run).rglob("*") if p.name != "run.lock") == before


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_job_whose_run_was_taken_over_stops_at_the_next_step(run, on_error):
    rt = ckptrt.init(run, loop={"n": 1}, on_error=on_error)
    rt.step()
    rt.save()
    rt.wait()
    open_catalog(run).write_fence(rt.incarnation + 1, None, 1, this_owner())
    rt.step()
    with pytest.raises(FencedError):
        rt.save().committed.result(30)
    with pytest.raises(FencedError, match="incarnation 2"):
        rt.step()
    rt.close()
    assert committed(run) == []  # the other job began anew, so that nothing of this one is on its path


def test_the_persister_is_replaced_when_it_dies_and_the_slot_is_written(run):
    with ckptrt.init(run, loop={"t": torch.ones(1000)}) as rt:
        rt.step()
        rt.save()
        rt.wait()
        (first,) = children()
        os.kill(first, signal.SIGSTOP)
        rt.step()
        handle = rt.save()
        os.kill(first, signal.SIGKILL)
        assert handle.committed.result(30)
        (second,) = children()
        assert second != first
    assert committed(run) == [2, 1]


def test_no_persister_at_all_is_a_failed_save_and_the_next_one_tries_again(run, monkeypatch, capfd):
    with ckptrt.init(run, loop={"n": 1}) as rt:
        rt.step()
        rt.save()
        rt.wait()
        monkeypatch.setattr(persisting, "_CONNECT_TIMEOUT_S", 0.3)
        executable = sys.executable
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        os.kill(children()[0], signal.SIGKILL)
        rt.step()
        assert isinstance(rt.save().committed.exception(30), PersistError)
        assert "no persister answers" in capfd.readouterr().err
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(persisting, "_CONNECT_TIMEOUT_S", 30.0)
        rt.step()
        assert rt.save().committed.result(30)
        assert (rt.stats.committed, rt.stats.failed) == (2, 1)


def test_a_forked_child_does_not_keep_close_waiting(run):
    with ckptrt.init(run, loop={"n": 1}) as rt:
        rt.step()
        rt.save()
        rt.wait()
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            closing = threading.Thread(target=rt.close, daemon=True)
            closing.start()
            closing.join(10)
            assert not closing.is_alive()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert not children()


def test_a_program_whose_stderr_is_gone_goes_on(run):
    code = (
        "import ckptrt, os, sys, torch\n"
        "os.close(2)\n"
        f"rt = ckptrt.init({run!r}, loop={{'n': 1}}, every=1)\n"
        "rt.restore()\n"
        "for _ in range(3): rt.step(); rt.wait()\n"
        "rt.close()\n"
        "print(rt.last_committed)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "3\n"


def test_a_killed_trainers_snapshot_is_still_committed_and_nothing_is_left(run, tmp_path):
    code = (
        "import ckptrt, os, signal, torch\n"
        f"rt = ckptrt.init({run!r}, loop={{'t': torch.ones(1000)}})\n"
        "rt.restore()\n"
        "rt.step(); rt.save(); rt.wait()\n"
        "rt.step(); rt.save()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    temp = tmp_path / "t"
    temp.mkdir()
    environment = {**os.environ, "TMPDIR": str(temp)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, timeout=60, check=False
    )
    # The persister has inherited stderr, so its end has been seen too: it is gone.
    assert ended.returncode == -signal.SIGKILL
    assert committed(run) == [2, 1]
    assert list(temp.iterdir()) == []


def resources() -> tuple[int, int, int, int]:
    """Open descriptors, threads, shared memory of ours in bytes, and sockets' folders."""
    gc.collect()
    maps = Path("/proc/self/smaps").read_text().split("\n")
    shared = sum(
        int(line.split()[1]) for at, line in enumerate(maps) if line.startswith("Size:") and "ckptrt-r" in maps[at - 1]
    )
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        shared,
        len([name for name in os.listdir(os.environ.get("TMPDIR", "/tmp")) if name.startswith("ckptrt-")]),
    )


def test_two_hundred_saves_leave_nothing_behind(run, tmp_path, monkeypatch):
    temp = tmp_path / "t"
    temp.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr("tempfile.tempdir", None)
    state = training()
    train(state)
    before = resources()
    rt = ckptrt.init(run, **state, keep=2)
    rt.restore()
    for step in range(200):
        train(state)
        rt.step()
        rt.save()
        if step % 3 == 0:
            rt.wait()
        if step == 20:
            rt.wait()
            early, memory = resources(), rss_bytes(children()[0])
    rt.wait()
    assert resources() == early
    assert rss_bytes(children()[0]) < memory + (8 << 20)
    assert rt.stats.failed == 0
    assert rt.stats.committed + rt.stats.skipped == 200
    rt.close()
    del rt
    assert resources() == before
    assert not children()
    assert list(temp.iterdir()) == []
    assert len(os.listdir(Path(run, DATA))) == 2
    assert not list(Path(run).rglob(".*"))


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_bad_arguments_are_refused_before_anything_is_made(run):
    kwargs: Any
    for kwargs, word in [
        ({}, "no state"), ({"every": 0, "loop": {}}, "every=0"), ({"keep": 0, "loop": {}}, "keep 0 checkpoints"),
        ({"loop": 3}, "'loop'"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=word):
            ckptrt.init(run, **kwargs)
    with pytest.raises(UsageError, match="no directory"):
        ckptrt.init(loop={})
    assert not Path(run).exists()
    assert not children()


def test_a_rank_without_its_process_group_is_told(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match=r"rank 1 of 2, but torch\.distributed has no process group"):
        ckptrt.init(run, loop={})


def test_a_copied_run_restores_too(run, tmp_path):
    with ckptrt.init(run, loop={"n": 5}) as rt:
        rt.step()
        rt.save()
    shutil.copytree(run, tmp_path / "copy")
    live = {"n": 0}
    with ckptrt.init(str(tmp_path / "copy"), loop=live) as rt:
        assert rt.restore().step == 1
    assert live == {"n": 5}


def test_waiting_ends_with_the_first_error_only_when_all_are_settled(run, monkeypatch):
    part = Failing()
    with ckptrt.init(run, part=part) as rt:
        rt.step()
        rt.save()
        rt.wait()
        os.kill(children()[0], signal.SIGSTOP)
        rt.step()
        older = rt.save()
        rt._link._notice({"op": "failed", "step": 2, "retry": 0, **PersistError("made up").data()})  # type: ignore[union-attr]
        rt.step()
        newer = rt.save()
        os.kill(children()[0], signal.SIGCONT)
        rt.wait()
        assert older.committed.exception(0) is not None
        assert newer.committed.result(0)


def test_a_save_waits_for_a_slot_if_asked_to(run):
    with ckptrt.init(run, loop={"n": 1}, every=1, when_busy="wait") as rt:
        for _ in range(12):
            rt.step()
        assert rt.save(wait=True).committed.result(30)
        assert rt.stats.skipped == 0
    assert committed(run) == list(range(12, 0, -1))


def test_the_end_says_which_steps_no_checkpoint_holds(run, capfd):
    with ckptrt.init(run, loop={"n": 1}, every=2) as rt:
        for _ in range(3):
            rt.step()
    assert "step 3 is in no checkpoint, the newest committed one is 2" in capfd.readouterr().err
    with ckptrt.init(run, loop={"n": 1}, every=2) as rt:
        rt.restore()
        rt.step()
        rt.step()
    assert "in no checkpoint" not in capfd.readouterr().err


def test_plain_data_that_cannot_be_stored_is_refused_before_the_training(run):
    with pytest.raises(UsageError, match=r"loop\.fn"):
        ckptrt.init(run, loop={"fn": lambda: 1})
    assert not Path(run).exists()
