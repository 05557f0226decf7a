"""What a launch is about, and what each of its workers is told: environment, program, store. As torchrun does it."""

from __future__ import annotations

import socket
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ckptrt import env
from ckptrt.agents.logs import LogOptions
from ckptrt.agents.workerproc import ForkRequest, Kind
from ckptrt.agents.world import Rules
from ckptrt.errors import UsageError

__all__ = ["Job", "Order", "Program", "WorkerStore", "worker_env"]

# What `torchrun --run-path` does, for a worker that has to be started cold.
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The user's program. `args` may hold ${local_rank}, which is replaced for each worker."""

    kind: Kind
    target: str
    args: tuple[str, ...]
    interpreter: str = sys.executable
    numa_binding: str | None = None

    def args_for(self, local_rank: int) -> tuple[str, ...]:
        return tuple(string.Template(arg).safe_substitute(local_rank=str(local_rank)) for arg in self.args)

    def command(self, local_rank: int) -> tuple[str, ...]:
        """The command line of a cold start."""
        command = (self.target, *self.args_for(local_rank))
        if self.kind != "command":
            start = {"script": (), "module": ("-m",), "path": ("-c", _RUN_PATH)}[self.kind]
            command = (self.interpreter, "-u", *start, *command)
        return command if self.numa_binding is None else _bind(command, local_rank, self.numa_binding)

    def request(self, local_rank: int, environ: dict[str, str], cwd: str) -> ForkRequest:
        """The same for a fork."""
        return ForkRequest(
            kind=self.kind,
            target=self.target,
            args=self.args_for(local_rank),
            env=environ,
            cwd=cwd,
            name=f"ckptrt-rank{local_rank}",
        )


def _bind(command: tuple[str, ...], local_rank: int, mode: str) -> tuple[str, ...]:
    """The command behind numactl, as torchrun puts it there."""
    from torch.numa.binding import AffinityMode, NumaOptions, _maybe_wrap_command_args_with_numa_binding

    options = NumaOptions(affinity_mode=AffinityMode(mode))
    return tuple(_maybe_wrap_command_args_with_numa_binding(command, gpu_index=local_rank, numa_options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch on one node. Everything that the command line and the environment decide is decided here.

    run: its name, for logs and keys; run_id: torch elastic's, as torchrun would have it. url: the run's storage, empty
    until a worker names it; local_dir: where ranks write first, if not there. master_port: None for a fresh port at
    every start. environ: of the workers, without what differs between them. grace_s, drain_s: from SIGTERM to SIGKILL
    after a failure, and after a signal to us. drain_signals: those that ask for a last checkpoint, for which there is
    as much time; drained_exit: the exit code after it; preempt_watch: the cloud to ask for notices, and where.
    hang_timeout_s: how long workers may go without a step, None for a learned time, infinity for ever. rules: how many
    nodes; node_timeout_s: silence after which one of them is gone; node_name: empty for the host's; grow_after_s: how
    long workers run before they stop to take in more nodes.
    """

    run: str
    run_id: str
    program: Program
    num_workers: int
    max_restarts: int
    max_no_progress: int
    grace_s: float
    drain_s: float
    role: str
    logs: LogOptions
    environ: Mapping[str, str]
    cwd: str
    signals: tuple[int, ...]
    hang_timeout_s: float | None = None
    drain_signals: tuple[int, ...] = ()
    drained_exit: int = 75
    preempt_watch: tuple[str, str] | None = None
    url: str = ""
    local_dir: str = ""
    resume: str = "auto"
    etcd_endpoints: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    preload_path: tuple[str, ...] = ()
    rules: Rules = field(default_factory=Rules)
    node_name: str = ""
    node_timeout_s: float = 5.0
    grow_after_s: float = 60.0
    store_host: str = "127.0.0.1"
    master_port: int | None = None
    virtual_local_rank: bool = False
    cold: str = ""  # why workers must be started cold, empty if they need not
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One set of workers of one node, as whoever decides wants it: which ranks, of what world, and where they meet.

    resume: where they go on from, as CKPTRT_RESUME_FROM has it. url: of the run, empty until a worker has named it.
    """

    incarnation: int
    restarts: int
    resume: str
    url: str
    local_dir: str
    first_rank: int
    num_local: int
    world_size: int
    store_host: str
    store_port: int
    node_rank: int = 0
    num_nodes: int = 1

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_local)


def worker_env(job: Job, order: Order, local_rank: int, *, error_file: str, ours: Mapping[str, str]) -> dict[str, str]:
    """A worker's whole environment. ours: the CKPTRT_ variables that the node adds."""
    rank = str(order.first_rank + local_rank)
    world = str(order.world_size)
    environ = {
        **job.environ,
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(order.node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": job.role,
        "LOCAL_WORLD_SIZE": str(order.num_local),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(order.num_nodes),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": order.store_host,
        "MASTER_PORT": str(order.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": job.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "TORCHELASTIC_ERROR_FILE": error_file,
        env.RUN_ID: job.run,
        **ours,
    }
    if order.url:
        environ |= {
            env.DIR: order.url,
            env.LOCAL_DIR: order.local_dir,
            env.INCARNATION: str(order.incarnation),
            env.RESUME: order.resume,
        }
    else:
        known = {env.DIR: job.url, env.LOCAL_DIR: job.local_dir}
        environ |= {name: value for name, value in known.items() if value}
    if job.virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
        environ["CUDA_VISIBLE_DEVICES"] = _own_device(job.environ.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return environ


def _own_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(f"local rank {local_rank} has no device: CUDA_VISIBLE_DEVICES={visible} names {len(devices)}")
    return devices[local_rank].strip()


class WorkerStore:
    """The TCPStore at which the workers of one incarnation meet. Each incarnation gets an empty one.

    A store that is kept across restarts hands the new ranks the addresses of dead ones: torch 2.13's default does.
    """

    def __init__(self, host: str, port: int | None) -> None:
        self._host = host
        self._port = port
        self._store: Any = None

    def renew(self) -> int:
        """Drop the last incarnation's store and open a new one; returns its port. Raises UsageError if it is taken."""
        from torch._C._distributed_c10d import TCPStore

        self._store = None
        loopback = self._port is None
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server(
                (self._host if loopback else "", self._port or 0), family=family, backlog=512
            )
        except OSError as error:
            raise UsageError(
                f"the workers' store can't listen on {self._host}:{self._port or 0}: {error.strerror}",
                safe="nothing was started",
                hint="choose another --master-port, or leave it out to get a free one",
            ) from error
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        return port

    def close(self) -> None:
        self._store = None
