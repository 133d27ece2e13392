"""How each family of models writes the calls of tools, by its chat template."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from triforce_core.model.tokenizing.shown import FUNCTION_GEMMA_TAGS, GEMMA_TAGS, MISTRAL_TAGS
from triforce_core.requests.answer.arguments import DECODER, as_arguments, dumped, loaded
from triforce_core.requests.answer.channels import CHANNEL
from triforce_core.requests.answer.gemma_arguments import parsed
from triforce_core.requests.answer.parts import ToolCall, Tools
from triforce_core.requests.answer.schemas import (
    choices,
    is_written_as_text,
    properties_of,
    required_of,
    typed,
)
from triforce_offload.errors import UsageError

# How JSON is spaced where a grammar holds: as the family's own template or training writes it.
_SPACED, _DENSE = (
    {
        "x-guidance": {
            "whitespace_flexible": False,
            "item_separator": f",{space}",
            "key_separator": f":{space}",
        }
    }
    for space in (" ", "")
)
_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_BLANK = re.compile(r"\s*")
_XML_KEY, _GLM_KEY = re.compile(r">"), re.compile(r"</arg_key>\s*<arg_value>")


@dataclass(frozen=True)
class ToolFormat(ABC):
    """A way to write calls.

    begins: the text that begins a call; "" if a call is the whole answer
    ends: the text that ends a call; "" if the next call or the end of the answer does
    """

    begins: str = ""
    ends: str = ""
    # What a grammar has before an answer in text.
    before_answers: ClassVar[str] = ""

    @abstractmethod
    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        """Return the calls that a text between `begins` and `ends` makes.

        Raises ValueError if it makes none.
        """

    def may_end(self, body: str, tools: Tools) -> bool:
        """Return whether a body without a closing tag can be complete."""
        return True

    def grammar(self, tools: Tools) -> str | None:
        """Return a Lark grammar of one call of any of the tools, None if there is none.

        Raises UsageError if a tool cannot be called in this format.
        """
        return None

    def grammar_or_answer(self, tools: Tools, schema: str) -> str | None:
        """Return a Lark grammar of one call, or else of an answer that is a JSON value; None if
        there is none, also if calls are JSON values as answers are.

        schema: of the answer, as JSON
        Raises UsageError as `grammar` does.
        """
        grammar = self.grammar(tools)
        if grammar is None or not (self.begins or self.before_answers):
            return None
        calls = grammar.replace("start: ", "call: ", 1)
        return f"start: call | {self.before_answers} answer\nanswer: %json {schema}\n{calls}"


def tool_format(template: str) -> ToolFormat | None:
    """Return the format of a chat template, None if it takes no tools in a format known here."""
    if CHANNEL in template:
        return ChannelCalls()
    if GEMMA_TAGS[0] in template:
        return GemmaCalls(*GEMMA_TAGS[:2], quote=GEMMA_TAGS[2])
    if FUNCTION_GEMMA_TAGS[0] in template:
        return GemmaCalls(*FUNCTION_GEMMA_TAGS[:2], quote=FUNCTION_GEMMA_TAGS[2])
    if MISTRAL_TAGS[0] in template:
        return MistralCalls(MISTRAL_TAGS[0])
    if "<tool_call>" in template:
        tags = "<tool_call>", "</tool_call>"
        if "<arg_key>" in template:
            return GlmCalls(*tags)
        return XmlCalls(*tags) if "<function=" in template else JsonCalls(*tags)
    if "tools" in template and '"parameters"' in template:
        return LlamaCalls()
    return None


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """An object with a name and arguments, between tags: Hermes, Qwen2.5, Qwen3."""

    arguments: str = "arguments"

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        return _calls_of(loaded(body))

    def grammar(self, tools: Tools) -> str:
        rules = []
        for at, (name, schema) in enumerate(tools.items()):
            head = _text(f'{{"name": {json.dumps(name)}, "{self.arguments}": ')
            rules.append(f'f{at}: {head} a{at} "}}"')
            rules.append(f"a{at}: {_json(_of_an_object(schema), _SPACED)}")
        functions = _any_function(tools)
        if self.begins:
            begins, ends = _text(f"{self.begins}\n"), _text(f"\n{self.ends}")
            functions = f"{begins} {functions} {ends}"
        return "\n".join([f"start: {functions}", *rules, ""])


@dataclass(frozen=True)
class LlamaCalls(JsonCalls):
    """An object with a name and parameters that is the whole answer: Llama 3.1 to 3.3."""

    arguments: str = "parameters"

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        found, at = [], 0
        body = body.strip()
        while at < len(body):
            given, at = DECODER.raw_decode(body, at)
            found.append(_call_of(given))
            while at < len(body) and body[at] in "; \n":
                at += 1
        if unknown := [call.name for call in found if call.name not in tools]:
            raise ValueError(f"there is no tool {unknown[0]!r}")
        return found


@dataclass(frozen=True)
class XmlCalls(ToolFormat):
    """A function and its parameters in tags of their own: Qwen3-Coder, Qwen3.5 to 3.8."""

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        found = _XML_FUNCTION.match(body)
        rest = body.rstrip()
        # Without its closing tag, the call was cut off.
        if not found or not rest.endswith("</function>"):
            raise ValueError("it calls no function")
        name, rest = found[1].strip(), rest[found.end() :].removesuffix("</function>")
        written = _pairs(rest, "<parameter=", _XML_KEY, "</parameter>")
        # One line break stands before and after each value.
        values = {
            key: value.removeprefix("\n").removesuffix("\n") for key, value in written.items()
        }
        return [ToolCall(name, typed(values, tools.get(name, {})))]

    def grammar(self, tools: Tools) -> str:
        rules = []
        for at, (name, schema) in enumerate(tools.items()):
            parts, required = [_text(f"<function={name}>\n")], required_of(schema)
            for i, (key, value) in enumerate(properties_of(schema).items()):
                if not key or key != key.strip() or set(key) & {">", "\n"}:
                    raise UsageError(f"this model cannot write a parameter with the name {key!r}")
                rule = f"p{at}_{i}"
                parts.append(rule + ("" if key in required else "?"))
                rules += _xml_parameter(rule, key, value, schema)
            parts.append(_text("</function>\n"))
            rules.append(f"f{at}: {' '.join(parts)}")
        begins = _text(f"{self.begins}\n")
        start = f"start: {begins} {_any_function(tools)} {_text(self.ends)}"
        return "\n".join([start, *rules, ""])


def _xml_parameter(rule: str, key: str, value: object, root: Mapping[str, Any]) -> list[str]:
    """Return the rules of a parameter. root: the schema that contains the value's"""
    begins, ends = _text(f"<parameter={key}>\n"), _text("\n</parameter>\n")
    typed_rule, own = f"{rule}: {begins} v{rule}", f"v{rule}"
    if not is_written_as_text(value, root):
        within = {name: root[name] for name in ("$defs", "definitions") if name in root}
        schema = {**within, **value} if isinstance(value, Mapping) else value
        return [f"{typed_rule} {ends}", f"{own}: {_json(schema, _SPACED)}"]
    if texts := choices(value, root):
        return [f"{typed_rule} {ends}", f"{own}: {' | '.join(map(_text, texts))}"]
    return [typed_rule, f"{own}[suffix={ends}]: /(?s:.*)/"]


@dataclass(frozen=True)
class GlmCalls(ToolFormat):
    """A name, and then keys and values in tags: GLM-4.5 and later."""

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        name, tag, rest = body.strip().partition("<arg_key>")
        name = name.strip()
        if not name:
            raise ValueError("it calls no function")
        values = _pairs(tag + rest, "<arg_key>", _GLM_KEY, "</arg_value>")
        return [ToolCall(name, typed(values, tools.get(name, {})))]

    def may_end(self, body: str, tools: Tools) -> bool:
        # A part of a name is a name too.
        name = body.strip()
        return name.endswith("</arg_value>") or (name in tools and not required_of(tools[name]))


@dataclass(frozen=True)
class GemmaCalls(ToolFormat):
    """`call:name{key:value}` between tags: Gemma 4 and FunctionGemma. quote: stands around texts"""

    quote: str = '"'

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        found = re.fullmatch(r"\s*call:\s*([^\s{]+)\s*(\{.*\})\s*", body, re.DOTALL)
        if not found:
            raise ValueError("it calls no function")
        return [ToolCall(found[1], dumped(parsed(found[2], self.quote)))]


@dataclass(frozen=True)
class MistralCalls(ToolFormat):
    """A list of objects, or a name and its arguments, after a tag: Mistral."""

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        name, tag, arguments = body.partition(MISTRAL_TAGS[1])
        if not tag:
            return _calls_of(loaded(body))
        name = name.partition(MISTRAL_TAGS[2])[0].strip()
        if not name:
            raise ValueError("it calls no function")
        return [ToolCall(name, as_arguments(arguments))]


@dataclass(frozen=True)
class ChannelCalls(ToolFormat):
    """Messages to functions, in channels: gpt-oss. `ChannelSplit` finds them."""

    before_answers: ClassVar[str] = '<|channel|> "final" <|message|>'

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        raise ValueError("calls are in the headers of messages")

    def grammar(self, tools: Tools) -> str:
        rules = []
        for at, (name, schema) in enumerate(tools.items()):
            header = _text(f"commentary to=functions.{name} ")
            rules.append(f'f{at}: {header} <|constrain|> "json" <|message|> a{at}')
            rules.append(f"a{at}: {_json(_of_an_object(schema), _DENSE)}")
        return "\n".join([f"start: <|channel|> {_any_function(tools)}", *rules, ""])


def _calls_of(given: object) -> list[ToolCall]:
    """Return the calls that an object or a list of objects describes. Raises ValueError."""
    calls = [_call_of(each) for each in (given if isinstance(given, list) else [given])]
    if not calls:
        raise ValueError("it calls no function")
    return calls


def _call_of(given: object) -> ToolCall:
    """Return the call that an object describes. Raises ValueError."""
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call is an object with a name")
    arguments = given.get("arguments", given.get("parameters", {}))
    # Some models write the arguments as text that is an object.
    if isinstance(arguments, str):
        return ToolCall(name, as_arguments(arguments))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return ToolCall(name, dumped(arguments))


def _pairs(text: str, begins: str, between: re.Pattern[str], ends: str) -> dict[str, str]:
    """Return keys and values that stand between tags. A value may contain its closing tag, unless
    the next pair or the end follows. Takes time linear in the text's length.

    between: what stands between a key and its value
    Raises ValueError for text outside of the pairs.
    """
    found: dict[str, str] = {}
    text = text.strip()
    at = 0
    while at < len(text):
        middle = between.search(text, at)
        if not text.startswith(begins, at) or not middle:
            raise ValueError("the parameters cannot be read")
        key = text[at + len(begins) : middle.start()].strip()
        if not key or "\n" in key:
            raise ValueError("a parameter has no name")
        at = middle.end()
        while True:
            end = text.find(ends, at)
            if end < 0:
                raise ValueError(f"the value of {key!r} has no end")
            at = _BLANK.match(text, end + len(ends)).end()
            if at == len(text) or text.startswith(begins, at):
                break
        found[key] = text[middle.end() : end]
    return found


def _of_an_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of objects only: arguments are always an object."""
    return {**schema, "type": "object"}


def _json(schema: object, spacing: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value. Its schema is a root, so that references are found in it."""
    given = schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**given, **spacing})}"


def _any_function(tools: Tools) -> str:
    """Return a rule of any of the functions, which have the rules f0, f1 and so on."""
    return f"({' | '.join(f'f{at}' for at in range(len(tools)))})"


def _text(text: str) -> str:
    """Return a text as a literal of Lark's."""
    return json.dumps(text, ensure_ascii=False)
