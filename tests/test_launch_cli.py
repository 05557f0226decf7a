"""`ckptrt-launch` takes torchrun's command lines: what workers are told is compared with what torchrun tells them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptrt.agents import options
from ckptrt.agents.job import Job, Order, worker_env
from ckptrt.agents.launch import _guess_workers
from ckptrt.agents.logs import LogOptions, open_set_logs
from ckptrt.errors import UsageError

SAME = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES", "FOREIGN",
)  # fmt: skip
THERE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line; also_same: further variables that have to be equal, beside those that are in every case."""

    argv: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    also_same: tuple[str, ...] = ()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PORT = str(_free_port())
RESTARTS = ("--max-restarts=3",)  # our one other default; test_defaults has it
GRID = {
    "one worker": Case(argv=[*RESTARTS, "train.py"]),
    "arguments of the script": Case(argv=[*RESTARTS, "train.py", "--nproc-per-node", "9", "--lr", "1 2", "-m"]),
    "two workers": Case(argv=[*RESTARTS, "--nproc-per-node", "2", "train.py"]),
    "underscores": Case(argv=["--max_restarts=1", "--nproc_per_node=2", "train.py"]),
    "abbreviated": Case(argv=["--max-r", "1", "--nproc-per-n", "2", "--stand", "train.py"]),
    "PET variables": Case(
        argv=["train.py"], environ={"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "4", "PET_ROLE": "pet"}
    ),
    "a word beats a variable": Case(
        argv=[*RESTARTS, "--nproc-per-node=1", "train.py"], environ={"PET_NPROC_PER_NODE": "3"}
    ),
    "cpu": Case(argv=[*RESTARTS, "--nproc-per-node=cpu", "train.py"]),
    "module": Case(argv=[*RESTARTS, "-m", "package.module", "--flag"]),
    "module by variable": Case(argv=[*RESTARTS, "package.module"], environ={"PET_MODULE": "1"}),
    "no python": Case(argv=[*RESTARTS, "--no-python", "--nproc-per-node=2", "/bin/echo", "rank ${local_rank}", "$x"]),
    "local rank in arguments": Case(argv=[*RESTARTS, "--nproc-per-node=2", "train.py", "--gpu=${local_rank}"]),
    "another interpreter": Case(argv=[*RESTARTS, "train.py"], environ={"PYTHON_EXEC": "/opt/python"}),
    "standalone": Case(argv=[*RESTARTS, "--standalone", "--nnodes=1", "--nproc-per-node=2", "train.py"]),
    "own rendezvous": Case(
        argv=[*RESTARTS, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job-7", "train.py"],
        also_same=("TORCHELASTIC_RUN_ID",),
    ),
    "static port": Case(
        argv=[*RESTARTS, "--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={PORT}", "train.py"],
        also_same=("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    ),
    "static endpoint": Case(
        argv=[*RESTARTS, f"--rdzv-endpoint=127.0.0.1:{PORT}", "--rdzv-id=s1", "train.py"],
        also_same=("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    ),
    "local address": Case(argv=[*RESTARTS, "--local-addr=127.0.0.1", "train.py"], also_same=("MASTER_ADDR",)),
    "role": Case(argv=[*RESTARTS, "--role=trainer", "--nproc-per-node=2", "train.py"]),
    "threads": Case(argv=[*RESTARTS, "--nproc-per-node=2", "train.py"], environ={"OMP_NUM_THREADS": "3"}),
    "virtual local rank": Case(argv=[*RESTARTS, "--virtual-local-rank", "--nproc-per-node=2", "train.py"]),
    "virtual local rank of chosen devices": Case(
        argv=[*RESTARTS, "--virtual-local-rank", "--nproc-per-node=2", "train.py"],
        environ={"CUDA_VISIBLE_DEVICES": "5,7"},
    ),
    "devices": Case(argv=[*RESTARTS, "--nproc-per-node=2", "train.py"], environ={"CUDA_VISIBLE_DEVICES": "5,7"}),
    "run path": Case(argv=[*RESTARTS, "--run-path", "/srv/train.py", "--x"]),
    "nccl": Case(argv=[*RESTARTS, "train.py"], environ={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    "logs": Case(argv=[*RESTARTS, "-r", "3", "-t", "0:1", "--local-ranks-filter=0", "--nproc-per-node=2", "train.py"]),
}


@pytest.fixture(scope="module")
def clean_environ() -> dict[str, str]:
    dropped = ("PET_", "CKPTRT_", "TORCHELASTIC_", "OMP_", "CUDA_", "PYTHON_EXEC")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(dropped)}, "FOREIGN": "kept"}


@pytest.fixture(scope="module")
def torchrun(clean_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the real torchrun starts for every case, from one process."""
    cases = [{"argv": list(case.argv), "environ": case.environ} for case in GRID.values()]
    script = str(Path(__file__).parent / "support_torchrun.py")
    result = subprocess.run(
        [sys.executable, script],
        input=json.dumps(cases),
        env=clean_environ,
        cwd=tmp_path_factory.mktemp("torchrun"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(zip(GRID, json.loads(result.stdout), strict=True))


def ours(case: Case, clean_environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job that our command line makes of it."""
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ):
        monkeypatch.delenv(name)
    for name, value in {**clean_environ, **case.environ}.items():
        monkeypatch.setenv(name, value)
    planned = options.plan(case.argv)
    assert planned.job is not None, planned.fallback
    return planned.job


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_workers_are_told_what_torchrun_tells_them(
    name: str,
    torchrun: dict[str, dict[str, Any]],
    clean_environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, theirs = GRID[name], torchrun[name]
    job = ours(case, clean_environ, tmp_path, monkeypatch)
    assert job.num_workers == len(theirs["envs"])
    logs = open_set_logs(job.logs, 1, job.num_workers)
    logs.close_streams()
    order = Order(
        incarnation=1,
        restarts=0,
        resume="fresh",
        url="",
        local_dir="",
        first_rank=0,
        num_local=job.num_workers,
        world_size=job.num_workers,
        store_host=job.store_host,
        store_port=job.master_port or 1,
    )
    for rank in range(job.num_workers):
        environ = worker_env(job, order, rank, error_file=logs.error_file(rank), ours={})
        wanted = theirs["envs"][str(rank)]
        for variable in (*SAME, *case.also_same):
            assert environ.get(variable) == wanted.get(variable), variable
        for variable in THERE:
            assert environ[variable], variable
            assert wanted[variable], variable
        args = theirs["args"][str(rank)]
        if job.program.kind == "path":
            assert theirs["command"] == ["run_script_path"]
            assert [job.program.target, *job.program.args_for(rank)] == args
        else:
            assert [*job.program.command(rank)] == [*theirs["command"], *args]
        request = job.program.request(rank, environ, job.cwd)
        if job.program.kind in ("script", "module"):  # what follows the interpreter's own options
            assert [request.target, *request.args] == args[2 if job.program.kind == "module" else 1 :]


def plan_job(argv: Sequence[str]) -> Job:
    planned = options.plan(argv)
    assert planned.job is not None, planned.fallback
    return planned.job


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PET_", "CKPTRT_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    job = plan_job(["train.py"])
    assert (job.max_restarts, job.max_no_progress, job.resume, job.grace_s, job.drain_s) == (10, 3, "auto", 3.0, 30.0)
    assert job.run.startswith("train-")
    assert job.logs.directory == f"{os.getcwd()}/ckptrt-logs/{job.run}"
    assert plan_job(["--max-restarts=0", "train.py"]).max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert plan_job(["train.py"]).max_restarts == 0


def test_our_options_in_three_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (
        ["--ckpt-dir", "runs/x", "--ckpt-resume=40", "--ckpt-max-no-progress=5", "train.py", "--ckpt-dir", "theirs"],
        ["--ckpt_dir=runs/x", "--ckpt_resume", "40", "--ckpt_max_no_progress", "5", "train.py", "--ckpt-dir", "theirs"],
    ):
        job = plan_job(argv)
        assert (job.url, job.resume, job.max_no_progress) == (f"{os.getcwd()}/runs/x", "40", 5)
        assert job.program.args == ("--ckpt-dir", "theirs")
    monkeypatch.setenv("CKPTRT_DIR", "s3://bucket/run")
    monkeypatch.setenv("CKPTRT_RESUME", "latest")
    monkeypatch.setenv("CKPTRT_ETCD_ENDPOINTS", "http://a:1, http://b:2")
    monkeypatch.setenv("CKPTRT_PRELOAD", "numpy,json")
    monkeypatch.setenv("CKPTRT_GRACE_TIMEOUT", "1.5s")
    monkeypatch.setenv("CKPTRT_DRAIN_TIMEOUT", "2m")
    job = plan_job(["train.py"])
    assert (job.url, job.resume, job.grace_s, job.drain_s) == ("s3://bucket/run", "latest", 1.5, 120.0)
    assert (job.etcd_endpoints, job.preload) == (("http://a:1", "http://b:2"), ("numpy", "json"))
    assert plan_job(["--shutdown-timeout=7", "train.py"]).drain_s == 7.0


def test_the_run_is_named_by_the_user_or_by_the_script() -> None:
    assert plan_job(["--rdzv-id", "gpt small/2", "train.py"]).run == "gpt-small-2"
    assert plan_job(["-m", "pkg.train"]).run.startswith("pkg.train-")
    assert plan_job(["--standalone", "--rdzv-id=x", "a/b.py"]).run.startswith("b-")  # torchrun ignores the id too


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--nnodes=2", "train.py"], "more than one node"),
        (["--nnodes=1:4", "train.py"], "more than one node"),
        (["--node-rank=1", "--master-port=1", "train.py"], "started elsewhere"),
        (["--rdzv-backend=foreign", "train.py"], "another package's"),
        (["--logs-specs=foreign", "train.py"], "another package's"),
    ],
)
def test_what_torch_has_to_do_itself(argv: list[str], why: str) -> None:
    planned = options.plan(argv)
    assert planned.job is None
    assert why in planned.fallback
    assert (planned.args.redirects, planned.args.tee) == ("0", "0")


@pytest.mark.parametrize(
    "argv",
    [
        ["--nnodes=0", "train.py"],
        ["--nnodes=a", "train.py"],
        ["--nproc-per-node=many", "train.py"],
        ["--nproc-per-node=0", "train.py"],
        ["--max-restarts=-1", "train.py"],
        ["--no-python", "-m", "x"],
        ["--redirects=4", "train.py"],
        ["--local-ranks-filter=a", "train.py"],
        ["--signals-to-handle=SIGKILL", "train.py"],
        ["--signals-to-handle=NOPE", "train.py"],
        ["--ckpt-resume=sometimes", "train.py"],
        ["--ckpt-grace-timeout=soon", "train.py"],
        ["--ckpt-max-no-progress=-1", "train.py"],
        ["--shutdown-timeout=-1", "train.py"],
        ["--rdzv-endpoint=host", "train.py"],
    ],
)
def test_bad_values_are_refused_with_words(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        options.plan(argv)
    assert caught.value.exit_code == 2
    assert argv[0].split("=")[-1] in caught.value.what or argv[0] in caught.value.what


def test_an_unknown_option_is_argparse_s_business(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options.plan(["--no-such-option", "train.py"])
    assert caught.value.code == 2
    assert "ckptrt-launch: error: unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "workers"),
    [
        (["train.py"], 1),
        (["--nproc-per-node", "4", "train.py"], 4),
        (["--nproc_per_node=4", "train.py"], 4),
        (["--nproc=4", "train.py"], 4),
        (["--nproc-per", "4", "train.py"], 4),
        (["--standalone", "--nproc-per-node=2", "train.py", "--nproc-per-node=9"], 2),
    ],
)
def test_the_first_guess_at_the_number_of_workers(argv: list[str], workers: int) -> None:
    assert _guess_workers(argv) == workers


def log_options(tmp_path: Path, **facts: Any) -> LogOptions:
    base: dict[str, Any] = {
        "directory": str(tmp_path / "logs"),
        "redirects": None,
        "tee": None,
        "shown": None,
        "role": "default",
        "prefix": None,
    }
    return LogOptions(**{**base, **facts})


def test_all_ranks_go_to_files_and_rank_0_to_the_console(tmp_path: Path) -> None:
    logs = open_set_logs(log_options(tmp_path), 7, 3)
    for rank in range(3):
        os.write(logs.streams[rank][0], b"out")
        os.write(logs.streams[rank][1], b"err")
        assert (tmp_path / f"logs/i7/{rank}/stdout.log").read_bytes() == b"out"
        assert logs.tail(rank, 5) == ["err"]
    logs.close_streams()
    assert [(Path(f.path).parent.name, f.sink, f.prefix) for f in logs.follows] == [("0", 1, b""), ("0", 2, b"")]
    assert logs.shown == {0}
    assert open_set_logs(log_options(tmp_path), 7, 1).directory == str(tmp_path / "logs/i7.2")  # never used twice


def test_the_filter_chooses_who_is_shown(tmp_path: Path) -> None:
    logs = open_set_logs(log_options(tmp_path, shown=frozenset({1, 2})), 1, 3)
    logs.close_streams()
    assert logs.shown == {1, 2}
    assert {Path(f.path).parent.name for f in logs.follows} == {"1", "2"}


def test_redirect_and_tee_as_torchrun_has_them(tmp_path: Path) -> None:
    facts = {"redirects": {0: 1, 1: 0, 2: 3}, "tee": {0: 0, 1: 2, 2: 0}, "role": "tr"}
    logs = open_set_logs(log_options(tmp_path, **facts), 1, 3)
    files = {rank: tuple(bool(path) for path in paths) for rank, paths in logs.files.items()}
    assert files == {0: (True, False), 1: (False, True), 2: (True, True)}
    assert logs.streams[0][1] == 2  # not redirected: straight to our own stderr
    assert logs.streams[1][0] == 1
    assert [(Path(f.path).parts[-2:], f.sink, f.prefix) for f in logs.follows] == [(("1", "stderr.log"), 2, b"[tr1]:")]
    logs.close_streams()


def test_without_files_everything_goes_to_the_console(tmp_path: Path) -> None:
    logs = open_set_logs(log_options(tmp_path, directory=None), 1, 2)
    assert logs.streams == {0: (1, 2), 1: (1, 2)}
    assert logs.error_file(0) == ""


def test_lines_with_a_word_are_copied_to_the_filtered_file(tmp_path: Path) -> None:
    facts = {"redirects": {}, "tee": {0: 1, 1: 1}, "filters": (("loss", "acc"), ())}
    logs = open_set_logs(log_options(tmp_path, **facts), 1, 2)
    for rank in (0, 1):
        os.write(logs.streams[rank][0], f"loss {rank}\nnoise\nacc {rank}".encode())
    logs.close_streams()
    for follow in logs.follows:
        follow.sink = os.open(os.devnull, os.O_WRONLY) if isinstance(follow.sink, int) else follow.sink
        follow.copy(last=True)
    assert (tmp_path / "logs/i1/filtered_stdout.log").read_text() == "loss 0\nacc 0\nloss 1\nacc 1\n"
