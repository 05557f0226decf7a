"""Where bytes lie: memory, a local directory, an object store; and wrappers around any of them."""

from .base import Entry, Tier
from .registry import open_tier

__all__ = ["Entry", "Tier", "open_tier"]
