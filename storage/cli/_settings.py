"""Options that every verb takes, before or after its name, and what they mean together with its argument."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click
from click.shell_completion import CompletionItem

from ckptrt import env
from ckptrt.errors import Error, UsageError

if TYPE_CHECKING:
    from click import ParamType
else:

    class ParamType(click.ParamType):
        """Older click has no generic one."""

        def __class_getitem__(cls, _kind):
            return cls


__all__ = [
    "Duration",
    "ParamType",
    "Settings",
    "Target",
    "common_options",
    "complete_place",
    "current",
    "pass_settings",
]

_F = TypeVar("_F", bound=Callable[..., object])
_STEP = re.compile(r"[0-9]{1,18}|latest")
_FORMATS = ("auto", "human", "json", "jsonl", "quiet")
_PROGRESS = ("auto", "bar", "line", "json", "none")


@dataclass(slots=True)
class Settings:
    """What the common options said, wherever on the command line they stood. Empty: not said."""

    dir: str = ""
    format: str = ""
    progress: str = ""
    no_color: bool = False
    verbose: bool = False

    @property
    def is_json(self) -> bool:
        return self.format in ("json", "jsonl")

    @property
    def is_for_people(self) -> bool:
        return self.format in ("", "auto", "human")

    def url(self, path: str | None) -> str:
        """The run's place: the verb's own argument, else -C, else CKPTRT_DIR."""
        if path:
            return path
        if self.dir:
            return self.dir
        raise UsageError(
            "no run was named",
            hint=f"give its directory or URL as an argument, with -C, or in the environment variable {env.DIR}",
        )

    def target(self, argument: str | None) -> Target:
        """`URL@STEP`, `STEP`, `latest` or `URL`: a run and perhaps a step."""
        url, step = argument, ""
        if argument and _STEP.fullmatch(argument):
            url, step = None, argument
        elif argument and "@" in argument and _STEP.fullmatch(argument.rpartition("@")[2]):
            url, _, step = argument.rpartition("@")
        elif argument and "@" in argument.rpartition("/")[2] and not os.path.exists(argument):
            run, _, word = argument.rpartition("@")
            raise UsageError(
                f"{word!r} is no step of {run}",
                hint=f"write {run}@1200 or {run}@latest; a run whose own name holds an @ takes a slash at its end",
            )
        return Target(url=self.url(url), step=int(step) if step.isdigit() else None, is_latest=step == "latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run, and a step of it, its latest, or (both unset) all of it."""

    url: str
    step: int | None = None
    is_latest: bool = False


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def current() -> Settings:
    """Those of the command that runs; the defaults outside of any."""
    ctx = click.get_current_context(silent=True)
    return ctx.ensure_object(Settings) if ctx else Settings()


def common_options(function: _F) -> _F:
    """-C/--dir, --format and its short forms, --progress, --no-color and -v, kept in the context's Settings."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_PREFIX = "common_"


class _Common(click.Option):
    """Kept in a field of the Settings; its own name has a prefix, so that a verb's parameters are free to have theirs.

    The environment counts only where nothing was said, so that a verb's option never undoes the group's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, expose_value=False, is_eager=True, callback=_keep, **kwargs)
        self.field = str(self.name).removeprefix(_PREFIX)

    def value_from_envvar(self, ctx: click.Context) -> str | Sequence[str] | None:
        return None if getattr(ctx.ensure_object(Settings), self.field) else super().value_from_envvar(ctx)


def _keep(ctx: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    if value and isinstance(option, _Common):
        setattr(ctx.ensure_object(Settings), option.field, value)
        if option.field == "verbose":
            logging.getLogger("ckptrt").setLevel(logging.DEBUG)


_OPTIONS = (
    click.option(
        "-C", "--dir", "common_dir", metavar="URL", envvar=env.DIR, show_envvar=True, cls=_Common,
        help="Directory or URL of the run.",
    ),
    click.option(
        "--format", "common_format", type=click.Choice(_FORMATS), metavar="FORM", envvar=env.FORMAT, show_envvar=True,
        help="auto or human (tables), json, jsonl (a line for each item), quiet (names only).", cls=_Common,
    ),
    click.option("--json", "common_format", flag_value="json", help="The same as --format json.", cls=_Common),
    click.option("-q", "--quiet", "common_format", flag_value="quiet", help="The same as --format quiet.", cls=_Common),
    click.option(
        "--progress", "common_progress", type=click.Choice(_PROGRESS), metavar="HOW", cls=_Common,
        help="On stderr: auto (a bar on a terminal, else a line now and then), bar, line, json or none.",
    ),
    click.option(
        "--no-color", "common_no_color", is_flag=True, cls=_Common,
        help="No colours; so does NO_COLOR in the environment.",
    ),
    click.option(
        "-v", "--verbose", "common_verbose", is_flag=True, cls=_Common,
        help="Log what is done; show where an error arose.",
    ),
)  # fmt: skip


class Duration(ParamType[float]):
    """Seconds, also written 90s, 5m, 2h or 1d."""

    name = "duration"
    _FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")
    _UNIT_S: ClassVar[dict[str, int]] = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = self._FORM.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration; write 90s, 5m, 2h or 1d", param, ctx)
        return float(match[1]) * self._UNIT_S[match[2]]


def complete_place(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell may go on with: steps of the run that was named, if it lies in a local directory, else paths."""
    url, at, start = incomplete.rpartition("@")
    place = url if at else ctx.ensure_object(Settings).dir
    steps = [f"{url}{at}{step}" for step in _local_steps(place) if step.startswith(start)]
    return [CompletionItem(step) for step in steps] or [CompletionItem(incomplete, type="dir")]


def _local_steps(place: str) -> list[str]:
    if not place or ("://" in place and not place.startswith("file:")):
        return []  # a store is too slow for a key press
    from ckptrt.storage.catalog import open_catalog

    try:
        return [*(str(commit.step) for commit in open_catalog(place).path().commits), "latest"]
    except Error:
        return []
