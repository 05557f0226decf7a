"""The code base checked as if it were data: banned calls, lengths, dead modules, what imports drag in, fragments.

Every rule is shown to find something on a bad snippet, and every allow-list entry must still be needed, so that the
lists can only get shorter.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support_tidy as tidy
from support_tidy import Finding, Source

import ckptrt
from ckptrt import errors
from ckptrt.storage.cli import modules

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[Source], Iterator[Finding]]

# (path, key of the finding) -> why it may stay.
ALLOWED: dict[tuple[str, str], str] = {
    ("agents/workerproc.py", "exec"): "runs the user's own script in place, as `python script.py` would",
    ("storage/cli/_output.py", "datetime.datetime.now"): "how long ago something was written, for people",
    ("storage/cli/doctor.py", "time.time"): "compared with the store's own times of writing",
    ("storage/cli/prune.py", "time.time"): "ages are told by the store's own times of writing",
    ("storage/interop/torchfile.py", "torch.load"): "files of others, with weights_only: nothing of them is run",
    ("storage/interop/torchfile.py", "torch.save"): "an export in torch's own format, of tensors and plain values",
    ("storage/interop/unpickle.py", "pickle"): "the index of a DCP folder is a pickle; it is given stand-ins only",
    ("storage/interop/unpickle.py", "pickle.Unpickler"): "the same",
    ("storage/interop/unpickle.py", "pickle.UnpicklingError"): "the class of torch.load's error",
    ("storage/prune.py", "time.time"): "ages are told by the store's own times of writing",
    ("storage/tiers/faulty.py", "ckptrt.storage.tiers.faulty"): "faults on demand, for tests of whatever uses a tier",
    ("storage/tiers/memory.py", "time.time"): "when an object changed, as a store's own clock would say it",
}

# Functions and files that were over the limit when the rule came: path or path::function -> lines. Never raise one.
RATCHET: dict[str, int] = {}
FILE_MAX_LINES = {"ckptrt": 500, "agents": 500, "storage": 500, "tests": 800, "examples": 150, "docs": 500}

# Modules that only promise to compute. Each that exists must be named in the contract "pure" of pyproject.toml.
PURE = {
    "ckptrt.agents.drain",
    "ckptrt.agents.jobnote",
    "ckptrt.agents.world",
    "ckptrt.agents.resume",
    "ckptrt.agents.watchdog",
    "ckptrt.plan", "ckptrt.regions", "ckptrt.agents.detector", "ckptrt.agents.membership", "ckptrt.agents.restart",
    "ckptrt.storage.boxes", "ckptrt.storage.layout", "ckptrt.storage.lineage", "ckptrt.storage.manifest",
    "ckptrt.storage.records",
}  # fmt: skip

# What people and programs start; everything else must be imported by something.
ENTRY_POINTS = {
    "ckptrt.storage.cli", "ckptrt.storage.cli.__main__", "ckptrt.agents.launch", *modules(),
}  # fmt: skip


_DATA = ("tests/golden/", "tests/fuzz_corpus/")  # bytes to be read by tests, not text to be read by people


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every text file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = [ROOT / name for name in sorted(set(listed.split("\0"))) if name]
    # A link is checked where it points to; a file that was deleted and not yet committed is gone.
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    found = []
    for path in files:
        data = path.read_bytes()
        name = path.relative_to(ROOT).as_posix()
        if b"\0" not in data and not name.startswith(_DATA):
            found.append(Source(path=name, text=data.decode()))
    return tuple(found)


def product() -> list[Source]:
    return [source for source in sources() if source.is_product]


def python() -> list[Source]:
    return [source for source in sources() if source.path.endswith(".py")]


def check(rule: Rule, files: list[Source]) -> None:
    """Fail with every finding of a rule that no allow-list excuses."""
    findings = [finding for source in files for finding in rule(source)]
    left = [str(finding) for finding in findings if (finding.path, finding.key) not in ALLOWED]
    assert not left, "\n".join(left)


def test_the_listing_sees_all_three_source_folders() -> None:
    assert {source.path.split("/")[0] for source in product()} == {"ckptrt", "agents", "storage"}
    assert not any(source.path.startswith(("ckptrt/agents/", "ckptrt/storage/")) for source in sources())


def test_banned_calls() -> None:
    check(tidy.banned_calls, product())


def test_no_error_is_swallowed() -> None:
    check(tidy.swallowed_errors, python())


def test_modules_say_what_they_are_for() -> None:
    check(tidy.docstrings, python())


def test_linked_folders_are_imported_by_their_full_names() -> None:
    check(tidy.second_copies, python())


def test_unfinished_work_names_an_issue() -> None:
    check(tidy.unowned_todos, list(sources()))


def test_no_paths_of_one_machine() -> None:
    check(tidy.machine_paths, [source for source in sources() if source.path != "tests/test_tidy.py"])


def test_skipped_tests_say_why() -> None:
    check(tidy.skips_without_reason, [source for source in python() if source.path.startswith("tests/")])


def test_no_module_is_dead() -> None:
    findings = list(tidy.orphans(product(), ENTRY_POINTS))
    left = [str(finding) for finding in findings if (finding.path, finding.key) not in ALLOWED]
    assert not left, "\n".join(left)


def test_allowed_exceptions_are_still_needed() -> None:
    rules: list[Rule] = [tidy.banned_calls, tidy.swallowed_errors, tidy.docstrings, tidy.second_copies]
    found = {(f.path, f.key) for rule in rules for source in python() for f in rule(source)}
    found |= {(f.path, f.key) for f in tidy.orphans(product(), ENTRY_POINTS)}
    stale = sorted(set(ALLOWED) - found)
    assert not stale, f"delete from ALLOWED, nothing needs it: {stale}"


def lengths() -> dict[str, int]:
    """What is longer than it should be: path or path::function -> lines."""
    over: dict[str, int] = {}
    for source in python():
        num_lines = len(source.text.splitlines())
        if num_lines > FILE_MAX_LINES[source.path.split("/")[0]]:
            over[source.path] = num_lines
        for finding in tidy.excessive_functions(source):
            over[f"{source.path}::{finding.key}"] = int(re.findall(r"has (\d+) lines", finding.message)[0])
    return over


def test_functions_and_files_are_short() -> None:
    over = {name: lines for name, lines in lengths().items() if lines > RATCHET.get(name, 0)}
    assert not over, f"too long (functions {tidy.FUNCTION_MAX_LINES}, files {FILE_MAX_LINES}): {over}"


def test_the_ratchet_only_turns_one_way() -> None:
    over = lengths()
    loose = {name: (lines, over.get(name, 0)) for name, lines in RATCHET.items() if over.get(name, 0) < lines}
    assert not loose, f"these got shorter: lower or delete their RATCHET entry (listed, now): {loose}"


def test_test_files_have_names_of_their_own() -> None:
    names = [Path(source.path).name for source in python() if source.path.startswith("tests/")]
    assert sorted(names) == sorted(set(names))
    assert "__init__.py" not in names


def test_pure_modules_are_under_the_contract() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    contract = text.split('id = "pure"', 1)[1].split("[[", 1)[0]
    listed = set(re.findall(r'"(ckptrt[\w.]+)"', contract))
    exist = {tidy.module_name(source.path) for source in product()}
    assert listed == PURE & exist


def test_the_links_are_relative_and_point_to_the_source_folders() -> None:
    for name in ("agents", "storage"):
        link = ROOT / "ckptrt" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)


# What imports bring along. In a fresh interpreter, since this one has everything loaded.


def loaded_after(code: str) -> set[str]:
    """Top-level modules that are loaded after running `code` in a new interpreter."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


HEAVY = {"torch", "numpy", "s3fs", "aiobotocore", "aiohttp", "botocore", "etcd3", "grpc"}


def test_the_check_of_what_is_loaded_can_fail() -> None:
    assert loaded_after("import s3fs") & HEAVY


@pytest.mark.parametrize("code", ["import ckptrt", "import ckptrt.storage", "import ckptrt.storage.cli"])
def test_light_imports(code: str) -> None:
    loaded = loaded_after(code)
    assert not loaded & HEAVY
    assert not loaded & {"agents", "storage"}


def test_no_storage_module_loads_torch() -> None:
    names = [tidy.module_name(source.path) for source in product() if source.path.startswith("storage/")]
    assert len(names) > 5
    loaded = loaded_after("\n".join(f"import {name}" for name in names if not name.endswith("__main__")))
    assert not loaded & {"torch", "numpy"}
    assert not loaded & {"agents", "storage"}


# The public names.


def test_all_names_what_the_package_offers() -> None:
    lazy = set(ckptrt._LAZY) | {"__version__"}
    eager = {name for name in errors.__all__ if getattr(ckptrt, name) is getattr(errors, name)}
    assert set(ckptrt.__all__) == lazy | eager
    assert set(ckptrt.__all__) <= set(dir(ckptrt))
    assert len(ckptrt.__all__) == len(set(ckptrt.__all__))


def test_type_checkers_see_the_lazy_names_too() -> None:
    tree = ast.parse((ROOT / "ckptrt" / "__init__.py").read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        f"{node.module}.{item.name}"
        for block in guarded
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for item in node.names
    }
    assert declared == {f"{module}.{name}" for name, module in ckptrt._LAZY.items()}


def test_lazy_names_resolve() -> None:
    for name in ckptrt.__all__:
        assert getattr(ckptrt, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(ckptrt, "nonsense")  # noqa: B009


def test_every_error_class_is_exported_and_has_a_code() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert classes == set(errors.__all__)
    codes = [getattr(errors, name).code for name in errors.__all__]
    assert len(codes) == len(set(codes)), "two classes share a code: scripts can't tell them apart"


# Fragments of the change log.


def kinds_of_change() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    return set(re.findall(r'\[\[tool\.towncrier\.type\]\]\ndirectory = "(\w+)"', text))


def bad_fragments(files: list[Source]) -> list[str]:
    """What is wrong with the fragments in changes/: number.kind.md, one sentence or more for users."""
    wrong = []
    for source in files:
        folder, _, name = source.path.rpartition("/")
        if folder != "changes" or name in {"README.md", "template.md.jinja"}:
            continue
        match = re.fullmatch(r"(\d+|\+[a-z0-9-]+)\.([a-z]+)(\.\d+)?\.md", name)
        if match is None or match[2] not in kinds_of_change():
            wrong.append(f"{source.path}: name it number.kind.md, kind one of {', '.join(sorted(kinds_of_change()))}")
        elif not re.match(r"(?s)[A-Z`].*[.!]$", source.text.strip()):
            wrong.append(f"{source.path}: write whole sentences, for users")
    return wrong


def test_fragments_have_valid_names_and_sentences() -> None:
    assert len(kinds_of_change()) >= 4
    assert not bad_fragments(list(sources()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("changes/2.feature", "New things."),
        ("changes/two.feature.md", "New things."),
        ("changes/2.features.md", "New things."),
        ("changes/2.fix.md", ""),
        ("changes/2.fix.md", "fixed it"),
    ],
)
def test_bad_fragments_are_found(name: str, text: str) -> None:
    assert bad_fragments([Source(path=name, text=text)])
    assert not bad_fragments([Source(path="changes/2.feature.md", text="New things.\n")])


# Each rule on a snippet that breaks it, and on one that doesn't.


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (tidy.banned_calls, "print(1)", "log.info('%s', 1)"),
        (tidy.banned_calls, "import time\nx = time.time()", "import time\nx = time.monotonic()"),
        (tidy.banned_calls, "from time import time as now\nf(clock=now)", "from time import monotonic as now\nnow()"),
        (tidy.banned_calls, "import datetime as d\nd.datetime.now()", "import datetime as d\nd.datetime(2000, 1, 1)"),
        (tidy.banned_calls, "from datetime import datetime\ndatetime.now(x)", "from datetime import timezone"),
        (tidy.banned_calls, "import pickle", "import json"),
        (tidy.banned_calls, "from marshal import dumps", "from json import dumps"),
        (tidy.banned_calls, "import torch\ntorch.load(f)", "import torch\ntorch.zeros(1)"),
        (
            tidy.banned_calls,
            "import torch.distributed as dist\ndist.broadcast_object_list(x)",
            "import torch.distributed",
        ),
        (tidy.banned_calls, "eval(x)", "model.eval()"),
        (tidy.banned_calls, "import os\nos.environ['A']", "import os\nos.getpid()"),
        (tidy.banned_calls, "from os import getenv", "from os import getpid"),
        (tidy.banned_calls, "import os\nos.fork()", "import os\nos.kill(1, 0)"),
        (tidy.swallowed_errors, "try:\n  f()\nexcept:\n  g()", "try:\n  f()\nexcept OSError:\n  g()"),
        (tidy.swallowed_errors, "try:\n  f()\nexcept Exception:\n  pass", "try:\n  f()\nexcept Exception:\n  log()"),
        (tidy.swallowed_errors, "try:\n  f()\nexcept (E, BaseException):\n  ...", "try:\n  f()\nexcept E:\n  pass"),
        (tidy.excessive_functions, "def f():\n" + "  x = 1\n" * 71, "def f():\n" + "  x = 1\n" * 69),
        (tidy.excessive_functions, "class A:\n def f(self):\n" + "  x = 1\n" * 71, "x = 1\n" * 99),
        (tidy.excessive_functions, "async def f():\n" + "  x = 1\n" * 71, 'def f():\n  """A.\n' + "\n" * 90 + '"""'),
        (tidy.docstrings, "x = 1", '"""A module."""'),
        (tidy.docstrings, '"""a module"""', '"""A module,\nin two lines.\n\nmore"""'),
        (tidy.second_copies, "import storage.layout", "import ckptrt.storage.layout"),
        (tidy.second_copies, "from agents import coord", "from ckptrt.agents import coord"),
        (tidy.unowned_todos, "# TO" + "DO: later", "# TO" + "DO(#12): later"),
        (tidy.unowned_todos, "# FIX" + "ME", "a mastodon"),
        (tidy.machine_paths, "see /home/ana/x", "see https://host/home/ana"),
        (tidy.machine_paths, "cp a /root/b", "a/root/b"),
        (
            tidy.skips_without_reason,
            "@pytest.mark.skip\ndef f(): ...",
            "@pytest.mark.skip(reason='no etcd')\ndef f(): ...",
        ),
        (tidy.skips_without_reason, "@pytest.mark.xfail(strict=True)\ndef f(): ...", "pytest.skip('no etcd')"),
    ],
)
def test_each_rule_finds_what_it_is_for(rule: Rule, bad: str, good: str) -> None:
    assert list(rule(Source(path="storage/x.py", text=bad)))
    assert not list(rule(Source(path="storage/x.py", text=good)))


def test_what_is_banned_is_allowed_at_home() -> None:
    text = "print(1)"
    assert not list(tidy.banned_calls(Source(path="storage/cli/ls.py", text=text)))
    assert list(tidy.banned_calls(Source(path="storage/prune.py", text=text)))


def test_dead_modules_are_found() -> None:
    used = Source(path="storage/used.py", text="")
    lazy = Source(path="ckptrt/lazy.py", text="")
    dead = Source(path="storage/dead.py", text='"""Not ckptrt.storage.dead for long."""\nimport ckptrt.storage.dead')
    boot = Source(path="agents/boot.py", text="")
    user = Source(
        path="agents/launch.py",
        text="from ckptrt.storage import used\nX = ['-m', 'ckptrt.lazy', 'import os; from ckptrt.agents import boot']",
    )
    found = [finding.key for finding in tidy.orphans([used, lazy, boot, dead, user], {"ckptrt.agents.launch"})]
    assert found == ["ckptrt.storage.dead"]
