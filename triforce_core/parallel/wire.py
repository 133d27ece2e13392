"""Messages between two ranks, in order, over a connection that says when the other one is gone.

A message is JSON (`message.encoded`), a tensor its shape, its dtype and its bytes: nothing that
comes over the network is unpickled.
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
# What a stranger may send: a rank and what its wire is for are shorter.
_MOST_GREETING_BYTES = 1024
# Of a frame: what it is, and how many bytes follow.
_HEAD = struct.Struct("!cQ")
# A frame of so few bytes is sent at once with its head: somebody waits for it.
_SMALL_BYTES = 1 << 16


class Gone(Exception):
    """Whoever is at the other end is not there any more."""


class LostError(RankError):
    """A call to the other ranks failed, because one of them did or the way to it."""


class Wire:
    """One end of a connection. Used by one thread, but for `cut`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # A message is small and somebody waits for it.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        """One that `message.encoded` takes. Raises Gone."""
        self._send(MESSAGE, memoryview(encoded(message)))

    def receive(self, most_bytes: int = MOST_BYTES) -> Any:
        """What `send` sent. most_bytes: of a message that is taken.

        Raises Gone or DamagedMessageError.
        """
        return decoded(self.receive_bytes(self._head(MESSAGE, most_bytes)))

    def send_tensor(self, tensor: torch.Tensor | None) -> None:
        """One of the host, or None. Raises Gone."""
        if tensor is None:
            self.send(None)
            return
        tensor = tensor.contiguous()
        self.send(Sizes.of(tensor))
        self._send(TENSOR, _bytes(tensor))

    def receive_tensor(self) -> torch.Tensor | None:
        """What `send_tensor` sent. Raises Gone or DamagedMessageError."""
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
        """So many, whatever they are. Raises Gone."""
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def waits(self, seconds: float) -> bool:
        """Whether there is something to receive within so long, the other's end included.

        Raises Gone.
        """
        # select.select does not take descriptors beyond 1024.
        poll = select.poll()
        with _noticing():
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(seconds * 1000))

    def set_timeout(self, seconds: float | None) -> None:
        """Whoever sends or receives for longer finds that the other one is gone. None: never."""
        self._socket.settimeout(seconds)

    def cut(self) -> None:
        """Ends it for both, and for whoever is waiting here."""
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
        """The bytes of the frame that comes."""
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
        # A socket that was closed here has the descriptor -1, which is a ValueError to poll.
        raise Gone from error


class Door:
    """Where the other ranks knock: each opens wires, named by its rank and what they are for.

    address: what they need to know, to be told to nobody else
    """

    def __init__(self, host: str, *, everywhere: bool = False) -> None:
        """host: by which the others know this machine. everywhere: whether it listens on all of
        this machine's addresses, since that name may be of another one here. Raises OSError.
        """
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._server = socket.create_server(("" if everywhere else host, 0))
        self.address = f"{host} {self._server.getsockname()[1]} {self._key.hex()}"

    def open(self, seconds: float) -> tuple[int, str, Wire] | None:
        """The next one's rank and purpose, and its wire; None if nobody came within so long, or
        somebody who has not the key or does not say who it is.
        """
        self._server.settimeout(seconds)
        try:
            visitor, _ = self._server.accept()
        except TimeoutError:
            return None
        visitor.settimeout(seconds)
        wire = Wire(visitor)
        # Nothing that a stranger sends is looked at.
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
    """Opens a wire to a Door. Raises OSError."""
    host, port, key = address.split()
    caller = socket.create_connection((host, int(port)))
    caller.sendall(bytes.fromhex(key))
    wire = Wire(caller)
    wire.send((rank, purpose))
    return wire
