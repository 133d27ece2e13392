"""The routes of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from triforce_core.server.answers import ClientGoneError
from triforce_core.server.asking import Asking
from triforce_core.server.errors import NotReadyError, QueueFullError, refused
from triforce_core.server.guard import BodyTooLargeError, Guard, in_form, too_large
from triforce_core.server.messages.sentences import sentence
from triforce_core.server.metrics import Metrics
from triforce_core.server.page_html import page_html
from triforce_core.server.routes.anthropic import anthropic_routes
from triforce_core.server.routes.ollama import ollama_routes
from triforce_core.server.routes.openai import openai_routes
from triforce_core.server.settings import ServerSettings
from triforce_core.server.wording.model_files import ModelFiles
from triforce_core.server.wording.wording import refusal
from triforce_core.server.worker import Worker
from triforce_offload.errors import TriforceError

_RETRY_SECONDS = "5"
# Characters of a line of the log.
_LONGEST_LINE = 500
# The page loads nothing but itself and talks to this server only.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(
    worker: Worker,
    settings: ServerSettings,
    metrics: Metrics,
    files: ModelFiles,
    log: Callable[[str], None] = lambda line: None,
) -> FastAPI:
    """Return the app that serves a worker. The app starts and closes the worker.

    files: what clients learn about the files
    log: called with a line for each request that is refused, and why
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(title="triforce-offload", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, settings=settings)
    if settings.origins:
        # Outside of the guard: what a browser asks first has no key, and refusals are read too.
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        allowed["expose_headers"] = ["Retry-After"]
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, **allowed)
    _add_errors(app, settings, metrics, log)
    _add_health(app, worker, settings, metrics)
    asking = Asking(worker, settings)
    app.include_router(openai_routes(asking))
    app.include_router(anthropic_routes(asking))
    app.include_router(ollama_routes(asking, files))
    return app


def _add_health(app: FastAPI, worker: Worker, settings: ServerSettings, metrics: Metrics) -> None:
    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(page_html(), headers={"Content-Security-Policy": _PAGE_POLICY})

    @app.get("/health")
    async def health() -> JSONResponse:
        about: dict[str, Any] = {"status": "ok" if worker.state == "ready" else worker.state}
        if worker.state == "loading":
            about["progress"] = worker.progress
        return JSONResponse(about, 200 if worker.state == "ready" else 503)

    @app.get("/metrics")
    async def measured() -> Response:
        return Response(metrics.text(worker), media_type="text/plain; version=0.0.4")


def _in_log(line: str) -> str:
    """Return a line of bounded length without line breaks or escapes, which a client may send."""
    return "".join(each if each.isprintable() else " " for each in line[:_LONGEST_LINE])


def _add_errors(
    app: FastAPI, settings: ServerSettings, metrics: Metrics, log: Callable[[str], None]
) -> None:
    def said(
        request: Request, content: dict[str, Any], status: int, headers: Any = None
    ) -> JSONResponse:
        """Return an error in the format of the route's API. Count and log it."""
        metrics.refused(status)
        log(_in_log(f"refused: {request.url.path}, {status}: {content['error']['message']}"))
        return JSONResponse(in_form(request.url.path, content), status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        message, where = sentence(error.errors()[0])
        return said(request, refusal(message, "invalid_request_error", None, where), 400)

    @app.exception_handler(ValidationError)
    async def inconsistent(request: Request, error: ValidationError) -> JSONResponse:
        # A request that is valid in its own API, and not in the one that it is translated to.
        message, where = sentence(error.errors()[0])
        return said(request, refusal(message, "invalid_request_error", None, where), 400)

    @app.exception_handler(BodyTooLargeError)
    async def large(request: Request, error: BodyTooLargeError) -> JSONResponse:
        return too_large(request.url.path, settings)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        # nginx uses status 499 for a client that has left; nobody reads the answer.
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI reports a body that grows too large while it is read as a parsing error.
        if isinstance(error.__cause__, BodyTooLargeError):
            return too_large(request.url.path, settings)
        # It also reports a body that is not UTF-8, or that is nested too deeply, with status 400.
        unreadable = error.status_code == 400 and error.__cause__ is not None
        message = "the body cannot be read as JSON in UTF-8" if unreadable else str(error.detail)
        content = refusal(message, "invalid_request_error")
        return said(request, content, error.status_code, error.headers)

    @app.exception_handler(TriforceError)
    async def typed(request: Request, error: TriforceError) -> JSONResponse:
        status, content = refused(error)
        busy = isinstance(error, (QueueFullError, NotReadyError))
        return said(request, content, status, {"Retry-After": _RETRY_SECONDS} if busy else None)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        # A fault of this program. It is raised again after the answer, for the log.
        return said(request, *reversed(refused(error)))
