"""What every WorkerGroup has to do, as one class of tests; each implementation brings a `group` and its programs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence

from ckptrt.agents.workerproc import ForkRequest
from ckptrt.agents.workers import WorkerEvent, WorkerExited, WorkerGroup, WorkerSpec, WorkerStarted

__all__ = ["WorkersConformance", "collect", "exits", "spec", "started"]

_DEADLINE_S = 30.0

# Programs by name. Each one's first line on stdout says that it has got so far.
PROGRAMS = {
    "finish": "pass",
    "exit-7": "import sys; sys.exit(7)",
    "wait": "import time\nprint('up', flush=True)\ntime.sleep(60)",
    "stubborn": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    ),
}


def spec(rank: int, script: str, streams: tuple[int, int, int], *args: str) -> WorkerSpec:
    """A worker that runs a script, for a cold start and for a fork."""
    environ = {"RANK": str(rank), "PATH": "/usr/bin:/bin"}
    request = ForkRequest(kind="script", target=script, args=args, env=environ, cwd="/", name="test")
    return WorkerSpec(rank=rank, command=(sys.executable, script, *args), request=request, streams=streams)


def collect(group: WorkerGroup, until: Callable[[list[WorkerEvent]], bool]) -> list[WorkerEvent]:
    """The events until they are what the test waits for."""
    events: list[WorkerEvent] = []
    deadline_s = time.monotonic() + _DEADLINE_S
    while not until(events):
        assert time.monotonic() < deadline_s, f"still waiting after {events}"
        events += group.poll()
        time.sleep(0.002)
    return events


def started(events: Sequence[WorkerEvent]) -> dict[int, int]:
    return {event.rank: event.pid for event in events if isinstance(event, WorkerStarted)}


def exits(events: Sequence[WorkerEvent]) -> dict[int, WorkerExited]:
    return {event.rank: event for event in events if isinstance(event, WorkerExited)}


class WorkersConformance:
    """Subclasses have fixtures `group` and `specs`: a function from program names to specs, one for each rank."""

    # How a program ends by itself has to be played where there are no processes.
    def play(self, group: WorkerGroup, rank: int, code: int) -> None:
        """Nothing to do for real processes."""

    def wait_up(self, specs: Sequence[WorkerSpec]) -> None:
        """Wait until the programs have said "up"; nothing to do where there are none."""

    def test_starts_and_exits_are_told_with_rank_and_code(
        self, group: WorkerGroup, specs: Callable[..., list[WorkerSpec]]
    ) -> None:
        group.start(specs("finish", "exit-7"))
        self.play(group, 0, 0)
        self.play(group, 1, 7)
        events = collect(group, lambda events: len(exits(events)) == 2)
        assert set(started(events)) == {0, 1}
        assert {rank: (e.code, e.pid, e.by_us) for rank, e in exits(events).items()} == {
            0: (0, started(events)[0], False),
            1: (7, started(events)[1], False),
        }
        assert group.poll() == []

    def test_stop_ends_those_without_a_handler_at_once(
        self, group: WorkerGroup, specs: Callable[..., list[WorkerSpec]]
    ) -> None:
        workers = specs("wait", "wait")
        group.start(workers)
        collect(group, lambda events: len(started(events)) == 2)
        self.wait_up(workers)
        group.stop(30.0)
        ended = exits(collect(group, lambda events: len(exits(events)) == 2))
        assert {e.code for e in ended.values()} == {-signal.SIGTERM}
        assert all(e.by_us for e in ended.values())

    def test_stop_kills_the_stubborn_after_the_grace(
        self, group: WorkerGroup, specs: Callable[..., list[WorkerSpec]]
    ) -> None:
        workers = specs("stubborn", "wait")
        group.start(workers)
        collect(group, lambda events: len(started(events)) == 2)
        self.wait_up(workers)
        assert group.wake_in_s() is None
        group.stop(0.2)
        wake_in_s = group.wake_in_s()
        assert wake_in_s is not None
        assert wake_in_s <= 0.2
        first = exits(collect(group, lambda events: 1 in exits(events)))
        assert first[1].code == -signal.SIGTERM
        last = {**first, **exits(collect(group, lambda events: 0 in {**first, **exits(events)}))}
        assert (last[0].code, last[0].by_us) == (-signal.SIGKILL, True)
        assert group.wake_in_s() is None

    def test_a_later_stop_may_only_hurry(self, group: WorkerGroup, specs: Callable[..., list[WorkerSpec]]) -> None:
        workers = specs("stubborn")
        group.start(workers)
        collect(group, lambda events: len(started(events)) == 1)
        self.wait_up(workers)
        group.stop(0.0)
        group.stop(60.0)
        ended = exits(collect(group, lambda events: len(exits(events)) == 1))
        assert ended[0].code == -signal.SIGKILL

    def test_one_set_after_the_other(self, group: WorkerGroup, specs: Callable[..., list[WorkerSpec]]) -> None:
        pids = set()
        for _ in range(3):
            group.start(specs("wait"))
            events = collect(group, lambda events: len(started(events)) == 1)
            pids.add(started(events)[0])
            group.stop(0.0)
            collect(group, lambda events: len(exits(events)) == 1)
        assert len(pids) == 3

    def test_signals_go_to_every_worker(self, group: WorkerGroup, specs: Callable[..., list[WorkerSpec]]) -> None:
        workers = specs("wait", "wait")
        group.start(workers)
        collect(group, lambda events: len(started(events)) == 2)
        self.wait_up(workers)
        group.send_signal(signal.SIGUSR1)
        ended = exits(collect(group, lambda events: len(exits(events)) == 2))
        assert {e.code for e in ended.values()} == {-signal.SIGUSR1}
