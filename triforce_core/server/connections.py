"""Connection limits: a maximum number of connections, and deadlines for slow or idle clients."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Connections beyond this number are closed immediately.
MOST_CONNECTIONS = 512
# Deadlines for the request line and headers, and then for the body.
HEAD_SECONDS = 10.0
BODY_SECONDS = 60.0
# How long an idle connection stays open for the next request.
_KEEP_ALIVE_SECONDS = 5
_MOST_HEAD_BYTES = 64 << 10


class Connection(H11Protocol):
    """A uvicorn connection that is closed when a client takes too long to send its request.

    The deadline for the head starts when the connection is made, or with the first byte of a later
    request. The deadline for the body starts once the head has arrived.
    """

    _waits_for: str | None = None
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See Protocol.connection_made."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for("head")

    def data_received(self, data: bytes) -> None:
        """See Protocol.data_received."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """See H11Protocol.on_response_complete."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """See Protocol.connection_lost."""
        super().connection_lost(exc)
        self._wait_for(None)

    def _look(self) -> None:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._wait_for("body")
        elif state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._wait_for("head")
        else:
            self._wait_for(None)

    def _wait_for(self, what: str | None) -> None:
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if what is not None:
            seconds = HEAD_SECONDS if what == "head" else BODY_SECONDS
            self._deadline = self.loop.call_later(seconds, self.transport.abort)


def uvicorn_config(app: Any, host: str, port: int, **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of this server. options: further uvicorn options"""
    return uvicorn.Config(
        app,
        host,
        port,
        http=Connection,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
        **options,
    )
