"""Worker groups: the conformance class on forks, cold starts and fakes, and what is special to each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workers_conformance import PROGRAMS, WorkersConformance, collect, exits, spec, started

from ckptrt.agents.workers import ColdWorkers, FakeWorkers, WorkerGroup, WorkerSpec, WorkersUnavailable
from ckptrt.agents.zygote_workers import ZygoteProcess, ZygoteWorkers
from ckptrt.clock import FakeClock

Specs = Callable[..., list[WorkerSpec]]


def alive(pid: int) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


@pytest.fixture
def specs(tmp_path: Path) -> Iterator[Specs]:
    """Workers that run the programs named, each with its own stdout file `<rank>.out`; stderr goes to `<rank>.err`."""
    opened: list[int] = []

    def make(*names: str, args: tuple[str, ...] = ()) -> list[WorkerSpec]:
        workers = []
        for rank, name in enumerate(names):
            script = tmp_path / f"{rank}-{name[:10]}.py"
            script.write_text(PROGRAMS.get(name, name))
            fds = [os.open(os.devnull, os.O_RDONLY)]
            fds += [
                os.open(tmp_path / f"{rank}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for end in ("out", "err")
            ]
            opened.extend(fds)
            workers.append(spec(rank, str(script), (fds[0], fds[1], fds[2]), *args))
        return workers

    yield make
    for fd in opened:
        os.close(fd)


class RealWorkers(WorkersConformance):
    """Processes say "up" in their stdout file."""

    @pytest.fixture(autouse=True)
    def _outputs(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def wait_up(self, specs: list[WorkerSpec]) -> None:  # type: ignore[override]
        for worker in specs:
            path = self.folder / f"{worker.rank}.out"
            until(lambda path=path: "up" in path.read_text(), f"{path} doesn't say that it is up")  # type: ignore[misc]


class TestFakeWorkers(WorkersConformance):
    @pytest.fixture
    def group(self) -> FakeWorkers:
        return FakeWorkers(stubborn=frozenset({0}))

    @pytest.fixture
    def specs(self) -> Specs:
        self.ordinary = False
        return lambda *names: [spec(rank, name, (0, 1, 2)) for rank, name in enumerate(names)]

    def play(self, group: WorkerGroup, rank: int, code: int) -> None:
        assert isinstance(group, FakeWorkers)
        group.end(rank, code)

    def test_stop_ends_those_without_a_handler_at_once(self, group: WorkerGroup, specs: Specs) -> None:
        super().test_stop_ends_those_without_a_handler_at_once(FakeWorkers(), specs)

    def test_signals_go_to_every_worker(self, group: WorkerGroup, specs: Specs) -> None:
        super().test_signals_go_to_every_worker(FakeWorkers(), specs)

    def test_grace_is_counted_on_the_clock(self, specs: Specs) -> None:
        clock = FakeClock()
        group = FakeWorkers(clock, stubborn=frozenset({0}))
        group.start(specs("stubborn"))
        group.poll()
        group.stop(3.0)
        clock.advance(2.9)
        assert exits(group.poll()) == {}
        assert group.wake_in_s() == pytest.approx(0.1)
        clock.advance(0.1)
        assert exits([*group.poll(), *group.poll()])[0].code == -signal.SIGKILL
        assert [signum for _rank, signum in group.signals] == [signal.SIGCONT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.processes
class TestColdWorkers(RealWorkers):
    @pytest.fixture
    def group(self) -> Iterator[ColdWorkers]:
        group = ColdWorkers()
        yield group
        group.close()

    def test_a_command_that_is_not_there(self, group: ColdWorkers) -> None:
        missing = spec(0, "/nowhere", (0, 1, 2))
        missing = WorkerSpec(rank=0, command=("/no/such/program",), request=missing.request, streams=(0, 1, 2))
        group.start([missing])
        (event,) = group.poll()
        assert event == WorkersUnavailable(why="/no/such/program can't be started: No such file or directory")

    def test_close_leaves_nobody(self, group: ColdWorkers, specs: Specs) -> None:
        group.start(specs("wait", "stubborn"))
        pids = started(group.poll())
        group.close()
        assert not any(alive(pid) for pid in pids.values())

    def test_workers_die_with_their_parent(self, tmp_path: Path) -> None:
        """The parent is killed; nobody could have told the workers."""
        script = tmp_path / "parent.py"
        script.write_text(
            "import sys, time\n"
            "sys.path.insert(0, sys.argv[1])\n"
            "from workers_conformance import spec\n"
            "from ckptrt.agents.workers import ColdWorkers\n"
            "group = ColdWorkers()\n"
            "group.start([spec(0, sys.argv[2], (0, 1, 2))])\n"
            "print(group.poll()[0].pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        sleeper = tmp_path / "sleeper.py"
        sleeper.write_text("import time; time.sleep(60)")
        command = [sys.executable, str(script), str(Path(__file__).parent), str(sleeper)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert alive(pid)
            parent.kill()
        until(lambda: not alive(pid), "the worker outlived its parent")


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteWorkers]:
    """One warm zygote for all tests of this file that don't kill it."""
    group = ZygoteWorkers(ZygoteProcess(dict(os.environ)))
    yield group
    group.close()


@pytest.mark.processes
class TestZygoteWorkers(RealWorkers):
    @pytest.fixture
    def group(self, zygote: ZygoteWorkers) -> Iterator[ZygoteWorkers]:
        yield zygote
        zygote.stop(0.0)
        deadline_s = time.monotonic() + 10
        while zygote._ranks and time.monotonic() < deadline_s:
            zygote.poll()
            time.sleep(0.005)

    def run(self, group: ZygoteWorkers, specs: Specs, program: str, *args: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of one forked program."""
        group.start(specs(program, args=args))
        ended = exits(collect(group, lambda events: len(exits(events)) == 1))
        return ended[0].code, (self.folder / "0.out").read_text(), (self.folder / "0.err").read_text()

    def test_a_fork_looks_to_a_script_like_a_cold_start(self, group: ZygoteWorkers, specs: Specs) -> None:
        program = (
            "import __main__, json, os, sys, threading, atexit\n"
            "def later(): print('thread done')\n"
            "threading.Timer(0.05, later).start()\n"
            "atexit.register(print, 'atexit done')\n"
            "def facts(): return 1\n"
            "print(json.dumps([__name__, __file__, __spec__ is None, __package__, sys.argv, sys.path[0],"
            " os.getcwd(), sorted(k for k in os.environ if k not in ('LC_CTYPE', 'PWD')), __main__.facts is facts,"
            " sys.stdin.read(), os.getpgrp() == os.getpid(), sys.stdout.write_through]))\n"
        )
        code, out, err = self.run(group, specs, program, "--x", "y z")
        script = next(self.folder.glob("0-*.py"))
        environ = {"RANK": "0", "PATH": "/usr/bin:/bin"}
        cold = subprocess.run(
            [sys.executable, "-u", str(script), "--x", "y z"],
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            check=True,
        )
        assert (code, err) == (0, "")
        assert json.loads(out.splitlines()[0]) == json.loads(cold.stdout.splitlines()[0])
        assert out.splitlines()[1:] == cold.stdout.splitlines()[1:] == ["thread done", "atexit done"]

    @pytest.mark.parametrize(
        "program",
        [
            "def f(): raise ValueError('no')\nf()",
            "import sys; sys.exit('with a message')",
            "import sys; sys.exit(3)",
            "raise SystemExit",
            "x = (",
            "import nothing_of_that_name",
        ],
    )
    def test_ends_as_a_cold_start_ends(self, group: ZygoteWorkers, specs: Specs, program: str) -> None:
        code, _out, err = self.run(group, specs, program)
        script = str(next(self.folder.glob("0-*.py")))
        cold = subprocess.run([sys.executable, script], env={}, cwd="/", capture_output=True, text=True, check=False)
        assert (code, err) == (cold.returncode, cold.stderr)

    def test_a_script_that_is_not_there(self, group: ZygoteWorkers) -> None:
        group.start([spec(0, "/no/such/script.py", (0, 1, 2))])
        ended = exits(collect(group, lambda events: len(exits(events)) == 1))
        assert ended[0].code == 2  # as `python /no/such/script.py` has it

    def test_torch_is_there_already(self, group: ZygoteWorkers, specs: Specs) -> None:
        assert self.run(group, specs, "import sys\nprint('torch._dynamo' in sys.modules)")[1] == "True\n"

    def test_every_fork_has_its_own_seeds(self, group: ZygoteWorkers, specs: Specs) -> None:
        """As processes that start cold have: they come from the system's entropy."""
        program = "import numpy, random, torch\nprint(numpy.random.random(), random.random(), torch.initial_seed())"
        group.start(specs(program, program))
        collect(group, lambda events: len(exits(events)) == 2)
        one, other = ((self.folder / f"{rank}.out").read_text().split() for rank in (0, 1))
        assert len(one) == 3
        assert all(mine != yours for mine, yours in zip(one, other, strict=True))

    def test_an_exception_leaves_its_moment(self, group: ZygoteWorkers, specs: Specs) -> None:
        (worker,) = specs("def f(): raise KeyError('k')\nf()")
        error_file = self.folder / "error.json"
        worker.request.env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        before_s = time.monotonic()
        group.start([worker])
        ended = exits(collect(group, lambda events: len(exits(events)) == 1))
        message = json.loads(error_file.read_text())["message"]
        assert message["message"] == "KeyError: 'k'"
        assert before_s < message["extraInfo"]["monotonic_s"] < ended[0].at_s
        assert "zygote" not in message["extraInfo"]["py_callstack"]
        assert "workerproc" not in message["extraInfo"]["py_callstack"]

    def test_what_a_killed_worker_started_dies_too(self, group: ZygoteWorkers, specs: Specs) -> None:
        program = (
            "import subprocess, time\n"
            "p = subprocess.Popen(['sleep', '60'])\n"
            "print(p.pid, 'up', flush=True)\n"
            "time.sleep(60)\n"
        )
        workers = specs(program)
        group.start(workers)
        events = collect(group, lambda events: len(started(events)) == 1)
        self.wait_up(workers)
        child = int((self.folder / "0.out").read_text().split()[0])
        os.kill(started(events)[0], signal.SIGKILL)
        ended = exits(collect(group, lambda events: len(exits(events)) == 1))
        assert (ended[0].code, ended[0].by_us) == (-signal.SIGKILL, False)
        until(lambda: not alive(child), "a killed worker's child lives on")

    def test_a_frozen_worker_gets_to_run_its_handler(self, group: ZygoteWorkers, specs: Specs) -> None:
        program = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
            "print('up', flush=True)\n"
            # Short sleeps: Python would sleep on with a signal that comes just before one begins.
            "while True: time.sleep(0.02)\n"
        )
        workers = specs(program)
        group.start(workers)
        events = collect(group, lambda events: len(started(events)) == 1)
        self.wait_up(workers)
        os.kill(started(events)[0], signal.SIGSTOP)
        group.stop(20.0)
        assert exits(collect(group, lambda events: len(exits(events)) == 1))[0].code == 5


@pytest.mark.processes
class TestZygoteLoss:
    """Zygotes that die or can't be used; each test has one of its own."""

    def test_its_workers_die_with_it_and_the_next_set_has_another(self, specs: Specs) -> None:
        group = ZygoteWorkers(zygote := ZygoteProcess(dict(os.environ)))
        try:
            group.start(specs("wait", "wait"))
            pids = started(collect(group, lambda events: len(started(events)) == 2))
            zygote.process.kill()
            ended = exits(collect(group, lambda events: len(exits(events)) == 2))
            assert {e.note for e in ended.values()} == {"the zygote died (SIGKILL) and its workers with it"}
            until(lambda: not any(alive(pid) for pid in pids.values()), "workers outlived their zygote")
            group.start(specs("finish"))
            assert exits(collect(group, lambda events: len(exits(events)) == 1))[0].code == 0
        finally:
            group.close()

    def test_a_module_that_starts_a_thread_is_named(self, specs: Specs, tmp_path: Path) -> None:
        (tmp_path / "threadstarter.py").write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        )
        group = ZygoteWorkers(
            ZygoteProcess(dict(os.environ)), preload=["threadstarter", "not_there_at_all"], path=[str(tmp_path)]
        )
        try:
            group.start(specs("finish", "finish"))
            (event,) = collect(group, lambda events: bool(events))
            assert isinstance(event, WorkersUnavailable)
            assert event.why.startswith("importing threadstarter left 2 threads (")
            assert any("not_there_at_all can't be preloaded: ModuleNotFoundError" in text for text in group.problems)
        finally:
            group.close()

    def test_stopped_before_it_was_ready(self, specs: Specs) -> None:
        group = ZygoteWorkers(ZygoteProcess(dict(os.environ)))
        try:
            group.start(specs("finish", "finish"))
            group.stop(5.0)
            ended = exits(group.poll())
            assert {rank: (e.by_us, e.note) for rank, e in ended.items()} == {
                0: (True, "not started yet"),
                1: (True, "not started yet"),
            }
        finally:
            group.close()
