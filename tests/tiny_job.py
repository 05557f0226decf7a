"""A training job for tests: small, fast, and different in every bit if anything of its state is lost.

Dropout, shuffled data and a factor from Python's own generator make every loss depend on every generator; AdamW and a
schedule make it depend on the whole history. What happens is appended to <out>/rank<R>.jsonl, one line at a time:

    restored  step source tier                    what restore() gave
    step      step loss mean committed            a step is computed; `committed` is the newest that this rank knew of
    saved     step                                save() has returned, so the snapshot of this rank is whole
    failed    step error                          a save came to nothing
    done      committed failed skipped            the end
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ckptrt

WIDTH = 33  # no multiple of the number of ranks: shards are uneven


class Notes:
    """This rank's account, one write a line: whole, whenever the process is killed."""

    def __init__(self, out: Path, rank: int) -> None:
        self._fd = os.open(out / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.incarnation = 0

    def write(self, what: str, **facts: object) -> None:
        record = {"what": what, "incarnation": self.incarnation, "at_s": time.monotonic(), **facts}
        os.write(self._fd, json.dumps(record).encode() + b"\n")


def build(parallel: str) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
    )
    if parallel == "ddp":
        # Without this torch packs its buckets anew after the first step of every process, and with more than two ranks
        # the place in a bucket decides in which order gradients are added up: the first step after a resume would
        # differ in its last bits, whatever was restored.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def save(rt: ckptrt.Runtime, pending: list[ckptrt.SaveHandle], notes: Notes) -> None:
    """Save without a skip: of two slots one may still be on its way to the storage, not both."""
    settle(pending, notes, left=1)
    pending.append(rt.save(wait=True))
    notes.write("saved" if pending[-1].staged.exception() is None else "unsaved", step=rt.step_count)


def settle(pending: list[ckptrt.SaveHandle], notes: Notes, left: int) -> None:
    while len(pending) > left:
        handle = pending.pop(0)
        error = handle.committed.exception()
        if error is not None:
            notes.write("failed", step=handle.step, error=str(error))


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.002)


def train(args: argparse.Namespace, rank: int, world: int, notes: Notes) -> None:
    seed_all(7)
    model = build(args.parallel)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.steps)
    progress = {"samples": 0}
    seed_all(1000 + rank)
    gates = dict(gate.split(":", 1) for gate in args.gate)
    pending: list[ckptrt.SaveHandle] = []

    with ckptrt.init(args.dir, model=model, optim=optim, sched=sched, progress=progress) as rt:
        notes.incarnation = rt.incarnation
        restored = rt.restore()
        if restored is None:
            notes.write("restored", step=0, source=0, tier="fresh")
        else:
            notes.write("restored", step=restored.step, source=restored.incarnation, tier=restored.tier)
        for step in range(rt.start_step + 1, args.steps + 1):
            x = torch.rand(8, 16) * random.random()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            sched.step()
            progress["samples"] += 8 * world
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            exact = {"loss": loss.item().hex(), "mean": mean.item().hex()}
            notes.write("step", step=step, committed=rt.last_committed or 0, **exact)
            rt.step(loss=mean.item())
            if step % args.every == 0:
                save(rt, pending, notes)
            if str(step) in gates:
                wait_for_file(gates[str(step)])
        settle(pending, notes, left=0)
        stats = rt.stats
    notes.write("done", committed=stats.committed, failed=stats.failed, skipped=stats.skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the accounts go")
    parser.add_argument("--dir", help="the run; by default the launcher's --ckpt-dir")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--gate", action="append", default=[], help="STEP:PATH, after that step wait for that file")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args, dist.get_rank(), dist.get_world_size(), Notes(args.out, dist.get_rank()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
