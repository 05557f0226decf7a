"""What clouds say of a machine that they take back, from stand-ins of their metadata services."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support_jobs import Job, wait_for
from support_launch import eventually

from ckptrt.agents.notices import CLOUDS, NoticeWatch, parse_watch
from ckptrt.agents.options import plan
from ckptrt.errors import UsageError

Answer = tuple[int, str]


class Service:
    """Answers from a table of `METHOD path` -> (status, text), or a function of the headers that gives one."""

    def __init__(self) -> None:
        self.table: dict[str, Answer | Callable[[dict[str, str]], Answer]] = {}
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                what = f"{self.command} {self.path.partition('?')[0]}"
                service.asked.append(what)
                found = service.table.get(what, (404, ""))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, text = found(headers) if callable(found) else found
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = _serve

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


class Heard:
    """A watch on the service, and what it told."""

    def __init__(self, cloud: str, service: Service) -> None:
        self.notices: list[str] = []
        self.warnings: list[str] = []
        self._service = service
        self._watch = NoticeWatch(cloud, service.address, self.notices.append, self.warnings.append, every_s=0.01)

    def rounds(self, count: int) -> None:
        """Let it ask so many times more."""
        until = len(self._service.asked) + count
        eventually(lambda: len(self._service.asked) >= until, "more questions", 20)

    def notice(self) -> str:
        eventually(lambda: self.notices, f"a notice; warnings {self.warnings}", 20)
        return self.notices[0]

    def close(self) -> None:
        self._watch.close()


@pytest.fixture
def watch(service: Service) -> Iterator[Callable[[str], Heard]]:
    started: list[Heard] = []

    def start(cloud: str) -> Heard:
        started.append(Heard(cloud, service))
        return started[-1]

    yield start
    for heard in started:
        heard.close()


ACTION = "GET /latest/meta-data/spot/instance-action"


def test_aws_tells_with_a_token_that_may_run_out(service: Service, watch: Callable[[str], Heard]) -> None:
    tokens = iter(("first", "second"))
    valid: list[str] = []

    def give(headers: dict[str, str]) -> Answer:
        assert headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        valid[:] = [next(tokens)]
        return 200, valid[0]

    told: list[Answer] = [(404, "")]
    service.table["PUT /latest/api/token"] = give
    service.table[ACTION] = lambda headers: told[0] if [headers["x-aws-ec2-metadata-token"]] == valid else (401, "")
    heard = watch("aws")
    heard.rounds(5)
    assert heard.notices == heard.warnings == []
    valid[:] = []  # the token is forgotten there
    told[0] = (200, json.dumps({"action": "terminate", "time": "2026-12-01T08:22:00Z"}))
    assert heard.notice() == "aws takes this machine back: terminate at 2026-12-01T08:22:00Z"
    assert heard.warnings == []


@pytest.mark.parametrize(
    ("key", "value", "notice"),
    [
        ("preempted", "TRUE", "gcp takes this machine back: preempted, within half a minute"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "gcp takes this machine back: host maintenance"),
    ],
)
def test_gcp_tells_of_preemption_and_of_maintenance(
    service: Service, watch: Callable[[str], Heard], key: str, value: str, notice: str
) -> None:
    values = {"preempted": "FALSE", "maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}

    def answer(name: str) -> Callable[[dict[str, str]], Answer]:
        return lambda headers: (200, values[name]) if headers.get("metadata-flavor") == "Google" else (403, "")

    for name in values:
        service.table[f"GET /computeMetadata/v1/instance/{name}"] = answer(name)
    heard = watch("gcp")
    heard.rounds(6)
    assert heard.notices == heard.warnings == []
    values[key] = value
    assert heard.notice() == notice


def test_azure_tells_of_this_very_machine(service: Service, watch: Callable[[str], Heard]) -> None:
    events = [
        {"EventType": "Preempt", "Resources": ["another"], "NotBefore": ""},
        {"EventType": "Freeze", "Resources": ["mine"], "NotBefore": ""},
    ]
    service.table["GET /metadata/instance/compute/name"] = (200, "mine\n")
    service.table["GET /metadata/scheduledevents"] = lambda headers: (
        (200, json.dumps({"DocumentIncarnation": 1, "Events": events}))
        if headers.get("metadata") == "true"
        else (400, "")
    )
    heard = watch("azure")
    heard.rounds(6)
    assert heard.notices == heard.warnings == []
    events.append({"EventType": "Preempt", "Resources": ["x", "mine"], "NotBefore": "Tue, 01 Dec 2026 18:29:47 GMT"})
    assert heard.notice() == "azure takes this machine back: Preempt not before Tue, 01 Dec 2026 18:29:47 GMT"


@pytest.mark.parametrize("trouble", [(500, ""), (403, ""), (200, "<html>"), (200, "[]"), (200, "{}")])
@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_a_service_in_trouble_is_told_once_and_asked_again(
    service: Service, watch: Callable[[str], Heard], cloud: str, trouble: Answer
) -> None:
    notice = {
        "aws": {"action": "stop"},
        "azure": {"Events": [{"EventType": "Terminate", "Resources": ["mine"], "NotBefore": ""}]},
    }
    place = {"aws": ACTION, "azure": "GET /metadata/scheduledevents"}[cloud]
    service.table["PUT /latest/api/token"] = (200, "token")
    service.table["GET /metadata/instance/compute/name"] = (200, "mine")
    service.table[place] = trouble
    heard = watch(cloud)
    heard.rounds(6)
    assert len(heard.warnings) == 1
    assert "can't be asked for notices" in heard.warnings[0]
    service.table[place] = (200, json.dumps(notice[cloud]))
    assert heard.notice().startswith(f"{cloud} takes this machine back: ")


def test_the_option() -> None:
    assert parse_watch("none") is None
    for cloud, address in CLOUDS.items():
        assert parse_watch(cloud) == (cloud, address)
    job = plan(["--ckpt-preempt-watch", "aws=http://127.0.0.1:8000/", "x.py"]).job
    assert job is not None and job.preempt_watch == ("aws", "http://127.0.0.1:8000")
    for text in ("ibm", "aws=https://x", "aws=x"):
        with pytest.raises(UsageError, match="preempt-watch"):
            plan(["--ckpt-preempt-watch", text, "x.py"])


@pytest.mark.processes
def test_a_job_is_drained_at_a_notice(tmp_path: Path, service: Service) -> None:
    service.table["PUT /latest/api/token"] = (200, "token")
    options = ("--ckpt-preempt-watch", f"aws={service.address}")
    with Job(folder=tmp_path, steps=100_000, every=10**9, options=options) as job:
        job.launch()
        wait_for(lambda: job.reached(10), job)
        service.table[ACTION] = (200, json.dumps({"action": "terminate", "time": "soon"}))
        assert job.finish() == 75, job.output
        assert "signal       aws takes this machine back: terminate at soon" in job.output
        (commit,) = job.catalog().path().commits
        assert f"drain        step {commit.step} is committed on all ranks" in job.output
