"""How each family of models writes the calls of tools, by its chat template."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triforce_core.model.tokenizing.shown import FUNCTION_GEMMA_TAGS, GEMMA_TAGS, MISTRAL_TAGS
from triforce_core.requests.answer.channels import CHANNEL
from triforce_core.requests.answer.gemma_arguments import parsed
from triforce_core.requests.answer.parts import ToolCall, Tools

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
_ANYTHING: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolFormat(ABC):
    """A way to write calls.

    begins: the text that begins a call; "" if a call is the whole answer
    ends: the text that ends a call; "" if the next call or the end of the answer does
    """

    begins: str = ""
    ends: str = ""

    @abstractmethod
    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        """Return the calls that a text between `begins` and `ends` makes.

        Raises ValueError if it makes none.
        """

    def grammar(self, tools: Tools) -> str | None:
        """Return a Lark grammar of one call of any of the tools, None if there is none."""
        return None


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
        given = json.loads(body)
        return [_call_of(each) for each in (given if isinstance(given, list) else [given])]

    def grammar(self, tools: Tools) -> str:
        schemas = [_schema_of_call(name, tools[name], self.arguments) for name in tools]
        call = f"%json {json.dumps({'anyOf': schemas, **_SPACED})}"
        if not self.begins:
            return f"start: {call}\n"
        begins, ends = _text(f"{self.begins}\n"), _text(f"\n{self.ends}")
        return f"start: {begins} call {ends}\ncall: {call}\n"


@dataclass(frozen=True)
class LlamaCalls(JsonCalls):
    """An object with a name and parameters that is the whole answer: Llama 3.1 to 3.3."""

    arguments: str = "parameters"

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        decoder, found, at = json.JSONDecoder(), [], 0
        body = body.strip()
        while at < len(body):
            given, at = decoder.raw_decode(body, at)
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
        found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", body, re.DOTALL)
        if not found:
            raise ValueError("it calls no function")
        name, rest = found[1].strip(), found[2]
        written = re.findall(
            r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|$)", rest, re.DOTALL
        )
        if not written and rest.strip():
            raise ValueError("its parameters cannot be read")
        # One line break stands before and after each value.
        values = {
            key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in written
        }
        return [ToolCall(name, _typed(values, tools.get(name, {})))]

    def grammar(self, tools: Tools) -> str:
        rules = []
        for at, (name, schema) in enumerate(tools.items()):
            properties = schema.get("properties", {})
            required = schema.get("required", ())
            parts = [_text(f"<function={name}>\n")]
            for i, (key, value) in enumerate(properties.items()):
                rule = f"p{at}_{i}"
                parts.append(rule + ("" if key in required else "?"))
                begins, ends = _text(f"<parameter={key}>\n"), _text("\n</parameter>\n")
                typed = f"{rule}: {begins} v{at}_{i}"
                if _is_text(value):
                    rules += [typed, f"v{at}_{i}[suffix={ends}]: /(?s:.*)/"]
                else:
                    rules += [f"{typed} {ends}", f"v{at}_{i}: %json {json.dumps(value)}"]
            parts.append(_text("</function>\n"))
            rules.append(f"f{at}: {' '.join(parts)}")
        functions = " | ".join(f"f{at}" for at in range(len(tools)))
        begins = _text(f"{self.begins}\n")
        start = f"start: {begins} ({functions}) {_text(self.ends)}"
        return "\n".join([start, *rules, ""])


@dataclass(frozen=True)
class GlmCalls(ToolFormat):
    """A name, and then keys and values in tags: GLM-4.5 and later."""

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        name, _, rest = body.strip().partition("<arg_key>")
        pair = r"(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?:<arg_key>|$)"
        written = re.findall(pair, rest, re.DOTALL)
        if not name.strip() or (rest and not written):
            raise ValueError("it calls no function")
        values = {key.strip(): value for key, value in written}
        return [ToolCall(name.strip(), _typed(values, tools.get(name.strip(), {})))]


@dataclass(frozen=True)
class GemmaCalls(ToolFormat):
    """`call:name{key:value}` between tags: Gemma 4 and FunctionGemma. quote: stands around texts"""

    quote: str = '"'

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        found = re.fullmatch(r"\s*call:\s*([^\s{]+)\s*(\{.*\})\s*", body, re.DOTALL)
        if not found:
            raise ValueError("it calls no function")
        return [ToolCall(found[1], _dumped(parsed(found[2], self.quote)))]


@dataclass(frozen=True)
class MistralCalls(ToolFormat):
    """A list of objects, or a name and its arguments, after a tag: Mistral."""

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        name, tag, arguments = body.partition(MISTRAL_TAGS[1])
        if not tag:
            given = json.loads(body)
            return [_call_of(each) for each in (given if isinstance(given, list) else [given])]
        json.loads(arguments)
        return [ToolCall(name.partition(MISTRAL_TAGS[2])[0].strip(), arguments.strip())]


@dataclass(frozen=True)
class ChannelCalls(ToolFormat):
    """Messages to functions, in channels: gpt-oss. `ChannelSplit` finds them."""

    def calls(self, body: str, tools: Tools) -> list[ToolCall]:
        raise ValueError("calls are in the headers of messages")

    def grammar(self, tools: Tools) -> str:
        rules = []
        for at, (name, schema) in enumerate(tools.items()):
            header = _text(f"commentary to=functions.{name} ")
            rules.append(f'f{at}: {header} <|constrain|> "json" <|message|> a{at}')
            rules.append(f"a{at}: %json {json.dumps({**(schema or _ANYTHING), **_DENSE})}")
        functions = " | ".join(f"f{at}" for at in range(len(tools)))
        return "\n".join([f"start: <|channel|> ({functions})", *rules, ""])


def _call_of(given: object) -> ToolCall:
    """Return the call that an object describes. Raises ValueError."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        # Some models write the arguments as text that is an object.
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return ToolCall(given["name"], _dumped(arguments))


def _schema_of_call(name: str, schema: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: schema or _ANYTHING},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _typed(values: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    """Return arguments that were written as text, with the types that the tool's schema gives."""
    properties = schema.get("properties", {})
    given: dict[str, Any] = {}
    for key, text in values.items():
        given[key] = text
        if not _is_text(properties.get(key, {})):
            try:
                given[key] = json.loads(text)
            except ValueError:
                given[key] = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return _dumped(given)


def _is_text(schema: object) -> bool:
    """Return whether values of a schema are written as text, without quotes."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _dumped(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _text(text: str) -> str:
    """Return a text as a literal of Lark's."""
    return json.dumps(text, ensure_ascii=False)
