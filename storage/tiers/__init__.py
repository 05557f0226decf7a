"""Where bytes lie: memory, a local directory, an object store; and wrappers around any of them."""
