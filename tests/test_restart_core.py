"""What happens after a failure, as transcripts; the table of transitions; the choice of the step to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from support_transcript import Step, check_transcript

from ckptrt.agents import restart
from ckptrt.agents.restart import Budget, Event, Phase, State
from ckptrt.agents.resume import Resume, Snapshot, choose_resume
from ckptrt.agents.verdict import Exit, judge

TRANSCRIPTS = Path(__file__).parent / "transcripts"


def _event(step: Step, workers: int) -> Event:
    number = {key: int(value) for key, value in step.options.items() if value.isdigit()}
    events: dict[str, Event] = {
        "begin": restart.Begin(),
        "opened": restart.Opened(incarnation=number.get("incarnation", 0), num_workers=number.get("workers", workers)),
        "open-failed": restart.OpenFailed(exit_code=number.get("code", 0)),
        "run-opened": restart.RunOpened(incarnation=number.get("incarnation", 0), exit_code=number.get("code", 0)),
        "up": restart.WorkersUp(),
        "finished": restart.WorkerFinished(rank=number.get("rank", 0)),
        "failed": restart.WorkerFailed(rank=number.get("rank", 0)),
        "drained": restart.WorkerDrained(rank=number.get("rank", 0)),
        "drain-timed-out": restart.DrainTimedOut(),
        "first-step": restart.FirstStep(),
        "committed": restart.Committed(step=number.get("step", 0)),
        "judged": restart.Judged(error=step.options.get("error", ""), lived_s=float(step.options.get("lived", 0))),
        "stop": restart.StopRequested(signum=number.get("signum", 0), drain="drain" in step.options),
        "regroup": restart.Regroup(),
        "evicted": restart.Evicted(),
    }
    return events[step.command]


def test_decisions() -> None:
    state = State(budget=Budget(max_restarts=0, max_no_progress=0), num_workers=1)

    def run(step: Step) -> str:
        nonlocal state
        actions: tuple[restart.Action, ...] = ()
        if step.command == "new":
            options = step.options
            budget = Budget(max_restarts=int(options["max-restarts"]), max_no_progress=int(options["max-no-progress"]))
            state = State(budget=budget, num_workers=int(options["workers"]))
        else:
            state, actions = restart.step(state, _event(step, state.num_workers))
        told = f"{state.phase.value} restarts={state.restarts} no-progress={state.no_progress}"
        if state.exit_code is not None:
            told += f" exit={state.exit_code}"
        return "\n".join([*(f"-> {action.value}" for action in actions), told])

    check_transcript(TRANSCRIPTS / "restart.txt", run)


def test_every_phase_says_what_a_stop_does() -> None:
    """A signal may come at any time, so no phase may be without an answer."""
    assert {phase for phase, event in restart.TABLE if event is restart.StopRequested} == set(Phase)


def test_every_event_has_a_place() -> None:
    assert {event for _phase, event in restart.TABLE} == set(get_args(Event))


def test_an_impossible_event_is_a_bug() -> None:
    state = State(budget=Budget(max_restarts=0, max_no_progress=0), num_workers=1)
    with pytest.raises(AssertionError, match="WorkersUp can't happen in phase new"):
        restart.step(state, restart.WorkersUp())


def snapshot(step: int, incarnation: int, world_size: int = 2) -> Snapshot:
    return Snapshot(step=step, incarnation=incarnation, world_size=world_size)


# fences: 1 fresh, 2 from step 100 of 1, 4 from step 150 of 2; 3 was cut off.
FENCES: dict[int, tuple[int, int] | None] = {1: None, 2: (100, 1), 3: (120, 2), 4: (150, 2)}


@pytest.mark.parametrize(
    ("memory", "committed", "expected"),
    [
        ([], None, None),
        ([], (90, 1), "90.1.stored"),
        ([snapshot(160, 4)], (150, 2), "160.4.memory"),
        ([snapshot(150, 2)], (150, 2), "150.2.memory"),  # as new as the commit, and nearer
        ([snapshot(140, 2)], (150, 2), "150.2.stored"),
        ([snapshot(160, 2)], (150, 2), "150.2.stored"),  # beyond where 4 went on from
        ([snapshot(130, 3)], (110, 2), "110.2.stored"),  # 3 was cut off
        ([snapshot(101, 1)], None, None),  # 2 went on from step 100
        ([snapshot(100, 1)], None, "100.1.memory"),
        ([snapshot(160, 4, world_size=4)], (150, 2), "150.2.stored"),  # whole for another world
        ([snapshot(160, 4), snapshot(170, 4)], (150, 2), "170.4.memory"),
        ([snapshot(160, 9)], None, None),  # no fence of that number
    ],
)
def test_where_to_resume(memory: list[Snapshot], committed: tuple[int, int] | None, expected: str | None) -> None:
    chosen = choose_resume(memory=memory, committed=committed, fences=FENCES, world_size=2)
    assert (str(chosen) if chosen else None) == expected


def test_limits_only_shrink_along_the_path() -> None:
    fences = {1: None, 2: (100, 1), 3: (50, 2)}  # 3 went back to before 2's start: nothing of 1 beyond 50 counts
    assert choose_resume(memory=[snapshot(60, 1)], committed=None, fences=fences, world_size=2) is None
    chosen = choose_resume(memory=[snapshot(50, 1)], committed=None, fences=fences, world_size=2)
    assert chosen == Resume(step=50, incarnation=1, tier="memory")


PEER_GONE = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:11173: Connection reset by peer"


def ended(
    rank: int, code: int, at_s: float, *, error: str = "", error_at_s: float | None = None, by_us: bool = False
) -> Exit:
    return Exit(rank=rank, pid=100 + rank, code=code, at_s=at_s, error=error, error_at_s=error_at_s, by_us=by_us)


@pytest.mark.parametrize(
    ("exits", "cause", "consequences", "stopped"),
    [
        # the plain case
        ([ended(1, -9, 1.0), ended(0, -15, 1.1, by_us=True)], 1, [], [0]),
        # the echo of a kill is seen before the kill itself
        ([ended(0, 1, 1.2, error=PEER_GONE, error_at_s=0.9), ended(1, -9, 1.0)], 1, [0], []),
        ([ended(0, -15, 1.2, error=PEER_GONE, error_at_s=0.9, by_us=True), ended(1, -9, 1.0)], 1, [0], []),
        # both are killed at once
        ([ended(1, -9, 1.01), ended(0, -9, 1.0)], 0, [1], []),
        # the culprit takes long to exit, and is stopped while at it: its note tells
        ([ended(0, 1, 1.5, error="E: b", error_at_s=1.4), ended(1, -15, 1.6, error="E: a", error_at_s=1.0, by_us=True)],
         1, [0], []),
        # an echo alone is still the best that is known
        ([ended(0, 1, 1.0, error=PEER_GONE, error_at_s=0.9), ended(1, -15, 1.1, by_us=True)], 0, [], [1]),
    ],
)  # fmt: skip
def test_cause_and_consequences(exits: list[Exit], cause: int, consequences: list[int], stopped: list[int]) -> None:
    verdict = judge(exits)
    assert verdict.cause.rank == cause
    assert [other.rank for other in verdict.consequences] == consequences
    assert [other.rank for other in verdict.stopped] == stopped


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ended(0, 1, 0, error="OSError: port 1234 is taken"), ended(1, 1, 5, error="OSError: port 777 is taken"), True),
        (ended(0, 1, 0, error="ValueError: a"), ended(0, 1, 0, error="ValueError: b"), False),
        (ended(0, -11, 0), ended(0, -11, 0), True),
        (ended(0, -11, 0), ended(0, -6, 0), False),
        (ended(0, 3, 0), ended(0, 4, 0), False),
        # stopped by us while it was still printing its exception
        (ended(0, 1, 2, error="E", error_at_s=1.0), ended(0, -15, 2, error="E", error_at_s=1.0, by_us=True), True),
    ],
)
def test_fingerprints(one: Exit, other: Exit, same: bool) -> None:
    first, second = judge([one]).fingerprint, judge([other]).fingerprint
    assert first and second
    assert (first == second) is same


@pytest.mark.parametrize("exited", [ended(0, -9, 0), ended(0, -15, 0), ended(0, 1, 0, error=PEER_GONE, error_at_s=0.0)])
def test_what_comes_from_outside_has_no_fingerprint(exited: Exit) -> None:
    assert judge([exited]).fingerprint == ""
