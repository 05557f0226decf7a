"""States to and from memory within one process: what staging makes of them, and what a restore makes of that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ckptrt.adapters import adapt
from ckptrt.adapters.base import Loading
from ckptrt.arena import Arena
from ckptrt.restoring import read_all
from ckptrt.sources import MemorySource
from ckptrt.staging import CopyStager
from ckptrt.storage.slots import ArenaView, SlotMeta


def memfd(size_bytes: int) -> tuple[int, bool]:
    fd = os.memfd_create("test-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd, True


class Snapshot:
    """One snapshot of every rank of a pretended world, in memory."""

    def __init__(self, states: Sequence[dict[str, Any]], rng: bool = False) -> None:
        self.world_size = len(states)
        self.fds = []
        for rank, state in enumerate(states):
            adapters = adapt(state, rank, self.world_size, rng=rng)
            arena = Arena(rank, memfd)
            assert CopyStager(rank, self.world_size).stage(adapters, arena, 7, 1, {}) is not None
            self.fds.append(os.dup(arena.fd))
            arena.close()

    def meta(self, rank: int = 0) -> SlotMeta:
        view = ArenaView(self.fds[rank])
        header = view.header(0)
        assert header is not None
        meta = view.meta(0, header)
        view.close()
        return meta

    def image(self, rank: int = 0) -> bytes:
        """The shard file as it would be written."""
        view = ArenaView(self.fds[rank])
        header = view.header(0)
        assert header is not None
        image = bytes(view.image(0, header.image_bytes))
        view.close()
        return image

    def read(self, state: dict[str, Any], rank: int = 0, world_size: int = 1, rng: bool = False) -> list[Loading]:
        """Everything of a restore but its last step."""
        source = MemorySource([os.dup(fd) for fd in self.fds], 7, 1)
        return read_all(source, rank, adapt(state, rank, world_size, rng=rng))

    def load(self, state: dict[str, Any], rank: int = 0, world_size: int = 1, rng: bool = False) -> None:
        for loading in self.read(state, rank, world_size, rng):
            loading.apply()

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@contextmanager
def snapshot(*states: dict[str, Any], rng: bool = False) -> Iterator[Snapshot]:
    """One state for each rank."""
    taken = Snapshot(states, rng)
    try:
        yield taken
    finally:
        taken.close()


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes, whatever its dtype and strides."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().reshape(-1)
    return bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""
