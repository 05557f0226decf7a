"""Fault points: what a spec means, that it fires once, and that it costs nothing when no test asked for it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import timeit
from collections.abc import Iterator

import pytest

from ckptrt import env, faultpoints
from ckptrt.errors import UsageError
from ckptrt.faultpoints import arm, faultpoint


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    arm("")


def _child(code: str, faults: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"from ckptrt.faultpoints import faultpoint\n{code}"],
        env={**os.environ, env.FAULTS: faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_happens_without_a_spec() -> None:
    faultpoint("staging", rank=0, step=1)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("staging", {"rank": 1, "step": 20, "incarnation": 3}),
        ("staging", {"rank": 1, "step": 20}),
        ("persisting", {"rank": 1, "step": 20, "incarnation": 2}),
    ],
)
def test_every_fact_asked_for_must_be_given_and_equal(name: str, facts: dict[str, int]) -> None:
    arm("staging@rank=1,step=20,incarnation=2:error=EIO")
    faultpoint(name, **facts)
    with pytest.raises(OSError):
        faultpoint("staging", rank=1, step=20, incarnation=2, more="facts than asked for")


def test_a_spec_fires_once() -> None:
    arm("fsync:error=ENOSPC")
    with pytest.raises(OSError) as caught:
        faultpoint("fsync", rank=0)
    assert caught.value.errno == errno.ENOSPC
    faultpoint("fsync", rank=0)


def test_equal_specs_are_separate_faults() -> None:
    arm("fsync:error=EIO; fsync:error=EIO;")
    for _ in range(2):
        with pytest.raises(OSError):
            faultpoint("fsync")
    faultpoint("fsync")


def test_specs_at_one_point_act_in_the_order_written(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faultpoints.time, "sleep", slept.append)
    arm("put:sleep=0.25;put:error=EROFS;put:sleep=1")
    with pytest.raises(OSError) as caught:
        faultpoint("put")
    assert (slept, caught.value.errno) == ([0.25], errno.EROFS)
    faultpoint("put")
    assert slept == [0.25, 1.0]


def test_only_one_of_many_threads_meets_a_fault() -> None:
    arm("put:error=EIO")
    barrier = threading.Barrier(8)
    hits: list[int] = []

    def visit() -> None:
        barrier.wait()
        try:
            faultpoint("put")
        except OSError:
            hits.append(1)

    threads = [threading.Thread(target=visit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hits == [1]


@pytest.mark.processes
def test_kill_is_sigkill_at_the_asked_step() -> None:
    child = _child(
        "for step in range(9):\n faultpoint('step', step=step)\n print(step, flush=True)", "step@step=3:kill"
    )
    out, _ = child.communicate(timeout=60)
    assert (out.split(), child.returncode) == (["0", "1", "2"], -signal.SIGKILL)


@pytest.mark.processes
def test_kill_pid_kills_the_named_process_and_goes_on() -> None:
    with subprocess.Popen(["sleep", "600"]) as victim:
        try:
            arm("persisting:kill-pid")
            faultpoint("persisting", pid=victim.pid)
            assert victim.wait(timeout=60) == -signal.SIGKILL
        finally:
            victim.kill()


@pytest.mark.parametrize("pid", [None, 0, -1, 1, "12"])
def test_kill_pid_refuses_what_is_not_one_process(pid: object, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []
    monkeypatch.setattr(faultpoints.os, "kill", lambda *args: killed.append(args))
    arm("persisting:kill-pid")
    with pytest.raises(UsageError, match="persisting"):
        faultpoint("persisting", pid=pid)
    assert killed == []


@pytest.mark.processes
def test_stop_halts_until_sigcont() -> None:
    child = _child("faultpoint('step')\nprint('went on')", "step:stop")
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(child.pid, signal.SIGCONT)
        out, _ = child.communicate(timeout=60)
        assert (out.strip(), child.returncode) == ("went on", 0)
    finally:
        child.kill()


@pytest.mark.parametrize(
    "spec",
    [
        "staging",
        ":kill",
        "staging:",
        "staging:explode",
        "staging:kill=9",
        "staging@:kill",
        "staging@rank:kill",
        "staging@rank=:kill",
        "staging@rank=1,rank=2:kill",
        "staging@rank=1,:kill",
        "staging:sleep",
        "staging:sleep=soon",
        "staging:sleep=-1",
        "staging:sleep=nan",
        "staging:sleep=inf",
        "staging:error",
        "staging:error=ENOTHING",
        "staging:error=errorcode",
    ],
)
def test_a_malformed_spec_is_named(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        arm(f"fine:kill;{spec}")
    assert repr(spec) in caught.value.what


@pytest.mark.processes
def test_a_malformed_variable_is_an_error_at_import() -> None:
    _, err = (child := _child("print('imported')", "staging:explode")).communicate(timeout=60)
    assert child.returncode == 1
    assert "UsageError" in err and "staging:explode" in err


def test_a_disarmed_point_costs_about_an_empty_call() -> None:
    def empty(name: str, **facts: object) -> None:
        return

    def best_s(call: str) -> float:
        timer = timeit.Timer(f"{call}('staging', rank=1, step=20)", globals={"empty": empty, "faultpoint": faultpoint})
        return min(timer.repeat(repeat=9, number=5000))

    assert best_s("faultpoint") < 3 * best_s("empty")
