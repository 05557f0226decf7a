"""What torchrun itself would start for a command line: its own code up to the point where processes are started.

python support_torchrun.py < [{"argv": [...], "environ": {...}}, ...]  > [{"command": [...], "envs": {...}}, ...]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed.elastic.agent.server.local_elastic_agent as agent_module
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import RunProcsResult


class _Done:
    """A set of workers that has ended well."""

    def __init__(self, num_workers: int) -> None:
        self._pids = {rank: 1_000_000 + rank for rank in range(num_workers)}

    def pids(self) -> dict[int, int]:
        return self._pids

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult:
        return RunProcsResult(return_values=dict.fromkeys(self._pids))

    def close(self, *_args: object) -> None:
        pass


def capture(argv: list[str]) -> dict[str, Any]:
    """The entry point, the arguments and the environment of each local rank."""
    seen: dict[str, Any] = {}

    def start_processes(**facts: Any) -> _Done:
        facts["logs_specs"].reify(facts["envs"])
        entry = facts["entrypoint"]
        seen["command"] = [entry if isinstance(entry, str) else entry.__name__]
        seen["args"] = {str(rank): list(args) for rank, args in facts["args"].items()}
        seen["envs"] = {str(rank): {**os.environ, **environ} for rank, environ in facts["envs"].items()}
        return _Done(len(facts["envs"]))

    agent_module.start_processes = start_processes  # type: ignore[assignment]
    run.main(argv)
    return seen


def main() -> None:
    results = []
    base = dict(os.environ)
    for case in json.load(sys.stdin):
        os.environ.clear()
        os.environ.update(base)
        os.environ.update(case["environ"])
        results.append(capture(case["argv"]))
    sys.__stdout__.write(json.dumps(results))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
