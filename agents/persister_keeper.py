"""Keeps the node's persister alive: starts it, starts it again when it dies, and lets it finish at the end.

It isn't bound to this process's life: when the control descriptor ends, it finishes what it was given and exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from ckptrt.clock import Clock, SystemClock

__all__ = ["PersisterKeeper"]

_MODULE = "ckptrt.storage.persister"
_STEADY_S = 5.0  # one that lived so long is started again at once
_DELAY_MAX_S = 10.0


class PersisterKeeper:
    """say: takes a line for the user. log_path: the persister's own output, appended."""

    def __init__(
        self,
        socket_path: str,
        *,
        environ: dict[str, str],
        say: Callable[[str], None],
        log_path: str | None = None,
        clock: Clock | None = None,
        command: tuple[str, ...] = (sys.executable, "-m", _MODULE),
    ) -> None:
        self.path = socket_path
        self._environ = environ
        self._say = say
        self._log_path = log_path
        self._clock = clock or SystemClock()
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._control = -1
        self._started_s = 0.0
        self._delay_s = 0.0
        self._start_at_s: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def ensure(self) -> None:
        """Start it unless it runs or is about to be started again."""
        if self._process is None and self._start_at_s is None:
            self._start()

    def check(self) -> None:
        """To be called at SIGCHLD and when `wake_in_s` is over."""
        if self._process is not None and self._process.poll() is not None:
            self._died(self._process.returncode)
        if self._start_at_s is not None and self._clock.monotonic_s() >= self._start_at_s:
            self._start()

    def wake_in_s(self) -> float | None:
        return None if self._start_at_s is None else max(0.0, self._start_at_s - self._clock.monotonic_s())

    def close(self, timeout_s: float) -> None:
        """Let it finish and wait for it; one that takes longer is left to end by itself."""
        self._start_at_s = None
        process, self._process = self._process, None
        if process is None:
            return
        self._hang_up()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._say(
                f"{'warn':<13}persister (pid {process.pid}) still writes after {timeout_s:.0f} s;"
                " it goes on and ends by itself"
            )

    def _start(self) -> None:
        self._start_at_s = None
        mine, theirs = os.pipe()[::-1]
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if self._log_path else None
        try:
            self._process = subprocess.Popen(
                [*self._command, "--socket", self.path, "--control-fd", str(theirs)],
                env=self._environ,
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
            if log is not None:
                os.close(log)
        self._control = mine
        self._started_s = self._clock.monotonic_s()

    def _died(self, code: int) -> None:
        self._process = None
        self._hang_up()
        now_s = self._clock.monotonic_s()
        steady = now_s - self._started_s >= _STEADY_S
        self._delay_s = 0.0 if steady else self._delay_s  # the first early death is answered at once too
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        when = "at once" if self._delay_s == 0.0 else f"in {self._delay_s:.1f} s"
        self._say(f"{'warn':<13}persister died ({how}), started again {when}; training goes on{self._last_words()}")
        self._start_at_s = now_s + self._delay_s
        self._delay_s = min(_DELAY_MAX_S, max(0.2, 2 * self._delay_s))

    def _hang_up(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _last_words(self) -> str:
        lines: list[str] = []
        if self._log_path:
            with contextlib.suppress(OSError), open(self._log_path, encoding="utf-8", errors="replace") as file:
                lines = file.read()[-2000:].strip().splitlines()
        return f"\n{'':<13}{lines[-1]}" if lines else ""
