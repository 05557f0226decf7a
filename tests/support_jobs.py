"""Whole jobs under ckptrt-launch: start one, follow it, hurt it, and judge afterwards what it has to show.

A `Job` runs tiny_job.py with its own folder of temporary files, and with a mark in the environment by which every
process that it leads to is found again. `judge` needs nothing but files: the ranks' accounts, the launcher's events,
the store, and the same of a job that was never hurt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptrt.storage.catalog import Catalog, CommitInfo, open_catalog
from ckptrt.storage.shardfile import tensor_bytes

SCRIPT = Path(__file__).resolve().parent / "tiny_job.py"
_MARK = "CKPTRT_TEST_MARK"

Note = dict[str, Any]


@dataclass(kw_only=True)
class Job:
    """One run of the tiny job. `launch` may be called again after the launcher has ended: same run, same accounts."""

    folder: Path
    ranks: int = 2
    parallel: str = "ddp"
    steps: int = 40
    every: int = 4
    url: str = ""  # where checkpoints go, by default below the folder
    faults: str = ""
    gates: Mapping[int, Path] = field(default_factory=dict)
    max_restarts: int = 10
    options: Sequence[str] = ()  # further options of ckptrt-launch
    environ: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)  # with which this process reads the store

    def __post_init__(self) -> None:
        self.url = self.url or str(self.folder / "run")
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        self.launches = 0
        (self.folder / "out").mkdir(parents=True, exist_ok=True)
        # Short: the name of a Unix socket has room for some hundred characters.
        self.temp = Path(tempfile.mkdtemp(prefix="ckj-"))

    def launch(self) -> subprocess.Popen[bytes]:
        self.launches += 1
        command = [
            sys.executable, "-m", "ckptrt.agents.launch", "--nproc-per-node", str(self.ranks),
            "--max-restarts", str(self.max_restarts), "--ckpt-max-no-progress", str(self.max_restarts),
            "--ckpt-dir", self.url, "--log-dir", str(self.logs), *self.options, str(SCRIPT),
            "--out", str(self.folder / "out"), "--parallel", self.parallel,
            "--steps", str(self.steps), "--every", str(self.every),
        ]  # fmt: skip
        for step, path in self.gates.items():
            command += ["--gate", f"{step}:{path}"]
        foreign = ("PET_", "CKPTRT_", "TORCHELASTIC_", "OMP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        ours = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temp), _MARK: self.mark, "CKPTRT_FAULTS": self.faults}
        with open(self.folder / "launcher.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env={**kept, **ours, **self.environ}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        return self.process

    def finish(self, timeout_s: float = 90.0) -> int:
        """The launcher's exit status, once it has ended."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def run(self, timeout_s: float = 90.0) -> int:
        self.launch()
        return self.finish(timeout_s)

    def close(self) -> None:
        """Kill what is left, whatever happened, and remove the temporary files."""
        for pid in self.processes():
            _kill(pid)
        if self.process is not None:
            self.process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it tells

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def output(self) -> str:
        return (self.folder / "launcher.log").read_text(errors="replace")

    def notes(self, rank: int, what: str = "") -> list[Note]:
        """A rank's account so far, or the part of it that is about one thing."""
        return [note for note in _lines(self.folder / "out" / f"rank{rank}.jsonl") if what in ("", note["what"])]

    def events(self, *kinds: str) -> list[Note]:
        """What the launchers have told, of all launches in order of time."""
        found = [event for path in self.logs.rglob("events.jsonl") for event in _lines(path)]
        return sorted((e for e in found if not kinds or e["event"] in kinds), key=lambda event: event["at_s"])

    def catalog(self) -> Catalog:
        return open_catalog(self.url, **self.storage_options)

    def reached(self, step: int) -> bool:
        """Whether every rank has gone through this step."""
        return all(
            any(note["step"] >= step for note in self.notes(rank, "step")[-1:] if note) for rank in range(self.ranks)
        )

    # --- its processes

    def processes(self, words: str = "") -> list[int]:
        """Every live process that this job has led to, or those with some words in their command line."""
        return [pid for pid in _marked(f"{_MARK}={self.mark}") if words in _command(pid)]

    def workers(self) -> list[int]:
        """The process ids of the present set, by rank."""
        return list(self.events("started")[-1]["pids"])

    def remains(self) -> list[str]:
        """What is left of a job that has ended: processes and temporary files."""
        until_s = time.monotonic() + 5.0  # a process that was killed may take a moment to disappear
        while (left := self.processes()) and time.monotonic() < until_s:
            time.sleep(0.01)
        found = [f"process {pid}: {_command(pid)}" for pid in left]
        files = (path for path in self.temp.iterdir() if not path.name.startswith("torchinductor_"))  # torch's own
        return found + [f"file {path}" for path in sorted(files)]


def wait_for(condition: Callable[[], Any], job: Job | None = None, timeout_s: float = 60.0) -> Any:
    """The first true value of condition. An error when there is none in time, or when the job has ended before."""
    until_s = time.monotonic() + timeout_s
    while not (value := condition()):
        ended = job is not None and job.process is not None and job.process.poll() is not None
        if ended and not condition():
            raise AssertionError(f"the job ended before what was waited for:\n{job.output[-3000:]}")  # type: ignore[union-attr]
        if time.monotonic() > until_s:
            raise AssertionError(f"not true within {timeout_s} s:\n{job.output[-3000:] if job else ''}")
        time.sleep(0.005)
    return value


def _lines(path: Path) -> list[Note]:
    """The whole lines of a file that may still grow."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _marked(mark: str) -> Iterator[int]:
    """Processes that were started with this in their environment; forks of such a process have it too."""
    wanted = mark.encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            found = wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended, or another user's
        if found:
            yield int(entry)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


# --- the judge


class Reference:
    """A job that nobody hurt: every loss of every rank, and the state at every saved step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.exact = {
            (rank, note["step"]): (note["loss"], note["mean"])
            for rank in range(job.ranks)
            for note in job.notes(rank, "step")
        }

    @cached_property
    def states(self) -> dict[int, dict[str, bytes]]:
        catalog = self.job.catalog()
        return {commit.step: state_of(catalog, commit) for commit in catalog.commits()}


def state_of(catalog: Catalog, commit: CommitInfo) -> dict[str, bytes]:
    """All that a checkpoint holds, by rank, name and place."""
    found: dict[str, bytes] = {}
    for receipt in catalog.open_checkpoint(commit).receipts():
        data = catalog.tier.read(f"data/{receipt.shard.name}")
        for tensor in receipt.tensors:
            name = f"rank {receipt.rank}: {tensor.key} at {tensor.offsets}"
            found[name] = data[tensor.start : tensor.start + tensor_bytes(tensor)]
        for record in receipt.objects:
            found[f"rank {receipt.rank}: {record.key}"] = data[record.start : record.start + record.size_bytes]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an incarnation went on from, as its ranks tell, and what could be had when it did."""

    incarnation: int
    step: int
    source: int
    tier: str
    committed: int  # newest step that any rank knew to be committed before
    sealed: int  # newest step of which every rank had said that its snapshot is whole
    reached: dict[int, int]  # rank -> last step that it can have taken a snapshot of, in `source`


def resumes(job: Job) -> tuple[list[Resume], list[str]]:
    """Every incarnation's start, and what is wrong with how the ranks tell it."""
    problems: list[str] = []
    by_incarnation: dict[int, dict[int, list[Note]]] = {}
    for rank in range(job.ranks):
        for note in job.notes(rank):
            by_incarnation.setdefault(note["incarnation"], {}).setdefault(rank, []).append(note)
    found: list[Resume] = []
    committed = sealed = 0
    for incarnation, accounts in sorted(by_incarnation.items()):
        starts = {rank: _start(notes) for rank, notes in accounts.items()}
        if len(starts) != job.ranks or len(set(starts.values())) != 1:
            problems.append(f"incarnation {incarnation}: the ranks went on from different places: {starts}")
            continue
        step, source, tier = next(iter(starts.values()))
        before = by_incarnation.get(source, {})
        found.append(
            Resume(
                incarnation=incarnation,
                step=step,
                source=source,
                tier=tier,
                committed=committed,
                sealed=sealed,
                reached={rank: _last(before.get(rank, []), "step") for rank in range(job.ranks)},
            )
        )
        steps = (note for notes in accounts.values() for note in notes if note["what"] == "step")
        committed = max([committed, *(note["committed"] for note in steps)])
        sealed = max(step, min(_last(notes, "saved") for notes in accounts.values()))
    return found, problems


def _start(notes: list[Note]) -> tuple[int, int, str]:
    first = notes[0]
    return (first["step"], first["source"], first["tier"]) if first["what"] == "restored" else (-1, -1, first["what"])


def _last(notes: list[Note], what: str) -> int:
    return max((note["step"] for note in notes if note["what"] == what), default=0)


def judge(job: Job, reference: Reference, *, memory_lost: Sequence[int] = ()) -> list[str]:
    """All that a hurt and finished job did wrong, as sentences.

    memory_lost: incarnations before whose start the launcher had died, and every snapshot in memory with it.
    """
    problems = [] if job.process is not None and job.process.poll() == 0 else ["the launcher didn't end with 0"]
    problems += job.remains()
    problems += _judge_losses(job, reference)
    found, wrong = resumes(job)
    problems += wrong
    for resume in found:
        problems += _judge_resume(job, resume, resume.incarnation in memory_lost)
    return [*problems, *_judge_saves(job), *_judge_store(job, reference, found)]


def _judge_losses(job: Job, reference: Reference) -> Iterator[str]:
    for rank in range(job.ranks):
        steps, wrong = set(), []
        for note in job.notes(rank, "step"):
            steps.add(note["step"])
            if (note["loss"], note["mean"]) != reference.exact.get((rank, note["step"])):
                wrong.append(f"step {note['step']} in incarnation {note['incarnation']}")
        if wrong:
            yield f"rank {rank}: {len(wrong)} losses differ, the first is that of {wrong[0]}"
        if steps != set(range(1, job.steps + 1)):
            yield f"rank {rank} didn't go through every step"


def _judge_resume(job: Job, resume: Resume, memory_lost: bool) -> Iterator[str]:
    here = f"incarnation {resume.incarnation} went on from step {resume.step} ({resume.tier})"
    if resume.step % job.every:
        yield f"{here}, which nobody saved"
    if resume.step < resume.committed:
        yield f"{here}, older than the committed step {resume.committed}"
    if not memory_lost and resume.step < resume.sealed:
        yield f"{here}, older than step {resume.sealed}, which was whole in the memory of all ranks"
    if resume.tier == "memory" and memory_lost:
        yield f"{here}, but that memory was gone"
    torn = [rank for rank, last in resume.reached.items() if last < resume.step]
    if torn and resume.tier == "memory":
        yield f"{here}, which ranks {torn} never reached in incarnation {resume.source}"


def _judge_saves(job: Job) -> Iterator[str]:
    for rank in range(job.ranks):
        for note in job.notes(rank):
            if note["what"] in ("failed", "unsaved"):
                where = f"rank {rank}, incarnation {note['incarnation']}"
                yield f"{where}: step {note['step']} not saved: {note.get('error')}"
        ends = job.notes(rank, "done")
        if len(ends) != 1 or ends[0]["failed"] or ends[0]["skipped"]:
            yield f"rank {rank} ended as {ends}"


def _judge_store(job: Job, reference: Reference, found: Sequence[Resume]) -> Iterator[str]:
    catalog = job.catalog()
    overview = catalog.overview()
    yield from overview.problems
    for commit in overview.commits:
        if commit.state != "committed":
            where = f"the commit of step {commit.step}, incarnation {commit.incarnation}"
            yield f"{where} is {commit.state}: {commit.reason}"
    for resume in found:
        parent = overview.fences[resume.incarnation].parent
        told = (parent.step, parent.incarnation) if parent else (0, 0)
        if told != (resume.step, resume.source):
            yield f"the fence of incarnation {resume.incarnation} says {told}, its ranks {(resume.step, resume.source)}"
    valid = overview.valid
    if not valid or valid[0].step != job.steps:
        yield "the last step isn't committed"
    differ = [(commit, names) for commit in valid if (names := _differences(catalog, commit, reference))]
    if differ:
        commit, names = differ[-1]  # the oldest: the others follow from it
        yield (
            f"{len(differ)} checkpoints differ, the first is that of step {commit.step}, incarnation "
            f"{commit.incarnation}, in {len(names)} places, as in {names[0]}"
        )


def _differences(catalog: Catalog, commit: CommitInfo, reference: Reference) -> list[str]:
    mine, theirs = state_of(catalog, commit), reference.states.get(commit.step, {})
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
