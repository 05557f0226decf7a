"""The agent's parts one by one: its socket and arenas, its tie to etcd, opening incarnations, its wording."""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrt.agents.agentsocket import AgentServer
from ckptrt.agents.coord import MemoryCoord, MemoryCoordStore
from ckptrt.agents.joblink import JobLink, LinkNotice
from ckptrt.agents.ledger import RunLedger
from ckptrt.agents.report import Recovery, failure_lines, ranks_text, recovery_line
from ckptrt.agents.resume import Snapshot
from ckptrt.agents.verdict import Exit, Verdict
from ckptrt.clock import FakeClock
from ckptrt.errors import BusyError, NoCheckpointError, UsageError
from ckptrt.storage.catalog import Parent, open_catalog
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Channel, Message, connect


class Desk:
    """Notes what it is asked; answers open_run when told to."""

    def __init__(self) -> None:
        self.phases: list[tuple[int, str, float, int | None]] = []
        self.steps: list[int] = []
        self.waiting: list[Callable[[Message], None]] = []
        self.drain: list[tuple[int, int, int, bool]] = []

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None:
        self.waiting.append(answer)

    def persister_path(self) -> str:
        return "/there"

    def stacks_file(self, rank: int) -> str:
        return f"/stacks{rank}"

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None:
        self.drain.append((rank, step, target, taken))

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        self.waiting.append(answer)

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None:
        self.phases.append((rank, name, at_s, step))

    def committed(self, step: int) -> None:
        self.steps.append(step)


class Served:
    """A server with its selector, turned by hand."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.desk = Desk()
        self.selector = selectors.DefaultSelector()
        self.server = AgentServer(path, self.desk, self.selector)

    def turn(self) -> None:
        while ready := self.selector.select(0):
            for key, _mask in ready:
                key.data()

    def client(self, rank: int) -> Channel:
        channel = connect(self.path, 5.0)
        assert self.ask(channel, op="hello", rank=rank, pid=1, incarnation=1)[0] == {
            "op": "ok",
            "stacks": f"/stacks{rank}",
        }
        return channel

    def ask(self, channel: Channel, **message: Any) -> tuple[Message, tuple[int, ...]]:
        channel.send(message)
        self.turn()
        received = channel.receive()
        assert received is not None
        return received


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(str(tmp_path / "s"))
    yield served
    served.server.close()
    served.selector.close()


def test_an_arena_outlives_its_worker_and_a_larger_one_retires_it(served: Served) -> None:
    first = served.client(3)
    reply, (fd,) = served.ask(first, op="arena", rank=3, size_bytes=4096)
    os.pwrite(fd, b"kept", 0)
    os.close(fd)
    first.close()
    served.turn()
    second = served.client(3)
    reply, (fd,) = served.ask(second, op="arena", rank=3, size_bytes=4096)
    assert (reply["created"], os.pread(fd, 4, 0)) == (False, b"kept")
    os.close(fd)
    reply, (fd,) = served.ask(second, op="arena", rank=3, size_bytes=8192)
    assert (reply["created"], os.fstat(fd).st_size) == (True, 8192)
    os.close(fd)
    reply, fds = served.ask(second, op="holdings")
    assert (reply["ranks"], [os.fstat(fd).st_size for fd in fds]) == ([3, 3], [8192, 4096])
    second.send({"op": "release_retired"})  # without an answer: the next one must be that of the next request
    reply, more = served.ask(second, op="holdings")
    assert reply == {"op": "holdings", "ranks": [3]}
    for fd in (*fds, *more):
        os.close(fd)
    second.close()


def test_an_arena_that_can_t_be_had_is_an_error_with_words(served: Served) -> None:
    channel = served.client(0)
    reply, _fds = served.ask(channel, op="arena", rank=0, size_bytes=-1)
    assert (reply["op"], reply["code"]) == ("error", "error")
    assert "the agent could not serve 'arena'" in reply["what"]
    channel.close()


def test_open_run_is_answered_when_the_desk_has_an_answer(served: Served) -> None:
    one, other = served.client(0), served.client(1)
    for channel in (one, other):
        channel.send({"op": "open_run", "url": "u", "options": {}, "world_size": 2})
    served.turn()
    other.close()  # died while it waited
    served.turn()
    for answer in served.desk.waiting:
        answer({"op": "run", "incarnation": 5, "resume": "fresh"})
    received = one.receive()
    assert received is not None
    assert received[0]["incarnation"] == 5
    one.close()


def test_phases_of_an_older_set_are_history_but_its_commits_count(served: Served) -> None:
    old = served.client(0)
    old.send({"op": "phase", "name": "group", "at_s": 1.0, "step": 4})
    served.turn()
    served.server.begin_set(range(2))
    old.send({"op": "phase", "name": "first_step", "at_s": 2.0, "step": 5})
    old.send({"op": "committed", "step": 5})
    new = served.client(0)
    new.send({"op": "phase", "name": "group", "at_s": 3.0})
    served.turn()
    assert served.desk.phases == [(0, "group", 1.0, 4), (0, "group", 3.0, None)]
    assert served.desk.steps == [5]
    old.close()
    new.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 3) + b"{}}",
        struct.pack("<I", 4) + b"null",
        struct.pack("<I", 13) + b'{"op":"what"}',
        struct.pack("<I", 14) + b'{"op":"arena"}',
        struct.pack("<I", 2**31),
    ],
    ids=["no json", "no object", "unknown", "fields missing", "too long"],
)
def test_a_client_that_misbehaves_is_dropped_and_nobody_else(served: Served, data: bytes) -> None:
    good = served.client(0)
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect(served.path)
        bad.sendall(data)
        served.turn()
        bad.settimeout(5.0)
        assert bad.recv(1) == b""
    assert served.ask(good, op="persister")[0] == {"op": "persister", "path": "/there"}
    good.close()


def test_half_a_message_holds_up_nobody(served: Served) -> None:
    good = served.client(0)
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(served.path)
        slow.sendall(struct.pack("<I", 18) + b'{"op":"per')
        served.turn()
        assert served.ask(good, op="persister")[0]["path"] == "/there"
        slow.sendall(b'sister"}')
        served.turn()
        received = Channel(slow).receive()
        assert received == ({"op": "persister", "path": "/there"}, ())
    good.close()


# --- the tie to etcd


def link(coord: MemoryCoord, notices: list[LinkNotice], clock: FakeClock | None = None) -> JobLink:
    return JobLink(
        "run", notify=notices.append, connect=lambda _timeout_s: MemoryCoordStore(coord), clock=clock or FakeClock()
    )


def test_one_leader_and_a_number_that_only_grows() -> None:
    coord = MemoryCoord()
    first = link(coord, [])
    first.open()
    try:
        second = link(coord, [])
        with pytest.raises(BusyError, match=f"run run is led by another launcher: pid {os.getpid()} on "):
            second.open()
        second.close()
        assert [first.raise_incarnation(0), first.raise_incarnation(0)] == [(1, ""), (2, "")]
        assert first.raise_incarnation(7) == (8, "")  # the storage had more fences than etcd knew of
        coord.wipe()
        assert first.raise_incarnation(0) == (9, "")  # etcd came back on an empty disk
    finally:
        first.close()
    third = link(coord, [])
    third.open()
    third.close()


def test_without_etcd_the_fences_alone_keep_the_order() -> None:
    coord, clock = MemoryCoord(), FakeClock()
    tie = link(coord, [], clock)
    tie.open()
    assert tie.raise_incarnation(3) == (4, "")
    coord.reachable = False
    began_s = clock.monotonic_s()
    number, warning = tie.raise_incarnation(3)
    assert number == 5
    assert "the fences alone keep the order" in warning
    assert 4.9 < clock.monotonic_s() - began_s < 6
    coord.reachable = True
    assert tie.raise_incarnation(0)[0] == 6
    tie.close()


# --- opening incarnations


class Counter:
    """Stands for the coordination store."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, above: int) -> tuple[int, str]:
        self.value = max(self.value, above) + 1
        return self.value, ""


def no_memory() -> list[Snapshot]:
    return []


def test_fences_follow_each_other(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    ledger = RunLedger(Counter())
    ledger.open_run(RunPlace.of(url))
    try:
        opening = ledger.advance(memory=no_memory, policy="auto", world_size=2)
        assert (opening.incarnation, opening.resume_text) == (1, "fresh")
        held = [Snapshot(step=30, incarnation=1, world_size=2)]
        opening = ledger.advance(memory=lambda: held, policy="auto", world_size=2)
        assert (opening.incarnation, opening.resume_text) == (2, "30.1.memory")
        # Nothing new since: the same snapshot is still what this history goes on from.
        opening = ledger.advance(memory=lambda: held, policy="auto", world_size=2)
        assert (opening.incarnation, opening.resume_text) == (3, "30.1.memory")
        opening = ledger.advance(memory=lambda: held, policy="never", world_size=2)
        assert (opening.incarnation, opening.resume_text) == (4, "fresh")
        # That cut it off.
        opening = ledger.advance(memory=lambda: held, policy="auto", world_size=2)
        assert (opening.incarnation, opening.resume_text) == (5, "fresh")
        fences = open_catalog(url).fences()
        assert {number: fence.parent for number, fence in fences.items()} == {
            1: None,
            2: Parent(step=30, incarnation=1),
            3: Parent(step=30, incarnation=1),
            4: None,
            5: None,
        }
        for policy in ("latest", "30"):
            with pytest.raises(NoCheckpointError):
                ledger.advance(memory=no_memory, policy=policy, world_size=2)
        with pytest.raises(UsageError, match="already writes to"):
            ledger.open_run(RunPlace.of(str(tmp_path / "other")))
        with pytest.raises(BusyError):
            RunLedger(Counter()).open_run(RunPlace.of(url))
    finally:
        ledger.close()


def test_a_race_for_a_number_is_run_again(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    catalog = open_catalog(url, create=True)
    counter = Counter()

    def raced(above: int) -> tuple[int, str]:
        number, _ = counter(above)
        if number < 3:  # somebody else is quicker, twice
            catalog.write_fence(number, None, 2)
        return number, ""

    ledger = RunLedger(raced)
    ledger.open_run(RunPlace.of(url))
    try:
        assert ledger.advance(memory=no_memory, policy="auto", world_size=1).incarnation == 3
    finally:
        ledger.close()


# --- words


def test_ranks_are_told_in_spans() -> None:
    assert [ranks_text(ranks) for ranks in ([4], [2, 0, 1], [0, 2, 3, 5])] == [
        "rank 4", "ranks 0-2", "ranks 0, 2-3, 5",
    ]  # fmt: skip


def ended(rank: int, code: int, **facts: Any) -> Exit:
    return Exit(rank=rank, pid=1, code=code, at_s=1.0, **facts)


def test_the_block_after_a_failure() -> None:
    verdict = Verdict(
        cause=ended(3, 1, error="ValueError: no", error_at_s=0.5),
        consequences=(ended(1, -9), ended(2, 1, error="RuntimeError: Connection reset by peer", error_at_s=0.6)),
        stopped=(ended(0, -15, by_us=True), ended(4, -15, by_us=True)),
        fingerprint="x",
    )
    text = failure_lines(verdict, step=1040, tail=["Traceback", "ValueError: no"], log="logs/3/stderr.log")
    assert text.split("\n") == [
        "failure      rank 3 · exit 1 · after step 1040 · ValueError: no",
        "             rank 1 was killed as well: SIGKILL (exit -9)",
        "             rank 2 failed after it (not a cause): exit 1 RuntimeError: Connection reset by peer",
        "             ranks 0, 4 were stopped by the supervisor (not a cause)",
        "             log logs/3/stderr.log",
        "               Traceback",
        "               ValueError: no",
    ]


def test_the_parts_of_a_recovery_add_up() -> None:
    recovery = Recovery(failed_at_s=10.0, seen_at_s=10.01, num_workers=2)
    recovery.stopped_at_s, recovery.decide_s, recovery.fence_s, recovery.fenced_at_s = 10.05, 0.02, 0.03, 10.11
    recovery.started_at_s = 10.15
    assert sum(recovery.parts().values()) == pytest.approx(0.15)  # nothing more is known yet
    assert not recovery.phase(0, "group", 10.3)
    assert not recovery.phase(1, "group", 10.4)
    assert not recovery.phase(0, "restored", 10.5)
    assert not recovery.phase(1, "restored", 10.45)
    assert not recovery.phase(0, "first_step", 10.6)
    assert recovery.phase(1, "first_step", 10.7)
    assert not recovery.phase(1, "first_step", 10.9)  # told twice
    assert recovery_line(recovery.parts()) == (
        "recovery     0.70 s = detect 0.01 + stop 0.04 + decide 0.03 + fence 0.03 + start 0.29 + restore 0.10"
        " + first step 0.20"
    )


def test_a_run_that_is_named_late_is_fenced_with_the_number_of_the_workers_that_name_it(tmp_path: Path) -> None:
    ledger = RunLedger(Counter())
    try:
        assert ledger.advance(memory=no_memory, policy="auto", world_size=2).incarnation == 1
        ledger.open_run(RunPlace.of(str(tmp_path / "run")))
        for expected in (1, 2):
            assert ledger.advance(memory=no_memory, policy="auto", world_size=2).incarnation == expected
    finally:
        ledger.close()


def test_without_an_etcd_server_one_node_does_with_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed() -> None:
        raise UsageError("no etcd server to start for this job: no etcd on PATH")

    monkeypatch.setattr("ckptrt.agents.joblink.EmbeddedEtcd", none_installed)
    tie = JobLink("run", notify=lambda _notice: None)
    tie.open()
    try:
        assert tie.raise_incarnation(4)[0] == 5
        assert "no etcd on PATH" in tie.note and "enough for one node" in tie.note
        monkeypatch.setenv("CKPTRT_ETCD", "/nonexistent/etcd")
        with pytest.raises(UsageError):
            JobLink("run", notify=lambda _notice: None).open()
    finally:
        tie.close()
