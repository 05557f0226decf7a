"""Which checkpoints stay: the rules against a naive twin, pins, and metrics on their way into the commit."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support_runs import FakeRun, make_run, overwrite

import ckptrt
from ckptrt.errors import NoSpaceError, NotFoundError, UsageError
from ckptrt.snapshot import finite_numbers
from ckptrt.storage.catalog import Catalog, open_catalog
from ckptrt.storage.cli import cli
from ckptrt.storage.layout import CommitId, commit_name, pin_name
from ckptrt.storage.pins import pin, pinned_ids, pins, unpin
from ckptrt.storage.prune import PrunePlan, PrunePolicy, execute, plan_prune, prune_committed
from ckptrt.storage.records import CommitRecord, seal
from ckptrt.storage.retention import Candidate, Keep, wanted
from ckptrt.storage.tiers.faulty import Fault, FaultyTier
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier

LATER_S = 1e6


def plan(run: FakeRun, keep: Keep, in_s: float = LATER_S) -> PrunePlan:
    return plan_prune(run.catalog, PrunePolicy(keep=keep, grace_s=0.0, removed_grace_s=0.0), time.time() + in_s)


def kept(made: PrunePlan) -> list[int]:
    return [each.id.step for each in made.kept]


# --- rules


def naive(keep: Keep, candidates: list[Candidate]) -> set[CommitId]:
    """What the rules say, one commit at a time."""
    found = set()
    for each in candidates:
        if keep.every is not None and each.id.step >= keep.every:
            start = each.id.step - each.id.step % keep.every
            if not any(start <= other.id.step < each.id.step for other in candidates):
                found.add(each.id)
        if keep.within_s is not None and each.age_s <= keep.within_s:
            found.add(each.id)
        if keep.best is not None and each.metrics.get("loss", float("nan")) == each.metrics.get("loss"):
            value = each.metrics["loss"]
            better = 0
            for other in candidates:
                theirs = other.metrics.get("loss", float("nan"))
                wins = theirs < value if keep.mode == "min" else theirs > value
                better += wins or (theirs == value and other.id.step > each.id.step)
            if better < keep.best:
                found.add(each.id)
    return found


@settings(max_examples=400, deadline=None)
@given(
    st.sets(st.integers(0, 60), max_size=14),
    st.none() | st.integers(1, 25),
    st.none() | st.floats(0, 10),
    st.none() | st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.data(),
)
def test_the_rules_want_what_a_naive_reading_wants(steps, every, within_s, best, mode, data):
    numbers = st.sampled_from([0.5, 1.0, 2.0, float("nan")])
    candidates = [
        Candidate(
            id=CommitId(step, 1),
            age_s=data.draw(st.floats(0, 20)),
            metrics=data.draw(st.just({}) | st.builds(lambda n: {"loss": n}, numbers)),
        )
        for step in sorted(steps, reverse=True)
    ]
    keep = Keep(every=every, within_s=within_s, best=best, mode=mode)
    assert set(wanted(keep, candidates)) == naive(keep, candidates)


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"within_s": -1}, {"best": 0}, {"mode": "mean"}])
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Keep(**wrong)


def test_a_prune_keeps_by_every_rule_and_says_which() -> None:
    run = make_run(MemoryTier(), [100, 200, 1000, 1100, 2100, 2200, 2300])
    made = plan(run, Keep(last=2, every=1000))
    assert [(each.id.step, each.reason) for each in made.kept] == [
        (2300, "the newest good one"), (2200, "last 2"), (2100, "every 1000 steps"), (1000, "every 1000 steps"),
    ]  # fmt: skip
    execute(run.catalog, made)
    assert plan(run, Keep(last=2, every=1000)).is_empty, "what is left is what the same rules keep"


def test_the_young_stay_by_the_stores_clock() -> None:
    run = make_run(MemoryTier(), [10, 20, 30])
    assert kept(plan(run, Keep(within_s=100.0), in_s=50.0)) == [30, 20, 10]
    assert kept(plan(run, Keep(within_s=100.0), in_s=200.0)) == [30]


def with_loss(run: FakeRun, step: int, loss: float | None) -> None:
    run.save(step)
    record = run.catalog.read_commit(CommitId(step, 1))
    metrics = {} if loss is None else {"loss": loss}
    overwrite(run.tier, commit_name(record_id(record)), seal(msgspec.structs.replace(record, metrics=metrics)))


def record_id(record: CommitRecord) -> CommitId:
    return CommitId(record.step, record.incarnation)


def test_the_best_stay_and_one_without_a_number_is_never_among_them() -> None:
    run = FakeRun(tier=MemoryTier(), world_size=1)
    run.fence(1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, None), (40, 2.0), (50, 4.0)):
        with_loss(run, step, loss)
    assert kept(plan(run, Keep(best=2))) == [50, 40, 20]
    assert kept(plan(run, Keep(best=1, mode="max"))) == [50]
    assert kept(plan(run, Keep(best=2, mode="max"))) == [50, 10]
    assert kept(plan(run, Keep(best=2, metric="accuracy"))) == [50]


# --- pins


def test_what_is_pinned_stays_with_what_it_borrows_until_it_is_unpinned() -> None:
    run = make_run(MemoryTier(), [10])
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.commit(20, 1, {0: run.write_rank(20, 1, 0, borrow=old), 1: run.write_rank(20, 1, 1)})
    run.save(30)
    assert pin(run.catalog, CommitId(20, 1), "for the paper")
    assert not pin(run.catalog, CommitId(20, 1))
    made = plan(run, Keep())
    assert [(each.id.step, each.reason) for each in made.kept] == [(30, "the newest good one"), (20, "pinned")]
    execute(run.catalog, made)
    assert not run.catalog.open_checkpoint(CommitId(20, 1)).problems()
    assert unpin(run.catalog, CommitId(20, 1))
    assert not unpin(run.catalog, CommitId(20, 1))
    execute(run.catalog, plan(run, Keep()))
    assert [entry.name[:15] for entry in run.tier.list("data/")] == ["data/s000000030"]


def test_a_pinned_one_off_the_path_stays() -> None:
    run = make_run(MemoryTier(), [10, 20])
    run.fence(2, (10, 1))
    run.save(30, 2)
    pin(run.catalog, CommitId(20, 1))
    execute(run.catalog, plan(run, Keep()))
    assert set(run.catalog.commit_ids()) == {CommitId(30, 2), CommitId(20, 1)}


def test_a_damaged_pin_still_pins() -> None:
    run = make_run(MemoryTier(), [10, 20])
    pin(run.catalog, CommitId(10, 1))
    overwrite(run.tier, pin_name(CommitId(10, 1)), b"{}")
    assert pins(run.catalog) == {CommitId(10, 1): None}
    assert kept(plan(run, Keep())) == [20, 10]


def test_a_pin_whose_checkpoint_is_gone_goes_by_hand_once_it_is_old() -> None:
    """A power cut may take back an unpinning, but not the prune after it."""
    run = make_run(MemoryTier(), [10, 20])
    pin(run.catalog, CommitId(10, 1))
    record = run.tier.read(pin_name(CommitId(10, 1)))
    unpin(run.catalog, CommitId(10, 1))
    prune_committed(run.catalog, Keep(last=1))
    run.tier.create(pin_name(CommitId(10, 1)), record)
    prune_committed(run.catalog, Keep(last=1))
    assert pinned_ids(run.catalog) == {CommitId(10, 1)}  # a running job prunes what is its own
    policy = PrunePolicy(keep=Keep(last=1), grace_s=0.0)
    assert plan_prune(run.catalog, policy, time.time()).is_empty  # somebody may just be looking for its commit
    plan = plan_prune(run.catalog, policy, time.time() + 120)
    assert [(gone.name, gone.reason) for gone in plan.pins] == [
        (pin_name(CommitId(10, 1)), "a pin without its checkpoint")
    ]
    assert execute(run.catalog, plan).deleted == [pin_name(CommitId(10, 1))]
    assert pinned_ids(run.catalog) == set()


def test_what_is_not_there_cannot_be_pinned() -> None:
    run = make_run(MemoryTier(), [10])
    with pytest.raises(NotFoundError, match="step 20"):
        pin(run.catalog, CommitId(20, 1))
    assert not pinned_ids(run.catalog)


def test_a_pin_that_comes_while_a_prune_is_at_work_holds() -> None:
    """Before the records go, between two of them, or after them: a pin that was reported is never lost."""
    for moment in range(4):
        run = make_run(MemoryTier(), [10, 20, 30])
        made, deleted = plan(run, Keep()), 0
        real = run.tier.delete
        reported = False

        def delete(name: str, run: FakeRun = run, real: Any = real, moment: int = moment) -> None:
            nonlocal deleted, reported
            if deleted == moment:
                try:
                    reported = pin(run.catalog, CommitId(10, 1))
                except NotFoundError:
                    reported = False
            deleted += 1
            real(name)

        run.tier.delete = delete
        result = execute(run.catalog, made)
        run.tier.delete = real
        there = CommitId(10, 1) in run.catalog.commit_ids()
        assert there == reported == (CommitId(10, 1) in pinned_ids(run.catalog))
        if there:
            assert "was pinned while" in result.errors[0].what
            assert not run.catalog.open_checkpoint(CommitId(10, 1)).problems()


@pytest.mark.parametrize("trouble", ["killed", "full"])
def test_a_pin_that_comes_between_plan_and_prune_needs_nothing_put_back(trouble: str) -> None:
    """A prune may be killed once the records are gone, and a full disk takes no record back."""
    run = make_run(MemoryTier(), [10, 20, 30])
    made = plan(run, Keep())
    assert pin(run.catalog, CommitId(10, 1))
    real = run.tier.delete, run.tier.create

    def delete(name: str) -> None:
        real[0](name)
        if trouble == "killed" and name == commit_name(CommitId(10, 1)):
            raise KeyboardInterrupt

    def create(name: str, data: bytes) -> None:
        raise NoSpaceError(f"{name}: no room")

    run.tier.delete, run.tier.create = delete, create
    with contextlib.suppress(KeyboardInterrupt):
        execute(run.catalog, made)
    run.tier.delete, run.tier.create = real
    assert CommitId(10, 1) in run.catalog.commit_ids()
    assert not run.catalog.open_checkpoint(CommitId(10, 1)).problems()


def test_the_command_line_pins_and_unpins(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    make_run(LocalTier(url), [10, 20])

    def ckptrt_cli(*args: str) -> str:
        result = CliRunner().invoke(cli, args)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert ckptrt_cli("pin", f"{url}@10", "-n").endswith("dry run    nothing was changed\n")
    assert "pinned" not in ckptrt_cli("ls", url)
    assert ckptrt_cli("pin", f"{url}@10", "--reason", "best so far") == f"pinned     step 10 of file://{url}\n"
    assert ckptrt_cli("pin", f"{url}@10") == f"pinned     step 10 of file://{url} already\n"
    assert [line.split()[-1] for line in ckptrt_cli("ls", url).splitlines()] == ["KEEP", "committed", "pinned"]
    assert '"changed": true' in ckptrt_cli("unpin", f"{url}@10", "--json")
    assert '"changed": false' in ckptrt_cli("unpin", f"{url}@10", "--json")
    result = CliRunner().invoke(cli, ["pin", f"{url}@30"])
    assert result.exit_code != 0 and "no checkpoint of step 30" in result.stderr


# --- from the training loop to the commit


@pytest.mark.processes
def test_metrics_and_rules_travel_from_the_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "CKPTRT_AGENT_SOCKET", "CKPTRT_DIR"):
        monkeypatch.delenv(name, raising=False)
    url = str(tmp_path / "run")
    with ckptrt.init(url, loop={"n": 1}, keep=ckptrt.Keep(last=1, best=1)) as rt:
        for loss in (3.0, 1.0, float("nan"), 2.0):
            rt.step(loss=torch.tensor(loss), rate=0.1)
            rt.save().committed.result(30)
    found = {info.step: info.record for info in open_catalog(url).commits() if info.record}
    assert {step: record.metrics for step, record in found.items()} == {
        4: {"loss": 2.0, "rate": 0.1},
        2: {"loss": 1.0, "rate": 0.1},
    }


def test_a_metric_that_is_no_number_costs_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    metrics: Any = {"loss": torch.tensor([1.0, 2.0]), "note": "high", "none": None, "rate": 0.5, "inf": float("inf")}
    assert finite_numbers(metrics) == {"rate": 0.5}
    assert [line.split("'")[1] for line in capsys.readouterr().err.splitlines()] == ["loss", "note", "none"]


def test_a_record_that_cannot_be_put_back_is_told_with_its_bytes() -> None:
    run = make_run(MemoryTier(), [10, 20])
    made, name = plan(run, Keep()), commit_name(CommitId(10, 1))
    record, real = run.tier.read(name), run.tier.delete

    def delete(each: str) -> None:
        pin(run.catalog, CommitId(10, 1))
        real(each)

    run.tier.delete = delete
    tier = FaultyTier(run.tier, [Fault(method="create", name="commits/*", times=None, error=NoSpaceError)])
    errors = execute(Catalog(tier), made).errors
    assert any(record.decode().rstrip() in error.hint for error in errors)
    assert not run.catalog.open_checkpoint(CommitId(20, 1)).problems()
    assert len(run.tier.list("data/")) == 2, "no data go while a record is in doubt"
