"""What a server refuses, and with which status."""

from __future__ import annotations

from typing import Any

from triforce_core.server.messages.wording import refusal
from triforce_offload.errors import DoesNotFitError, TriforceError, UsageError


class QueueFullError(TriforceError):
    """Too many requests wait."""


class NotReadyError(TriforceError):
    """The model is being loaded, or the server closes."""


class ContextLengthError(UsageError):
    """A prompt and what is to follow it are longer than the context."""


class UnknownModelError(UsageError):
    """A model is asked for that is not here."""


def refused(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and the words for an error."""
    message = str(error) or type(error).__name__
    if isinstance(error, QueueFullError):
        return 429, refusal(message, "rate_limit_error", "queue_full")
    if isinstance(error, NotReadyError):
        return 503, refusal(message, "server_error", "not_ready")
    if isinstance(error, UnknownModelError):
        return 404, refusal(message, "invalid_request_error", "model_not_found", "model")
    if isinstance(error, ContextLengthError):
        return 400, refusal(message, "invalid_request_error", "context_length_exceeded")
    if isinstance(error, UsageError):
        return 400, refusal(message, "invalid_request_error")
    if isinstance(error, DoesNotFitError):
        return 503, refusal(message, "server_error", "does_not_fit")
    return 500, refusal(message, "server_error")
