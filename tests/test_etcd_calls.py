"""The etcd client against answers written by the test: what is retried where, and what is never sent twice."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from coord_conformance import collect
from hypothesis import given, settings
from hypothesis import strategies as st
from support_etcd import wait_until
from support_gateway import Exchange, Json, ScriptedGateway, answer, close_unheard, hang, refuse, scripted

from ckptrt.agents.coord import CoordStore, WatchEvent
from ckptrt.agents.etcd import EtcdCoordStore
from ckptrt.agents.etcd_calls import Endpoint, NotSentError, Refusal, Verdict, parse_endpoints
from ckptrt.agents.etcd_http import StreamDecoder, encode_text, open_socket
from ckptrt.errors import CompactedError, CoordError, LeaseGoneError, UnknownOutcomeError, UsageError

HEADER = {"header": {"cluster_id": "7", "revision": "5"}}
ANSWER = {**HEADER, "succeeded": True, "count": "0", "TTL": "5", "ID": "1"}

Call = Callable[[CoordStore], object]
WRITES: list[Call] = [
    lambda store: store.put("/k", "v"),
    lambda store: store.create("/k", "v"),
    lambda store: store.compare_and_swap("/k", "v", 3),
    lambda store: store.delete("/k"),
    lambda store: store.delete("/k", 3),
]
REPEATABLE: list[Call] = [
    lambda store: store.get("/k"),
    lambda store: store.get_prefix("/k"),
    lambda store: store.keepalive(1),
    lambda store: store.grant(5),
    lambda store: store.revoke(1),
]


def unused_endpoint() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


# What may be sent again.


@pytest.mark.parametrize("call", WRITES)
@pytest.mark.parametrize("fault", [close_unheard, refuse(14, "etcdserver: request timed out"), refuse(4, "deadline")])
def test_a_write_that_may_have_been_applied_is_not_sent_again(call: Call, fault: Callable[..., None]) -> None:
    with scripted(fault) as bad, scripted(answer(ANSWER)) as good:
        store = EtcdCoordStore([bad.endpoint, good.endpoint])
        with pytest.raises(UnknownOutcomeError):
            call(store)
        store.close()
        assert (len(bad.requests), len(good.requests)) == (1, 0)


@pytest.mark.parametrize("call", REPEATABLE)
@pytest.mark.parametrize("fault", [close_unheard, refuse(14, "etcdserver: request timed out"), refuse(4, "deadline")])
def test_what_may_be_done_twice_goes_to_the_next_endpoint(call: Call, fault: Callable[..., None]) -> None:
    with scripted(fault) as bad, scripted(answer(ANSWER)) as good:
        store = EtcdCoordStore([bad.endpoint, good.endpoint])
        call(store)
        call(store)
        store.close()
        assert (len(bad.requests), len(good.requests)) == (1, 2)  # and stays with the one that answers


@pytest.mark.parametrize("call", WRITES + REPEATABLE)
def test_a_refused_connection_is_no_reason_to_fail(call: Call) -> None:
    with scripted(answer(ANSWER)) as good:
        store = EtcdCoordStore([unused_endpoint(), good.endpoint])
        call(store)
        store.close()
        assert len(good.requests) == 1


@pytest.mark.parametrize("call", WRITES + REPEATABLE)
def test_a_node_without_a_leader_has_done_nothing(call: Call) -> None:
    with scripted(refuse(14, "etcdserver: no leader")) as alone, scripted(answer(ANSWER)) as good:
        store = EtcdCoordStore([alone.endpoint, good.endpoint])
        call(store)
        store.close()
        assert (len(alone.requests), len(good.requests)) == (1, 1)


def test_an_election_is_waited_for() -> None:
    answers = [refuse(14, "etcdserver: no leader"), refuse(14, "etcdserver: no leader"), answer(ANSWER)]
    with scripted(lambda exchange, body: answers.pop(0)(exchange, body)) as node:
        store = EtcdCoordStore(node.endpoint)
        assert store.put("/k", "v") == 5
        store.close()


def test_nobody_listening_is_told_at_once_and_wrote_nothing() -> None:
    one, two = unused_endpoint(), unused_endpoint()
    store = EtcdCoordStore([one, two], request_timeout_s=30.0)
    started_s = time.monotonic()
    with pytest.raises(CoordError) as caught:
        store.put("/k", "v")
    assert time.monotonic() - started_s < 5
    assert not isinstance(caught.value, UnknownOutcomeError)
    assert one in str(caught.value)
    assert two in str(caught.value)
    store.close()


def test_a_node_that_hangs_costs_one_time_out() -> None:
    with scripted(hang) as stuck, scripted(answer(ANSWER)) as good:
        store = EtcdCoordStore([stuck.endpoint, good.endpoint], request_timeout_s=0.3)
        with pytest.raises(UnknownOutcomeError):
            store.put("/k", "v")
        assert store.get("/k") is None
        assert len(stuck.requests) == 1
        store.close()


def test_a_keepalive_does_not_wait_behind_another_request() -> None:
    def script(exchange: Exchange, body: Json) -> None:
        (hang if exchange.path == "/v3/kv/range" else answer({"result": ANSWER}))(exchange, body)

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint, request_timeout_s=20.0)
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(store.get, "/k")
            wait_until(lambda: node.requests)
            started_s = time.monotonic()
            assert store.keepalive(1) == 5
            assert time.monotonic() - started_s < 5
            store.close()
            node.released.set()
            with pytest.raises(CoordError):
                slow.result()


def test_a_connection_that_the_server_closed_meanwhile_is_not_used() -> None:
    def script(exchange: Exchange, body: Json) -> None:
        answer(ANSWER)(exchange, body)
        exchange.close_connection = True  # without a header that says so

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        for _ in range(3):
            assert store.put("/k", "v") == 5
            assert node.closed_one.wait(10)
            node.closed_one.clear()
        store.close()


# What refusals mean.


@pytest.mark.parametrize(
    ("status", "body", "code", "verdict"),
    [
        (404, b"Not Found\n", 2, Verdict.FINAL),
        (400, b"CommonName of client sending a request against gateway will be ignored", 2, Verdict.FINAL),
        (502, b"<html>Bad Gateway</html>", 2, Verdict.UNCERTAIN),
        (503, b"", 2, Verdict.UNCERTAIN),
        (503, b'{"error":"etcdserver: no leader","code":14,"message":"etcdserver: no leader"}', 14, Verdict.ELSEWHERE),
        (503, b'{"code":14,"message":"etcdserver: server stopped"}', 14, Verdict.UNCERTAIN),
        (200, b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}', 14, Verdict.ELSEWHERE),
        (404, b'{"error":"etcdserver: requested lease not found","code":5}', 5, Verdict.LEASE_GONE),
        (401, b'{"error":"etcdserver: invalid auth token","code":16}', 16, Verdict.AUTHENTICATE),
        (400, b'{"code":3,"message":"etcdserver: auth revision in header is old"}', 3, Verdict.AUTHENTICATE),
        (403, b'{"code":7,"message":"etcdserver: permission denied"}', 7, Verdict.FINAL),
        (429, b'{"code":8,"message":"etcdserver: too many requests"}', 8, Verdict.ELSEWHERE),
        (429, b'{"code":8,"message":"etcdserver: mvcc: database space exceeded"}', 8, Verdict.FINAL),
        (408, b'{"code":4,"message":"context deadline exceeded"}', 4, Verdict.UNCERTAIN),
        (500, b'{"code":2,"message":"etcdserver: something new"}', 2, Verdict.UNCERTAIN),
    ],
)
def test_both_shapes_of_errors_are_understood(status: int, body: bytes, code: int, verdict: Verdict) -> None:
    refusal = Refusal.parse(status, body)
    assert (refusal.code, refusal.verdict) == (code, verdict)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (refuse(8, "etcdserver: mvcc: database space exceeded", 429), "compact"),
        (refuse(7, "etcdserver: permission denied", 403), "password"),
        (refuse(3, "etcdserver: user name is empty", 400), "password"),
        (lambda exchange, _: exchange.send(404, b"Not Found"), "gateway"),
    ],
)
def test_a_final_refusal_is_not_tried_elsewhere_and_says_what_to_do(script: Callable[..., None], says: str) -> None:
    with scripted(script) as node, scripted(answer(ANSWER)) as other:
        store = EtcdCoordStore([node.endpoint, other.endpoint])
        with pytest.raises(CoordError) as caught:
            store.put("/k", "v")
        assert not isinstance(caught.value, UnknownOutcomeError)
        assert says in caught.value.hint
        assert not other.requests
        store.close()


def test_a_dead_lease_has_an_error_of_its_own() -> None:
    with scripted(refuse(5, "etcdserver: requested lease not found", 404)) as node:
        store = EtcdCoordStore(node.endpoint)
        with pytest.raises(LeaseGoneError):
            store.put("/k", "v", 1)
        store.revoke(1)
        store.close()


def test_a_dead_lease_has_no_ttl_in_the_answer_to_a_keepalive() -> None:
    with scripted(answer({"result": {"header": {"revision": "5"}, "ID": "1"}})) as node:
        store = EtcdCoordStore(node.endpoint)
        assert store.keepalive(1) == 0
        store.close()


def test_an_error_in_a_stream_of_status_200_is_an_error() -> None:
    stream_error = {"error": {"grpc_code": 7, "http_code": 403, "message": "etcdserver: permission denied"}}
    with scripted(answer(stream_error)) as node:
        store = EtcdCoordStore(node.endpoint)
        with pytest.raises(CoordError, match="permission denied"):
            store.keepalive(1)
        store.close()


def test_an_answer_that_is_not_json_leaves_a_write_open() -> None:
    with scripted(lambda exchange, _: exchange.send(200, b"<html>Sign in</html>")) as node:
        store = EtcdCoordStore(node.endpoint)
        with pytest.raises(UnknownOutcomeError, match="not JSON"):
            store.put("/k", "v")
        store.close()


# Tokens.


class TokenGateway:
    """Answers only to the newest token; `expire` makes the clients' token old."""

    def __init__(self) -> None:
        self.number = 1

    def __call__(self, exchange: Exchange, body: Json) -> None:
        token = f"token-{self.number}"
        if exchange.path == "/v3/auth/authenticate":
            good = body == {"name": "u", "password": "p"}
            script = answer({"token": token}) if good else refuse(3, "etcdserver: authentication failed", 400)
        elif exchange.headers.get("Authorization") != token:
            script = refuse(16, "etcdserver: invalid auth token", 401)
        else:
            script = answer(ANSWER)
        script(exchange, body)


def test_an_expired_token_is_renewed_even_for_a_write() -> None:
    gateway = TokenGateway()
    with scripted(gateway) as node:
        store = EtcdCoordStore(node.endpoint, user="u", password="p")
        assert store.put("/k", "v") == 5
        gateway.number += 1
        assert store.put("/k", "v") == 5
        assert node.paths() == [
            "/v3/auth/authenticate", "/v3/kv/put", "/v3/kv/put", "/v3/auth/authenticate", "/v3/kv/put",
        ]  # fmt: skip
        store.close()


def test_a_wrong_password_is_told() -> None:
    with scripted(TokenGateway()) as node:
        store = EtcdCoordStore(node.endpoint, user="u", password="wrong")
        with pytest.raises(CoordError, match="authentication failed") as caught:
            store.put("/k", "v")
        assert "password" in caught.value.hint
        assert "wrong" not in str(caught.value)
        store.close()


def test_a_token_that_is_never_accepted_ends_in_an_error() -> None:
    def script(exchange: Exchange, body: Json) -> None:
        good = exchange.path == "/v3/auth/authenticate"
        (answer({"token": "t"}) if good else refuse(16, "etcdserver: invalid auth token", 401))(exchange, body)

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint, user="u", password="p")
        with pytest.raises(CoordError, match="invalid auth token"):
            store.get("/k")
        assert len(node.requests) == 4
        store.close()


def test_a_user_needs_a_password() -> None:
    with pytest.raises(UsageError):
        EtcdCoordStore("http://127.0.0.1:1", user="u")


# Watches.


def line(**fields: object) -> bytes:
    return json.dumps({"result": {**HEADER, **fields}}).encode() + b"\n"


def put_event(value: str, revision: int) -> Json:
    pair = {"key": encode_text("/k"), "value": encode_text(value), "mod_revision": str(revision)}
    return {"kv": pair, "type": "PUT"} if revision % 2 else {"kv": pair}  # PUT is the zero of its type


def poll_for(store: CoordStore, start_revision: int, count: int) -> list[WatchEvent]:
    with store.watch("/k", start_revision) as watch:
        return collect(watch, count)


def start_revisions(node: ScriptedGateway) -> list[int]:
    return [int(body["create_request"]["start_revision"]) for path, body in node.requests if path == "/v3/watch"]


def test_a_watch_resumes_after_the_last_event_and_not_where_the_node_is() -> None:
    streams = [
        # A node at revision 50 says so first; the change at 3 is not sent before the connection breaks.
        [line(created=True, header={"revision": "50"})],
        [line(created=True), line(events=[put_event("a", 3), put_event("b", 4)])],
        [line(created=True), line(events=[put_event("b", 4), put_event("c", 6)])],
    ]

    def script(exchange: Exchange, _: Json) -> None:
        exchange.start_chunks()
        for payload in streams.pop(0):
            exchange.chunk(payload)
        exchange.close_connection = True

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        assert [event.value for event in poll_for(store, 3, 3)] == ["a", "b", "c"]
        assert start_revisions(node) == [3, 3, 5]
        store.close()


def test_lines_and_chunks_need_not_end_together() -> None:
    text = line(created=True) + line(events=[put_event("a", 3)]) + line(events=[put_event("b", 4)])

    def script(exchange: Exchange, body: Json) -> None:
        exchange.start_chunks()
        for start in range(0, len(text), 7):
            exchange.chunk(text[start : start + 7])
        hang(exchange, body)

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        assert [event.value for event in poll_for(store, 3, 2)] == ["a", "b"]
        node.released.set()
        store.close()


def test_events_before_a_refusal_are_delivered_before_it() -> None:
    def script(exchange: Exchange, _: Json) -> None:
        exchange.start_chunks()
        cancel = line(canceled=True, compact_revision="9", header={"cluster_id": "7"})
        exchange.chunk(line(created=True) + line(events=[put_event("a", 3)]) + cancel)

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        with store.watch("/k", 3) as watch:
            assert [event.value for event in watch.poll(10.0)] == ["a"]
            with pytest.raises(CompactedError) as caught:
                watch.poll(10.0)
        assert caught.value.compact_revision == 9
        assert len(node.requests) == 1
        store.close()


def test_what_was_left_of_a_broken_stream_is_not_taken_for_the_next_ones() -> None:
    cancel = line(canceled=True, cancel_reason="etcdserver: no leader")
    streams = [line(created=True) + cancel + cancel, line(created=True) + line(events=[put_event("a", 3)])]

    def script(exchange: Exchange, _: Json) -> None:
        exchange.start_chunks()
        exchange.chunk(streams.pop(0))

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        assert [event.value for event in poll_for(store, 3, 1)] == ["a"]
        assert start_revisions(node) == [3, 3]
        store.close()


def test_another_cluster_behind_the_same_address_is_noticed() -> None:
    clusters = ["7", "8"]

    def script(exchange: Exchange, _: Json) -> None:
        exchange.start_chunks()
        exchange.chunk(line(created=True, header={"cluster_id": clusters.pop(0), "revision": "100"}))
        exchange.close_connection = True

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        with store.watch("/k", 3) as watch, pytest.raises(CompactedError, match="another"):
            watch.poll(10.0)
        store.close()


@pytest.mark.parametrize(("agreed", "lost"), [("99", False), ("6", True)])
def test_a_node_that_lags_is_told_from_a_store_that_lost_its_data(agreed: str, lost: bool) -> None:
    def script(exchange: Exchange, body: Json) -> None:
        if exchange.path == "/v3/kv/range":
            answer({"header": {"revision": agreed}})(exchange, body)
            return
        exchange.start_chunks()
        exchange.chunk(line(created=True, header={"revision": "5"}))
        exchange.chunk(line(events=[put_event("a", 91)]))
        hang(exchange, body)

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        with store.watch("/k", 90) as watch:
            if lost:
                with pytest.raises(CompactedError, match="back in time"):
                    watch.poll(10.0)
            else:
                assert [event.value for event in watch.poll(10.0)] == ["a"]
        node.released.set()
        store.close()


def test_a_watch_on_a_node_that_hangs_moves_on() -> None:
    def script(exchange: Exchange, _: Json) -> None:
        exchange.start_chunks()
        exchange.chunk(line(created=True) + line(events=[put_event("a", 3)]))
        exchange.server.released.wait(30)

    with scripted(hang) as stuck, scripted(script) as good:
        store = EtcdCoordStore([stuck.endpoint, good.endpoint], request_timeout_s=0.3)
        assert [event.value for event in poll_for(store, 3, 1)] == ["a"]
        good.released.set()
        store.close()


@pytest.mark.parametrize("reason", ["etcdserver: permission denied", "rpc error: code = Unauthenticated desc = x"])
def test_a_watch_that_is_not_permitted_says_so(reason: str) -> None:
    def script(exchange: Exchange, _: Json) -> None:
        exchange.start_chunks()
        exchange.chunk(line(created=True, canceled=True, cancel_reason=reason))

    with scripted(script) as node:
        store = EtcdCoordStore(node.endpoint)
        with store.watch("/k", 3) as watch, pytest.raises(CoordError, match="refuses a watch"):
            watch.poll(10.0)
        store.close()


def test_a_server_without_watches_says_so() -> None:
    with scripted(lambda exchange, _: exchange.send(404, b"404 page not found\n")) as node:
        store = EtcdCoordStore(node.endpoint)
        with store.watch("/k", 3) as watch, pytest.raises(CoordError, match="404") as caught:
            watch.poll(10.0)
        assert "gateway" in caught.value.hint
        store.close()


# Bytes and addresses.


@settings(deadline=None, max_examples=60)
@given(
    lines=st.lists(st.binary(min_size=1, max_size=12).filter(lambda b: b.strip() and b"\n" not in b), max_size=6),
    chunk_size=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 11), min_size=1, max_size=8),
)
def test_a_stream_is_the_same_however_it_is_cut(lines: list[bytes], chunk_size: int, cuts: list[int]) -> None:
    text = b"".join(item + b"\n" for item in lines)
    chunks = [text[i : i + chunk_size] for i in range(0, len(text), chunk_size)]
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\ntransfer-encoding: Chunked\r\n\r\n"
    raw += b"".join(b"%X;ext=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    decoder, got, position, turn = StreamDecoder(), [], 0, 0
    while position < len(raw):
        size = cuts[turn % len(cuts)]
        got += decoder.feed(raw[position : position + size])
        position, turn = position + size, turn + 1
    assert got == lines
    assert decoder.status == 200
    assert decoder.ended()


@pytest.mark.parametrize(
    "raw",
    [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"A" * 70000],
)
def test_what_is_no_http_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        StreamDecoder().feed(raw)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:1", [Endpoint("a", 1, False)]),
        ("https://a:1, b:2 ,", [Endpoint("a", 1, True), Endpoint("b", 2, False)]),
        ("a", [Endpoint("a", 2379, False)]),
        ("http://[::1]:5/", [Endpoint("::1", 5, False)]),
        (["10.0.0.1:2", "https://c"], [Endpoint("10.0.0.1", 2, False), Endpoint("c", 2379, True)]),
    ],
)
def test_endpoints_are_read(text: str | list[str], expected: list[Endpoint]) -> None:
    assert list(parse_endpoints(text)) == expected


@pytest.mark.parametrize("text", ["", " , ", "ftp://a:1", "http://", "http://a:x", "http://a:1/v3", "http://a:99999"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoints(text)


def test_a_connection_to_oneself_counts_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())  # what the kernel does now and then to a port that nobody listens on
    monkeypatch.setattr(socket, "create_connection", lambda *_: itself)
    with pytest.raises(NotSentError):
        open_socket(Endpoint("127.0.0.1", 1, False), None, 1.0)
    assert itself.fileno() == -1
