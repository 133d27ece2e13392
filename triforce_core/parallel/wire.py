"""Messages between two ranks, in order, over a connection that says when the other one is gone."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from offload.errors import RankError

_KEY_BYTES = 32


class Gone(Exception):
    """Whoever is at the other end is not there any more."""


class LostError(RankError):
    """A call to the other ranks failed, because one of them did or the way to it."""


class Wire:
    """One end of a connection. Used by one thread, but for `cut`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        # A message is small and somebody waits for it.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        """Raises Gone."""
        with _noticing():
            self._connection.send(message)

    def receive(self) -> Any:
        """Raises Gone."""
        with _noticing():
            return self._connection.recv()

    def send_tensor(self, tensor: torch.Tensor | None) -> None:
        """One of the host, or None. Raises Gone."""
        if tensor is None:
            self.send(None)
            return
        tensor = tensor.contiguous()
        self.send((tensor.shape, tensor.dtype))
        with _noticing():
            self._connection.send_bytes(_bytes(tensor))

    def receive_tensor(self) -> torch.Tensor | None:
        """What `send_tensor` sent. Raises Gone."""
        about = self.receive()
        if about is None:
            return None
        shape, dtype = about
        tensor = torch.empty(shape, dtype=dtype)
        with _noticing():
            got = self._connection.recv_bytes_into(_bytes(tensor))
        if got != tensor.nbytes:
            raise LostError(f"{got} bytes came of a tensor of {tensor.nbytes}")
        return tensor

    def waits(self, seconds: float) -> bool:
        """Whether there is something to receive within so long, the other's end included.

        Raises Gone.
        """
        with _noticing():
            return self._connection.poll(seconds)

    def cut(self) -> None:
        """Ends it for both, and for whoever is waiting here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._socket.close()
        self._connection.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).flatten().numpy())


@contextmanager
def _noticing() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
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
        """The next one's rank and purpose, and its wire; None if nobody came within so long."""
        self._server.settimeout(seconds)
        try:
            visitor, _ = self._server.accept()
        except TimeoutError:
            return None
        with visitor:
            visitor.settimeout(seconds)
            # Nothing is unpickled for a stranger.
            with suppress(OSError, Gone):
                key = visitor.recv(_KEY_BYTES, socket.MSG_WAITALL)
                if secrets.compare_digest(key, self._key):
                    visitor.settimeout(None)
                    wire = Wire(Connection(visitor.detach()))
                    return *wire.receive(), wire
        return None

    def close(self) -> None:
        self._server.close()


def knock(address: str, rank: int, purpose: str) -> Wire:
    """Opens a wire to a Door. Raises OSError."""
    host, port, key = address.split()
    caller = socket.create_connection((host, int(port)))
    caller.sendall(bytes.fromhex(key))
    wire = Wire(Connection(caller.detach()))
    wire.send((rank, purpose))
    return wire
