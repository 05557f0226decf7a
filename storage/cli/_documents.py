"""What the verbs print for scripts: one class for each verb's JSON document, the comment beside a field its meaning.

docs/reference/json.md is made of this file. Within a version of the schema fields are added, and none changes its
meaning or goes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

__all__ = ["DOCUMENTS", "SCHEMA", "Document"]

SCHEMA = 1

State = Literal["committed", "off-path", "damaged", "too-new"]


class Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anything within a document."""


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one run of a verb prints."""

    schema: int = SCHEMA  # version of these documents


class CommitRef(Part):
    """A checkpoint by name."""

    step: int
    incarnation: int


# --- ls


class LsCheckpoint(Part):
    """A commit. What stands in its record is null if that can't be read."""

    step: int
    incarnation: int
    state: State
    reason: str  # why it is anything but committed
    pinned: bool  # whether prune must leave it
    size_bytes: int | None  # all that it holds
    new_bytes: int | None  # what was written for it; the rest lies in older ones' folders
    metrics: dict[str, float] | None  # as given to rt.step()
    world_size: int | None
    num_tensors: int | None
    created_at: str | None  # UTC, by the writer's clock
    age_s: int | None  # how long ago that was
    made_by: str | None  # program and version
    data: str | None  # its folder below data/


class Ls(Document):
    """The checkpoints of a run, newest first."""

    url: str
    run_id: str | None  # null if the run's record is damaged
    newest_incarnation: int  # 0 before the first start
    checkpoints: list[LsCheckpoint]
    problems: list[str]  # what is wrong with the run besides single checkpoints


class LsRun(Part):
    """A run in a directory of runs."""

    name: str
    num_checkpoints: int  # those that a restore may take
    latest_step: int | None
    latest_size_bytes: int | None
    latest_created_at: str | None
    latest_age_s: int | None
    problem: str  # empty if there is none


class LsRuns(Document):
    """The runs in a directory, printed by `ls` if the place is no run itself."""

    url: str
    runs: list[LsRun]


# --- show and tree


class ComponentSums(Part):
    """The tensors of one component of the state, such as model or optim."""

    num_tensors: int
    size_bytes: int


class ShowTensor(Part):
    """A global tensor, or one rank's own."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int  # as stored
    ranks: tuple[int, ...]  # who stored parts of it
    rank_only: bool  # whether it belongs to that rank alone


class ShowValue(Part):
    """Plain data as some ranks stored them."""

    key: str
    ranks: tuple[int, ...]  # who has just this, of the first 8
    value: Any  # null if it is larger than 1 KiB, or damaged
    problem: str  # why there is no value; empty if there is one


class Show(Document):
    """What one checkpoint holds."""

    url: str
    step: int
    incarnation: int
    created_at: str
    made_by: str
    world_size: int
    size_bytes: int
    data: str  # its folder
    references: list[str]  # folders of older checkpoints that it needs
    files: list[str]
    num_tensors: int
    components: dict[str, ComponentSums]
    objects: dict[str, int]  # name of plain data -> how many ranks have some
    metrics: dict[str, float]
    pin: dict[str, str] | None  # reason, by and created_at; empty if it is damaged, and pins all the same
    values: list[ShowValue]  # plain data, each distinct one once
    tensors: list[ShowTensor] | UnsetType = UNSET  # with --tensors


class Sums(Part):
    """Sums over tensors; each counts once, however many ranks hold parts of it."""

    num_tensors: int
    num_elements: int
    size_bytes: int
    dtypes: dict[str, int]  # dtype -> elements


class TreeNode(Sums):
    """A prefix of tensors' names, with all that begins so."""

    name: str


class Tree(Document):
    """What one checkpoint holds by module, as sums down to a depth."""

    url: str
    step: int
    incarnation: int
    depth: int
    num_tensors: int
    num_elements: int
    size_bytes: int
    dtypes: dict[str, int]
    nodes: list[TreeNode] | UnsetType = UNSET


# --- diff


class DiffSide(Part):
    """One of the two checkpoints."""

    url: str
    step: int
    incarnation: int
    world_size: int
    size_bytes: int


class Form(Part):
    """What a tensor is."""

    dtype: str
    shape: tuple[int, ...]


class NotFinite(Part):
    """Values that are no numbers."""

    num_nan: int
    num_inf: int
    first: tuple[int, ...] | None  # index of the first one


class DiffStat(Part):
    """With --stat: how far values differ."""

    max_abs: float | None  # null if it is no number
    norm_a: float | None
    norm_b: float | None
    non_finite_a: NotFinite
    non_finite_b: NotFinite


class DiffTensor(Part):
    """A tensor that isn't known to be the same."""

    key: str
    rank: int | None  # of one rank's own tensor
    change: Literal["removed", "added", "shape", "layout", "data"]
    a: Form | UnsetType | None = UNSET  # if it was added, removed or has another shape or dtype
    b: Form | UnsetType | None = UNSET
    data: Literal["same", "unknown", "differs"] | UnsetType = UNSET  # if the forms are the same
    stat: DiffStat | UnsetType = UNSET


class DiffValue(Part):
    """A value within plain data that differs."""

    path: str
    a: Any
    b: Any


class DiffObject(Part):
    """A rank's plain data that differ."""

    key: str
    rank: int
    change: Literal["added", "removed", "data"]
    data: Literal["same", "unknown", "differs"]
    values: list[DiffValue]  # with --data


class Diff(Document):
    """What differs between two checkpoints."""

    a: DiffSide
    b: DiffSide
    differs: bool | None  # null if digests alone can't tell
    num_same: int  # tensors
    num_unknown: int  # tensors that --data would have to read
    tensors: list[DiffTensor] | UnsetType = UNSET
    objects: list[DiffObject] | UnsetType = UNSET


# --- du and events


class DuCheckpoint(Part):
    """What one checkpoint takes."""

    step: int
    incarnation: int
    state: State
    size_bytes: int | None  # all that it holds
    own_bytes: int  # what lies in its own folder
    frees_bytes: int  # what would come free if it alone were removed
    borrows: int  # folders of others that it needs
    needed_by: int  # others that need its folder


class Du(Document):
    """What the checkpoints of a run take, newest first."""

    url: str
    checkpoints: list[DuCheckpoint]
    uncommitted_bytes: int  # in folders that no commit needs
    num_uncommitted: int
    total_bytes: int


class Event(Part):
    """Something that happened to a run."""

    at: str | None  # UTC, by the writer's clock; null for what can't be read
    event: str  # the first word of the line: start, resume, commit, pin, warn, or a word of the launcher's log
    incarnation: int | None
    step: int | None
    text: str


class Events(Document):
    """What happened to a run, oldest first."""

    url: str
    events: list[Event]


# --- verify and doctor


class Affected(Part):
    """What damage hits."""

    key: str  # of a tensor or of plain data
    rows: tuple[int, int] | None  # first and last, of a tensor


class Finding(Part):
    """Something that isn't as it was written."""

    file: str
    what: str
    start: int | None  # bytes from here
    end: int | None  # up to, but not including, here
    affects: list[Affected]
    ranks: list[int]
    is_fatal: bool  # whether it keeps the checkpoint from being loaded


class BadTensor(NotFinite):
    """With --deep: a tensor that holds values that are no numbers."""

    key: str
    rank: int | None  # of one rank's own tensor


class VerifyCheckpoint(Part):
    """What was found out about one checkpoint."""

    step: int
    incarnation: int
    is_ok: bool
    is_loadable: bool
    num_files: int
    num_tensors: int
    bytes_read: int
    findings: list[Finding]
    non_finite: list[BadTensor] | None  # null if the values weren't looked at


class Verify(Document):
    """Whether checkpoints are as they were written."""

    url: str
    is_ok: bool
    newest_good_step: int | None
    part: tuple[int, int] | None  # with --read-data-subset: which part, of how many
    findings: list[Finding]  # about the run's own records
    checkpoints: list[VerifyCheckpoint]


class Check(Part):
    """One thing that doctor looked at."""

    name: str
    result: Literal["ok", "warn", "fail", "skip"]
    what: str
    do: str  # what to do about it; empty if there is nothing to do


class Doctor(Document):
    """Whether a place and this machine are fit for a run."""

    url: str
    is_ok: bool  # whether nothing failed
    checks: list[Check]


# --- export and import


class ExportFile(Part):
    """A file of an export."""

    name: str
    size_bytes: int  # in a dry run, of its tensors
    xxh3: str | None  # xxh3-128 of all its bytes; null in a dry run


class ExportLoss(Part):
    """How far a tensor's values are from what they were. Finite ones only."""

    key: str
    max_abs: float
    max_rel: float
    num_overflow: int  # values that became infinite


class Export(Document):
    """What was written, or would be."""

    url: str
    step: int
    incarnation: int
    target: str
    form: Literal["safetensors", "hf", "torch", "dcp"]
    components: list[str]
    num_tensors: int
    size_bytes: int  # of tensors
    files: list[ExportFile]
    left_out: list[str]
    warnings: list[str]
    quantised: list[str]  # tensors that were made 8-bit; all others weren't
    losses: list[ExportLoss]  # of tensors that were cast or made 8-bit, the largest relative error first
    dry_run: bool


class Import(Document):
    """What became a checkpoint, or would."""

    url: str
    step: int
    incarnation: int | None  # null in a dry run
    source: str
    form: Literal["safetensors", "hf", "torch", "dcp"]
    components: list[str]
    num_tensors: int
    size_bytes: int
    ties: dict[str, str]  # another name -> the tensor that it shares
    left_out: list[str]
    unchecked: str  # damage that this source can't show; empty if there is none
    dry_run: bool


# --- cp, pin, unpin and prune


class Cp(Document):
    """What was copied, or would be."""

    source: str
    target: str
    copied: list[CommitRef]
    already_there: list[CommitRef]
    num_files: int
    size_bytes: int
    dry_run: bool


class Pin(Document):
    """What became of a checkpoint's pin; printed by `pin` and `unpin`."""

    url: str
    step: int
    incarnation: int
    state: Literal["pinned", "unpinned"]
    changed: bool
    dry_run: bool


class Kept(CommitRef):
    """A checkpoint that stays."""

    reason: str


class Removal(CommitRef):
    """A commit record or data folder that goes."""

    name: str
    reason: str
    size_bytes: int


class Unfinished(Part):
    """What an interrupted write left."""

    name: str
    size_bytes: int


class Prune(Document):
    """What prune removed, or would remove."""

    url: str
    rule: str
    kept: list[Kept]
    commits: list[Removal]
    folders: list[Removal]
    waiting: list[Removal]  # younger than the grace time
    pins: list[Removal]  # of checkpoints that are gone
    unfinished: list[Unfinished]
    freed_bytes: int
    deleted: list[str] | None  # null if nothing was tried
    errors: list[str]


class Drain(Document):
    """Which job was asked to end."""

    url: str
    pid: int  # of its launcher
    ended: bool  # whether it has; only told with --wait
    step: int | None  # the newest good checkpoint after that
    dry_run: bool


# verb -> what it prints; `msgspec.json.schema` makes a JSON Schema of each.
DOCUMENTS: dict[str, tuple[type[Document], ...]] = {
    "ls": (Ls, LsRuns), "show": (Show,), "tree": (Tree,), "diff": (Diff,), "du": (Du,), "events": (Events,),
    "verify": (Verify,), "doctor": (Doctor,),
    "cp": (Cp,), "export": (Export,), "import": (Import,),
    "pin": (Pin,), "unpin": (Pin,), "prune": (Prune,),
    "drain": (Drain,),
}  # fmt: skip
