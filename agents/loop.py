"""The main thread's loop: waits in one selector for signals, sockets, and what the helper thread has done."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ckptrt.agents.mailbox import Mailbox

__all__ = ["Loop"]


class Loop:
    """To be made and used on the main thread. on_signal: what to do at a signal; nothing, while nobody has said."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.on_signal: Callable[[int], None] = lambda signum: None
        self.signalled: set[int] = set()  # the signals that have come
        self._mailbox = Mailbox()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="ckptrt-io")
        self.selector.register(self._mailbox, selectors.EVENT_READ, self._read_mailbox)

    def take_signals(self, signums: Sequence[int]) -> None:
        """Handle these signals in this loop, and those that tell of children."""
        for signum in set(signums):
            # nohup's choice is kept; every other signal of the list is ours, as with torchrun.
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._mailbox.wake_fd(), warn_on_full_buffer=False)

    def turn(self, waits_s: Iterable[float | None]) -> None:
        """Wait for the shortest of these times at most, and serve what has come."""
        wait_s = min((wait_s for wait_s in waits_s if wait_s is not None), default=None)
        for key, _mask in self.selector.select(wait_s):
            key.data()

    def post(self, call: Callable[[], None]) -> None:
        """Have it called by the loop; from any thread."""
        self._mailbox.post(call)

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        """Have the helper thread do it; an error that it didn't expect is raised in the loop, and ends the job."""
        self._helper.submit(call, *args).add_done_callback(self._helped)

    def finish_submitted(self) -> None:
        """Wait for what the helper thread has been given; it gets no more."""
        self._helper.shutdown(wait=True)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self.finish_submitted()
        self.selector.close()
        self._mailbox.close()

    def _helped(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self._mailbox.post(future.result)

    def _read_mailbox(self) -> None:
        signums, calls = self._mailbox.take()
        for signum in signums:
            self.signalled.add(signum)
            self.on_signal(signum)
        for call in calls:
            call()
