"""Rules that this code base keeps, as functions from a source file to findings.

Each rule takes a `Source` and yields `Finding`s; none reads anything but what it is given, so that test_tidy.py can
show on a bad snippet that the rule is able to find something.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "BANNED", "Ban", "Finding", "Source", "banned_calls", "docstrings", "excessive_functions", "machine_paths",
    "module_name", "orphans", "referenced_modules", "second_copies", "skips_without_reason", "swallowed_errors",
    "unowned_todos",
]  # fmt: skip

FUNCTION_MAX_LINES = 70


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file: its path from the root, '/'-separated, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def is_product(self) -> bool:
        return self.path.endswith(".py") and self.path.split("/")[0] in {"ckptrt", "agents", "storage"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, and where. `key` names the thing in allow-lists: stable when lines move."""

    path: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Ban:
    """Dotted names that the product doesn't use, what to use in their place, and where they are at home."""

    names: tuple[str, ...]
    instead: str
    home: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        return any(name == banned or name.startswith(banned + ".") for banned in self.names)


BANNED = (
    Ban(
        names=("builtins.print",),
        instead="log it; only the command lines and the examples print",
        home=("storage/cli/", "agents/launch.py"),
    ),
    Ban(
        names=(
            "time.time",
            "time.time_ns",
            "time.ctime",
            "datetime.datetime.now",
            "datetime.datetime.utcnow",
            "datetime.datetime.today",
            "datetime.date.today",
        ),
        instead="take a ckptrt.clock.Clock: monotonic_s() decides, wall_iso() is for people",
        home=("ckptrt/clock.py",),
    ),
    Ban(
        names=(
            "pickle",
            "cPickle",
            "_pickle",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
            "joblib",
            "torch.load",
            "torch.save",
            "torch.distributed.all_gather_object",
            "torch.distributed.gather_object",
            "torch.distributed.broadcast_object_list",
            "torch.distributed.scatter_object_list",
            "torch.distributed.send_object_list",
            "torch.distributed.recv_object_list",
            "multiprocessing.Queue",
        ),
        instead="nothing is pickled: records are JSON (ckptrt.storage.records), tensors are safetensors",
    ),
    Ban(names=("builtins.eval", "builtins.exec"), instead="parse what you expect"),
    Ban(
        names=("os.environ", "os.environb", "os.getenv", "os.putenv"),
        instead="read it in ckptrt/env.py, where every variable is listed",
        home=("ckptrt/env.py",),
    ),
    Ban(
        names=("os.fork", "os.forkpty"),
        instead="a process with threads can't be forked safely; only the zygote, which has none, forks",
        home=("agents/zygote.py",),
    ),
    Ban(names=("tempfile.mktemp",), instead="tempfile.mkstemp or mkdtemp: no race for the name"),
)

_BUILTINS = {"print", "eval", "exec"}


def banned_calls(source: Source, bans: tuple[Ban, ...] = BANNED) -> Iterator[Finding]:
    """Every use of a banned name, called or passed on, through whatever alias it was imported."""
    aliases = _aliases(source.tree)
    inner = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = _imported(node)
        elif isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            dotted = _dotted(node, aliases)
            names = [dotted] if dotted else []
        else:
            continue
        for name in names:
            for ban in bans:
                if ban.covers(name) and not source.path.startswith(ban.home or ("\0",)):
                    short = name.removeprefix("builtins.")
                    message = f"{short} is banned: {ban.instead}"
                    yield Finding(path=source.path, line=node.lineno, key=short, message=message)


def _aliases(tree: ast.Module) -> dict[str, str]:
    aliases = {name: f"builtins.{name}" for name in _BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                aliases[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for item in node.names:
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
    return aliases


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [item.name for item in node.names]
    return [f"{node.module}.{item.name}" for item in node.names]


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else None
    return None


def swallowed_errors(source: Source) -> Iterator[Finding]:
    """Bare excepts, and handlers of everything that do nothing."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else set()
        idle = all(isinstance(line, ast.Pass | ast.Continue) or _is_ellipsis(line) for line in node.body)
        if node.type is None:
            yield Finding(path=source.path, line=node.lineno, key="bare", message="bare except: name what you expect")
        elif idle and caught & {"Exception", "BaseException"}:
            message = "an error of any kind is swallowed: log it, or name the one that is expected"
            yield Finding(path=source.path, line=node.lineno, key="swallowed", message=message)


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def excessive_functions(source: Source, max_lines: int = FUNCTION_MAX_LINES) -> Iterator[Finding]:
    """Functions whose lines, docstring left out, are more than `max_lines`."""
    for name, node in _functions(source.tree, ""):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        if lines > max_lines:
            message = f"{name} has {lines} lines, more than {max_lines}: take a part out that has a name"
            yield Finding(path=source.path, line=node.lineno, key=name, message=message)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        name = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef | ast.FunctionDef) else prefix
        yield from _functions(child, name)


def docstrings(source: Source) -> Iterator[Finding]:
    """Modules without a docstring, or whose docstring doesn't begin with a sentence."""
    text = (ast.get_docstring(source.tree) or "").split("\n\n")[0].strip()
    if not text:
        yield Finding(path=source.path, line=1, key="missing", message="no docstring: say what the module is for")
    elif not text.endswith((".", "?", "!", ":")):
        yield Finding(path=source.path, line=1, key="sentence", message="the docstring must begin with a sentence")


def second_copies(source: Source) -> Iterator[Finding]:
    """Imports of the linked folders by their bare names, which load every module a second time."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            roots = {item.name.split(".")[0] for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots = {(node.module or "").split(".")[0]} if node.level == 0 else set()
        else:
            continue
        for root in sorted(roots & {"agents", "storage"}):
            message = f"import ckptrt.{root}: `{root}` loads a second copy"
            yield Finding(path=source.path, line=node.lineno, key=root, message=message)


# Written in two pieces, so that this file doesn't find itself.
_TODO = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b(?!\(#\d+\))")
_MACHINE = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)(?:/|\b)")


def unowned_todos(source: Source) -> Iterator[Finding]:
    """Notes of unfinished work that name no issue, in the form `word(#12)`."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for match in _TODO.finditer(line):
            message = f"{match[1]} without an issue: write {match[1]}(#number), or do it"
            yield Finding(path=source.path, line=number, key=match[1], message=message)


def machine_paths(source: Source) -> Iterator[Finding]:
    """Paths that exist only on the machine of whoever wrote them."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for match in _MACHINE.finditer(line):
            message = f"{match[0]} is a path of somebody's machine"
            yield Finding(path=source.path, line=number, key=match[0], message=message)


def skips_without_reason(source: Source) -> Iterator[Finding]:
    """Tests that are skipped, or expected to fail, and don't say why."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in {"skip", "skipif", "xfail"} and _is_mark(node.value):
            calls = [call for call in ast.walk(source.tree) if isinstance(call, ast.Call) and call.func is node]
            if not any(word.arg == "reason" for call in calls for word in call.keywords):
                message = f"pytest.mark.{node.attr} without a reason"
                yield Finding(path=source.path, line=node.lineno, key=node.attr, message=message)


def _is_mark(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "mark"


def module_name(path: str) -> str:
    """The import name of a product file: storage/tiers/base.py is ckptrt.storage.tiers.base."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "ckptrt" else ["ckptrt", *parts])


def referenced_modules(source: Source) -> set[str]:
    """Names of modules that a file imports, or names in a string (lazy imports, `python -m`)."""
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names.update(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(_modules_in(node.value))
    return names


def _modules_in(text: str) -> list[str]:
    """Modules named by a string that is nothing else, or by Python code in a string; prose about a module is no use."""
    if re.fullmatch(r"ckptrt(\.\w+)+(:\w+)?", text):
        return [text.split(":")[0]]
    if not re.search(r"\b(import|from) ckptrt\b", text):
        return []
    try:
        return sorted(referenced_modules(Source(path="<string>", text=text)))
    except SyntaxError:
        return []


def orphans(sources: list[Source], entry_points: set[str]) -> Iterator[Finding]:
    """Product modules that nothing in the product imports and that no entry point names."""
    used = set(entry_points)
    for source in sources:
        used |= referenced_modules(source) - {module_name(source.path)}
    for source in sources:
        name = module_name(source.path)
        if name not in used and not source.path.endswith("__init__.py"):
            message = f"{name} is imported by nothing: use it or delete it"
            yield Finding(path=source.path, line=1, key=name, message=message)
