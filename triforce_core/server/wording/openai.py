"""Response bodies in the format of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_core.requests.reasoning import Parts, Split, split_of, whole
from triforce_core.requests.stats import LEAST_EXAMINED
from triforce_core.requests.stream import Completion, Piece, TokenLogprob

_REASONS = {"stop": "stop", "length": "length", "interrupted": "stop"}


class Wording:
    """The wording of one answer. In chats, reasoning is apart from the answer if the chat template
    knows its tags (`reasoning_content`, as in vLLM and llama.cpp).
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, prompt: str | None, guided: bool = False
    ) -> None:
        """prompt: the rendered prompt of a chat, None for other requests
        guided: whether a grammar holds from the first token on, so that there is no reasoning
        """
        chat = prompt is not None
        self._tokenizer = tokenizer
        self._chat = chat
        self._prompt = prompt
        self._splits: defaultdict[int, Split] | None = None
        template = tokenizer.chat_template
        if chat and not guided and split_of(template, prompt):
            self._splits = defaultdict(lambda: split_of(template, prompt))
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, completions: Sequence[Completion], each: int, *, told: bool) -> dict[str, Any]:
        """Return a complete answer.

        each: the number of completions of one prompt
        told: whether to include log-probabilities
        """
        choices = [self._choice(index, one, told) for index, one in enumerate(completions)]
        return self._head | {"choices": choices, "usage": usage(completions, each)}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the first event of a streamed choice, or None if it has none."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self._chat else None

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return an event with a piece of a streamed choice and the piece's origin."""
        content: Any = piece.text
        if self._chat:
            content = {"content": piece.text}
            if self._splits is not None:
                content = _delta(self._splits[index].take(piece.text))
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        return self._chunk(index, content, logprobs=logprobs) | {"origin": piece.origin}

    def last(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the last event of a streamed choice, with the statistics of its run."""
        content: Any = {} if self._chat else ""
        if self._splits is not None and any(rest := self._splits[index].finish()):
            content = _delta(rest)
        chunk = self._chunk(index, content, reason=_REASONS[completion.finish_reason])
        return chunk | {"timings": timings(completion)}

    def used(self, completions: Sequence[Completion], each: int) -> dict[str, Any]:
        """Return the event with the token counts of a stream. each: completions of one prompt"""
        head = self._head | {"object": self._streamed}
        return head | {"choices": [], "usage": usage(completions, each)}

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(
        self,
        index: int,
        content: Any,
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        name = "delta" if self._chat else "text"
        choice = {"index": index, name: content, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"object": self._streamed, "choices": [choice]}

    def _choice(self, index: int, completion: Completion, told: bool) -> dict[str, Any]:
        text = completion.text
        content: dict[str, Any] = {}
        if self._chat:
            said: dict[str, Any] = {"role": "assistant", "content": text}
            if self._splits is not None:
                parts = whole(split_of(self._tokenizer.chat_template, self._prompt), text)
                said |= {"content": parts.answer, "reasoning_content": parts.reasoning or None}
            content = {"message": said}
        return {
            "index": index,
            **(content or {"text": text}),
            "logprobs": self._logprobs(completion.logprobs) if told else None,
            "finish_reason": _REASONS[completion.finish_reason],
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {
                "content": [
                    self._token(each.token, each.logprob)
                    | {"top_logprobs": [self._token(*likely) for likely in each.likeliest]}
                    for each in tokens
                ]
            }
        texts = [self._text(each.token) for each in tokens]
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [
                {self._text(token): value for token, value in each.likeliest} for each in tokens
            ],
            "text_offset": starts,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])


def _delta(parts: Parts) -> dict[str, str]:
    """Return what a piece adds to a message."""
    delta = {"reasoning_content": parts.reasoning} if parts.reasoning else {}
    return delta | ({"content": parts.answer} if parts.answer or not delta else {})


def usage(completions: Sequence[Completion], each: int) -> dict[str, Any]:
    """Count prompt tokens, once for each prompt, and completion tokens.

    each: the number of completions of one prompt
    """
    firsts = completions[::each]
    prompt = sum(first.stats["prompt_tokens"] for first in firsts)
    new = sum(len(one.token_ids) for one in completions)
    reused = sum(first.stats["reused_tokens"] for first in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def timings(completion: Completion) -> dict[str, Any]:
    """Return the statistics of a run that a client can show."""
    stats = completion.stats
    seconds, link = stats["seconds_per_token"], stats["link"]
    busy = link["busy_seconds"] / stats["seconds"]["decode"] if stats["seconds"]["decode"] else 0.0
    few = stats["draft_tokens"]["examined"] < LEAST_EXAMINED
    return {
        "tokens_per_second": 1 / seconds if seconds else None,
        "prefill_seconds": stats["seconds"]["prefill"],
        "tokens_per_pass": stats["tokens_per_pass"],
        "acceptance": None if few else stats["acceptance"]["target"],
        "link_share": min(1.0, busy),
        "prompt_tokens": stats["prompt_tokens"],
        "reused_tokens": stats["reused_tokens"],
        "context_tokens": stats["prompt_tokens"] + len(completion.token_ids),
    }


def refusal(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict:
    """Return an error body in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
