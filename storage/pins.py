"""Pins: small records that keep a checkpoint from being pruned.

A pin is written first and the commit looked up after. Prune looks for pins, deletes commit records, looks once more,
and puts back the record of what was pinned in between. So whichever comes first, a pin that was reported holds, unless
the pruner dies, or the disk is full, in that very moment.
"""

from __future__ import annotations

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import CorruptError, ExistsError, NotFoundError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.layout import PINS, CommitId, commit_name, parse_pin_name, pin_name
from ckptrt.storage.owner import this_owner
from ckptrt.storage.records import PinRecord, seal, unseal

__all__ = ["pin", "pinned_ids", "pins", "unpin"]


def pinned_ids(catalog: Catalog) -> set[CommitId]:
    """Which commits are pinned, by the pins' names alone: a damaged pin still pins."""
    parsed = (parse_pin_name(entry.name) for entry in catalog.tier.list(PINS))
    return {commit for commit in parsed if commit is not None}


def pins(catalog: Catalog) -> dict[CommitId, PinRecord | None]:
    """Every pin, newest first; None for a record that is damaged or of a newer format."""
    found: dict[CommitId, PinRecord | None] = {}
    ids = sorted(pinned_ids(catalog), reverse=True)
    data = catalog.tier.read_many([pin_name(commit) for commit in ids])
    for commit in ids:
        name = pin_name(commit)
        try:
            record = unseal(PinRecord, data.get(name, b""), f"{catalog.tier.url}/{name}")
        except CorruptError:
            found[commit] = None
        else:
            found[commit] = record if (record.step, record.incarnation) == commit else None
    return found


def pin(catalog: Catalog, commit: CommitId, reason: str = "", clock: Clock | None = None) -> bool:
    """Keep a committed checkpoint until it is unpinned; False if it is pinned already.

    NotFoundError, and no pin, if there is no such commit.
    """
    record = PinRecord(
        step=commit.step,
        incarnation=commit.incarnation,
        reason=reason,
        owner=this_owner(),
        created_at=(clock or SystemClock()).wall_iso(),
    )
    try:
        catalog.tier.create(pin_name(commit), seal(record))
        is_new = True
    except ExistsError:
        is_new = False
    try:
        catalog.tier.size(commit_name(commit))
    except NotFoundError:
        if is_new:
            catalog.tier.delete(pin_name(commit))
        raise NotFoundError(
            f"{catalog.tier.url} has no checkpoint of step {commit.step}, incarnation {commit.incarnation}, to pin",
            safe="everything; nothing was changed",
            hint="`ckptrt ls` shows what there is",
        ) from None
    return is_new


def unpin(catalog: Catalog, commit: CommitId) -> bool:
    """Let a checkpoint be pruned again; False if it wasn't pinned."""
    is_pinned = commit in pinned_ids(catalog)
    catalog.tier.delete(pin_name(commit))
    return is_pinned
