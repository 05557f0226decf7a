"""The command line: torchrun's own parser, plus our `--ckpt-*` options; what comes out is a `Job`.

Every option of the installed torch is accepted, in both spellings, abbreviated, and from its PET_ variable. Imports
torch, so it is imported when the zygote already runs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config as parse_rendezvous_config
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

from ckptrt import env
from ckptrt.agents.job import Job, Program
from ckptrt.agents.line import local_address
from ckptrt.agents.logs import LogOptions, parse_streams
from ckptrt.agents.notices import parse_watch
from ckptrt.agents.workerproc import Kind, can_run_forked
from ckptrt.agents.world import Rules
from ckptrt.errors import UsageError

__all__ = ["Plan", "build_parser", "parse_duration", "plan"]

DEFAULT_MAX_RESTARTS = 10
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
_OWN_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_RDZV_TIMES = {"last_call_timeout": 2.0, "join_timeout": 600.0}  # torch's keys, our values in seconds
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Either a job for our supervisor, or why torch's own agent has to do it, with its arguments."""

    job: Job | None
    fallback: str
    args: argparse.Namespace


def build_parser() -> argparse.ArgumentParser:
    """torchrun's parser with our options and our few defaults."""
    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "ckptrt-launch"
    parser.description = "torchrun with checkpoints: takes every torchrun command line and restarts what fails."
    environ = env.launch_environ()
    for name, default in (
        ("max_restarts", DEFAULT_MAX_RESTARTS),
        ("signals_to_handle", DEFAULT_SIGNALS),
        ("redirects", None),
        ("tee", None),
        ("log_dir", None),
    ):
        if f"PET_{name.upper()}" not in environ:
            parser.set_defaults(**{name: default})
    group = parser.add_argument_group("checkpoints and restarts (each also as CKPTRT_NAME in the environment)")
    for name, default, metavar, text in (
        ("dir", "", "URL", "The run's directory or URL, when the script names none."),
        (
            "local-dir",
            "",
            "PATH",
            "A fast local directory to write to first; what is committed is flushed to --ckpt-dir.",
        ),
        ("resume", "auto", "WHEN", "auto: the newest good checkpoint, else fresh; latest: it must exist; STEP; never."),
        ("etcd-endpoints", "", "URLS", "Comma-separated etcd endpoints. Without, one is started for this job alone."),
        ("world-multiple", "1", "N", "The number of ranks is a multiple of it, whatever nodes come and go."),
        ("node-timeout", "5", "TIME", "Silence after which a node is given up."),
        ("node-name", "", "NAME", "What this node is called. The host's name if not given."),
        (
            "grow-after",
            "60",
            "TIME",
            "How long workers run before they stop at a step to take in new nodes.",
        ),
        ("grace-timeout", "3", "TIME", "From SIGTERM to SIGKILL for the other workers after a failure."),
        ("drain-timeout", "30", "TIME", "The same after a signal to the launcher. --shutdown-timeout overrides it."),
        ("drain-signals", "SIGTERM,SIGUSR1,SIGUSR2", "SIGNALS", "Those at which the workers save a last step and end."),
        ("preempt-watch", "none", "CLOUD", "Ask aws, gcp or azure whether the machine is taken back, and drain then."),
        ("preempt-exit-code", "75", "N", "The launcher's exit code after that."),
        ("hang-timeout", "auto", "TIME", "Without a step for so long, restart; auto learns it, from 5m on; off."),
        ("preload", "", "MODULES", "Comma-separated modules to import once, ahead of every start."),
        ("max-no-progress", "3", "N", "Restarts in a row without a newly committed step."),
    ):
        value = env.setting(name)
        group.add_argument(
            f"--ckpt-{name}",
            f"--ckpt_{name.replace('-', '_')}",
            dest=f"ckpt_{name.replace('-', '_')}",
            default=default if value is None else value,
            metavar=metavar,
            help=f"{text} Default: {default or 'none'}.",
        )
    return parser


def parse_duration(text: str) -> float:
    """Seconds in `90`, `90s`, `5m` or `2h`. UsageError for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a duration such as 90, 90s, 5m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


def plan(argv: Sequence[str]) -> Plan:
    """What this command line asks for. SystemExit from argparse, UsageError for values that make no sense."""
    args = build_parser().parse_args(list(argv))
    environ = env.launch_environ()
    try:
        min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"--nnodes: {error}") from error
    if not 0 < min_nodes <= max_nodes:
        raise UsageError(f"--nnodes={args.nnodes}: must be MIN:MAX with 0 < MIN <= MAX")
    fallback = _why_fallback(args, max_nodes, environ)
    if fallback:
        _restore_torch_defaults(args)
        return Plan(job=None, fallback=fallback, args=args)
    return Plan(job=_job(args, environ), fallback="", args=args)


def _why_fallback(args: argparse.Namespace, max_nodes: int, environ: dict[str, str]) -> str:
    if max_nodes > 1 and not args.ckpt_etcd_endpoints:
        return f"--nnodes={args.nnodes} is more than one node, and --ckpt-etcd-endpoints names no etcd for them"
    if args.rdzv_backend not in _OWN_BACKENDS and not args.standalone:
        return f"--rdzv-backend={args.rdzv_backend} is another package's"
    if args.rdzv_backend == "static" and args.node_rank != 0 and max_nodes == 1:
        return f"--node-rank={args.node_rank} joins a node that was started elsewhere"
    if args.logs_specs is not None:
        return f"--logs-specs={args.logs_specs} is another package's"
    if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        return "TORCHELASTIC_ENABLE_FILE_TIMER asks for torch's own watchdog"
    return ""


def _restore_torch_defaults(args: argparse.Namespace) -> None:
    """torch's own agent takes no None where it has a default of its own; its log directory and restarts stay ours."""
    args.redirects = args.redirects or "0"
    args.tee = args.tee or "0"


def _job(args: argparse.Namespace, environ: dict[str, str]) -> Job:
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts={args.max_restarts}: must be 0 or more")
    try:
        num_workers = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node={args.nproc_per_node}: {error}") from error
    if num_workers < 1:
        raise UsageError(f"--nproc-per-node={args.nproc_per_node}: must be 1 or more")
    notes: list[str] = []
    if "OMP_NUM_THREADS" not in environ and num_workers > 1:
        environ["OMP_NUM_THREADS"] = "1"
        notes.append("OMP_NUM_THREADS=1 for each worker, as torchrun sets it; set it yourself for more")
    program = _program(args, environ)
    host, port, run_id, run = _names(args)
    rules = _rules(args)
    if rules.max_nodes > 1:
        host, port = _own_address(args), None
        run_id = args.rdzv_id
    drain_s = _drain_s(args, environ)
    return Job(
        run=run,
        run_id=run_id,
        program=program,
        num_workers=num_workers,
        max_restarts=args.max_restarts,
        max_no_progress=_count("--ckpt-max-no-progress", args.ckpt_max_no_progress),
        grace_s=parse_duration(args.ckpt_grace_timeout),
        drain_s=drain_s,
        role=args.role,
        logs=_logs(args, run, num_workers, environ),
        environ=environ,
        cwd=os.getcwd(),
        signals=_signals(args.signals_to_handle),
        hang_timeout_s=_hang_timeout_s(args.ckpt_hang_timeout),
        drain_signals=_signals(args.ckpt_drain_signals, "--ckpt-drain-signals") if args.ckpt_drain_signals else (),
        preempt_watch=parse_watch(args.ckpt_preempt_watch),
        drained_exit=_exit_code(args.ckpt_preempt_exit_code),
        url=_url(args.ckpt_dir),
        local_dir=os.path.abspath(args.ckpt_local_dir) if args.ckpt_local_dir else "",
        resume=_resume(args.ckpt_resume),
        etcd_endpoints=_words(args.ckpt_etcd_endpoints),
        preload=_words(args.ckpt_preload),
        preload_path=(_script_folder(program),),
        rules=rules,
        node_name=args.ckpt_node_name,
        node_timeout_s=parse_duration(args.ckpt_node_timeout),
        grow_after_s=parse_duration(args.ckpt_grow_after),
        store_host=host,
        master_port=port,
        virtual_local_rank=args.virtual_local_rank,
        cold=_why_cold(program, os.getcwd()),
        notes=tuple(notes),
    )


def _program(args: argparse.Namespace, environ: dict[str, str]) -> Program:
    kind: Kind = "script"
    if args.run_path:
        kind = "path"
    elif args.no_python:
        if args.module:
            raise UsageError("--no-python and --module can't both be given")
        kind = "command"
    elif args.module:
        kind = "module"
    return Program(
        kind=kind,
        target=args.training_script,
        args=tuple(args.training_script_args),
        interpreter=environ.get("PYTHON_EXEC", sys.executable) if kind in ("script", "module") else sys.executable,
        numa_binding=args.numa_binding,
    )


def _why_cold(program: Program, cwd: str) -> str:
    if program.interpreter != sys.executable:
        return f"PYTHON_EXEC={program.interpreter} is another interpreter"
    if program.numa_binding is not None:
        return f"--numa-binding={program.numa_binding} is applied by numactl"
    return can_run_forked(program.kind, program.target, cwd)


def _names(args: argparse.Namespace) -> tuple[str, int | None, str, str]:
    """The store's host and fixed port (None: any), torch elastic's run id, and our name of the run."""
    host, port = args.local_addr or "127.0.0.1", None
    given = args.rdzv_id if args.rdzv_id != "none" and not args.standalone else ""
    name = re.sub(r"[^\w.-]+", "-", given) or f"{_stem(args.training_script)}-{secrets.token_hex(2)}"
    if args.standalone:
        return host, port, str(uuid.uuid4()), name
    if args.rdzv_backend == "static" and (args.rdzv_endpoint or args.master_port is not None):
        endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        try:
            host, port = parse_rendezvous_endpoint(endpoint.strip(), default_port=-1)
        except ValueError as error:
            raise UsageError(f"{endpoint}: {error}") from error
        if port == -1:
            raise UsageError(f"{endpoint} names no port", hint="add --master-port, or a port to --rdzv-endpoint")
        return host, port, args.rdzv_id, name
    if args.rdzv_backend == "static":  # torchrun makes this a rendezvous of its own, with an id of its own
        return host, port, str(uuid.uuid4()), name
    return host, port, args.rdzv_id, name


def _rules(args: argparse.Namespace) -> Rules:
    """How many nodes, from torchrun's own options and ours."""
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    if max_nodes > 1 and args.rdzv_id == "none":
        raise UsageError(
            f"--nnodes={args.nnodes}: the nodes need a name to find each other by",
            hint="give the same --rdzv-id to all of them, such as the Slurm job's number",
        )
    multiple = _count("--ckpt-world-multiple", args.ckpt_world_multiple)
    if not multiple:
        raise UsageError("--ckpt-world-multiple=0: must be 1 or more")
    try:
        config = parse_rendezvous_config(args.rdzv_conf)
        last_call_s, patience_s = (float(config.get(key, value)) for key, value in _RDZV_TIMES.items())
    except ValueError as error:
        raise UsageError(f"--rdzv-conf={args.rdzv_conf}: {error}") from error
    return Rules(
        min_nodes=min_nodes, max_nodes=max_nodes, multiple=multiple, last_call_s=last_call_s, patience_s=patience_s
    )


def _own_address(args: argparse.Namespace) -> str:
    """Where other nodes reach this one: the address on the way to etcd, which all of them reach."""
    if args.local_addr:
        return str(args.local_addr)
    endpoint = _words(args.ckpt_etcd_endpoints)[0].partition("://")[2] or _words(args.ckpt_etcd_endpoints)[0]
    try:
        return local_address(endpoint)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the way to etcd at {endpoint} can't be found: {error}", hint="check it, or give --local-addr"
        ) from error


def _stem(target: str) -> str:
    stem = os.path.splitext(os.path.basename(target))[0] if "/" in target or target.endswith(".py") else target
    return re.sub(r"[^\w.-]+", "-", stem) or "job"


def _script_folder(program: Program) -> str:
    if program.kind == "script":
        return os.path.dirname(os.path.realpath(program.target))
    return os.getcwd()


def _logs(args: argparse.Namespace, run: str, num_workers: int, environ: dict[str, str]) -> LogOptions:
    base = args.log_dir or "ckptrt-logs"
    if os.path.isfile(base):
        raise UsageError(f"--log-dir={base} is a file")

    def streams(option: str, text: str | None) -> dict[int, int] | None:
        try:
            return None if text is None else parse_streams(text, num_workers)
        except ValueError as error:
            raise UsageError(f"--{option}: {error}") from error

    shown: frozenset[int] | None = None
    if args.local_ranks_filter:
        try:
            shown = frozenset(int(rank) for rank in args.local_ranks_filter.split(","))
        except ValueError as error:
            raise UsageError(
                f"--local-ranks-filter={args.local_ranks_filter}: must be local ranks such as 0,1,2"
            ) from error
    return LogOptions(
        directory=None if base == os.devnull else os.path.join(os.path.abspath(base), run),
        redirects=streams("redirects", args.redirects),
        tee=streams("tee", args.tee),
        shown=shown,
        role=args.role,
        prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        filters=(tuple(args.duplicate_stdout_filters), tuple(args.duplicate_stderr_filters)),
    )


def _signals(text: str, option: str = "--signals-to-handle") -> tuple[int, ...]:
    signums = []
    for name in text.split(","):
        signum = getattr(signal, name.strip(), None)
        if not isinstance(signum, signal.Signals) or signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise UsageError(f"{option}: {name.strip()!r} is not a signal that can be handled")
        signums.append(int(signum))
    return tuple(signums)


def _drain_s(args: argparse.Namespace, environ: dict[str, str]) -> float:
    if args.shutdown_timeout is not None:
        if args.shutdown_timeout < 0:
            raise UsageError(f"--shutdown-timeout={args.shutdown_timeout}: must be 0 or more")
        return float(args.shutdown_timeout)
    return parse_duration(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or args.ckpt_drain_timeout)


def _resume(text: str) -> str:
    if text not in ("auto", "latest", "never") and not text.isdigit():
        raise UsageError(f"--ckpt-resume={text}: must be auto, latest, never or a step")
    return text


def _hang_timeout_s(text: str) -> float | None:
    """None for a learned one, infinity for off."""
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    limit_s = parse_duration(text)
    if limit_s <= 0:
        raise UsageError(f"--ckpt-hang-timeout={text}: must be more than 0; off switches it off")
    return limit_s


def _exit_code(text: Any) -> int:
    if not (str(text).isdigit() and 0 < int(text) < 256):
        raise UsageError(f"--ckpt-preempt-exit-code={text}: must be a number from 1 to 255")
    return int(text)


def _count(option: str, text: Any) -> int:
    if not str(text).isdigit():
        raise UsageError(f"{option}={text}: must be a number, 0 or more")
    return int(text)


def _url(text: str) -> str:
    return text if not text or "://" in text else os.path.abspath(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r"[,\s]+", text) if word)
