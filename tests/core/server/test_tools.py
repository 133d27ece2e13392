"""Tools in chats: what the model sees of them, and the calls that come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import HELLO, Running, serving
from tooled import TIME, WEATHER, write_tooled

pytest.importorskip("llguidance")
BASE = {"model": "tiny", "messages": HELLO, "tools": [WEATHER, TIME], "temperature": 0}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


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
            {"tools": [TIME], "response_format": {"type": "json_object"}},
            "a response_format and tools cannot be used in one request",
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
    ],
)
def test_wrong_tools_are_refused(hermes, change: dict[str, Any], said: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError, match=said):
        hermes.client.chat.completions.create(**body)


def test_long_descriptions_count_as_the_prompt(hermes) -> None:
    function = {"name": "f", "description": "x" * 40_000}
    with pytest.raises(openai.BadRequestError, match="has room for 2000"):
        hermes.client.chat.completions.create(
            model="tiny", messages=HELLO, tools=[{"type": "function", "function": function}]
        )


def test_the_answer_can_be_sent_back(hermes: Running) -> None:
    create = hermes.client.chat.completions.create
    message = create(**BASE, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun"}
    messages = [*HELLO, message.model_dump(), result]
    assert create(**BASE | {"messages": messages}, max_tokens=2).usage.completion_tokens == 2
