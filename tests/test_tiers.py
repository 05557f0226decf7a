"""Every tier against the one contract, and how urls become tiers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_s3 import S3Server, s3_server
from tier_conformance import TierConformance

from ckptrt.errors import UsageError
from ckptrt.storage.tiers import open_tier
from ckptrt.storage.tiers.base import Tier
from ckptrt.storage.tiers.faulty import FaultyTier
from ckptrt.storage.tiers.local import LocalTier
from ckptrt.storage.tiers.memory import MemoryTier
from ckptrt.storage.tiers.names import check_name
from ckptrt.storage.tiers.object import ObjectTier
from ckptrt.storage.tiers.retry import RetryTier

__all__ = ["s3_server"]

_runs = itertools.count()


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier("memory://run")


class TestMemoryTierBelowARoot(TierConformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        name = f"shared{next(_runs)}"
        outer = open_tier(f"memory://{name}")
        outer.create("run.json", b"not of this run")
        outer.create("run/x/keep", b"not of this run")
        outer.create("runs", b"not of this run")
        yield open_tier(f"memory://{name}/run/1/")
        assert [entry.name for entry in outer.list("")] == ["run.json", "run/", "runs"]
        assert outer.read("run/x/keep") == b"not of this run"


class TestLocalTier(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = LocalTier(str(tmp_path / "new" / "run"))
        yield tier
        assert not list(tmp_path.rglob(".tmp-*")), "temporary files were left behind"
        tier.close()


class TestWrappedTier(TierConformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = RetryTier(FaultyTier(MemoryTier("memory://run")))
        yield tier
        tier.close()


@pytest.fixture(scope="module")
def s3_tier(s3_server: S3Server) -> Iterator[Tier]:
    """One client for all tests, since making one takes longer than most of them."""
    tier = open_tier(f"{s3_server.url}/conformance/", **s3_server.options)
    yield tier
    tier.close()


@pytest.mark.processes
class TestObjectTier(TierConformance):
    """On a real server, with the retries that open_tier puts around it."""

    racers = 6  # this server makes each loser of a race wait for about half a second

    @pytest.fixture
    def tier(self, s3_tier: Tier) -> Iterator[Tier]:
        yield s3_tier
        for entry in s3_tier.list(""):
            (s3_tier.delete_prefix if entry.is_folder else s3_tier.delete)(entry.name)
        assert s3_tier.list("") == []


# --- names


@given(st.text(st.sampled_from("ab./\\~\0 é") | st.characters(), max_size=12))
def test_a_name_is_taken_only_if_it_stays_below_the_root(name: str) -> None:
    parts = name.split("/")
    printable = all(ord(char) >= 32 and ord(char) != 127 and not "\ud800" <= char <= "\udfff" for char in name)
    good = printable and all(part not in ("", ".", "..") and not part.startswith(".tmp-") for part in parts)
    try:
        assert check_name("memory://x", name) == name
        assert good
    except UsageError:
        assert not good


# --- urls


@pytest.mark.parametrize("close", ["", "/", "//"])
def test_a_bare_path_is_a_local_directory(tmp_path: Path, close: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"{tmp_path}/run{close}", f"file://{tmp_path}/run{close}", f"run{close}", f"./x/../run{close}"):
        tier = open_tier(url)
        assert isinstance(tier, LocalTier)
        assert tier.url == f"file://{tmp_path}/run"
    assert not (tmp_path / "run").exists(), "opening must touch nothing"


def test_a_file_url_reaches_the_path_it_was_made_from(tmp_path: Path) -> None:
    first = open_tier(str(tmp_path / "with 50% space"))
    first.create("x", b"1")
    assert open_tier(first.url).read("x") == b"1"
    assert (tmp_path / "with 50% space" / "x").exists()


@pytest.mark.parametrize("url", ["", "file://host/path", "file:", "a\0b", "s3://", "nosuchprotocol://x/y"])
def test_a_senseless_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_tier(url)


def test_a_local_directory_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="endpoint_url"):
        open_tier(str(tmp_path), endpoint_url="http://127.0.0.1:1")


def test_memory_urls_name_one_bucket_in_this_process() -> None:
    open_tier("memory://urls/run/1").create("x", b"1")
    assert open_tier("memory://urls/run/1/").read("x") == b"1"
    assert open_tier("memory://urls").read("run/1/x") == b"1"
    assert open_tier("memory://urls2").list("") == []
    assert open_tier("memory://urls/run/1/").url == "memory://urls/run/1"


def test_s3_urls_are_retried_and_normalised() -> None:
    tier = open_tier("s3://bucket/run//", endpoint_url="http://127.0.0.1:9")
    assert isinstance(tier, RetryTier) and isinstance(tier.tier, ObjectTier)
    assert tier.url == "s3://bucket/run"
    assert open_tier("s3://bucket/").url == "s3://bucket"


def test_other_places_are_read_but_not_written() -> None:
    import fsspec

    from ckptrt.storage.tiers.readonly import ReadOnlyTier

    there = fsspec.filesystem("memory")
    there.pipe({"/gcs/run/commits/a": b"0123", "/gcs/run/commits/b": b"", "/gcs/run/data/s1/r0": b"x"})
    tier = ReadOnlyTier("memory://gcs/run/")
    assert [entry.name for entry in tier.list("")] == ["commits/", "data/"]
    assert [(entry.name, entry.size_bytes) for entry in tier.list("commits/")] == [("commits/a", 4), ("commits/b", 0)]
    assert tier.list("none/") == []
    assert tier.read("commits/a") == b"0123" and tier.read("commits/a", 1, 2) == b"12" and tier.read("commits/b") == b""
    assert tier.read_many(["commits/a", "commits/c"]) == {"commits/a": b"0123"}
    for call in (
        lambda: tier.create("x", b""),
        lambda: tier.write("x", [], 0),
        lambda: tier.delete("commits/a"),
        lambda: tier.delete_prefix("commits/"),
    ):
        with pytest.raises(UsageError, match=r"memory://gcs/run can't be"):
            call()
    assert tier.size("commits/a") == 4
    with pytest.raises(UsageError, match="gs://"):
        ObjectTier("gs://bucket/run")


def test_opening_tiers_loads_no_client_library_and_no_torch() -> None:
    code = (
        "import sys; from ckptrt.storage.tiers import open_tier; open_tier('/tmp/x'); open_tier('memory://x'); "
        "open_tier('s3://b/x'); "
        "print([name for name in ('torch', 's3fs', 'fsspec', 'botocore', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
