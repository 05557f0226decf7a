"""Every environment variable that ckptrt reads or sets, and nothing else reads os.environ.

Set by `ckptrt-launch` for its workers; also the way in which the runtime and the agents meet.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

__all__ = [
    "AGENT_SOCKET", "DIR", "ETCD", "FAULTS", "FORMAT", "INCARNATION", "LAUNCHED_AT", "LOCAL_DIR", "RESUME", "RUN_ID",
    "STACKS_SIGNAL", "WorkerEnv", "error_file", "etcd_binary", "faults", "launch_environ", "no_color", "replace",
    "setting",
]  # fmt: skip

DIR = "CKPTRT_DIR"  # the run's directory or URL, when ckptrt.init() is given none
LOCAL_DIR = "CKPTRT_LOCAL_DIR"  # where ranks write first, when ckptrt.init() is given none; empty for none
RUN_ID = "CKPTRT_RUN_ID"  # the launcher's name for the job
INCARNATION = "CKPTRT_INCARNATION"  # number of this worker set; its fence is already written
RESUME = "CKPTRT_RESUME_FROM"  # "fresh", or "<step>.<incarnation>.<tier>" with tier memory or stored
AGENT_SOCKET = "CKPTRT_AGENT_SOCKET"  # Unix socket of the node's agent
LAUNCHED_AT = "CKPTRT_LAUNCHED_AT"  # CLOCK_MONOTONIC seconds at which the agent asked for this worker
ETCD = "CKPTRT_ETCD"  # path of the etcd binary to start when no endpoint is named
FORMAT = "CKPTRT_FORMAT"  # what `ckptrt` prints: auto, human, json, jsonl or quiet
STACKS_SIGNAL = signal.SIGRTMIN + 7  # a worker writes its stacks when it gets this; no library is known to use it
FAULTS = "CKPTRT_FAULTS"  # fault points for tests, see ckptrt/faultpoints.py


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnv:
    """What torchrun or ckptrt-launch told this process; alone, it is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    incarnation: int | None
    resume: str | None
    agent_socket: str | None
    dir: str | None
    local_dir: str | None

    @staticmethod
    def read() -> WorkerEnv:
        get = os.environ.get
        incarnation = get(INCARNATION)
        return WorkerEnv(
            rank=int(get("RANK", "0")),
            world_size=int(get("WORLD_SIZE", "1")),
            local_rank=int(get("LOCAL_RANK", "0")),
            local_world_size=int(get("LOCAL_WORLD_SIZE", "1")),
            incarnation=int(incarnation) if incarnation else None,
            resume=get(RESUME),
            agent_socket=get(AGENT_SOCKET),
            dir=get(DIR),
            local_dir=get(LOCAL_DIR),
        )


def faults() -> str:
    """The fault points that a test asked for, or an empty text."""
    return os.environ.get(FAULTS, "")


def launch_environ(drop: tuple[str, ...] = (INCARNATION, RESUME, AGENT_SOCKET, LAUNCHED_AT)) -> dict[str, str]:
    """A copy of the whole environment for child processes, without what another launcher said of its own workers."""
    return {name: value for name, value in os.environ.items() if name not in drop}


def replace(environ: dict[str, str]) -> None:
    """Make `environ` this process's environment, for C libraries too. For a forked worker, before its first line."""
    os.environ.clear()
    os.environ.update(environ)


def setting(name: str) -> str | None:
    """The launcher's option `--ckpt-<name>` as the variable CKPTRT_<NAME> gives it."""
    return os.environ.get("CKPTRT_" + name.upper().replace("-", "_"))


def error_file() -> str:
    """Where torch elastic wants this process to describe the exception that ends it, or an empty text."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def no_color() -> bool:
    """Whether the user wants no colours in any program's output: https://no-color.org."""
    return bool(os.environ.get("NO_COLOR"))


def etcd_binary() -> str | None:
    """The etcd binary that the user wants started, or None to look for one."""
    return os.environ.get(ETCD) or None
