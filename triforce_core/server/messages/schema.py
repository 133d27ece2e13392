"""Request bodies of OpenAI's API. Unknown fields are rejected by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from triforce_core.params import MOST_LOGPROBS, SamplingParams
from triforce_core.server.messages.strict import (
    REQUEST_NOTHING,
    JsonObject,
    Strict,
    or_says,
    text_alone,
)
from triforce_core.server.messages.tools import (
    MOST_TOOLS,
    CallOfMessage,
    Tool,
    ToolChoice,
    ToolUse,
    use_of,
)

# Sampling options, and names of clients, as all APIs of the server take them.
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1)]
MinP = Annotated[float, Field(ge=0, le=1)]
ClientName = Annotated[str, Field(max_length=512)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
MOST_CHOICES = 16
MOST_STOPS = 16
# Messages are limited only by the context; token ids of a prompt by _MOST_IDS.
MOST_MESSAGES = 16_384
_MOST_IDS = 1 << 23
_Ids = Annotated[list[int], Field(fail_fast=True, max_length=_MOST_IDS)]


class TextPart(Strict):
    type: Literal["text"]
    text: str


_Content = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)],
    or_says("the content of a message is text, or a list of parts with a type and a text"),
    text_alone("text"),
]
_Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MOST_STOPS)],
    or_says(f"stop is a text or a list of up to {MOST_STOPS} texts"),
]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content = ""
    name: str | None = None
    tool_calls: Annotated[list[CallOfMessage], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    # Clients may send an answer of this server back unchanged.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning_content: str | None = None
    # OpenAI's client adds it to an answer that it reads as JSON.
    parsed: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.reasoning_content is not None:
            # Templates decide which reasoning a prompt keeps.
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.role == "tool":
            given = {"tool_call_id": self.tool_call_id, "name": self.name}
            message |= {name: value for name, value in given.items() if value is not None}
        return message


def as_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as a chat template takes them. Results of tools have the tool's name, which
    some templates show.
    """
    names: dict[str, str] = {}
    found = []
    for message in messages:
        given = message.as_dict()
        for call in given.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.role == "tool" and message.tool_call_id in names:
            given.setdefault("name", names[message.tool_call_id])
        found.append(given)
    return found


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, or None for free text."""
        if self.type == "text":
            return None
        given = self.json_schema and self.json_schema.schema_
        return given or {"type": "object"}


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Strict):
    """Fields that chat and completion requests share."""

    request_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = REQUEST_NOTHING
    # None for the model that is served.
    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Seed | None = None
    stop: _Stop | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # The client's identity: cached KV is reused only for the same client.
    user: ClientName | None = None
    safety_identifier: ClientName | None = None
    prompt_cache_key: ClientName | None = None
    # Accepted without effect.
    store: bool | None = None
    metadata: JsonObject | None = None
    service_tier: str | None = None
    min_p: MinP | None = None
    # The names that vLLM and llama.cpp use for the same option.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop must not be empty")
        return stop

    @property
    def owner(self) -> str:
        """The client's identity as an owner of cached KV; empty for an anonymous client."""
        names = (self.user, self.safety_identifier, self.prompt_cache_key)
        return json.dumps(names) if any(names) else ""

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, room: int, asked: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters.

        room: the number of tokens that fit the context after the prompt, an upper bound
        asked: the requested maximum of new tokens
        """
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k and max(0, self.top_k),
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty or self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "seed": None if self.seed is None else self.seed % (1 << 63),
            "logprobs": logprobs,
            "json_schema": self.response_format and self.response_format.schema_asked,
        }
        given = {name: value for name, value in given.items() if value is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            room if asked is None else min(asked, room), stop=tuple(stops), **given
        )


class ChatRequest(Sampled):
    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top and not info.data.get("logprobs"):
            raise ValueError("top_logprobs needs logprobs to be true")
        return top

    # Variables of the chat template, whose effect depends on the template.
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    # Hints that are accepted without effect.
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: JsonObject | None = None
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=64)] | None = None

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # vLLM's names: whether the answer goes on with the last message, which is the assistant's.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _begun(cls, continues: bool | None, info: ValidationInfo) -> bool | None:
        last = (info.data.get("messages") or [None])[-1]
        if continues and last and (last.role != "assistant" or last.tool_calls):
            raise ValueError("the last message must be a text of the assistant")
        return continues

    @field_validator("add_generation_prompt")
    @classmethod
    def _as_begun(cls, added: bool | None, info: ValidationInfo) -> bool | None:
        if added == bool(info.data.get("continue_final_message")):
            raise ValueError("must be false with continue_final_message, and true without it")
        return added

    @property
    def begun(self) -> str:
        """The text with which the request begins the answer."""
        return self.messages[-1].as_dict()["content"] if self.continue_final_message else ""

    @property
    def tool_use(self) -> ToolUse:
        """The tools of the request. Raises UsageError."""
        return use_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages before the answer as a chat template takes them."""
        return as_dicts(self.messages[:-1] if self.continue_final_message else self.messages)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, besides the messages."""
        given: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            given["reasoning_effort"] = self.reasoning_effort
        if self.begun:
            # An answer that has begun does not reason first.
            given["enable_thinking"] = False
        return given | (self.chat_template_kwargs or {})

    def params(self, room: int) -> SamplingParams:
        asked = self.max_completion_tokens or self.max_tokens
        return self._sampling(room, asked, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(Sampled):
    prompt: Annotated[
        str
        | _Ids
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_CHOICES)]
        | Annotated[list[_Ids], Field(fail_fast=True, max_length=MOST_CHOICES)],
        or_says(
            f"a prompt is text, a list of token ids, or a list of up to {MOST_CHOICES} of these"
        ),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    # Accepted only with values that request nothing.
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @field_validator("echo", mode="before")
    @classmethod
    def _without_echo(cls, echo: object) -> object:
        if echo is not False:
            raise ValueError("echo is not supported: an answer is what follows the prompt")
        return echo

    @field_validator("best_of", mode="before")
    @classmethod
    def _without_others(cls, best_of: object) -> object:
        if best_of != 1:
            raise ValueError("best_of is not supported: ask for n texts")
        return best_of

    def params(self, room: int) -> SamplingParams:
        return self._sampling(room, self.max_tokens, self.logprobs)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, also when the request has only one."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)
