"""Real launches: what is killed comes back, at the first attempt, and nothing is left behind at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_launch import Launch, alive, descendants, eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Steps until it is told not to: each rank writes a line for every step, and obeys a word in its file `order`.
LOOP = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
value = torch.full((4,), float(rank))
log = open(f"steps.{rank}", "a", buffering=1)
print("rank", rank, "says hello", flush=True)
step = 0
while True:
    dist.all_reduce(value)
    step += 1
    log.write(f"{restarts} {step} {time.monotonic()}\\n")
    if os.path.exists(f"order.{rank}.{restarts}"):
        raise ValueError(f"ordered to fail at step {step}")
    time.sleep(0.005)
"""


class Loop(Launch):
    """A launch of LOOP on two ranks."""

    def rows(self, rank: int, restarts: int) -> list[list[str]]:
        path = self.folder / f"steps.{rank}"
        text = path.read_text() if path.exists() else ""
        return [row for line in text.split("\n")[:-1] if (row := line.split())[0] == str(restarts)]

    def stepping(self, restarts: int) -> float:
        """Wait until both ranks step after so many restarts; when the later one made its first step."""
        eventually(
            lambda: all(len(self.rows(rank, restarts)) > 3 for rank in (0, 1)) or self.process.poll() is not None,
            f"steps after {restarts} restarts\n{self.err}",
        )
        return max(float(self.rows(rank, restarts)[0][2]) for rank in (0, 1))


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """One launch for all kills of this file."""
    folder = tmp_path_factory.mktemp("loop")
    launch = Loop(folder, ["--nproc-per-node=2", "--max-restarts=1000", "--rdzv-id=loop", "train.py"], script=LOOP)
    launch.stepping(0)
    yield launch
    launch.close()


@pytest.fixture
def restarts(loop: Loop) -> int:
    """How often the shared launch has restarted when a test begins."""
    return len(loop.events("restart"))


def etcd_of(launch: Launch) -> int:
    """Process id of the launch's own etcd."""
    for pid in descendants(launch.process.pid):
        if b"--listen-client-urls" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return 0


def test_a_killed_rank_is_the_cause_and_the_job_comes_back(loop: Loop, restarts: int) -> None:
    before = loop.err
    os.kill(loop.pids(restarts)[1], signal.SIGKILL)
    loop.stepping(restarts + 1)
    failure = loop.event("failure", restarts)
    assert (failure["rank"], failure["code"]) == (1, -9)
    # The other is stopped, or has just met the broken connection; it is never the cause.
    assert failure["stopped"] + failure["consequences"] == [0]
    said = loop.err.removeprefix(before)
    assert "failure      rank 1 · SIGKILL (exit -9) · no traceback: the process was killed from outside\n" in said
    assert re.search(
        r"^ {13}rank 0 (was stopped by the supervisor|failed after it) \(not a cause\)", said, re.MULTILINE
    )
    assert f"restart {restarts + 1}" in said
    assert f"budget {1000 - restarts - 1} of 1000 left\n" in said
    assert " s to new workers = detect " in said


def test_both_ranks_killed_at_once_are_one_failure(loop: Loop, restarts: int) -> None:
    pids = loop.pids(restarts)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    loop.stepping(restarts + 1)
    failure = loop.event("failure", restarts)
    assert failure["code"] == -9
    assert failure["consequences"] == [1 - failure["rank"]]
    assert len(loop.events("restart")) == restarts + 1


def test_an_exception_is_shown_with_the_culprit_s_traceback(loop: Loop, restarts: int) -> None:
    before = loop.err
    (loop.folder / f"order.1.{restarts}").touch()
    loop.stepping(restarts + 1)
    failure = loop.event("failure", restarts)
    assert failure["rank"] == 1
    assert failure["error"].startswith("ValueError: ordered to fail at step ")
    said = loop.err.removeprefix(before)
    assert "failure      rank 1 · exit 1 · ValueError: ordered to fail at step " in said
    assert "Traceback (most recent call last):" in said  # rank 1's stderr isn't on the console otherwise
    assert f"log ckptrt-logs/loop/i{failure['incarnation']}/1/stderr.log" in said


def test_only_rank_0_is_on_the_console_and_all_are_in_files(loop: Loop) -> None:
    assert "rank 0 says hello" in loop.out
    assert "rank 1 says hello" not in loop.out
    logs = Path(loop.event("started", 0)["logs"])
    assert "rank 1 says hello" in (logs / "1" / "stdout.log").read_text()


def test_etcd_may_die_and_training_goes_on(loop: Loop, restarts: int) -> None:
    os.kill(etcd_of(loop), signal.SIGKILL)
    loop.says("etcd died and runs again; training went on")
    steps = len(loop.rows(0, restarts))
    eventually(lambda: len(loop.rows(0, restarts)) > steps + 5, "steps while etcd is gone")
    assert len(loop.events("restart")) == restarts
    incarnation = loop.events("opened")[-1]["incarnation"]
    os.kill(loop.pids(restarts)[0], signal.SIGKILL)
    loop.stepping(restarts + 1)
    assert loop.events("opened")[-1]["incarnation"] > incarnation


def test_a_second_launcher_on_the_same_run_is_told_who_has_it(loop: Loop, tmp_path: Path) -> None:
    command = Path(f"/proc/{etcd_of(loop)}/cmdline").read_bytes().decode().split("\0")
    endpoint = command[command.index("--listen-client-urls") + 1]
    second = Launch(tmp_path, ["--rdzv-id=loop", f"--ckpt-etcd-endpoints={endpoint}", "--no-python", "/bin/true"])
    assert second.wait() == 11
    assert f"error[locked]: run loop is led by another launcher: pid {loop.process.pid} on " in second.err


def test_twenty_restarts_work_at_the_first_attempt(
    loop: Loop, restarts: int, record_property: Callable[[str, object], None]
) -> None:
    took_s = []
    for number in range(restarts, restarts + 20):
        pid = loop.pids(number)[number % 2]
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        took_s.append(loop.stepping(number + 1) - killed_s)
    assert [event["number"] for event in loop.events("restart")] == list(range(1, restarts + 21))
    assert {event["code"] for event in loop.events("failure")[restarts:]} == {-signal.SIGKILL}
    record_property("kill_to_first_step_s", {"median": statistics.median(took_s), "worst": max(took_s)})


def test_sigterm_ends_the_job_and_leaves_nobody(loop: Loop) -> None:
    below = descendants(loop.process.pid)
    assert len(below) >= 4  # zygote, two workers, etcd
    loop.process.send_signal(signal.SIGTERM)
    assert loop.wait() == 143
    assert "signal       SIGTERM: stopping the workers\n" in loop.err
    assert not [pid for pid in below if alive(pid)]


# A worker that uses the agent's socket as the runtime does, without torch.
CLIENT = """
import os, socket, sys, time
from ckptrt.wire import connect

rank, restarts = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
agent = connect(os.environ["CKPTRT_AGENT_SOCKET"], 30.0)

def ask(**message):
    agent.send(message)
    return agent.receive()

def note(*words):
    with open(f"notes.{rank}", "a") as file:
        file.write(" ".join(map(str, (restarts, *words))) + "\\n")

assert ask(op="hello", rank=rank, pid=os.getpid(), incarnation=0)[0]["op"] == "ok"
note("env", os.environ.get("CKPTRT_INCARNATION"), os.environ.get("CKPTRT_RESUME_FROM"))
answer = ask(op="open_run", url=os.environ["TEST_URL"], options={}, world_size=2)[0]
note("run", answer.get("incarnation"), answer.get("resume"), answer.get("code"))
if answer["op"] == "error":
    raise RuntimeError(answer["what"])
note("other", ask(op="open_run", url="/somewhere/else", options={}, world_size=2)[0].get("code"))
reply, (arena,) = ask(op="arena", rank=rank, size_bytes=8192)
note("arena", reply["created"], os.pread(arena, 5, 0), os.fstat(arena).st_size)
os.pwrite(arena, b"hello", 0)
reply, fds = ask(op="holdings")
note("holdings", *reply["ranks"])
path = ask(op="persister")[0]["path"]
while True:
    try:
        connect(path, 5.0).close()
        break
    except OSError:
        time.sleep(0.01)
for name in ("group", "restored", "first_step"):
    agent.send({"op": "phase", "name": name, "at_s": time.monotonic(), "step": 7})
agent.send({"op": "committed", "step": 10 + int(restarts)})
note("ready")
time.sleep(600)
"""


class Client(Launch):
    """A launch of CLIENT on two ranks."""

    def notes(self, rank: int) -> list[str]:
        path = self.folder / f"notes.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def ready(self, restarts: int) -> list[str]:
        """What rank 0 noted after so many restarts, once both ranks are ready."""
        eventually(
            lambda: all(f"{restarts} ready" in self.notes(rank) for rank in (0, 1)) or self.process.poll() is not None,
            f"ready after {restarts} restarts\n{self.err}",
        )
        return [note.partition(" ")[2] for note in self.notes(0) if note.startswith(f"{restarts} ")]


def persister_of(launch: Launch) -> int:
    for pid in descendants(launch.process.pid):
        if b"ckptrt.storage.persister" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return 0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("client")
    launch = Client(
        folder, ["--nproc-per-node=2", "train.py"], script=CLIENT, environ={"TEST_URL": str(folder / "run")}
    )
    yield launch
    launch.close()


def fence(client: Client, incarnation: int) -> dict[str, object]:
    path = client.folder / "run" / "fences" / f"i{incarnation:08d}.json"
    body: dict[str, object] = json.loads(path.read_text())["body"]
    return body


def test_a_worker_names_the_run_and_the_agent_fences_it(client: Client) -> None:
    notes = client.ready(0)
    assert notes[:3] == ["env None None", "run 1 fresh None", "other usage"]
    assert [note.split()[2:] for note in client.notes(1)[1:2]] == [["1", "fresh", "None"]]  # one answer for all
    assert (fence(client, 1)["parent"], fence(client, 1)["world_size"]) == (None, 2)
    assert notes[3:5] == ["arena True b'\\x00\\x00\\x00\\x00\\x00' 8192", notes[4]]


def test_at_a_restart_the_fence_comes_first_and_the_arenas_are_still_there(client: Client) -> None:
    client.ready(0)
    os.kill(client.pids(0)[1], signal.SIGKILL)
    notes = client.ready(1)
    assert notes[:4] == ["env 2 fresh", "run 2 fresh None", "other usage", "arena False b'hello' 8192"]
    assert notes[4] == "holdings 0 1"
    assert fence(client, 2)["world_size"] == 2
    said = client.says("recovery")
    assert "restart 1    budget 9 of 10 left, no-progress 0 of 3\n" in said  # step 10 was committed
    assert "after step 10" in said
    parts = client.event("recovery", 0)["parts"]
    assert list(parts) == ["detect", "stop", "decide", "fence", "start", "restore", "first step"]
    assert all(seconds >= 0 for seconds in parts.values())


def test_a_killed_persister_is_started_again(client: Client) -> None:
    client.ready(0)
    pid = eventually(lambda: persister_of(client), "a persister")
    os.kill(pid, signal.SIGKILL)
    client.says("persister died (SIGKILL), started again at once; training goes on")
    assert eventually(lambda: persister_of(client), "another persister") != pid


def test_another_job_on_the_same_run_is_kept_out(client: Client, tmp_path: Path) -> None:
    client.ready(0)
    second = Launch(tmp_path, [f"--ckpt-dir={client.folder / 'run'}", "--no-python", "/bin/true"])
    assert second.wait() == 11
    assert (
        f"error[locked]: {client.folder / 'run'} is in use by another job, pid {client.process.pid} of " in second.err
    )


REFUSED = """
import os, time
from pathlib import Path
from ckptrt.wire import connect

def wait(name):
    while not Path(name).exists():
        time.sleep(0.01)

rank = int(os.environ["RANK"])
agent = connect(os.environ["CKPTRT_AGENT_SOCKET"], 30.0)
for message in (
    {"op": "hello", "rank": rank, "pid": os.getpid(), "incarnation": 0},
    {"op": "open_run", "url": os.environ["TEST_URL"], "options": {}, "world_size": 2},
):
    if rank and message["op"] == "open_run":
        wait("0")
    agent.send(message)
    answer = agent.receive()[0]
Path(str(rank)).touch()
wait("1")
raise SystemExit(answer["code"])
"""


def test_a_refusal_is_said_once_for_all_ranks(client: Client, tmp_path: Path) -> None:
    """The second rank asks when the first has had its answer."""
    client.ready(0)
    url = str(client.folder / "run")
    second = Launch(tmp_path, ["--nproc-per-node=2", "train.py"], script=REFUSED, environ={"TEST_URL": url})
    assert second.wait() == 11, second.err
    assert second.err.count(f"error[locked]: {url} is in use by another job") == 1


def test_nobody_outlives_a_killed_launcher(client: Client) -> None:
    client.ready(0)
    below = descendants(client.process.pid)
    assert persister_of(client) in below
    assert len(below) >= 5  # zygote, two workers, etcd, persister
    client.process.kill()
    client.wait()
    eventually(lambda: not [pid for pid in below if alive(pid)], "an end of all processes", timeout_s=2.0)


SHELL = ["--no-python", "/bin/sh", "-c"]


@pytest.mark.parametrize(
    ("args", "code", "restarts", "says"),
    [
        (["--max-restarts=0", *SHELL, "exit 7"], 1, 0, "failure      rank 0 · exit 7 · no message on stderr\n"),
        ([*SHELL, "echo ModuleNotFoundError: no >&2; exit 1"], 1, 1, "the same error twice before the first step"),
        (["--max-restarts=2", *SHELL, "kill -9 $$$$"], 20, 2, "all 2 restarts are used up"),
        ([*SHELL, "exit 0"], 0, 0, "done         0 restarts, exit 0\n"),
        (["--no-python", "/no/such/program"], 1, 1, "/no/such/program can't be started: No such file or directory"),
        (["--ckpt-resume=latest", "--ckpt-dir=empty", *SHELL, "exit 0"], 5, 0, "error[no-checkpoint]:"),
        (["--ckpt-dir=/proc/nowhere", *SHELL, "exit 0"], 12, 0, "error[auth]:"),
    ],
    ids=["no restarts", "same error twice", "budget used up", "done", "no program", "nothing to resume", "no access"],
)
def test_how_it_ends(args: list[str], code: int, restarts: int, says: str, tmp_path: Path) -> None:
    launch = Launch(tmp_path, args)
    assert launch.wait() == code, launch.err
    assert len(launch.events("restart")) == restarts
    assert says in launch.err


def test_wrong_usage_starts_nothing(tmp_path: Path) -> None:
    launch = Launch(tmp_path, ["--nproc-per-node=none", "train.py"])
    assert launch.wait() == 2
    assert launch.err.startswith("error[usage]: --nproc-per-node=none: ")
    launch = Launch(tmp_path, ["--nproc-per-node=2", "trian.py"])
    assert launch.wait() == 2
    assert launch.err.startswith(f"error[usage]: there is no trian.py in {tmp_path}\n")
    assert "failure" not in launch.err


def test_more_than_one_node_without_etcd_is_torch_s_own_business(tmp_path: Path) -> None:
    script = "import os\nprint(os.environ['TORCHELASTIC_USE_AGENT_STORE'], os.environ['CKPTRT_DIR'], flush=True)\n"
    launch = Launch(
        tmp_path,
        ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=x",
         "--rdzv-conf=last_call_timeout=1", "--ckpt-dir=/some/run", "train.py"],
        script=script,
    )  # fmt: skip
    assert launch.wait() == 0, launch.err
    assert launch.out.split() == ["False", "/some/run"]
    assert "names no etcd for them: torch's own elastic agent runs this job" in launch.err
