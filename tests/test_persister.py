"""The persister process: what it was given is written and committed, whoever dies, and nothing else is."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_persister import FakeRank, make_run

from ckptrt import wire
from ckptrt.errors import ExistsError, NoSpaceError, PersistError
from ckptrt.storage import persister as module
from ckptrt.storage.borrow import pack
from ckptrt.storage.catalog import open_catalog
from ckptrt.storage.layout import DATA
from ckptrt.storage.persister import Persister, write_shard
from ckptrt.storage.tiered import RunPlace
from ckptrt.storage.tiers import open_tier
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.verify import verify_commit


class Process:
    """A persister of its own, as a launcher starts it."""

    def __init__(self, path: str, faults: str = "") -> None:
        self.path = path
        read_end, self.control = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckptrt.storage.persister", "--socket", path, "--control-fd", str(read_end)],
            pass_fds=(read_end,),
            env={**os.environ, "CKPTRT_FAULTS": faults},
        )
        os.close(read_end)
        deadline_s = time.monotonic() + 20
        while True:
            try:
                wire.connect(path).close()
                return
            except OSError:
                assert time.monotonic() < deadline_s
                assert self.process.poll() is None
                time.sleep(0.01)

    def end(self) -> int:
        if self.control >= 0:
            os.close(self.control)
            self.control = -1
        return self.process.wait(40)

    def kill(self) -> None:
        self.process.kill()
        self.end()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(name: str = "p", faults: str = "") -> Process:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        started.append(Process(str(folder / "s"), faults))
        return started[-1]

    yield make
    for process in started:
        process.kill()


@pytest.fixture
def rank() -> Iterator[FakeRank]:
    made = FakeRank()
    yield made
    made.close()


def committed(url: str) -> list[int]:
    return [commit.step for commit in open_catalog(url).commits()]


def whole(url: str) -> bool:
    catalog = open_catalog(url)
    return all(verify_commit(catalog, commit.id, read_data=True).is_ok for commit in catalog.commits())


@pytest.mark.processes
def test_a_slot_becomes_a_committed_checkpoint_and_the_client_hears_of_it(start, rank, tmp_path):
    url = str(tmp_path / "run")
    make_run(url)
    image = rank.stage(0, step=5)
    process = start()
    assert rank.hello(process.path, url)["op"] == "ready"
    rank.submit(5, 0)
    persisted = rank.hear()
    assert (persisted["op"], persisted["step"], persisted["size_bytes"]) == ("persisted", 5, len(image))
    assert rank.hear() == {"op": "committed", "step": 5, "retry": 0}
    (folder,) = Path(url, DATA).iterdir()
    assert (folder / "r00000.safetensors").read_bytes() == image
    rank.hang_up()
    assert process.end() == 0
    assert not Path(process.path).exists(), "its socket is gone"
    assert not Path(process.path).parent.exists(), "and its folder, which was empty"


@pytest.mark.processes
def test_what_a_client_gave_before_it_died_is_committed(start, tmp_path):
    url = str(tmp_path / "run")
    make_run(url)
    process = start()
    child = os.fork()
    if child == 0:
        rank = FakeRank()
        rank.stage(0, step=5)
        rank.stage(1, step=6)
        rank.hello(process.path, url)
        rank.submit(5, 0)
        rank.submit(6, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.end() == 0
    assert committed(url) == [6, 5]


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["persisting", "persisted", "committing", "committed"])
def test_a_successor_of_a_killed_persister_finishes_the_slot_once(start, rank, tmp_path, fault):
    url = str(tmp_path / "run")
    make_run(url)
    rank.stage(0, step=5)
    first = start("p", faults=f"{fault}@step=5:kill")
    rank.hello(first.path, url)
    rank.submit(5, 0)
    assert first.process.wait(20) == -signal.SIGKILL
    rank.hang_up()
    if fault != "persisting":
        rank.view.unseal(0)  # what is written needs its slot no more
    second = start("p")
    rank.hello(second.path, url)
    rank.submit(5, 0, again=True)
    assert rank.hear_of(5, "committed", "failed")["op"] == "committed"
    assert committed(url) == [5]
    assert len(list(Path(url, DATA).glob("*/*.safetensors"))) == 1


@pytest.mark.processes
def test_signals_meant_for_the_training_do_not_stop_the_saving(start, rank, tmp_path):
    url = str(tmp_path / "run")
    make_run(url)
    process = start()
    rank.hello(process.path, url)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.process.send_signal(number)
    rank.stage(0, step=5)
    rank.submit(5, 0)
    assert rank.hear_of(5, "committed")


@pytest.mark.processes
def test_clients_that_talk_nonsense_are_dropped_and_harm_nobody(start, rank, tmp_path):
    url = str(tmp_path / "run")
    make_run(url)
    process = start()
    for message in ({"op": "hello"}, {"op": "submit", "step": 1}, {}, {"op": "hello", "rank": "x"}):
        channel = wire.connect(process.path, 20.0)
        channel.send(message)
        assert channel.receive() is None
        channel.close()
    raw = wire.connect(process.path, 20.0)
    raw.sock.sendall(b"\xff\xff\xff\xff")
    assert raw.receive() is None
    raw.close()
    other = FakeRank()
    assert other.hello(process.path, "nothing://x", options={"a": 1})["op"] == "error"
    other.hang_up()
    assert other.hello(process.path, url)["op"] == "ready"
    other.channel.send({"op": "hello", "rank": 0, "pid": 1})  # a second one
    assert other.channel.receive() is None
    other.close()
    rank.hello(process.path, url)
    rank.channel.send({"op": "submit", "step": 4, "slot": 0, "again": False})  # no memory came with it
    assert rank.hear_of(4, "failed")["code"] == "persist"
    rank.stage(0, step=5)
    rank.submit(5, 1)
    assert "doesn't hold step 5" in rank.hear_of(5, "failed")["what"]
    rank.submit(5, 0)
    assert rank.hear_of(5, "committed")


@pytest.mark.processes
def test_old_checkpoints_go_after_a_commit(start, rank, tmp_path):
    url = str(tmp_path / "run")
    make_run(url)
    process = start()
    rank.hello(process.path, url, keep={"last": 2})
    for step in range(1, 6):
        rank.stage(step % 2, step)
        rank.submit(step, step % 2)
        rank.hear_of(step, "committed")
    rank.hang_up()
    process.end()
    assert committed(url) == [5, 4]
    assert len(list(Path(url, DATA).iterdir())) == 2


# --- within this process, on tiers that fail


class PausingTier:
    """A tier on which a large write stops in its middle until it is let go."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def write(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        def paused() -> Iterator[memoryview]:
            self.reached.set()
            assert self.go_on.wait(20)
            yield from pieces

        self._tier.write(name, paused(), size_bytes)


@pytest.fixture
def serve(tmp_path, monkeypatch) -> Iterator[Callable[[Any], str]]:
    """A persister in a thread that writes to the given tier; gives its socket."""
    served: list[Persister] = []

    def make(tier: Any) -> str:
        monkeypatch.setattr(RunPlace, "near_tier", lambda place: tier)
        folder = tmp_path / "sockets"
        folder.mkdir()
        served.append(Persister(str(folder / "s")))
        threading.Thread(target=served[-1].serve, daemon=True).start()
        return str(folder / "s")

    yield make
    for one in served:
        one._listener.shutdown(2)
        for client in list(one._clients):
            client._channel.sock.shutdown(2)
        one.stop()


@pytest.mark.parametrize("planted", [False, True], ids=["checked", "planted"])
def test_a_slot_that_is_given_up_under_the_writer_is_never_committed(serve, rank, tmp_path, monkeypatch, planted):
    url = str(tmp_path / "run")
    make_run(url)
    tier = PausingTier(open_tier(url))
    if planted:  # without its check the writer commits a mixture: this test would see it
        original = module.write_shard
        monkeypatch.setattr(module, "write_shard", lambda *a, intact, **k: original(*a, **k))
    path = serve(tier)
    rank.hello(path, url)
    first = rank.stage(0, step=5)
    rank.submit(5, 0)
    assert tier.reached.wait(20)
    second = rank.stage(0, step=6)  # the slot is used again while it is being written
    assert first != second
    tier.go_on.set()
    outcome = rank.hear_of(5, "committed", "failed")
    if planted:
        assert outcome["op"] == "committed"
        (folder,) = Path(url, DATA).iterdir()
        assert (folder / "r00000.safetensors").read_bytes() != first
    else:
        assert outcome["op"] == "failed"
        assert "given up while it was being written" in outcome["what"]
        assert committed(url) == []
        assert not list(Path(url, DATA).glob("*/*receipt*"))
    rank.submit(6, 0)
    assert rank.hear_of(6, "committed")
    rank.hang_up()


@pytest.mark.parametrize("method", ["write", "create"])
def test_a_write_that_fails_is_told_and_the_next_one_works(serve, rank, tmp_path, method):
    url = str(tmp_path / "run")
    make_run(url)
    tier = FaultyTier(open_tier(url), [Fault(method=method, error=NoSpaceError)])
    rank.hello(serve(tier), url)
    rank.stage(0, step=5)
    rank.submit(5, 0)
    assert rank.hear_of(5, "committed", "failed")["code"] == "no-space"
    rank.submit(5, 0)
    assert rank.hear_of(5, "committed", "failed")["op"] == "committed"
    rank.stage(1, step=6)
    rank.submit(6, 1)
    assert rank.hear_of(6, "committed", "failed")["op"] == "committed"
    rank.hang_up()
    assert whole(url)


def test_a_failure_of_one_rank_reaches_a_rank_that_hands_over_later(serve, tmp_path):
    url = str(tmp_path / "run")
    make_run(url, world_size=2)
    tier = FaultyTier(open_tier(url), [Fault(method="write", error=NoSpaceError)])
    path = serve(tier)
    ranks = [FakeRank(rank, 2) for rank in range(2)]
    for one in ranks:
        one.hello(path, url)
        one.stage(0, step=5)
    ranks[1].submit(5, 0)
    assert ranks[1].hear_of(5, "failed")["code"] == "no-space"
    ranks[0].submit(5, 0)
    told = [ranks[0].hear_of(5, "failed")["code"], ranks[0].hear_of(5, "failed")["code"]]
    assert told == ["no-space"] * 2, "once with the others, before it had asked, and once for its own"
    for one in ranks:  # all know now: the same step may be tried again
        one.submit(5, 0)
    for one in ranks:
        assert one.hear_of(5, "committed")
        one.close()
    assert committed(url) == [5]


def test_an_outgrown_arena_is_let_go(serve, rank, tmp_path):
    url = str(tmp_path / "run")
    make_run(url)
    path = serve(open_tier(url))
    rank.hello(path, url)
    before = mapped_arenas()
    for step in range(1, 6):
        other = FakeRank()
        other.stage(0, step)
        rank.channel.send({"op": "submit", "step": step, "slot": 0, "again": False}, (other.fd,))
        rank.hear_of(step, "committed")
        other.close()
    assert mapped_arenas() <= before + 2, "the last one handed over, and perhaps the one that was just written"
    rank.hang_up()


def mapped_arenas() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:fake-rank")


# --- write_shard by itself


def parts(rank: FakeRank, step: int) -> Any:
    rank.stage(0, step)
    header = rank.view.header(0)
    assert header is not None
    return header, rank.view.meta(0, header), rank.view.image(0, header.image_bytes)


def test_a_name_that_is_taken_is_left_and_another_one_used(rank, tmp_path):
    tier = open_tier(str(tmp_path))
    header, meta, image = parts(rank, 5)
    tier.create("data/s000000005.i00000001.0a/r00000.safetensors", b"of an attempt that failed")
    write_shard(tier, "data/s000000005.i00000001.0a/", header, pack(0, meta, image, None))
    names = [entry.name for entry in tier.list("data/s000000005.i00000001.0a/")]
    assert [name.rpartition("/")[2] for name in names] == [
        "r00000.a1.safetensors", "r00000.receipt.json", "r00000.safetensors",
    ]  # fmt: skip
    assert tier.read("data/s000000005.i00000001.0a/r00000.a1.safetensors") == image
    image.release()


def test_names_do_not_run_out_for_ever(rank, tmp_path):
    tier = FaultyTier(open_tier(str(tmp_path)), [Fault(method="write", times=None, error=ExistsError)])
    header, meta, image = parts(rank, 5)
    with pytest.raises(PersistError, match="100 shard files"):
        write_shard(tier, "data/s000000005.i00000001.0a/", header, pack(0, meta, image, None))
    image.release()
