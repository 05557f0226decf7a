"""A sample of the kill matrix, and what its judge notices. The whole of it: `make kill-matrix`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_matrix import EVERY, PHASES, Kill, Outcome, outcomes, plan_kills, play, told
from support_jobs import Job, Note, Reference, judge, resumes

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def check(kills: list[Kill], found: list[Outcome], problems: list[str]) -> None:
    assert problems == []
    assert list(told(found)) == []
    assert [outcome.kill for outcome in found] == kills


def test_a_rank_of_two_is_killed_twice_in_every_phase(tmp_path: Path) -> None:
    kills = plan_kills((1, 2), PHASES, 2)
    assert sorted(kill.phase for kill in kills) == sorted(PHASES * 2)
    check(kills, *play(tmp_path, kills, 2, "fsdp"))


def test_a_rank_of_four_is_killed_in_every_phase(tmp_path: Path) -> None:
    kills = plan_kills((1,), PHASES, 4)
    check(kills, *play(tmp_path, kills, 4, "ddp"))


def test_a_rank_is_killed_and_the_launcher_with_it_so_that_only_the_store_is_left(tmp_path: Path) -> None:
    kills = plan_kills((1,), PHASES[:3], 2)
    outcome, problems = play(tmp_path, kills, 2, "fsdp", cold=True)
    check(kills, outcome, problems)
    assert {found.tier for found in outcome} <= {"stored", "fresh"}


# --- what the judge notices

KILL = Kill(phase="staging", incarnation=1, step=12, rank=1, slow_s=0.0, hold_s=0.0)


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Reference]]:
    """A job that lost rank 1 in the middle of its third save, and the same job unhurt."""
    folder = tmp_path_factory.mktemp("judged")
    facts: dict[str, Any] = {"steps": 20, "every": EVERY}
    with (
        Job(folder=folder / "unhurt", **facts) as unhurt,
        Job(folder=folder / "hurt", faults=";".join(KILL.specs()), **facts) as job,
    ):
        assert unhurt.run() == 0, unhurt.output
        assert job.run() == 0, job.output
        reference = Reference(unhurt)
        assert judge(job, reference) == []
        assert [outcome.problems for outcome in outcomes(job, [KILL])] == [()]
        yield job, reference


def rewrite(job: Job, rank: int, change: Callable[[Note], bool]) -> None:
    """Change a rank's account: notes for which `change` gives False are dropped."""
    kept = [note for note in job.notes(rank) if change(note)]
    (job.folder / "out" / f"rank{rank}.jsonl").write_text("".join(f"{json.dumps(note)}\n" for note in kept))


def one_bit_in_a_loss(job: Job) -> None:
    def change(note: Note) -> bool:
        if (note["what"], note.get("step")) == ("step", 17):
            note["loss"] = (float.fromhex(note["loss"]) * (1 + 2**-52)).hex()
        return True

    rewrite(job, 1, change)


def a_step_that_never_ran(job: Job) -> None:
    rewrite(job, 0, lambda note: (note["what"], note.get("step")) != ("step", 5))


def went_on_from(step: int, ranks: tuple[int, ...] = (0, 1)) -> Callable[[Job], None]:
    def change(note: Note) -> bool:
        if (note["what"], note["incarnation"]) == ("restored", 2):
            note["step"] = step
        return True

    def harm(job: Job) -> None:
        for rank in ranks:
            rewrite(job, rank, change)

    return harm


def committed_before_the_kill(job: Job) -> None:
    def change(note: Note) -> bool:
        if (note["what"], note["incarnation"], note.get("step")) == ("step", 1, 12):
            note["committed"] = 12
        return True

    rewrite(job, 1, change)


def a_failed_save(job: Job) -> None:
    def change(note: Note) -> bool:
        if (note["what"], note["incarnation"]) == ("saved", 2):
            note.update(what="failed", error="no space")
        return True

    rewrite(job, 0, change)


def one_bit_in_a_shard(job: Job) -> None:
    path = sorted((job.folder / "run" / "data").glob("s000000016.*/r00001.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


def a_missing_last_commit(job: Job) -> None:
    for path in (job.folder / "run" / "commits").glob("s000000020.*"):
        path.unlink()


def a_late_commit(job: Job) -> None:
    commits = job.folder / "run" / "commits"
    (found,) = commits.glob("s000000016.*")
    (commits / "s000000012.i00000001.json").write_bytes(found.read_bytes())


def a_temporary_file(job: Job) -> None:
    (job.temp / "ckptrt-agent-1-x").mkdir()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (one_bit_in_a_loss, "rank 1: 1 losses differ, the first is that of step 17 in incarnation 2"),
        (a_step_that_never_ran, "rank 0 didn't go through every step"),
        (committed_before_the_kill, "older than the committed step 12"),
        (went_on_from(4), "older than step 8, which was whole in the memory of all ranks"),
        (went_on_from(7), "which nobody saved"),
        (went_on_from(16), "never reached in incarnation 1"),
        (went_on_from(12, ranks=(1,)), "the ranks went on from different places"),
        (went_on_from(12), "the fence of incarnation 2 says (8, 1), its ranks (12, 1)"),
        (a_failed_save, "not saved: no space"),
        (one_bit_in_a_shard, "1 checkpoints differ, the first is that of step 16, incarnation 2, in 1 places"),
        (a_missing_last_commit, "the last step isn't committed"),
        (a_late_commit, "the commit of step 12, incarnation 1 is"),
        (a_temporary_file, "file "),
    ],
)
def test_the_judge_notices(harm: Callable[[Job], None], said: str, hurt: tuple[Job, Reference], tmp_path: Path) -> None:
    job, reference = hurt
    shutil.copytree(job.folder, tmp_path / "copy")
    with Job(folder=tmp_path / "copy", steps=job.steps, every=job.every) as copy:
        copy.process = job.process
        assert judge(copy, reference) == []
        harm(copy)
        problems = judge(copy, reference)
    assert any(said in problem for problem in problems), problems


def test_the_phase_bounds_the_step_to_go_on_from(hurt: tuple[Job, Reference]) -> None:
    job, _ = hurt
    assert resumes(job)[0][1].step == 8

    def problems(**facts: Any) -> tuple[str, ...]:
        return outcomes(job, [dataclasses.replace(KILL, **facts)])[0].problems

    assert problems() == ()
    assert "but step 8 was torn" in problems(step=8)[0]
    assert "but step 12 was written by all ranks" in problems(phase="before commit")[0]
    assert "was to lose rank 0" in problems(rank=0)[0]
    assert "nothing came after incarnation 2" in problems(incarnation=2)[0]
