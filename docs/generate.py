"""Write the parts of these pages that are taken from the code, or check that they still fit.

python docs/generate.py            rewrite the parts between <!-- generated: NAME --> and <!-- end -->
python docs/generate.py --check    exit with 1 and name the pages that differ
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ckptrt import errors
from ckptrt.storage.cli import _documents, cli

__all__ = ["GENERATORS", "outdated", "render"]

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

# What a code means to a script. A code that no class carries is one that a command returns itself.
EXIT_CODES = {
    0: "done",
    1: "training failed, or the command failed for a reason that has no code of its own",
    2: "wrong usage: the command line or a call",
    3: "partial: some objects could not be copied or deleted",
    4: "a damaged checkpoint was found",
    5: "nothing to resume from although something was asked for; `diff --exit-code` found differences",
    10: "no run, checkpoint or object of that name",
    11: "the run is held by another job, or a newer incarnation owns it",
    12: "access denied",
    20: "the restart budget is used up, or restarts made no progress",
    21: "too few nodes for a job of several came in time",
    75: "drained: the last step is committed, run the same command again",
    130: "stopped by SIGINT",
    141: "who read its output went away, as with `| head`",
    143: "stopped by SIGTERM; of a drain, that no last step could be committed",
}


def _classes() -> list[type[errors.Error]]:
    return [getattr(errors, name) for name in errors.__all__]


def environment() -> str:
    """The table of ckptrt/env.py: the name, and the comment beside it."""
    text = (ROOT / "ckptrt" / "env.py").read_text()
    found = re.findall(r'^[A-Z_]+ = "(CKPTRT_\w+)"  # (.+)$', text, re.MULTILINE)
    return _table(("variable", "meaning"), [(f"`{name}`", meaning) for name, meaning in found])


def exit_codes() -> str:
    """Every exit code with its meaning and the classes of error that lead to it."""
    missing = {kind.exit_code for kind in _classes()} - set(EXIT_CODES)
    if missing:
        raise SystemExit(f"docs/generate.py: EXIT_CODES doesn't say what {sorted(missing)} mean")
    rows = []
    for code, meaning in sorted(EXIT_CODES.items()):
        kinds = [f"`{kind.__name__}`" for kind in _classes() if kind.exit_code == code]
        # Code 1 is everybody's default; naming all of them would say nothing.
        rows.append((str(code), meaning, ", ".join(kinds) if code != 1 else "all others"))
    return _table(("code", "meaning", "errors"), rows)


def error_classes() -> str:
    """The tree drawn in ckptrt/errors.py, as a table with what a handler wants to know."""
    about = dict(re.findall(r"[├└]── (\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE))
    about["Error"] = "the base of all"
    rows = []
    for kind in _classes():
        base = kind.__base__.__name__ if kind is not errors.Error and kind.__base__ else "Exception"
        rows.append((f"`{kind.__name__}`", f"`{base}`", f"`{kind.code}`", str(kind.exit_code), about[kind.__name__]))
    return _table(("class", "is a", "code", "exit", "meaning"), rows)


def commands() -> str:
    """What each verb of `ckptrt` says of itself."""
    parts = []
    root = click.Context(cli, info_name="ckptrt", terminal_width=90, max_content_width=90, **cli.context_settings)
    for verb in cli.list_commands(root):
        command = cli.get_command(root, verb)
        if command is None:
            raise SystemExit(f"docs/generate.py: ckptrt {verb} is listed but can't be loaded")
        text = command.get_help(click.Context(command, info_name=verb, parent=root))
        parts.append(f"## ckptrt {verb}\n\n```text\n{text}\n```\n\n")
    return "".join(parts)


def json_documents() -> str:
    """Every verb's document, and the parts that documents share, field by field: storage/cli/_documents.py."""
    source = (ROOT / "storage" / "cli" / "_documents.py").read_text()
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    verbs: dict[str, list[str]] = {}
    for verb, kinds in _documents.DOCUMENTS.items():
        for kind in kinds:
            verbs.setdefault(kind.__name__, []).append(f"`{verb}`")
    parts = []
    for name, node in classes.items():
        if name == "Part":
            continue
        title = f"{name}: {' and '.join(verbs[name])}" if name in verbs else name
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id not in ("Part", "Document")]
        also = f" All of {bases[0]}, and:" if bases else ""
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        rows = [(f"`{ast.unparse(f.target)}`", _json_type(f.annotation), _comment(lines[f.lineno - 1])) for f in fields]
        parts.append(
            f"### {title}\n\n{ast.get_docstring(node)}{also}\n\n{_table(('field', 'type', 'meaning'), rows)}\n"
        )
    return "".join(parts)


def _json_type(annotation: ast.expr) -> str:
    """A Python annotation in JSON's words; the names of parts stay."""
    text = ast.unparse(annotation)
    text = re.sub(r"(list|tuple)\[", "array[", text).replace("dict[str, ", "object[").replace(", ...]", "]")
    words = {
        "str": "string",
        "int": "integer",
        "None": "null",
        "float": "number",
        "bool": "boolean",
        "Any": "any",
        "UnsetType": "absent",
    }
    words["State"] = "Literal['committed', 'off-path', 'damaged', 'too-new']"
    text = re.sub(r"\b(\w+)\b", lambda match: words.get(match[1], match[1]), text)
    return re.sub(r"Literal\[([^]]*)\]", lambda match: match[1].replace(", ", " | "), text).replace("'", '"')


def _comment(line: str) -> str:
    return line.partition("  # ")[2]


GENERATORS: dict[str, Callable[[], str]] = {
    "environment": environment,
    "exit-codes": exit_codes,
    "errors": error_classes,
    "commands": commands,
    "json": json_documents,
}

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """A page with all its generated parts as they should be now."""
    return _PART.sub(lambda match: f"{match[1]}{GENERATORS[match[2]]()}{match[3]}", text)


def outdated() -> dict[Path, str]:
    """Pages whose generated parts differ from the code, and what they should be."""
    pages = {path: path.read_text() for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts}
    return {path: new for path, text in pages.items() if (new := render(text)) != text}


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *[tuple(map(_cell, row)) for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    pages = outdated()
    if "--check" in sys.argv[1:]:
        for path in pages:
            sys.stderr.write(f"{path.relative_to(ROOT)} doesn't fit the code: run python docs/generate.py\n")
        return 1 if pages else 0
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
