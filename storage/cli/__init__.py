"""`ckptrt`: look at, check and prune what is stored. Every verb loads only what it needs, and never torch."""

from __future__ import annotations

import importlib
from typing import Any

import click

from ckptrt.errors import Error
from ckptrt.storage.cli._settings import Settings, common_options

__all__ = ["cli", "main"]

# verb -> help line; the verb's module is loaded only when it is called or asked for its own help.
_VERBS = {
    "ls": "List the checkpoints of a run, or the runs in a directory.",
    "show": "Show what one checkpoint holds.",
    "tree": "Show what one checkpoint holds by module.",
    "diff": "Show what differs between two checkpoints.",
    "du": "Show what the checkpoints of a run take.",
    "events": "Tell what happened to a run.",
    "verify": "Check that checkpoints are as they were written.",
    "cp": "Copy checkpoints to another place.",
    "pin": "Keep a checkpoint, whatever the rules of prune say.",
    "unpin": "Let a pinned checkpoint be pruned again.",
    "prune": "Remove checkpoints that are no longer wanted.",
    "completion": "Print what a shell needs to complete verbs and options.",
}


class _Verbs(click.Group):
    """Loads verbs on demand, and turns every expected error into a message and the documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"ckptrt.storage.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        from ckptrt.storage.cli import _output

        try:
            return super().invoke(ctx)
        except Error as error:
            _output.show_error(error, as_json=ctx.ensure_object(Settings).is_json)
            ctx.exit(error.exit_code)
        except click.UsageError as error:
            if not ctx.ensure_object(Settings).is_json:
                raise
            _output.show_usage_error(error.format_message())
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.version_option(package_name="ckptrt", prog_name="ckptrt")
def cli() -> None:
    """Inspect, check and prune checkpoints.

    A run is a directory or a URL: -C, the environment variable CKPTRT_DIR, or the verb's own argument. A checkpoint is
    named by its step (1200), by `latest`, or as URL@STEP.
    """


def main() -> None:
    """The command line, as installed."""
    cli(prog_name="ckptrt")
