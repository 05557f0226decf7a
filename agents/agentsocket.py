"""The agent's Unix socket for its workers, and the arenas that outlive them.

Requests of one connection are answered in order; a connection says `hello` first. One-way messages get no answer.

    hello            rank, pid, incarnation                      -> ok  stacks (a path)
    open_run         url, local_dir, options, world_size         -> run  incarnation, resume | error
    arena            rank, size_bytes                            -> arena  created, + one memfd
    holdings                                                     -> holdings  ranks, + one memfd each
    persister                                                    -> persister  path
    release_retired                                              one-way
    drain_reply      step, target, taken                         -> ok
    drain_arrived    step                                        -> drain_word  end
    phase            name, at_s, step                            one-way
    committed        step                                        one-way

Without having been asked the agent says `drain step`: all ranks shall end with that step, if all of them take it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckptrt.errors import Error
from ckptrt.storage.tiered import RunPlace
from ckptrt.wire import Channel, Message, listen

__all__ = ["AgentServer", "ArenaTable", "Desk", "Reply", "error_reply"]

_log = logging.getLogger(__name__)
_MESSAGES_PER_TURN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer; its descriptors stay with whoever made it."""

    message: Message
    fds: tuple[int, ...] = ()


class Desk(Protocol):
    """Who answers what the server itself can't. rank is -1 before `hello`."""

    def open_run(self, place: RunPlace, world_size: int, answer: Callable[[Message], None]) -> None:
        """Open the run; `answer` is called once, now or later."""
        ...

    def persister_path(self) -> str: ...

    def stacks_file(self, rank: int) -> str:
        """Where a worker writes its stacks when it is asked to by a signal."""
        ...

    def drain_replied(self, rank: int, step: int, target: int, taken: bool) -> None: ...

    def drain_arrived(self, rank: int, step: int, answer: Callable[[Message], None]) -> None:
        """A rank has done the step that it took; `answer` is called once, now or later."""
        ...

    def phase(self, rank: int, name: str, at_s: float, step: int | None) -> None: ...

    def committed(self, step: int) -> None: ...


def error_reply(error: Error) -> Message:
    """An error as a message; its class is told by `code`."""
    return {"op": "error", "code": error.code, "what": error.what, "safe": error.safe, "hint": error.hint}


class ArenaTable:
    """One memfd for each rank, kept across restarts of the workers; replaced ones are kept until released."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int]] = {}  # rank -> fd, size
        self._retired: list[tuple[int, int]] = []  # rank, fd

    def get(self, rank: int, size_bytes: int) -> tuple[int, bool]:
        """The rank's memfd of that size, and whether it is new. Raises OSError when there is no memory for it."""
        held = self._live.get(rank)
        if held is not None and held[1] == size_bytes:
            return held[0], False
        fd = os.memfd_create(f"ckptrt-arena-r{rank}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
        if held is not None:
            self._retired.append((rank, held[0]))
        self._live[rank] = (fd, size_bytes)
        return fd, True

    def holdings(self) -> list[tuple[int, int]]:
        """(rank, fd) of every arena: live ones by rank, then retired ones, newest first."""
        return [(rank, fd) for rank, (fd, _size) in sorted(self._live.items())] + self._retired[::-1]

    def keep(self, ranks: range) -> None:
        """Ranks that live elsewhere from now on need theirs for a restore at most."""
        for rank in [rank for rank in self._live if rank not in ranks]:
            self._retired.append((rank, self._live.pop(rank)[0]))

    def release_retired(self) -> None:
        for _rank, fd in self._retired:
            os.close(fd)
        self._retired.clear()

    def close(self) -> None:
        self.release_retired()
        for fd, _size in self._live.values():
            os.close(fd)
        self._live.clear()


@dataclass(slots=True)
class _Client:
    channel: Channel
    set_number: int
    rank: int = -1
    gone: bool = False


class AgentServer:
    """Serves the workers of one node from the supervisor's selector. A client that misbehaves is dropped, no more."""

    def __init__(self, path: str, desk: Desk, selector: selectors.BaseSelector) -> None:
        self.arenas = ArenaTable()
        self._desk = desk
        self._selector = selector
        self._listener = listen(path)
        self._listener.setblocking(False)
        self._clients: dict[int, _Client] = {}
        self._set_number = 0
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def begin_set(self, ranks: range) -> None:
        """New workers of these ranks are about to start: what older ones still say about phases is history."""
        self._set_number += 1
        self.arenas.keep(ranks)

    def broadcast(self, message: Message) -> None:
        """Say something to every rank of the present set."""
        for client in list(self._clients.values()):
            if client.set_number == self._set_number and client.rank >= 0:
                self._send(client, Reply(message=message))

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.unregister(self._listener)
        self._listener.close()
        self.arenas.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _address = self._listener.accept()
            self._add(sock)

    def _add(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = _Client(Channel(sock), self._set_number)
        self._clients[client.channel.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(client))

    def _drop(self, client: _Client) -> None:
        if client.gone:
            return
        client.gone = True
        self._clients.pop(client.channel.fileno(), None)
        self._selector.unregister(client.channel.sock)
        client.channel.close()

    def _read(self, client: _Client) -> None:
        """Take the messages that are there. A torn one stays in the channel's buffer until the rest comes."""
        for _ in range(_MESSAGES_PER_TURN):  # the selector calls again if there are more
            if client.gone:
                return
            try:
                received = client.channel.receive()
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                _log.info("event=client_dropped rank=%d: %s", client.rank, error)
                received = None
            if received is None:
                self._drop(client)
                return
            message, fds = received
            for fd in fds:  # no request carries any
                os.close(fd)
            self._serve(client, message)

    def _serve(self, client: _Client, message: Message) -> None:
        try:
            reply = self._answer(client, message)
        except Error as error:
            reply = Reply(message=error_reply(error))
        except OSError as error:
            what = f"the agent could not serve {message.get('op')!r}: {error.strerror or error}"
            reply = Reply(message=error_reply(Error(what)))
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("event=bad_request rank=%d message=%r: %r", client.rank, message, error)
            self._drop(client)
            return
        if reply is not None:
            self._send(client, reply)

    def _answer(self, client: _Client, message: Message) -> Reply | None:
        op = message["op"]
        if op == "hello":
            client.rank = int(message["rank"])
            return Reply(message={"op": "ok", "stacks": self._desk.stacks_file(client.rank)})
        if op == "open_run":
            self._desk.open_run(
                RunPlace.from_data(message),
                int(message["world_size"]),
                lambda answer: self._send(client, Reply(message=answer)),
            )
            return None
        if op == "arena":
            fd, created = self.arenas.get(int(message["rank"]), int(message["size_bytes"]))
            return Reply(message={"op": "arena", "created": created}, fds=(fd,))
        if op == "holdings":
            held = self.arenas.holdings()
            return Reply(
                message={"op": "holdings", "ranks": [rank for rank, _ in held]}, fds=tuple(fd for _, fd in held)
            )
        if op == "persister":
            return Reply(message={"op": "persister", "path": self._desk.persister_path()})
        if op in ("drain_reply", "drain_arrived"):
            return self._answer_drain(client, op, message)
        self._note(client, op, message)
        return None

    def _answer_drain(self, client: _Client, op: str, message: Message) -> Reply | None:
        step = int(message["step"])
        if op == "drain_arrived":
            self._desk.drain_arrived(client.rank, step, lambda answer: self._send(client, Reply(message=answer)))
            return None
        self._desk.drain_replied(client.rank, step, int(message["target"]), bool(message["taken"]))
        return Reply(message={"op": "ok"})

    def _note(self, client: _Client, op: str, message: Message) -> None:
        if op == "release_retired":
            self.arenas.release_retired()
        elif op == "committed":
            self._desk.committed(int(message["step"]))
        elif op == "phase":
            step = message.get("step")
            if client.set_number == self._set_number:
                at_s = float(message["at_s"])
                self._desk.phase(client.rank, str(message["name"]), at_s, None if step is None else int(step))
        else:
            raise ValueError(f"there is no request {op!r}")

    def _send(self, client: _Client, reply: Reply) -> None:
        if client.gone:
            return
        try:
            client.channel.send(reply.message, reply.fds)
        except OSError as error:  # gone, or it doesn't read what it asked for
            _log.info("event=client_dropped rank=%d: %s", client.rank, error)
            self._drop(client)
