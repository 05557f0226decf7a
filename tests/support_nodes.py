"""Jobs of several agents on this machine, each as one node: start them, hurt them, see what they make of it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support_hosts import Hosts
from support_launch import Launch, alive, descendants, eventually

__all__ = ["SCRIPT", "Nodes", "Row", "check_history"]

# Each rank appends a row for every step: step, world size, restarts, a digest of the loss; rank 0 saves often.
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, ckptrt

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
if os.environ["PARALLEL"] == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
optim = torch.optim.AdamW(model.parameters())
loop = {"step": 0}
rt = ckptrt.init(os.environ["RUN"], model=model, optim=optim, loop=loop, every=10)
rt.restore()
log = open(f"steps.{rank}", "a", buffering=1)
while loop["step"] < int(os.environ["STEPS"]) and not os.path.exists("enough"):
    optim.zero_grad()
    loss = model(torch.full((4, 8), float(loop["step"] % 7))).square().mean()
    loss.backward()
    optim.step()
    loop["step"] += 1
    dist.barrier()
    facts = loop["step"], dist.get_world_size(), time.time(), repr(loss.item()), os.environ["CKPTRT_TEST_NODE"]
    log.write(" ".join(str(fact) for fact in facts) + "\\n")
    rt.step()
    time.sleep(0.02)
rt.close()
"""

Row = tuple[int, int, float, float, str]  # step, world size, wall time, loss, node


class Nodes:
    """A job whose nodes are launches in one folder. Node names are n0, n1, ..."""

    def __init__(
        self,
        folder: Path,
        endpoints: str,
        nnodes: str,
        *options: str,
        steps: int = 100_000,
        nproc: int = 1,
        parallel: str = "ddp",
        hosts: Hosts | None = None,
    ) -> None:
        self.folder = folder
        self.run = f"nodes-{uuid.uuid4().hex[:8]}"
        self.launches: list[Launch] = []
        self.placed: dict[int, int] = {}  # node -> host
        self.temp = tempfile.mkdtemp(prefix="ckn-")  # short: sockets lie below it
        self._options = [
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--rdzv-id={self.run}",
            f"--ckpt-etcd-endpoints={endpoints}",
            "--log-dir=logs",
            *options,
        ]
        self._environ = {"RUN": str(folder / "run"), "STEPS": str(steps), "TMPDIR": self.temp, "PARALLEL": parallel}
        self._hosts = hosts
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)

    def start(self, count: int = 1, *options: str) -> None:
        """Start so many more nodes."""
        for _ in range(count):
            number = len(self.launches)
            address, prefix = "127.0.0.1", list[str]()
            environ = {**self._environ, "CKPTRT_TEST_NODE": f"n{number}"}
            if self._hosts is not None:
                host = self.placed[number] = self._free_host()
                address, prefix = self._hosts.address(host), self._hosts.command(host)
                environ["GLOO_SOCKET_IFNAME"] = "eth0"
            given = [*self._options, *options, f"--local-addr={address}", f"--ckpt-node-name=n{number}"]
            given.append(str(self.folder / "train.py"))
            self.launches.append(Launch(self.folder / f"n{number}", given, environ=environ, prefix=prefix))

    def _free_host(self) -> int:
        assert self._hosts is not None
        taken = {self.placed[number] for number in self.living()}
        return next(host for host in range(self._hosts.count) if host not in taken)

    def said(self) -> str:
        return "\n".join(f"== {launch.folder.name}\n{launch.err}" for launch in self.launches)

    def rows(self, rank: int = 0) -> list[Row]:
        """All steps that this rank has done, on whichever node."""
        found: list[Row] = []
        for launch in self.launches:
            path = launch.folder / f"steps.{rank}"
            for line in path.read_text().splitlines() if path.exists() else ():
                if len(line.split()) != 5:
                    continue  # the last one of a killed rank
                step, world, at_s, loss, node = line.split()
                found.append((int(step), int(world), float(at_s), float(loss), node))
        return sorted(found, key=lambda row: row[2])

    def stepping(self, world: int, after_s: float = 0.0, timeout_s: float = 60.0) -> Row:
        """Wait for the first step of a world of that size after a time; its row."""

        def first() -> Row | None:
            return next((row for row in self.rows() if row[1] == world and row[2] > after_s), None)

        found = eventually(first, f"a step of {world} ranks\n{self.said()}", timeout_s)
        assert found is not None
        return found

    def any_step(self, after_s: float, timeout_s: float = 60.0) -> float:
        """When the first step after this wall time was done, by a world of whatever size."""

        def first() -> float:
            return next((row[2] for row in self.rows() if row[2] > after_s), 0.0)

        return eventually(first, f"a step\n{self.said()}", timeout_s)

    def living(self) -> list[int]:
        return [number for number, launch in enumerate(self.launches) if launch.process.poll() is None]

    def saved(self) -> bool:
        return any((self.folder / "run" / "commits").glob("*"))

    def leader(self) -> int:
        """The number of the node that took the lead last."""
        leads = [
            (event["at_s"], number)
            for number, launch in enumerate(self.launches)
            for event in self.events(number)
            if event["event"] == "leads" and alive(launch.process.pid)
        ]
        assert leads, self.said()
        return max(leads)[1]

    def workers(self) -> list[int]:
        """Process ids of the last set of workers that was started, by rank."""
        started = [
            event
            for number in range(len(self.launches))
            for event in self.events(number)
            if event["event"] == "started"
        ]
        pids: list[int] = max(started, key=lambda event: float(event["at_s"]))["pids"]
        return pids

    def events(self, number: int) -> list[dict[str, Any]]:
        path = self.folder / f"n{number}" / "logs" / self.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def send(self, number: int, signum: int) -> None:
        os.kill(self.launches[number].process.pid, signum)

    def finish(self, numbers: Sequence[int] | None = None, timeout_s: float = 60.0) -> list[int]:
        """Let the job come to its end; the exit codes of these nodes, of all if none are named."""
        for launch in self.launches:
            (launch.folder / "enough").touch()
        chosen = range(len(self.launches)) if numbers is None else numbers
        ended = [self.launches[number].process for number in chosen]
        eventually(lambda: all(process.poll() is not None for process in ended), f"the end\n{self.said()}", timeout_s)
        return [process.returncode for process in ended]

    def close(self) -> None:
        for launch in self.launches:
            left = descendants(launch.process.pid)
            if launch.process.poll() is None:
                os.kill(launch.process.pid, signal.SIGCONT)
                launch.process.kill()
                launch.process.wait()
            eventually(lambda pids=left: not any(alive(pid) for pid in pids), f"processes {left} to end")
        shutil.rmtree(self.temp, ignore_errors=True)


def check_history(job: Nodes) -> int:
    """Whatever was done twice came to the same result, and nothing was left out; how many steps were done."""
    losses: dict[int, float] = {}
    before = 0
    for step, _world, _at_s, loss, _node in job.rows():
        assert step <= before + 1, f"step {step} follows {before}"
        known = losses.setdefault(step, loss)
        assert math.isclose(known, loss, rel_tol=1e-4), f"step {step}: {known} and {loss}"
        before = step
    return len(losses)
