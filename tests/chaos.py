"""A job of several hosts under a seeded schedule of faults: `make chaos`. See docs/design/crash-testing.md.

    worker killed | worker stopped | agent killed | agent stopped | host cut off | etcd's leader killed

Three hosts (network namespaces) with two ranks each train with FSDP2 and save to one directory; etcd has three members.
Afterwards the job must have come to its end, no step left out, and whatever was done twice must have come to the same
result. Exit status 0 only then.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from support_etcd import EtcdCluster
from support_hosts import Hosts
from support_launch import alive, descendants
from support_nodes import Nodes, check_history

from ckptrt.agents.embedded_etcd import find_etcd

__all__ = ["Chaos"]

_NODE_TIMEOUT_S = 3.0


class Chaos:
    """One job and what is done to it. Every fault is undone after some seconds, and what died is started again."""

    def __init__(self, folder: Path, seed: int, *, hosts: int = 3, nproc: int = 2, parallel: str = "fsdp2") -> None:
        self.rng = random.Random(seed)
        self.nproc = nproc
        self.hosts = Hosts(hosts)
        (folder / "etcd").mkdir(parents=True)
        self.etcd = EtcdCluster(find_etcd().path, folder / "etcd", 3, host=self.hosts.gateway)
        self.etcd.start()
        endpoints = ",".join(self.etcd.endpoint(node) for node in range(3))
        options = (
            f"--ckpt-node-timeout={_NODE_TIMEOUT_S}", "--ckpt-grow-after=2", "--ckpt-hang-timeout=6",
            "--max-restarts=10000", "--ckpt-max-no-progress=10000",
        )  # fmt: skip
        self.job = Nodes(folder, endpoints, f"1:{hosts}", *options, nproc=nproc, parallel=parallel, hosts=self.hosts)
        self.done: Counter[str] = Counter()
        self.told: list[str] = []
        self.pauses_s: dict[str, list[float]] = {}  # the longest time without a step after each fault

    def run(self, seconds: float) -> None:
        """Hurt it for so long, then let it come to its end."""
        count = self.hosts.count
        self.job.start(count)
        self.job.stepping(count * self.nproc, timeout_s=120)
        until_s = time.monotonic() + seconds
        faults: dict[str, Callable[[], float]] = {
            "worker killed": self._kill_worker,
            "worker stopped": self._stop_worker,
            "agent killed": self._kill_agent,
            "agent stopped": self._stop_agent,
            "host cut off": self._cut_host,
            "etcd's leader killed": self._kill_etcd,
        }
        while time.monotonic() < until_s:
            name = self.rng.choice(list(faults))
            began_s = time.time()
            self.told.append(f"{time.strftime('%H:%M:%S')} {name}")
            self.done[name] += 1
            undone_after_s = faults[name]()
            self.job.any_step(began_s + 0.3, timeout_s=120)
            time.sleep(undone_after_s)
            self._mend()
            time.sleep(self.rng.uniform(0.5, 3.0))
            self.job.any_step(time.time(), timeout_s=120)
            times_s = [began_s, *(row[2] for row in self.job.rows() if row[2] > began_s)]
            self.pauses_s.setdefault(name, []).append(max(after - before for before, after in pairwise(times_s)))

    def _pick(self) -> int:
        return self.rng.choice(self.job.living())

    def _kill_worker(self) -> float:
        self._signal_worker(signal.SIGKILL)
        return 0.0

    def _stop_worker(self) -> float:
        self._signal_worker(signal.SIGSTOP)
        return 0.0

    def _signal_worker(self, signum: int) -> None:
        os.kill(self.rng.choice([pid for pid in self.job.workers() if alive(pid)]), signum)

    def _kill_agent(self) -> float:
        self.job.send(self._pick(), signal.SIGKILL)
        return self.rng.uniform(0.0, 3.0)

    def _stop_agent(self) -> float:
        self.job.send(self._pick(), signal.SIGSTOP)
        return self.rng.uniform(0.0, 4.0)

    def _cut_host(self) -> float:
        self.hosts.cut(self.rng.randrange(self.hosts.count))
        return self.rng.uniform(0.0, 4.0)

    def _kill_etcd(self) -> float:
        self.etcd.kill(self.etcd.leader())
        return self.rng.uniform(0.0, 4.0)

    def _mend(self) -> None:
        for number in self.job.living():
            self.job.send(number, signal.SIGCONT)
        for host in range(self.hosts.count):
            self.hosts.mend(host)
        self.etcd.restart_dead()
        while len(self.job.living()) < self.hosts.count:
            self.job.start(1)

    def finish(self) -> list[int]:
        """Let the job end; the exit codes of the nodes that are there."""
        living = self.job.living()
        return self.job.finish(living, timeout_s=120)

    def close(self) -> None:
        self.job.close()
        self.etcd.stop()
        self.hosts.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptrt-chaos-"))
    chaos = Chaos(folder, args.seed)
    try:
        chaos.run(args.seconds)
        codes = chaos.finish()
        steps = check_history(chaos.job)
        well = set(codes) == {0}
        left = [pid for launch in chaos.job.launches for pid in descendants(launch.process.pid) if alive(pid)]
        for name, count in sorted(chaos.done.items()):
            found = sorted(chaos.pauses_s.get(name, [0.0]))
            without = f"{found[len(found) // 2]:5.1f} s (median), {found[-1]:5.1f} s at most"
            sys.stdout.write(f"{name:22}{count:4}   longest time without a step {without}\n")
        sys.stdout.write(
            f"faults {sum(chaos.done.values())}   steps {steps:,}   exit codes {codes}   processes left {len(left)}   "
            f"seed {args.seed}\n"
        )
        return 0 if well and not left else 1
    except BaseException:
        sys.stdout.write("\n".join(chaos.told[-5:]) + f"\n{chaos.job.said()[-12000:]}\n")
        raise
    finally:
        chaos.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
