"""Request bodies of Anthropic's Messages API, for programs that know only that one."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from triforce_core.server.errors import ThreadsError
from triforce_core.server.messages.schema import (
    MOST_MESSAGES,
    MOST_STOPS,
    ChatRequest,
    ClientName,
    JsonSchema,
    Message,
    ResponseFormat,
    Temperature,
    TopK,
    TopP,
)
from triforce_core.server.messages.strict import JsonObject, Strict, or_says, text_alone
from triforce_core.server.messages.tools import (
    MOST_TOOLS,
    CallOfMessage,
    Function,
    FunctionCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
)

# Claude Code writes a line with a number that changes with every request at the beginning of its
# system prompt. With it in the prompt, no request could reuse the KV of the one before.
_BILLING = "x-anthropic-billing-header:"
# The levels that only Anthropic's models have, by the nearest that chat templates know.
_EFFORTS = {"xhigh": "high", "max": "high"}


class _Marked(Strict):
    """cache_control: accepted without effect, since every prefix is cached"""

    cache_control: Any = None


class TextBlock(_Marked):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Strict):
    """signature: sent back by clients, without effect"""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class HiddenThinkingBlock(Strict):
    """Reasoning of another server's model, which only that server can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Marked):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject = Field(default_factory=dict)
    caller: Any = None


_Texts = Annotated[
    str | Annotated[list[TextBlock], Field(fail_fast=True)],
    or_says("a content is text, or a list of blocks with a type and a text"),
    text_alone("text"),
]


class ToolResultBlock(_Marked):
    """is_error: without effect, since chat templates have no place for it; the content says it"""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = ""
    is_error: bool | None = None


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else None


_Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[HiddenThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind),
]
_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _as_blocks(content: object) -> object:
    """Return a text as a list with one block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[_Block],
        Field(fail_fast=True),
        text_alone(*_KINDS),
        BeforeValidator(_as_blocks),
    ]

    def as_messages(self) -> list[Message]:
        """Return the message by OpenAI's names: results of tools are messages of their own."""
        messages: list[Message] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                result = Message(role="tool", content=_text(block.content))
                result.tool_call_id = block.tool_use_id
                messages.append(result)
                continue
            if not messages or messages[-1].role != self.role:
                messages.append(Message(role=self.role))
            _add(messages[-1], block)
        return messages or [Message(role=self.role)]


def _add(message: Message, block: Any) -> None:
    """Add a block to a message."""
    if isinstance(block, TextBlock):
        message.content += block.text
    elif isinstance(block, ThinkingBlock):
        message.reasoning_content = (message.reasoning_content or "") + block.thinking
    elif isinstance(block, ToolUseBlock):
        called = FunctionCall(name=block.name, arguments=json.dumps(block.input))
        call = CallOfMessage(id=block.id, function=called)
        message.tool_calls = [*(message.tool_calls or ()), call]


def _own_tools_alone(kind: object) -> object:
    if kind != "custom":
        raise ValueError(
            f"tools of type {kind!r} are not supported: describe a tool of your own, with a name "
            "and an input_schema"
        )
    return kind


class AnthropicTool(_Marked):
    """A tool of the client. What Anthropic's servers do with tools besides is without effect."""

    type: Annotated[str, BeforeValidator(_own_tools_alone)] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    def as_tool(self) -> Tool:
        """Return the tool by OpenAI's names."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class AnthropicChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a choice of a tool needs its name, and no other choice has one")
        return self

    def as_choice(self) -> ToolChoice:
        """Return the choice by OpenAI's names."""
        if self.type == "tool":
            return NamedTool(type="function", function=NamedFunction(name=self.name))
        return "required" if self.type == "any" else self.type


class Thinking(Strict):
    """budget_tokens, display: without effect; max_tokens limits reasoning and answer together"""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    """task_budget: without effect, as a budget for reasoning is"""

    effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    format: OutputFormat | None = None
    task_budget: JsonObject | None = None


class CountRequest(Strict):
    """What a request to count the tokens of a prompt shares with one for an answer."""

    model: str | None = None
    system: _Texts = ""
    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    ]
    tools: Annotated[list[AnthropicTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # The older name of the format in `output_config`.
    output_format: OutputFormat | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    # Accepted without effect.
    cache_control: Any = None
    context_management: Any = None
    speed: str | None = None

    def as_chat(self) -> ChatRequest:
        """Return the same request by OpenAI's names."""
        return ChatRequest(**self._common())

    def _common(self) -> dict[str, Any]:
        system, choice, config = self._system(), self.tool_choice, self.output_config
        messages = [Message(role="system", content=system)] if system else []
        messages += (made for message in self.messages for made in message.as_messages())
        last = messages[-1]
        effort = config and config.effort
        return {
            "model": self.model,
            "messages": messages,
            # An answer that a request begins is continued.
            "continue_final_message": last.role == "assistant" and not last.tool_calls,
            "tools": [tool.as_tool() for tool in self.tools] if self.tools else None,
            "tool_choice": choice and choice.as_choice(),
            "parallel_tool_calls": choice and not choice.disable_parallel_tool_use,
            "reasoning_effort": effort and _EFFORTS.get(effort, effort),
            "chat_template_kwargs": self._reasoning(),
            "response_format": self._format(),
        }

    def _system(self) -> str:
        """Return the system prompt without Claude Code's line."""
        blocks = [self.system] if isinstance(self.system, str) else [b.text for b in self.system]
        return "".join(
            text.partition("\n")[2] if text.startswith(_BILLING) else text for text in blocks
        )

    def _reasoning(self) -> dict[str, Any] | None:
        """Return the chat template's variable for `thinking`; None leaves it to the template."""
        asked = self.thinking and self.thinking.type
        known = {"enabled": True, "disabled": False}
        return {"enable_thinking": known[asked]} if asked in known else None

    def _format(self) -> ResponseFormat | None:
        given = (self.output_config and self.output_config.format) or self.output_format
        if given is None:
            return None
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema_))


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    thread: JsonObject | None = None
    # This server's names of a client: cached KV is reused only for the same one.
    user: ClientName | None = None
    safety_identifier: ClientName | None = None
    prompt_cache_key: ClientName | None = None
    # Accepted without effect. Claude Code names another user in each session, and the sessions of
    # one person should reuse each other's KV.
    metadata: JsonObject | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    fallbacks: Any = None

    def as_chat(self) -> ChatRequest:
        """Return the same request by OpenAI's names. Raises ThreadsError."""
        if self.thread is not None:
            raise ThreadsError("threads are not stored here: send the whole conversation")
        return super().as_chat()

    def _common(self) -> dict[str, Any]:
        return super()._common() | {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
