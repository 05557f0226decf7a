"""What a disk may hold after a power cut, given the log of what was done to it.

The model is POSIX at its loosest: until a file's fsync its bytes may be there, be lost, be zeros, or be there in part;
until a folder's fsync each change of a name in it may be there or not, whatever the order in which they were made and
whatever the state of the bytes behind the name. What was synced is there. A failed fsync drops what it was to save:
a later one that succeeds says nothing about those bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, product
from typing import TypeAlias

import xxhash
from support_crash_log import DATA_OPS, ENTRY_OPS, ROOT, Op

__all__ = ["Choice", "Tree", "build", "choices", "crash_points", "digest", "materialise"]

Choice: TypeAlias = dict[int, str]  # number of an op in the log -> what became of it; all others are there
Tree: TypeAlias = dict[str, "bytes | None"]  # relative path -> contents; None for a folder

_SECTOR, _PAGE = 512, 4096
_DEPTH = 3  # most crash bugs need no more than three things to go wrong


def crash_points(log: Sequence[Op]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each length of the log: the ops in it that no sync has made durable."""
    loose: list[int] = []
    condemned: set[int] = set()
    yield 0, ()
    for number, op in enumerate(log):
        if op.kind == "fsync":
            loose = [i for i in loose if i in condemned or log[i].inode != op.inode or log[i].kind not in DATA_OPS]
        elif op.kind == "fsync_failed":
            condemned.update(i for i in loose if log[i].inode == op.inode and log[i].kind in DATA_OPS)
        elif op.kind == "fsync_dir":
            loose = [i for i in loose if log[i].kind not in ENTRY_OPS or log[i].folder != op.inode]
        elif op.kind != "note":
            loose.append(number)
        yield number + 1, tuple(loose)


def choices(log: Sequence[Op], loose: Sequence[int], rng: random.Random, limit: int) -> Iterator[Choice]:
    """At most `limit` things that may have become of the loose ops, the simplest first.

    First those with up to three ops lost or torn, and those with up to three kept; then random ones.
    """
    yield {}
    if not loose:
        return
    yield dict.fromkeys(loose, "lost")
    systematic = [*_few_lost(log, loose, 1), *_few_kept(loose, 1)]
    deeper = list(islice((c for n in range(2, _DEPTH + 1) for c in _both(log, loose, n)), 50 * limit))
    if len(systematic) + len(deeper) > limit:
        rng.shuffle(deeper)
    yield from islice((*systematic, *deeper), limit)
    if len(loose) > _DEPTH:
        for _ in range(min(limit - len(systematic) - len(deeper), 8 * len(loose))):
            yield {i: fate for i in loose if (fate := rng.choice(("", *_fates(log[i]))))}


def _both(log: Sequence[Op], loose: Sequence[int], count: int) -> Iterator[Choice]:
    yield from _few_lost(log, loose, count)
    yield from _few_kept(loose, count)


def _few_lost(log: Sequence[Op], loose: Sequence[int], count: int) -> Iterator[Choice]:
    for some in combinations(loose, count):
        for fates in product(*(_fates(log[i]) for i in some)):
            yield dict(zip(some, fates, strict=True))


def _few_kept(loose: Sequence[int], count: int) -> Iterator[Choice]:
    for kept in combinations(loose, count):
        yield {i: "lost" for i in loose if i not in kept}


def _fates(op: Op) -> list[str]:
    """What may become of an op that isn't durable, besides being there."""
    if op.kind != "write":
        return ["lost"]
    fates = ["lost", "zeros"]
    for name, unit in (("sector", _SECTOR), ("page", _PAGE)):
        if len(op.data) > unit:
            fates += [f"first {name}, short", f"first {name}, zeros", f"all but first {name}", f"all but last {name}"]
    return fates


def _torn(op: Op, fate: str) -> tuple[bytes, int]:
    """The bytes that are there at the op's offset, and the size that the file has there."""
    size = len(op.data)
    unit = _PAGE if fate.endswith("page") or "page," in fate else _SECTOR
    if fate == "zeros":
        return b"", size
    if fate.startswith("first"):
        return op.data[:unit], unit if fate.endswith("short") else size
    if fate.startswith("all but first"):
        return bytes(unit) + op.data[unit:], size
    if fate.startswith("all but last"):
        return op.data[: (size - 1) // unit * unit], size
    return op.data, size


def build(log: Sequence[Op], choice: Choice) -> Tree:
    """What is on the disk after these ops, of which some have met their fates."""
    folders: dict[int, dict[str, int]] = {ROOT: {}}
    files: dict[int, bytearray] = {}
    for number, op in enumerate(log):
        fate = choice.get(number, "")
        if op.kind == "mkdir":
            folders[op.inode] = {}
        elif op.kind == "create":
            files[op.inode] = bytearray()
        if fate == "lost":
            continue
        if op.kind in DATA_OPS:
            _change(files[op.inode], op, fate)
        elif op.kind in ("create", "link", "mkdir", "rename"):
            folders[op.folder][op.name] = op.inode
            folders[op.folder].pop(op.source, None)
        elif op.kind in ("unlink", "rmdir"):
            folders[op.folder].pop(op.name, None)
    tree: Tree = {}
    _collect(ROOT, "", folders, files, tree)
    return tree


def _change(content: bytearray, op: Op, fate: str) -> None:
    if op.kind == "truncate":
        content.clear()
        return
    data, size = _torn(op, fate) if op.kind == "write" else (b"", op.size_bytes)
    end = op.offset + size
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    content[op.offset : op.offset + len(data)] = data


def _collect(
    folder: int, path: str, folders: dict[int, dict[str, int]], files: dict[int, bytearray], tree: Tree
) -> None:
    for name, inode in folders[folder].items():
        if inode in folders:
            tree[path + name] = None
            _collect(inode, f"{path}{name}/", folders, files, tree)
        else:
            tree[path + name] = bytes(files[inode])


def digest(tree: Tree) -> str:
    """The same for equal trees, but for the random names of temporary files."""
    parts = xxhash.xxh3_128()
    named = (
        (path if "/.tmp-" not in path else path.rpartition("/")[0] + "/.tmp-", data) for path, data in tree.items()
    )
    for path, data in sorted(named, key=lambda item: (item[0], item[1] or b"")):
        parts.update(f"{path} {-1 if data is None else len(data)}\n".encode())
        parts.update(data or b"")
    return parts.hexdigest()


def materialise(tree: Tree, base: str) -> None:
    """Put a tree into an empty folder."""
    os.mkdir(base)
    for path, data in tree.items():  # a folder stands before what is in it
        if data is None:
            os.mkdir(f"{base}/{path}")
            continue
        fd = os.open(f"{base}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
