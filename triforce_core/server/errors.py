"""Errors of the server, and the HTTP status of each error."""

from __future__ import annotations

from typing import Any

from triforce_core.server.wording.wording import refusal
from triforce_offload.errors import DoesNotFitError, TriforceError, UsageError


class QueueFullError(TriforceError):
    """The queue of waiting requests is full."""


class NotReadyError(TriforceError):
    """The model is loading, or the server is closing."""


class ContextLengthError(UsageError):
    """The prompt and its new tokens do not fit the context."""


class UnknownModelError(UsageError):
    """The requested model is not served here."""


class ThreadsError(UsageError):
    """A request wants the server to store its conversation."""


def refused(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the response body for an error."""
    message = str(error) or type(error).__name__
    if isinstance(error, QueueFullError):
        return 429, refusal(message, "rate_limit_error", "queue_full")
    if isinstance(error, NotReadyError):
        return 503, refusal(message, "server_error", "not_ready")
    if isinstance(error, UnknownModelError):
        return 404, refusal(message, "invalid_request_error", "model_not_found", "model")
    if isinstance(error, ContextLengthError):
        return 400, refusal(message, "invalid_request_error", "context_length_exceeded")
    if isinstance(error, ThreadsError):
        return 400, refusal(message, "invalid_request_error", "thread_unsupported_request")
    if isinstance(error, UsageError):
        return 400, refusal(message, "invalid_request_error")
    if isinstance(error, DoesNotFitError):
        return 503, refusal(message, "server_error", "does_not_fit")
    return 500, refusal(message, "server_error")
