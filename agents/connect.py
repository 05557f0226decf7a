"""How to reach the job's etcd, as one value: made once from the options, handed to whoever needs a store of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckptrt.agents.coord import CoordStore

__all__ = ["EtcdAccess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """Endpoints, credentials and choice of client. `access.connect` is what LeaseKeeper wants."""

    endpoints: str  # URLs or host:port, separated by commas
    user: str | None = None
    password: str | None = None
    ca_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    client: Literal["gateway", "etcd3"] = "gateway"

    def connect(self, request_timeout_s: float = 2.0) -> CoordStore:
        """A new client. Raises UsageError when the options don't fit; connections come later."""
        return self._client_class()(
            self.endpoints,
            user=self.user,
            password=self.password,
            ca_cert=self.ca_cert,
            client_cert=self.client_cert,
            client_key=self.client_key,
            request_timeout_s=request_timeout_s,
        )

    def _client_class(self) -> Callable[..., CoordStore]:
        # Only the one that is wanted is loaded: it may need gRPC, or be the one that needs nothing.
        if self.client == "etcd3":
            from ckptrt.agents.etcd3_store import Etcd3CoordStore

            return Etcd3CoordStore
        from ckptrt.agents.etcd import EtcdCoordStore

        return EtcdCoordStore

    def __repr__(self) -> str:
        return f"EtcdAccess(endpoints={self.endpoints!r}, user={self.user!r}, client={self.client!r})"  # no password
