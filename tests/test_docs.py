"""The pages say what the code does: generated parts fit, snippets are Python, links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from ckptrt import errors

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("changes/*.md")]
    if "_build" not in path.parts
)  # fmt: skip


def load(name: str) -> ModuleType:
    """A module of docs/, which isn't on the path."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load("generate")


def test_generated_parts_fit_the_code() -> None:
    stale = [path.relative_to(ROOT).as_posix() for path in generate.outdated()]
    assert not stale, "run python docs/generate.py"


def test_every_generator_is_used_by_a_page() -> None:
    text = "".join(path.read_text() for path in PAGES)
    assert set(re.findall(r"<!-- generated: ([a-z-]+) -->", text)) == set(generate.GENERATORS)


@pytest.mark.parametrize("name", list(generate.GENERATORS))
def test_drift_is_found(name: str) -> None:
    page = f"text\n<!-- generated: {name} -->\n| old |\n<!-- end -->\nmore\n"
    new = generate.render(page)
    assert new != page
    assert "| old |" not in new
    assert new.startswith("text\n")
    assert new.endswith("<!-- end -->\nmore\n")
    assert generate.render(new) == new


def test_the_environment_table_has_every_variable() -> None:
    from ckptrt import env

    names = {value for value in vars(env).values() if isinstance(value, str) and value.startswith("CKPTRT_")}
    assert len(names) > 5
    assert names == set(re.findall(r"^\| `(CKPTRT_\w+)`", generate.environment(), re.MULTILINE))


def test_the_error_table_has_every_class_with_its_codes() -> None:
    table = generate.error_classes()
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert re.search(rf"^\| `{name}` \| .* \| `{kind.code}` \| {kind.exit_code} \| .+ \|$", table, re.MULTILINE)


def test_an_exit_code_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.CorruptError, "exit_code", 99)
    with pytest.raises(SystemExit, match="99"):
        generate.exit_codes()


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)", re.sub(r"(?s)```.*?```", "", text))
    return [target for target in targets if not (page.parent / target).exists()]


def test_links_lead_somewhere() -> None:
    broken = {page.name: bad for page in PAGES if (bad := broken_links(page, page.read_text()))}
    assert not broken


def test_a_broken_link_is_found() -> None:
    page = ROOT / "README.md"
    assert broken_links(page, "[a](docs/nowhere.md#x) [b](README.md)") == ["docs/nowhere.md"]


def python_snippets(text: str) -> list[str]:
    return [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def test_python_snippets_are_python() -> None:
    snippets = [code for page in PAGES for code in python_snippets(page.read_text())]
    assert snippets
    for code in snippets:
        ast.parse(code)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_diff_adds_valid_lines_only(page: str) -> None:
    """What the diff leaves in place is a script that parses and that uses public names only."""
    import ckptrt

    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    tree = ast.parse(after)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "ckptrt"}
    assert used == {"init"}
    assert used <= set(ckptrt.__all__)
    of_rt = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "rt"}
    assert of_rt == {"restore", "start_step", "step", "close"}


def test_the_permissions_page_names_all_that_is_asked_of_s3() -> None:
    permissions = {
        "list_objects_v2": "ListBucket", "get_object": "GetObject", "head_object": "GetObject",
        "put_object": "PutObject", "create_multipart_upload": "PutObject", "upload_part": "PutObject",
        "complete_multipart_upload": "PutObject", "delete_object": "DeleteObject", "delete_objects": "DeleteObject",
        "abort_multipart_upload": "AbortMultipartUpload", "list_multipart_uploads": "ListBucketMultipartUploads",
    }  # fmt: skip
    code = "".join(path.read_text() for path in (ROOT / "storage" / "tiers").glob("*.py"))
    asked = set(
        re.findall(
            r"\"((?:list|get|head|put|create|upload|complete|abort|delete)_(?:multi|object|part)[a-z_0-9]*)\"", code
        )
    )
    assert {"put_object", "upload_part"} <= asked <= set(permissions)
    page = (ROOT / "docs" / "how-to" / "use-object-storage.md").read_text()
    assert set(re.findall(r"^\| `s3:(\w+)` \|", page, re.MULTILINE)) == set(permissions.values())


def test_docstrings_become_text_and_preformatted_lines() -> None:
    plain = load("plain_docstrings")
    found = plain.as_rest(["One *sentence*.", "", "    a  b", "    c", "", "More."])
    assert found == ["One \\*sentence\\*.", "", "", "::", "", "        a  b", "        c", "", "", "More."]
