"""Kill a rank of a real training job, let it come back, and prove that nothing was lost: `make demo`.

Runs train_gpt.py on 2 ranks under ckptrt-launch, sends SIGKILL to one rank at a random step, lets the job finish, runs
the same job unbroken, and compares every loss and the whole state of the last checkpoint, bit for bit. The exit status
is 0 only if all of it is equal and the job came back by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.shardfile import tensor_bytes

HERE = Path(__file__).resolve().parent


def start(out: Path, name: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """One job under ckptrt-launch; its losses go to <out>/<name>.losses, its checkpoints to <out>/<name>."""
    launcher = [sys.executable, "-m", "ckptrt.agents.launch", "--nproc-per-node", str(args.ranks)]
    script = [str(HERE / "train_gpt.py"), "--parallel", args.parallel, "--steps", str(args.steps), "--every", "10"]
    where = ["--dir", str(out / name), "--losses", str(out / f"{name}.losses")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launcher, "--log-dir", str(out / f"{name}.logs"), *script, *where], env=environment)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file that may still be growing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def events(out: Path, name: str) -> list[dict[str, Any]]:
    return [event for path in (out / f"{name}.logs").rglob("events.jsonl") for event in lines(path)]


def kill_one(job: subprocess.Popen[bytes], out: Path, step: int, ranks: int) -> float:
    """SIGKILL a random rank as soon as `step` steps are done; the moment, on the monotonic clock."""
    while job.poll() is None and not any(line["step"] >= step - 1 for line in lines(out / "killed.losses")[-1:]):
        time.sleep(0.002)
    rank = random.randrange(ranks)
    pid = next(event["pids"][rank] for event in reversed(events(out, "killed")) if event["event"] == "started")
    os.kill(pid, signal.SIGKILL)
    print(f"{'demo':<12} SIGKILL to rank {rank} (pid {pid}) after step {step}", flush=True)
    return time.monotonic()


def state(path: Path, step: int) -> dict[str, bytes]:
    """Everything that a checkpoint holds, by name."""
    catalog = open_catalog(str(path))
    checkpoint = catalog.open_checkpoint(catalog.find(step))
    found: dict[str, bytes] = {}
    for receipt in checkpoint.receipts():
        data = catalog.tier.read(f"data/{receipt.shard.name}")
        for tensor in receipt.tensors:
            owner = f" (rank {receipt.rank})" if tensor.rank_only else ""
            name = f"{tensor.key} {tensor.offsets}{owner}"
            found[name] = data[tensor.start : tensor.start + tensor_bytes(tensor)]
        for record in receipt.objects:
            if record.key == "rng":
                continue  # Python's own generator: the script neither seeds nor uses it (torch's is a tensor, above)
            found[f"{record.key} (rank {receipt.rank})"] = data[record.start : record.start + record.size_bytes]
    return found


def compare(out: Path, steps: int) -> list[str]:
    """What differs between the two jobs, as sentences; empty if nothing does."""
    reference = {line["step"]: line["loss"] for line in lines(out / "unbroken.losses")}
    killed = lines(out / "killed.losses")
    wrong = {line["step"] for line in killed if line["loss"] != reference.get(line["step"])}
    missing = set(range(steps)) - {line["step"] for line in killed}
    equal = len(set(reference) - wrong - missing)
    mine, theirs = state(out / "killed", steps), state(out / "unbroken", steps)
    differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    replayed = len(killed) - len({line["step"] for line in killed})
    print(f"{'verdict':<12} {equal} of {steps} losses bit-equal, parameters {'equal' if not differ else 'DIFFER'}")
    print(f"{'':<12} {len(mine)} tensors and records of step {steps} compared, {replayed} steps ran twice")
    return [f"loss of step {step} differs or is missing" for step in sorted(wrong | missing)] + differ


def recovery(out: Path, killed_s: float) -> str:
    """The launcher's own account of the recovery, and the whole as seen from here; '' if there was none."""
    found = [event for event in events(out, "killed") if event["event"] == "recovery"]
    if not found:
        return ""
    parts = " + ".join(f"{name} {value_s:.3f}" for name, value_s in found[0]["parts"].items())
    total_s = found[0]["at_s"] - killed_s
    return f"{total_s:.2f} s from the kill to the end of the first new step\n{'':<12} = {parts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    parser.add_argument("--seed", type=int, default=None, help="which step and rank; random by default")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="emptied first")
    args = parser.parse_args()
    random.seed(args.seed)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)

    job = start(args.out, "killed", args)
    killed_s = kill_one(job, args.out, random.randrange(args.steps // 4, args.steps * 3 // 4), args.ranks)
    status = job.wait()
    print(f"{'demo':<12} the same job, unbroken", flush=True)
    status = start(args.out, "unbroken", args).wait() or status
    if status:
        print(f"{'verdict':<12} a job failed with exit code {status}")
        return 1
    problems = compare(args.out, args.steps)
    account = recovery(args.out, killed_s)
    print(f"{'recovery':<12} {account or 'NONE: the job was not restarted'}", flush=True)
    for problem in problems[:10]:
        print(f"{'differs':<12} {problem}")
    subprocess.run([sys.executable, "-m", "ckptrt.storage.cli", "ls", str(args.out / "killed")], check=True)
    return 1 if problems or not account else 0


if __name__ == "__main__":
    sys.exit(main())
