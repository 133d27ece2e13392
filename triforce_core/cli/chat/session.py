"""A conversation: turns can be continued, edited, regenerated, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triforce_core.cli.terminal.reading import read_text
from triforce_core.conversation import Conversations, Turn
from triforce_core.engine import Engine
from triforce_core.params import SamplingParams
from triforce_core.requests.stream import Completion, Stream
from triforce_offload.errors import UsageError

_CONVERSATION = "conversation"
# The key of a message for the attached files that its content begins with.
_FILES = "files"


@dataclass
class ChatSession:
    """A conversation.

    messages: the messages so far, each with a "role" and "content"
    context_tokens: the length of the context at the end of the last answer
    variables: variables of the chat template, see `Tokenizer.render`
    """

    engine: Engine
    params: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    context_tokens: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)
    _attached: list[str] = field(default_factory=list)
    _turn: Turn | None = None
    _before: list[dict[str, str]] = field(default_factory=list)
    _after: Turn | None = None

    def __post_init__(self) -> None:
        self._known = Conversations(self.engine.tokenizer)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of the conversation."""
        return self.engine.max_context

    @property
    def _more_room(self) -> str:
        positions, ways = self.engine.config.positions, []
        if any(message["role"] == "user" for message in self.messages):
            ways.append("/clear begins anew")
        if positions > self.most_tokens:
            ways.append(f"a larger --ctx-size, up to {positions}, has room for more")
        return ", ".join(ways) or "the model has no more positions"

    def attach(self, path: str) -> int:
        """Attach a text file to the next message. Return its number of tokens.

        Raises UsageError.
        """
        try:
            text = read_text(Path(path).expanduser())
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
        tokens = len(self.engine.tokenizer.encode(text))
        if tokens > self.most_tokens:
            positions = self.engine.config.positions
            larger = f"start with a larger --ctx-size, up to {positions}"
            raise UsageError(
                f"{path} has {tokens} tokens, more than the {self.most_tokens} of the context: "
                + (larger if tokens < positions else f"the model has {positions} positions")
            )
        self._attached.append(f"{Path(path).name}:\n\n{text.rstrip()}\n\n")
        return tokens

    def say(self, text: str) -> Stream:
        """Return the stream of the answer to a message.

        Raises UsageError if the context is too small.
        """
        stream = self._answer([*self.messages, _said("".join(self._attached), text)])
        self._attached.clear()
        return stream

    def regenerate(self) -> Stream:
        """Return the stream of another answer to the last user message. Raises UsageError."""
        return self._answer(self._until_last("user"))

    def edit(self, text: str) -> Stream:
        """Replace the text of the last user message and return the stream of its answer.

        The message keeps its attached files. Raises UsageError.
        """
        *before, last = self._until_last("user")
        return self._answer([*before, _said(last.get(_FILES, ""), text)])

    def go_on(self) -> Stream:
        """Continue the last answer where it was cut. Raises UsageError."""
        if self._after is None:
            raise UsageError("there is no answer that could go on")
        self._before = self.messages
        return self._stream(self._after)

    def ended(self, completion: Completion) -> None:
        """Add an answer, complete or interrupted, to the conversation.

        If it has no tokens, restore the messages before it.
        """
        if not completion.token_ids:
            self.messages = self._before
            return
        self._after = self._known.answered(self._turn, completion, self._stops)
        last = self.messages[-1]
        if last["role"] == "assistant":
            self.messages = [
                *self.messages[:-1],
                last | {"content": last["content"] + completion.text},
            ]
        else:
            self.messages.append({"role": "assistant", "content": completion.text})
        self.context_tokens = completion.stats["prompt_tokens"] + len(completion.token_ids)

    def clear(self, system: str | None = None) -> None:
        """Start a new conversation, with another system prompt if one is given."""
        kept = [message for message in self.messages[:1] if message["role"] == "system"]
        self.messages = [{"role": "system", "content": system}] if system else kept
        self._attached.clear()
        self._after = None
        self.context_tokens = 0

    def save(self, path: str) -> int:
        """Save the conversation and its KV. Return its number of tokens.

        Raises UsageError, OutputError, or DoesNotFitError if the host lacks memory.
        """
        known = self._after
        about = {
            "messages": self.messages,
            "known": list(known) if known else None,
            "begins_others": known is not None and self._known.knows(known),
        }
        return self.engine.save_context(path, {_CONVERSATION: json.dumps(about)})

    def load(self, path: str) -> int:
        """Load a conversation from a file. Return the number of tokens with KV.

        Raises UsageError.
        """
        loaded = self.engine.load_context(path)
        try:
            about = json.loads(loaded.about[_CONVERSATION])
            messages = [
                {key: str(m[key]) for key in ("role", "content", *({_FILES} & m.keys()))}
                for m in about["messages"]
            ]
            after = None
            if about["known"]:
                text, tokens = about["known"]
                after = Turn(str(text), [int(token) for token in tokens])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} holds a context and no conversation") from error
        self.clear()
        self.messages, self._after = messages, after
        if after is not None:
            if about.get("begins_others"):
                self._known.know(after)
            self.context_tokens = len(after.tokens)
        return loaded.tokens

    @property
    def _stops(self) -> frozenset[int]:
        return frozenset(self.engine.config.eos_token_ids + self.params.stop_token_ids)

    def _until_last(self, role: str) -> list[dict[str, str]]:
        for last in range(len(self.messages) - 1, -1, -1):
            if self.messages[last]["role"] == role:
                return self.messages[: last + 1]
        raise UsageError("nothing was said yet")

    def _answer(self, messages: list[dict[str, str]]) -> Stream:
        stream = self._stream(self._known.turn(messages, self.variables))
        self._before, self.messages = self.messages, messages
        self._after = None
        return stream

    def _stream(self, turn: Turn) -> Stream:
        room = self.most_tokens - len(turn.tokens)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(turn.tokens)} tokens, and the context has room for "
                f"{self.most_tokens}: {self._more_room}"
            )
        params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))
        stream = self.engine.stream(turn.tokens, params)
        self._turn = turn
        return stream


def _said(files: str, text: str) -> dict[str, str]:
    """Return a user message whose content begins with the attached files."""
    said = {"role": "user", "content": files + text}
    return said | {_FILES: files} if files else said
