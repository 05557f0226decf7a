"""`ckptrt du` and `ckptrt events` on runs whose sizes and stories are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support_runs import FakeRun, make_run, overwrite

from ckptrt.storage.catalog import CommitId
from ckptrt.storage.cli import cli
from ckptrt.storage.layout import fence_name
from ckptrt.storage.pins import pin
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.usage import usage


def run_cli(*args: str) -> str:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*args: str) -> dict[str, Any]:
    return json.loads(run_cli(*args, "--json"))


def history(url: str) -> FakeRun:
    run = make_run(LocalTier(url), [10, 20])
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.commit(30, 1, {0: run.write_rank(30, 1, 0, borrow=old), 1: run.write_rank(30, 1, 1)})
    run.write_data(40)
    return run


def folder_bytes(url: str, name: str) -> int:
    return sum(path.stat().st_size for path in Path(url, "data").glob(f"{name}*/*"))


def test_shared_bytes_come_free_with_the_last_that_needs_them(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run = history(url)
    found = document("du", url)
    own = {step: folder_bytes(url, f"s{step:09d}") for step in (10, 20, 30, 40)}
    rows = {each["step"]: each for each in found["checkpoints"]}
    assert {step: row["own_bytes"] for step, row in rows.items()} == {30: own[30], 20: own[20], 10: own[10]}
    assert {step: row["frees_bytes"] for step, row in rows.items()} == {30: own[30], 20: own[20], 10: 0}
    assert {step: row["needed_by"] for step, row in rows.items()} == {30: 0, 20: 0, 10: 1}
    assert (found["uncommitted_bytes"], found["num_uncommitted"]) == (own[40], 1)
    assert found["total_bytes"] == sum(own.values())
    run.tier.delete("commits/s000000010.i00000001.json")
    assert {each.commit.step: each.frees_bytes for each in usage(run.catalog).checkpoints}[30] == own[30] + own[10]
    text = run_cli("du", url)
    assert text.splitlines()[0].split() == ["STEP", "SIZE", "STORED", "FREES", "STATE"]
    assert text.splitlines()[-2].startswith("loose      ") and text.splitlines()[-1].startswith("total      ")


def test_the_story_of_a_run(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run = make_run(LocalTier(url), [10, 20])
    run.clock.advance(60)
    run.fence(2, (10, 1))
    run.clock.advance(60)
    run.save(30, 2)
    pin(run.catalog, CommitId(10, 1), "for the paper", run.clock)
    told = [(each["event"], each["text"]) for each in document("events", url)["events"]]
    assert [word for word, _ in told] == ["start", "commit", "commit", "resume", "pin", "commit"]
    assert told[2][1].endswith("off-path: newer incarnations went on from step 10")
    assert told[3][1].startswith("incarnation 2 from step 10 of incarnation 1; 2 ranks, pid ")
    assert told[4][1].startswith("step 10 by ") and told[4][1].endswith(": for the paper")
    assert run_cli("events", url).splitlines()[0].startswith("2000-01-01T00:00:00Z  start     incarnation 1 fresh; ")
    overwrite(run.tier, fence_name(1), b"{}")
    assert document("events", url)["events"][-1]["event"] == "warn"
    assert run_cli("events", url, "--since", "1h").split()[0] == "warn", "the records are of the year 2000"


def test_the_launcher_s_log_completes_the_story(tmp_path: Path) -> None:
    """Only logs of launches that opened this run; a line that was cut off and what fences tell are left out."""
    url = str(tmp_path / "run")
    run = make_run(LocalTier(url), [10])
    run.clock.advance(60)
    run.fence(2, (10, 1))
    notes = [
        {"event": "opened", "wall": "2000-01-01T00:00:00Z", "incarnation": 1, "url": url},
        {"event": "failure", "wall": "2000-01-01T00:01:00Z", "incarnation": 1, "rank": 1, "pid": 7, "code": -9,
         "error": "", "note": "hung", "step": 12},
        {"event": "restart", "wall": "2000-01-01T00:01:00Z", "number": 1, "left": 2},
        {"event": "recovery", "wall": "2000-01-01T00:01:00Z", "incarnation": 2, "parts": {"stop": 0.5, "start": 1},
         "total_s": 1.5},
        {"event": "give_up", "wall": "2000-01-01T00:02:00Z", "why": "enough"},
        {"event": "done", "wall": "2000-01-01T00:02:00Z", "exit_code": 20, "restarts": 1},
    ]  # fmt: skip
    for name, opened in (("gpt-1", url), ("other-2", str(tmp_path / "other"))):
        folder = tmp_path / "logs" / name
        folder.mkdir(parents=True)
        lines = [json.dumps(note).replace(json.dumps(url), json.dumps(opened)) for note in notes]
        (folder / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "do')
    told = [
        (each["event"], each["text"]) for each in document("events", url, "--logs", str(tmp_path / "logs"))["events"]
    ]
    assert [word for word, _ in told] == [
        "start", "commit", "failure", "restart", "resume", "recovery", "done", "done",
    ]  # fmt: skip
    assert told[2][1] == "rank 1 (pid 7), exit -9 after step 12: hung"
    assert told[5][1] == "1.50 s = stop 0.50 + start 1.00"
    assert [text for _, text in told[6:]] == ["failed: enough", "exit 20 after 1 restart"]
    result = CliRunner().invoke(cli, ["events", url, "--logs", str(tmp_path / "logs" / "other-2")])
    assert (result.exit_code, "no launch that wrote to" in result.stderr) == (0, True)
    result = CliRunner().invoke(cli, ["events", url, "--logs", url])
    assert (result.exit_code, "no events.jsonl" in result.stderr) == (10, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    assert "_CKPTRT_COMPLETE" in run_cli("completion", shell)


def test_verbs_are_completed() -> None:
    environ = {"_CKPTRT_COMPLETE": "bash_complete", "COMP_WORDS": "ckptrt pr", "COMP_CWORD": "1"}
    result = CliRunner().invoke(cli, prog_name="ckptrt", env=environ)
    assert result.stdout.split() == ["plain,prune"]
