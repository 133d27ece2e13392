"""Checks made before a request is read: its host, its API key and its size."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce_core.server.settings import ServerSettings
from triforce_core.server.wording.anthropic import anthropic_error
from triforce_core.server.wording.ollama import ollama_error
from triforce_core.server.wording.wording import refusal

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
# Open without a key: the health check, and the page that asks for the key.
_OPEN = ("/", "/health")
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class BodyTooLargeError(Exception):
    """The body is larger than its header declared, or larger than the limit."""


class Guard:
    """Middleware that rejects requests without the API key and requests that are too large.

    Without an API key, it also rejects requests whose Host header does not name this machine. This
    stops pages on other sites from reaching the server through a user's browser.

    Ollama's clients may send JSON without saying so. A browser says where its page came from, and
    a page of another site could not send JSON: from browsers, the type stays as it is.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refused(scope["path"], Headers(scope=scope))
        if answer is not None:
            await answer(scope, receive, send)
            return
        if scope["path"].startswith(OLLAMA_PATH) and "origin" not in Headers(scope=scope):
            scope = {**scope, "headers": _as_json(scope["headers"])}
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._settings.max_body:
                raise BodyTooLargeError
            return message

        await self._app(scope, counted, send)

    def _refused(self, path: str, headers: Headers) -> JSONResponse | None:
        settings = self._settings
        if settings.api_key is None:
            host = headers.get("host", "")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name.lower() not in _LOCAL and name != settings.host:
                return _answer(path, 403, f"the Host header does not name this machine: {host!r}")
        elif path not in _OPEN and not self._has_key(headers):
            return _answer(
                path, 401, "the API key is missing or wrong: send Authorization: Bearer KEY"
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return _answer(path, 400, f"content-length {length!r} is not a number")
        if int(length) > settings.max_body:
            return too_large(path, settings)
        return None

    def _has_key(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        # The second header is that of Anthropic's clients.
        given = key if kind.lower() == "bearer" else headers.get("x-api-key", "")
        wanted = (self._settings.api_key or "").encode()
        return hmac.compare_digest(given.strip().encode(), wanted)


def _as_json(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    return [*kept, (b"content-type", b"application/json")]


def too_large(path: str, settings: ServerSettings) -> JSONResponse:
    """Return the answer to a body that is too large. path: the request's"""
    return _answer(
        path, 413, f"the body is larger than the {settings.max_body} bytes that this server takes"
    )


def in_form(path: str, error: dict[str, Any]) -> dict[str, Any]:
    """Return an error body in the form of the API that a path belongs to. error: in OpenAI's"""
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_error(error)
    return ollama_error(error) if path.startswith(OLLAMA_PATH) else error


def _answer(path: str, status: int, message: str) -> JSONResponse:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    code = {403: "unknown_host", 413: "request_too_large"}.get(status)
    return JSONResponse(in_form(path, refusal(message, kind, code)), status)
