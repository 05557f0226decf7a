"""The examples in FORMAT.md are real: they verify, belong together, and the reader's rule gives what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ckptrt.storage
from ckptrt.storage.layout import CommitId
from ckptrt.storage.lineage import valid_commits
from ckptrt.storage.records import (
    CommitRecord,
    FenceRecord,
    ManifestHead,
    Parent,
    PinRecord,
    ReceiptRecord,
    RunRecord,
    seal,
    unseal,
)
from ckptrt.storage.shardfile import TensorSpec, lay_out

TEXT = (Path(ckptrt.storage.__file__).parent / "FORMAT.md").read_text()
EXAMPLES = {
    match[2]: match[1].encode() + b"\n"
    for match in re.finditer(r'^(\{"ckptrt":"1\.0","kind":"([a-z]+)".*)$', TEXT, re.MULTILINE)
}


def test_every_kind_of_record_has_an_example_that_verifies_and_they_belong_together():
    unseal(RunRecord, EXAMPLES["run"], "example")
    fence = unseal(FenceRecord, EXAMPLES["fence"], "example")
    commit = unseal(CommitRecord, EXAMPLES["commit"], "example")
    receipt = unseal(ReceiptRecord, EXAMPLES["receipt"], "example")
    head = unseal(ManifestHead, EXAMPLES["manifest"], "example")
    assert fence.incarnation == commit.incarnation == receipt.incarnation == head.incarnation == 4
    assert head.sections[1].shard == receipt.shard.name
    assert head.sections[1].shard_bytes == receipt.shard.size_bytes
    assert commit.size_bytes == commit.new_bytes == sum(section.shard_bytes for section in head.sections)
    assert commit.manifest.head_bytes + sum(s.size_bytes for s in head.sections) == commit.manifest.size_bytes


@pytest.mark.parametrize("kind", [RunRecord, FenceRecord, CommitRecord, PinRecord, ReceiptRecord, ManifestHead])
def test_the_examples_are_what_a_writer_writes_now(kind: Any) -> None:
    name = "manifest" if kind is ManifestHead else kind.__name__.removesuffix("Record").lower()
    assert seal(unseal(kind, EXAMPLES[name], "example")) == EXAMPLES[name]


def test_the_shard_header_is_the_one_of_the_receipt():
    receipt = unseal(ReceiptRecord, EXAMPLES["receipt"], "example")
    specs = [
        TensorSpec(key=t.key, dtype=t.dtype, shape=t.shape, offsets=t.offsets, sizes=t.sizes, rank_only=t.rank_only)
        for t in receipt.tensors
    ]
    layout = lay_out(receipt.rank, specs, [(o.key, o.size_bytes) for o in receipt.objects])
    (header,) = re.findall(r'^(\{"__metadata__".*)$', TEXT, re.MULTILINE)
    assert json.loads(layout.header[8:]) == json.loads(header)
    assert (layout.tensors, layout.objects) == (receipt.tensors, receipt.objects)
    assert layout.size_bytes == receipt.shard.size_bytes


def test_the_readers_rule_gives_what_its_example_says():
    lines = dict(re.findall(r"^(fences|commits|on path|off path) +(.*)$", TEXT, re.MULTILINE))

    def ids(text: str) -> list[CommitId]:
        return [CommitId(int(step), int(i)) for step, i in re.findall(r"(\d+)\.i(\d+)", text)]

    fences: dict[int, Parent | None] = {3: None}
    for child, step, parent in re.findall(r"i(\d): parent step (\d+) of i(\d)", lines["fences"]):
        fences[int(child)] = Parent(step=int(step), incarnation=int(parent))
    assert sorted(fences) == [3, 4, 5]
    assert valid_commits(fences, ids(lines["commits"])) == ids(lines["on path"])
    assert set(ids(lines["commits"])) == {*ids(lines["on path"]), *ids(lines["off path"])}
