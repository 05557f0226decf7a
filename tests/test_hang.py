"""Hangs: when silence is one, which rank it is, and what a job does about it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support_jobs import Job, wait_for
from support_launch import Launch

from ckptrt.agents import watchdog
from ckptrt.agents.hang import HangWatch
from ckptrt.agents.options import plan
from ckptrt.agents.report import hang_lines
from ckptrt.agents.watchdog import Look, Watch, odd_one
from ckptrt.clock import FakeClock
from ckptrt.errors import UsageError


def steady(interval_s: float, ranks: int = 2, steps: int = 5, fixed_s: float | None = None) -> Watch:
    """Ranks that have told steps at equal intervals from time 0 on."""
    watch = Watch(fixed_s=fixed_s)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            watch = watchdog.heard(watch, rank, step, step * interval_s)
    return watch


# --- when


def test_a_learned_limit_is_many_times_the_longest_pause_and_some_minutes_at_least() -> None:
    assert watchdog.wake_at_s(steady(1.0)) == 5 + 300
    watch = steady(60.0)
    assert watchdog.wake_at_s(watch) == 300 + 600
    assert watchdog.silent(watch, 899.0) == {}
    assert watchdog.silent(watch, 900.0) == {0: 600.0, 1: 600.0}


def test_one_slow_step_makes_the_watch_more_patient() -> None:
    watch = watchdog.heard(steady(1.0), 0, 6, 105.0)
    assert watchdog.limit_s(watch, 1) == 1000.0


def test_nothing_is_judged_before_two_steps_unless_a_limit_is_given() -> None:
    first = watchdog.heard(Watch(), 0, 1, 10.0)
    assert watchdog.wake_at_s(Watch()) is None
    assert watchdog.wake_at_s(first) is None
    assert watchdog.wake_at_s(watchdog.heard(Watch(fixed_s=30.0), 0, 1, 10.0)) == 40.0


def test_a_rank_that_has_ended_is_left_alone() -> None:
    watch = watchdog.ended(steady(1.0, fixed_s=5.0), 0)
    assert watchdog.silent(watch, 100.0) == {1: 95.0}
    assert watchdog.wake_at_s(watchdog.ended(watch, 1)) is None


@pytest.mark.parametrize("fixed_s", [None, 30.0])
def test_a_section_is_judged_by_what_it_took_before(fixed_s: float | None) -> None:
    watch = watchdog.entered(steady(1.0, ranks=1, fixed_s=fixed_s), 0, "validation", 5.0)
    assert watchdog.wake_at_s(watch) is None  # seen for the first time: as long as it takes
    watch = watchdog.left(watch, 0, 105.0)
    assert watch.longest_s["validation"] == 100.0
    assert watchdog.limit_s(watch, 0) == (300.0 if fixed_s is None else 30.0)  # steps are judged as before
    watch = watchdog.entered(watchdog.heard(watch, 0, 6, 106.0), 0, "validation", 107.0)
    assert watchdog.wake_at_s(watch) == 107 + 1000


def test_a_step_while_stacks_are_taken_ends_the_alarm(tmp_path: Path) -> None:
    clock = FakeClock()
    hang = HangWatch(5.0, clock)
    began_s = clock.monotonic_s()
    hang.phase(0, "first_step", began_s, 1)
    clock.advance(5.0)
    assert hang.wake_in_s() == 0.0
    assert hang.check({}, str) is None  # stacks are asked for
    assert hang.wake_in_s() == 1.0
    hang.phase(0, "step", clock.monotonic_s(), 2)
    clock.advance(1.0)
    assert hang.check({}, str) is None
    assert hang.wake_in_s() == 4.0
    clock.advance(4.0)
    assert hang.check({}, str) is None
    clock.advance(1.0)
    assert hang.check({}, str) == []


def test_a_watch_that_is_off_says_nothing() -> None:
    clock = FakeClock()
    hang = HangWatch(float("inf"), clock)
    hang.phase(0, "first_step", clock.monotonic_s(), 1)
    clock.advance(1e6)
    assert hang.wake_in_s() is None
    assert hang.check({}, str) is None


def test_what_was_learned_outlives_a_set_of_workers() -> None:
    hang = HangWatch(None, FakeClock())
    hang.watch = steady(60.0)
    hang.begin_set()
    assert hang.wake_in_s() is None
    hang.phase(0, "first_step", 1000.0, 7)
    assert watchdog.limit_s(hang.watch, 0) == 600.0


def test_the_option() -> None:
    for text, limit_s in (("auto", None), ("off", float("inf")), ("90s", 90.0), ("5m", 300.0)):
        job = plan(["--ckpt-hang-timeout", text, "x.py"]).job
        assert job is not None and job.hang_timeout_s == limit_s
    for text in ("0", "soon"):
        with pytest.raises(UsageError):
            plan(["--ckpt-hang-timeout", text, "x.py"])


# --- who

REDUCE = ("/x/torch/distributed/distributed_c10d.py:3187 in all_reduce", "/job/train.py:40 in main")
SLEEP = ("/job/train.py:12 in load_batch", "/job/train.py:38 in main")


def look(rank: int, stack: tuple[str, ...] = REDUCE, step: int = 10, silent_s: float = 30.0, state: str = "S") -> Look:
    return Look(rank=rank, step=step, silent_s=silent_s, stack=stack, state=state)


@pytest.mark.parametrize(
    ("looks", "rank", "why"),
    [
        ([look(0), look(1, (), state="T"), look(2, SLEEP)], 1, "it is stopped"),
        ([look(0), look(1, (), state="D")], 1, "it is stuck in the kernel"),
        ([look(0), look(1), look(2, ())], 2, "it gave no stack"),
        ([look(0, step=12), look(1, SLEEP, step=12), look(2, step=9)], 2, "the others are at step 12"),
        ([look(0, step=11), look(1, step=10), look(2, SLEEP, step=11)], 2, "the others wait in a collective"),
        ([look(0, SLEEP), look(1), look(2)], 0, "the others wait in a collective"),
        ([look(0, SLEEP), look(1, SLEEP), look(2, ("/job/train.py:99 in log",))], 2, "the others are elsewhere"),
        ([look(0), look(1, silent_s=31.0)], 1, "it was the first to fall silent"),
        ([look(0, ()), look(1, (), silent_s=40.0)], 1, "it was the first to fall silent"),
        ([look(0, SLEEP)], 0, "it was the first to fall silent"),
    ],
)
def test_who_keeps_the_others(looks: list[Look], rank: int, why: str) -> None:
    odd, told = odd_one(looks)
    assert (odd.rank, told) == (rank, why)


def test_what_is_said_of_it() -> None:
    looks = [look(0, SLEEP), look(1), look(2), look(3, (), state="T")]
    assert hang_lines(looks, looks[3], "it is stopped").splitlines() == [
        "hang         no step for 30.0 s · rank 3 after step 10: it is stopped",
        "             rank 0 is at /job/train.py:12 in load_batch",
        "             ranks 1-2 are at /x/torch/distributed/distributed_c10d.py:3187 in all_reduce",
        "             rank 3 is at an unknown place (process state T, no stack)",
    ]


# --- real jobs


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_waits_for_ever_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    script = Path(__file__).with_name("tiny_job.py").read_text()
    trap = (
        "            if step == 14 and rank == 1 and rt.incarnation == 1:\n"
        "                wait_for_file('/never')\n"
        "            x = torch.rand(8, 16)"
    )
    assert "            x = torch.rand(8, 16)" in script
    (tmp_path / "train.py").write_text(script.replace("            x = torch.rand(8, 16)", trap))
    (tmp_path / "notes").mkdir()
    options = ["--nproc-per-node", "2", "--ckpt-hang-timeout", "1", "--ckpt-dir", str(tmp_path / "run")]
    launch = Launch(tmp_path, [*options, "train.py", "--out", "notes", "--steps", "30"])
    try:
        assert launch.wait() == 0, launch.err
        (hang,) = launch.events("hang")
        assert (hang["rank"], hang["why"]) == (1, "the others wait in a collective")
        assert 1.0 <= hang["silent_s"] < 6.0
        assert "in wait_for_file" in hang["stacks"]["1"][0]
        assert f"{tmp_path}/train.py" in hang["stacks"]["1"][0]
        assert "hang         no step for" in launch.err
        assert "failure      rank 1" in launch.err and "hung for" in launch.err
        assert "restart 1" in launch.err
        failure = launch.events("failure")[0]
        assert failure["rank"] == 1 and failure["stopped"] == [0]
        assert launch.events("recovery")[0]["parts"]["detect"] >= 1.0
    finally:
        launch.close()


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_though_it_gives_no_stack(tmp_path: Path) -> None:
    with Job(folder=tmp_path, steps=60, options=("--ckpt-hang-timeout", "1"), gates={20: tmp_path / "gate"}) as job:
        job.launch()
        wait_for(lambda: job.reached(20), job)
        os.kill(job.workers()[0], signal.SIGSTOP)
        (tmp_path / "gate").touch()
        assert job.finish() == 0, job.output
        (hang,) = job.events("hang")
        assert (hang["rank"], hang["why"]) == (0, "it is stopped")
        assert job.events("failure")[0]["rank"] == 0
        assert job.remains() == []


def test_only_who_has_prepared_for_it_is_asked_for_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: asked.append(pid))
    clock = FakeClock()
    hang = HangWatch(5.0, clock)
    for rank in (0, 1):
        hang.phase(rank, "first_step", clock.monotonic_s(), 1)
    clock.advance(5.0)
    files = {0: str(tmp_path / "0"), 1: "", 2: str(tmp_path / "2")}
    assert hang.check({0: 100, 1: 101, 2: 102}, files.__getitem__) is None
    assert asked == [100]


@pytest.mark.processes
def test_a_long_section_an_early_end_and_a_long_one_are_no_hangs(tmp_path: Path) -> None:
    script = (
        "import os, time, ckptrt, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rt = ckptrt.init('run', loop={'n': 1})\n"
        "rt.restore()\n"
        "rt.step()\n"
        "if os.environ['RANK'] == '1':\n"
        "    os._exit(0)\n"
        "for _ in range(3):\n"
        "    rt.step()\n"
        "    time.sleep(0.2)\n"
        "with rt.section('validation'):\n"
        "    time.sleep(1.5)\n"
        "rt.step()\n"
        "rt.close()\n"
        "time.sleep(1.5)\n"
        "print('through')\n"
    )
    options = ["--nproc-per-node", "2", "--ckpt-hang-timeout", "1", "--max-restarts", "0", "train.py"]
    launch = Launch(tmp_path, options, script=script)
    try:
        launch.wait()
        assert "through" in launch.out
        assert launch.events("hang") == []
    finally:
        launch.close()


def test_watching_costs_little() -> None:
    watch = steady(0.1, ranks=8)
    began_s = time.perf_counter()
    for step in range(2000):
        watch = watchdog.heard(watch, step % 8, step, 1.0 + step)
        watchdog.wake_at_s(watch)
    each_s = (time.perf_counter() - began_s) / 2000
    assert each_s < 1e-3
