"""Model folders as Hugging Face lays them out, and single safetensors files, read."""

from __future__ import annotations

import json
import os

from ckptrt.errors import CorruptError, NotFoundError, UsageError
from ckptrt.storage.interop.blobs import Named
from ckptrt.storage.interop.foreign import Foreign
from ckptrt.storage.interop.tensorfile import INDEX, SINGLE, TensorFile, read_header, unique
from ckptrt.storage.tiers import Tier, open_tier
from ckptrt.storage.tiers.local import local_path

__all__ = ["open_hub"]

_SUFFIX = (".safetensors", INDEX)
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
    there = set() if only else {entry.name for entry in tier.list("") if entry.name.endswith(_SUFFIX)}
    if not only and INDEX in there:
        return _open_indexed(tier, there - {INDEX})
    if not only and SINGLE not in there and len(there) != 1:
        raise NotFoundError(
            f"{place} has neither {INDEX} nor {SINGLE}"
            + (f", but several safetensors files ({', '.join(sorted(there)[:4])})" if there else ""),
            safe="nothing was written",
            hint="name a folder with one of them, or one safetensors file",
        )
    only = only or (SINGLE if SINGLE in there else next(iter(there)))
    found = read_header(tier, only)
    return _foreign(found.tensors, found.ties, there - {only})


def _foreign(tensors: dict[str, Named], ties: dict[str, str], others: set[str]) -> Foreign:
    left_out = tuple(f"file {name}" for name in sorted(others))
    return Foreign(tensors=tensors, ties=ties, left_out=left_out, check=lambda progress: _UNCHECKED)


def _split(place: str) -> tuple[str, str]:
    """Folder, and the file in it if one was named."""
    path = place if "://" in place and not place.startswith("file:") else local_path(place)
    if path.endswith(".safetensors") and ("://" in path or not os.path.isdir(path)):
        folder, _, name = path.rpartition("/")
        return folder or "/", name
    return path, ""


def _open_indexed(tier: Tier, there: set[str]) -> Foreign:
    where = f"{tier.url}/{INDEX}"
    file_of = _file_of(tier.read(INDEX), where)
    absent = sorted(set(file_of.values()) - there)
    if absent:
        raise CorruptError(
            f"{where} names {len(absent)} files that aren't there, such as {absent[0]!r}",
            safe="nothing was written",
            hint="get the missing files",
        )
    files: dict[str, TensorFile] = {file: read_header(tier, file) for file in dict.fromkeys(file_of.values())}
    for name, file in file_of.items():
        if name not in files[file].tensors:
            raise CorruptError(f"{where} says that {name} is in {file}, but it isn't", safe="nothing was written")
    extra = [(name, file) for file, found in files.items() for name in found.tensors if file_of.get(name) != file]
    if extra:
        raise UsageError(
            f"{where} doesn't say anything of {len(extra)} tensors that are in its files, such as {extra[0][0]} in "
            f"{extra[0][1]}",
            safe="nothing was written",
            hint="files of two models may lie in this folder; move one away",
        )
    tensors = {name: files[file].tensors[name] for name, file in file_of.items()}
    ties = {alias: kept for found in files.values() for alias, kept in found.ties.items() if alias not in tensors}
    return _foreign(tensors, ties, there - set(files))


def _file_of(text: bytes, where: str) -> dict[str, str]:
    """Which file each tensor is in, as the index says."""
    try:
        weight_map = json.loads(text, object_pairs_hook=unique)["weight_map"]
        return {name: str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{where} is damaged: it can't be read ({error})", safe="nothing was written", hint="get the file anew"
        ) from None
