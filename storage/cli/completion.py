"""`ckptrt completion`: what a shell must source to complete verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  eval "$(ckptrt completion bash)"
  ckptrt completion zsh > ~/.zfunc/_ckptrt
  ckptrt completion fish > ~/.config/fish/completions/ckptrt.fish
"""


@click.command("completion", epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell, to be sourced by its start-up file."""
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    click.echo(kind(ctx.find_root().command, {}, "ckptrt", "_CKPTRT_COMPLETE").source())
