"""Answers in the format of OpenAI's chat and text completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from triforce_core.requests.answer.parts import Parts, Split, ToolCall, whole
from triforce_core.requests.stream import Completion, Piece, TokenLogprob
from triforce_core.server.wording.wording import (
    NewSplit,
    WholeAnswer,
    call_id,
    comment,
    event,
    timings,
    usage,
)

_REASONS = {"stop": "stop", "length": "length", "interrupted": "stop"}
# The text of a token.
TextOf = Callable[[int], str]


class _Completions(ABC):
    """What both formats have in common."""

    media_type = "text/event-stream"
    # The name of the format, and of its streamed form; and the beginning of its ids.
    kind: str
    streamed: str
    prefix: str

    def __init__(self, model: str, text_of: TextOf, *, logprobs: bool, usage: bool) -> None:
        """logprobs: whether a complete answer has log-probabilities
        usage: whether a stream ends with the numbers of tokens
        """
        self._text = text_of
        self._logprobs = logprobs
        self._usage = usage
        self._head = {
            "id": self.prefix + uuid.uuid4().hex,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, completions: Sequence[Completion], each: int) -> dict[str, Any]:
        """Wording.whole."""
        choices = [self._choice(index, one) for index, one in enumerate(completions)]
        return self._head | {"choices": choices, "usage": usage(completions, each)}

    def waiting(self, progress: float) -> str:
        """Wording.waiting."""
        return comment(progress)

    def end(self, completions: Sequence[Completion], each: int) -> str:
        """Wording.end."""
        used = ""
        if self._usage:
            head = self._head | {"object": self.streamed}
            used = event(head | {"choices": [], "usage": usage(completions, each)})
        return used + "data: [DONE]\n\n"

    def failed(self, error: dict[str, Any]) -> str:
        """Wording.failed."""
        return event(error)

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a complete choice."""

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> str:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return event(self._head | {"object": self.streamed, "choices": [choice], **more})


def _about(piece: Piece) -> dict[str, Any]:
    """Return what chunks tell of a piece besides its text, in fields that are not OpenAI's."""
    return {"origin": piece.origin, "so_far": {"tokens": piece.tokens, "passes": piece.passes}}


class ChatCompletions(_Completions):
    """Messages. Reasoning and calls of tools are apart from the answer (`reasoning_content`, as in
    vLLM and llama.cpp, and `tool_calls`).
    """

    kind, streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self,
        model: str,
        text_of: TextOf,
        new_split: NewSplit = WholeAnswer,
        *,
        logprobs: bool = False,
        usage: bool = False,
    ) -> None:
        super().__init__(model, text_of, logprobs=logprobs, usage=usage)
        self._new_split = new_split
        self._splits: defaultdict[int, Split] = defaultdict(new_split)
        # The number of calls that each choice has made.
        self._calls: defaultdict[int, int] = defaultdict(int)

    def begin(self, texts: int) -> str:
        """Wording.begin."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return "".join(self._chunk(index, first) for index in range(texts))

    def piece(self, index: int, piece: Piece) -> str:
        """Wording.piece, with the piece's origin."""
        delta = self._delta(index, self._splits[index].take(piece.text))
        logprobs = self._message_logprobs(piece.logprobs) if piece.logprobs else None
        return self._chunk(index, {"delta": delta}, logprobs=logprobs, **_about(piece))

    def last(self, index: int, completion: Completion) -> str:
        """Wording.last, with the statistics of its run."""
        rest = self._splits[index].finish()
        delta = self._delta(index, rest) if any(rest) else {}
        reason = _reason(completion, self._calls[index])
        return self._chunk(index, {"delta": delta}, reason=reason, timings=timings(completion))

    def _delta(self, index: int, parts: Parts) -> dict[str, Any]:
        """Return what a piece adds to a message."""
        delta: dict[str, Any] = {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.calls:
            before = self._calls[index]
            self._calls[index] += len(parts.calls)
            delta["tool_calls"] = [
                {"index": before + i, **_call(call)} for i, call in enumerate(parts.calls)
            ]
        if parts.answer or not delta:
            delta["content"] = parts.answer
        return delta

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parts = whole(self._new_split(), completion.text)
        message: dict[str, Any] = {"role": "assistant", "content": parts.answer}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message |= {
                "content": parts.answer or None,
                "tool_calls": [_call(call) for call in parts.calls],
            }
        return {
            "index": index,
            "message": message,
            "logprobs": self._message_logprobs(completion.logprobs) if self._logprobs else None,
            "finish_reason": _reason(completion, len(parts.calls)),
        }

    def _message_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._token(each.token, each.logprob)
                | {"top_logprobs": [self._token(*likely) for likely in each.likeliest]}
                for each in tokens
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextCompletions(_Completions):
    """Continued texts."""

    kind = streamed = "text_completion"
    prefix = "cmpl-"

    def __init__(self, model: str, text_of: TextOf, *, logprobs: bool, usage: bool) -> None:
        super().__init__(model, text_of, logprobs=logprobs, usage=usage)
        # The number of characters that each streamed text has so far.
        self._lengths: defaultdict[int, int] = defaultdict(int)

    def begin(self, texts: int) -> str:
        """Wording.begin."""
        return ""

    def piece(self, index: int, piece: Piece) -> str:
        """Wording.piece, with the piece's origin."""
        begins = self._lengths[index]
        self._lengths[index] += len(piece.text)
        logprobs = self._text_logprobs(piece.logprobs, begins) if piece.logprobs else None
        return self._chunk(index, {"text": piece.text}, logprobs=logprobs, **_about(piece))

    def last(self, index: int, completion: Completion) -> str:
        """Wording.last, with the statistics of its run."""
        reason = _reason(completion, 0)
        return self._chunk(index, {"text": ""}, reason=reason, timings=timings(completion))

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self._text_logprobs(completion.logprobs) if self._logprobs else None,
            "finish_reason": _reason(completion, 0),
        }

    def _text_logprobs(self, tokens: Sequence[TokenLogprob], begins: int = 0) -> dict[str, Any]:
        """Return log-probabilities. begins: the position of the first token in the text"""
        texts = [self._text(each.token) for each in tokens]
        starts = list(accumulate(map(len, texts), initial=begins))
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [
                {self._text(token): value for token, value in each.likeliest} for each in tokens
            ],
            "text_offset": starts[: len(texts)],
        }


def _reason(completion: Completion, calls: int) -> str:
    """Return why an answer ended. calls: the number of calls that it makes"""
    if calls and completion.finish_reason == "stop":
        return "tool_calls"
    return _REASONS[completion.finish_reason]


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}
