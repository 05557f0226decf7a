"""Plain data as JSON and back: value and type alike, or refused by path."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptrt.adapters.objects import decode, encode
from ckptrt.errors import CorruptError, UsageError

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**80, -(2**80), 1.5, -0.0, 1e-320, math.inf, -math.inf, "", "ä\0\u2028", "\ud800",
    b"", b"\x00\xff", bytearray(b"ab"), 1 + 2j, complex(-0.0, math.inf), [], [[]], (), ((),), (1, [2, (3,)]),
    {}, {"a": {}}, {"$tuple": [1]}, {"$ref": "x"}, {"$": 1}, {1: "a", "1": "b"}, {(1, 2): 3, None: 4, 1.5: 5, b"k": 6},
    {True: 1}, set(), {1, 2}, {"a", 1, None}, frozenset({(1,), (2,)}), collections.deque([1, 2], maxlen=3),
    collections.deque(), collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter({4: 1, 2: 3}),
    collections.Counter(), torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1),
    torch.Size([2, 3]), torch.Size([]),
]  # fmt: skip

# What every scheduler, scaler and loader of torch's own may hold must be storable: see test_adapters.py too.
ARRAYS = [
    numpy.float64(1.5), numpy.float32("nan"), numpy.int64(-3), numpy.bool_(True), numpy.uint8(7), numpy.complex64(1j),
    numpy.array(3.0), numpy.array([]), numpy.zeros((0, 3), numpy.int16), numpy.arange(6).reshape(2, 3)[:, ::2],
    numpy.arange(4, dtype=">i4"), numpy.array([True, False]), numpy.array([1 + 1j]),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
]  # fmt: skip

TENSORS = [
    torch.tensor(3.0), torch.tensor([]), torch.zeros(0, 3), torch.tensor([True, False]), torch.arange(6).view(2, 3).t(),
    torch.tensor([1 + 2j]).conj(), torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
    torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    torch.tensor([1], dtype=torch.uint16), torch.ones(1).expand(3),
]  # fmt: skip


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "top"), allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    """Equal in value and in every type, signs of zero and order of dicts included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple, collections.deque)):
        return getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and same(sorted(a, key=repr), sorted(b, key=repr))
    return bool(a == b)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:30])
def test_what_is_listed_comes_back_in_value_and_type(value):
    assert same(there_and_back(value), value)


def test_an_integer_too_long_for_decimal_digits_comes_back():
    assert there_and_back([10**5000, -(10**5000)]) == [10**5000, -(10**5000)]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{type(a).__name__}-{a.dtype.str}-{a.shape}")
def test_numpy_values_come_back(array):
    back = there_and_back({"x": [array]})["x"][0]
    assert type(back) is type(array)
    assert (back.dtype.str, back.shape, back.tobytes()) == (array.dtype.str, array.shape, array.tobytes())


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_tensors_without_a_taker_lie_in_the_tree(tensor):
    back = there_and_back((tensor,))[0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)


def bits(tensor: torch.Tensor) -> list[int]:
    plain = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().reshape(-1)
    return plain.view(torch.uint8).tolist() if plain.numel() else []


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
)
KEYS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.binary(max_size=3)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$tuple", "$ref", "$float", "$x", "a"]), inner, max_size=2)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.lists(inner, max_size=4).map(collections.deque)
    ),
    max_leaves=20,
)


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_any_tree_comes_back(tree):
    assert same(there_and_back(tree), tree)


@given(st.sets(KEYS, max_size=6))
@settings(deadline=None)
def test_equal_sets_have_equal_bytes(members):
    forward, backward = (set(order) for order in (list(members), list(members)[::-1]))
    assert json.dumps(encode(forward, "top")) == json.dumps(encode(backward, "top"))


def test_nan_stays_nan():
    assert math.isnan(there_and_back([math.nan])[0])


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 0


class Text(str):
    __slots__ = ()


class Subclass(torch.Tensor):
    pass


class Memory(numpy.ndarray):
    """Such as numpy.memmap: more than its numbers."""


Memory.__module__ = "numpy"
Pair = collections.namedtuple("Pair", "a b")

REFUSED = [
    (object(), "builtins.object"), (Color.RED, "Color"), (Point(), "Point"), (Text("a"), "Text"), (Pair(1, 2), "Pair"),
    (decimal.Decimal("1.5"), "Decimal"), (len, "builtin_function"), (range(3), "range"), (Ellipsis, "ellipsis"),
    (collections.defaultdict(int), "defaultdict"), (numpy.array(["a"]), "ndarray"),
    (numpy.array([object()]), "ndarray"), (numpy.datetime64("2020-01-01"), "datetime64"),
    (numpy.zeros(1).view(numpy.recarray), "recarray"), (numpy.ma.array([1]), "MaskedArray"),
    (torch.eye(2).to_sparse(), "sparse"),
    (torch.empty(2, device="meta"), "meta"), (torch.ones(2).as_subclass(Subclass), "Subclass"),
    (numpy.zeros(1).view(Memory), "Memory"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "word"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_stored_is_refused_by_path_and_type(value, word):
    with pytest.raises(UsageError) as caught:
        encode({"loop": [0, {"inner": value}]}, "progress")
    assert "progress.loop.1.inner" in caught.value.what
    assert word in caught.value.what


def test_a_value_that_holds_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="progress"):
        encode(loop, "progress")


def test_a_kind_that_a_newer_ckptrt_wrote_is_an_error():
    with pytest.raises(CorruptError, match=r"\$quaternion"):
        decode({"a": {"$quaternion": [1, 2, 3, 4]}})
