"""`ckptrt-launch`: torchrun's command line, our supervisor.

The zygote is started before anything else is imported, so that it and this process import torch side by side. What is
more than one node is handed to torch's own elastic agent, after a line that says so.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ckptrt import env
from ckptrt.agents.zygote_workers import ZygoteProcess
from ckptrt.errors import Error, UsageError

if TYPE_CHECKING:
    from ckptrt.agents.job import Job
    from ckptrt.agents.options import Plan

__all__ = ["main"]

_NPROC = re.compile(r"--nproc?(?:[-_](?:p(?:e(?:r(?:[-_](?:n(?:o(?:d(?:e)?)?)?)?)?)?)?)?)?(?:=(.*))?")
_NO_ZYGOTE = {"-h", "--help", "--no-python", "--no_python"}


def main(argv: Sequence[str] | None = None) -> int:
    """Launch a job and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    logging.basicConfig(level=_log_level(), format="ckptrt-launch: %(levelname)s %(name)s: %(message)s")
    zygote = None if not args or _NO_ZYGOTE & set(args) else ZygoteProcess(_zygote_environ(_guess_workers(args)))
    try:
        from ckptrt.agents.options import plan

        planned = plan(args)
        if planned.job is None:
            if zygote is not None:
                zygote.close()
                zygote = None
            return _hand_over(planned)
        _check_script(planned.job)
        job, started = planned.job, zygote
        zygote = None  # from here on it belongs to the agent
        return _supervise(job, started, planned)
    except Error as error:
        _say(f"error[{error.code}]: {error}")
        return error.exit_code
    finally:
        if zygote is not None:
            zygote.close()


def _check_script(job: Job) -> None:
    """A script that isn't there would fail on every rank, and once more after a restart."""
    program = job.program
    if program.kind in ("script", "path") and not os.path.exists(os.path.join(job.cwd, program.target)):
        raise UsageError(f"there is no {program.target} in {job.cwd}", hint="check the path of the training script")


def _log_level() -> int:
    """LOGLEVEL, which torchrun reads too; warnings by default."""
    level = getattr(logging, env.launch_environ().get("LOGLEVEL", "WARNING").upper(), None)
    return level if isinstance(level, int) else logging.WARNING


def _supervise(job: Job, zygote: ZygoteProcess | None, planned: Plan) -> int:
    from ckptrt.agents.agent import Agent
    from ckptrt.agents.console import Console
    from ckptrt.agents.workers import ColdWorkers, WorkerGroup
    from ckptrt.agents.zygote_workers import ZygoteWorkers

    console = Console()
    for text in _greeting(job):
        console.say(text)
    group: WorkerGroup
    if job.cold:
        if zygote is not None:
            zygote.close()
        group = ColdWorkers()
    else:
        if zygote is not None and zygote.environ.get("OMP_NUM_THREADS") != job.environ.get("OMP_NUM_THREADS"):
            zygote.close()  # the guess was wrong, and libraries read this when they are loaded
            zygote = None
        group = ZygoteWorkers(zygote or ZygoteProcess(dict(job.environ)), preload=job.preload, path=job.preload_path)
    try:
        code = Agent(job, group, console).run()
    finally:
        group.close()
        console.close()
    _record_event(code, planned.args.event_log_handler)
    return code


def _greeting(job: Job) -> list[str]:
    from ckptrt.agents.report import line

    ranks = "rank" if job.num_workers == 1 else "ranks"
    lines = [f"ckptrt-launch {_version()} · run {job.run} · 1 node × {job.num_workers} {ranks}"]
    if job.url:
        lines.append(line("checkpoints", job.url + (f", first to {job.local_dir}" if job.local_dir else "")))
    if job.logs.directory:
        lines.append(line("logs", os.path.relpath(job.logs.directory)))
    if job.cold and job.program.kind != "command":
        lines.append(line("warn", f"no warm start: {job.cold}; each start takes seconds longer"))
    return lines + [line("note", text) for text in job.notes]


def _hand_over(planned: Plan) -> int:
    """Let torch's own elastic agent run the job, as torchrun would."""
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run

    _say(
        f"ckptrt-launch {_version()} · {planned.fallback}: torch's own elastic agent runs this job;"
        " checkpoints work, supervision is torchrun's"
    )
    environ = env.launch_environ()
    # Its default keeps one store across restarts, which hands new ranks the addresses of dead ones.
    environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    named = {env.DIR: planned.args.ckpt_dir, env.LOCAL_DIR: planned.args.ckpt_local_dir}
    environ |= {name: value for name, value in named.items() if value}
    env.replace(environ)
    record(run)(planned.args)
    return 0


def _record_event(code: int, handler: str) -> None:
    """Tell torch elastic's event handler, if the user named one, how the job ended."""
    if handler == "null":
        return
    from torch.distributed.elastic.events import record
    from torch.distributed.elastic.events.api import Event, EventSource

    state = "SUCCEEDED" if code == 0 else "FAILED"
    name = f"torchelastic.worker.status.{state}"
    record(Event(name=name, source=EventSource.AGENT, metadata={"exit_code": code}), handler)


def _guess_workers(args: Sequence[str]) -> int:
    """The number of workers that the command line seems to ask for; a wrong guess costs a second zygote, no more."""
    text = env.launch_environ().get("PET_NPROC_PER_NODE", "1")
    for index, word in enumerate(args):
        if (match := _NPROC.fullmatch(word)) is not None:
            text = match[1] if match[1] is not None else args[index + 1] if index + 1 < len(args) else text
            break
    return int(text) if text.isdigit() else len(os.sched_getaffinity(0))


def _zygote_environ(num_workers: int) -> dict[str, str]:
    environ = env.launch_environ()
    if num_workers > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    return environ


def _open_standard_streams() -> None:
    """Have descriptors 0 to 2 open, so that no other file gets one of these numbers."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return


def _version() -> str:
    try:
        return version("ckptrt")
    except PackageNotFoundError:
        return "(not installed)"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
