"""The splitter of a model's answers, by its chat template."""

from __future__ import annotations

from triforce_core.requests.answer.channels import CHANNEL, ChannelSplit
from triforce_core.requests.answer.parts import Split, Tools
from triforce_core.requests.answer.reasoning import ReasoningSplit, tags_of
from triforce_core.requests.answer.tool_formats import ToolFormat, tool_format
from triforce_core.requests.answer.tools import (
    FirstCallSplit,
    ReasoningThenCalls,
    TaggedCallSplit,
    WholeCallSplit,
)
from triforce_offload.errors import UsageError


def split_of(
    template: str,
    prompt: str,
    tools: Tools | None = None,
    *,
    guided: bool = False,
    parallel: bool = True,
) -> Split | None:
    """Return a splitter of answers to a rendered prompt, None if they have one part only.

    tools: the tools of the request; without any, calls are not looked for
    guided: whether a grammar holds from the first token on, so that there is no reasoning
    parallel: whether an answer may make several calls

    Raises UsageError for tools if no format of calls is known for the template.
    """
    split = _split_of(template, prompt, tools, guided)
    return FirstCallSplit(split) if split and tools and not parallel else split


def reasons(template: str) -> bool:
    """Return whether answers by a chat template may have reasoning."""
    return CHANNEL in template or tags_of(template) is not None


def _split_of(template: str, prompt: str, tools: Tools | None, guided: bool) -> Split | None:
    if CHANNEL in template:
        return ChannelSplit(tools) if tools or not guided else None
    tags = None if guided else tags_of(template)
    reasoning = ReasoningSplit(prompt, tags) if tags else None
    if not tools:
        return reasoning
    form = format_of(template)
    calls = (TaggedCallSplit if form.begins else WholeCallSplit)(form, tools)
    return ReasoningThenCalls(reasoning, calls) if reasoning else calls


def format_of(template: str) -> ToolFormat:
    """Return the format in which a model calls tools. Raises UsageError if none is known."""
    form = tool_format(template)
    if form is None:
        raise UsageError(
            "this model's chat template has no format of tool calls that is known here "
            "(known: Qwen, Llama 3, gpt-oss, Gemma 4, GLM, Granite 4, Nemotron 3, Mistral)"
        )
    return form
