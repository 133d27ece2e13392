"""The leader's door: only those who know its key come in, and strangers cost nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from triforce_core.parallel.wire import Door, knock


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1")
    yield made
    made.close()


def visit(door: Door, sent: bytes) -> socket.socket:
    """A visitor who has sent all that it will send."""
    host, port, _ = door.address.split()
    caller = socket.create_connection((host, int(port)))
    caller.sendall(sent)
    caller.shutdown(socket.SHUT_WR)
    return caller


def greeting(door: Door) -> bytes:
    """What a rank sends behind its key, as it goes over the network."""
    _, _, key = door.address.split()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1 {listening.getsockname()[1]} {key}"
        knocking = threading.Thread(target=lambda: knock(address, 1, "commands").close())
        knocking.start()
        other, _ = listening.accept()
        with other:
            sent = b""
            while part := other.recv(1 << 16):
                sent += part
        knocking.join()
    return sent[len(bytes.fromhex(key)) :]


def test_a_rank_with_the_key_comes_in_by_its_name(door) -> None:
    key = bytes.fromhex(door.address.split()[2])
    with visit(door, key + greeting(door)):
        rank, purpose, wire = door.open(10)
        wire.close()
    assert (rank, purpose) == (1, "commands")


@pytest.mark.parametrize("change", ["first", "last", "zeros", "short", "none"])
def test_a_stranger_does_not_come_in(door, change: str) -> None:
    key = bytes.fromhex(door.address.split()[2])
    sent = {
        "first": bytes([key[0] ^ 1]) + key[1:],
        "last": key[:-1] + bytes([key[-1] ^ 1]),
        "zeros": bytes(len(key)),
        "short": key[:-1],
        "none": b"",
    }[change]
    with visit(door, sent + (greeting(door) if len(sent) == len(key) else b"")):
        assert door.open(10) is None
    # The next one does.
    with visit(door, key + greeting(door)):
        rank, _, wire = door.open(10)
        wire.close()
    assert rank == 1
