"""What the last job's persister does while the next job starts, and what a start does when nothing is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support_runs import FakeRun, make_run

import ckptrt
from ckptrt import session as session_module
from ckptrt import wire
from ckptrt.agents.ledger import RunLedger
from ckptrt.errors import CorruptError, UsageError
from ckptrt.persisting import PersisterLink
from ckptrt.storage.catalog import Catalog, CommitId, open_catalog
from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.layout import DATA, commit_name
from ckptrt.storage.prune import prune_committed
from ckptrt.storage.records import seal
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiered import RunPlace
from ckptrt.storage.tiers import open_tier


def model_state(value: float = 0.0) -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model}


def saved(url: str, *steps: int) -> None:
    with ckptrt.init(url, every=1, **model_state()) as rt:
        for step in steps:
            rt._adapters[0]._module.weight.data.fill_(float(step))  # type: ignore[attr-defined]
            rt.step_count = step - 1
            rt.step()
            rt.wait(30)


@pytest.mark.processes
def test_a_commit_and_a_prune_during_the_restore_do_not_take_the_parent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "run")
    saved(url, 10)
    old = FakeRun(tier=open_tier(url))
    real = session_module.Session._fence
    late: list[int] = []

    def fence_after_the_old_persister(self: Any, parent: Any) -> Any:
        if not late:
            # The killed job's persister is done with step 20 only now, and keeps one.
            source = old.catalog.open_checkpoint(old.catalog.commits()[0])
            late.append(20)
            copy_commit(old, source, 20)
            prune_committed(old.catalog, Keep(last=1))
        return real(self, parent)

    monkeypatch.setattr(session_module.Session, "_fence", fence_after_the_old_persister)
    state = model_state()
    with ckptrt.init(url, **state) as rt:
        restored = rt.restore()
    assert restored is not None and restored.step == 20
    assert [commit.step for commit in open_catalog(url).commits()] == [20]


def copy_commit(run: FakeRun, source: Any, step: int) -> None:
    """Commit the same shard file as another step of the same incarnation."""
    receipt = source.receipt(0)
    folder = f"s{step:09d}.i{source.id.incarnation:08d}.0c"
    data = run.tier.read(DATA + receipt.shard.name)
    run.tier.write(f"{DATA}{folder}/r00000.safetensors", [memoryview(data)], len(data))
    shard = msgspec.structs.replace(receipt.shard, name=f"{folder}/r00000.safetensors")
    sealed = seal(msgspec.structs.replace(receipt, step=step, shard=shard))
    run.tier.create(f"{DATA}{folder}/r00000.receipt.json", sealed)
    run.commit(step, source.id.incarnation, {0: sealed}, nonce="0c")


def test_a_launch_does_not_start_fresh_over_damage(tmp_path: Path) -> None:
    run = make_run(open_tier(str(tmp_path / "run")), [10, 20])
    for shard in Path(tmp_path, "run", "data").glob("*/*.safetensors"):
        shard.unlink()
    ledger = RunLedger(lambda above: (above + 1, ""))
    ledger.open_run(RunPlace.of(str(tmp_path / "run")))
    try:
        before = run.catalog.newest_incarnation()
        with pytest.raises(CorruptError, match="2 checkpoints and none is whole"):
            ledger.advance(memory=list, policy="auto", world_size=2)
        assert run.catalog.newest_incarnation() == before
        assert ledger.advance(memory=list, policy="never", world_size=2).resume is None
    finally:
        ledger.close()


@pytest.mark.parametrize("moment", ["before the fence", "as the fence is written"])
def test_a_launch_chooses_again_if_something_was_committed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = make_run(open_tier(str(tmp_path / "run")), [10])
    numbers = iter(range(2, 9))
    write_fence = Catalog.write_fence

    def raise_number(_above: int) -> tuple[int, str]:
        number = next(numbers)
        if number == 2 and moment == "before the fence":
            run.save(20, 1)
        return number, ""

    def write(self: Catalog, number: int, *args: Any) -> Any:
        if number == 2 and moment == "as the fence is written":
            run.save(20, 1)
        return write_fence(self, number, *args)

    monkeypatch.setattr(Catalog, "write_fence", write)
    ledger = RunLedger(raise_number)
    ledger.open_run(RunPlace.of(str(tmp_path / "run")))
    try:
        opening = ledger.advance(memory=list, policy="auto", world_size=2)
        assert opening.resume_text == "20.1.stored"
        assert opening.incarnation == (2 if moment == "before the fence" else 3)
    finally:
        ledger.close()
    assert [commit.step for commit in run.catalog.commits()] == [20, 10]


def test_nobody_starts_fresh_when_the_fence_s_parent_is_gone(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run = make_run(open_tier(url), [10])
    run.fence(2, (10, 1))
    run.zombie_save(20, 1)
    run.tier.delete(commit_name(CommitId(10, 1)))
    ledger = RunLedger(lambda above: (above + 1, ""))
    ledger.open_run(RunPlace.of(url))
    try:
        with pytest.raises(CorruptError, match="step 10 of incarnation 1, which is gone; there is step 20"):
            ledger.advance(memory=list, policy="auto", world_size=2)
    finally:
        ledger.close()


@pytest.mark.processes
def test_a_step_that_is_tried_again_never_takes_parts_of_the_first_try(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with ckptrt.init(url, **model_state(1.0)) as rt:
        rt.step()
        first = rt.save()
        first.committed.result(30)
        assert rt.save() is first
        rt._last_save = type(first)(step=1)  # as if the first had failed
        rt._last_save.committed.set_exception(UsageError("made up"))
        again = rt.save()
        assert again.committed.exception(30) is not None, "the step is committed, with other data"
    assert len(list(Path(url, "data").iterdir())) == 2


@pytest.mark.processes
@pytest.mark.parametrize("change", [{"chunk_bytes": 0}, {"chunk_bytes": -4096}, {"chunks": ""}])
def test_a_sealed_receipt_that_makes_no_sense_is_damage_and_the_older_step_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    url = str(tmp_path / "run")
    saved(url, 1, 2)
    real = Checkpoint.receipts

    def hostile(self: Checkpoint) -> Any:
        for receipt in real(self):
            shard = receipt.shard
            yield msgspec.structs.replace(
                receipt, shard=msgspec.structs.replace(shard, **change) if self.id.step == 2 else shard
            )

    monkeypatch.setattr(Checkpoint, "receipts", hostile)
    with ckptrt.init(url, **model_state()) as rt:
        restored = rt.restore()
    assert restored is not None and restored.step == 1


def test_a_skip_before_the_persister_is_up_is_told_once_it_is(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    heard: list[dict[str, Any]] = []
    link = PersisterLink(path, {"op": "hello", "rank": 1}, heard.append)
    link.skip(5)
    listener = wire.listen(path)
    sock, _ = listener.accept()
    channel = wire.Channel(sock)
    try:
        assert channel.receive() == ({"op": "hello", "rank": 1}, ())
        channel.send({"op": "ready"})
        assert channel.receive() == ({"op": "skip", "step": 5, "retry": 0}, ())
    finally:
        link.close()
        channel.close()
        listener.close()
