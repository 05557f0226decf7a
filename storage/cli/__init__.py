"""`ckptrt`: look at, check, copy and prune what is stored. Every verb loads only what it needs, and never torch."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from ckptrt.errors import Error
from ckptrt.storage.cli._settings import Settings, common_options

__all__ = ["cli", "main", "modules"]

# What for -> verb -> help line; the verb's module is loaded only when it is called or asked for its own help.
_GROUPS = {
    "Look": {
        "ls": "List the checkpoints of a run, or the runs in a directory.",
        "show": "Show what one checkpoint holds.",
        "tree": "Show what one checkpoint holds by module.",
        "diff": "Show what differs between two checkpoints.",
        "du": "Show what the checkpoints of a run take.",
        "events": "Tell what happened to a run.",
    },
    "Check": {
        "verify": "Check that checkpoints are as they were written.",
        "doctor": "Check a place and this machine before a run.",
    },
    "Move": {
        "cp": "Copy checkpoints to another place.",
        "export": "Write a checkpoint as files of another format.",
        "import": "Make a checkpoint of files of another format.",
    },
    "Keep": {
        "pin": "Keep a checkpoint, whatever the rules of prune say.",
        "unpin": "Let a pinned checkpoint be pruned again.",
        "prune": "Remove checkpoints that are no longer wanted.",
    },
    "Run": {
        "drain": "Have a running job save its last step and end.",
    },
    "Set up": {
        "completion": "Print what a shell needs to complete verbs, options and steps.",
    },
}  # fmt: skip
_MODULES = {"import": "import_"}  # of verbs that are no Python names


def modules() -> list[str]:
    """The full names of all verbs' modules, whether they are there or not."""
    return [_module(verb) for verbs in _GROUPS.values() for verb in verbs]


def _module(verb: str) -> str:
    return f"ckptrt.storage.cli.{_MODULES.get(verb, verb)}"


def _there() -> dict[str, dict[str, str]]:
    """The verbs whose modules this installation has."""
    found = ((group, {verb: text for verb, text in verbs.items() if _has(verb)}) for group, verbs in _GROUPS.items())
    return {group: verbs for group, verbs in found if verbs}


def _has(verb: str) -> bool:
    return importlib.util.find_spec(_module(verb)) is not None


_INTERRUPTED = 130
_BROKEN_PIPE = 141  # as a shell says it of a program that SIGPIPE ended

_EPILOG = """\b
A checkpoint is named by its step (1200), by `latest`, or as URL@STEP.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 done in part, 4 damage found,
5 nothing to resume from or differences, 10 no such run or checkpoint,
11 in use by a job, 12 access denied, 130 interrupted.
`ckptrt COMMAND --help` shows examples.
"""


class _Verbs(click.Group):
    """Loads verbs on demand, and turns whatever goes wrong into a message and the documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb for verbs in _there().values() for verb in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not any(cmd_name in verbs for verbs in _GROUPS.values()) or not _has(cmd_name):
            return None
        command = importlib.import_module(_module(cmd_name)).command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx))
            if not close:
                raise
            raise click.UsageError(f"{args[0]!r} is no command; did you mean {' or '.join(close)}?", ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for group, verbs in _there().items():
            with formatter.section(group):
                formatter.write_dl([(verb.ljust(width), text) for verb, text in verbs.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(words, prog_name, complete_var, False, **extra)
        settings = Settings()
        run = super().main
        sys.exit(_guard(lambda: run(words, prog_name, complete_var, False, obj=settings, **extra), settings, words))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # Whoever read has seen enough. What is left in the buffer must not be written at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_BROKEN_PIPE)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


def _guard(run: Callable[[], Any], settings: Settings, words: Sequence[str]) -> int:
    """Run, and say what went wrong if something did; the exit code."""
    from ckptrt.storage.cli import _output

    try:
        with _output.log_to_stderr():
            code = run()
        return code if isinstance(code, int) else 0
    except Error as error:
        _output.show_error(error, settings)
        return error.exit_code
    except click.ClickException as error:
        # The option that asks for JSON may stand behind the one that is wrong.
        if settings.is_json or "--json" in words:
            _output.show_usage_error(error.format_message())
        else:
            error.show()
        return error.exit_code
    except click.Abort:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001  what isn't expected is told as such, in one line
        _output.show_bug(error, settings)
        return 1


@click.group(cls=_Verbs, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.version_option(package_name="ckptrt", prog_name="ckptrt")
def cli() -> None:
    """Inspect, check, copy and prune checkpoints.

    A run is a directory or a URL: -C, the environment variable CKPTRT_DIR, or the verb's own argument.
    """


def main() -> None:
    """The command line, as installed."""
    cli(prog_name="ckptrt")
