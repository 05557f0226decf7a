"""torch.save files. The modules here and in dcp.py are the only ones of storage that load torch, when called.

Nothing but tensors and plain values is ever unpickled.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from types import ModuleType
from typing import IO, Any

import xxhash

from ckptrt.errors import CorruptError, Error, MismatchError, NotFoundError, UsageError
from ckptrt.storage.interop.blobs import Digested, Image, Named
from ckptrt.storage.interop.foreign import Check, Foreign
from ckptrt.storage.interop.inventory import Component
from ckptrt.storage.interop.optimizer import ForeignOptimizer, read_optimizer
from ckptrt.storage.interop.unpickle import UnpicklingError
from ckptrt.storage.shardfile import item_bytes
from ckptrt.storage.tiers.local import LocalTier, local_path
from ckptrt.storage.tiers.oserrors import from_oserror
from ckptrt.storage.units import size_text

__all__ = [
    "TorchTensor", "check_zip", "data_range", "encode_plain", "full_disk_told", "load_plain", "open_torch",
    "open_torch_optimizer", "save_torch", "state_of", "to_torch", "torch_module", "walk",
]  # fmt: skip

SCRATCH = "scratch"
_UNCHECKED = "{} was saved without checksums, so a changed byte of a tensor's data can't be told"
_READ_BYTES = 1 << 20
_REPEATED_MAX_BYTES = 1 << 30


def torch_module() -> ModuleType:
    """torch, loaded now."""
    import torch

    return torch


# --- writing


def to_torch(named: Iterable[Named], tier: LocalTier, progress: Callable[[int], None]) -> dict[str, tuple[Any, str]]:
    """Tensors and digests by name. Their data lie in a scratch file that is mapped, so memory stays what it was."""
    torch = torch_module()
    order = sorted(named, key=lambda tensor: -item_bytes(tensor.dtype))
    blobs = [Digested(tensor.data) for tensor in order]
    image = Image(blobs, progress)
    tier.write(SCRATCH, image, image.size_bytes)
    data: Any = b""
    if image.size_bytes:
        with open(f"{tier.root}/{SCRATCH}", "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found: dict[str, tuple[Any, str]] = {}
    start = 0
    for tensor, blob in zip(order, blobs, strict=True):
        dtype = getattr(torch, tensor.dtype)
        if tensor.size_bytes:
            count = prod(tensor.shape)
            value = torch.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(tensor.shape)
        else:
            value = torch.empty(tensor.shape, dtype=dtype)
        found[tensor.name] = value, blob.xxh3
        start += tensor.size_bytes
    return found


def state_of(component: Component, tensors: Mapping[str, Any]) -> Any:
    """What torch's users expect under a component's name.

    tensors: by the component's own names. A module's state_dict; an optimizer's state by names of parameters, as
    torch.distributed.checkpoint.state_dict has it; of anything else what its own state_dict gave.
    """
    from ckptrt.adapters.objects import decode

    data = component.data
    if component.is_module:
        state = dict(tensors)
        state.update({name: tensors[kept] for name, kept in component.ties.items()})
        state.update({name: decode(value) for name, value in (data or {}).get("extra", {}).items()})
        return state
    if component.is_optimizer:
        return _optimizer_state(data, tensors, decode)
    prefix = component.name + "."
    return decode(data, lambda key: tensors[key.removeprefix(prefix)])


def _optimizer_state(data: Any, tensors: Mapping[str, Any], decode: Callable[[Any], Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, entries in data["state"].items():
        state[name] = {
            entry: tensors[f"state.{name}.{entry}"] if value == {"$here": "tensor"} else decode(value)
            for entry, value in entries.items()
        }
    state.update({key: decode(value) for key, value in data["other"].items()})
    groups = [
        {"params": list(group["names"]), **{key: decode(value) for key, value in group["options"].items()}}
        for group in data["groups"]
    ]
    return {"state": state, "param_groups": groups}


def save_torch(state: Any, path: str) -> tuple[int, str]:
    """One torch.save file, with its size and xxh3-128."""
    torch = torch_module()
    with full_disk_told(path), open(path, "xb") as file:
        digested = _DigestedFile(file)
        torch.save(state, digested)
        return file.tell(), digested.xxh3


class _DigestedFile:
    """A file for torch to write to, from its first byte to its last."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.flush = file.flush

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    @property
    def xxh3(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def full_disk_told(path: str) -> Iterator[None]:
    """Raise what the operating system said when torch couldn't write: torch's own errors hide it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        found = _system_error(error)
        if found is None:
            raise
        raise from_oserror(found, f"file://{os.path.dirname(path)}", os.path.basename(path), "write") from error


def _system_error(error: BaseException | None) -> OSError | None:
    """The OSError that an error arose from. A CheckpointException has the errors of ranks, a context for each."""
    while error is not None and not isinstance(error, OSError):
        failures = getattr(error, "failures", None)
        of_ranks = next(iter(failures.values()))[0] if failures else None
        error = of_ranks or error.__cause__ or error.__context__
    return error


def walk(tree: Any) -> Iterator[Any]:
    """Every tensor of a tree, as often as it stands in it."""
    if _is_tensor(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from walk(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from walk(value)


# --- reading


class TorchTensor:
    """A tensor's elements as a blob; one that isn't contiguous is copied while it is read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._flat: Any = None
        self.size_bytes = tensor.numel() * tensor.element_size()

    def read_into(self, start: int, out: memoryview) -> None:
        if not len(out):
            return
        if self._flat is None:
            self._flat = self._tensor.detach().resolve_conj().resolve_neg().contiguous()
        ctypes.memmove(
            (ctypes.c_char * len(out)).from_buffer(out), ctypes.c_void_p(self._flat.data_ptr() + start), len(out)
        )
        if start + len(out) == self.size_bytes:
            self._flat = None


def open_torch(place: str, key: str, component: str) -> Foreign:
    """The tensors of a torch.save file: all of it, or the part that `key` (`a.b` is a path) or the component names.

    Raises UsageError, by name, for anything that only foreign code could unpickle, and CorruptError for a damaged file.
    """
    path = local_path(place)
    tree = load_plain(path, place)
    part, top = _choose(tree, key, component, place)
    left_out = [str(name) for name in tree if name != top] if top else []
    return _collect(part, left_out, lambda progress: _check_file(path, place, progress), _size(path))


def open_torch_optimizer(place: str, key: str) -> ForeignOptimizer:
    """An optimizer's state in such a file, under `key`; the file is checked by whoever opens the model in it."""
    tree = load_plain(local_path(place), place)
    return read_optimizer(_name_tensors(_choose(tree, key, "", place)[0], key), place, key, encode_plain)


def encode_plain(value: Any, path: str) -> Any:
    """A plain value as ckptrt stores it. UsageError, by path, for what it can't store."""
    from ckptrt.adapters.objects import encode

    return encode(value, path)


def load_plain(file: str | IO[bytes], place: str) -> Any:
    """What torch.save wrote, if it is tensors and plain values. Data of a path's tensors are mapped, not read."""
    torch = torch_module()
    try:
        is_zip = _look_at(file, place)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip and isinstance(file, str))
    except UnpicklingError as error:
        raise _foreign(place, error) from None
    except Error:
        raise
    except Exception as error:  # noqa: BLE001  what torch makes of a damaged file has no limits
        raise _broken(place, error) from None


def _look_at(file: str | IO[bytes], place: str) -> bool:
    """Whether it is a zip, as torch has written them since 1.6, which must be whole and hold what it seems to hold."""
    if isinstance(file, str):
        if not os.path.isfile(file):
            kind = UsageError if os.path.exists(file) else NotFoundError
            raise kind(f"there is no file {place}", safe="nothing was written")
        with open(file, "rb") as stream:
            return _look_at(stream, place)
    if zipfile.is_zipfile(file):
        with _archive(file, place):
            file.seek(0)
            return True
    file.seek(0)
    if file.read(2) == b"PK":
        raise CorruptError(f"{place} is damaged: it is cut off", safe="nothing was written", hint="get the file anew")
    file.seek(0)
    return False


def _foreign(place: str, error: Exception) -> UsageError | CorruptError:
    """Code that a pickle asks for is named; what is no pickle at all is damage."""
    text = str(error)
    for mark in ("GLOBAL ", "Unsupported class "):
        if mark in text:
            name = text.split(mark, 1)[1].split()[0].strip(".`'\"")
            return UsageError(
                f"{place} holds a pickled {name}; only tensors and plain values are read",
                safe="nothing of it was run, and nothing was written",
                hint="load it where you trust it, and torch.save its state_dict() alone",
            )
    return _broken(place, ValueError("it can't be unpickled"))  # torch's own text advises to run whatever is in it


def _broken(place: str, error: Exception) -> CorruptError:
    text = next(iter(str(error).splitlines()), type(error).__name__)
    return CorruptError(
        f"{place} is damaged, or no torch.save file: {text[:200]}",
        safe="nothing was written",
        hint="get the file anew",
    )


def _choose(tree: Any, key: str, component: str, place: str) -> tuple[Any, str]:
    """A part of a file, and the name at the top under which it is (empty: it is all of it)."""
    if not isinstance(tree, Mapping) or not tree:
        what = "nothing" if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
        raise UsageError(f"{place} holds {what}, not a dict of tensors", safe="nothing was written")
    part: Any = tree
    for word in filter(None, key.split(".")):
        if not isinstance(part, Mapping) or word not in part:
            there = ", ".join(map(str, part)) if isinstance(part, Mapping) else f"a {type(part).__name__}"
            raise UsageError(f"{place} has nothing under {key!r}", safe="nothing was written", hint=f"there is {there}")
        part = part[word]
    if key or any(_is_tensor(value) for value in tree.values()):
        return part, key.partition(".")[0]
    if isinstance(tree.get(component), Mapping):
        return tree[component], component
    raise UsageError(
        f"{place} holds {', '.join(map(str, tree))}: which of them is the {component}?",
        safe="nothing was written",
        hint="name it with --key",
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch_module().Tensor)


def _collect(tree: Any, left_out: list[str], check: Check, check_bytes: int) -> Foreign:
    """Tensors, ties and extra state of a tree of dicts; names are joined by dots."""
    tensors: dict[str, Named] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first_of: dict[tuple[Any, ...], str] = {}
    taken: set[str] = set()
    for name, value in _flat(tree, ""):
        if name in taken:
            raise MismatchError(
                f"two values would both be called {name}: the keys of dicts within dicts are joined by dots",
                safe="nothing was written",
                hint="import one part with --key, or save the file anew with other keys",
            )
        taken.add(name)
        if not _is_tensor(value):
            if name.rpartition(".")[2] == "_extra_state":
                extra[name] = encode_plain(value, name)
            else:
                left_out.append(name)
            continue
        identity = _identity(name, value)
        if identity in first_of:
            ties[name] = first_of[identity]
            continue
        if value.numel():
            first_of[identity] = name
        tensors[name] = _named(name, value)
    return Foreign(
        tensors=tensors,
        ties=ties,
        extra=extra,
        left_out=tuple(left_out),
        check=check,
        check_bytes=check_bytes,
    )


def _named(name: str, tensor: Any) -> Named:
    dtype = str(tensor.dtype).removeprefix("torch.")
    item_bytes(dtype)
    return Named(name=name, dtype=dtype, shape=tuple(tensor.shape), data=TorchTensor(tensor))


def _name_tensors(tree: Any, name: str) -> Any:
    """The same tree with its tensors as `Named`."""
    if _is_tensor(tree):
        _identity(name, tree)
        return _named(name, tree)
    if isinstance(tree, Mapping):
        return {key: _name_tensors(value, f"{name}.{key}") for key, value in tree.items()}
    if type(tree) is list:
        return [_name_tensors(value, f"{name}.{number}") for number, value in enumerate(tree)]
    return tree


def _flat(tree: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _identity(name: str, tensor: Any) -> tuple[Any, ...]:
    """What two names of one tensor have in common. UsageError for what isn't a plain dense tensor."""
    torch = torch_module()
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UsageError(
            f"{name} is a {type(tensor).__qualname__} ({tensor.dtype}, {tensor.layout}), which can't be taken over",
            safe="nothing was written",
            hint="save it as a plain dense tensor",
        )
    storage = tensor.untyped_storage()
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes > max(storage.nbytes(), _REPEATED_MAX_BYTES):
        raise UsageError(
            f"{name} would have {size_text(size_bytes)}, which are {size_text(storage.nbytes())} over and over",
            safe="nothing was written",
            hint="save the tensor that was expanded instead",
        )
    return (storage.data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())


def _check_file(path: str, place: str, progress: Callable[[int], None]) -> str:
    if not zipfile.is_zipfile(path):  # as torch before 1.6 wrote them
        return _UNCHECKED.format(place)
    with open(path, "rb") as file:
        return "" if check_zip(file, place, progress) else _UNCHECKED.format(place)


@contextmanager
def _archive(file: IO[bytes], where: str) -> Iterator[zipfile.ZipFile]:
    """A torch.save file as a zip; CorruptError for whatever is wrong with it."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise UsageError(
                    f"{where} is compressed, which torch never does and which may hide any size",
                    safe="nothing was written",
                    hint="load it where you trust it, and torch.save it anew",
                )
            yield archive
    except Error:
        raise
    except Exception as error:  # noqa: BLE001  zipfile raises a dozen kinds for damaged headers
        raise _broken(where, error) from None


def check_zip(file: IO[bytes], where: str, progress: Callable[[int], None]) -> bool:
    """Compare every record of a torch.save file with its CRC-32. False if the file has none."""
    with _archive(file, where) as archive:
        records = archive.infolist()
        if not any(record.CRC for record in records):
            return False  # torch.serialization.set_crc32_options(False)
        for record in records:
            with archive.open(record) as stream:
                while piece := stream.read(_READ_BYTES):
                    progress(len(piece))
    return True


def data_range(file: IO[bytes], where: str, dtype: str, sizes: tuple[int, ...]) -> int:
    """Where in a torch.save file of one tensor its elements begin; 0 if they don't lie in row-major order.

    CorruptError if the tensor isn't of that dtype and shape.
    """
    torch = torch_module()
    with torch.serialization.skip_data():
        tensor = load_plain(file, where)
    if not _is_tensor(tensor) or str(tensor.dtype) != f"torch.{dtype}" or tuple(tensor.shape) != sizes:
        raise CorruptError(f"{where} isn't the {dtype} {sizes} that the index tells of", safe="nothing was written")
    with _archive(file, where) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        order = archive.read(records["byteorder"].filename) if "byteorder" in records else b"little"
        data = records.get("data/0")
        if data is None or order != b"little" or not tensor.is_contiguous() or tensor.storage_offset():
            return 0
        if data.file_size < tensor.numel() * tensor.element_size():
            return 0
        file.seek(data.header_offset)
        head = file.read(30)
        return data.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


def _size(path: str) -> int:
    with open(path, "rb") as file:
        return file.seek(0, 2)
