"""`ckptrt export`: write a checkpoint as files of another format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import click

from ckptrt.errors import CorruptError, NotFoundError
from ckptrt.storage.catalog import Catalog, CommitId, CommitInfo, open_catalog
from ckptrt.storage.checkpoint import Checkpoint
from ckptrt.storage.cli import _documents, _output
from ckptrt.storage.cli._settings import ParamType, Settings, common_options, complete_place, pass_settings
from ckptrt.storage.export import (
    CAST_DTYPES,
    DEFAULT_SKIP,
    ExportOptions,
    ExportPlan,
    ExportResult,
    Format,
    Inventory,
    Loss,
    Output,
    check_source,
    export,
    plan_export,
)
from ckptrt.storage.owner import made_by

__all__ = ["Size", "command"]

_SHOWN_MAX = 10

_EXAMPLES = """\b
Examples:
  ckptrt export hf runs/gpt@latest ./out --dtype bf16 --config ./hf-config
  ckptrt export safetensors runs/gpt@1200 ./out --map '_orig_mod\\.(.*)=\\1' --map '(.*)=\\1'
  ckptrt export torch runs/gpt@1200 gpt.pt
  ckptrt export dcp s3://bucket/runs/gpt@1200 ./dcp --component model
"""


class Size(ParamType[int]):
    """Bytes: 5GB is 5 * 10**9, 5GiB is 5 * 2**30."""

    name = "size"
    _FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?", re.IGNORECASE)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = self._FORM.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no size; write 5GB (decimal) or 5GiB (binary)", param, ctx)
        power = " kmgt".index((match[2] or " ").lower())
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


@click.command("export", epilog=_EXAMPLES)
@click.argument("format", type=click.Choice(get_args(Format)), metavar="safetensors|hf|torch|dcp")
@click.argument("source", metavar="[URL@]STEP|latest", shell_complete=complete_place)
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--component", "components", multiple=True, help="Which part of the state; may be given several times.")
@click.option(
    "--dtype", type=click.Choice(list(CAST_DTYPES)), help="Cast floating tensors to this, but those of optimizers."
)
@click.option("--quant", type=click.Choice(["int8"]), help="Linear weights as 8-bit integers (needs ckptrt[quant]).")
@click.option(
    "--quant-skip", metavar="REGEX", default=DEFAULT_SKIP, show_default=True,
    help="Weights in whose names this is found stay.",
)  # fmt: skip
@click.option("--map", "rules", multiple=True, metavar="FROM=TO|FILE.py:FN", help="Other names; the first that fits.")
@click.option("--max-shard-size", type=Size(), default="5GB", show_default=True, help="Bytes of tensors in a file.")
@click.option("--config", metavar="DIR", default="", help="Copy the files of DIR that are no weights along.")
@click.option("--force", is_flag=True, help="Replace an earlier export, if nothing else is there.")
@click.option("-n", "--dry-run", is_flag=True, help="Check the source, say what would be written, and write nothing.")
@common_options
@pass_settings
def command(
    settings: Settings,
    format: Format,
    source: str,
    out: str,
    components: tuple[str, ...],
    dtype: str | None,
    quant: str | None,
    quant_skip: str,
    rules: tuple[str, ...],
    max_shard_size: int,
    config: str,
    force: bool,
    dry_run: bool,
) -> None:
    r"""Write a checkpoint as safetensors files, as a model folder of Hugging Face (hf), as one torch.save file, or as a
    folder of torch.distributed.checkpoint (dcp).

    Without --component, safetensors and hf take the model, torch and dcp the optimizers too. Nothing is cast or left
    out without being told. All that is taken is compared with its digests before the first byte is written, and what
    was written is read again; OUT appears when all is well, or not at all. --map is a regular expression for whole
    names, of which \1 is a group; FROM= drops a tensor, and a name that no rule fits is an error.
    """
    where = settings.target(source)
    catalog = open_catalog(where.url)
    checkpoint = catalog.open_checkpoint(_chosen(catalog, where.step))
    options = ExportOptions(
        format=format,
        components=components,
        dtype=CAST_DTYPES.get(dtype or "", ""),
        quant=quant or "",
        quant_skip=quant_skip,
        rules=rules,
        max_shard_bytes=max_shard_size,
        config=config,
    )
    with (
        _pruned_told(catalog, checkpoint.id),
        Output(out, is_file=format == "torch", force=force) as output,
        Inventory(checkpoint) as inventory,
    ):
        plan = plan_export(inventory, options)
        result = None
        total = plan.source_bytes + (0 if dry_run else 2 * plan.size_bytes)
        with _output.progress("checking" if dry_run else "exporting", total) as advance:
            if dry_run:
                check_source(plan, advance)
            else:
                result = export(plan, output, _facts(catalog, checkpoint, options, plan), advance)
    document = _document(where.url, out, checkpoint, options, plan, result)
    for warning in document.warnings:
        _output.warn(warning)
    _output.emit(document, lambda: _print(document), (file.name for file in document.files))


def _chosen(catalog: Catalog, step: int | None) -> CommitInfo:
    """The checkpoint that was asked for, whole as far as names, sizes and metadata tell."""
    if step is not None:
        found = catalog.examine(catalog.find(step))
        if found.state == "damaged":
            raise CorruptError(
                found.reason, safe="nothing was written", hint="`ckptrt verify` names the newest good step"
            )
        return found
    selection = catalog.newest_good()
    for passed in selection.skipped:
        _output.warn(f"step {passed.step} is passed over: {passed.reason}")
    if selection.commit is None:
        kind = CorruptError if selection.skipped else NotFoundError
        raise kind(
            f"{catalog.tier.url} has no checkpoint that is whole",
            safe="nothing was written",
            hint="`ckptrt ls` shows what there is",
        )
    return selection.commit


@contextmanager
def _pruned_told(catalog: Catalog, commit: CommitId) -> Iterator[None]:
    """Say that a checkpoint was removed while it was read, which isn't damage."""
    try:
        yield
    except CorruptError:
        if commit in catalog.commit_ids():
            raise
        raise NotFoundError(
            f"{catalog.tier.url}: step {commit.step} was pruned while it was exported",
            safe="nothing has appeared at the output's place",
            hint="export one that stays: `ckptrt pin` keeps it",
        ) from None


def _facts(catalog: Catalog, checkpoint: Checkpoint, options: ExportOptions, plan: ExportPlan) -> dict[str, object]:
    record = checkpoint.record
    return {
        "made_by": made_by(),
        "format": options.format,
        "source": {
            "url": catalog.tier.url,
            "run_id": catalog.run.run_id if catalog.run else None,
            "step": record.step,
            "incarnation": record.incarnation,
            "manifest_xxh3": record.manifest.xxh3,
        },
        "components": [component.name for component in plan.components],
        "dtype": options.dtype or None,
        "quant": options.quant or None,
    }


def _document(
    url: str,
    out: str,
    checkpoint: Checkpoint,
    options: ExportOptions,
    plan: ExportPlan,
    result: ExportResult | None,
) -> _documents.Export:
    if result is not None:
        named = {os.path.basename(out): files} if (files := result.files.get("model.pt")) else result.files
        written = [_documents.ExportFile(name=n, size_bytes=size, xxh3=xxh3) for n, (size, xxh3) in named.items()]
    else:
        written = [_documents.ExportFile(name=file.name, size_bytes=file.data_bytes, xxh3=None) for file in plan.files]
    losses = result.losses if result else plan.losses
    ranked = sorted(losses.items(), key=lambda item: (-item[1].max_rel, item[0]))
    return _documents.Export(
        url=url,
        step=checkpoint.record.step,
        incarnation=checkpoint.record.incarnation,
        target=out,
        form=options.format,
        components=[component.name for component in plan.components],
        num_tensors=len(plan.tensors),
        size_bytes=plan.size_bytes,
        files=written,
        left_out=list(plan.left_out),
        warnings=[*plan.warnings, *_overflows(ranked, options.dtype)],
        quantised=list(plan.losses),
        losses=[_loss(name, loss) for name, loss in ranked],
        dry_run=result is None,
    )


def _overflows(losses: list[tuple[str, Loss]], dtype: str) -> list[str]:
    """Sentences about values that were too large for the new dtype."""
    found = [(name, loss.num_overflow) for name, loss in losses if loss.num_overflow]
    texts = [f"{_output.count(number, 'value')} of {name} became infinite in {dtype}" for name, number in found]
    more = len(texts) - _SHOWN_MAX
    return [*texts[:_SHOWN_MAX], f"and values of {more} more tensors"] if more > 0 else texts


def _loss(name: str, loss: Loss) -> _documents.ExportLoss:
    return _documents.ExportLoss(key=name, max_abs=loss.max_abs, max_rel=loss.max_rel, num_overflow=loss.num_overflow)


def _print(document: _documents.Export) -> None:
    count = _output.count
    taken = ", ".join(document.components)
    click.echo(f"source     {document.url} @ {document.step}: {taken}")
    for name in document.left_out[:_SHOWN_MAX]:
        click.echo(f"left out   {name}")
    if len(document.left_out) > _SHOWN_MAX:
        click.echo(f"left out   and {len(document.left_out) - _SHOWN_MAX} more")
    if document.quantised:
        click.echo(f"8-bit      {count(len(document.quantised), 'weight')}, such as {document.quantised[0]}")
    if document.losses:
        worst = document.losses[0]
        largest = max(loss.max_abs for loss in document.losses)
        click.echo(
            f"loss       {count(len(document.losses), 'tensor')}: max abs. error {largest:.2g}, max rel. error "
            f"{worst.max_rel:.2g}, in {worst.key}"
        )
    files = f"{count(len(document.files), 'file')}, " if document.files else ""
    sizes = f"{files}{count(document.num_tensors, 'tensor')}, {_output.size(document.size_bytes)}"
    if document.dry_run:
        click.echo(f"dry run    {document.target} would have {sizes}; nothing was written")
    else:
        click.echo(f"output     {document.target}: {sizes}")
        click.echo("check      read again: names, shapes and all bytes are as they were written")
