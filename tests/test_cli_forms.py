"""What holds for every verb of `ckptrt`: the forms of its output, its exit codes, and how it behaves in a shell."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from support_runs import FakeRun, make_run, overwrite

from ckptrt.storage import cli as cli_package
from ckptrt.storage.catalog import CommitId
from ckptrt.storage.cli import _documents, _output, cli
from ckptrt.storage.cli._settings import ParamType, Settings
from ckptrt.storage.layout import commit_name, fence_name
from ckptrt.storage.pins import pin
from ckptrt.storage.tiers.local import LocalTier

CKPTRT = [sys.executable, "-m", "ckptrt.storage.cli"]

VERBS = [verb for verb in cli.list_commands(click.Context(cli)) if verb != "completion"]


def ckptrt(*args: str | Path, **env: str) -> Result:
    return CliRunner(env=env).invoke(cli, [str(arg) for arg in args], prog_name="ckptrt")


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Something of everything: two incarnations, a cut-off branch, borrowed data, a pin, loose data, damage."""
    run = make_run(LocalTier(str(tmp_path / "runs" / "gpt")), [10, 20, 30])
    run.fence(2, (20, 1))
    old = run.catalog.open_checkpoint(CommitId(10, 1)).receipt(0)
    run.commit(40, 2, {0: run.write_rank(40, 2, 0, borrow=old), 1: run.write_rank(40, 2, 1)})
    run.save(50, 2)
    run.write_data(60, 2)
    pin(run.catalog, CommitId(10, 1), "for the paper")
    return run


@pytest.fixture
def path(run: FakeRun) -> Path:
    return Path(run.tier.root)


def hurt(run: FakeRun) -> None:
    shard = Path(run.tier.root, "data/s000000050.i00000002.0a/r00001.safetensors")
    data = bytearray(shard.read_bytes())
    data[4200] ^= 1
    shard.write_bytes(data)
    overwrite(run.tier, commit_name(CommitId(20, 1)), b"{}")
    overwrite(run.tier, fence_name(1), b"x")


def calls(path: Path) -> dict[str, list[list[str]]]:
    """Arguments by which every verb prints every part of its document."""
    here = str(path)
    copy, out, imported = (str(path.parent.parent / name) for name in ("copy", "out", "imported"))
    return {
        "ls": [[here], [str(path.parent)]],
        "show": [[f"{here}@50"], [f"{here}@40", "--tensors"]],
        "tree": [[f"{here}@50"]],
        "diff": [[f"{here}@50", "40"], [f"{here}@50", "40", "--data", "--stat"], [f"{here}@50", "50"]],
        "du": [[here]],
        "events": [[here]],
        "verify": [[here], [here, "--read-data"], [f"{here}@40", "--deep"]],
        "doctor": [[here], [here, "--write-test"]],
        "export": [["safetensors", f"{here}@50", out, "-n"], ["safetensors", f"{here}@50", out, "--dtype", "bf16"]],
        "import": [["safetensors", out, imported, "--step", "7", "-n"], ["safetensors", out, imported, "--step", "7"]],
        "cp": [[f"{here}@50", copy, "-n"], [f"{here}@50", copy]],
        "pin": [[f"{here}@40"]],
        "unpin": [[f"{here}@40"]],
        "prune": [[here, "--keep-last", "1", "--grace", "0", "-n"], [here, "--keep-last", "1", "--grace", "0", "-y"]],
        "drain": [],  # needs a job: test_drain.py
    }


@pytest.mark.parametrize("damaged", [False, True])
def test_json_is_as_documented(run: FakeRun, path: Path, damaged: bool) -> None:
    """Every field of every verb, on a run that is whole and on one that isn't."""
    if damaged:
        hurt(run)
    for verb, ways in calls(path).items():
        for args in ways if verb in VERBS else ():
            result = ckptrt(verb, *args, "--json")
            if not result.stdout:
                assert damaged, result.stderr
                continue
            found = json.loads(result.stdout)
            check(found, _documents.DOCUMENTS[verb])
            assert next(iter(found)) == "schema"
            lines = [json.loads(line) for line in ckptrt(verb, *args, "--format", "jsonl").stdout.splitlines()]
            if verb not in ("cp", "export", "import", "pin", "unpin", "prune"):  # those find the work done
                check(joined(lines), _documents.DOCUMENTS[verb])


def check(document: Any, kinds: Iterable[type[_documents.Document]]) -> None:
    problems = []
    for kind in kinds:
        try:
            msgspec.convert(document, kind)
        except msgspec.ValidationError as error:
            problems.append(f"{kind.__name__}: {error}")
        else:
            return
    raise AssertionError("\n".join([*problems, json.dumps(document)]))


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """JSON lines as the one document that they stand for."""
    head, *items = lines
    assert head.pop("type") == "head"
    fields = {field for kinds in _documents.DOCUMENTS.values() for kind in kinds for field in kind.__struct_fields__}
    for item in items:
        name = item.pop("type")
        assert name in fields
        head.setdefault(name, []).append(item.get("value") if set(item) == {"value"} else item)
    return {**{name: [] for name in missing_lists(head)}, **head}


def missing_lists(head: dict[str, Any]) -> set[str]:
    """List fields of the document that fits: a list without items leaves no line."""
    for kinds in _documents.DOCUMENTS.values():
        for kind in kinds:
            lists = {f.encode_name for f in msgspec.structs.fields(kind) if str(f.type).startswith("list")}
            if set(head) <= set(kind.__struct_fields__) and set(kind.__struct_fields__) - set(head) <= lists:
                return lists - set(head)
    return set()


def test_every_verb_is_tried_and_documented(path: Path) -> None:
    assert set(VERBS) <= set(calls(path))
    assert set(VERBS) <= set(_documents.DOCUMENTS)


def test_a_document_that_differs_is_found(path: Path) -> None:
    document = json.loads(ckptrt("ls", path, "--json").stdout)
    for wrong in ({**document, "more": 1}, {**document, "url": 1}, {"url": ""}):
        with pytest.raises(AssertionError):
            check(wrong, [_documents.Ls])


def test_quiet_prints_names_only(path: Path) -> None:
    assert ckptrt("ls", path, "-q").stdout == "50\n40\n20\n10\n"
    assert ckptrt("ls", path.parent, "-q").stdout == "gpt\n"
    assert ckptrt("show", f"{path}@50", "-q").stdout == "50\n"
    assert ckptrt("show", f"{path}@50", "-q", "--tensors").stdout.split() == [
        "model.bias",
        "model.weight",
        "rng",
        "rng",
    ]
    assert ckptrt("verify", path, "-q").stdout == ""
    assert ckptrt("-q", "prune", path, "--keep-last", "1", "-n").stdout == ""
    assert ckptrt("ls", path, CKPTRT_FORMAT="quiet").stdout == "50\n40\n20\n10\n"
    assert json.loads(ckptrt("--json", "ls", path, CKPTRT_FORMAT="quiet").stdout)["checkpoints"]
    assert json.loads(ckptrt("ls", path, "--json", CKPTRT_FORMAT="quiet").stdout)["checkpoints"]


@pytest.mark.parametrize("verb", [*VERBS, "completion"])
def test_help_fits_a_terminal_and_has_examples(verb: str) -> None:
    text = ckptrt(verb, "--help").stdout
    own, _, examples = text.partition("Examples:")
    assert max(map(len, own.splitlines())) <= 80
    assert max(map(len, examples.splitlines())) <= 100
    assert f"ckptrt {verb}" in text or f" {verb} " in text.partition("Examples:")[2]


def test_help_lists_verbs_by_what_they_are_for() -> None:
    text = ckptrt("--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    heads = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Look:", "Check:", "Move:", "Keep:", "Run:", "Set up:", "Options:"]


def test_a_verb_that_is_not_installed_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli_package._GROUPS, "Odd", {"juggle": "Juggle checkpoints."})
    assert "juggle" not in ckptrt("--help").stdout
    assert ckptrt("juggle").exit_code == 2


def test_a_mistyped_verb_is_guessed() -> None:
    result = ckptrt("verfiy", "x")
    assert (result.exit_code, "did you mean verify?" in result.stderr) == (2, True)
    assert "did you mean" not in ckptrt("xyzzy").stderr


# --- what goes wrong


def test_no_error_ends_with_zero(path: Path) -> None:
    for args, code in (
        (("show", f"{path}@77"), 10),
        (("diff", f"{path}@77", "50"), 10),
        (("verify", f"{path}@77"), 10),
        (("pin", f"{path}@77"), 10),
        (("cp", f"{path}@77", path.parent / "copy"), 10),
        (("show", f"{path}@abc"), 2),
        (("show", path.parent / "none"), 10),
        (("ls", "--format", "xml", path), 2),
        (("ls", path, "--progress", "loud"), 2),
    ):
        result = ckptrt(*args)
        assert (result.exit_code, result.stdout) == (code, ""), args
        assert result.stderr


def test_what_is_no_step_is_told_as_such(path: Path) -> None:
    assert "'abc' is no step of" in ckptrt("show", f"{path}@abc").stderr
    odd = path.rename(path.with_name("gpt@v2"))
    assert ckptrt("show", odd).exit_code == ckptrt("show", f"{odd}@50").exit_code == 0


def test_a_bug_is_one_line_and_its_traceback_only_where_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("secret\nplace")

    monkeypatch.setattr("ckptrt.storage.cli.ls._print_checkpoints", fail)
    result = ckptrt("ls", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error[error]: KeyError: 'secret\\nplace'\n  do        this is a bug in ckptrt;")
    assert "Traceback" not in result.stderr
    assert "Traceback" in ckptrt("ls", path, "-v").stderr
    assert json.loads(ckptrt("ls", path, "--json").stderr)["exit"] == 1


@pytest.mark.processes
def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    run = make_run(LocalTier(str(tmp_path)), [10])
    read, write = os.pipe()
    os.close(read)
    for form in ("human", "json", "jsonl", "quiet"):
        done = subprocess.run(
            [*CKPTRT, "ls", run.tier.root, "--format", form], stdout=write, stderr=subprocess.PIPE, check=False
        )
        assert (done.returncode, done.stderr) == (141, b""), form
    os.close(write)


@pytest.mark.processes
def test_an_interrupt_ends_it_with_130(tmp_path: Path) -> None:
    code = "import os, signal, ckptrt.storage.cli.ls as ls; from ckptrt.storage.cli import main\n"
    code += "ls.open_tier = lambda url: os.kill(os.getpid(), signal.SIGINT)\n"
    code += "main()"
    done = subprocess.run([sys.executable, "-c", code, "ls", "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_what_the_library_logs_is_told_as_warnings(path: Path) -> None:
    overwrite(LocalTier(str(path)), "run.json", b"x")
    (line,) = [line for line in ckptrt("show", f"{path}@50").stderr.splitlines() if "unusable" in line]
    assert line.startswith("warn       run record unusable, ")
    logger = logging.getLogger("ckptrt")
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)


@pytest.mark.processes
def test_retries_are_told_in_one_line_each(tmp_path: Path) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        env = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bound.getsockname()[1]}", "AWS_REGION": "x"}
        env |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_CONFIG_FILE": str(tmp_path / "none")}
        done = subprocess.run([*CKPTRT, "ls", "s3://b/x"], capture_output=True, text=True, env=env, check=False)
    *warnings, error, _safe_or_do = [line for line in done.stderr.splitlines() if not line.startswith("  safe")]
    assert done.returncode == 1
    assert error.startswith("error[unreachable]: ")
    assert warnings
    assert all(line.startswith("warn       again method=") for line in warnings)


# --- progress


def test_progress_lines_are_few_and_go_to_stderr(path: Path) -> None:
    args = ("verify", path, "--read-data")
    assert ckptrt(*args).stderr == ""  # done before there was anything to tell
    lines = ckptrt(*args, "--progress", "line").stderr.splitlines()
    assert 2 <= len(lines) <= 10
    assert all(line.startswith("progress   reading ") for line in lines)
    assert lines[-1].endswith("(100 %)")
    told = [json.loads(line) for line in ckptrt(*args, "--json", "--progress", "json").stderr.splitlines()]
    assert [(each["type"], each["label"]) for each in told] == [("progress", "reading")] * len(told)
    assert told[-1]["done_bytes"] == told[-1]["total_bytes"] > told[0]["done_bytes"]
    for form in ("--json", "-q"):
        assert ckptrt(*args, form).stderr == ""


def test_slow_progress_is_told_every_half_minute(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now_s = 0.0
    monkeypatch.setattr("ckptrt.storage.cli._output.time.monotonic", lambda: now_s)
    with _output.progress("copying", 1000) as tell:
        for _ in range(100):
            tell(1)
            now_s += 1
    assert [line.split("(")[1] for line in capsys.readouterr().err.splitlines()] == [
        "3 %, 1 B/s)", "6 %, 1 B/s)", "9 %, 1 B/s)", "10 %, 1 B/s)"
    ]  # fmt: skip
    for form in ("json", "jsonl", "quiet"):
        monkeypatch.setattr(_output, "current", lambda form=form: Settings(format=form))
        with _output.progress("copying", 1000) as tell:
            tell(1)
            now_s += 100
            tell(1)
        assert capsys.readouterr().err == ""


# --- shells


def completions(*words: str, **env: str) -> list[str]:
    """What bash is told that the last of the words may become."""
    environ = {"_CKPTRT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(("ckptrt", *words)), **env}
    result = ckptrt(**environ, COMP_CWORD=str(len(words)))
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


def test_steps_are_completed(path: Path) -> None:
    assert completions("show", f"{path}@4") == [f"{path}@40"]
    assert completions("-C", str(path), "diff", "l") == ["latest"]
    assert completions("cp", "1", CKPTRT_DIR=str(path)) == ["10"]
    assert completions("show", f"{path}/none@") == [f"{path}/none@"]
    assert completions("show", "s3://nowhere/gpt@") == ["s3://nowhere/gpt@"]


# --- what verbs need and cost


def test_verbs_load_with_the_oldest_click_that_is_allowed() -> None:
    """Before 8.5, click.ParamType can't be subscripted."""
    assert ParamType[int] is ParamType
    for module in cli_package.modules():
        path = Path(cli_package.__file__).parent / f"{module.rpartition('.')[2]}.py"
        assert not path.exists() or "click.ParamType[" not in path.read_text()


@pytest.mark.processes
def test_no_verb_loads_what_it_does_not_need(path: Path) -> None:
    """Not torch, whatever it does; and nothing heavy for a local run."""
    heavy = ("torch", "numpy", "s3fs", "fsspec", "rich", "aiohttp", "ckptrt.runtime")
    code = "import json, sys; from ckptrt.storage.cli import cli\n"
    code += "for args in json.loads(sys.argv[1]):\n    cli(args, standalone_mode=False)\n"
    code += f"print('loaded', *[m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    ways = [[verb, *args] for verb, ways in calls(path).items() if verb in VERBS for args in ways]
    light = [args for args in ways if not {"--stat", "--deep", "--dtype", "import"} & set(args)]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([["--help"], *light])], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1].split() == ["loaded"]
