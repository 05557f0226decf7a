"""A character-level GPT on the Python standard library's own sources, that survives the loss of its processes.

    python train_gpt.py                                                    one process
    torchrun --nproc-per-node 2 train_gpt.py --parallel fsdp               sharded, restarts by torchrun
    ckptrt-launch --nproc-per-node 2 train_gpt.py --parallel ddp           restarts within a second

Kill any process at any time and start the same command again (ckptrt-launch does it by itself): the losses go on as
if nothing had happened, bit for bit (DDP on three or more ranks: up to the order in which torch sums gradients).
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ckptrt

CONTEXT, WIDTH, HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # in three dimensions it would be a view, of which FSDP warns


def corpus(size: int = 1 << 20) -> torch.Tensor:
    """The first MiB of the standard library's modules, as characters 0 to 127."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).clamp(max=VOCAB - 1).long()


def batch_at(text: torch.Tensor, samples: int, args: argparse.Namespace, rank: int, world: int) -> torch.Tensor:
    """This rank's part of the global batch: a function of how many samples were used before, and of nothing else."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + samples)
    starts = torch.randint(len(text) - CONTEXT - 1, (args.batch,), generator=generator).tolist()
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts[rank::world]])


def wrap(model: nn.Module, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="save after so many steps")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--batch", type=int, default=12, help="samples a step, over all ranks")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--dir", default="ckptrt-runs/gpt", help="of checkpoints: a path or s3://bucket/run")
    parser.add_argument("--losses", help="append each step's loss to this file, exactly, as JSON lines")
    args = parser.parse_args()
    if args.parallel == "none" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        args.parallel = "ddp"
    return args


def main() -> None:
    args = parse()
    if args.parallel != "none":
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(args.seed)
    model = wrap(GPT(), args.parallel)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.steps)
    progress = {"samples": 0}
    torch.manual_seed(args.seed + rank)  # dropout differs between ranks
    text = corpus()

    state: dict[str, Any] = {"model": model, "optim": optim, "sched": sched, "progress": progress}
    rt = ckptrt.init(args.dir, every=args.every, keep=args.keep, when_busy="wait", **state)
    rt.restore()
    for step in range(rt.start_step, args.steps):
        tokens = batch_at(text, progress["samples"], args, rank, world)
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        sched.step()
        progress["samples"] += args.batch
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
            mean /= world
        if rank == 0 and args.losses:
            with open(args.losses, "a") as out:
                out.write(json.dumps({"step": step, "loss": mean.item().hex(), "incarnation": rt.incarnation}) + "\n")
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1:>5}  loss {mean.item():.4f}", flush=True)
        rt.step(loss=mean.item())
    rt.save()  # the last step, if it wasn't due
    rt.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
