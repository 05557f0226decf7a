"""The S3 tier where the contract doesn't look: lost answers, busy and weak stores, uploads left behind, options."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from support_s3 import BUCKET, S3Server, free_port, s3_client, s3_server
from support_s3_faults import LossyProxy, ScriptedS3
from tier_conformance import MIB, body, outcomes, pieces_of

from ckptrt.errors import (
    AccessError,
    Error,
    ExistsError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptrt.storage.catalog import Catalog
from ckptrt.storage.tiers import object as object_module
from ckptrt.storage.tiers import open_tier
from ckptrt.storage.tiers.object import ObjectTier
from ckptrt.storage.tiers.retry import RetryTier
from ckptrt.storage.tiers.upload import part_size_bytes

__all__ = ["s3_server"]

pytestmark = pytest.mark.processes

BIG = body(8 * MIB + 1)


@pytest.fixture
def run(s3_server: S3Server, request: pytest.FixtureRequest) -> str:
    """An url of the test's own."""
    return f"{s3_server.url}/{request.node.name.replace('[', '.').replace(']', '')}"


@pytest.fixture
def tier(s3_server: S3Server, run: str) -> Iterator[ObjectTier]:
    tier = ObjectTier(run, **s3_server.options)
    yield tier
    tier.close()


@pytest.fixture(scope="module")
def scripted_pair() -> Iterator[tuple[ScriptedS3, ObjectTier]]:
    """One for all tests, since making a client takes longer than using it."""
    with ScriptedS3() as server:
        tier = ObjectTier("s3://b/run", **server.options)
        yield server, tier
        tier.close()


@pytest.fixture
def scripted(scripted_pair: tuple[ScriptedS3, ObjectTier]) -> ScriptedS3:
    server, _ = scripted_pair
    server.objects.clear()
    server.script.clear()
    server.requests.clear()
    return server


@pytest.fixture
def scripted_tier(scripted_pair: tuple[ScriptedS3, ObjectTier], scripted: ScriptedS3) -> ObjectTier:
    return scripted_pair[1]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[LossyProxy]:
    with LossyProxy(int(s3_server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def lossy_tier(s3_server: S3Server, proxy: LossyProxy, run: str) -> Iterator[ObjectTier]:
    """A tier whose answers the proxy may lose."""
    tier = ObjectTier(run, **{**s3_server.options, "endpoint_url": proxy.endpoint})
    yield tier
    tier.close()


def uploads(server: S3Server) -> list[str]:
    found = s3_client(server.endpoint).list_multipart_uploads(Bucket=BUCKET)
    return [upload["Key"] for upload in found.get("Uploads", [])]


# --- answers that are lost


def test_a_create_whose_answer_was_lost_is_known_to_have_won(lossy_tier: ObjectTier, proxy: LossyProxy) -> None:
    proxy.loses = lambda line: line.startswith("PUT")
    lossy_tier.create("commits/x", b"mine")
    assert len(proxy.lost) >= 1
    assert lossy_tier.read("commits/x") == b"mine"


@pytest.mark.parametrize("theirs", [b"mine", b"theirs"])
def test_a_lost_refusal_is_a_refusal_even_if_the_bytes_are_equal(
    tier: ObjectTier, lossy_tier: ObjectTier, proxy: LossyProxy, theirs: bytes
) -> None:
    tier.create("commits/x", theirs)
    proxy.loses = lambda line: line.startswith("PUT")
    with pytest.raises(ExistsError):
        lossy_tier.create("commits/x", b"mine")
    assert proxy.lost
    assert tier.read("commits/x") == theirs


def test_if_nothing_can_be_learnt_a_create_says_so_and_knows_itself_when_repeated(
    tier: ObjectTier, lossy_tier: ObjectTier, proxy: LossyProxy
) -> None:
    proxy.loses = lambda line: True
    with pytest.raises(TransientError, match="can't tell whether") as caught:
        lossy_tier.create("commits/x", b"mine")
    assert f"{tier.url}/commits/x" in caught.value.what
    assert tier.read("commits/x") == b"mine", "it did arrive"
    proxy.loses = lambda line: False
    with pytest.raises(ExistsError):
        tier.create("commits/x", b"mine")
    with pytest.raises(ExistsError):
        lossy_tier.create("commits/x", b"other")
    lossy_tier.create("commits/x", b"mine")
    with pytest.raises(ExistsError):
        lossy_tier.create("commits/x", b"mine")


def test_a_multipart_write_whose_last_answer_was_lost_is_known_to_have_won(
    s3_server: S3Server, lossy_tier: ObjectTier, proxy: LossyProxy
) -> None:
    proxy.loses = lambda line: line.startswith("POST") and "uploadId=" in line
    lossy_tier.write("data/x", pieces_of(BIG), len(BIG))
    assert len(proxy.lost) >= 1
    assert lossy_tier.read("data/x") == BIG
    assert uploads(s3_server) == []


def test_retries_ride_over_a_crash_of_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        inner = ObjectTier(f"{server.url}/run", **server.options)
        tier = RetryTier(inner, attempts=40, timeout_s=30, wait_initial_s=0.1, wait_max_s=0.3)
        tier.create("commits/1", b"before")
        server.kill()
        with pytest.raises(TransientError):
            inner.create("commits/2", b"while")
        restarting = threading.Thread(target=server.start)
        restarting.start()
        tier.create("commits/2", b"while")
        restarting.join()
        assert tier.read_many(["commits/1", "commits/2"]) == {"commits/1": b"before", "commits/2": b"while"}
        tier.close()


# --- stores that can't be reached


@pytest.mark.parametrize("through", [ObjectTier, lambda url, **o: RetryTier(ObjectTier(url, **o), 3, 2.0)])
def test_an_endpoint_that_is_down_is_transient_within_a_bounded_time(through: Callable[..., Any]) -> None:
    tier = through("s3://b/run", key="K", secret="S", endpoint_url=f"http://127.0.0.1:{free_port()}")
    started_s = time.monotonic()
    for call in (
        lambda: tier.create("x", b"1"),
        lambda: tier.read("x"),
        lambda: tier.list(""),
    ):
        with pytest.raises(TransientError) as caught:
            call()
        assert tier.url in caught.value.what and "127.0.0.1" in caught.value.what and caught.value.hint
    assert time.monotonic() - started_s < 10
    tier.close()


def test_an_endpoint_that_never_answers_is_transient_within_its_time_out() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = {"connect_timeout": 0.2, "read_timeout": 0.2}
        tier = ObjectTier("s3://b", key="K", secret="S", endpoint_url=endpoint, config_kwargs=config)
        started_s = time.monotonic()
        with pytest.raises(TransientError):
            tier.size("x")
        with pytest.raises(TransientError, match="can't tell"):
            tier.create("x", b"1")
        assert time.monotonic() - started_s < 5
        tier.close()


def test_time_outs_are_short_and_there_is_one_try_by_default() -> None:
    tier = ObjectTier("s3://b", key="K", secret="S", endpoint_url="http://127.0.0.1:9")
    fs = tier._client._connect()
    assert fs.retries == 1
    assert fs.config_kwargs["connect_timeout"] <= 5 and fs.config_kwargs["read_timeout"] <= 15
    assert fs.config_kwargs["retries"]["total_max_attempts"] == 1
    tier.close()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", TransientError),
        (500, "InternalError", TransientError),
        (502, "", TransientError),
        (429, "TooManyRequests", TransientError),
        (400, "RequestTimeout", TransientError),
        (409, "OperationAborted", TransientError),
        (403, "AccessDenied", AccessError),
        (401, "Unauthorized", AccessError),
        (403, "RequestTimeTooSkewed", AccessError),
        (404, "NoSuchBucket", NotFoundError),
        (404, "NoSuchKey", NotFoundError),
        (507, "InsufficientStorage", NoSpaceError),
        (403, "QuotaExceeded", NoSpaceError),
        (400, "InvalidArgument", StorageError),
        (501, "NotImplemented", StorageError),
    ],
)
def test_what_a_store_answers_becomes_the_right_error_after_one_request(
    scripted: ScriptedS3, scripted_tier: ObjectTier, status: int, code: str, kind: type[Error]
) -> None:
    scripted.script.append((status, code))
    with pytest.raises(StorageError) as caught:
        scripted_tier.read("data/x")
    assert type(caught.value) is kind
    assert "s3://b/run/data/x" in caught.value.what and str(status) in caught.value.what and caught.value.hint
    assert len(scripted.requests) == 1


@pytest.mark.parametrize(("status", "code", "kind"), [(403, "AccessDenied", AccessError), (507, "", NoSpaceError)])
def test_a_refused_write_is_no_lost_answer(
    scripted: ScriptedS3, scripted_tier: ObjectTier, status: int, code: str, kind: type[Error]
) -> None:
    scripted.script.append((status, code))
    with pytest.raises(kind, match="can't write s3://b/run/x"):
        scripted_tier.create("x", b"1")


def test_read_many_leaves_out_missing_objects_but_not_a_missing_bucket(
    scripted: ScriptedS3, scripted_tier: ObjectTier
) -> None:
    scripted.script.append((404, "NoSuchKey"))
    assert scripted_tier.read_many(["x"]) == {}
    scripted.script.append((404, "NoSuchBucket"))
    with pytest.raises(NotFoundError, match="NoSuchBucket"):
        scripted_tier.read_many(["x"])
    scripted.script.append((503, "SlowDown"))
    with pytest.raises(TransientError):
        scripted_tier.read_many(["x"])


def test_no_credentials_is_an_access_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    tier = ObjectTier("s3://b/run", endpoint_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(AccessError) as caught:
        tier.read("x")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    tier.close()


def test_a_wrong_key_is_an_access_error(s3_server: S3Server, run: str) -> None:
    tier = ObjectTier(run, **{**s3_server.options, "secret": "wrong"})
    for call in (lambda: tier.create("x", b"1"), lambda: tier.size("x"), lambda: tier.list("")):
        with pytest.raises(AccessError, match=r"s3://ckpt/"):
            call()
    tier.close()


# --- the probe


def test_the_probe_accepts_a_store_with_conditional_writes(tier: ObjectTier, s3_server: S3Server) -> None:
    tier.probe()
    assert tier.list("") == [] and uploads(s3_server) == []


def test_the_probe_refuses_a_store_that_overwrites(scripted_tier: ObjectTier) -> None:
    with pytest.raises(StorageError, match="If-None-Match") as caught:
        scripted_tier.probe()
    assert scripted_tier.url in caught.value.what and caught.value.hint


def test_the_probe_of_a_store_that_is_down_says_that_and_not_that_it_is_weak() -> None:
    tier = ObjectTier("s3://b/run", key="K", secret="S", endpoint_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TransientError):
        tier.probe()
    tier.close()


# --- uploads


def test_no_upload_is_left_behind_by_a_write_that_fails_or_loses(tier: ObjectTier, s3_server: S3Server) -> None:
    def failing() -> Iterator[memoryview]:
        yield memoryview(BIG)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tier.write("data/x", failing(), 9 * MIB)
    results = outcomes([lambda: tier.write("data/x", pieces_of(BIG), len(BIG))] * 2)
    assert sorted(map(type, results), key=str) == sorted([type(None), ExistsError], key=str)
    assert uploads(s3_server) == []
    assert tier.read("data/x") == BIG


def test_delete_prefix_takes_uploads_left_by_a_crash_with_it(tier: ObjectTier, s3_server: S3Server, run: str) -> None:
    root = run.removeprefix(f"{s3_server.url}/")
    client = s3_client(s3_server.endpoint)
    for name in ("data/s1/x", "data/s10/x"):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{root}/{name}")
    tier.delete_prefix("data/s1/")
    assert uploads(s3_server) == [f"{root}/data/s10/x"]
    tier.delete_prefix("data/")
    assert uploads(s3_server) == []


def test_sweep_ends_old_uploads_directly_below(tier: ObjectTier, s3_server: S3Server, run: str) -> None:
    root = run.removeprefix(f"{s3_server.url}/")
    for name in ("commits/x", "data/s1/x"):
        s3_client(s3_server.endpoint).create_multipart_upload(Bucket=BUCKET, Key=f"{root}/{name}")
    assert list(tier.sweep("commits/", 0.0)) == [] and list(tier.sweep("data/", 1e12)) == []
    assert [entry.name for entry in tier.sweep("commits/", 1e12, dry_run=True)] == ["commits/x"]
    assert [entry.name for entry in tier.sweep("commits/", 1e12)] == ["commits/x"]
    assert uploads(s3_server) == [f"{root}/data/s1/x"]
    tier.delete_prefix("data/")


def test_parts_are_never_too_small_nor_too_many() -> None:
    for size_bytes in (1, 8 * MIB, 70 << 30, 5 << 40):
        part = part_size_bytes(size_bytes)
        assert part >= 8 * MIB and -(-size_bytes // part) <= 9_000
    assert part_size_bytes(70 << 30) == 8 * MIB


# --- listings and deletes in pages


def test_listings_and_deletes_go_on_past_the_first_page(
    s3_server: S3Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_module, "_DELETES_MAX", 2)
    tier = ObjectTier(run, **s3_server.options, s3_additional_kwargs={"MaxKeys": 2})
    names = [f"data/{number}" for number in range(7)] + ["data/sub/1", "data/tub/1"]
    for name in names:
        tier.create(name, b"1")
    listed = [*names[:7], "data/sub/", "data/tub/"]
    assert [entry.name for entry in tier.list("data/")] == listed
    tier.delete_prefix("data/")
    assert tier.list("data/") == [] and tier.read_many(names) == {}
    tier.close()


def test_an_object_that_a_bulk_delete_did_not_delete_is_an_error(
    tier: ObjectTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.create("data/x", b"1")
    real = tier._client.call_bucket

    def refusing(method: str, name: str, doing: str, **kwargs: Any) -> dict[str, Any]:
        if method == "delete_objects":
            return {"Errors": [{"Key": tier._root + "data/x", "Code": "AccessDenied", "Message": "locked"}]}
        return real(method, name, doing, **kwargs)

    monkeypatch.setattr(tier._client, "call_bucket", refusing)
    with pytest.raises(AccessError, match=r"data/x.*locked"):
        tier.delete_prefix("data/")


def test_another_tier_sees_at_once_what_was_written_and_deleted(
    s3_server: S3Server, tier: ObjectTier, run: str
) -> None:
    other = ObjectTier(run, **s3_server.options)
    assert other.list("") == []
    tier.create("x", b"1")
    assert [entry.name for entry in other.list("")] == ["x"]
    tier.delete("x")
    assert other.list("") == [] and other.read_many(["x"]) == {}
    other.close()


# --- options


def test_options_come_from_the_environment(s3_server: S3Server, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    tier = open_tier(run)
    tier.create("x", b"1")
    assert tier.read("x") == b"1"
    tier.close()


def test_options_come_from_fsspecs_configuration(
    s3_server: S3Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec.config

    config = {**s3_server.options, "config_kwargs": {"read_timeout": 7}}  # as FSSPEC_S3_KEY and so on would set it
    monkeypatch.setitem(fsspec.config.conf, "s3", config)
    tier = ObjectTier(run)
    tier.create("x", b"1")
    fs = tier._client._connect()
    assert fs.config_kwargs["read_timeout"] == 7 and fs.config_kwargs["connect_timeout"] == 3
    tier.close()


def test_a_new_run_on_a_store_that_overwrites_is_refused_before_anything_is_written(scripted_tier: ObjectTier) -> None:
    with pytest.raises(StorageError, match="If-None-Match"):
        Catalog(scripted_tier).create_run()
    with pytest.raises(NotFoundError):
        scripted_tier.size("run.json")
