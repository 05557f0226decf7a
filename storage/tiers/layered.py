"""Two tiers of one run as one: what is near is read there, everything else far away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from ckptrt.errors import CorruptError, ExistsError, NotFoundError, StorageError, UsageError
from ckptrt.storage.tiers.base import Entry, Tier
from ckptrt.storage.tiers.names import join_url

__all__ = ["LayeredTier", "copies"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class LayeredTier:
    """Reads from `near`, and from `far` what near lacks or can't give. Creates in both, far first: it decides.

    For a run's records, and to restore from. Shard files are written near and flushed, and each tier is pruned by
    itself, so `write` and all that deletes are refused.
    """

    def __init__(self, near: Tier, far: Tier) -> None:
        self.url = far.url
        self.near = near
        self.far = far

    def create(self, name: str, data: bytes) -> None:
        for tier in (self.far, self.near):
            try:
                tier.create(name, data)
            except ExistsError:
                if tier.read(name) != data:  # else it was made by an earlier try, which ended between the two
                    raise

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        return self._either(name, lambda tier: tier.read(name, start, size_bytes))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._either(name, lambda tier: tier.read_into(name, start, out))

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        found = self.near.read_many(wanted)
        missing = [name for name in wanted if name not in found]
        return {**found, **self.far.read_many(missing)} if missing else found

    def size(self, name: str) -> int:
        return self._either(name, lambda tier: tier.size(name))

    def list(self, prefix: str) -> list[Entry]:
        found = {entry.name: entry for tier in (self.far, self.near) for entry in tier.list(prefix)}
        return sorted(found.values(), key=lambda entry: entry.name)

    def settle(self, prefix: str) -> None:
        self.far.settle(prefix)
        self.near.settle(prefix)

    def probe(self) -> None:
        self.far.probe()
        self.near.probe()

    def close(self) -> None:
        self.near.close()
        self.far.close()

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        self._refuse(name)

    def delete(self, name: str) -> None:
        self._refuse(name)

    def delete_prefix(self, prefix: str) -> None:
        self._refuse(prefix)

    def sweep(self, prefix: str, before_s: float, *, dry_run: bool = False) -> Sequence[Entry]:
        self._refuse(prefix)

    def _either(self, name: str, call: Callable[[Tier], _T]) -> _T:
        try:
            return call(self.near)
        except (CorruptError, NotFoundError, StorageError) as error:
            try:
                found = call(self.far)
            except NotFoundError:
                raise error from None
            if not isinstance(error, NotFoundError):
                _log.warning(
                    "event=read_far url=%s, it can't be read near: %s", join_url(self.far.url, name), error.what
                )
            return found

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(
            f"{name!r} belongs to one tier, but this is a view of {self.near.url} and {self.far.url} together",
            safe="nothing was changed",
        )


def copies(tier: Tier) -> tuple[Tier, ...]:
    """The places where the bytes behind `tier` may be had, nearest first."""
    return (tier.near, tier.far) if isinstance(tier, LayeredTier) else (tier,)
