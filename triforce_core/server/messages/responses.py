"""Request bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from triforce_core.server.messages.schema import (
    MOST_MESSAGES,
    ChatRequest,
    ClientName,
    JsonSchema,
    Message,
    MinP,
    ResponseFormat,
    Seed,
    StreamOptions,
    Temperature,
    TopK,
    TopP,
)
from triforce_core.server.messages.strict import JsonObject, Strict, or_says, text_alone
from triforce_core.server.messages.tools import (
    MOST_TOOLS,
    OR_SAYS_CHOICES,
    Arguments,
    CallOfMessage,
    Function,
    FunctionCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Part(Strict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    # Clients send answers of this server back unchanged.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


_Content = Annotated[
    str | Annotated[list[Part], Field(fail_fast=True)],
    or_says("the content of an item is text, or a list of parts with a type and a text"),
    text_alone(*_TEXTS),
]


class _Item(Strict):
    """id, status: sent back by clients, without effect"""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = "{}"


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: _Content = ""
    summary: list[Part] | None = None
    encrypted_content: str | None = None


def _kind(item: Any) -> str | None:
    if isinstance(item, dict):
        kind = item.get("type") or "message"
        return kind if isinstance(kind, str) else None
    return getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _as_items(given: object) -> object:
    """Return a text as the message of a user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Function):
    """A function, described beside its type."""

    type: Literal["function"]


def _functions_alone(tools: object) -> object:
    for tool in tools if isinstance(tools, list) else []:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"tools of type {kind!r} are not supported: describe a function")
    return tools


class NamedChoice(NamedFunction):
    type: Literal["function"]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Strict):
    format: TextFormat | None = None
    # Accepted without effect.
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    # Accepted without effect: what the model reasoned is given whole.
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Strict):
    # None for the model that is served.
    model: str | None = None
    input: Annotated[
        list[Item],
        Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES),
        BeforeValidator(_as_items),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: (
        Annotated[
            list[FunctionTool], Field(max_length=MOST_TOOLS), BeforeValidator(_functions_alone)
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedChoice, OR_SAYS_CHOICES] | None
    ) = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ClientName | None = None
    safety_identifier: ClientName | None = None
    prompt_cache_key: ClientName | None = None
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=64)] | None = None
    # Accepted without effect.
    metadata: JsonObject | None = None
    service_tier: str | None = None
    include: list[str] | None = None
    store: bool | None = None
    prompt_cache_retention: str | None = None
    # Prompts are never cut.
    truncation: Literal["disabled", "auto"] | None = None
    # Accepted only with values that request nothing.
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _kept_by_clients(cls, given: object) -> object:
        raise ValueError("responses are not stored here: send the whole conversation as input")

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat."""
        effort = self.reasoning and self.reasoning.effort
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            response_format=self._format(),
            reasoning_effort=effort,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self._tools(),
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            stream=self.stream,
            user=self.user,
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
        )

    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        if self.instructions:
            messages.append(Message(role="system", content=self.instructions))
        reasoned = ""
        for item in self.input:
            if isinstance(item, ReasoningItem):
                reasoned += _text(item.content)
                continue
            if isinstance(item, OutputItem):
                text = _text(item.output)
                messages.append(Message(role="tool", content=text, tool_call_id=item.call_id))
            elif isinstance(item, CallItem):
                # Calls belong to the message before them, as in chats.
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message(role="assistant"))
                _add_reasoning(messages[-1], reasoned)
                called = FunctionCall(name=item.name, arguments=item.arguments)
                call = CallOfMessage(id=item.call_id, function=called)
                messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
            else:
                answers = item.role == "assistant"
                # The text after a call belongs to the message that calls.
                if not (answers and messages and messages[-1].tool_calls):
                    messages.append(Message(role=item.role))
                messages[-1].content += _text(item.content)
                if answers:
                    _add_reasoning(messages[-1], reasoned)
            reasoned = ""
        return messages or [Message(role="user")]

    def _tools(self) -> list[Tool] | None:
        if self.tools is None:
            return None
        given = (tool.model_dump(exclude={"type"}) for tool in self.tools)
        return [Tool(type="function", function=Function(**each)) for each in given]

    def _choice(self) -> ToolChoice | None:
        if isinstance(self.tool_choice, NamedChoice):
            return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        return self.tool_choice

    def _format(self) -> ResponseFormat | None:
        if self.text is None or self.text.format is None:
            return None
        given = self.text.format
        schema = JsonSchema(schema=given.schema_) if given.schema_ else None
        return ResponseFormat(type=given.type, json_schema=schema)


def _add_reasoning(message: Message, text: str) -> None:
    if text:
        message.reasoning_content = (message.reasoning_content or "") + text


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
