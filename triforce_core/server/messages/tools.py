"""Tools in request bodies, and what a request uses of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from triforce_core.requests.answer.arguments import as_arguments
from triforce_core.requests.answer.parts import Tools
from triforce_core.server.messages.strict import JsonObject, Strict, or_says
from triforce_offload.errors import UsageError

MOST_TOOLS = 512
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema of its arguments"""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    # Arguments follow the schema strictly if `tool_choice` requires a call.
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


OR_SAYS_CHOICES = or_says(
    'tool_choice is "none", "auto", "required", or one of the tools by its name'
)
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, OR_SAYS_CHOICES]


def _of_an_object(arguments: str) -> str:
    """Raise ValueError unless the arguments of a call are an object."""
    try:
        as_arguments(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError("the arguments of a call are a JSON object, as text") from error
    return arguments if arguments.strip() else "{}"


Arguments = Annotated[str, AfterValidator(_of_an_object)]


class FunctionCall(Strict):
    """parsed_arguments: sent back by OpenAI's client, without effect"""

    name: str
    arguments: Arguments = "{}"
    parsed_arguments: Any = None


class CallOfMessage(Strict):
    """A call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat templates take it: with its arguments as an object."""
        called = self.function
        function = {"name": called.name, "arguments": json.loads(called.arguments)}
        return {"id": self.id or "", "type": "function", "function": function}


# The parameters of a function that is described without any.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    described: the functions in OpenAI's form, as chat templates take them
    required: the functions of which the answer must call one; empty if the model may answer with
        text
    parallel: whether an answer may make several calls
    """

    described: Sequence[Mapping[str, Any]] = ()
    required: frozenset[str] = frozenset()
    parallel: bool = True

    @property
    def schemas(self) -> Tools:
        """The JSON schema of the parameters of each function, by name."""
        functions = [tool["function"] for tool in self.described]
        return {each["name"]: each.get("parameters", _NOTHING) for each in functions}

    @property
    def required_schemas(self) -> Tools:
        """The functions that must be called."""
        return {name: s for name, s in self.schemas.items() if name in self.required}


def use_of(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None
) -> ToolUse:
    """Return the tools that a request uses. Raises UsageError for a choice that is none of them."""
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise UsageError("two tools have the same name")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise UsageError(f"tool_choice names {choice.function.name!r}, which is none of the tools")
    if choice == "required" and not names:
        raise UsageError("tool_choice is required, and there are no tools")
    if not tools or choice == "none":
        return ToolUse()
    required = frozenset(names if choice == "required" else ())
    if isinstance(choice, NamedTool):
        required = frozenset({choice.function.name})
    return ToolUse(
        tuple(tool.model_dump(exclude_none=True) for tool in tools), required, parallel is not False
    )
