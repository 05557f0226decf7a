"""Flip single bits all over a run, one at a time: `verify` must report each, and no wrong byte may be loaded.

    python tests/flips.py --flips 10000 --seed 0

Prints how many flips there were, how many of them `verify --read-data` reported by the file's name, and how many were
loaded, that is, gave a checkpoint with other bytes than were saved. Exit status 0 only if all were reported and none
was loaded. Half of the flips go to the files that the newest checkpoint needs, half to any file of the run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from support_runs import FakeRun, flip_bit, overwrite

from ckptrt.errors import CorruptError, NotFoundError, VersionError
from ckptrt.plan import Read
from ckptrt.sources import StoredSource
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.layout import CommitId
from ckptrt.storage.pins import pin
from ckptrt.storage.shardfile import tensor_bytes
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.verify import verify_commit, verify_records

__all__ = ["Tally", "flip", "make_run", "names", "try_flips"]

Loaded = dict[tuple[int, int, str], bytes]  # (step, rank, tensor or component) -> its bytes


@dataclass
class Tally:
    """What became of the flips. outcomes: of the restores, by what they did."""

    flips: int = 0
    reported: int = 0
    loaded: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def make_run() -> FakeRun:
    """Two checkpoints of two ranks, the newer one borrowing from the older, a restart, a cut-off branch and a pin."""
    run = FakeRun(tier=MemoryTier(), world_size=2, columns=64)
    run.fence(1)
    run.save(10)
    run.save(15)
    run.fence(2, (10, 1))
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.commit(20, 2, {0: run.write_rank(20, 2, 0, borrow=old), 1: run.write_rank(20, 2, 1)})
    pin(run.catalog, CommitId(10, 1))
    return run


def names(tier: MemoryTier, prefix: str = "") -> list[str]:
    found: list[str] = []
    for entry in tier.list(prefix):
        found += names(tier, entry.name) if entry.is_folder else [entry.name]
    return found


def load(tier: MemoryTier) -> Loaded:
    """Everything of the newest checkpoint that is whole, by the way that a restore takes."""
    catalog = Catalog(tier)
    catalog.open_run()
    found = catalog.newest_good().commit
    if found is None:
        raise NotFoundError("nothing to load")
    loaded: Loaded = {}
    for part in StoredSource(catalog.open_checkpoint(found)).parts():
        places = [(t.key, t.start, tensor_bytes(t)) for t in part.tensors]
        places += [(plain.key, plain.start, plain.size_bytes) for plain in part.objects]
        for key, start, size in places:
            with StoredSource(catalog.open_checkpoint(found)).mapped(part, [Read(start, size)]) as buffer:
                loaded[found.step, part.rank, key] = bytes(buffer[start : start + size])
    return loaded


def report(tier: MemoryTier) -> set[str]:
    """Files that `verify --read-data` names."""
    catalog = Catalog(tier)
    catalog.open_run()
    findings = verify_records(catalog)
    for commit in catalog.commit_ids():
        findings += verify_commit(catalog, commit, read_data=True).findings
    return {finding.file for finding in findings}


def flip(run: FakeRun, name: str, bit: int, truth: dict[int, Loaded], tally: Tally) -> None:
    """Flip one bit, look what is reported and loaded, and flip it back."""
    whole = run.tier.read(name)
    overwrite(run.tier, name, flip_bit(whole, bit))
    tally.flips += 1
    where = f"bit {bit % 8} of byte {bit // 8} of {name}"
    try:
        try:
            tally.reported += name in report(run.tier)
        except VersionError as error:  # a version's digit, which is told by the file's name too
            tally.reported += name in str(error)
        try:
            loaded = load(run.tier)
        except (CorruptError, NotFoundError, VersionError):
            tally.outcomes["refused"] += 1
        else:
            step = next(iter(loaded))[0]
            if loaded != truth[step]:
                tally.loaded += 1
                tally.wrong.append(where)
            tally.outcomes["took an older step" if step != max(truth) else "not in what a restore reads"] += 1
    finally:
        overwrite(run.tier, name, whole)


def truths(run: FakeRun) -> dict[int, Loaded]:
    """What each step on the path holds."""
    newest = load(run.tier)
    name = "commits/s000000020.i00000002.json"
    record = run.tier.read(name)
    run.tier.delete(name)
    older = load(run.tier)
    run.tier.create(name, record)
    return {20: newest, 10: older}


def try_flips(flips: int, seed: int) -> Tally:
    rng = random.Random(f"flips {seed}")
    run = make_run()
    truth = truths(run)
    sizes = {name: run.tier.size(name) for name in names(run.tier)}
    needed = [name for name in sizes if "s000000020" in name and "receipt" not in name]
    needed.append("data/s000000010.i00000001.0a/r00000.safetensors")  # borrowed from
    tally = Tally()
    for number in range(flips):
        name = rng.choice(needed if number % 2 else list(sizes))
        flip(run, name, rng.randrange(8 * sizes[name]), truth, tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    started_s = time.monotonic()
    tally = try_flips(args.flips, args.seed)
    out = sys.stdout.write
    for outcome, count in tally.outcomes.most_common():
        out(f"restore: {count:6,} {outcome}\n")
    for where in tally.wrong[:10]:
        out(f"WRONG BYTES LOADED after {where}\n")
    took_s = time.monotonic() - started_s
    out(f"flips {tally.flips:,}   reported {tally.reported:,}   loaded {tally.loaded:,}   ({took_s:.0f} s)\n")
    return 0 if tally.reported == tally.flips and not tally.loaded else 1


if __name__ == "__main__":
    sys.exit(main())
