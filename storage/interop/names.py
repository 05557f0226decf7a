"""Other names for tensors: rules from the command line, or a function of the user's own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckptrt.errors import MismatchError, UsageError

__all__ = ["Renaming", "rename"]

_SHOWN_MAX = 12
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no file can hold
_Rule = Callable[[str], str | None]


class _NoRule(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """new name -> old name, in the old order; names that were dropped on purpose; rules that met no name."""

    names: dict[str, str]
    dropped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def rename(names: Iterable[str], rules: Sequence[str]) -> Renaming:
    r"""Give tensors the names that rules say.

    rules: `FROM=TO`, a regular expression for the whole name and what it becomes (with \1 or \g<name>; nothing drops
    the tensor), of which the first that fits counts; or `file.py:function`, which is called with each name and returns
    the new one, or None to drop it. Without rules names stay. Raises MismatchError, naming them, for names that no
    rule fits and for two that would become one.
    """
    names = list(names)
    if not rules:
        return Renaming(names=_checked({name: name for name in names}))
    parsed = [(text, _parse(text)) for text in rules]
    found: dict[str, str] = {}
    dropped: list[str] = []
    unmatched: list[str] = []
    clashes: list[str] = []
    used: set[str] = set()
    for name in names:
        text, new = _apply(parsed, name)
        used.add(text)
        if not text:
            unmatched.append(name)
        elif not new:
            dropped.append(name)
        elif new in found:
            clashes.append(f"{found[new]} and {name} would both be {new}")
        else:
            found[new] = name
    if unmatched:
        raise _refused(f"no rule of --map fits {len(unmatched)} of {len(names)} names", unmatched)
    if clashes:
        raise _refused(f"--map gives {len(clashes)} names twice", clashes)
    unused = tuple(text for text, _ in parsed if text not in used)
    return Renaming(names=_checked(found), dropped=tuple(dropped), unused=unused)


def _checked(names: dict[str, str]) -> dict[str, str]:
    bad = [name for name in names if _SURROGATE.search(name)]
    if bad:
        raise _refused(f"{len(bad)} names are no text", [ascii(name) for name in bad])
    return names


def _apply(rules: Sequence[tuple[str, _Rule]], name: str) -> tuple[str, str | None]:
    """The rule that fits, and the new name; an empty rule if none fits."""
    for text, rule in rules:
        try:
            return text, rule(name)
        except _NoRule:
            continue
    return "", None


def _refused(what: str, lines: Sequence[str]) -> MismatchError:
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN_MAX])
    more = f"\n  and {len(lines) - _SHOWN_MAX} more" if len(lines) > _SHOWN_MAX else ""
    return MismatchError(
        f"{what}:\n{shown}{more}",
        safe="nothing was written",
        hint=r"add a rule such as --map '(.*)=\1' for those that keep their names, or '(.*)=' to drop the rest",
    )


def _parse(text: str) -> _Rule:
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py") and function.isidentifier():
        return _load(file, function)
    pattern, equals, to = text.partition("=")
    if not equals:
        raise UsageError(f"--map {text!r} is neither FROM=TO nor file.py:function")
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--map {text!r}: {pattern!r} is no regular expression: {error}") from None

    def apply(name: str) -> str | None:
        match = expression.fullmatch(name)
        if match is None:
            raise _NoRule
        try:
            return match.expand(to) or None
        except (re.error, IndexError) as error:
            raise UsageError(f"--map {text!r}: {to!r} can't be filled in: {error}") from None

    return apply


def _load(file: str, function: str) -> _Rule:
    spec = importlib.util.spec_from_file_location("ckptrt_user_map", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--map {file}:{function}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--map {file}:{function}: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"--map {file}:{function}: there is no such function in it")

    def apply(name: str) -> str | None:
        try:
            new = found(name)
        except Exception as error:
            raise UsageError(f"--map {file}:{function}({name!r}): {type(error).__name__}: {error}") from error
        if new is not None and not isinstance(new, str):
            raise UsageError(f"--map {file}:{function}({name!r}) gave {new!r}, which is neither a name nor None")
        return new

    return apply
