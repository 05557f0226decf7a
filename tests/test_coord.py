"""Every CoordStore is held to the same contract: in memory, on one etcd node, on three, through the etcd3 API."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from coord_conformance import CoordStoreConformance
from support_etcd import EtcdCluster, etcd_binary, one_node, prefix, three_nodes

from ckptrt.agents.connect import EtcdAccess
from ckptrt.agents.coord import CoordStore, MemoryCoord, MemoryCoordStore
from ckptrt.clock import FakeClock
from ckptrt.errors import CoordError

__all__ = ["etcd_binary", "one_node", "prefix", "three_nodes"]  # fixtures


class TestMemory(CoordStoreConformance):
    @pytest.fixture
    def coord(self) -> MemoryCoord:
        return MemoryCoord(FakeClock())

    @pytest.fixture
    def connect(self, coord: MemoryCoord) -> Callable[[], CoordStore]:
        return lambda: MemoryCoordStore(coord)

    @pytest.fixture
    def compact(self, coord: MemoryCoord) -> Callable[[int], None]:
        return coord.compact

    @pytest.fixture
    def let_lease_end(self, coord: MemoryCoord) -> Callable[[float], None]:
        clock = coord._clock
        assert isinstance(clock, FakeClock)
        return clock.advance

    def test_a_store_that_is_switched_off_refuses_everything(self, coord: MemoryCoord, prefix: str) -> None:
        store = MemoryCoordStore(coord)
        coord.reachable = False
        with pytest.raises(CoordError, match="switched off"):
            store.put(prefix, "v")
        coord.reachable = True
        assert store.get(prefix) is None

    def test_a_wiped_store_is_empty_and_its_watches_say_so(self, coord: MemoryCoord, prefix: str) -> None:
        store = MemoryCoordStore(coord)
        lease_id, _ = store.grant(30)
        for _ in range(3):
            revision = store.put(prefix, "v", lease_id)
        with store.watch(prefix, revision + 1) as watch:
            coord.wipe()
            with pytest.raises(CoordError, match="gone"):
                watch.poll(1.0)
        assert store.get(prefix) is None
        assert store.keepalive(lease_id) == 0


class _OnEtcd(CoordStoreConformance):
    client: str = "gateway"

    @pytest.fixture
    def connect(self, cluster: EtcdCluster) -> Iterator[Callable[[], CoordStore]]:
        stores: list[CoordStore] = []

        def connect() -> CoordStore:
            access = EtcdAccess(endpoints=",".join(cluster.endpoints), client=self.client)  # type: ignore[arg-type]
            stores.append(access.connect(5.0))
            return stores[-1]

        yield connect
        for store in stores:
            store.close()

    @pytest.fixture
    def compact(self, cluster: EtcdCluster) -> Callable[[int], None]:
        return cluster.compact

    @pytest.fixture
    def let_lease_end(self) -> Callable[[float], None]:
        return lambda ttl_s: None  # the watch waits for it


@pytest.mark.processes
class TestOneNode(_OnEtcd):
    @pytest.fixture
    def cluster(self, one_node: EtcdCluster) -> EtcdCluster:
        return one_node


@pytest.mark.processes
class TestThreeNodes(_OnEtcd):
    @pytest.fixture
    def cluster(self, three_nodes: EtcdCluster) -> EtcdCluster:
        return three_nodes


@pytest.mark.processes
class TestEtcd3Api(_OnEtcd):
    client = "etcd3"

    @pytest.fixture
    def cluster(self, one_node: EtcdCluster) -> EtcdCluster:
        pytest.importorskip("etcd3", reason="the extra ckptrt[etcd3] is not installed", exc_type=ImportError)
        return one_node
