"""Model folders as Hugging Face lays them out, and single safetensors files, read."""

from __future__ import annotations

import json
import os

from ckptrt.errors import CorruptError, NotFoundError, UsageError
from ckptrt.storage.interop.blobs import Named
from ckptrt.storage.interop.foreign import Foreign
from ckptrt.storage.interop.tensorfile import INDEX, SINGLE, TensorFile, read_header
from ckptrt.storage.tiers import open_tier
from ckptrt.storage.tiers.local import local_path

__all__ = ["open_hub"]

_UNCHECKED = (
    "safetensors has no checksums: files that are missing, cut off or inconsistent are refused, but a changed byte of "
    "a tensor's data can't be told"
)


def open_hub(place: str) -> Foreign:
    """A folder or URL with an index, with model.safetensors, or with one other safetensors file; or a single file.

    Raises CorruptError for anything that contradicts itself, such as an index that names an absent file.
    """
    folder, only = _split(place)
    tier = open_tier(folder)
    if not only:
        there = {entry.name for entry in tier.list("") if entry.name.endswith(".safetensors") or entry.name == INDEX}
        if INDEX in there:
            return _open_indexed(folder, there)
        if SINGLE not in there and len(there) != 1:
            raise NotFoundError(
                f"{place} has neither {INDEX} nor {SINGLE}"
                + (f", but several safetensors files ({', '.join(sorted(there)[:4])})" if there else ""),
                hint="name a folder with one of them, or one safetensors file",
            )
        only = SINGLE if SINGLE in there else there.pop()
    found = read_header(tier, only)
    return Foreign(tensors=found.tensors, ties=found.ties, check=lambda progress: _UNCHECKED)


def _split(place: str) -> tuple[str, str]:
    """Folder, and the file in it if one was named."""
    path = place if "://" in place and not place.startswith("file:") else local_path(place)
    if path.endswith(".safetensors") and ("://" in path or not os.path.isdir(path)):
        folder, _, name = path.rpartition("/")
        return folder or "/", name
    return path, ""


def _open_indexed(folder: str, there: set[str]) -> Foreign:
    tier = open_tier(folder)
    where = f"{tier.url}/{INDEX}"
    try:
        weight_map = json.loads(tier.read(INDEX))["weight_map"]
        items = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{where} is damaged: it can't be read ({error})", safe="nothing was written") from None
    absent = sorted({file for _, file in items} - there)
    if absent:
        raise CorruptError(
            f"{where} names {len(absent)} files that aren't there, such as {absent[0]!r}",
            safe="nothing was written",
            hint="get the missing files",
        )
    files: dict[str, TensorFile] = {file: read_header(tier, file) for file in dict.fromkeys(file for _, file in items)}
    tensors: dict[str, Named] = {}
    for name, file in items:
        if name not in files[file].tensors:
            raise CorruptError(f"{where} says that {name} is in {file}, but it isn't", safe="nothing was written")
        tensors[name] = files[file].tensors[name]
    ties = {alias: kept for found in files.values() for alias, kept in found.ties.items() if alias not in tensors}
    extra = sorted({name for found in files.values() for name in found.tensors} - set(tensors))
    if extra:
        raise UsageError(
            f"{where} doesn't say anything of {len(extra)} tensors that are in its files, such as {extra[0]}",
            safe="nothing was written",
            hint="files of two models may lie in this folder; move one away",
        )
    return Foreign(tensors=tensors, ties=ties, check=lambda progress: _UNCHECKED)
