"""Real gloo ranks for tests, forked from one server that has torch imported, and kept for many scenarios.

    def scenario(rank, world_size, folder): ...          a function of a module, run on every rank
    results = worlds(2).run(scenario, str(tmp_path))     what each rank returned

A rank that raises fails the run; one that hangs is killed with its world after a while.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 60.0
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "numpy", "ckptrt.starting"]

Scenario = Callable[..., Any]


class World:
    """`size` processes in one gloo process group. Ranks write their stderr to files, see `said`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.mkdtemp(prefix="ckw-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, self._folder), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def start(self, scenario: Scenario, *args: Any, **kwargs: Any) -> None:
        """Begin a scenario on every rank; `results` waits for it."""
        for rank in range(self.size):
            self._path(rank).write_bytes(b"")
        for end in self._ends:
            end.send((scenario, args, kwargs))

    def results(self, timeout_s: float = _TIMEOUT_S) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            open_ends = {end: rank for rank, end in enumerate(self._ends) if rank not in answers}
            ready = wait(list(open_ends), timeout_s)
            if not ready:
                late = sorted(open_ends.values())
                said = self.said()
                self.close()
                told = "\n".join(f"rank {rank}: {word}" for rank, (good, word) in answers.items() if not good)
                pytest.fail(f"ranks {late} of {self.size} gave no answer in {timeout_s} s; all said: {said}\n{told}")
            for end in ready:
                rank = open_ends[end]  # type: ignore[index]
                try:
                    answers[rank] = self._ends[rank].recv()
                except EOFError:
                    said = self.said()
                    self.close()
                    pytest.fail(f"rank {rank} of {self.size} died; it said: {said}")
        problems = [f"rank {rank}: {answer[1]}" for rank, answer in sorted(answers.items()) if not answer[0]]
        if problems:
            pytest.fail("\n".join(problems))
        return [answers[rank][1] for rank in range(self.size)]

    def run(self, scenario: Scenario, *args: Any, timeout_s: float = _TIMEOUT_S, **kwargs: Any) -> list[Any]:
        self.start(scenario, *args, **kwargs)
        return self.results(timeout_s)

    def said(self, rank: int | None = None) -> str:
        """What one rank, or all in order, wrote to stderr since the last scenario began."""
        ranks = range(self.size) if rank is None else [rank]
        return "".join(self._path(r).read_text(errors="replace") for r in ranks if self._path(r).exists())

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, rank: int) -> Path:
        return Path(self._folder, f"{rank}.err")


def _serve(end: Connection, rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    sink = os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 2)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            scenario, args, kwargs = end.recv()
        except EOFError:
            os._exit(0)
        try:
            end.send((True, scenario(rank, size, *args, **kwargs)))
        except BaseException:  # noqa: BLE001 whatever it was belongs into the test's report
            end.send((False, traceback.format_exc()))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """A world of any size, made at its first use and again after one that had to be killed."""
    made: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in made or not made[size]._processes:
            made[size] = World(size)
        return made[size]

    yield get
    for world in made.values():
        world.close()
