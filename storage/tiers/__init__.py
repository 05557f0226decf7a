"""Where bytes lie: memory, a local directory, an object store; and wrappers around any of them."""

from ckptrt.storage.tiers.base import Entry, Tier
from ckptrt.storage.tiers.registry import open_tier

__all__ = ["Entry", "Tier", "open_tier"]
