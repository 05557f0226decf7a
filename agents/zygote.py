"""The warm zygote: a process that has torch and the user's modules imported and forks a worker when asked to.

    python -c 'from ckptrt.agents import zygote; zygote.main()' FD        with a Unix socket as descriptor FD

It speaks ckptrt.wire with the agent that started it, and dies with it; its workers die with it.

    agent   preload   modules, path                          import more, with `path` in front of sys.path
            fork      ticket, request + stdin, stdout, stderr
            signal    pids, signum                            to the whole group of each
    zygote  ready     took_s, failed                          {module: why} of what could not be imported
            preloaded failed
            forked    ticket, pid   | refused  ticket, why
            exited    pid, code, at_s                         at once, without a poll

A process with more than one thread can't be forked safely, nor one that has touched a GPU: then it refuses and says
which import did it. It is single-threaded, and returns in the child up to its caller, so that the worker's stack holds
nothing of the zygote.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time

from ckptrt import env
from ckptrt.agents.children import ChildTable, die_with_parent, name_process
from ckptrt.agents.workerproc import ForkRequest, enter, run
from ckptrt.wire import Channel, Message

__all__ = ["DEFAULT_MODULES", "Zygote", "main"]

# What a training script pays for before its first step: DDP and AdamW pull torch._dynamo, FSDP2 the tensor package.
DEFAULT_MODULES = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch._dynamo", "torch.utils.data", "ckptrt.starting",
)  # fmt: skip

# While importing: OpenBLAS must not start its threads, and asking whether there is a GPU must not create a context.
_QUIET = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Zygote:
    """Serves one agent over one channel; `serve` returns a request in each child and None in the zygote itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children = ChildTable()
        self._selector = selectors.DefaultSelector()
        self._blocker = ""

    def serve(self) -> ForkRequest | None:
        """Import, tell that we are ready, then fork until the agent hangs up."""
        wake = self._watch_children()
        began_s = time.monotonic()
        failed = self._import(DEFAULT_MODULES)
        gc.collect()
        gc.freeze()  # what is imported stays out of the children's collections, and their pages stay shared
        self._channel.send({"op": "ready", "took_s": time.monotonic() - began_s, "failed": failed})
        self._selector.register(self._channel, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if wake in ready:
                wake.recv(4096)
                self._report_exits()
            if self._channel not in ready:
                continue
            received = self._channel.receive()
            if received is None:
                return None
            request = self._handle(*received)
            if request is not None:
                wake.close()
                return request

    def _watch_children(self) -> socket.socket:
        """A socket that gets a byte at every SIGCHLD."""
        wake, sink = socket.socketpair()
        wake.setblocking(False)
        sink.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(sink.detach(), warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ)
        return wake

    def _handle(self, message: Message, fds: tuple[int, ...]) -> ForkRequest | None:
        if message["op"] == "fork":
            return self._fork(message, fds)
        if message["op"] == "signal":
            for pid in message["pids"]:
                self._children.signal(pid, message["signum"])
        elif message["op"] == "preload":
            sys.path[:0] = message["path"]
            failed = self._import(message["modules"])
            del sys.path[: len(message["path"])]
            self._channel.send({"op": "preloaded", "failed": failed})
        return None

    def _fork(self, message: Message, fds: tuple[int, ...]) -> ForkRequest | None:
        blocker = self._blocker or _blocker()
        if blocker:
            for fd in fds:
                os.close(fd)
            self._channel.send({"op": "refused", "ticket": message["ticket"], "why": blocker})
            return None
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            request = ForkRequest.from_message(message["request"])
            self._selector.close()
            self._channel.close()
            stdin, stdout, stderr = fds
            enter(request, (stdin, stdout, stderr), zygote_pid)
            return request
        self._children.add(pid)
        for fd in fds:
            os.close(fd)
        self._channel.send({"op": "forked", "ticket": message["ticket"], "pid": pid})
        return None

    def _report_exits(self) -> None:
        at_s = time.monotonic()
        for pid, code in self._children.reap():
            self._channel.send({"op": "exited", "pid": pid, "code": code, "at_s": at_s})

    def _import(self, modules: tuple[str, ...] | list[str]) -> dict[str, str]:
        failed: dict[str, str] = {}
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever a foreign module raises, the script will meet it too
                failed[name] = f"{type(error).__name__}: {error}"
            if not self._blocker and (blocker := _blocker()):
                self._blocker = f"importing {name} left {blocker}"
        return failed


def _blocker() -> str:
    """Why this process must not be forked now, or an empty text."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = []
        for thread in threads:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
                names.append(file.read().strip())
        return f"{len(threads)} threads ({', '.join(names)})"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                return "a CUDA context"
    return ""


def main() -> None:
    """Be a zygote on the descriptor named by the last argument; in a worker, run its program and never return."""
    die_with_parent(int(sys.argv[-1]))
    name_process("ckptrt-zygote")
    channel = Channel(socket.socket(fileno=int(sys.argv[-2])))
    environ = env.launch_environ()
    env.replace({**environ, **_QUIET})
    try:
        request = Zygote(channel).serve()
    except (BrokenPipeError, ConnectionError):
        return  # the agent is gone; its death signal is on its way
    if request is not None:
        run(request)
