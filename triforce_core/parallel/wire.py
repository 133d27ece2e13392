"""Ordered messages between two ranks, over a connection that reports when the other one is gone.

A message is JSON (`message.encoded`); a tensor is its shape, its dtype and its bytes. Nothing from
the network is unpickled.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from triforce_core.parallel.message import (
    MESSAGE,
    MOST_BYTES,
    TENSOR,
    DamagedMessageError,
    Sizes,
    decoded,
    encoded,
)
from triforce_offload.errors import RankError

_KEY_BYTES = 32
# The limit for a visitor's greeting: a rank and the purpose of its wire are shorter.
_MOST_GREETING_BYTES = 1024
# The head of a frame: its kind, and the number of bytes that follow.
_HEAD = struct.Struct("!cQ")
# Frames up to this size are sent in one call with their head, for low latency.
_SMALL_BYTES = 1 << 16


class Gone(Exception):
    """The other end of the connection is gone."""


class LostError(RankError):
    """A collective failed because another rank, or the connection to it, was lost."""


class Wire:
    """One end of a connection. Only `cut` may be called from other threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Messages are small and the other rank waits for them.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        """Send a message that `message.encoded` accepts. Raises Gone."""
        self._send(MESSAGE, memoryview(encoded(message)))

    def receive(self, most_bytes: int = MOST_BYTES) -> Any:
        """Return the next message. most_bytes: the limit for its size

        Raises Gone or DamagedMessageError.
        """
        return decoded(self.receive_bytes(self._head(MESSAGE, most_bytes)))

    def send_tensor(self, tensor: torch.Tensor | None) -> None:
        """Send a tensor in host memory, or None. Raises Gone."""
        if tensor is None:
            self.send(None)
            return
        tensor = tensor.contiguous()
        self.send(Sizes.of(tensor))
        self._send(TENSOR, _bytes(tensor))

    def receive_tensor(self) -> torch.Tensor | None:
        """Return the tensor that `send_tensor` sent. Raises Gone or DamagedMessageError."""
        sizes = self.receive()
        if sizes is None:
            return None
        if not isinstance(sizes, Sizes):
            raise DamagedMessageError(f"a {type(sizes).__name__} came where a tensor was expected")
        size = self._head(TENSOR, sizes.nbytes)
        if size != sizes.nbytes:
            raise DamagedMessageError(f"{size} bytes came of a tensor of {sizes.nbytes}")
        tensor = torch.empty(sizes.shape, dtype=sizes.torch_dtype)
        self._fill(_bytes(tensor))
        return tensor

    def receive_bytes(self, size: int) -> bytearray:
        """Return exactly `size` bytes. Raises Gone."""
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def waits(self, seconds: float) -> bool:
        """Return whether data, or the end of the connection, arrives within `seconds`.

        Raises Gone.
        """
        # select.select does not support descriptors beyond 1024.
        poll = select.poll()
        with _noticing():
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(seconds * 1000))

    def set_timeout(self, seconds: float | None) -> None:
        """Set the seconds after which sending and receiving raise Gone. None: no limit"""
        self._socket.settimeout(seconds)

    def cut(self) -> None:
        """End the connection for both ranks, and wake a thread that waits here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._socket.close()

    def _send(self, kind: bytes, data: memoryview) -> None:
        head = _HEAD.pack(kind, data.nbytes)
        with _noticing():
            if data.nbytes <= _SMALL_BYTES:
                self._socket.sendall(head + bytes(data))
            else:
                self._socket.sendall(head)
                self._socket.sendall(data)

    def _head(self, expected: bytes, most_bytes: int) -> int:
        """Return the size of the next frame in bytes."""
        kind, size = _HEAD.unpack(self.receive_bytes(_HEAD.size))
        if kind != expected:
            raise DamagedMessageError(f"a frame of kind {kind!r} came where {expected!r} belongs")
        if size > most_bytes:
            raise DamagedMessageError(f"a message of {size} bytes is more than {most_bytes}")
        return size

    def _fill(self, data: memoryview) -> None:
        with _noticing():
            while data.nbytes:
                if not (count := self._socket.recv_into(data)):
                    raise EOFError
                data = data[count:]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


@contextmanager
def _noticing() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, ValueError) as error:
        # A socket that was closed here has descriptor -1, for which poll raises ValueError.
        raise Gone from error


class Door:
    """The listening end: the other ranks open wires here, each named by its rank and purpose.

    address: the address and key that the other ranks need; it is secret
    """

    def __init__(self, host: str, *, everywhere: bool = False) -> None:
        """host: the name by which the other ranks know this machine
        everywhere: whether to listen on all addresses of this machine, because the name may resolve
            differently here
        Raises OSError.
        """
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._server = socket.create_server(("" if everywhere else host, 0))
        self.address = f"{host} {self._server.getsockname()[1]} {self._key.hex()}"

    def open(self, seconds: float) -> tuple[int, str, Wire] | None:
        """Return the rank, the purpose and the wire of the next visitor.

        The result is None if nobody connects within `seconds`, or if the visitor lacks the key or a
        greeting.
        """
        self._server.settimeout(seconds)
        try:
            visitor, _ = self._server.accept()
        except TimeoutError:
            return None
        visitor.settimeout(seconds)
        wire = Wire(visitor)
        # Nothing is parsed before the key has been checked.
        with suppress(OSError, Gone, DamagedMessageError):
            key = wire.receive_bytes(_KEY_BYTES)
            if hmac.compare_digest(key, self._key):
                match wire.receive(_MOST_GREETING_BYTES):
                    case (int(rank), str(purpose)):
                        wire.set_timeout(None)
                        return rank, purpose, wire
        wire.close()
        return None

    def close(self) -> None:
        self._server.close()


def knock(address: str, rank: int, purpose: str) -> Wire:
    """Open a wire to a Door. Raises OSError."""
    host, port, key = address.split()
    caller = socket.create_connection((host, int(port)))
    caller.sendall(bytes.fromhex(key))
    wire = Wire(caller)
    wire.send((rank, purpose))
    return wire
