"""The lease keeper: what it decides, on a clock that the test moves; and on a real node that loses its data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support_etcd import EtcdCluster, etcd_binary, prefix, wait_until

from ckptrt.agents.connect import EtcdAccess
from ckptrt.agents.coord import CoordStore, MemoryCoord, MemoryCoordStore
from ckptrt.agents.lease import Action, LeaseChange, LeaseKeeper, LeaseState, decide
from ckptrt.clock import FakeClock
from ckptrt.errors import BusyError, CoordError, UnknownOutcomeError

__all__ = ["etcd_binary", "prefix"]  # fixtures


@pytest.mark.parametrize(
    ("state", "now_s", "action", "wait_s"),
    [
        (LeaseState(ttl_s=6), 0.0, Action.GRANT, 0.0),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10), 10.0, Action.CLAIM, 0.0),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10, claimed=True), 10.5, Action.WAIT, 1.5),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10, claimed=True), 12.0, Action.RENEW, 0.0),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10), 12.0, Action.RENEW, 0.0),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10, failed_at_s=12, claimed=True), 12.2, Action.WAIT, 0.3),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10, failed_at_s=12, claimed=True), 12.5, Action.RENEW, 0.0),
        (LeaseState(ttl_s=6, lease_id=1, renewed_at_s=10, failed_at_s=10.5), 11.0, Action.CLAIM, 0.0),
        (LeaseState(ttl_s=1, failed_at_s=12), 12.06, Action.WAIT, 0.04),
        (LeaseState(ttl_s=60, failed_at_s=12), 12.4, Action.WAIT, 0.1),
    ],
)
def test_what_is_due(state: LeaseState, now_s: float, action: Action, wait_s: float) -> None:
    assert decide(state, now_s) == (action, pytest.approx(wait_s))


class World:
    """A store, a keeper without a thread, and a clock that both live by."""

    def __init__(self, wrap: Callable[[CoordStore], CoordStore] = lambda store: store) -> None:
        self.clock = FakeClock(100.0)
        self.coord = MemoryCoord(self.clock)
        self.changes: list[LeaseChange] = []
        self.request_timeout_s = 0.0
        self.keeper = LeaseKeeper(self._connect, ttl_s=6, on_change=self.changes.append, clock=self.clock)
        self.store = MemoryCoordStore(self.coord)
        self._wrap = wrap

    def _connect(self, request_timeout_s: float) -> CoordStore:
        self.request_timeout_s = request_timeout_s
        return MemoryCoordStore(self.coord)

    def run(self, duration_s: float) -> None:
        """Let the keeper's thread run for so long, in no time."""
        end_s = self.clock.monotonic_s() + duration_s
        while self.clock.monotonic_s() < end_s:
            self.clock.advance(max(0.001, min(self.keeper.tick(), end_s - self.clock.monotonic_s())))

    def value(self, key: str) -> str | None:
        item = self.store.get(key)
        return item.value if item else None

    def kinds(self) -> list[str]:
        return [change.kind for change in self.changes]


@pytest.fixture
def world() -> World:
    world = World()
    world.keeper.start(thread=False)
    return world


def test_keys_stay_for_as_long_as_the_keeper_runs(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.run(100)
    item = world.store.get("/m/a")
    assert item is not None
    assert item.lease_id == world.keeper.lease_id
    assert item.mod_revision == item.create_revision  # written once
    assert world.keeper.held
    assert world.changes == []
    world.clock.advance(7)
    assert world.value("/m/a") is None


def test_the_time_out_leaves_room_for_retries_within_the_ttl(world: World) -> None:
    assert world.request_timeout_s == 1.0


def test_validity_counts_from_the_sending_of_the_last_renewal(world: World) -> None:
    assert world.keeper.valid_until_s == 106.0
    world.run(2.5)
    assert world.keeper.valid_until_s == pytest.approx(108.0, abs=0.01)
    world.keeper.stop()
    assert world.keeper.valid_until_s == float("-inf")


def test_stopping_deletes_the_keys_at_once(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.keeper.stop()
    assert world.value("/m/a") is None
    assert not world.keeper.held


def test_a_second_registration_changes_the_value(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.keeper.register("/m/a", "2")
    assert world.value("/m/a") == "2"
    world.coord.wipe()
    world.run(5)
    assert world.value("/m/a") == "2"


def test_lost_data_means_a_new_lease_and_the_keys_again(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.keeper.register("/m/b", "2", exclusive=True)
    old = world.keeper.lease_id
    world.coord.wipe()
    MemoryCoordStore(world.coord).grant(60)  # so that ids don't repeat by chance
    world.run(5)
    assert (world.value("/m/a"), world.value("/m/b")) == ("1", "2")
    assert world.kinds() == ["lost", "back"]
    assert world.changes[0].lease_id == old
    assert "no lease" in world.changes[0].reason
    assert world.changes[1].lease_id == world.keeper.lease_id != old
    assert not world.changes[1].same_lease
    assert world.keeper.held


def test_a_pause_beyond_the_ttl_is_noticed(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.clock.advance(20)  # SIGSTOP, or a suspended machine
    assert not world.keeper.held
    assert world.value("/m/a") is None
    world.run(1)
    assert world.value("/m/a") == "1"
    assert world.kinds() == ["lost", "back"]


def test_an_outage_shorter_than_the_lease_is_nobodys_business(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.run(2.5)
    world.coord.reachable = False
    world.run(4)
    world.coord.reachable = True
    world.run(2)
    assert world.changes == []
    assert world.value("/m/a") == "1"


def test_an_outage_is_a_loss_when_the_lease_may_have_ended(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.run(1)
    world.coord.reachable = False
    world.run(4.9)
    assert world.kinds() == []
    world.run(0.2)  # the last renewal is six seconds old
    assert world.kinds() == ["lost"]
    assert not world.keeper.held
    assert "switched off" in world.changes[0].reason
    world.run(60)
    assert world.kinds() == ["lost"]
    world.coord.reachable = True
    world.run(1)
    assert world.kinds() == ["lost", "back"]
    assert world.value("/m/a") == "1"


def test_a_lease_that_lived_on_through_an_outage_is_kept(world: World) -> None:
    world.keeper.register("/m/a", "1")
    lease_id = world.keeper.lease_id
    world.coord.reachable = False
    world.run(7)
    # What a restarted etcd does: every lease has its whole time again.
    world.coord.reachable = True
    world.coord._leases[lease_id].ends_at_s = world.clock.monotonic_s() + 6
    world.run(1)
    assert world.kinds() == ["lost", "back"]
    assert world.changes[1].same_lease
    assert world.keeper.lease_id == lease_id


def test_an_exclusive_key_has_one_holder(world: World) -> None:
    world.store.put("/owner", "job 1")
    with pytest.raises(BusyError, match="job 1"):
        world.keeper.register("/owner", "job 2", exclusive=True)
    world.coord.wipe()
    world.run(5)
    assert world.value("/owner") is None  # what could not be registered isn't kept either


def test_an_exclusive_key_of_ones_own_is_taken_up_again(world: World) -> None:
    world.store.put("/owner", "me", world.store.grant(30)[0])
    world.keeper.register("/owner", "me", exclusive=True)
    world.keeper.register("/owner", "me, later", exclusive=True)
    item = world.store.get("/owner")
    assert item is not None
    assert (item.value, item.lease_id) == ("me, later", world.keeper.lease_id)


def test_an_exclusive_key_that_was_taken_meanwhile_stays_theirs(world: World) -> None:
    world.keeper.register("/owner", "me", exclusive=True)
    world.keeper.register("/m/a", "1")
    world.clock.advance(20)
    revision = world.store.create("/owner", "them")
    world.run(30)
    assert world.value("/owner") == "them"
    assert world.value("/m/a") == "1"
    assert world.kinds() == ["lost"]
    assert not world.keeper.held
    world.store.delete("/owner", revision)
    world.run(1)
    assert world.value("/owner") == "me"
    assert world.kinds() == ["lost", "back"]


def test_registering_during_an_outage_is_an_error_for_a_new_key_only(world: World) -> None:
    world.keeper.register("/m/a", "1")
    world.coord.reachable = False
    world.run(10)
    with pytest.raises(CoordError):
        world.keeper.register("/m/new", "1")
    world.coord.reachable = True
    world.coord.wipe()
    world.keeper.tick()
    with pytest.raises(CoordError, match="no lease just now"):
        world.keeper.register("/m/new", "1")
    world.keeper.register("/m/a", "2")
    world.run(5)
    assert world.value("/m/a") == "2"
    assert world.value("/m/new") is None


def test_a_key_whose_writing_got_no_answer_stays_under_the_same_lease(world: World) -> None:
    # A new lease each time would let the late write bind the key to a lease that nobody renews.
    world.keeper.register("/m/a", "1")
    world.coord.wipe()
    real, failures = MemoryCoordStore.put, iter([True, True])

    def put(self: MemoryCoordStore, key: str, value: str, lease_id: int | None = None) -> int:
        revision = real(self, key, value, lease_id)
        if next(failures, False):
            raise UnknownOutcomeError("no answer")
        return revision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryCoordStore, "put", put)
        world.run(5)
    assert len(world.coord._leases) == 1
    assert world.kinds() == ["lost", "back"]


def test_a_failing_callback_does_not_end_the_renewals(caplog: pytest.LogCaptureFixture) -> None:
    world = World()

    def fail(change: LeaseChange) -> None:
        raise RuntimeError("a mistake")

    world.keeper._on_change = fail
    world.keeper.start(thread=False)
    world.keeper.register("/m/a", "1")
    world.coord.wipe()
    world.run(10)
    assert world.value("/m/a") == "1"
    assert "a mistake" in caplog.text


def test_a_store_that_is_down_at_the_start_is_an_error() -> None:
    world = World()
    world.coord.reachable = False
    with pytest.raises(CoordError):
        world.keeper.start()


def test_the_thread_renews_and_ends() -> None:
    coord = MemoryCoord()
    keeper = LeaseKeeper(lambda _: MemoryCoordStore(coord), ttl_s=0.6)
    keeper.start()
    keeper.register("/m/a", "1")
    first = keeper.valid_until_s
    wait_until(lambda: keeper.valid_until_s > first)
    keeper.stop()
    keeper.stop()
    assert MemoryCoordStore(coord).get("/m/a") is None
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptrt-lease"]


@pytest.mark.processes
def test_membership_comes_back_after_etcd_lost_its_data(etcd_binary: str, tmp_path: Path, prefix: str) -> None:
    cluster = EtcdCluster(etcd_binary, tmp_path, 1)
    changes: list[LeaseChange] = []
    try:
        cluster.start()
        access = EtcdAccess(endpoints=cluster.endpoint(0))
        keeper = LeaseKeeper(access.connect, ttl_s=2, on_change=changes.append)
        keeper.start()
        try:
            keeper.register(prefix + "node", "here", exclusive=True)
            cluster.wipe(0)
            cluster.launch(0)
            cluster.wait_ready(0)
            wait_until(lambda: [change.kind for change in changes] == ["lost", "back"])
            store = access.connect()
            item = store.get(prefix + "node")
            assert item is not None
            assert (item.value, item.lease_id) == ("here", keeper.lease_id)
        finally:
            keeper.stop()
        assert store.get(prefix + "node") is None
        store.close()
    finally:
        cluster.stop()
