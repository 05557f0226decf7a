"""`ckptrt diff`: what differs, decided by digests where they tell and by reading where they don't."""

from __future__ import annotations

import json
import resource
from pathlib import Path

from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from make_golden import specs
from support_runs import overwrite
from support_scale import Scale, make_scaled_run
from support_tensors import Tensors, floats, write_run

from ckptrt.storage.catalog import Catalog
from ckptrt.storage.cli import cli
from ckptrt.storage.diff import Data, compare
from ckptrt.storage.diffdata import Result
from ckptrt.storage.layout import CommitId
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier

GOLDEN = str(Path(__file__).with_name("golden") / "1.0")


def result_of(catalog: Catalog, a: int, b: int, with_stat: bool = False) -> Result:
    one, other = (catalog.open_checkpoint(CommitId(step, 1)) for step in (a, b))
    result = Result(compare(one, other, keep_pairs=True))
    result.read(one.tier, other.tier, with_stat)
    return result


def run_cli(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["diff", *args])
    assert result.exit_code == exit_code, result.output
    return result.stdout


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reading_decides_as_a_plain_comparison_of_whole_tensors_does(data: st.DataObject) -> None:
    shapes = st.sampled_from([(4, 2), (5,), (3, 1, 2)])
    shares = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    contents = st.sampled_from([0, 0, 1, 2])

    def tensors() -> Tensors:
        found: Tensors = {}
        for key in data.draw(st.sets(st.sampled_from(["a", "b.c", "d"]))):
            shape = data.draw(shapes)
            count = 1
            for size in shape:
                count *= size
            found[key] = ("uint8", shape, bytes([data.draw(contents)]) * (count - 1) + bytes([data.draw(contents)]))
        return found

    one, other = tensors(), tensors()
    catalog = write_run(MemoryTier(), {1: (one, data.draw(shares)), 2: (other, data.draw(shares))})
    result = result_of(catalog, 1, 2)
    both = {key for key in one.keys() & other.keys() if one[key][:2] == other[key][:2]}
    assert set(result.found.removed) == one.keys() - other.keys()
    assert set(result.found.added) == other.keys() - one.keys()
    assert set(result.found.changed) == (one.keys() & other.keys()) - both
    verdicts = {key: Data.SAME if one[key] == other[key] else Data.DIFFERS for key in both}
    assert result.found.data == verdicts
    # And what the digests say by themselves is never wrong.
    early = compare(catalog.open_checkpoint(CommitId(1, 1)), catalog.open_checkpoint(CommitId(2, 1)))
    assert all(early.data[key] in (Data.UNKNOWN, verdict) for key, verdict in verdicts.items())


def test_digests_alone_decide_what_fills_its_chunks() -> None:
    big, rest = bytes(12 << 20), bytes(range(200)) * 50
    changed = big[:-1] + b"\1"
    tensors: Tensors = {"big": ("uint8", (12 << 20,), big), "rest": ("uint8", (10_000,), rest)}
    half = bytes(6 << 20) + b"\1" * (6 << 20)
    steps = {
        step: ({**tensors, "big": ("uint8", (12 << 20,), data)}, [1])
        for step, data in ((1, big), (2, half), (3, changed))
    }
    catalog = write_run(MemoryTier(), steps)
    opened = [catalog.open_checkpoint(CommitId(step, 1)) for step in (1, 2, 3)]
    assert compare(opened[0], opened[1]).data == {"big": Data.DIFFERS, "rest": Data.UNKNOWN}
    assert compare(opened[0], opened[2]).data == {"big": Data.UNKNOWN, "rest": Data.UNKNOWN}
    assert compare(opened[0], opened[0]).data == {"big": Data.SAME, "rest": Data.SAME}


def test_values_are_told() -> None:
    nan = float("nan")
    steps: dict[int, tuple[Tensors, list[int]]] = {
        1: ({"w": ("float32", (2, 2), floats(3, 4, 0, 0)), "same": ("int8", (1,), b"\1")}, [1]),
        2: ({"w": ("float32", (2, 2), floats(3, 4.5, nan, float("inf"))), "same": ("int8", (1,), b"\1")}, [1, 1]),
    }
    result = result_of(write_run(MemoryTier(), steps), 1, 2, with_stat=True)
    values = result.values["w"]
    assert (values.max_abs, values.squares_a) == (0.5, 25.0)
    assert (values.non_finite_b.num_nan, values.non_finite_b.num_inf, values.non_finite_b.first) == (1, 1, (1, 0))
    assert result.tensors[Data.SAME] == ["same"]
    assert result.found.relaid == {"w": (1, 2)}


def test_golden_steps_differ_in_all_but_what_is_frozen() -> None:
    found = json.loads(run_cli(f"{GOLDEN}@10", "40", "--data", "--json"))
    changed = {(each["key"], each["rank"]) for each in found["tensors"]}
    own = {(spec.key, rank if spec.rank_only else None) for rank in (0, 1) for spec in specs(rank)}
    assert changed == own - {("frozen.base", None), ("empty", None)}
    assert {each["data"] for each in found["tensors"]} == {"differs"}
    assert (found["differs"], found["objects"], found["num_unknown"]) == (True, [], 0)


def test_the_command_line(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    w, v = ("float32", (2,), floats(1, 2)), ("float32", (2,), floats(1, 3))
    texts = {1: b'{"lr":0.1,"at":[1,2]}', 2: b'{"lr":0.2,"at":[1,2]}', 3: b'{"lr":0.1,"at":[1,2]}'}
    catalog = write_run(LocalTier(url), {1: ({"w": w}, [1]), 2: ({"w": v, "x": w}, [1]), 3: ({"w": w}, [1])}, texts)
    assert "same       1 tensor: all that they hold" in run_cli(f"{url}@1", "3", "--exit-code")
    text = run_cli(f"{url}@1", "2", "--stat", "--exit-code", exit_code=5)
    assert "  only in b  1 tensor\n" in text and "lr 0.1 -> 0.2" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("data")]
    assert row == ["data", "w", "1", "2.236", "3.162"]
    assert run_cli(f"{url}@1", "9", exit_code=10) == ""
    (name,) = [e.name for e in catalog.tier.list("data/s000000002.i00000001.0a/") if e.name.endswith("safetensors")]
    data = bytearray(catalog.tier.read(name))
    data[4100] ^= 1
    overwrite(catalog.tier, name, bytes(data))
    run_cli(f"{url}@1", "2", "--data", exit_code=4)


def test_many_tensors_take_little_time_and_memory(tmp_path: Path) -> None:
    """A tenth of a million: the whole million, and the other verbs, are timed by hand."""
    make_scaled_run(tmp_path / "run", [Scale(entries=100_000, ranks=8)] * 2, changed=0.5)
    before = resource.getrusage(resource.RUSAGE_SELF)
    run_cli(f"{tmp_path}/run@1", "2", "--json")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 2.0
    assert after.ru_maxrss - before.ru_maxrss < 200 << 10
