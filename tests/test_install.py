"""The package as it is shipped: what a wheel and an sdist hold, and that an installed wheel works without the tree.

Links are what could go wrong here: a build back end that skips them makes a wheel without agents and storage, and
says nothing. So nothing of this is taken from the repository but the files that git tracks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would track, links kept as links."""
    target = tmp_path_factory.mktemp("source") / "ckptrt"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    return target


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist of `source` with the back end that is installed here; the one file that came out."""
    out.mkdir()
    # setuptools leaves build/lib behind, and would put what it finds there into the next wheel.
    fresh = out.with_name("fresh")
    shutil.copytree(source, fresh, symlinks=True)
    run([sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(fresh)], out)
    (built,) = out.iterdir()
    return built


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel") / "out")


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist") / "out")


def expected(tree: Path) -> dict[str, bytes]:
    """Name in the wheel -> contents, of every file that users must get."""
    files: dict[str, bytes] = {}
    for folder, prefix in (("ckptrt", ""), ("agents", "ckptrt/"), ("storage", "ckptrt/")):
        for path in sorted((tree / folder).rglob("*")):
            if path.is_file() and path.suffix in {".py", ".typed", ".md"} and "__pycache__" not in path.parts:
                files[prefix + path.relative_to(tree).as_posix()] = path.read_bytes()
    return files


def package_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: archive.read(name) for name in names}


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def test_the_expectation_covers_all_three_folders(tree: Path) -> None:
    names = set(expected(tree))
    assert {"ckptrt/errors.py", "ckptrt/py.typed", "ckptrt/agents/coord.py", "ckptrt/storage/layout.py"} <= names
    assert {"ckptrt/storage/cli/__init__.py", "ckptrt/storage/FORMAT.md"} <= names


def test_the_wheel_holds_every_module_as_a_real_file_and_nothing_else(wheel: Path, tree: Path) -> None:
    assert package_files(wheel) == expected(tree)


def test_the_wheel_holds_no_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modes = {entry.filename: entry.external_attr >> 28 for entry in archive.infolist()}
    assert set(modes.values()) == {0o10}, modes  # regular files


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    about = Parser().parsestr(metadata(wheel, "METADATA"))
    assert about["Name"] == "ckptrt"
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    assert about["License-File"] == "LICENSE"
    scripts = {line.strip() for line in metadata(wheel, "entry_points.txt").splitlines() if "=" in line}
    assert scripts == {"ckptrt = ckptrt.storage.cli:main", "ckptrt-launch = ckptrt.agents.launch:main"}


def test_a_wheel_from_the_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        links = [member.name for member in archive.getmembers() if not (member.isfile() or member.isdir())]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    assert not links, "a link in an sdist needs a target that may not be there"
    (unpacked,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    again = build("wheel", unpacked, tmp_path / "out")
    assert package_files(again) == package_files(wheel)


def test_the_installed_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.meta_path = [f for f in sys.meta_path "
        "if 'editable' not in repr(f).lower()]\n"
        "import ckptrt, ckptrt.storage.layout, ckptrt.agents.coord\n"
        "print(ckptrt.__file__, ckptrt.storage.layout.__file__, ckptrt.agents.coord.__file__, sep='\\n')"
    )
    found = run([sys.executable, "-I", "-c", code], tmp_path).split()
    assert found == [str(site / "ckptrt" / name) for name in ("__init__.py", "storage/layout.py", "agents/coord.py")]


def test_without_the_links_the_checks_would_notice(tree: Path, tmp_path: Path) -> None:
    """A checkout that can't hold links builds a wheel without a word; this is what the tests above are for."""
    broken = tmp_path / "broken"
    shutil.copytree(tree, broken, symlinks=True)
    for name in ("agents", "storage"):
        (broken / "ckptrt" / name).unlink()
        (broken / "ckptrt" / name).write_text(f"../{name}")
    names = set(package_files(build("wheel", broken, tmp_path / "out")))
    assert "ckptrt/errors.py" in names
    assert not names & {"ckptrt/agents/coord.py", "ckptrt/storage/layout.py"}
