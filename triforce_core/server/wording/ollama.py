"""Answers in the format of Ollama's API: lines of JSON."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from triforce_core.requests.answer.parts import Parts, ToolCall, whole
from triforce_core.requests.stream import Completion, Piece
from triforce_core.server.wording.wording import NewSplit, WholeAnswer, call_id

_REASONS = {"stop": "stop", "length": "length", "interrupted": "stop"}
_NANOSECONDS = 1_000_000_000


class _Lines(ABC):
    """What both formats have in common. Only one text is asked for."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, new_split: NewSplit = WholeAnswer) -> None:
        self._model = model
        self._new_split = new_split
        self._split = new_split()
        self._began = time.monotonic()

    def whole(self, completions: Sequence[Completion], each: int) -> dict[str, Any]:
        """Wording.whole."""
        parts = whole(self._new_split(), completions[0].text)
        return self._head(self._said(parts)) | self._done(completions[0])

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, which only loads the model."""
        return self._head(self._said(Parts())) | {"done": True, "done_reason": "load"}

    def begin(self, texts: int) -> str:
        """Wording.begin."""
        return ""

    def waiting(self, progress: float) -> str:
        """Wording.waiting: a line that adds nothing."""
        return self._line(self._said(Parts()))

    def piece(self, index: int, piece: Piece) -> str:
        """Wording.piece."""
        parts = self._split.take(piece.text)
        return self._line(self._said(parts)) if any(parts) else ""

    def last(self, index: int, completion: Completion) -> str:
        """Wording.last."""
        rest = self._split.finish()
        said = self._line(self._said(rest)) if any(rest) else ""
        end = self._head(self._said(Parts())) | self._done(completion)
        return said + _line(end)

    def end(self, completions: Sequence[Completion], each: int) -> str:
        """Wording.end."""
        return ""

    def failed(self, error: dict[str, Any]) -> str:
        """Wording.failed."""
        return _line(ollama_error(error))

    @abstractmethod
    def _said(self, parts: Parts) -> dict[str, Any]:
        """Return a line's own fields."""

    def _head(self, said: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **said, "done": False}

    def _line(self, said: dict[str, Any]) -> str:
        return _line(self._head(said))

    def _done(self, completion: Completion) -> dict[str, Any]:
        """Return the fields of the end. Durations are in nanoseconds."""
        stats = completion.stats
        seconds = stats["seconds"]
        return {
            "done": True,
            "done_reason": _REASONS[completion.finish_reason],
            "total_duration": round(_NANOSECONDS * (time.monotonic() - self._began)),
            "load_duration": 0,
            "prompt_eval_count": stats["prompt_tokens"],
            "prompt_eval_duration": round(_NANOSECONDS * seconds["prefill"]),
            "eval_count": len(completion.token_ids),
            "eval_duration": round(_NANOSECONDS * seconds["decode"]),
        }


class OllamaMessages(_Lines):
    """Answers of /api/chat."""

    def _said(self, parts: Parts) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": parts.answer}
        if parts.reasoning:
            message["thinking"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [_call(call) for call in parts.calls]
        return {"message": message}


class OllamaTexts(_Lines):
    """Answers of /api/generate."""

    def _said(self, parts: Parts) -> dict[str, Any]:
        said = {"response": parts.answer}
        return said | ({"thinking": parts.reasoning} if parts.reasoning else {})


def ollama_error(error: dict[str, Any]) -> dict[str, str]:
    """Return an error body in Ollama's format. error: one in OpenAI's"""
    return {"error": error["error"]["message"]}


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call_id(), "function": function}


def _line(what: dict[str, Any]) -> str:
    return json.dumps(what, ensure_ascii=False, separators=(",", ":")) + "\n"
