"""The persister: the torch-free process of a node that turns slots into shard files, receipts and commits.

    python -m ckptrt.storage.persister --socket PATH --control-fd N

Ranks connect to the socket, say `hello`, and `submit` sealed slots, each with the descriptor of its arena. From then
on the rank may die: the slot is written, and committed if all other ranks' are. When the control descriptor reaches
its end or has something to read (whoever started this process is gone or done) it finishes what it was given, removes
its socket, and exits.

    hello   url local_dir options incarnation world_size nonce made_by keep dedup rank pid  ->  ready | error
    submit  step retry slot again, + arena                                  ->  persisted, committed | failed
    skip    step retry  this rank has no part for it: nobody need wait
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptrt import wire
from ckptrt.errors import CorruptError, Error, ExistsError, FencedError, PersistError
from ckptrt.faultpoints import faultpoint
from ckptrt.storage import layout
from ckptrt.storage.borrow import Parcel, pack
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.flush import Flusher, FlushNotice
from ckptrt.storage.gather import Attempt, Notice, RunWriter
from ckptrt.storage.prune import prune_committed
from ckptrt.storage.records import ReceiptRecord, ShardRecord, seal, unseal
from ckptrt.storage.retention import Keep
from ckptrt.storage.shardfile import CHUNK_BYTES
from ckptrt.storage.slots import ArenaView, SlotHeader
from ckptrt.storage.tiered import RunPlace
from ckptrt.storage.tiers.base import Tier

__all__ = ["adopt", "main", "write_shard"]

_log = logging.getLogger(__name__)

_NAMES_MAX = 100  # attempts at a shard file's name before giving up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    step: int
    slot: int
    again: bool
    retry: int
    arena: ArenaView


def write_shard(
    tier: Tier,
    folder: str,
    header: SlotHeader,
    parcel: Parcel,
    *,
    intact: Callable[[], bool] = lambda: True,
) -> bytes:
    """Make one rank's snapshot durable: its shard file, then its receipt. Returns the receipt's bytes.

    folder: the attempt's data folder, with its slash. intact: asked once all bytes are written, whether the image
    was the snapshot's all the while. If a receipt is there already it is adopted; a shard file without one is left
    for prune.
    """
    receipt_name = folder + layout.receipt_name(header.rank)
    for attempt in range(_NAMES_MAX):
        name = folder + layout.shard_name(header.rank, attempt)
        try:
            tier.write(name, parcel.pieces, parcel.pieces.size_bytes)
            break
        except ExistsError:
            continue
    else:
        raise PersistError(f"{tier.url}: {_NAMES_MAX} shard files of rank {header.rank} are in {folder} already")
    if not intact():
        raise PersistError(
            f"the memory snapshot of step {header.step}, rank {header.rank}, was given up while it was being written",
            safe="nothing of it was committed",
        )
    shard = ShardRecord(
        name=name.removeprefix(layout.DATA),
        size_bytes=parcel.pieces.size_bytes,
        chunk_bytes=CHUNK_BYTES,
        chunks=parcel.pieces.digests(),
    )
    receipt = seal(
        ReceiptRecord(
            rank=header.rank,
            world_size=header.world_size,
            step=header.step,
            incarnation=header.incarnation,
            shard=shard,
            tensors=parcel.tensors,
            objects=parcel.objects,
            borrowed=parcel.borrowed,
            digests=parcel.digests,
            metrics=parcel.metrics,
        )
    )
    try:
        tier.create(receipt_name, receipt)
    except ExistsError:
        return adopt(tier, receipt_name, (header.step, header.incarnation, header.rank))[0]
    return receipt


def adopt(tier: Tier, name: str, snapshot: tuple[int, int, int]) -> tuple[bytes, int]:
    """The receipt that is there already, and its shard's size; CorruptError if it tells of another snapshot.

    snapshot: step, incarnation and rank.
    """
    data = tier.read(name)
    found = unseal(ReceiptRecord, data, f"{tier.url}/{name}")
    if (found.step, found.incarnation, found.rank) != snapshot:
        raise CorruptError(f"{tier.url}/{name} tells of step {found.step}, rank {found.rank}: not what its name says")
    return data, found.shard.size_bytes


class _Client:
    """One rank's connection: a thread that listens to it and one that writes its slots, in order."""

    def __init__(self, persister: Persister, channel: wire.Channel) -> None:
        self._persister = persister
        self._channel = channel
        self._sending = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # The last one, by inode: mapping an arena anew would touch all its pages again. Jobs hold outgrown ones.
        self._arena: tuple[int, ArenaView] | None = None
        self.rank = -1
        self.pid = 0

    def serve(self) -> None:
        try:
            self._serve()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info("a rank's connection ended: %s", error)
        finally:
            self._channel.close()

    def _serve(self) -> None:
        first = self._channel.receive()
        if first is None:
            return
        try:
            attempt, place = self._greet(first[0])
            writer = self._persister.writer(attempt, place)
        except Error as error:
            self.send({"op": "error", **error.data()})
            return
        writer.join_rank(self.rank, self.pid)
        self._persister.watch(self, attempt)
        self.send({"op": "ready"})
        work = threading.Thread(target=self._work, args=(writer,), name=f"write-r{self.rank}", daemon=True)
        work.start()
        try:
            while (received := self._channel.receive()) is not None:
                self._take(writer, *received)
        finally:
            self._jobs.put(None)
            work.join()
            self._persister.unwatch(self)
            writer.leave_rank(self.rank, self.pid)

    def _greet(self, message: wire.Message) -> tuple[Attempt, RunPlace]:
        self.rank, self.pid = int(message["rank"]), int(message["pid"])
        place = RunPlace.from_data(message)
        attempt = Attempt(
            url=place.written,
            incarnation=int(message["incarnation"]),
            world_size=int(message["world_size"]),
            nonce=message["nonce"],
            made_by=message["made_by"],
            keep=None if message["keep"] is None else Keep(**message["keep"]),
            dedup=bool(message.get("dedup", True)),
        )
        return attempt, place

    def _take(self, writer: RunWriter, message: wire.Message, fds: tuple[int, ...]) -> None:
        """Queue what a rank hands over."""
        try:
            step, retry = int(message["step"]), int(message.get("retry", 0))
            if message["op"] == "skip":
                writer.fail(step, self.rank, PersistError(f"rank {self.rank} skipped step {step}"), retry)
                return
            slot, again = int(message["slot"]), bool(message["again"])
            if not writer.expect(step, self.rank, retry):
                return
            try:
                self._jobs.put(_Job(step=step, slot=slot, again=again, retry=retry, arena=self._map(fds)))
            except (CorruptError, OSError, ValueError) as error:
                failure = PersistError(f"rank {self.rank}: its memory can't be read: {error}")
                writer.fail(step, self.rank, failure, retry)
        finally:
            for fd in fds:
                os.close(fd)

    def _map(self, fds: tuple[int, ...]) -> ArenaView:
        if len(fds) != 1:
            raise ValueError(f"{len(fds)} descriptors came with the slot")
        inode = os.fstat(fds[0]).st_ino
        if self._arena is None or self._arena[0] != inode:
            self._arena = inode, ArenaView(fds[0])
        return self._arena[1]

    def _work(self, writer: RunWriter) -> None:
        while (job := self._jobs.get()) is not None:
            started_s = time.monotonic()
            try:
                receipt, counts = self._write(writer, job)
            except Exception as cause:  # noqa: BLE001 whatever it was, the rank must hear of it and training go on
                error = cause if isinstance(cause, Error) else PersistError(f"rank {self.rank}: {cause!r}")
                _log.warning("step %d, rank %d could not be written: %s", job.step, self.rank, error.what)
                writer.fail(job.step, self.rank, error, job.retry)
                continue
            took_s = time.monotonic() - started_s
            self.send({"op": "persisted", "step": job.step, "retry": job.retry, "took_s": took_s, **counts})
            writer.add(job.step, self.rank, receipt)

    def _write(self, writer: RunWriter, job: _Job) -> tuple[bytes, dict[str, int]]:
        """Write a job's snapshot; gives its receipt, and how many bytes were written and borrowed."""
        folder = writer.attempt.folder(job.step, job.retry)
        if job.again:
            # An earlier persister may have written it, and the slot may have been given up since.
            with contextlib.suppress(Error):
                snapshot = (job.step, writer.attempt.incarnation, self.rank)
                receipt, size_bytes = adopt(writer.tier, folder + layout.receipt_name(self.rank), snapshot)
                return receipt, {"size_bytes": size_bytes, "borrowed_bytes": 0}
        arena, header = job.arena, job.arena.header(job.slot)
        if header is None or header.step != job.step:
            raise PersistError(f"slot {job.slot} of rank {self.rank} doesn't hold step {job.step}")
        facts = {"rank": self.rank, "step": job.step, "incarnation": header.incarnation, "pid": self.pid}
        faultpoint("persisting", **facts)
        meta = arena.meta(job.slot, header)
        image = arena.image(job.slot, header.image_bytes)
        try:
            parcel = pack(self.rank, meta, image, writer.base(self.rank) if meta.steady else None)
            receipt = write_shard(
                writer.tier,
                folder,
                header,
                parcel,
                # A successor of this rank may need the slot: it unseals it before it writes, so this sees it.
                intact=lambda: arena.header(job.slot) == header,
            )
        finally:
            image.release()
        faultpoint("persisted", **facts)
        return receipt, {"size_bytes": parcel.pieces.size_bytes, "borrowed_bytes": parcel.borrowed_bytes}

    def send(self, message: wire.Message) -> None:
        """Tell the rank; if it is gone there is nobody to tell."""
        with self._sending, contextlib.suppress(OSError):
            self._channel.send(message)


class Persister:
    """Accepts ranks and keeps one `RunWriter` for each attempt that they belong to."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._listener = wire.listen(socket_path)
        self._lock = threading.Lock()
        self._writers: dict[tuple[str, int], RunWriter] = {}
        self._flushers: dict[tuple[str, str], Flusher] = {}  # by the two places, for all incarnations
        self._clients: dict[_Client, tuple[str, int]] = {}
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        """Accept ranks until `stop`."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            client = _Client(self, wire.Channel(sock))
            thread = threading.Thread(target=client.serve, daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def stop(self) -> None:
        """Take no more ranks, finish what is queued, commit what can be, and return."""
        self._listener.close()
        # Whoever made the folder may have been killed: it goes too unless something else is in it.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))
        for thread in self._threads:
            thread.join()
        for writer in list(self._writers.values()):
            writer.close()
        for flusher in list(self._flushers.values()):
            flusher.close()

    def writer(self, attempt: Attempt, place: RunPlace) -> RunWriter:
        key = (attempt.url, attempt.incarnation)
        with self._lock:
            for old in [k for k, w in self._writers.items() if k != key and w.idle()]:
                self._writers.pop(old).close()
            if key not in self._writers:
                self._writers[key] = self._new_writer(key, attempt, place)
            return self._writers[key]

    def _new_writer(self, key: tuple[str, int], attempt: Attempt, place: RunPlace) -> RunWriter:
        flusher = self._flusher(place) if place.local_dir else None

        def after_commit(catalog: Catalog) -> None:
            if flusher is not None:
                flusher.wake()
            self._prune(key, attempt, catalog, flusher)

        if flusher is not None:
            flusher.serve(attempt.incarnation, attempt.keep)
        return RunWriter(
            attempt,
            place.near_tier(),
            notify=lambda notice: self._tell(key, notice),
            after_commit=after_commit,
            fenced=lambda: None if flusher is None else flusher.fenced,
        )

    def _flusher(self, place: RunPlace) -> Flusher:
        """The one that flushes from here to there; it is told of by whichever incarnation is the newest."""
        both = (place.local_dir, place.url)
        if both not in self._flushers:
            self._flushers[both] = Flusher(
                place.near_tier(), place.far_tier(), lambda notice: self._tell_flush(place.local_dir, notice)
            )
        return self._flushers[both]

    def watch(self, client: _Client, attempt: Attempt) -> None:
        with self._lock:
            self._clients[client] = (attempt.url, attempt.incarnation)

    def unwatch(self, client: _Client) -> None:
        with self._lock:
            self._clients.pop(client, None)

    def _tell(self, key: tuple[str, int], notice: Notice) -> None:
        if notice.error is None:
            self._broadcast(key, {"op": "committed", "step": notice.step, "retry": notice.retry})
        else:
            self._broadcast(key, {"op": "failed", "step": notice.step, "retry": notice.retry, **notice.error.data()})

    def _tell_flush(self, url: str, notice: FlushNotice) -> None:
        with self._lock:
            incarnation = max((i for u, i in self._clients.values() if u == url), default=0)
        if notice.error is None:
            self._broadcast((url, incarnation), {"op": "flushed", "step": notice.step, "took_s": notice.took_s})
        else:
            op = "fenced" if isinstance(notice.error, FencedError) else "unflushed"
            self._broadcast((url, incarnation), {"op": op, **notice.error.data()})

    def _broadcast(self, key: tuple[str, int], message: wire.Message) -> None:
        with self._lock:
            clients = [client for client, belongs in self._clients.items() if belongs == key]
        for client in clients:
            client.send(message)

    def _prune(self, key: tuple[str, int], attempt: Attempt, catalog: Catalog, flusher: Flusher | None) -> None:
        try:
            if flusher is not None:
                flusher.prune_near()
            elif attempt.keep is not None:
                prune_committed(catalog, attempt.keep, incarnation=attempt.incarnation)
        except Error as error:
            self._broadcast(key, {"op": "warning", **error.data()})


def main() -> None:
    """Serve until the control descriptor ends or says something."""
    parser = argparse.ArgumentParser(prog="ckptrt-persister")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="ckptrt persister: %(message)s")
    # Signals meant for the training (ctrl-C, a scheduler's notice) must not stop the saving.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    persister = Persister(args.socket)
    threading.Thread(target=persister.serve, daemon=True).start()
    os.read(args.control_fd, 1)
    persister.stop()


if __name__ == "__main__":
    main()
