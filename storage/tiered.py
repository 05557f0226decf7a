"""A run in two places: ranks write to a near one, such as local NVMe, and what is committed is flushed to a far one.

Both hold the same run: its record and all its fences are in either. A fence is created far away first, which all nodes
share, so that is where two jobs meet. A commit counts wherever it is: the reader's rule is applied to both at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckptrt.clock import Clock
from ckptrt.errors import CorruptError, Error, MismatchError, NotFoundError, UsageError
from ckptrt.storage.catalog import Catalog, CommitInfo, hold_run, open_catalog
from ckptrt.storage.layout import RUN, CommitId, fence_name
from ckptrt.storage.records import CommitRecord, FenceRecord, RunRecord
from ckptrt.storage.tiers import Tier, open_tier
from ckptrt.storage.tiers.layered import LayeredTier

__all__ = ["RunPlace", "TieredCatalog", "hold_place", "open_place", "view_place"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a run is kept. url: a path or URL, with its storage options. local_dir: the path to which ranks write
    first; empty if they write to the url.
    """

    url: str
    local_dir: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(url: str, local_dir: str = "", options: Mapping[str, Any] | None = None) -> RunPlace:
        """With paths made absolute. UsageError for a local_dir that is a URL, or is the url."""
        url = url if "://" in url else os.path.abspath(url)
        if "://" in local_dir:
            raise UsageError(f"local_dir is a path on this node, not a URL such as {local_dir}")
        local_dir = os.path.abspath(local_dir) if local_dir else ""
        if local_dir and local_dir in (url, url.removeprefix("file://")):
            raise UsageError(
                f"the run's directory and its local_dir are one: {url}", hint="name one only, or two that differ"
            )
        return RunPlace(url=url, local_dir=local_dir, options=dict(options or {}))

    @property
    def written(self) -> str:
        """Where ranks write."""
        return self.local_dir or self.url

    def data(self) -> dict[str, Any]:
        """As a part of a message to another process."""
        return {"url": self.url, "local_dir": self.local_dir, "options": dict(self.options)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> RunPlace:
        return RunPlace(
            url=str(data["url"]), local_dir=str(data.get("local_dir", "")), options=dict(data.get("options") or {})
        )

    def near_tier(self) -> Tier:
        return open_tier(self.local_dir) if self.local_dir else self.far_tier()

    def far_tier(self) -> Tier:
        return open_tier(self.url, **self.options)


class TieredCatalog(Catalog):
    """The catalog of a run in two places, as one. What can't be read in one is taken from the other."""

    def __init__(self, near: Tier, far: Tier, clock: Clock | None = None) -> None:
        super().__init__(LayeredTier(near, far), clock)
        self.near = Catalog(near, clock)
        self.far = Catalog(far, clock)

    def places(self) -> tuple[Catalog, ...]:
        return self.near, self.far

    def create_run(self, run_id: str | None = None) -> RunRecord | None:
        """Open the run, creating it where it isn't, and bring fences that only one place has to the other.

        MismatchError if the two places hold two runs, or two histories of one.
        """
        near = self._id_at(self.near)
        if near is not None and RUN not in self.far.tier.read_many([RUN]):
            self.far.tier.probe()  # as at every first opening
            self.tier.create(RUN, self.near.tier.read(RUN))
        self.run = self.far.create_run(run_id)
        self.run_problem = self.far.run_problem
        far = self.run.run_id if self.run is not None else None
        if near is not None and far is not None and near != far:
            raise MismatchError(
                f"{self.near.tier.url} holds another run ({near}) than {self.far.tier.url} ({far})",
                safe="both; nothing was changed",
                hint="name an empty local_dir, or the one that this run was written with",
            )
        if far is not None and RUN not in self.near.tier.read_many([RUN]):
            self.tier.create(RUN, self.far.tier.read(RUN))
        self.near.create_run(far)
        self._share_fences()
        return self.run

    def open_run(self) -> RunRecord | None:
        self.run = self.far.open_run()
        self.run_problem = self.far.run_problem
        return self.run

    def examine(self, commit: CommitId) -> CommitInfo:
        info = super().examine(commit)
        return info if info.state == "committed" else self.far.examine(commit)

    def read_commit(self, commit: CommitId) -> CommitRecord:
        try:
            return super().read_commit(commit)
        except CorruptError as error:
            try:
                return self.far.read_commit(commit)
            except Error:
                raise error from None

    def _read_fences(self) -> tuple[dict[int, FenceRecord], dict[int, str]]:
        near, near_bad = self.near._read_fences()
        far, far_bad = self.far._read_fences()
        fences = {number: (near.get(number) or far[number]) for number in sorted({*near, *far}, reverse=True)}
        return fences, {number: text for number, text in {**near_bad, **far_bad}.items() if number not in fences}

    def _id_at(self, place: Catalog) -> str | None:
        """The run that a place holds; None if it holds none, or can't tell."""
        try:
            run = place.open_run()
        except NotFoundError:
            return None  # such as a local_dir on a new node
        return run.run_id if run is not None else None

    def _share_fences(self) -> None:
        """Oldest first: whoever looks at one place alone meanwhile sees a path that ends early, not a broken one."""
        near, near_bad = self.near._read_fences()
        far, far_bad = self.far._read_fences()
        for number in sorted({*near, *far} - {*near_bad, *far_bad}):
            if number in near and number in far:
                if near[number] != far[number]:
                    raise MismatchError(
                        f"{self.near.tier.url} and {self.far.tier.url} have gone different ways since incarnation "
                        f"{number}: a job wrote to one of them without the other",
                        safe="both; nothing was changed",
                        hint="go on with one of them alone, and name an empty place for the other",
                    )
                continue
            source = self.near if number in near else self.far
            self.tier.create(fence_name(number), source.tier.read(fence_name(number)))
            _log.info("event=fence_shared incarnation=%d from=%s", number, source.tier.url)


def view_place(place: RunPlace) -> Catalog:
    """The catalog of a run that is open already; nothing is read or written yet."""
    if not place.local_dir:
        return Catalog(place.far_tier())
    return TieredCatalog(place.near_tier(), place.far_tier())


def open_place(place: RunPlace) -> Catalog:
    """Open a run, which is made if it isn't there. Raises as `open_catalog` does, and MismatchError."""
    if not place.local_dir:
        return open_catalog(place.url, create=True, **place.options)
    catalog = TieredCatalog(place.near_tier(), place.far_tier())
    catalog.create_run()
    return catalog


def hold_place(place: RunPlace, job: str = "") -> ExitStack:
    """Take the run for this process, wherever it is kept, until the stack is closed. BusyError names who has it.

    job: see `hold_run`.
    """
    with ExitStack() as holds:
        for url in filter(None, (place.url, place.local_dir)):
            holds.enter_context(hold_run(url, job=job))
        return holds.pop_all()
