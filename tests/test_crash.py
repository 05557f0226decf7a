"""A sample of `make crash`, and the model of the disk that all of it stands on."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from crash import FAULT_SCENARIOS, Task, run_task
from support_crash_disk import Tree, build, choices, crash_points, digest, materialise
from support_crash_explore import Explorer, play
from support_crash_faults import FAULTS, FaultLoop, damage_loop
from support_crash_job import Job, Violation
from support_crash_judge import judge, ledger_of, naive_path
from support_crash_log import Killed, Op, Turns, WatchedFs
from support_crash_mutants import MUTANTS, Mutant, hunt
from support_crash_scenarios import SCENARIOS, Scenario, scenario_named

from ckptrt.storage.layout import CommitId

# What a bug is found by in well under a second; `make crash` plants the others too.
_QUICK = [
    m for m in MUTANTS if m.probes[0] not in ("two nodes", "unlinks in prune by hand") and "kill" not in m.probes[0]
]


# --- the sample


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_whatever_a_power_cut_leaves_is_as_promised(scenario: Scenario) -> None:
    explorer = Explorer(limit=4)
    for form in random.Random(scenario.name).sample(range(min(scenario.forms, 50)), min(scenario.forms, 2)):
        explorer.explore(scenario, form)
    assert not explorer.findings, "\n".join(map(str, explorer.findings))
    assert explorer.states > 2


@pytest.mark.parametrize("name", FAULT_SCENARIOS)
def test_whichever_call_fails_promises_hold_and_the_next_save_works(name: str) -> None:
    loop = FaultLoop()
    loop.run(scenario_named(name), tuple(random.Random(name).sample(FAULTS, 3)), stride=41, offset=len(name))
    assert not loop.findings, "\n".join(map(str, loop.findings))
    assert loop.calls > 5


def test_changed_bytes_are_reported_and_never_loaded() -> None:
    count, findings = damage_loop(flips=4)
    assert not findings, "\n".join(map(str, findings))
    assert count > 100


@pytest.mark.parametrize("mutant", _QUICK, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    assert hunt(mutant, everywhere=False) is not None


def test_a_finding_says_what_to_look_at() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "commit before manifest")
    found = hunt(mutant, everywhere=False)
    assert found is not None and found.invariant == "I2"
    assert str(found).startswith("save #0, after link s000000010.i00000001.json (all kept): I2:")


def test_a_task_of_each_kind_tells_its_result() -> None:
    states = run_task(Task(what="states", name="new run", limit=2))
    assert states.count > 5 and not states.findings
    assert run_task(Task(what="mutant", name="prune leaves unfinished files")).caught_by == "I8  new run"
    assert run_task(Task(what="calls", name="new run", limit=40)).count > 5
    assert run_task(Task(what="damage", name="damage", limit=0)).count > 50


# --- the model


def op(kind: str, **fields: object) -> Op:
    return Op(kind=kind, **fields)  # type: ignore[arg-type]


A_FILE = [
    op("create", inode=2, folder=1, name="x"),
    op("write", inode=2, data=b"a" * 6000),
    op("fsync", inode=2),
    op("link", inode=2, folder=1, name="y"),
    op("unlink", inode=2, folder=1, name="x"),
    op("fsync_dir", inode=1),
]


def states_at(log: list[Op], length: int) -> list[dict[str, bytes | None]]:
    loose = dict(crash_points(log))[length]
    return [build(log[:length], choice) for choice in choices(log[:length], loose, random.Random(1), 10_000)]


def test_before_any_sync_bytes_and_names_come_and_go_on_their_own() -> None:
    found = states_at(A_FILE, 2)
    contents = {state.get("x", b"no name") for state in found}
    assert {b"no name", b"", b"a" * 6000, bytes(6000), b"a" * 512, b"a" * 4096} <= contents
    assert b"a" * 512 + bytes(5488) in contents and bytes(512) + b"a" * 5488 in contents
    assert bytes(4096) + b"a" * 1904 in contents and b"a" * 4096 + bytes(1904) in contents


def test_a_synced_file_keeps_its_bytes_but_not_its_name() -> None:
    assert {state.get("x", b"no name") for state in states_at(A_FILE, 3)} == {b"no name", b"a" * 6000}


def test_names_are_made_durable_in_any_order_by_their_folder_alone() -> None:
    before = {tuple(sorted(state)) for state in states_at(A_FILE, 5)}
    assert before == {(), ("x",), ("y",), ("x", "y")}
    assert states_at(A_FILE, 6) == [{"y": b"a" * 6000}]


def test_a_failed_sync_loses_bytes_for_good() -> None:
    log = [*A_FILE[:2], op("fsync_failed", inode=2), op("fsync", inode=2), op("fsync_dir", inode=1)]
    assert b"" in {state["x"] for state in states_at(log, 5)}
    later = [*log, op("write", inode=2, data=b"b", offset=0), op("fsync", inode=2)]
    assert {state["x"][:1] for state in states_at(later, 7) if state["x"]} == {b"b"}


def test_what_lies_in_a_folder_without_a_durable_name_is_gone() -> None:
    log = [
        op("mkdir", inode=2, folder=1, name="d"),
        op("create", inode=3, folder=2, name="x"),
        op("fsync", inode=3),
        op("fsync_dir", inode=2),
    ]
    assert {tuple(sorted(state)) for state in states_at(log, 4)} == {("d", "d/x"), ()}


def test_a_rename_replaces_or_is_not_there_yet() -> None:
    log = [
        op("create", inode=2, folder=1, name="x"),
        op("create", inode=3, folder=1, name="y"),
        op("fsync_dir", inode=1),
        op("rename", inode=3, folder=1, name="x", source="y"),
    ]
    assert {tuple(sorted(state)) for state in states_at(log, 4)} == {("x",), ("x", "y")}


def test_choices_are_bounded_and_the_simple_ones_come_first() -> None:
    log = [op("create", inode=i, folder=1, name=str(i)) for i in range(2, 14)]
    found = list(choices(log, tuple(range(12)), random.Random(1), 60))
    assert len(found) <= 62 and found[0] == {} and len(found[1]) == 12
    assert all(len(choice) in (1, 11) for choice in found[2:26])


def test_equal_trees_are_known_whatever_their_temporary_files_are_called() -> None:
    one: Tree = {"a": None, "a/.tmp-1": b"x", "a/y": b"z"}
    others: list[Tree] = [{**one, "a/y": b"Z"}, {"a": None}, {"a": b""}, {}]
    assert digest(one) == digest({"a": None, "a/.tmp-2": b"x", "a/y": b"z"})
    assert len({digest(tree) for tree in (one, *others)}) == 5


def test_the_log_done_again_is_the_disk_as_it_was(tmp_path: Path) -> None:
    """The model's state with nothing lost is what the real calls made, for every scenario's end."""
    for scenario in SCENARIOS:
        base = str(tmp_path / scenario.name)
        fs = WatchedFs(base)
        play(scenario, Job(fs), 5)
        tree = build(fs.log, {})
        real = {}
        for folder, names, files in os.walk(base):
            where = "" if folder == base else folder[len(base) + 1 :] + "/"
            real.update(dict.fromkeys((where + name for name in names), None))
            real.update({where + name: Path(folder, name).read_bytes() for name in files})
        assert tree == real, scenario.name


# --- the judge


def test_the_judge_holds_a_job_to_its_word(tmp_path: Path) -> None:
    fs = WatchedFs(str(tmp_path / "live"))
    play(scenario_named("save"), Job(fs), 0)
    materialise(build(fs.log, {}), str(tmp_path / "a"))
    ledger = ledger_of(fs.log)
    judge(str(tmp_path / "a/runs/a"), ledger, go_on=False)
    ledger.committed[CommitId(30, 1)] = "0a"
    with pytest.raises(Violation, match=r"I1: CommitId\(step=30"):
        judge(str(tmp_path / "a/runs/a"), ledger, go_on=False)
    del ledger.committed[CommitId(30, 1)], ledger.begun[CommitId(20, 1)]
    with pytest.raises(Violation, match="I2: nobody took"):
        judge(str(tmp_path / "a/runs/a"), ledger, go_on=False)


def test_the_naive_path_on_the_example_of_the_format_page() -> None:
    fences = {3: None, 4: (900, 3), 5: (1000, 4)}
    names = [(800, 3), (900, 3), (950, 3), (1000, 4), (1100, 4), (1050, 5)]
    assert naive_path(fences, [CommitId(*name) for name in names]) == [(1050, 5), (1000, 4), (900, 3), (800, 3)]


# --- the file system


def test_a_dead_process_does_nothing_more(tmp_path: Path) -> None:
    fs = WatchedFs(str(tmp_path))

    def kill(call: str, number: int) -> None:
        if number == 3:
            raise Killed(call)

    fs.on_call = kill
    with pytest.raises(Killed):
        Job(fs).create()
    left, calls = sorted(tmp_path.rglob("*")), fs.num_calls
    with pytest.raises(Killed):
        fs.mkdir(str(tmp_path / "x"))
    assert sorted(tmp_path.rglob("*")) == left and fs.num_calls == calls == 3
    fs.revive()
    fs.on_call = lambda call, number: None
    fs.mkdir(str(tmp_path / "x"))


def test_turns_are_drawn_from_the_seed() -> None:
    def order(seed: int) -> str:
        turns, said = Turns(seed), []

        def program(name: str) -> None:
            for _ in range(10):
                said.append(name)
                turns.step()

        turns.run(lambda: program("a"), lambda: program("b"))
        return "".join(said)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(20)}) > 10
