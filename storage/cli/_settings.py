"""Options that every verb takes, before or after its name, and what they mean together with its argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import click

from ckptrt import env
from ckptrt.errors import UsageError

__all__ = ["Duration", "Settings", "Target", "common_options", "pass_settings"]

_F = TypeVar("_F", bound=Callable[..., object])
_STEP = re.compile(r"[0-9]{1,18}|latest")


@dataclass(slots=True)
class Settings:
    """What the common options said, wherever on the command line they stood."""

    dir: str | None = None
    format: str = "human"

    @property
    def is_json(self) -> bool:
        return self.format == "json"

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
        return Target(url=self.url(url), step=int(step) if step.isdigit() else None, is_latest=step == "latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run, and a step of it, its latest, or (both unset) all of it."""

    url: str
    step: int | None = None
    is_latest: bool = False


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def common_options(function: _F) -> _F:
    """-C/--dir, --format and --json, kept in the context's Settings."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def _keep_dir(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value:
        ctx.ensure_object(Settings).dir = value


def _keep_format(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value:
        ctx.ensure_object(Settings).format = value


def _keep_json(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Settings).format = "json"


class _DirOption(click.Option):
    """-C; the environment counts only where nothing else was said, so a verb's option never undoes the group's."""

    def value_from_envvar(self, ctx: click.Context) -> str | Sequence[str] | None:
        return None if ctx.ensure_object(Settings).dir else super().value_from_envvar(ctx)


_OPTIONS = (
    click.option(
        "-C", "--dir", metavar="URL", envvar=env.DIR, show_envvar=True, help="Directory or URL of the run.",
        cls=_DirOption, callback=_keep_dir, expose_value=False, is_eager=True,
    ),
    click.option(
        "--format", type=click.Choice(["human", "json"]), help="Tables for people (default) or JSON for scripts.",
        callback=_keep_format, expose_value=False, is_eager=True,
    ),
    click.option(
        "--json", is_flag=True, help="The same as --format json.",
        callback=_keep_json, expose_value=False, is_eager=True,
    ),
)  # fmt: skip


class Duration(click.ParamType[float]):
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
