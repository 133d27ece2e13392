"""Answers in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from triforce_core.requests.answer.parts import Parts, ToolCall, whole
from triforce_core.requests.stream import Completion, Piece
from triforce_core.server.messages.anthropic import MessagesRequest
from triforce_core.server.wording.wording import NewSplit, call_id, event, timings, usage

_THINKING, _TEXT = "thinking", "text"
# Types of errors, by the codes and the types of `refusal`.
_ERRORS = {
    "model_not_found": "not_found_error",
    "not_ready": "overloaded_error",
    "does_not_fit": "overloaded_error",
    "request_too_large": "request_too_large",
    "unknown_host": "permission_error",
    "authentication_error": "authentication_error",
    "rate_limit_error": "rate_limit_error",
    "server_error": "api_error",
}


class AnthropicMessages:
    """The wording of a message: blocks of reasoning, of text, and of calls, in their order."""

    media_type = "text/event-stream"

    def __init__(self, model: str, body: MessagesRequest, new_split: NewSplit) -> None:
        """model: name of the model that is served"""
        self._new_split = new_split
        self._split = new_split()
        self._most, self._stops = body.max_tokens, body.stop_sequences or ()
        self._blocks = 0
        # The kind of the block that is open, and whether a tool was called.
        self._open = ""
        self._called = False
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, completions: Sequence[Completion], each: int) -> dict[str, Any]:
        """Wording.whole."""
        (completion,) = completions
        parts = whole(self._new_split(), completion.text)
        blocks: list[dict[str, Any]] = []
        if parts.reasoning:
            blocks.append(_thinking(parts.reasoning))
        if parts.answer:
            blocks.append({"type": _TEXT, "text": parts.answer})
        blocks += (_call(call, json.loads(call.arguments)) for call in parts.calls)
        self._called = bool(parts.calls)
        return {
            **self._head,
            "content": blocks,
            **self._ended(completion),
            "usage": _usage(completion),
            "timings": timings(completion),
        }

    def begin(self, texts: int) -> str:
        """Wording.begin. The prompt is not processed yet, so the counts follow at the end."""
        counts = {"input_tokens": 0, "output_tokens": 0}
        ended = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, "content": [], **ended, "usage": counts}
        return _event("message_start", message=message)

    def waiting(self, progress: float) -> str:
        """Wording.waiting."""
        return _event("ping")

    def piece(self, index: int, piece: Piece) -> str:
        """Wording.piece."""
        return self._said(self._split.take(piece.text))

    def last(self, index: int, completion: Completion) -> str:
        """Wording.last."""
        said = self._said(self._split.finish()) + self._closed()
        delta, counts = self._ended(completion), _usage(completion)
        end = _event("message_delta", delta=delta, usage=counts, timings=timings(completion))
        return said + end + _event("message_stop")

    def end(self, completions: Sequence[Completion], each: int) -> str:
        """Wording.end."""
        return ""

    def failed(self, error: dict[str, Any]) -> str:
        """Wording.failed."""
        return event(anthropic_error(error), "error")

    def _ended(self, completion: Completion) -> dict[str, Any]:
        """Return why the message ended."""
        if completion.finish_reason == "length":
            # The context may have had room for fewer tokens than the request allows.
            full = len(completion.token_ids) < self._most
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif self._called:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if completion.stop in self._stops else "end_turn"
        stop = completion.stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def _said(self, parts: Parts) -> str:
        """Return the events of what a piece completes."""
        said = ""
        if parts.reasoning:
            delta = {"type": "thinking_delta", "thinking": parts.reasoning}
            said += self._opened(_THINKING, _thinking("")) + self._delta(delta)
        if parts.answer:
            said += self._opened(_TEXT, {"type": _TEXT, "text": ""})
            said += self._delta({"type": "text_delta", "text": parts.answer})
        for call in parts.calls:
            self._called = True
            said += self._opened("tool_use", _call(call, {}))
            said += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            said += self._closed()
        return said

    def _opened(self, kind: str, block: dict[str, Any]) -> str:
        """Return the events that begin a block, unless one of its kind is open."""
        if self._open == kind:
            return ""
        said = self._closed()
        self._open, self._blocks = kind, self._blocks + 1
        return said + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _closed(self) -> str:
        """Return the events that end the open block, if one is."""
        if not self._open:
            return ""
        # Clients expect a signature of reasoning, which they send back.
        signs = self._open == _THINKING
        signed = self._delta({"type": "signature_delta", "signature": ""}) if signs else ""
        self._open = ""
        return signed + _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)


def anthropic_error(error: dict[str, Any]) -> dict[str, Any]:
    """Return an error body in Anthropic's format. error: one in OpenAI's"""
    about = error["error"]
    kinds = (_ERRORS.get(about[name]) for name in ("code", "type"))
    kind = next(filter(None, kinds), "invalid_request_error")
    message = about["message"]
    if about["code"] == "context_length_exceeded":
        # By these words Claude Code knows that it has to shorten the conversation.
        message = f"prompt is too long: {message}"
    found: dict[str, Any] = {"type": kind, "message": message}
    if about["code"] == "thread_unsupported_request":
        # Anthropic's client then sends the whole conversation with each request.
        found["details"] = {"error_code": about["code"], "unsupported": ["thread"]}
    return {"type": "error", "error": found}


def _usage(completion: Completion) -> dict[str, int]:
    """Count tokens. Those that were reused are not input tokens."""
    used = usage([completion], 1)
    reused = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": used["completion_tokens"],
    }


def _thinking(text: str) -> dict[str, Any]:
    return {"type": _THINKING, "thinking": text, "signature": ""}


def _call(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id(), "name": call.name, "input": arguments}


def _event(kind: str, **about: Any) -> str:
    return event({"type": kind, **about}, kind)
