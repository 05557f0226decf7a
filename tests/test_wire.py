"""Messages between processes of one node: descriptors in any number, and a peer that has stopped reading."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from ckptrt import wire


@pytest.fixture
def pair() -> Iterator[tuple[wire.Channel, wire.Channel]]:
    ends = tuple(wire.Channel(sock) for sock in socket.socketpair())
    for end in ends:
        end.sock.settimeout(30)
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def _inodes(fds: tuple[int, ...]) -> list[int]:
    return [os.fstat(fd).st_ino for fd in fds]


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
def test_descriptors_in_any_number_arrive_in_order_with_their_own_message(
    pair: tuple[wire.Channel, wire.Channel], count: int
) -> None:
    ours, theirs = pair
    fds = tuple(os.memfd_create(f"arena-{number}") for number in range(count))
    last = os.memfd_create("last")
    try:
        ours.send({"ranks": list(range(count))}, fds)
        ours.send({"op": "next"}, (last,))
        received = theirs.receive()
        assert received is not None
        message, got = received
        assert message == {"ranks": list(range(count))}
        assert _inodes(got) == _inodes(fds)
        _close(got)
        received = theirs.receive()
        assert received is not None
        assert received[0] == {"op": "next"} and _inodes(received[1]) == _inodes((last,))
        _close(received[1])
    finally:
        _close((*fds, last))


def test_more_descriptors_than_bytes_can_carry_are_refused(pair: tuple[wire.Channel, wire.Channel]) -> None:
    with pytest.raises(ValueError, match="too many"):
        pair[0].send({}, (0,) * 1000)


def test_descriptors_that_the_reader_has_no_room_for_are_no_silent_loss(
    pair: tuple[wire.Channel, wire.Channel],
) -> None:
    ours, theirs = pair
    ours.send({"ranks": [0, 1, 2]}, (0, 1, 2))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(ConnectionError, match="descriptors"):
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_peer_that_reads_nothing_makes_messages_drop_and_never_wait(
    pair: tuple[wire.Channel, wire.Channel],
) -> None:
    ours, theirs = pair
    ours.sock.settimeout(None)
    sent: list[int] = []

    def send() -> None:
        number = 0
        while ours.send_or_drop({"op": "step", "step": number}):
            number += 1
        sent.append(number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(30)
    assert sent, "send_or_drop waits for a peer that reads nothing"
    for number in range(sent[0]):  # what was taken is whole, and nothing of the dropped one is there
        received = theirs.receive()
        assert received is not None and received[0]["step"] == number
    assert ours.send_or_drop({"op": "step", "step": -1})
    received = theirs.receive()
    assert received is not None and received[0]["step"] == -1
