"""A checkpoint written as files of another format: safetensors (as Hugging Face lays them out), torch.save, or DCP.

plan_export() says what will be written, check_source() reads all that it takes, and export() does both and writes. So
damage is found before the first byte is written; each byte is compared with its digest once more as it is written, and
what was written is read again. Memory is bounded by some pieces of a few MiB, but for 8-bit weights, of which one
tensor at a time is in memory.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptrt.errors import MismatchError, NotFoundError, StorageError, UsageError
from ckptrt.storage.interop.blobs import Assembled, Blob, Digested, DigestedImage, Named, Span, digest, read_through
from ckptrt.storage.interop.casting import CAST_DTYPES, Cast, Loss, cast
from ckptrt.storage.interop.inventory import Component, Inventory
from ckptrt.storage.interop.names import rename
from ckptrt.storage.interop.output import NOTE, Output
from ckptrt.storage.interop.quant import DEFAULT_SKIP, index_metadata, is_weight, plain_metadata, quantise
from ckptrt.storage.interop.tensorfile import INDEX, File, check_names, deal_out, index_text, lacks, read_header
from ckptrt.storage.tiers.local import LocalTier, local_path

__all__ = [
    "CAST_DTYPES", "DEFAULT_SKIP", "ExportOptions", "ExportPlan", "ExportResult", "Format", "Inventory", "Loss",
    "Output", "check_source", "export", "plan_export",
]  # fmt: skip

Format = Literal["safetensors", "hf", "torch", "dcp"]
Progress = Callable[[int], None]

_TENSOR_FILES = ("safetensors", "hf")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TORCH_FILE = "model.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export.

    components: which parts of the state; empty: the model (for torch and dcp, the optimizers too). dtype: floating
    tensors of all but optimizers are cast to this (torch's name); empty: none is. quant: int8 makes linear weights
    8-bit integers, but for names in which `quant_skip` is found. rules: other names, as for --map. config: a folder
    whose small files go along.
    """

    format: Format
    components: tuple[str, ...] = ()
    dtype: str = ""
    quant: str = ""
    quant_skip: str = DEFAULT_SKIP
    rules: tuple[str, ...] = ()
    max_shard_bytes: int = 5 * 10**9
    config: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """What will be written. left_out: what of the checkpoint won't be. warnings: sentences."""

    options: ExportOptions
    components: tuple[Component, ...]
    files: tuple[File, ...]  # of tensors; none for torch and dcp
    tensors: dict[str, Named]  # by name; for torch and dcp with the component's name before it
    config_files: tuple[str, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    losses: dict[str, Loss]  # of 8-bit weights; those of casts are known once they are written

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def sources(self) -> list[Blob]:
        """What is read of the checkpoint, but for weights that become 8-bit, which the plan has read."""
        blobs = (t.data.source if isinstance(t.data, Cast) else t.data for t in self.tensors.values())
        return [blob for blob in blobs if isinstance(blob, Assembled)]

    @property
    def source_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.sources)


@dataclass(slots=True, kw_only=True)
class ExportResult:
    """What was written: files with sizes and xxh3-128, and how far values are from what they were, by tensor."""

    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)


def plan_export(inventory: Inventory, options: ExportOptions) -> ExportPlan:
    """See what an export would write. Reads receipts, plain data, and weights that are to become 8-bit.

    Raises UsageError for options that don't go together or a component that isn't there, MismatchError for names that
    no rule fits or that the format can't hold, and CorruptError for a checkpoint that is damaged where it was read.
    """
    _check_options(options)
    names = tuple(dict.fromkeys(options.components)) or _default_components(inventory, options.format)
    components = tuple(_cast(inventory.component(name), options.dtype) for name in names)
    left_out = [f"component {name}" for name in inventory.names if name not in names]
    config_files = _config_files(options.config, left_out)
    warnings = [f"{key} differs between ranks: rank 0's is taken" for c in components for key in c.differing]
    if options.format not in _TENSOR_FILES:
        tensors = {tensor.name: tensor for component in components for tensor in component.tensors.values()}
        files: list[File] = []
        losses: dict[str, Loss] = {}
    else:
        files, losses = _tensor_files(components, options, left_out, warnings)
        tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    return ExportPlan(
        options=options,
        components=components,
        files=tuple(files),
        tensors=tensors,
        config_files=config_files,
        left_out=tuple(left_out),
        warnings=tuple(warnings),
        losses=losses,
    )


def check_source(plan: ExportPlan, progress: Progress) -> None:
    """Compare all that will be read of the checkpoint with its digests. Raises CorruptError if it is damaged."""
    read_through(plan.sources, progress)


def export(plan: ExportPlan, output: Output, facts: dict[str, Any], progress: Progress) -> ExportResult:
    """Write what the plan says, check it, and give it its place. facts: what the note beside the files says.

    progress: called with bytes checked, written and, once more, checked. Raises CorruptError if the checkpoint is
    damaged; then nothing was written, or (if the damage came about meanwhile) has appeared at the output's place.
    """
    check_source(plan, progress)
    result = ExportResult(losses=dict(plan.losses))
    if plan.options.format in _TENSOR_FILES:
        _write_tensor_files(plan, output, result, progress)
    else:
        _write_torch(plan, output, result, progress)
    for tensor in plan.tensors.values():
        if isinstance(tensor.data, Cast):
            result.losses[tensor.name] = tensor.data.loss
    if plan.options.format == "torch":
        output.publish(_TORCH_FILE)
        return result
    config = LocalTier(plan.options.config or ".")
    for name in plan.config_files:
        image = DigestedImage([Span(config, name, 0, config.size(name))])
        output.tier.write(name, image, image.size_bytes)
        result.files[name] = image.size_bytes, image.xxh3
    noted = {name: {"size_bytes": size, "xxh3": xxh3} for name, (size, xxh3) in result.files.items()}
    output.note({**facts, "files": noted})
    output.publish()
    return result


# --- choosing


def _check_options(options: ExportOptions) -> None:
    if options.format not in _TENSOR_FILES:
        given = (("--map", options.rules), ("--quant", options.quant), ("--config", options.config))
        wrong = [name for name, value in given if value]
        if wrong:
            raise UsageError(f"{', '.join(wrong)} can't be used with {options.format}: only with safetensors and hf")
    if options.format == "hf" and len(options.components) > 1:
        raise UsageError("hf holds one component", hint="use safetensors, or export them one by one")
    if options.quant not in ("", "int8"):
        raise UsageError(f"there is no --quant {options.quant}", hint="use int8")
    if options.max_shard_bytes < 1:
        raise UsageError("--max-shard-size must be more than nothing")


def _default_components(inventory: Inventory, format: Format) -> tuple[str, ...]:
    """The model; for formats that can hold it, the optimizers too."""
    if format not in _TENSOR_FILES:
        found = [inventory.component(name) for name in inventory.names]
        chosen = tuple(c.name for c in found if c.tensors and (c.is_module or c.is_optimizer))
    else:
        chosen = ("model",) if "model" in inventory.names else ()
    if not chosen:
        raise UsageError("which part of the state is to be exported?", hint=f"--component: {inventory.describe()}")
    return chosen


def _config_files(folder: str, left_out: list[str]) -> tuple[str, ...]:
    """The files of a model's folder besides its weights."""
    if not folder:
        return ()
    if not os.path.isdir(local_path(folder)):
        raise NotFoundError(f"--config {folder} is no directory", safe="nothing was written")
    there = [entry for entry in LocalTier(folder).list("") if not entry.name.startswith(".")]
    left_out += [f"folder {entry.name} of --config" for entry in there if entry.is_folder]
    names = [entry.name for entry in there if not entry.is_folder]
    return tuple(name for name in names if not name.endswith(_WEIGHTS) and name != NOTE)


def _cast(component: Component, dtype: str) -> Component:
    """The component in another dtype, but for an optimizer, whose state wasn't asked for."""
    if not dtype or component.is_optimizer:
        return component
    return replace(component, tensors={name: cast(tensor, dtype) for name, tensor in component.tensors.items()})


def _tensor_files(
    components: tuple[Component, ...], options: ExportOptions, left_out: list[str], warnings: list[str]
) -> tuple[list[File], dict[str, Loss]]:
    empty = [component.name for component in components if not component.tensors]
    if empty:
        raise UsageError(f"there are no tensors in {empty[0]}", hint="the format torch holds plain data too")
    several = len(components) > 1
    named: dict[str, Named] = {}
    ties: dict[str, str] = {}
    for component in components:
        prefix = f"{component.name}." if several else ""
        named.update({prefix + name: tensor for name, tensor in component.tensors.items()})
        ties.update({prefix + name: prefix + kept for name, kept in component.ties.items()})
        if component.data is not None and not (component.is_module and set(component.data) == {"ties"}):
            left_out.append(f"plain data of {component.name}")
    renaming = rename([*named, *ties], options.rules)
    left_out += [f"{name} (dropped by --map)" for name in renaming.dropped]
    warnings += [f"--map {rule!r} met no name" for rule in renaming.unused]
    new_of = {old: new for new, old in renaming.names.items()}
    tensors = [replace(named[old], name=new) for new, old in renaming.names.items() if old in named]
    _check_dtypes(tensors, options.format, warnings)
    # A tie whose tensor was dropped goes with it; the user has said so.
    aliases = {new: new_of[ties[old]] for new, old in renaming.names.items() if old in ties and ties[old] in new_of}
    check_names((tensor.name for tensor in tensors), aliases)
    groups, texts, losses = _groups(tensors, options, frozenset(aliases.values()))
    files = deal_out(groups, options.max_shard_bytes)
    aliases_of: defaultdict[str, list[str]] = defaultdict(list)
    for alias, kept in aliases.items():
        aliases_of[kept].append(alias)
    for file in files:
        file.ties = {alias: tensor.name for tensor in file.tensors for alias in aliases_of.get(tensor.name, ())}
        if options.quant:
            mine = dict(texts[tensor.name] for tensor in file.tensors if tensor.name in texts)
            file.metadata = {**mine, "tensor_names": index_metadata(list(mine))}
    return files, losses


def _check_dtypes(tensors: list[Named], format: Format, warnings: list[str]) -> None:
    odd = [tensor for tensor in tensors if lacks(tensor.dtype)]
    if odd and format == "hf":
        raise MismatchError(
            f"safetensors has no dtype {odd[0].dtype}, which {odd[0].name} has ({len(odd)} such tensors in all)",
            safe="nothing was written",
            hint=r"drop them (--map 'NAME=' --map '(.*)=\1'), or use the format safetensors, which stores their bytes",
        )
    warnings += [f"{tensor.name} is stored as bytes: safetensors has no dtype {tensor.dtype}" for tensor in odd]


def _groups(
    tensors: list[Named], options: ExportOptions, shared: frozenset[str]
) -> tuple[list[list[Named]], dict[str, tuple[str, str]], dict[str, Loss]]:
    """Tensors as they will be written; with --quant what the headers say of each, by its first part's name.

    shared: names of tensors that have other names too: embeddings in most cases, and those must find them.
    """
    groups: list[list[Named]] = []
    texts: dict[str, tuple[str, str]] = {}
    losses: dict[str, Loss] = {}
    for tensor in tensors:
        if options.quant and tensor.name not in shared and is_weight(tensor, options.quant_skip):
            found = quantise(tensor)
            groups.append(found.tensors)
            losses[tensor.name] = found.loss
            texts[found.tensors[0].name] = tensor.name, found.metadata
            continue
        groups.append([tensor])
        if options.quant and "." in tensor.name:  # torchao looks for a module's name before the dot
            texts[tensor.name] = tensor.name, plain_metadata()
    return groups, texts, losses


# --- writing


def _write_tensor_files(plan: ExportPlan, output: Output, result: ExportResult, progress: Progress) -> None:
    for file in plan.files:
        image = DigestedImage(file.blobs(), progress)
        output.tier.write(file.name, image, image.size_bytes)
        result.files[file.name] = image.size_bytes, image.xxh3
    if len(plan.files) > 1:
        text = index_text(plan.files)
        output.tier.create(INDEX, text)
        result.files[INDEX] = len(text), digest(Span(output.tier, INDEX, 0, len(text)))
    for file in plan.files:
        found = read_header(output.tier, file.name).tensors
        wanted = {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}
        size_bytes, xxh3 = result.files[file.name]
        is_same = {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == wanted
        if not is_same or digest(Span(output.tier, file.name, 0, size_bytes), progress) != xxh3:
            raise _not_as_written(file.name)


def _write_torch(plan: ExportPlan, output: Output, result: ExportResult, progress: Progress) -> None:
    from ckptrt.storage.interop import dcp, torchfile

    tensors = torchfile.to_torch(plan.tensors.values(), output.tier, progress)
    state = {}
    for component in plan.components:
        mine = {name: tensors[tensor.name][0] for name, tensor in component.tensors.items()}
        state[component.name] = torchfile.state_of(component, mine)
    digests = {id(tensor): xxh3 for tensor, xxh3 in tensors.values()}
    wanted = [digests[id(tensor)] for tensor in torchfile.walk(state)]
    if plan.options.format == "torch":
        path = f"{output.folder}/{_TORCH_FILE}"
        result.files[_TORCH_FILE] = torchfile.save_torch(state, path)
        there = torchfile.walk(torchfile.load_plain(path, output.path))
        found = [Digested(torchfile.TorchTensor(tensor)) for tensor in there]
    else:
        dcp.save_dcp(state, output.folder)
        found = [Digested(tensor.data) for tensor in dcp.open_dcp(output.folder, ".", "").tensors.values()]
    read_through(found, progress)
    if Counter(blob.xxh3 for blob in found) != Counter(wanted):
        raise _not_as_written(output.path)
    del state, tensors, found
    output.tier.delete(torchfile.SCRATCH)
    for name in sorted(_files_of(output.tier)):
        output.sync(name)
        if name not in result.files:
            result.files[name] = output.tier.size(name), digest(Span(output.tier, name, 0, output.tier.size(name)))


def _files_of(tier: LocalTier) -> Iterator[str]:
    return (entry.name for entry in tier.list("") if not entry.is_folder)


def _not_as_written(name: str) -> StorageError:
    return StorageError(
        f"{name} isn't as it was written: the disk gave back something else",
        safe="the checkpoint; what was written is removed again",
        hint="look at the kernel log (dmesg); the disk or the memory may be failing",
    )
