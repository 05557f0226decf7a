"""How fast `ckptrt verify --read-data` reads cold files, against what `cat` and `dd` make of the same files.

    python tests/verify_speed.py FOLDER --gib 2 --rounds 5

Writes a checkpoint of four shard files below FOLDER (on the disk in question) and removes it at the end. In each
round the page cache is dropped (root only) and each of the three reads all files, one after another; the ratio is that
of verify's speed to the faster of the others in the same round. The command's own start is a part of its time.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ckptrt.clock import SystemClock
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.commit import commit
from ckptrt.storage.layout import DATA, CommitId, data_dir
from ckptrt.storage.owner import this_owner
from ckptrt.storage.persister import write_shard
from ckptrt.storage.shardfile import TensorSpec, lay_out
from ckptrt.storage.slots import SlotHeader, SlotMeta
from ckptrt.storage.tiers.local import LocalTier

_WORLD_SIZE = 4
_BLOCK_BYTES = 16 << 20


def write_checkpoint(place: Path, size_bytes: int) -> None:
    tier = LocalTier(str(place))
    catalog = Catalog(tier)
    catalog.create_run()
    catalog.write_fence(1, None, _WORLD_SIZE, this_owner())
    folder = data_dir(CommitId(1, 1), "0a")
    receipts = {rank: _write_rank(tier, folder, rank, size_bytes // _WORLD_SIZE) for rank in range(_WORLD_SIZE)}
    commit(tier, catalog, 1, 1, folder.removeprefix(DATA).rstrip("/"), receipts, "speed", SystemClock())


def _write_rank(tier: LocalTier, folder: str, rank: int, size_bytes: int) -> bytes:
    spec = TensorSpec(key=f"t{rank}", dtype="uint8", shape=(size_bytes,), offsets=(0,), sizes=(size_bytes,))
    layout = lay_out(rank, [spec], [])
    image = memoryview(mmap.mmap(-1, layout.size_bytes))
    image[: len(layout.header)] = layout.header
    block = os.urandom(_BLOCK_BYTES)
    for at in range(layout.tensors[0].start, layout.size_bytes, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, layout.size_bytes - at)
        image[at : at + count] = block[:count]
    header = SlotHeader(
        rank=rank, world_size=_WORLD_SIZE, step=1, incarnation=1, image_bytes=len(image), meta_start=0, meta_bytes=0,
        meta_xxh3=0,
    )  # fmt: skip
    return write_shard(tier, folder, header, pack(rank, SlotMeta(tensors=layout.tensors, objects=()), image, None))


def cold_speed(commands: list[list[str]], total_bytes: int) -> float:
    """GiB/s of commands that read all files once, with nothing in the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    started_s = time.monotonic()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return total_bytes / (time.monotonic() - started_s) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    place = args.folder / "verify-speed"
    try:
        write_checkpoint(place, int(args.gib * 2**30))
        files = sorted(map(str, place.glob("data/*/*.safetensors")))
        total_bytes = sum(map(os.path.getsize, files))
        verify = [[sys.executable, "-m", "ckptrt.storage.cli", "verify", str(place), "--read-data"]]
        dd = [["dd", f"if={file}", "of=/dev/null", "bs=8M", "iflag=direct"] for file in files]
        ratios = []
        for _ in range(args.rounds):
            speeds = [cold_speed(commands, total_bytes) for commands in ([["cat", *files]], dd, verify)]
            ratios.append(speeds[2] / max(speeds[:2]))
            sys.stdout.write(
                "cat {:.2f}  dd {:.2f}  verify {:.2f} GiB/s".format(*speeds) + f"  ratio {ratios[-1]:.2f}\n"
            )
        sys.stdout.write(f"median ratio {statistics.median(ratios):.2f} of {args.rounds} rounds\n")
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
