"""What happens next to a set of workers: events in, a new state and actions out. Pure.

    opening   the incarnation is being raised, the resume point chosen, the fence written
    running   the workers of this incarnation have been asked for
    draining  they were asked to save at one step and end: because of a signal, or to go on with other nodes
    stopping  one has failed, or the job is to end; waiting until the last one has exited
    judging   all have exited; what they left behind is being read, to find the cause
    done      the exit code is known

One table, `TABLE`, says what each event does in each phase; a pair that isn't there is a bug and raises.
The first failure is the cause, all later ones are its consequences. Restarts are limited three times: in all, without
a newly committed step, and by the same error twice before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

__all__ = [
    "TABLE", "Action", "Begin", "Budget", "Committed", "DrainTimedOut", "Event", "Evicted", "FirstStep", "Judged",
    "Judgement", "OpenFailed", "Opened", "Phase", "Regroup", "RunOpened", "State", "StopRequested",
    "WorkerDrained", "WorkerFailed", "WorkerFinished", "WorkersHung", "WorkersUp", "step",
]  # fmt: skip

EXIT_FAILED = 1
EXIT_LOCKED = 11
EXIT_BUDGET = 20
EXIT_DRAINED = 75
_SIGNAL_EXIT = 128
_EARLY_S = 30.0


class Phase(Enum):
    NEW = "new"
    OPENING = "opening"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    JUDGING = "judging"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """max_restarts: in all. max_no_progress: in a row without a newly committed step; not counted for a job that never
    opened a run, since nobody could commit there. drained_exit: what a job that was drained ends with."""

    max_restarts: int
    max_no_progress: int
    drained_exit: int = EXIT_DRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that a decision depends on. `num_workers` is of all nodes; `exited` counts those of this incarnation."""

    budget: Budget
    num_workers: int
    phase: Phase = Phase.NEW
    incarnation: int = 0
    restarts: int = 0
    no_progress: int = 0
    exited: int = 0
    drained: int = 0  # how many of them had saved and ended as they were asked to
    signum: int = 0  # what asked for the drain
    regroup: bool = False  # they end to be started again, with other nodes
    failed: bool = False  # a worker failed, and not because the job was being stopped
    has_run: bool = False  # the workers use a run, so steps can be committed
    committed_step: int = -1  # newest that was ever reported
    progressed: bool = False  # a new step was committed in this incarnation
    stepped: bool = False  # all workers of this incarnation got through a step
    last_error: str = ""  # the cause of the last failure before a first step
    exit_code: int | None = None  # set as soon as the job is to end


# --- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The job starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The incarnation is raised and, if there is a run, fenced. It is for so many workers."""

    incarnation: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFailed:
    """It can't be, for good."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened:
    """A worker named the run, and it was opened and fenced while the workers wait. A code instead if it wasn't."""

    incarnation: int = 0
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersUp:
    """All workers were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished:
    """A worker exited with 0."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker exited with another status, or died of a signal."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersHung:
    """They live, and get no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDrained:
    """A worker has saved its last step, which is committed, and ended because it was asked to."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """There are nodes to take in or to let go: the workers shall end at a step, and others go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainTimedOut:
    """The workers have not ended in the time that they were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """All workers have got through their first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What failed. error: a fingerprint of what a program does wrong each time; empty if it came from outside.

    lived_s: how long the workers had run.
    """

    error: str
    lived_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A signal asks the job to end. drain: with a checkpoint of its last step, if the workers can save one."""

    signum: int
    drain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """Another job has taken over; this one must not go on."""


Event = (
    Begin
    | Opened
    | OpenFailed
    | RunOpened
    | WorkersUp
    | WorkerFinished
    | WorkerFailed
    | WorkersHung
    | WorkerDrained
    | Regroup
    | DrainTimedOut
    | FirstStep
    | Committed
    | Judged
    | StopRequested
    | Evicted
)


# --- actions


class Action(Enum):
    """What the supervisor is to do. The numbers that it needs stand in the new state."""

    OPEN = "open"  # raise the incarnation, choose the resume point, write the fence
    START = "start"  # fresh store, then the workers
    STOP = "stop"  # SIGTERM, later SIGKILL, because of a failure or an eviction
    DRAIN = "drain"  # have the workers agree on a step, save there and end
    FORWARD = "forward"  # the signal that was received, later SIGKILL
    KILL = "kill"  # SIGKILL now
    JUDGE = "judge"  # find the cause, report it
    RESTART = "restart"  # say that the job starts again; OPEN follows
    GIVE_UP_BUDGET = "give-up-budget"
    GIVE_UP_PROGRESS = "give-up-progress"
    GIVE_UP_ERROR = "give-up-error"
    FINISH = "finish"  # the workers are gone, exit_code is set


Judgement = tuple[State, tuple[Action, ...]]


# --- transitions


def _ignore(state: State, event: Event) -> Judgement:
    return state, ()


def _begin(state: State, event: Event) -> Judgement:
    return replace(state, phase=Phase.OPENING), (Action.OPEN,)


def _opened(state: State, event: Event) -> Judgement:
    assert isinstance(event, Opened)
    if state.exit_code is not None:
        return replace(state, phase=Phase.DONE), (Action.FINISH,)
    fresh = replace(
        state,
        phase=Phase.RUNNING,
        incarnation=event.incarnation,
        num_workers=event.num_workers,
        exited=0,
        drained=0,
        regroup=False,
        failed=False,
        progressed=False,
        stepped=False,
    )
    return fresh, (Action.START,)


def _open_failed(state: State, event: Event) -> Judgement:
    assert isinstance(event, OpenFailed)
    code = event.exit_code if state.exit_code is None else state.exit_code
    return replace(state, phase=Phase.DONE, exit_code=code), (Action.FINISH,)


def _run_opened(state: State, event: Event) -> Judgement:
    assert isinstance(event, RunOpened)
    if event.exit_code:
        # The workers hear of it as an exception. If they end by it, starting them again would change nothing.
        return replace(state, exit_code=state.exit_code or event.exit_code), ()
    code = None if state.phase is Phase.RUNNING else state.exit_code
    return replace(state, has_run=True, incarnation=event.incarnation, exit_code=code), ()


def _run_opened_late(state: State, event: Event) -> Judgement:
    """The set that asked has ended meanwhile. The next one asks again if this one was refused."""
    assert isinstance(event, RunOpened)
    return (state if event.exit_code else replace(state, has_run=True)), ()


def _finished(state: State, event: Event) -> Judgement:
    return _exited(state)


def _failed(state: State, event: Event) -> Judgement:
    if state.phase is Phase.STOPPING:
        return _exited(state)
    new, actions = _exited(replace(state, failed=True))
    if new.phase is Phase.RUNNING:
        return replace(new, phase=Phase.STOPPING), (Action.STOP,)
    return new, actions


def _hung(state: State, event: Event) -> Judgement:
    return replace(state, failed=True, phase=Phase.STOPPING), (Action.STOP,)


def _drained(state: State, event: Event) -> Judgement:
    return _exited(replace(state, drained=state.drained + 1))


def _failed_in_drain(state: State, event: Event) -> Judgement:
    """It isn't started again if somebody wants the job to end."""
    if state.regroup:
        new, actions = _exited(replace(state, failed=True))
        return (replace(new, phase=Phase.STOPPING), (Action.STOP,)) if new.phase is Phase.DRAINING else (new, actions)
    new, actions = _exited(replace(state, failed=True, exit_code=_SIGNAL_EXIT + state.signum))
    if new.phase is Phase.DRAINING:
        return replace(new, phase=Phase.STOPPING), (Action.STOP,)
    return new, actions


def _exited(state: State) -> Judgement:
    state = replace(state, exited=state.exited + 1)
    if state.exited < state.num_workers:
        return state, ()
    if state.failed:
        return replace(state, phase=Phase.JUDGING), (Action.JUDGE,)
    if state.regroup and state.exit_code is None and (state.drained or state.phase is Phase.STOPPING):
        return replace(state, phase=Phase.OPENING), (Action.OPEN,)
    code = 0 if state.phase in (Phase.RUNNING, Phase.DRAINING) else state.exit_code
    if state.drained:
        code = state.budget.drained_exit
    return replace(state, phase=Phase.DONE, exit_code=code), (Action.FINISH,)


def _first_step(state: State, event: Event) -> Judgement:
    return replace(state, stepped=True, last_error=""), ()


def _committed(state: State, event: Event) -> Judgement:
    assert isinstance(event, Committed)
    if event.step <= state.committed_step:
        return replace(state, has_run=True), ()
    return replace(state, has_run=True, committed_step=event.step, progressed=True), ()


def _judged(state: State, event: Event) -> Judgement:
    """All have exited and the cause is known: end, give up, or start again."""
    assert isinstance(event, Judged)
    if state.exit_code is not None:
        return replace(state, phase=Phase.DONE), (Action.FINISH,)
    budget = state.budget
    no_progress = 0 if state.progressed or not state.has_run else state.no_progress + 1
    # A job that doesn't tell its steps has to be judged by its age.
    early_death = not (state.stepped or state.progressed) if state.has_run else event.lived_s < _EARLY_S
    early = event.error if early_death else ""
    if budget.max_restarts == 0:
        return _give_up(state, EXIT_FAILED, None)
    if early and early == state.last_error:
        return _give_up(state, EXIT_FAILED, Action.GIVE_UP_ERROR)
    if state.restarts >= budget.max_restarts:
        return _give_up(state, EXIT_BUDGET, Action.GIVE_UP_BUDGET)
    if no_progress > budget.max_no_progress:
        return _give_up(state, EXIT_BUDGET, Action.GIVE_UP_PROGRESS)
    again = replace(state, phase=Phase.OPENING, restarts=state.restarts + 1, no_progress=no_progress, last_error=early)
    return again, (Action.RESTART, Action.OPEN)


def _give_up(state: State, exit_code: int, why: Action | None) -> Judgement:
    actions = (Action.FINISH,) if why is None else (why, Action.FINISH)
    return replace(state, phase=Phase.DONE, exit_code=exit_code), actions


def _stop(state: State, event: Event) -> Judgement:
    assert isinstance(event, StopRequested)
    if event.drain and (state.has_run or state.stepped):
        return replace(state, phase=Phase.DRAINING, signum=event.signum), (Action.DRAIN,)
    return replace(state, phase=Phase.STOPPING, exit_code=_SIGNAL_EXIT + event.signum), (Action.FORWARD,)


def _regroup(state: State, event: Event) -> Judgement:
    """Only workers that can save are worth being stopped for it."""
    if not state.has_run:
        return state, ()
    return replace(state, phase=Phase.DRAINING, regroup=True), (Action.DRAIN,)


def _stop_draining(state: State, event: Event) -> Judgement:
    """Somebody is impatient: the workers get the signal itself now. Those that are to be regrouped just don't go on."""
    assert isinstance(event, StopRequested)
    if state.regroup:
        return replace(state, regroup=False, signum=event.signum), ()
    return replace(state, phase=Phase.STOPPING, exit_code=_SIGNAL_EXIT + event.signum), (Action.FORWARD,)


def _drain_timed_out(state: State, event: Event) -> Judgement:
    if state.regroup:
        return replace(state, phase=Phase.STOPPING), (Action.STOP,)
    return replace(state, phase=Phase.STOPPING, exit_code=_SIGNAL_EXIT + state.signum), (Action.FORWARD,)


def _stop_again(state: State, event: Event) -> Judgement:
    """Somebody is impatient, or the job is to end instead of starting again."""
    assert isinstance(event, StopRequested)
    if state.exit_code is not None:
        return state, (Action.KILL,)
    return replace(state, exit_code=_SIGNAL_EXIT + event.signum), ()


def _stop_later(state: State, event: Event) -> Judgement:
    """No worker runs; the phase ends by itself, and the job with it."""
    assert isinstance(event, StopRequested)
    return replace(state, exit_code=_SIGNAL_EXIT + event.signum), ()


def _stop_now(state: State, event: Event) -> Judgement:
    assert isinstance(event, StopRequested)
    return replace(state, phase=Phase.DONE, exit_code=_SIGNAL_EXIT + event.signum), (Action.FINISH,)


def _evicted(state: State, event: Event) -> Judgement:
    return replace(state, phase=Phase.STOPPING, exit_code=EXIT_LOCKED), (Action.STOP,)


def _evicted_later(state: State, event: Event) -> Judgement:
    return replace(state, exit_code=EXIT_LOCKED), ()


Handler = Callable[[State, Event], Judgement]

TABLE: Mapping[tuple[Phase, type], Handler] = {
    (Phase.NEW, Begin): _begin,
    (Phase.NEW, StopRequested): _stop_now,
    (Phase.OPENING, Opened): _opened,
    (Phase.OPENING, OpenFailed): _open_failed,
    (Phase.OPENING, RunOpened): _run_opened_late,
    (Phase.OPENING, Committed): _committed,
    (Phase.OPENING, StopRequested): _stop_later,
    (Phase.OPENING, Regroup): _ignore,
    (Phase.OPENING, Evicted): _evicted_later,
    (Phase.RUNNING, RunOpened): _run_opened,
    (Phase.RUNNING, WorkersUp): _ignore,
    (Phase.RUNNING, WorkerFinished): _finished,
    (Phase.RUNNING, WorkerFailed): _failed,
    (Phase.RUNNING, WorkersHung): _hung,
    (Phase.RUNNING, FirstStep): _first_step,
    (Phase.RUNNING, Committed): _committed,
    (Phase.RUNNING, StopRequested): _stop,
    (Phase.RUNNING, Regroup): _regroup,
    (Phase.RUNNING, Evicted): _evicted,
    (Phase.DRAINING, RunOpened): _run_opened,
    (Phase.DRAINING, WorkersUp): _ignore,
    (Phase.DRAINING, WorkerFinished): _finished,
    (Phase.DRAINING, WorkerDrained): _drained,
    (Phase.DRAINING, WorkerFailed): _failed_in_drain,
    (Phase.DRAINING, FirstStep): _first_step,
    (Phase.DRAINING, Committed): _committed,
    (Phase.DRAINING, StopRequested): _stop_draining,
    (Phase.DRAINING, DrainTimedOut): _drain_timed_out,
    (Phase.DRAINING, Regroup): _ignore,
    (Phase.DRAINING, Evicted): _evicted,
    (Phase.STOPPING, RunOpened): _run_opened,
    (Phase.STOPPING, WorkersUp): _ignore,
    (Phase.STOPPING, WorkerFinished): _finished,
    (Phase.STOPPING, WorkerDrained): _finished,
    (Phase.STOPPING, WorkerFailed): _failed,
    (Phase.STOPPING, FirstStep): _ignore,
    (Phase.STOPPING, Committed): _committed,
    (Phase.STOPPING, StopRequested): _stop_again,
    (Phase.STOPPING, Regroup): _ignore,
    (Phase.STOPPING, Evicted): _evicted_later,
    (Phase.JUDGING, RunOpened): _run_opened_late,
    (Phase.JUDGING, Judged): _judged,
    (Phase.JUDGING, Committed): _committed,
    (Phase.JUDGING, StopRequested): _stop_later,
    (Phase.JUDGING, Regroup): _ignore,
    (Phase.JUDGING, Evicted): _evicted_later,
    (Phase.DONE, Committed): _ignore,
    (Phase.DONE, RunOpened): _ignore,
    (Phase.DONE, StopRequested): _ignore,
    (Phase.DONE, Regroup): _ignore,
    (Phase.DONE, Evicted): _ignore,
}


def step(state: State, event: Event) -> Judgement:
    """The state after an event and what has to be done, in order."""
    handler = TABLE.get((state.phase, type(event)))
    if handler is None:
        raise AssertionError(f"{type(event).__name__} can't happen in phase {state.phase.value}")
    return handler(state, event)
