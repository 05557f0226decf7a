"""The import contracts of pyproject.toml hold, and each notices the import that it is there to forbid."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]

pytestmark = pytest.mark.processes

CONTRACTS = ["leaves", "storage", "agents", "runtime", "pure"]

# A file, an import to put at its end, and the contract that must break.
BAD = [
    ("ckptrt/errors.py", "import msgspec", "leaves"),
    ("ckptrt/clock.py", "import ckptrt.plan", "leaves"),
    ("storage/layout.py", "import torch", "storage"),
    ("storage/commit.py", "from ckptrt import plan", "storage"),
    ("storage/tiers/local.py", "def f():\n    import ckptrt.agents.coord", "storage"),
    ("agents/coord.py", "from ckptrt import plan", "agents"),
    ("agents/restart.py", "import ckptrt.storage.commit", "agents"),
    ("ckptrt/plan.py", "from ckptrt.agents import coord", "runtime"),
    ("ckptrt/adapters/base.py", "import ckptrt.agents.restart", "runtime"),
    ("ckptrt/plan.py", "import random", "pure"),
    ("storage/lineage.py", "from ckptrt.storage import owner", "pure"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the product that a test may spoil."""
    for folder in ("ckptrt", "agents", "storage"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def broken(tree: Path) -> list[str]:
    """The ids of the contracts that don't hold, in the order of pyproject.toml."""
    ids = re.findall(r'\[\[tool\.importlinter\.contracts\]\]\nid = "(\w+)"', (tree / "pyproject.toml").read_text())
    names = re.findall(r'^id = "\w+"\nname = "(.+)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)
    assert ids == CONTRACTS
    result = subprocess.run(LINT, cwd=tree, capture_output=True, text=True, check=False)
    verdicts = {
        name: verdict for name in names for verdict in re.findall(f"^{re.escape(name)} ([A-Z]+)", result.stdout, re.M)
    }
    assert set(verdicts) == set(names), result.stdout + result.stderr
    assert result.returncode == (1 if "BROKEN" in verdicts.values() else 0)
    return [contract for contract, name in zip(ids, names, strict=True) if verdicts[name] == "BROKEN"]


def test_the_contracts_hold(tree: Path) -> None:
    assert broken(tree) == []


@pytest.mark.parametrize(("path", "line", "contract"), BAD)
def test_a_forbidden_import_is_noticed(tree: Path, path: str, line: str, contract: str) -> None:
    with (tree / path).open("a") as file:
        file.write(f"\n{line}\n")
    assert contract in broken(tree)


def test_each_contract_is_seen_to_break() -> None:
    assert {contract for _path, _line, contract in BAD} == set(CONTRACTS)
