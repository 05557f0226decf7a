"""What jobs do while the power may go: each scenario is a short history on a watched disk.

Those with a `number` come in many forms: which call a process is killed at, or which turns two processes take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from support_crash_job import Job, save_on
from support_crash_log import Killed, Turns

from ckptrt.clock import FakeClock
from ckptrt.errors import Error, ExistsError, FencedError, PersistError, StorageError
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.gather import Attempt, RunWriter, _Pending
from ckptrt.storage.layout import CommitId, data_dir, receipt_name
from ckptrt.storage.records import Owner, Parent
from ckptrt.storage.tiers.memory import MemoryTier

__all__ = ["SCENARIOS", "Scenario", "scenario_named", "source_run"]

_POLLS_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """play: runs the history, `number` choosing its form. forms: how many there are for a thorough run.

    kills: every form is the same up to a kill, so that states before it needn't be looked at again.
    """

    name: str
    play: Callable[[Job, int], None]
    forms: int = 1
    kills: bool = False


def _begin(job: Job) -> None:
    job.create()
    job.fence(1)


def _new_run(job: Job, number: int) -> None:
    _begin(job)


def _save(job: Job, number: int) -> None:
    _begin(job)
    job.save(10)
    job.save(20)
    job.restore()


def _write_only(job: Job, step: int) -> None:
    """Shard files and receipts that nobody will commit."""
    if ("fenced", 1) in (op.note for op in job.fs.log):
        for rank in (0, 1):
            job.write(CommitId(step, 1), rank)


def _large_save(job: Job, number: int) -> None:
    """Shard files that are large enough for reserved blocks and writes past the page cache."""
    _begin(job)
    job.restart(columns=40_000)
    job.save(10)


def _resave(job: Job, number: int) -> None:
    """Incarnation 1 dies before its second commit; 2 goes on from the first and takes that step again."""
    _begin(job)
    job.save(10)
    job.attempt(lambda: _write_only(job, 20))
    job.restart()
    job.fence(2, (10, 1))
    job.save(20, 2, "0c")
    job.save(30, 2, "0c")


def _zombie(job: Job, number: int) -> None:
    """A coordinator that looked at the fences, slept through a restart, and commits: no error, and no checkpoint."""
    _begin(job)
    job.save(10)
    zombie = Job(job.fs, job.lenient)
    receipts = {}
    job.attempt(lambda: receipts.update({rank: zombie.write(CommitId(20, 1), rank) for rank in (0, 1)}))
    job.restart()
    job.fence(2, (10, 1))
    zombie.catalog.newest_incarnation = lambda: 1  # type: ignore[method-assign]  # what it saw before
    note, job.fs.note = job.fs.note, lambda *_: None  # type: ignore[method-assign]  # its word isn't taken for a promise
    try:
        if len(receipts) == 2:
            job.attempt(lambda: zombie.publish(CommitId(20, 1), receipts))
    finally:
        job.fs.note = note  # type: ignore[method-assign]
    job.save(20, 2, "0c")


def _deposed(job: Job, number: int) -> None:
    """A writer that is fenced and looks: it is refused."""
    _begin(job)
    job.save(10)
    old = Job(job.fs)
    job.restart()
    if job.fence(2, (10, 1)):
        try:
            old.save(20)
        except FencedError:
            job.fs.note("refused")
        except Error as error:
            job.errors.append(error)
    job.save(20, 2, "0c")


def _prune_committed(job: Job, number: int) -> None:
    _begin(job)
    for step in (10, 20, 30):
        job.save(step)
        job.prune(keeps=((step, 1),))


def _prune_by_hand(job: Job, number: int) -> None:
    """Three checkpoints, an attempt that never was committed, and a branch that was left."""
    _begin(job)
    for step in (10, 20):
        job.save(step)
    job.attempt(lambda: _write_only(job, 25))
    job.save(30)
    job.restart()
    job.fs.note("rollback", CommitId(30, 1))
    job.fence(2, (20, 1))
    job.prune_by_hand(2, keeps=((20, 1), (10, 1)))
    job.save(40, 2, "0c")
    job.prune_by_hand(keeps=((40, 2),))


def _fallback(job: Job, number: int) -> None:
    """The newest checkpoint is damaged; the job goes on from the one before and takes the step again."""
    _begin(job)
    job.save(10)
    if job.save(20):
        job.attempt(lambda: job.damage(f"{data_dir(CommitId(20, 1), '0a')}r00001.safetensors", CommitId(20, 1)))
    job.restart()
    job.restore()
    job.fence(2, (10, 1))
    job.save(20, 2, "0c")
    job.restore()


def _stale_receipt(job: Job, number: int) -> None:
    """A receipt of another step has got into the folder: a save there fails, or is right."""
    _begin(job)
    job.save(10)
    there = data_dir(CommitId(10, 1), "0a") + receipt_name(1)
    stale = data_dir(CommitId(20, 1), "0a") + receipt_name(1)
    lenient, job.lenient = job.lenient, True
    job.attempt(lambda: job.tier.create(stale, job.tier.read(there)))
    job.save(20)
    job.errors.clear()
    job.lenient = lenient
    job.save(30)


def _borrow(job: Job, number: int) -> None:
    """The frozen part stays in the first checkpoint's file while that commit goes, over a restart too."""
    job.borrows = True
    _begin(job)
    for step in (10, 20, 30):
        job.save(step)
        job.prune(keeps=((step, 1),))
    job.restart()
    job.fence(2, (30, 1))
    job.save(40, 2, "0c")
    job.restore()
    job.prune_by_hand(keeps=((40, 2),))


def _base_goes(job: Job, number: int) -> None:
    """What a save has borrowed from is pruned before it commits: it doesn't."""
    job.borrows = True
    _begin(job)
    job.save(10)
    late, receipts = CommitId(20, 1), {}
    job.attempt(lambda: receipts.update({rank: job.write(late, rank, "0c") for rank in (0, 1)}))
    other = Job(job.fs, job.lenient)
    other.save(15)
    other.prune(keeps=((15, 1),))
    try:
        if len(receipts) == 2:
            job.publish(late, receipts, "0c")
    except PersistError:
        job.fs.note("refused")
    except Error as error:
        if not job.lenient:
            raise
        job.errors.append(error)
    job.errors += other.errors
    job.restart()
    job.save(30)


def _pin(job: Job, number: int) -> None:
    """A checkpoint stays as long as its pin, whatever the rules say."""
    _begin(job)
    for step in (10, 20, 30):
        job.save(step)
    job.pin(CommitId(10, 1))
    job.prune(keeps=((30, 1),))
    job.unpin(CommitId(10, 1))
    job.prune_by_hand(keeps=((30, 1),))


def source_run(went_on_from: int = 20) -> Catalog:
    """Another place's run: 10, 20 and, in a second incarnation that borrows from 10, step 30."""
    tier = MemoryTier()
    catalog = Catalog(tier, FakeClock())
    catalog.create_run("crash")
    owner = Owner(host="node-a", pid=4711, user="ada")
    catalog.write_fence(1, None, 2, owner)
    save_on(tier, catalog, CommitId(10, 1), "0a")
    save_on(tier, catalog, CommitId(20, 1), "0a")
    base = catalog.open_checkpoint(CommitId(10, 1))
    catalog.write_fence(2, Parent(step=went_on_from, incarnation=1), 2, owner)
    save_on(tier, catalog, CommitId(30, 2), "0a", {rank: base.receipt(rank) for rank in (0, 1)})
    return catalog


def _copy(job: Job, number: int) -> None:
    """`ckptrt cp` of a whole run, and a prune here."""
    source = source_run()
    job.copy_from(source, source.path().commits)
    job.restart()
    job.prune(keeps=((30, 2),))


def _flush(job: Job, number: int) -> None:
    """One by one, the newest first, while the run goes on: what is newest here only grows."""
    source = source_run(went_on_from=10)
    older = Catalog(source.tier, FakeClock())
    older.fences = lambda: {1: source.fences()[1]}  # type: ignore[method-assign]  # before the run went back
    older.open_run()
    job.copy_from(older, [CommitId(20, 1)])
    job.copy_from(older, [CommitId(10, 1)])
    if ("committed", CommitId(20, 1), "0a") in (op.note for op in job.fs.log):
        job.fs.note("floor", 20)
    job.fs.note("rollback", CommitId(20, 1))
    job.copy_from(source, [CommitId(30, 2)])


def _killed_copy(job: Job, number: int) -> None:
    source = source_run()
    commits = (CommitId(10, 1), CommitId(30, 2))
    _killed(lambda j: j.copy_from(source, commits), lambda j: j.copy_from(source, commits))(job, number)


def _two_copies(job: Job, number: int) -> None:
    """A flusher that was thought dead and its successor bring the same checkpoints."""
    source = source_run()
    commits = source.path().commits
    both = [Job(job.fs) for _ in range(2)]
    _take_turns(job, number, *(lambda at=at: at.copy_from(source, commits) for at in both))  # type: ignore[misc]


def _killed_pin(job: Job, number: int) -> None:
    _begin(job)
    for step in (10, 20, 30):
        job.save(step)

    def again(later: Job) -> None:
        later.pin(CommitId(10, 1))
        later.prune(keeps=((30, 1),))

    _killed(lambda j: j.pin(CommitId(10, 1)), again)(job, number)


def _killed_borrowing_prune(job: Job, number: int) -> None:
    job.borrows = True
    _begin(job)
    for step in (10, 20, 30):
        job.save(step)
    keeps = ((30, 1),)
    _killed(lambda j: j.prune(keeps=keeps), lambda j: j.prune_by_hand(keeps=keeps))(job, number)


def _killed(first: Callable[[Job], object], then: Callable[[Job], object]) -> Callable[[Job, int], None]:
    """The history in which a process is killed at call `number` of `first`, and another does `then`."""

    def play(job: Job, number: int) -> None:
        calls_before = job.fs.num_calls

        def kill(call: str, calls: int) -> None:
            if calls - calls_before > number:
                raise Killed(call)

        hook, job.fs.on_call = job.fs.on_call, kill
        try:
            first(job)
        except Killed:
            pass
        else:
            job.fs.note("survived")
        job.fs.on_call = hook
        job.fs.note("restart")
        job.restart()
        then(job)

    return play


def _killed_create(job: Job, number: int) -> None:
    """A run whose making is interrupted; the next process makes what is missing."""

    def again(later: Job) -> None:
        later.create()
        incarnation = later.catalog.newest_incarnation() + 1
        later.fence(incarnation)
        later.save(10, incarnation)

    _killed(_begin, again)(job, number)


def _killed_save(job: Job, number: int) -> None:
    _begin(job)
    job.save(10)
    _killed(lambda j: j.save(20), lambda j: j.resume(20))(job, number)


def _killed_first_save(job: Job, number: int) -> None:
    _begin(job)
    _killed(lambda j: j.save(10), lambda j: j.resume(10))(job, number)


def _killed_prune(job: Job, number: int) -> None:
    _begin(job)
    for step in (10, 20, 30):
        job.save(step)
    keeps = ((30, 1),)
    _killed(lambda j: j.prune(keeps=keeps), lambda j: j.prune_by_hand(keeps=keeps))(job, number)


def _killed_fence(job: Job, number: int) -> None:
    """A restart that dies while it writes its fence; the next one takes the next number."""
    _begin(job)
    job.save(10)

    def again(later: Job) -> None:
        incarnation = later.catalog.newest_incarnation() + 1
        later.fence(incarnation, (10, 1))
        later.save(20, incarnation, "0c")

    _killed(lambda j: j.fence(2, (10, 1)), again)(job, number)


def _two_nodes(job: Job, number: int) -> None:
    """Two ranks on two nodes, each with its own persister; the second hears of the commit by its name alone."""
    _begin(job)
    job.save(10)
    nodes = [_Node(job, rank) for rank in (0, 1)]
    try:
        _take_turns(job, number, *(node.save for node in nodes))
    finally:
        for node in nodes:
            node.writer.close()


def _take_turns(job: Job, number: int, *programs: Callable[[], None]) -> None:
    """Run programs against each other; what they raise goes the way of any other step's errors."""
    turns = Turns(number)
    hook = job.fs.on_call

    def take_turn(call: str, calls: int) -> str | int | None:
        turns.step()
        return hook(call, calls)

    job.fs.on_call = take_turn
    try:
        turns.run(*programs)
    finally:
        job.fs.on_call = hook
    for error in turns.errors.values():
        if not (job.lenient and isinstance(error, Error)):
            raise error
        job.errors.append(error)


class _Node:
    """One rank's persister on a node of its own: its tier, and its writer, whose steps are taken one by one here."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = Job(job.fs)
        self.rank = rank
        attempt = Attempt(url=self.job.tier.url, incarnation=1, world_size=2, nonce="0a", made_by="tests", keep=None)
        self.writer = RunWriter(attempt, self.job.tier, lambda notice: None, lambda catalog: None)

    def save(self) -> None:
        commit_id = CommitId(20, 1)
        pending = _Pending()
        pending.receipts[self.rank] = self.job.write(commit_id, self.rank)
        for _ in range(_POLLS_MAX):
            if self.rank == 0:
                self.writer._fetch_missing(20, pending)
                if len(pending.receipts) == 2:
                    self.job.publish(commit_id, pending.receipts)
                    return
            elif self.writer._is_committed(20):
                self.job.fs.note("committed", commit_id, "0a")
                return
        raise StorageError("the other node never got so far")


def _two_fencers(job: Job, number: int) -> None:
    """Two restarts want one incarnation: one gets it."""
    _begin(job)
    job.save(10)
    _race(job, number, lambda at, i: at.fence(2, (10, 1), pid=i))
    job.restart()
    job.save(20, 2, "0c")


def _two_coordinators(job: Job, number: int) -> None:
    """Two coordinators of one incarnation commit one step from two attempts: one gets it."""
    _begin(job)
    job.save(10)
    _race(job, number, lambda at, i: at.save(20, 1, f"0{i}"))


def _race(job: Job, number: int, work: Callable[[Job, int], object]) -> None:
    def contend(i: int) -> None:
        try:
            work(Job(job.fs), i)
        except (ExistsError, StorageError, FencedError):
            job.fs.note("lost the race")

    _take_turns(job, number, lambda: contend(1), lambda: contend(2))


SCENARIOS = (
    Scenario(name="new run", play=_new_run),
    Scenario(name="save", play=_save),
    Scenario(name="large save", play=_large_save),
    Scenario(name="re-save after a restart", play=_resave),
    Scenario(name="commit of a sleeper", play=_zombie),
    Scenario(name="commit of a deposed one", play=_deposed),
    Scenario(name="prune after commits", play=_prune_committed),
    Scenario(name="prune by hand", play=_prune_by_hand),
    Scenario(name="fall back and go on", play=_fallback),
    Scenario(name="stale receipt", play=_stale_receipt),
    Scenario(name="borrow", play=_borrow),
    Scenario(name="the base goes", play=_base_goes),
    Scenario(name="pin", play=_pin),
    Scenario(name="copy", play=_copy),
    Scenario(name="flush", play=_flush),
    Scenario(name="two copies", play=_two_copies, forms=40),
    Scenario(name="two nodes", play=_two_nodes, forms=130),
    Scenario(name="two fencers", play=_two_fencers, forms=60),
    Scenario(name="two coordinators", play=_two_coordinators, forms=25),
    Scenario(name="killed in a new run", play=_killed_create, forms=60, kills=True),
    Scenario(name="killed in the first save", play=_killed_first_save, forms=120, kills=True),
    Scenario(name="killed in a save", play=_killed_save, forms=120, kills=True),
    Scenario(name="killed in a restart", play=_killed_fence, forms=40, kills=True),
    Scenario(name="killed in a prune", play=_killed_prune, forms=120, kills=True),
    Scenario(name="killed in a prune of what is borrowed from", play=_killed_borrowing_prune, forms=120, kills=True),
    Scenario(name="killed in a pin", play=_killed_pin, forms=40, kills=True),
    Scenario(name="killed in a copy", play=_killed_copy, forms=300, kills=True),
)


def scenario_named(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)
