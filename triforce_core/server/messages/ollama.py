"""Request bodies of Ollama's API, for programs that know only that one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from triforce_core.server.messages.schema import (
    MOST_MESSAGES,
    ChatRequest,
    CompletionRequest,
    JsonSchema,
    Message,
    MinP,
    ResponseFormat,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from triforce_core.server.messages.strict import REQUEST_NOTHING, JsonObject, Strict, or_says
from triforce_core.server.messages.tools import CallOfMessage, Function, FunctionCall, Tool
from triforce_offload.errors import UsageError

_LATEST = ":latest"


def same_model(asked: str, name: str) -> str:
    """Return the name of the model that is served if a client asks for it, with the tag "latest" or
    without, and else what the client asks for.
    """
    return name if asked.removesuffix(_LATEST) == name.removesuffix(_LATEST) else asked


def _no_pictures(images: object) -> object:
    if images:
        raise ValueError("pictures are not supported: the model takes text alone")
    return images


_Pictures = Annotated[list[Any], BeforeValidator(_no_pictures)]
_Level = Annotated[str, Field(min_length=1, max_length=32)]
_Think = Annotated[bool | _Level, or_says("think is true, false, or a level as a short text")]
_Duration = Annotated[str | float, or_says("keep_alive is a number of seconds or a text")]
_Format = Annotated[
    Literal["json", ""] | JsonObject,
    or_says('format is "json" or a JSON schema'),
]


class Options(Strict):
    """Sampling options. Those that place the model are accepted without effect: the server has
    placed it.
    """

    request_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = REQUEST_NOTHING
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    # -1 and -2 stand for "until the model ends" and "until the context is full".
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    numa: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the options by OpenAI's names."""
        most = self.num_predict
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        found = {name: getattr(self, name) for name in names}
        return found | {"max_tokens": most if most is not None and most > 0 else None}


class _Asked(Strict):
    request_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
        "system": ("",),
    }
    model: str
    options: Options | None = None
    format: _Format | None = None
    stream: bool = True
    think: _Think | None = None
    # Accepted without effect: the model stays loaded.
    keep_alive: _Duration | None = None
    logprobs: Literal[False] | None = None

    @property
    def common(self) -> dict[str, Any]:
        """What chats and continued texts share, by OpenAI's names."""
        found = {"model": self.model, "stream": self.stream, "response_format": None}
        if self.format == "json":
            found["response_format"] = ResponseFormat(type="json_object")
        elif self.format:
            schema = JsonSchema(schema=self.format)
            found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        return found | (self.options or Options()).sampling()

    @property
    def thinking(self) -> dict[str, Any]:
        """The variables of chat templates that `think` stands for."""
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        if self.think is None:
            return {}
        return {"chat_template_kwargs": {"enable_thinking": self.think}}


class OllamaFunctionCall(Strict):
    """A call, whose arguments are an object."""

    name: str
    arguments: JsonObject = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(Strict):
    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaFunctionCall


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: _Pictures | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_message(self) -> Message:
        """Return the message by OpenAI's names."""
        calls = [
            CallOfMessage(
                id=call.id,
                function=FunctionCall(
                    name=call.function.name, arguments=json.dumps(call.function.arguments)
                ),
            )
            for call in self.tool_calls or ()
        ]
        return Message(
            role=self.role,
            content=self.content,
            reasoning_content=self.thinking,
            tool_calls=calls or None,
            name=self.tool_name,
            tool_call_id=self.tool_call_id,
        )


class OllamaTool(Strict):
    type: Literal["function"] = "function"
    function: Function


class OllamaChat(_Asked):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)]
    tools: list[OllamaTool] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the same request by OpenAI's names."""
        tools = [Tool(type="function", function=each.function) for each in self.tools or ()]
        messages = [each.as_message() for each in self.messages]
        return ChatRequest(**self.common, **self.thinking, messages=messages, tools=tools or None)


class OllamaGenerate(_Asked):
    """raw: whether the prompt is continued as it is, without the chat template"""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    images: _Pictures | None = None
    # Accepted only with values that request nothing.
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None

    @field_validator("suffix", "template", "context", mode="before")
    @classmethod
    def _requests_nothing(cls, given: object, info: ValidationInfo) -> object:
        if given:
            raise ValueError(f"{info.field_name} is not supported by this server")
        return given

    @field_validator("raw")
    @classmethod
    def _as_it_is(cls, raw: bool, info: ValidationInfo) -> bool:
        if raw and info.data.get("system"):
            raise ValueError("system cannot be used with raw, which continues the prompt as it is")
        return raw

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat."""
        system = [Message(role="system", content=self.system)] if self.system else []
        messages = [*system, Message(role="user", content=self.prompt)]
        return ChatRequest(**self.common, **self.thinking, messages=messages)

    def as_completion(self) -> CompletionRequest:
        """Return the same request as a text to continue. Raises UsageError for a system prompt."""
        if self.system:
            raise UsageError("system cannot be used: the model has no chat template")
        common = self.common
        most = common.pop("max_tokens")
        # Without a limit, the text ends where the model or the context ends it.
        return CompletionRequest(**common, prompt=self.prompt, max_tokens=most or 1 << 31)


class OllamaShow(Strict):
    model: str | None = None
    # An older name of the field.
    name: str | None = None
    verbose: bool | None = None
