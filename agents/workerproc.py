"""What a forked worker does between the fork and the user's first line: become the process that `python script` is.

Everything that a cold start would have given the script is set here: its environment, directory, streams, session,
argv, sys.path[0] and a `__main__` module of its own. It ends as the interpreter would end it: threads joined, atexit
run, the status of SystemExit kept, a traceback and status 1 for any other exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import operator
import os
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from typing import Any, Literal

from ckptrt import env
from ckptrt.agents.children import die_with_parent, name_process

__all__ = ["ForkRequest", "Kind", "can_run_forked", "enter", "run"]

Kind = Literal["script", "module", "path", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """One worker: `python target args` (script), `python -m target args` (module), or runpy.run_path (path)."""

    kind: Kind
    target: str
    args: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    name: str = ""

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_message(message: dict[str, Any]) -> ForkRequest:
        return ForkRequest(
            kind=message["kind"],
            target=message["target"],
            args=tuple(message["args"]),
            env=message["env"],
            cwd=message["cwd"],
            name=message["name"],
        )


def can_run_forked(kind: Kind, target: str, cwd: str) -> str:
    """Why a program has to be started cold, or an empty text when a forked interpreter can run it."""
    if kind == "command":
        return "it isn't run by Python"
    if kind == "module":
        return ""
    path = os.path.join(cwd, target)
    if os.path.isdir(path) or target.endswith(".pyc") or zipfile.is_zipfile(path):
        return f"{target} isn't a source file"
    return ""


def enter(request: ForkRequest, streams: tuple[int, int, int], parent_pid: int) -> None:
    """Turn a fresh fork into the worker's process. streams: descriptors of its stdin, stdout and stderr."""
    os.setsid()
    die_with_parent(parent_pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in streams:
        os.close(fd)
    name_process(request.name)
    env.replace(request.env)
    os.chdir(request.cwd)
    faulthandler.enable()
    _reseed()
    _size_thread_pools(request.env)


def run(request: ForkRequest) -> None:
    """Run the program as `__main__`. To be called last, from the top of the process; may raise SystemExit."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv = [request.target, *request.args]
    try:
        if request.kind == "module":
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(request.target)  # type: ignore[attr-defined]
        elif request.kind == "path":
            runpy.run_path(request.target, run_name="__main__")
        else:
            _run_script(main, request.target)
    except Exception as error:  # noqa: BLE001 - the interpreter catches what the program lets through
        _fail(error)


def _run_script(main: types.ModuleType, target: str) -> None:
    path = os.path.abspath(target)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__annotations__ = {}
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - this is the user's program


def _fail(error: Exception) -> None:
    """Do what the interpreter does with an exception that nobody caught, without the frames of this module."""
    at_s = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    _record(error, at_s)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    finally:
        sys.exit(1)


def _record(error: Exception, at_s: float) -> None:
    """Leave torch elastic's error file, and in it the moment: that tells the cause from what it led to."""
    path = env.error_file()
    if not path:
        return
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        extra = {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(os.fstat(file.fileno()).st_mtime)),  # wall clock, for people
            "monotonic_s": at_s,
        }
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


def _reseed() -> None:
    """Give this process its own seeds, as a cold start does. Python reseeds `random` after a fork by itself."""
    for module, reseed in (("numpy", "random.seed"), ("torch", "default_generator.seed")):
        if module in sys.modules:
            operator.attrgetter(reseed)(sys.modules[module])()


def _size_thread_pools(environ: dict[str, str]) -> None:
    """Let OpenBLAS have the threads of a cold start; the parent kept it at one to be able to fork."""
    wanted = environ.get("OPENBLAS_NUM_THREADS") or environ.get("OMP_NUM_THREADS")
    count = int(wanted) if wanted and wanted.isdigit() else len(os.sched_getaffinity(0))
    if count <= 1 or "numpy" not in sys.modules:
        return
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for symbol in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads",
        ):
            if hasattr(library, symbol):
                getattr(library, symbol)(count)
                break
