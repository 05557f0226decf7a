"""Shard files: whatever is laid out opens with the ecosystem's own reader and holds the bytes that it should."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support_state import bits, snapshot

from ckptrt.errors import UsageError
from ckptrt.storage.shardfile import (
    CHUNK_BYTES,
    PAGE_BYTES,
    TensorSpec,
    chunk_digests,
    item_bytes,
    lay_out,
    tensor_bytes,
    tensor_name,
)  # fmt: skip

DTYPES = [
    "complex128", "float64", "int64", "uint64", "complex64", "float32", "int32", "uint32", "complex32", "float16",
    "bfloat16", "int16", "uint16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
AS_BYTES = {"complex128", "complex64", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}


def spec(key: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(key=key, dtype=dtype, shape=shape, offsets=(0,) * len(shape), sizes=shape)


SPECS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    max_size=12,
).map(lambda parts: [spec(f"t.{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(parts)])


@given(SPECS, st.lists(st.integers(0, 50), max_size=3))
@settings(max_examples=60, deadline=None)
def test_every_layout_is_a_safetensors_file(tmp_path_factory, specs, object_sizes):
    objects = [(f"o{i}", size) for i, size in enumerate(object_sizes)]
    layout = lay_out(3, specs, objects)
    image = bytearray(random.Random(0).randbytes(layout.size_bytes))
    image[: len(layout.header)] = layout.header
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    path.write_bytes(image)
    assert len(layout.header) % PAGE_BYTES == 0
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {s.key for s in specs} | {f"object/{name}" for name, _ in objects}
        assert file.metadata() == {"ckptrt": "1.0", "rank": "3"}
        for record in layout.tensors:
            assert record.start % item_bytes(record.dtype) == 0
            found = file.get_tensor(record.key)
            raw = bytes(image[record.start : record.start + tensor_bytes(record)])
            assert bits(found) == raw or record.dtype == "bool"
            if record.dtype not in AS_BYTES:
                assert (str(found.dtype), tuple(found.shape)) == (f"torch.{record.dtype}", record.sizes)
            else:
                assert (found.dtype, found.numel()) == (torch.uint8, len(raw))
        for data in layout.objects:
            raw = bytes(image[data.start : data.start + data.size_bytes])
            assert bits(file.get_tensor(f"object/{data.key}")) == raw
    ends = sorted((r.start, r.start + tensor_bytes(r)) for r in layout.tensors)
    ends += [(r.start, r.start + r.size_bytes) for r in layout.objects]
    assert all(a[1] == b[0] for a, b in pairwise(ends)), "no holes and no overlaps"
    assert [layout.tensors[i].key for i in range(len(specs))] == [specs[i].key for i in layout.order]


def test_the_table_of_dtypes_has_torchs_own_sizes():
    for name in DTYPES:
        assert item_bytes(name) == getattr(torch, name).itemsize
    with pytest.raises(UsageError, match="dtype float4_e2m1fn_x2 can't be stored"):
        item_bytes("float4_e2m1fn_x2")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_state_of_every_dtype_equals_what_the_reader_finds(tmp_path):
    state = {name: torch.arange(48, dtype=torch.uint8).view(getattr(torch, name)) for name in DTYPES if name != "bool"}
    state |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(3.5), "none": torch.zeros(0, 3)}
    state |= {"t": torch.arange(6.0).view(2, 3).t(), "conj": torch.tensor([1 + 2j]).conj()}
    with snapshot({"buffers": state}) as taken:
        path = tmp_path / "r00000.safetensors"
        path.write_bytes(taken.image())
        meta = taken.meta()
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {f"buffers.{name}" for name in state} | {"object/buffers"}
        for name, tensor in state.items():
            assert bits(file.get_tensor(f"buffers.{name}")) == bits(tensor), name
    true = {record.key.removeprefix("buffers."): (record.dtype, record.sizes) for record in meta.tensors}
    assert true == {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()}


def test_a_part_of_a_tensor_is_named_by_its_region():
    assert tensor_name("w", (4, 3), (0, 0), (4, 3)) == "w"
    assert tensor_name("w", (4, 3), (2, 0), (2, 3)) == "w@2:4,0:3"
    assert tensor_name("s", (), (), ()) == "s"
    parts = [
        TensorSpec(key="w", dtype="int8", shape=(4,), offsets=(at,), sizes=(1,), rank_only=at == 3) for at in (0, 3)
    ]
    layout = lay_out(0, parts, [])
    assert [(r.offsets, r.rank_only) for r in layout.tensors] == [((0,), False), ((3,), True)]
    assert b'"w@0:1"' in layout.header
    assert b'"w@3:4"' in layout.header


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(UsageError, match="'w@0:1'"):
        lay_out(0, [spec("w@0:1", "int8", (1,)), TensorSpec(
            key="w", dtype="int8", shape=(2,), offsets=(0,), sizes=(1,)
        )], [])  # fmt: skip
    with pytest.raises(UsageError, match="'object/a'"):
        lay_out(0, [spec("object/a", "int8", (1,))], [("a", 1)])


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_digests_are_those_of_each_chunk(size_bytes):
    data = random.Random(size_bytes).randbytes(size_bytes)
    naive = [xxhash.xxh3_64(data[at : at + CHUNK_BYTES]).hexdigest() for at in range(0, size_bytes, CHUNK_BYTES)]
    assert chunk_digests(memoryview(data)) == "".join(naive)
    assert len(naive) == -(-size_bytes // CHUNK_BYTES)


def test_a_header_of_many_tensors_still_ends_at_a_page(tmp_path: Path):
    specs = [spec(f"layer.{i}.weight", "float32", (1,)) for i in range(3000)]
    layout = lay_out(0, specs, [])
    assert len(layout.header) % PAGE_BYTES == 0
    assert layout.size_bytes == len(layout.header) + sum(prod(s.sizes) * 4 for s in specs)
    (tmp_path / "x").write_bytes(layout.header + bytes(layout.size_bytes - len(layout.header)))
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert len(file.keys()) == 3000
