"""`ckptrt import`: make a checkpoint of files of another format."""

from __future__ import annotations

from typing import get_args

import click

from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import Settings, common_options, complete_place, pass_settings
from ckptrt.storage.importing import (
    ForeignOptimizer,
    Format,
    check_target,
    import_checkpoint,
    open_optimizer,
    open_source,
    plan_import,
)

__all__ = ["command"]

_SHOWN_MAX = 10

_EXAMPLES = """\b
Examples:
  ckptrt import hf ./llama runs/finetune --step 0 --tie lm_head.weight=model.embed_tokens.weight
  ckptrt import torch old.pt runs/gpt --step 1200 --key state_dict
  ckptrt import dcp ./checkpoint/step-500 s3://bucket/runs/gpt --step 500 --optimizer optim:AdamW
"""


@click.command("import", epilog=_EXAMPLES)
@click.argument("format", type=click.Choice(get_args(Format)), metavar="safetensors|hf|torch|dcp")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="[DIR|URL]", required=False, shell_complete=complete_place)
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step that the checkpoint will have.")
@click.option("--component", default="model", show_default=True, help="The name that the model has in ckptrt.init().")
@click.option("--key", default="", help="Which part of a torch.save file or DCP folder; . is all of it.")
@click.option("--map", "rules", multiple=True, metavar="FROM=TO|FILE.py:FN", help="Other names; the first that fits.")
@click.option("--tie", "tied", multiple=True, metavar="NAME=KEPT", help="NAME shares the tensor KEPT (tied weights).")
@click.option(
    "--optimizer", metavar="KEY:CLASS[:NAME]",
    help="Take the optimizer's state under KEY along, such as optim:AdamW; NAME is its name in ckptrt.init() (KEY).",
)  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="Check the source, say what would be written, and write nothing.")
@common_options
@pass_settings
def command(
    settings: Settings,
    format: Format,
    source: str,
    target: str | None,
    step: int,
    component: str,
    key: str,
    rules: tuple[str, ...],
    tied: tuple[str, ...],
    optimizer: str | None,
    dry_run: bool,
) -> None:
    """Make a committed checkpoint of a model's weights, from which a training starts through rt.restore().

    The run is made if there is none; in one that has checkpoints, the step must be above theirs, and no job may run.
    What isn't taken along (the data's position, an optimizer unless it is named) a restore leaves as it is, and says
    so. Damage is found before anything is written, as far as the format has checksums. Nothing is unpickled but tensors
    and plain values.
    """
    url = settings.url(target)
    found = open_source(format, source, key=key, component=component)
    check_target(url, step)
    theirs = _optimizer(format, source, optimizer) if optimizer else None
    total = found.check_bytes + (theirs[0].check_bytes if theirs else 0)
    total += 0 if dry_run else found.size_bytes
    with _output.progress("checking" if dry_run else "importing", total) as advance:
        plan = plan_import(found, component, rules, tied, theirs, advance)
        commit = None if dry_run else import_checkpoint(plan, url, step, advance)
    for warning in (*plan.warnings, *filter(None, [plan.unchecked])):
        _output.warn(warning)
    document = _documents.Import(
        url=url,
        step=step,
        incarnation=commit.id.incarnation if commit else None,
        source=source,
        form=format,
        components=[part.name for part in plan.components],
        num_tensors=len(plan.tensors),
        size_bytes=plan.size_bytes,
        ties=plan.ties,
        left_out=list(plan.left_out),
        unchecked=plan.unchecked,
        dry_run=dry_run,
    )
    _output.emit(document, lambda: _print(document), [step])


def _optimizer(format: Format, source: str, text: str) -> tuple[ForeignOptimizer, str, str]:
    """What was found, its name and its class."""
    key, _, rest = text.partition(":")
    kind, _, name = rest.partition(":")
    if not key or not kind:
        raise click.UsageError(f"--optimizer {text!r} isn't of the form optim:AdamW")
    return open_optimizer(format, source, key), name or key, kind


def _print(document: _documents.Import) -> None:
    tensors = _output.count(document.num_tensors, "tensor")
    click.echo(f"source     {document.source}: {tensors} as {', '.join(document.components)}")
    for name in document.left_out[:_SHOWN_MAX]:
        click.echo(f"left out   {name}")
    if len(document.left_out) > _SHOWN_MAX:
        click.echo(f"left out   and {len(document.left_out) - _SHOWN_MAX} more")
    where = f"{document.url} @ {document.step}"
    if document.dry_run:
        click.echo(f"dry run    {where} would have {_output.size(document.size_bytes)}; nothing was written")
    else:
        click.echo(f"committed  {where}: {_output.size(document.size_bytes)}, incarnation {document.incarnation}")
