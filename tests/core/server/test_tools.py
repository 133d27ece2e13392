"""Tools in chats: what the model sees of them, and the calls that come back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from running import HELLO, Running, serving
from tooled import TEMPLATES, TIME, WEATHER, write_tooled

from triforce_core.loading.open_model import OpenModel
from triforce_core.requests.answer.tool_formats import LlamaCalls, tool_format

pytest.importorskip("llguidance")
BASE = {"model": "tiny", "messages": HELLO, "tools": [WEATHER, TIME], "temperature": 0}
NAMED = {"type": "function", "function": {"name": "get_weather"}}

REQUIRED = {"tool_choice": "required"}
DEEP = json.loads('{"a":' * 300 + "1" + "}" * 300)
# A body's path, what it needs besides the model, and a field of any content in it.
FREE = [
    ("/v1/chat/completions", {"messages": HELLO}, "chat_template_kwargs"),
    ("/v1/chat/completions", {"messages": HELLO}, "metadata"),
    ("/v1/responses", {"input": "Hi"}, "metadata"),
    ("/v1/responses", {"input": "Hi"}, "chat_template_kwargs"),
    ("/api/chat", {"messages": HELLO}, "format"),
    ("/api/generate", {"prompt": "Hi"}, "format"),
]


def function(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.fixture(scope="module", params=["hermes", "qwen3.5", "llama", "gpt-oss"])
def tooled(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_tooled(tmp_path_factory.mktemp("tooled"), request.param)
    with serving(model, max_context=2000) as running:
        yield running


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(write_tooled(tmp_path_factory.mktemp("hermes"), "hermes"), max_context=2000) as it:
        yield it


def checked(arguments: str) -> None:
    given = json.loads(arguments)
    assert given["city"] in ("Paris", "Rome")
    assert given["days"] in (1, 2, 3)


def test_a_required_call_comes_back_as_one_whole_and_streamed(tooled) -> None:
    """The model is random: only the grammar makes it call the tool."""
    create = tooled.client.chat.completions.create
    choice = create(**BASE, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, len(call.id)) == ("function", "get_weather", 9)
    checked(call.function.arguments)
    chunks = list(create(**BASE, tool_choice=NAMED, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.index == 0
    assert streamed.function.model_dump() == call.function.model_dump()
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert create(**BASE, tool_choice="required").choices[0].finish_reason == "tool_calls"


def test_a_template_sees_tools_calls_and_results(hermes) -> None:
    messages = [
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "abc",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "Sun"}]},
    ]
    rendered: list[str] = []
    conversations = hermes.worker.conversations
    turn = conversations.turn

    def recorded(*given: Any) -> Any:
        rendered.append(turn(*given).text)
        return turn(*given)

    conversations.turn = recorded
    try:
        create = hermes.client.chat.completions.create
        base = {"model": "tiny", "messages": messages, "max_tokens": 1, "tools": [TIME]}
        create(**base)
        create(**base, tool_choice="none")
    finally:
        conversations.turn = turn
    text = "<user>Rome?<assistant>get_weather([('city', 'Rome')])<tool get_weather>Sun<answer>"
    assert rendered[0].endswith(text)
    assert json.loads(rendered[0].removesuffix(text)) == TIME
    assert rendered[1] == text


def test_one_call_at_most_where_parallel_calls_are_off(hermes) -> None:
    """The answer ends where its first call does."""
    seen: list[Any] = []
    submit = hermes.worker.submit
    hermes.worker.submit = lambda jobs: (seen.extend(jobs), submit(jobs))[1]
    try:
        create = hermes.client.chat.completions.create
        create(**BASE, max_tokens=2, parallel_tool_calls=False)
        create(**BASE, max_tokens=2, parallel_tool_calls=True)
    finally:
        hermes.worker.submit = submit
    assert [job.params.stop for job in seen] == [("</tool_call>",), ()]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": [TIME, TIME]}, "two tools have the same name"),
        (
            {"tools": [TIME], "tool_choice": NAMED},
            "names 'get_weather', which is none of the tools",
        ),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type must be one of 'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name must match",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}],
                    }
                ]
            },
            "the arguments of a call are a JSON object, as text",
        ),
        ({"tools": [TIME] * 600}, "tools must have 512 entries or less"),
        (
            {"tools": [function(properties={"a": {"$ref": "#/nowhere"}})]} | REQUIRED,
            "a call of these tools cannot be required: .* '/nowhere' does not exist",
        ),
        (
            {"tools": [function(properties={"a": {"$ref": "#/nowhere"}})], "stream": True}
            | REQUIRED,
            "a call of these tools cannot be required",
        ),
        ({"tools": [function(x={"y": DEEP})]}, "parameters: the value is nested too deeply"),
    ],
)
def test_wrong_tools_are_refused(hermes, change: dict[str, Any], said: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError, match=said):
        hermes.client.chat.completions.create(**body)


SHAPE = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}},
    "required": ["done"],
    "additionalProperties": False,
}


def test_an_answer_is_a_call_or_follows_the_response_format(tooled: Running) -> None:
    """The model is random: only the grammar makes the one or the other whole. A call of Llama's is
    JSON, as an answer is.
    """
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE}}
    asked = BASE | {"response_format": wanted}
    if isinstance(tool_format(tooled.worker.engine.tokenizer.chat_template), LlamaCalls):
        with pytest.raises(openai.BadRequestError, match="cannot be used in one request"):
            tooled.client.chat.completions.create(**asked)
        return
    # The bytes with which a call begins, in most families.
    for bias in {}, {ord("<"): 100}, {ord("{"): 100}:
        choice = tooled.client.chat.completions.create(**asked, logit_bias=bias).choices[0]
        if choice.message.tool_calls:
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert call.function.name in ("get_weather", "now")
        else:
            assert type(json.loads(choice.message.content)["done"]) is bool
    # A call that is required is not an answer.
    choice = tooled.client.chat.completions.create(**asked, tool_choice="required").choices[0]
    assert choice.message.tool_calls


@pytest.mark.parametrize(
    ("family", "call", "answer"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "{}"),
        ("qwen3.5", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "{}"),
        ("gpt-oss", "", "<|channel|>final<|message|>{}"),
    ],
)
def test_a_grammar_takes_a_call_or_an_answer(tmp_path, family: str, call: str, answer: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    with closing(OpenModel.at(write_tooled(tmp_path, family))) as model:
        tokenizer = model.tokenizer
        form = tool_format(TEMPLATES[family])
        grammar = form.grammar_or_answer({"now": {}}, json.dumps(SHAPE))
        known = tokenizer.for_grammars(model.checkpoint.config.vocab, None)
        for text, right in (
            *((call, True), (answer.replace("{}", '{"done": true}'), True)),
            *((answer, False), (answer.replace("{}", '{"done": 1}'), False), ("Hello", False)),
        ):
            matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(grammar))
            ids = tokenizer.encode_rendered(text)
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken == right or not text, text


def test_a_function_without_parameters_gets_no_arguments(tooled: Running) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    asked = BASE | {"tools": [bare], "tool_choice": "required", "temperature": 1}
    (call,) = tooled.client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {}


def test_long_descriptions_count_as_the_prompt(hermes) -> None:
    function = {"name": "f", "description": "x" * 40_000}
    with pytest.raises(openai.BadRequestError, match="context length is 2000"):
        hermes.client.chat.completions.create(
            model="tiny", messages=HELLO, tools=[{"type": "function", "function": function}]
        )


def test_the_answer_can_be_sent_back(hermes: Running) -> None:
    create = hermes.client.chat.completions.create
    message = create(**BASE, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun"}
    messages = [*HELLO, message.model_dump(), result]
    assert create(**BASE | {"messages": messages}, max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize(("path", "body", "field"), FREE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_json_in_utf_8_is_refused(
    hermes: Running, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    """Python reads it, and an answer could not repeat it."""
    for odd in ({"a": float("nan")}, {"a": [float("inf")]}, {"a": "\ud800"}, {"\ud800": 1}, DEEP):
        asked = {"model": "tiny", "stream": stream, **body, field: odd}
        status, _, answer = hermes.ask("POST", path, asked)
        assert status == 400
        error = json.loads(answer)["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert message.startswith(f"{field}: ")


def test_a_call_cannot_be_required_without_llguidance(hermes: Running, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"pip install 'triforce-offload\[grammar"):
            hermes.client.chat.completions.create(**BASE, tool_choice="required", stream=stream)


def test_several_streamed_choices_with_calls_can_be_sent_back(tooled: Running) -> None:
    """By the client's own helper, which adds what it has read to the message."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    asked = BASE | {"tools": [strict], "tool_choice": "required"}
    with tooled.client.chat.completions.stream(
        **asked, n=2, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    ) as stream:
        kept = stream.until_done().get_final_completion()
    assert kept.usage.completion_tokens == sum(len(each.logprobs.content) for each in kept.choices)
    for choice in kept.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        checked(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sun"}
        answer = tooled.client.chat.completions.create(
            model="tiny", messages=[*HELLO, choice.message, result], max_tokens=2
        )
        assert answer.usage.completion_tokens
