"""All ranks end with one and the same step, whatever the messages and the ranks do meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections import deque
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from support_jobs import Job, wait_for
from support_launch import Launch
from support_runs import FakeRun

from ckptrt.agents import drain
from ckptrt.agents.draining import Draining
from ckptrt.agents.options import plan
from ckptrt.clock import FakeClock
from ckptrt.errors import NotFoundError, UsageError
from ckptrt.storage.catalog import Owner, this_owner
from ckptrt.storage.cli import cli
from ckptrt.storage.cli._documents import Drain
from ckptrt.storage.holder import find_launcher
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.verify import verify_commit
from ckptrt.wire import Message


class World:
    """Ranks, an agent, and messages that take their time. lead: how many steps a rank may be ahead of the slowest."""

    def __init__(self, seed: int, num_ranks: int, lead: int, known: int) -> None:
        self.rng = random.Random(seed)
        self.lead = lead
        self.steps = [self.rng.randint(known, known + lead) for _ in range(num_ranks)]
        self.target: list[int | None] = [None] * num_ranks
        self.asked = [False] * num_ranks  # waits for the agent's word at its step's end
        self.over: list[int | None] = [None] * num_ranks
        self.to_rank: list[deque[Message]] = [deque() for _ in range(num_ranks)]
        self.to_agent: deque[tuple[str, int, int, int, bool]] = deque()
        self.clock = FakeClock()
        self.agent = Draining(num_ranks, known, 1e9, self._broadcast, self.clock)

    def _broadcast(self, message: Message) -> None:
        for inbox in self.to_rank:
            inbox.append(message)

    def run(self) -> None:
        """Something that can happen happens, until all ranks are over. The clock moves when nothing else can."""
        for _ in range(200_000):
            choices = [("deliver", 0)] if self.to_agent else []
            choices += [("step", rank) for rank in range(len(self.steps)) if self._can_step(rank)]
            if not choices:
                if all(step is not None for step in self.over):
                    return
                self.clock.advance(self.agent.wake_in_s())
                assert not self.agent.check()
                continue
            what, rank = self.rng.choice(choices)
            if what == "deliver":
                self._deliver()
            else:
                self._step(rank)
        raise AssertionError(f"they never end: {self.steps}")

    def _can_step(self, rank: int) -> bool:
        if self.asked[rank] or self.over[rank] is not None:
            return False
        return self.steps[rank] < min(self.steps) + self.lead  # one that has ended has done its part of that step

    def _step(self, rank: int) -> None:
        """One training step, and what the runtime does at its end."""
        self.steps[rank] += 1
        step, inbox = self.steps[rank], self.to_rank[rank]
        arrived = self.rng.randint(0, len(inbox))  # what has got through by now
        proposals = [inbox.popleft() for _ in range(arrived)]
        if proposals:
            proposed = int(proposals[-1]["step"])
            taken = step <= proposed
            self.target[rank] = proposed if taken else None
            self.to_agent.append(("reply", rank, step, proposed, taken))
        if self.target[rank] == step:
            self.target[rank] = None
            self.asked[rank] = True
            self.to_agent.append(("arrived", rank, step, 0, True))

    def _deliver(self) -> None:
        kind, rank, step, target, taken = self.to_agent.popleft()
        if kind == "reply":
            self.agent.replied(rank, step, target, taken)
        else:
            self.agent.arrived(rank, step, lambda word: self._hear(rank, step, word))

    def _hear(self, rank: int, step: int, word: Message) -> None:
        self.asked[rank] = False
        if word["end"]:
            self.over[rank] = step


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 6), lead=st.integers(1, 9), known=st.integers(0, 50))
def test_all_ranks_end_with_one_step(seed: int, num_ranks: int, lead: int, known: int) -> None:
    world = World(seed, num_ranks, lead, known)
    world.run()
    assert len(set(world.over)) == 1
    assert world.over[0] == world.agent.step


def test_a_job_in_lockstep_ends_with_the_next_step() -> None:
    """The usual case, with steps that are slow beside messages: no step is lost to the agreement."""
    heard: list[Message] = []
    agent = Draining(4, 10, 60.0, heard.append, FakeClock())
    words: list[Message] = []
    for rank in range(4):
        agent.replied(rank, 11, 11, True)
        agent.arrived(rank, 11, words.append)
    assert agent.step == 11
    assert words == [{"op": "drain_word", "end": True}] * 4
    assert heard == [{"op": "drain", "step": 11}]


def test_who_is_beyond_moves_the_target_and_who_waits_goes_on() -> None:
    heard: list[Message] = []
    words: list[Message] = []
    agent = Draining(2, 10, 60.0, heard.append, FakeClock())
    agent.arrived(0, 11, words.append)
    assert words == []  # held: rank 1 may take it yet
    agent.replied(1, 15, 11, False)
    assert words == [{"op": "drain_word", "end": False}]
    assert heard[-1] == {"op": "drain", "step": 17}
    agent.replied(0, 12, 11, True)  # of the one that is withdrawn
    assert agent.step is None


def test_nobody_is_held_for_long() -> None:
    clock = FakeClock()
    words: list[Message] = []
    agent = Draining(2, 10, 60.0, lambda message: None, clock)
    agent.arrived(0, 11, words.append)
    clock.advance(agent.wake_in_s())
    assert not agent.check()
    assert words == [{"op": "drain_word", "end": False}]
    clock.advance(60)
    assert agent.check()


def test_a_word_that_was_given_stands() -> None:
    agreement = drain.propose(1, 5)
    agreement = drain.arrived(agreement, 0, 6)
    assert agreement.decided
    assert drain.given_up(agreement) == agreement
    assert drain.replied(agreement, 0, 9, 6, taken=False).target == 6


def test_options_of_a_drain() -> None:
    job = plan(["--ckpt-drain-signals", "SIGUSR2", "--ckpt-preempt-exit-code", "143", "x.py"]).job
    assert job is not None
    assert (job.drain_signals, job.drained_exit) == ((signal.SIGUSR2,), 143)
    none = plan(["--ckpt-drain-signals", "", "x.py"]).job
    assert none is not None and none.drain_signals == ()
    for words in (["--ckpt-drain-signals", "SIGKILL"], ["--ckpt-preempt-exit-code", "256"]):
        with pytest.raises(UsageError, match=words[0]):
            plan([*words, "x.py"])


# --- real jobs


@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda signum: signum.name)
def test_a_drained_job_ends_with_a_committed_step_and_goes_on_from_it(tmp_path: Path, signum: signal.Signals) -> None:
    with Job(folder=tmp_path, steps=100_000, every=10**9) as job:  # nothing but the drain saves
        process = job.launch()
        wait_for(lambda: job.reached(20), job)
        process.send_signal(signum)
        assert job.finish() == 75, job.output
        last = [job.notes(rank, "step")[-1]["step"] for rank in range(2)]
        catalog = job.catalog()
        (commit,) = catalog.path().commits
        assert last == [commit.step] * 2
        assert verify_commit(catalog, commit, read_data=True).is_ok
        assert f"drain        step {commit.step} is committed on all ranks" in job.output
        assert "done         0 restarts, exit 75" in job.output
        assert job.remains() == []
        job.steps = commit.step + 5
        assert job.run() == 0, job.output
        assert f"resume       step {commit.step} from {job.url}" in job.output


@pytest.mark.processes
def test_a_worker_that_never_ends_its_step_is_stopped_when_the_time_is_over(tmp_path: Path) -> None:
    gate = tmp_path / "never"
    options = ("--ckpt-drain-timeout", "1")
    with Job(folder=tmp_path, steps=40, gates={12: gate}, options=options) as job:
        process = job.launch()
        wait_for(lambda: job.reached(12), job)
        process.send_signal(signal.SIGTERM)
        assert job.finish() == 143, job.output
        assert "the workers have not drained within 1 s" in job.output
        assert job.catalog().commits()[0].step == 12


@pytest.mark.processes
def test_a_second_signal_stops_at_once_and_a_failure_starts_nothing(tmp_path: Path) -> None:
    with Job(folder=tmp_path / "a", steps=40, gates={12: tmp_path / "never"}) as job:
        process = job.launch()
        wait_for(lambda: job.reached(12), job)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "draining" in job.output, job)
        process.send_signal(signal.SIGTERM)
        assert job.finish(20) == 143, job.output
    with Job(folder=tmp_path / "b", steps=40, gates={12: tmp_path / "never"}) as job:
        process = job.launch()
        wait_for(lambda: job.reached(12), job)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "draining" in job.output, job)
        os.kill(job.workers()[1], signal.SIGKILL)
        assert job.finish(20) == 143, job.output
        assert "restart 1" not in job.output


@pytest.mark.processes
def test_a_signal_that_all_processes_get_doesnt_kill_the_workers(tmp_path: Path) -> None:
    """Slurm's notice goes to every process of a step."""
    with Job(folder=tmp_path, steps=100_000, every=10**9) as job:
        process = job.launch()
        wait_for(lambda: job.reached(5), job)
        for pid in [*job.workers(), process.pid]:
            os.kill(pid, signal.SIGUSR1)
        assert job.finish() == 75, job.output


@pytest.mark.processes
def test_a_job_that_saves_nothing_is_stopped_as_ever(tmp_path: Path) -> None:
    launch = Launch(tmp_path, ["train.py"], script="import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    try:
        wait_for(lambda: "up" in launch.out)
        launch.process.terminate()
        assert launch.wait() == 143
        assert "SIGTERM: stopping the workers" in launch.err
    finally:
        launch.close()


# --- ckptrt drain


def drain_verb(*args: object) -> Result:
    return CliRunner().invoke(cli, ["drain", *(str(arg) for arg in args)])


@pytest.mark.processes
def test_a_job_is_drained_from_the_command_line(tmp_path: Path) -> None:
    with Job(folder=tmp_path, steps=100_000, every=10**9) as job:
        process = job.launch()
        wait_for(lambda: job.reached(5), job)
        tried = json.loads(drain_verb(job.url, "--dry-run", "--json").stdout)
        assert msgspec.convert(tried, Drain) == Drain(
            url=f"file://{job.url}", pid=process.pid, ended=False, step=None, dry_run=True
        )
        ended = threading.Thread(target=process.wait)  # else it would stay to be reaped
        ended.start()
        result = drain_verb(job.url, "--wait", "--json")
        ended.join()
        told = msgspec.json.decode(result.stdout, type=Drain)
        assert process.returncode == 75, job.output
        assert told.ended and told.step == job.catalog().commits()[0].step
        again = drain_verb(job.url)
        assert (again.exit_code, isinstance(again.exception, NotFoundError)) in ((10, False), (1, True))


def test_only_a_launcher_on_this_machine_is_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, signum: pytest.fail(f"signal {signum} to {pid}"))
    run = FakeRun(tier=LocalTier(str(tmp_path)))
    with pytest.raises(NotFoundError, match="no job has ever opened"):
        find_launcher(run.catalog)
    run.fence(1)
    with pytest.raises(UsageError, match="on node-a, and this is"):
        find_launcher(run.catalog)
    run.catalog.write_fence(2, None, 1, this_owner())  # this very process: alive, and no launcher
    with pytest.raises(UsageError, match="which is no ckptrt-launch"):
        find_launcher(run.catalog)
    gone = subprocess.Popen(["true"])
    gone.wait()
    owner = this_owner()
    run.catalog.write_fence(3, None, 1, Owner(host=owner.host, pid=gone.pid, user=owner.user))
    with pytest.raises(NotFoundError, match="no job runs"):
        find_launcher(run.catalog)
