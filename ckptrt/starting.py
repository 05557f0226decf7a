"""`ckptrt.init()`: from arguments and environment to a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptrt.env import DIR, WorkerEnv
from ckptrt.errors import UsageError
from ckptrt.runtime import Runtime
from ckptrt.snapshot import OnError, SavePolicy, WhenBusy
from ckptrt.storage.retention import Keep
from ckptrt.storage.tiered import RunPlace

__all__ = ["init"]


def init(
    dir: str | None = None,
    *,
    local_dir: str | None = None,
    every: int | None = None,
    keep: int | Keep | None = None,
    rng: bool = True,
    on_error: OnError = "warn",
    when_busy: WhenBusy = "skip",
    dedup: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    **state: Any,
) -> Runtime:
    """Make this process's checkpointing runtime. Every rank calls it, after `init_process_group()`.

    dir: the run's directory or URL (such as runs/gpt or s3://bucket/runs/gpt); by default that of `ckptrt-launch`.
    local_dir: a fast directory on this node to write to first; what is committed there is flushed to `dir` in the
    background, and restored from whichever has it.
    every: save after each so many steps; None saves only when save() is called.
    keep: which checkpoints stay: the last so many, or what a `Keep` says; None keeps all.
    rng: whether the state of the random generators is a part of the checkpoint.
    on_error: what a failed save does to the training: "warn" prints and counts it, "raise" raises it at the next
    step(). A job whose run was taken over by another one gets FencedError at the next step() in any case.
    dedup: tensors that haven't changed since the last checkpoint (such as a frozen base model) stay where they are, and
    the new checkpoint refers to them.
    when_busy: what a save does while both slots are still being written: "skip" counts and tells it, "wait" waits.
    storage_options: options of the URL's file system, as for fsspec.
    state: what is saved, by name: modules, optimizers, anything with state_dict/load_state_dict, and dicts.
    Raises UsageError for state that can't be saved, BusyError if another job holds the run, StorageError if the
    storage can't be reached.
    """
    env = WorkerEnv.read()
    url = dir or env.dir
    if not url:
        raise UsageError("ckptrt.init() has no directory", hint=f"pass one, or set {DIR} or --ckpt-dir")
    if every is not None and every < 1:
        raise UsageError(f"every={every}: a save every so many steps needs at least 1")
    if not state:
        raise UsageError(
            "ckptrt.init() was given no state", hint="pass model=..., optim=... and what else must come back"
        )
    local_dir = env.local_dir if local_dir is None else local_dir
    place = RunPlace.of(str(url), str(local_dir or ""), storage_options)
    keep = Keep(last=keep) if isinstance(keep, int) else keep
    policy = SavePolicy(every=every, keep=keep, on_error=on_error, when_busy=when_busy, dedup=dedup)
    return Runtime(place, env, state, policy, rng=rng)
