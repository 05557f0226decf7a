"""The real persister process of a job of two ranks, one of whose threads meets a fault in the middle of its saves.

A thread is picked once the ranks have said hello, so that its calls are those of the storage and nothing else. After
the fault the job goes on, a successor finishes what a killed persister had in hand, and a new incarnation starts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from support_crash_job import Violation
from support_persister import FakeRank, make_run
from support_syscalls import Call, Fault, Strace, calls_in, failed_syncs, injected

from ckptrt import wire
from ckptrt.errors import Error
from ckptrt.plan import Read
from ckptrt.sources import StoredSource
from ckptrt.storage.catalog import Catalog, open_catalog
from ckptrt.storage.owner import this_owner
from ckptrt.storage.prune import PrunePolicy, execute, plan_prune
from ckptrt.storage.records import Parent
from ckptrt.storage.retention import Keep

__all__ = ["ROLES", "Rig"]

# In the order in which a persister starts them for two ranks.
_THREADS = ("listens to rank 0", "commits", "writes rank 0", "listens to rank 1", "writes rank 1")
ROLES = ("writes rank 0", "writes rank 1", "commits")
_STEPS = (10, 20, 30)
_KEPT = 2
_MODULE = "ckptrt.storage.persister"
_WAIT_S = 30.0
_ROWS = 140_000  # enough for reserved blocks and writes past the page cache


class _Persister:
    """A persister of its own. bug: the name of one to plant in it (tests/syscalls.py does that)."""

    def __init__(self, folder: str, bug: str) -> None:
        self.path = f"{folder}/s"
        os.makedirs(folder)
        read_end, self._control = os.pipe()
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "syscalls.py")
        command = [sys.executable, program, "--persister", bug] if bug else [sys.executable, "-m", _MODULE]
        self._process = subprocess.Popen(
            [*command, "--socket", self.path, "--control-fd", str(read_end)],
            pass_fds=(read_end,),
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        os.close(read_end)
        _wait_until(self._listens, "a persister takes no connection")
        _wait_until(lambda: len(self.threads()) == 2, "a persister has more threads than one that accepts")

    def _listens(self) -> bool:
        """Whether it not only can be connected to, but has accepted somebody and let go of him."""
        try:
            channel = wire.connect(self.path, _WAIT_S)
        except OSError:
            return False
        channel.sock.shutdown(socket.SHUT_WR)
        channel.receive()
        channel.close()
        return True

    def threads(self) -> list[int]:
        """Thread ids in the order of their starts."""
        started = {}
        for tid in os.listdir(f"/proc/{self.pid}/task"):
            try:
                with open(f"/proc/{self.pid}/task/{tid}/stat") as file:
                    started[int(tid)] = int(file.read().rpartition(")")[2].split()[19])
            except (FileNotFoundError, ProcessLookupError):
                continue
        return sorted(started, key=lambda tid: (started[tid], tid))

    def is_idle(self) -> bool:
        """Whether every thread sleeps, and none has run for a moment: whoever is to tell has told."""
        before = self._switches()
        time.sleep(0.003)
        return bool(before) and before == self._switches()

    def _switches(self) -> dict[int, str]:
        """How often each thread has slept and been made to wait; empty if one of them is at work."""
        found = {}
        for tid in self.threads():
            try:
                with open(f"/proc/{self.pid}/task/{tid}/status") as file:
                    fields = dict(line.split(":\t", 1) for line in file)
            except (FileNotFoundError, ProcessLookupError):
                return {}
            if not fields["State"].startswith("S"):
                return {}
            found[tid] = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
        return found

    def open_below(self, folder: str) -> list[str]:
        found = []
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                found.append(os.readlink(f"/proc/{self.pid}/fd/{fd}"))
            except FileNotFoundError:
                continue
        return [path for path in found if path.startswith(folder)]

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Once its ranks have hung up, or at once if it is killed."""
        os.close(self._control)
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Rig:
    """Two ranks, the persister that serves them, and as many runs as asked for, one after another."""

    def __init__(self, base: str, bug: str = "") -> None:
        self._base = base
        self._bug = bug
        self._number = 0
        self._ranks = [FakeRank(rank, 2, _ROWS, slot_bytes=2 << 20) for rank in (0, 1)]
        self._images: dict[tuple[int, int], bytes] = {}  # step, rank -> what was in memory
        self._told: dict[tuple[int, int], str] = {}  # step, rank -> committed or failed
        self._warned = False
        self._last_error = ""
        self._start()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._persister.end()

    def _start(self) -> None:
        """A new persister, which has been through a run, so that it imports nothing later on."""
        self._number += 1
        self._persister = _Persister(f"{self._base}/persister{self._number}", self._bug)
        known = self._images, self._told, self._warned
        self._images, self._told = {}, {}
        warm = f"{self._base}/warm{self._number}"
        make_run(warm, world_size=2)
        self._hello(warm)
        self._save(_STEPS, 1)
        self._settle()
        self._hang_up()
        shutil.rmtree(warm)
        self._images, self._told, self._warned = known

    def play(self, role: str, call: Call | None = None, fault: Fault | None = None) -> tuple[list[Call], int]:
        """A job of three saves; `call` of the thread with that role fails. Gives its calls, and how many failed so.

        Raises Violation.
        """
        self._number += 1
        url, log = f"{self._base}/run{self._number}", f"{self._base}/log"
        self._images, self._told, self._warned = {}, {}, False
        make_run(url, world_size=2)
        try:
            threads = self._hello(url)
            strace = Strace(threads[_THREADS.index(role)], log, call, fault, follow=False)
            try:
                self._save(_STEPS, 1)
                self._settle()
            finally:
                strace.detach()
            struck = injected(log)
            died = self._succeed(url, fault)
            self._settle()
            self._check_told(struck, died)
            catalog = open_catalog(url)
            self._check_run(catalog)
            self._hang_up()
            if not any("close(" in line for line in struck):
                self._check_open(url)
            self._go_on(url, catalog)
            return calls_in(log, url), len(struck) + died
        except (OSError, Error) as error:
            raise Violation("I7", f"{type(error).__name__}: {error}") from error
        finally:
            self._hang_up()
            if self._persister.is_dead:
                self._persister.end()
                self._start()
            shutil.rmtree(url)

    # --- what the ranks do

    def _hello(self, url: str, incarnation: int = 1) -> list[int]:
        """Both ranks say hello; gives the threads that were started for them, as `_THREADS` has them."""
        before = set(self._persister.threads())
        found: list[int] = []

        def are_there(count: int) -> bool:
            found[:] = [tid for tid in self._persister.threads() if tid not in before]
            return len(found) == count

        for rank, count in zip(self._ranks, (3, 5), strict=True):
            assert rank.channel is None
            answer = rank.hello(self._persister.path, url, incarnation, keep={"last": _KEPT})
            if answer["op"] != "ready":
                raise Violation("I7", f"the persister refuses a rank: {answer}")
            assert rank.channel is not None
            rank.channel.sock.settimeout(_WAIT_S)
            _wait_until(lambda count=count: are_there(count), "a persister has other threads than was thought")  # type: ignore[misc]
        return found

    def _save(self, steps: tuple[int, ...], incarnation: int) -> None:
        """All ranks hand over each step and wait for what becomes of it; nobody goes on once the persister is dead."""
        for number, step in enumerate(steps):
            for rank in self._ranks:
                self._images[step, rank.rank] = rank.stage(number % 2, step, incarnation)
            if not self._hand_over(step, number % 2, again=False):
                return

    def _hand_over(self, step: int, slot: int, again: bool) -> bool:
        """False if the persister has died over it."""
        waiting = [rank for rank in self._ranks if (step, rank.rank) not in self._told]
        try:
            for rank in waiting:
                rank.submit(step, slot, again)
        except OSError:
            return False
        heard = [self._hear(rank, step) for rank in waiting]  # of one rank the other's answer may have gone out
        return all(heard)

    def _settle(self) -> None:
        """Wait until the persister has pruned too, and hear what it says of that."""
        _wait_until(lambda: self._persister.is_dead or self._persister.is_idle(), "the persister never rests")
        for rank in self._ranks:
            assert rank.channel is not None
            rank.channel.sock.settimeout(0.0)
            try:
                while (received := rank.channel.receive()) is not None:
                    self._take(rank, received[0])
            except (BlockingIOError, ConnectionError):
                pass
            rank.channel.sock.settimeout(_WAIT_S)

    def _hear(self, rank: FakeRank, step: int) -> bool:
        assert rank.channel is not None
        while True:
            try:
                received = rank.channel.receive()
            except TimeoutError:
                raise Violation("I7", f"rank {rank.rank} heard nothing of step {step} for {_WAIT_S:g} s") from None
            except OSError:
                received = None
            if received is None:
                return False
            self._take(rank, received[0])
            if (step, rank.rank) in self._told:
                return True

    def _take(self, rank: FakeRank, message: dict[str, Any]) -> None:
        if message["op"] in ("failed", "warning") and not message.get("what", ""):
            raise Violation("I7", f"a failure without a word: {message}")
        self._warned |= message["op"] == "warning"
        self._last_error = message.get("what", self._last_error)
        if message["op"] in ("committed", "failed"):
            self._told[message["step"], rank.rank] = message["op"]

    def _hang_up(self) -> None:
        for rank in self._ranks:
            rank.hang_up()
        if not self._persister.is_dead:  # but for the thread that commits, which the next job ends
            _wait_until(lambda: len(self._persister.threads()) <= 3, "a thread of the persister goes on")

    def _succeed(self, url: str, fault: Fault | None) -> bool:
        """If the persister was killed: another one gets what is still in memory, and the job goes on. True if so."""
        if not self._persister.is_dead:
            return False
        if fault is None or not fault.kills:
            raise Violation("I7", "the persister died")
        for rank in self._ranks:
            rank.hang_up()
        self._persister.end()
        self._start()
        self._hello(url)
        step = max(step for step, _ in self._images)
        for rank in self._ranks:  # the warm-up has been through the slots
            rank.stage(_STEPS.index(step) % 2, step)
        if not self._hand_over(step, _STEPS.index(step) % 2, again=True):
            raise Violation("I7", "the successor of a persister died too")
        if any(self._told[step, rank.rank] != "committed" for rank in self._ranks):
            raise Violation(
                "I1",
                f"step {step} was in memory, but a successor of the persister could not commit it: {self._last_error}",
            )
        self._save(tuple(later for later in _STEPS if later > step), 1)
        return True

    # --- the judge

    def _check_told(self, struck: list[str], died: bool) -> None:
        if not struck and not died and (self._warned or "failed" in self._told.values()):
            raise Violation("I7", f"nothing was made to fail, but: {self._last_error}")
        failed = failed_syncs(struck)
        if failed and not self._warned and "failed" not in self._told.values():
            raise Violation("I1", f"nobody was told that this failed: {failed[0]}")

    def _check_run(self, catalog: Catalog) -> None:
        """What was reported is there, as it was in memory; and nothing is that is not whole."""
        for info in catalog.overview().commits:
            found = catalog.examine(info.id) if info.state == "committed" else info
            if found.state != "committed":
                raise Violation("I2", f"{info.id} is {found.state}: {found.reason}")
            self._compare(catalog, info.step, info)
        there = [info.step for info in catalog.commits()]
        reported = sorted({step for (step, _), op in self._told.items() if op == "committed"}, reverse=True)
        for step in reported[:1]:
            if not there or there[0] < step:
                raise Violation("I3", f"step {step} was reported; these are there: {there}")
        for step in reported[:_KEPT]:
            if step not in there[:_KEPT]:
                raise Violation("I1", f"step {step} was reported; these are there: {there}")

    def _compare(self, catalog: Catalog, step: int, info: Any) -> None:
        source = StoredSource(catalog.open_checkpoint(info))
        for part in source.parts():
            image = self._images[step, part.rank]
            with source.mapped(part, [Read(0, len(image))]) as buffer:
                if buffer[: len(image)] != image:
                    raise Violation("I6", f"step {step}: wrong bytes of rank {part.rank} were loaded")

    def _check_open(self, url: str) -> None:
        left = self._persister.open_below(url)
        if left:
            raise Violation("I8", f"the persister has left {left[0]} open")

    def _go_on(self, url: str, catalog: Catalog) -> None:
        """The next start: a new incarnation goes on from the newest checkpoint, saves, and prunes."""
        newest = catalog.newest_good().commit
        parent = Parent(step=newest.step, incarnation=newest.incarnation) if newest else None
        catalog.write_fence(2, parent, 2, this_owner())
        self._hello(url, 2)
        self._save((40,), 2)
        self._settle()
        if {self._told.get((40, rank.rank)) for rank in self._ranks} != {"committed"}:
            raise Violation("I7", f"the next incarnation can't save: {self._last_error}")
        self._check_run(catalog)
        policy = PrunePolicy(keep=Keep(last=1), grace_s=0.0, removed_grace_s=0.0)
        result = execute(catalog, plan_prune(catalog, policy, time.time() + 1e6))
        if result.errors:
            raise result.errors[0]
        self._compare(catalog, 40, catalog.commits()[0])


def _wait_until(condition: Callable[[], bool], else_say: str) -> None:
    until_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise Violation("I7", else_say)
        time.sleep(0.002)
