"""`ckptrt doctor`: is a place, and what lies there, fit for a run? One check at a time, reading only unless asked."""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime

from ckptrt.clock import Clock, SystemClock
from ckptrt.errors import CorruptError, Error, ExistsError, NotFoundError, StorageError, VersionError
from ckptrt.storage.catalog import Catalog, Overview
from ckptrt.storage.machine import Check, Mount, mount_of, parse_mounts
from ckptrt.storage.prune import PrunePolicy, plan_prune
from ckptrt.storage.records import CommitRecord
from ckptrt.storage.retention import Keep
from ckptrt.storage.runlock import run_holder
from ckptrt.storage.tiers import Tier, open_tier
from ckptrt.storage.tiers.local import LocalTier, local_path
from ckptrt.storage.units import size_text
from ckptrt.storage.verify import verify_records

__all__ = ["Place"]

_ROUNDS = 5
_SLOW_S = 1.0
_SKEW_MAX_S = 5.0
_EVERYTHING = 10**9
_INODES_MIN = 1000
_GONE = {
    "tmpfs": "memory: all is gone when the machine stops",
    "ramfs": "memory: all is gone when the machine stops",
    "overlay": "the container's own layer: all is gone with the container",
}
_NO_FLUSH = frozenset(("nobarrier", "barrier=0"))


class Place:
    """A run's place, looked at step by step. `newest` is the newest good commit, once checks() has come to it."""

    def __init__(self, url: str, now_s: float, clock: Clock | None = None) -> None:
        """now_s: seconds since 1970, compared with the store's own times."""
        self.newest: CommitRecord | None = None
        self._url = url
        self._clock = clock or SystemClock()
        self._written_s = 0.0  # when the first test object was written
        self._offset_s = now_s - self._clock.monotonic_s()
        self._path = local_path(url) if "://" not in url or url.startswith("file:") else None
        self._tier = open_tier(url)

    @property
    def _now_s(self) -> float:
        return self._offset_s + self._clock.monotonic_s()

    def checks(self, write_test: bool) -> Iterator[Check]:
        """Every check that makes sense here. write_test: also create a few small objects, and remove them."""
        reached = self._guarded("place", self._reach)
        yield reached
        if reached.result == "fail":
            return
        yield from self._records()
        if self._path is not None:
            yield from self._disk(self._path)
        if not write_test:
            yield Check(name="writes", result="skip", what="not tried", do="--write-test tries them, and clears up")
            return
        yield from self._writes()

    def _guarded(self, name: str, check: Callable[[], Check]) -> Check:
        """A check's own result, or its error as one."""
        try:
            return check()
        except Error as error:
            return Check(name=name, result="fail", what=error.what, do=error.hint)

    # --- what lies there

    def _reach(self) -> Check:
        begun_s = self._clock.monotonic_s()
        self._tier.list("")
        took_s = self._clock.monotonic_s() - begun_s
        if self._path is not None:
            there = _existing(self._path)
            if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
                return Check(
                    name="place", result="fail", what=f"{there} isn't yours to write to", do="have its permissions set"
                )
            if there != self._path:
                return Check(name="place", result="ok", what=f"{self._path} isn't there; a first start makes it")
        return Check(name="place", result="ok", what=f"{self._tier.url} answers in {1000 * took_s:.1f} ms")

    def _records(self) -> Iterator[Check]:
        catalog = Catalog(self._tier)
        try:
            catalog.open_run()
        except NotFoundError:
            yield Check(name="run", result="ok", what="none yet; a first start makes one")
            return
        except VersionError as error:
            yield Check(name="run", result="fail", what=error.what, do=error.hint)
            return
        yield self._guarded("run", lambda: self._run(catalog))
        yield self._guarded("records", lambda: _damage(catalog))
        yield self._guarded("leftovers", lambda: _leftovers(catalog, self._now_s))
        if self._path is not None:
            yield _holder(self._url)

    def _run(self, catalog: Catalog) -> Check:
        overview = catalog.overview()
        selection = catalog.newest_good()
        if selection.commit is None and overview.commits:
            return Check(
                name="run",
                result="fail",
                what=f"{len(overview.commits)} checkpoints and none of them good",
                do="`ckptrt ls` and `ckptrt verify` say why; mount or copy back what is missing",
            )
        if selection.commit is None:
            return Check(name="run", result="ok", what="no checkpoints yet")
        self.newest = selection.commit.record
        text = f"{len(overview.valid)} checkpoints, a restart takes step {selection.commit.step}"
        ahead_s = self._ahead_s(overview)
        if ahead_s > _SKEW_MAX_S:
            do = "set the clocks by NTP; ages and grace times are told by them"
            return Check(name="run", result="warn", what=f"{text}; records are {ahead_s:.0f} s from the future", do=do)
        return Check(name="run", result="ok", what=text)

    def _ahead_s(self, overview: Overview) -> float:
        """How far the newest record's time is ahead of this machine's clock."""
        ahead = [0.0]
        for commit in overview.commits:
            with suppress(ValueError):
                at = datetime.strptime(commit.record.created_at if commit.record else "", "%Y-%m-%dT%H:%M:%S%z")
                ahead.append(at.timestamp() - self._now_s)
        return max(ahead)

    # --- a local disk

    def _disk(self, path: str) -> Iterator[Check]:
        there = _existing(path)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mount = mount_of(os.path.realpath(there), parse_mounts(file.read()))
        yield _file_system(mount)
        yield _space(there, self.newest)
        yield _direct(there)

    # --- writing

    def _writes(self) -> Iterator[Check]:
        """Prove the contract that commits stand on, on the run's own store, below names that nobody looks at."""
        tier: Tier = LocalTier(_existing(self._path)) if self._path is not None else self._tier
        names = [f".doctor-{secrets.token_hex(8)}" for _ in range(_ROUNDS)]
        written = self._guarded("writes", lambda: self._create(tier, names))
        yield written
        if written.result != "fail":
            yield self._guarded("clock", lambda: self._skew(tier, names[0]))
        yield from self._clear(tier, names)

    def _clear(self, tier: Tier, names: list[str]) -> Iterator[Check]:
        try:
            for name in names:
                tier.delete(name)
        except StorageError as error:
            do = f"remove what is there under names that begin with .doctor-; {error.hint}"
            yield Check(name="deletes", result="fail", what=error.what, do=do)

    def _create(self, tier: Tier, names: list[str]) -> Check:
        tier.probe()
        took_s = []
        self._written_s = self._now_s
        for name in names:
            begun_s = self._clock.monotonic_s()
            tier.create(name, name.encode() * 100)
            took_s.append(self._clock.monotonic_s() - begun_s)
        try:
            tier.create(names[0], b"another")
        except ExistsError:
            pass
        else:
            raise StorageError(
                f"{tier.url} let a second writer replace an object", hint="use a store that keeps create-only writes"
            )
        if any(tier.read(name) != name.encode() * 100 for name in names):
            raise CorruptError(f"{tier.url} gave back other bytes than were written", hint="don't use it")
        middle_s = statistics.median(took_s)
        text = f"create-only writes hold; a small one is durable in {1000 * middle_s:.1f} ms"
        if middle_s > _SLOW_S:
            return Check(name="writes", result="warn", what=text, do="commits wait for it; look at the disk or network")
        return Check(name="writes", result="ok", what=text)

    def _skew(self, tier: Tier, name: str) -> Check:
        found = [entry.modified_s for entry in tier.list("") if entry.name == name]
        if not found:
            raise StorageError(f"{tier.url} doesn't list what was just written", hint="use a store that lists at once")
        skew_s = found[0] - self._written_s
        text = f"the store's clock and this machine's are {abs(skew_s):.1f} s apart"
        if abs(skew_s) > _SKEW_MAX_S:
            return Check(name="clock", result="warn", what=text, do="set the clocks by NTP; grace times go by them")
        return Check(name="clock", result="ok", what=text)


def _damage(catalog: Catalog) -> Check:
    findings = verify_records(catalog)
    findings_text = "; ".join(f"{finding.file}: {finding.what}" for finding in findings[:3])
    if findings:
        more = f" and {len(findings) - 3} more" if len(findings) > 3 else ""
        return Check(name="records", result="warn", what=findings_text + more, do="`ckptrt verify` says what is hit")
    return Check(
        name="records", result="ok", what="every record is as it was written; `ckptrt verify` looks at the data"
    )


def _leftovers(catalog: Catalog, now_s: float) -> Check:
    plan = plan_prune(catalog, PrunePolicy(keep=Keep(last=_EVERYTHING)), now_s)
    parts = [
        (len([removal for removal in plan.commits if "off the path" in removal.reason]), "cut-off checkpoint"),
        (len([f for f in plan.folders if f.id not in {c.id for c in plan.commits}]), "data folder without a commit"),
        (len(plan.unfinished), "unfinished write"),
    ]
    texts = [f"{number} {what}{'s' * (number > 1)}" for number, what in parts if number]
    if not texts:
        return Check(name="leftovers", result="ok", what="none that are older than an hour")
    what = f"{', '.join(texts)}, {size_text(plan.freed_bytes)}"
    return Check(name="leftovers", result="warn", what=what, do="`ckptrt prune --keep-last N --dry-run` lists them")


def _holder(url: str) -> Check:
    who = run_holder(url)
    if not who:
        return Check(name="run lock", result="ok", what="free: no job runs here")
    return Check(name="run lock", result="warn", what=f"held by {who}", do="a second job here is refused until it ends")


def _file_system(mount: Mount | None) -> Check:
    if mount is None:
        return Check(name="file system", result="skip", what="its kind can't be told")
    text = f"{mount.kind} at {mount.path}"
    if "ro" in mount.options:
        return Check(name="file system", result="fail", what=f"{text}, read-only", do="mount it for writing")
    if mount.kind in _GONE:
        do = "give the run a disk or an object store"
        return Check(name="file system", result="warn", what=f"{text}, {_GONE[mount.kind]}", do=do)
    if mount.options & _NO_FLUSH:
        do = "mount it with barriers: without, a power cut may take what was reported"
        return Check(name="file system", result="warn", what=f"{text}, mounted without write barriers", do=do)
    return Check(name="file system", result="ok", what=text)


def _space(there: str, newest: CommitRecord | None) -> Check:
    found = os.statvfs(there)
    free_bytes = found.f_bavail * found.f_frsize
    text = f"{size_text(free_bytes)} free"
    do = "`ckptrt prune`, a smaller keep=, or a larger disk"
    if found.f_files and found.f_favail < _INODES_MIN:
        return Check(name="space", result="fail", what=f"{text}, but only {found.f_favail} inodes", do=do)
    if newest is None:
        return Check(name="space", result="ok", what=text)
    text += f"; the last checkpoint takes {size_text(newest.size_bytes)}"
    # The next one is whole before an older one goes.
    if free_bytes >= 3 * newest.size_bytes:
        return Check(name="space", result="ok", what=text)
    return Check(name="space", result="fail" if free_bytes < newest.size_bytes else "warn", what=text, do=do)


def _direct(there: str) -> Check:
    """Asked of a file without a name, so nothing is to be seen of it."""
    if not hasattr(os, "O_TMPFILE"):
        return Check(name="direct I/O", result="skip", what="can't be told here")
    try:
        os.close(os.open(there, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Check(name="direct I/O", result="skip", what=f"can't be told: {error.strerror}")
    try:
        os.close(os.open(there, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        what = "none: shard files are written through the page cache, which costs memory and time"
        return Check(name="direct I/O", result="warn", what=what, do="a local ext4 or xfs has it")
    return Check(name="direct I/O", result="ok", what="shard files bypass the page cache")


def _existing(path: str) -> str:
    """The path, or the nearest folder above it that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
