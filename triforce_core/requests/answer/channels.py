"""Answers in channels: OpenAI's harmony format, of gpt-oss."""

from __future__ import annotations

import re

from triforce_core.model.tokenizing.shown import CHANNEL_TAGS
from triforce_core.requests.answer.parts import Parts, ToolCall, Tools, begun

CHANNEL, START, MESSAGE, END = CHANNEL_TAGS
_ANSWERS_IN = re.compile(r"<\|channel\|>\s*final\b")
_CALLS = re.compile(r"\bto=functions\.([^\s<]+)")


class ChannelSplit:
    """A splitter of messages in channels: the answer is in the channel "final", a message to a
    function of the request calls it, and all else is reasoning. Headers are dropped.
    """

    def __init__(self, tools: Tools | None = None) -> None:
        self._tools = tools or {}
        self._held = ""
        # Whether the body of a message comes, not its header; and whether it is the answer.
        self._body = self._answers = False
        # The tool that the message calls, and its arguments so far.
        self._called: str | None = None
        self._arguments = ""

    def take(self, text: str) -> Parts:
        """Split.take."""
        self._held += text
        reasoning: list[str] = []
        answer: list[str] = []
        calls: list[ToolCall] = []
        while True:
            tags = (END, START, CHANNEL) if self._body else (MESSAGE,)
            found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
            if not found:
                break
            at, tag = min(found)
            before, self._held = self._held[:at], self._held[at + len(tag) :]
            if self._body:
                self._add(before, reasoning, answer)
                calls += self._call()
                # A header may begin with its channel.
                self._held = (tag if tag != END else "") + self._held
            else:
                self._begin(before)
            self._body = not self._body
        if self._body:
            kept = max(begun(self._held, tag) for tag in (END, START, CHANNEL))
            ready = len(self._held) - kept
            self._add(self._held[:ready], reasoning, answer)
            self._held = self._held[ready:]
        return Parts("".join(reasoning), "".join(answer), tuple(calls))

    def finish(self) -> Parts:
        """Split.finish. A text without any message is an answer."""
        rest, self._held = self._held, ""
        if not self._body:
            return Parts("", "" if CHANNEL in rest or START in rest else rest)
        reasoning: list[str] = []
        answer: list[str] = []
        self._add(rest, reasoning, answer)
        return Parts("".join(reasoning), "".join(answer), self._call())

    def _begin(self, header: str) -> None:
        called = _CALLS.search(header)
        self._called = called[1] if called and called[1] in self._tools else None
        self._answers = bool(_ANSWERS_IN.search(header))

    def _add(self, text: str, reasoning: list[str], answer: list[str]) -> None:
        if self._called is not None:
            self._arguments += text
        else:
            (answer if self._answers else reasoning).append(text)

    def _call(self) -> tuple[ToolCall, ...]:
        """Return the call that a message made."""
        if self._called is None:
            return ()
        call = ToolCall(self._called, self._arguments.strip())
        self._called, self._arguments = None, ""
        return (call,)
