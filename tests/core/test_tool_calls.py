"""Calls of tools apart from the answer, as each family of models writes them."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from answer_pieces import in_pieces

from triforce_core.requests.answer.gemma_arguments import parsed
from triforce_core.requests.answer.parts import Parts, ToolCall, whole
from triforce_core.requests.answer.split import format_of, split_of
from triforce_core.requests.answer.tool_formats import tool_format
from triforce_offload.errors import UsageError

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = {"get_weather": WEATHER, "now": {}}
# Texts by which a chat template shows its family.
TEMPLATES = {
    "hermes": "{{ tools }} <tool_call>",
    "qwen3.5": "{{ tools }} <tool_call> <function=name> </think>",
    "glm": "{{ tools }} <tool_call> <arg_key>",
    "llama": '{{ tools }} {"name": function name, "parameters": dictionary}',
    "gpt-oss": "{{ tools }} <|channel|>",
    "gemma4": "{{ tools }} <|tool_call> <|channel>thought <channel|>",
    "functiongemma": "{{ tools }} <start_function_call>",
    "mistral": "{{ tools }} [TOOL_CALLS]",
}
PARIS = {"city": 'Paris, "<b>"\n}', "days": 3, "units": ["C", "F"]}
CITY = json.dumps(PARIS["city"])
ARGUMENTS = json.dumps(PARIS)
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
NOW = '{"name": "now", "arguments": {}}'
GEMMA = "call:get_weather{{city:{0}{1}{0},days:3,units:[{0}C{0}, {0}F{0}]}}"
XML = (
    f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{PARIS['city']}\n</parameter>\n"
    '<parameter=days>\n3\n</parameter>\n<parameter=units>\n["C", "F"]\n</parameter>\n'
    "</function>\n</tool_call>"
)
GLM = (
    f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{PARIS['city']}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>units</arg_key>\n"
    '<arg_value>["C", "F"]</arg_value>\n</tool_call>'
)
HEADER = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
QUOTE = '<|"|>'
DEEP = '{"a":' * 300 + "1" + "}" * 300
# A text of each family that calls both tools, and the parts of the text before the calls.
WRITTEN = [
    ("hermes", f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n"
     f"<tool_call>\n{NOW}\n</tool_call>", "", "Let me see."),
    ("qwen3.5", f"<think>\nHm.\n</think>\n\n{XML}\n<tool_call>\n<function=now>\n</function>\n"
     "</tool_call>\n", "Hm.", ""),
    ("glm", f"{GLM}\n<tool_call>now\n</tool_call>", "", ""),
    ("llama", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
     '{"name": "now", "parameters": {}}', "", ""),
    ("gpt-oss", f"<|channel|>analysis<|message|>Hm.{NEXT}{HEADER.format('get_weather')}{ARGUMENTS}"
     f"{NEXT} to=functions.now<|channel|>commentary json<|message|>{{}}", "Hm.", ""),
    ("gemma4", f"<|channel>thought\nHm.<channel|>Look:<|tool_call>"
     f"{GEMMA.format(QUOTE, PARIS['city'])}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
     "Hm.", "Look:"),
    ("functiongemma", f"<start_function_call>{GEMMA.format('<escape>', PARIS['city'])}"
     "<end_function_call><start_function_call>call:now{}<end_function_call>", "", ""),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]x[ARGS]{{}}",
     "", ""),
    ("mistral", f"[TOOL_CALLS][{CALL}, {NOW}]", "", ""),
]  # fmt: skip
PROMPT = "<|assistant|>\n"


def read(parts: Parts) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return parts.reasoning, parts.answer, calls


@pytest.mark.parametrize(("family", "text", "reasoning", "answer"), WRITTEN)
def test_each_familys_calls_are_found_however_the_text_is_cut(
    family: str, text: str, reasoning: str, answer: str
) -> None:
    expected = (reasoning, answer, [("get_weather", PARIS), ("now", {})])
    assert read(whole(split_of(TEMPLATES[family], PROMPT, TOOLS), text)) == expected
    choose = random.Random(text)
    for longest in (1, 3, 9, 40):
        split = split_of(TEMPLATES[family], PROMPT, TOOLS)
        assert read(in_pieces(split, text, choose, longest)) == expected


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "No call, <tool_ is a word.\n\n  "),
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call> and more'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "argu'),
        ("qwen3.5", "<tool_call>\nnow()\n</tool_call>"),
        ("glm", "<tool_call><arg_key>x</arg_key></tool_call>"),
        ("llama", '{"name": "unknown", "parameters": {}}'),
        ("llama", '{"city": "Paris"}'),
        ("llama", '  {"name": "now", "par'),
        ("llama", "A {"),
        ("gemma4", "<|tool_call>call:now{city:<tool_call|>"),
        ("gemma4", "<|tool_call>call:now{a:[1,2}<tool_call|>"),
        ("functiongemma", "<start_function_call>now<end_function_call>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{"),
        ("hermes", ""),
        ("llama", ""),
        # Blank text before it stays too.
        ("hermes", "A\n\n<tool_call>not JSON</tool_call>\n<tool_call>[]</tool_call>\n"),
        # Numbers that are not JSON, and values that are nested too deeply.
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "now", "arguments": {DEEP}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("llama", '{"name": "now", "parameters": {"a": -Infinity}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]now[ARGS]5"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        # Calls that were cut off, whose missing parameters a tool must not be run without.
        ("qwen3.5", "<tool_call>\n<function=now>\n"),
        ("qwen3.5", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2"),
        ("glm", "<tool_call>get_wea"),
        ("glm", "<tool_call>get_weather"),
        ("glm", "<tool_call>get_weather<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b"),
    ],
)
def test_what_is_no_call_stays_in_the_answer(family: str, text: str) -> None:
    choose = random.Random(text)
    for longest in (1, 5, 100):
        split = split_of(TEMPLATES[family], PROMPT, TOOLS)
        assert in_pieces(split, text, choose, longest) == Parts(answer=text)


def test_calls_are_not_looked_for_without_tools() -> None:
    text = f"<tool_call>\n{CALL}\n</tool_call>"
    assert split_of(TEMPLATES["hermes"], PROMPT) is None
    assert split_of(TEMPLATES["hermes"], PROMPT, {}) is None
    reasoning = split_of(TEMPLATES["qwen3.5"], PROMPT)
    assert whole(reasoning, text) == Parts(answer=text)


def test_text_after_a_call_stays() -> None:
    split = split_of(TEMPLATES["hermes"], PROMPT, TOOLS)
    parts = whole(
        split, f"A\n<tool_call>{NOW}</tool_call>\n\nB\n\n<tool_call>{NOW}</tool_call>\nC\n"
    )
    assert parts == Parts("", "A\n\nB\nC\n", (ToolCall("now", "{}"),) * 2)


def test_values_have_the_types_of_the_schema() -> None:
    """A text that looks like a number stays a text; what is no JSON stays a text too."""
    body = (
        "<function=get_weather><parameter=city>\n12\n</parameter><parameter=days>12</parameter>"
        "<parameter=units>C</parameter><parameter=other>True</parameter></function>"
    )
    (call,) = tool_format(TEMPLATES["qwen3.5"]).calls(body, TOOLS)
    assert json.loads(call.arguments) == {"city": "12", "days": 12, "units": "C", "other": True}


def test_gemmas_arguments() -> None:
    text = '{a:<|"|>x,}:<|"|>, b : {c:[],<|"|>d e<|"|>:null}, "f":-1.5, g:true, h:bare word}'
    found = {"a": "x,}:", "b": {"c": [], "d e": None}, "f": -1.5, "g": True, "h": "bare word"}
    assert parsed(text, QUOTE) == found
    for wrong in ("", "{", "{a}", "{a:}", "{a:1", "[1]", "{a:1}}", '{a:<|"|>x}', "{a:" * 100):
        with pytest.raises(ValueError, match=r".+"):
            parsed(wrong, QUOTE)


def test_a_template_without_a_known_format_is_refused() -> None:
    with pytest.raises(UsageError, match="no format of tool calls that is known here"):
        format_of("{{ messages }}")


@pytest.mark.parametrize("family", ["hermes", "qwen3.5", "llama"])
def test_a_required_calls_grammar_allows_what_the_family_writes(family: str) -> None:
    """And nothing else: the call's name, its arguments' types and its end are checked."""
    guidance = pytest.importorskip("llguidance")
    tokens = guidance.LLTokenizer("byte")
    grammar = tool_format(TEMPLATES[family]).grammar({"get_weather": WEATHER})
    assert guidance.LLMatcher.validate_grammar(grammar, tokens) == ""

    def allows(text: str) -> bool:
        matcher = guidance.LLMatcher(tokens, grammar, log_level=0)
        ids = tokens.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    written = {
        "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
        "qwen3.5": XML,
        "llama": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    }[family]
    assert allows(written)
    parts = whole(split_of(TEMPLATES[family], PROMPT, TOOLS, guided=True), written)
    assert read(parts) == ("", "", [("get_weather", PARIS)])
    assert not allows(written.replace("get_weather", "now"))
    assert not allows(written.replace("3", "three"))
    assert not allows("Sorry. " + written)
    assert not allows(written[:-1])


CHANNEL_CALL = HEADER.format("get_weather")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "begins", "ends"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "', '"}}</tool_call>'),
        ("qwen3.5", "<tool_call><function=get_weather><parameter=city>",
         "</parameter></function></tool_call>"),
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>",
         "</arg_value></tool_call>"),
        ("llama", '{"name": "get_weather", "parameters": {"city": "', '"}}'),
        ("gpt-oss", CHANNEL_CALL + '{"city": "', '"}'),
        ("gemma4", f"<|tool_call>call:get_weather{{city:{QUOTE}", f"{QUOTE}}}<tool_call|>"),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "', '"}'),
    ],
)  # fmt: skip
def test_long_arguments_take_time_in_proportion(family: str, begins: str, ends: str) -> None:
    """Twenty times as long if each piece looked at all that came before."""
    text, split = begins + "x" * 600_000 + ends, split_of(TEMPLATES[family], PROMPT, TOOLS)
    began, calls = time.process_time(), []
    for at in range(0, len(text), 3):
        calls += split.take(text[at : at + 3]).calls
    (call,) = [*calls, *split.finish().calls]
    assert time.process_time() - began < 8
    assert len(json.loads(call.arguments)["city"]) == 600_000


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("glm", "<tool_call>f<arg_key>" + "a</arg_key><arg_value>" * 20_000 + "</tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_value>b" * 20_000),
        ("qwen3.5", "<tool_call><function=f>" + "<parameter=a>" * 20_000 + "</tool_call>"),
        ("qwen3.5", "<tool_call><function=f>" + " " * 200_000 + "x</tool_call>"),
        ("hermes", "a" + "\n" * 200_000 + "b"),
        ("hermes", "<tool_call>" * 20_000),
    ],
)
def test_no_text_takes_long_to_read(family: str, text: str) -> None:
    """The server's loop splits answers, so that a slow one would stop all others."""
    began = time.process_time()
    assert whole(split_of(TEMPLATES[family], PROMPT, TOOLS), text) == Parts(answer=text)
    assert time.process_time() - began < 5


def test_a_channels_call_that_cannot_be_read_is_an_answer() -> None:
    split = split_of(TEMPLATES["gpt-oss"], PROMPT, TOOLS)
    text = CHANNEL_CALL + '{"city": "Par'
    assert whole(split, text) == Parts(answer=text)


def test_arguments_are_utf_8() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "\\ud83d\\ude00 \\ud800"}}</tool_call>'
    parts = whole(split_of(TEMPLATES["hermes"], PROMPT, TOOLS), text)
    assert parts.calls == (ToolCall("now", '{"a": "\U0001f600 \ufffd"}'),)


def test_a_tag_that_is_named_before_a_call_is_text() -> None:
    split = split_of(TEMPLATES["hermes"], PROMPT, TOOLS)
    parts = whole(split, f"I use <tool_call> now:\n<tool_call>{NOW}</tool_call>")
    assert parts == Parts("", "I use <tool_call> now:", (ToolCall("now", "{}"),))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f"<tool_call>[{NOW}, {NOW}]</tool_call>"),
        ("hermes", f"<tool_call>{NOW}</tool_call><tool_call>{NOW}</tool_call>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"),
        ("llama", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'),
    ],
)
def test_only_the_first_of_several_calls_where_parallel_calls_are_off(family, text) -> None:
    assert len(whole(split_of(TEMPLATES[family], PROMPT, TOOLS), text).calls) == 2
    split = split_of(TEMPLATES[family], PROMPT, TOOLS, parallel=False)
    assert whole(split, text) == Parts(calls=(ToolCall("now", "{}"),))


# As pydantic and zod write them.
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ODD: dict[str, Any] = {
    "$defs": {
        "Unit": {"type": "string", "enum": ["C", "F"]},
        "Spot": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                 "additionalProperties": False},
    },
    "properties": {
        "spot": {"$ref": "#/$defs/Spot"},
        "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        "note": NULLABLE,
        "code": {"type": ["string", "null"]},
        "many": {"type": ["integer", "null"]},
        "id": {"type": ["string", "integer"]},
        "any": True,
    },
    "required": ["spot"],
}  # fmt: skip


def test_values_have_types_that_are_unions_and_references() -> None:
    values = {"spot": '{"x": 1}', "unit": "C", "note": "12", "code": "null", "many": "null",
              "id": "1.5", "any": "[1]"}  # fmt: skip
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    (call,) = tool_format(TEMPLATES["qwen3.5"]).calls(
        f"<function=odd>\n{body}</function>", {"odd": ODD}
    )
    assert json.loads(call.arguments) == {
        "spot": {"x": 1}, "unit": "C", "note": "12", "code": None, "many": None, "id": "1.5",
        "any": [1],
    }  # fmt: skip


def odd_call(family: str, values: dict[str, Any]) -> str:
    """Return a call of the tool `odd` as the family writes it."""
    texts = {key: value if isinstance(value, str) and key != "id" else json.dumps(value)
             for key, value in values.items()}  # fmt: skip
    xml = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    written = json.dumps(values)
    return {
        "hermes": f'<tool_call>\n{{"name": "odd", "arguments": {written}}}\n</tool_call>',
        "qwen3.5": f"<tool_call>\n<function=odd>\n{xml}</function>\n</tool_call>",
        "llama": f'{{"name": "odd", "parameters": {written}}}',
    }[family]


@pytest.mark.parametrize("family", ["hermes", "qwen3.5", "llama"])
def test_grammars_have_unions_references_and_optional_texts(family: str) -> None:
    guidance = pytest.importorskip("llguidance")
    tokens = guidance.LLTokenizer("byte")
    grammar = tool_format(TEMPLATES[family]).grammar(
        {"now": {}, "odd": ODD, "f": {"type": "object"}}
    )
    assert guidance.LLMatcher.validate_grammar(grammar, tokens) == ""

    def allows(text: str) -> bool:
        matcher = guidance.LLMatcher(tokens, grammar, log_level=0)
        ids = tokens.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    spot = {"spot": {"x": 1}}
    for given in (
        spot,
        {**spot, "unit": "C", "note": "12", "code": "a\nb", "many": 3, "id": 5},
        {**spot, "code": "x"},
        {**spot, "unit": None, "note": None, "many": None, "id": "five", "any": [1, {}]},
    ):
        text = odd_call(family, given)
        assert allows(text)
        (call,) = whole(split_of(TEMPLATES[family], PROMPT, {"odd": ODD}, guided=True), text).calls
        assert json.loads(call.arguments) == given
    for wrong in ({}, {"spot": {"x": "a"}}, {**spot, "unit": "K"}, {**spot, "many": "a"}):
        assert not allows(odd_call(family, wrong))
    # Arguments are always an object.
    for name in ("odd", "now"):
        text = odd_call(family, spot).replace("odd", name)
        assert not allows(text.replace(json.dumps(spot), "5").replace('{"x": 1}', "5"))


def test_a_parameter_that_cannot_be_written_is_refused() -> None:
    schema = {"properties": {"a>b": {"type": "string"}}}
    with pytest.raises(UsageError, match="cannot write a parameter with the name 'a>b'"):
        tool_format(TEMPLATES["qwen3.5"]).grammar({"f": schema})
    # What is no schema at all is left to the grammar's own check.
    for odd in ({"properties": 5}, {"properties": {"a": 5}, "required": 5}, {"required": [5]}):
        assert tool_format(TEMPLATES["qwen3.5"]).grammar({"f": odd})
