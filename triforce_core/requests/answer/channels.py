"""Answers in channels: OpenAI's harmony format, of gpt-oss."""

from __future__ import annotations

import re

from triforce_core.model.tokenizing.shown import CHANNEL_TAGS
from triforce_core.requests.answer.arguments import as_arguments
from triforce_core.requests.answer.parts import (
    HeldText,
    Parts,
    ToolCall,
    Tools,
    all_of,
    begun,
    joined,
)

CHANNEL, START, MESSAGE, END = CHANNEL_TAGS
# What ends the body of a message.
_ENDS = (END, START, CHANNEL)
_ANSWERS_IN = re.compile(r"<\|channel\|>\s*final\b")
_CALLS = re.compile(r"\bto=functions\.([^\s<]+)")


class ChannelSplit:
    """A splitter of messages in channels: the answer is in the channel "final", a message to a
    function of the request calls it, and all else is reasoning. Headers are dropped.
    """

    def __init__(self, tools: Tools | None = None) -> None:
        self._tools = tools or {}
        # The header that comes, and the part of a tag at the end of a body.
        self._header = HeldText()
        self._held = ""
        # Whether the body of a message comes, not its header; and whether it is the answer.
        self._body = self._answers = False
        # The tool that the message calls, the message's header, and the arguments so far.
        self._called: str | None = None
        self._as_written = ""
        self._arguments: list[str] = []

    def take(self, text: str) -> Parts:
        """Split.take."""
        found: list[Parts] = []
        while text:
            if not self._body:
                given = self._header.take(text, MESSAGE)
                if given is None:
                    break
                header, text = given
                self._begin(header)
                continue
            text, self._held = self._held + text, ""
            tags = [(at, tag) for tag in _ENDS if (at := text.find(tag)) >= 0]
            if not tags:
                ready = len(text) - max(begun(text, tag) for tag in _ENDS)
                found.append(self._add(text[:ready]))
                self._held = text[ready:]
                break
            at, tag = min(tags)
            found += [self._add(text[:at]), self._end()]
            # A header may begin with its channel.
            text = text[at + len(tag if tag == END else "") :]
        return all_of(found)

    def finish(self) -> Parts:
        """Split.finish. A text without any message is an answer."""
        if not self._body:
            rest = self._header.rest()
            return Parts("", "" if CHANNEL in rest or START in rest else rest)
        rest, self._held = self._held, ""
        return joined(self._add(rest), self._end())

    def _begin(self, header: str) -> None:
        called = _CALLS.search(header)
        self._called = called[1] if called and called[1] in self._tools else None
        self._as_written = header + MESSAGE
        self._answers = bool(_ANSWERS_IN.search(header))
        self._body = True

    def _add(self, text: str) -> Parts:
        if self._called is not None:
            self._arguments.append(text)
            return Parts()
        return Parts(answer=text) if self._answers else Parts(text)

    def _end(self) -> Parts:
        """Return the call that a message made. One that cannot be read is an answer as it is."""
        self._body = False
        if self._called is None:
            return Parts()
        name, arguments = self._called, "".join(self._arguments)
        self._called, self._arguments = None, []
        try:
            return Parts(calls=(ToolCall(name, as_arguments(arguments)),))
        except (ValueError, RecursionError):
            return Parts(answer=self._as_written + arguments)
