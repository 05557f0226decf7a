"""Stand-ins for a rank, without torch: arenas with made-up snapshots, and connections to a persister."""

from __future__ import annotations

import mmap
import os
import random
from typing import Any

import msgspec

from ckptrt import wire
from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.owner import this_owner
from ckptrt.storage.shardfile import TensorSpec, lay_out
from ckptrt.storage.slots import PAGE_BYTES, ArenaView, SlotMeta, arena_bytes, format_arena

SLOT_BYTES = 1 << 20


class FakeRank:
    """A rank of a world of `world_size` with two slots of memory and one tensor of `rows` rows in each snapshot."""

    def __init__(self, rank: int = 0, world_size: int = 1, rows: int = 1000, slot_bytes: int = SLOT_BYTES) -> None:
        self.rank, self.world_size, self.rows = rank, world_size, rows
        self.fd = os.memfd_create("fake-rank", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, arena_bytes(2, slot_bytes))
        with mmap.mmap(self.fd, 0) as mapping:
            format_arena(mapping, rank, 2, slot_bytes)
        self.view = ArenaView(self.fd)
        self.channel: wire.Channel | None = None

    def stage(self, slot: int, step: int, incarnation: int = 1, rows: int | None = None) -> bytes:
        """Seal a snapshot; returns its image."""
        count = self.rows if rows is None else rows
        spec = TensorSpec(
            key="w",
            dtype="int64",
            shape=(count * self.world_size,),
            offsets=(count * self.rank,),
            sizes=(count,),
        )
        layout = lay_out(self.rank, [spec], [("loop", 2)])
        image = bytearray(random.Random(step * 100 + self.rank).randbytes(layout.size_bytes))
        image[: len(layout.header)] = layout.header
        image[-2:] = b"{}"
        self.view.unseal(slot)
        self.view.image(slot, len(image))[:] = image
        meta = msgspec.json.encode(SlotMeta(tensors=layout.tensors, objects=layout.objects))
        self.view.seal(
            slot,
            world_size=self.world_size,
            step=step,
            incarnation=incarnation,
            image_bytes=len(image),
            meta=meta,
        )
        return bytes(image)

    def hello(
        self, path: str, url: str, incarnation: int = 1, keep: dict[str, Any] | None = None, **more: Any
    ) -> wire.Message:
        self.channel = wire.connect(path, 30.0)
        self.channel.send(
            {"op": "hello", "url": url, "options": {}, "incarnation": incarnation, "world_size": self.world_size,
             "nonce": "0a", "made_by": "tests", "keep": keep, "rank": self.rank, "pid": os.getpid(), **more}
        )  # fmt: skip
        received = self.channel.receive()
        assert received is not None
        return received[0]

    def submit(self, step: int, slot: int, again: bool = False) -> None:
        assert self.channel is not None
        self.channel.send({"op": "submit", "step": step, "slot": slot, "again": again}, (self.fd,))

    def hear(self) -> wire.Message:
        assert self.channel is not None
        received = self.channel.receive()
        assert received is not None, "the persister hung up"
        return received[0]

    def hear_of(self, step: int, *ops: str) -> wire.Message:
        """The next message of one of these kinds about a step."""
        while True:
            message = self.hear()
            if message["op"] in ops and message.get("step") == step:
                return message

    def hang_up(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        self.hang_up()
        self.view.close()
        os.close(self.fd)


def make_run(url: str, incarnation: int = 1, world_size: int = 1) -> None:
    open_catalog(url, create=True).write_fence(incarnation, None, world_size, this_owner())


__all__ = ["PAGE_BYTES", "SLOT_BYTES", "FakeRank", "make_run"]
