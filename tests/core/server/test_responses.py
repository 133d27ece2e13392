"""OpenAI's Responses API, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import HELLO, Running, serving
from tooled import write_tooled

from triforce_core.requests.stream import Piece
from triforce_core.server.messages.responses import ResponsesRequest
from triforce_core.server.wording.responses import Responses
from triforce_core.server.wording.wording import WholeAnswer, refusal

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "name": "go", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_tooled(tmp_path_factory.mktemp("tooled"), "qwen3.5")
    with serving(model, max_context=2000) as running:
        yield running


def test_a_response_has_the_chats_text_whole_and_streamed(tooled: Running) -> None:
    client = tooled.client
    base = {"model": "tiny", "temperature": 0}
    chat = client.chat.completions.create(messages=HELLO, max_tokens=20, **base)
    whole = client.responses.create(input="Hello", max_output_tokens=20, **base)
    said = chat.choices[0].message
    assert whole.output_text == said.content
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[-1].status == "incomplete"
    assert whole.usage.output_tokens == 20
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    events = list(client.responses.create(input="Hello", max_output_tokens=20, stream=True, **base))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.output[-1].status == "incomplete"


def test_instructions_items_and_chats_of_the_same_messages_agree(tooled: Running) -> None:
    """The same prompt: reasoning, calls and their outputs go where a chat has them."""
    call = {"type": "function_call", "call_id": "c1", "name": "go", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Hm."}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "Sun"},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
            {"type": "output_text", "text": "So.", "annotations": []}]},
        {"role": "user", "content": "More"},
    ]  # fmt: skip
    function = {"name": "go", "arguments": call["arguments"]}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "More"},
    ]  # fmt: skip
    base = {"model": "tiny", "temperature": 0}
    client = tooled.client
    response = client.responses.create(
        input=items, instructions="Be brief.", max_output_tokens=12, **base
    )
    chat = client.chat.completions.create(messages=messages, max_tokens=12, **base)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_reasoning_and_text_between_calls_are_kept(tooled: Running) -> None:
    """A message of a chat has one reasoning and one text: what an answer had is put together."""

    def call(at: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{at}", "name": "go", "arguments": "{}"}

    def reasoned(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": "r", "summary": [], "content": content}

    said = {"type": "message", "role": "assistant", "content": "B"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "Sun"}
    items = [
        reasoned("1"),
        call(1),
        reasoned("2"),
        reasoned("3"),
        call(2),
        said,
        output,
        said,
        said,
    ]
    body = ResponsesRequest(model="tiny", input=[{"role": "user", "content": "Hi"}, *items])
    messages = [each.as_dict() for each in body.as_chat().messages]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", *["assistant"] * 2]
    assert messages[1]["reasoning_content"] == "123"
    assert messages[1]["content"] == "B"
    assert [each["id"] for each in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [each["content"] for each in messages[3:]] == ["B", "B"]


def test_a_response_that_fails_keeps_its_text() -> None:
    wording = Responses("tiny", ResponsesRequest(input="Hi"), None, WholeAnswer)
    wording.begin(1)
    for text in "Hel", "lo":
        wording.piece(0, Piece(text, "plain"))
    event = wording.failed(refusal("planted", "server_error"))
    response = json.loads(event.split("data: ")[1])["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "planted"}
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello")


def test_the_clients_stream_is_whole_and_can_be_sent_back(tooled: Running) -> None:
    asked = {"model": "tiny", "tools": [TOOL], "tool_choice": "required"}
    with tooled.client.responses.stream(input="Hi", **asked) as stream:
        response = stream.until_done().get_final_response()
    (call,) = response.output
    assert call.parsed_arguments["city"] in ("Paris", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
    with tooled.client.responses.stream(
        model="tiny", input=[{"role": "user", "content": "Hi"}, call, output], max_output_tokens=4
    ) as stream:
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete")
    items = [call, output, *last.response.output]
    again = tooled.client.responses.create(model="tiny", input=items, max_output_tokens=2)
    assert again.usage.output_tokens


def test_calls_are_items_and_can_be_sent_back(tooled: Running) -> None:
    create = tooled.client.responses.create
    base = {"model": "tiny", "tools": [TOOL], "tool_choice": {"type": "function", "name": "go"}}
    whole = create(input="Hello", **base)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "go", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
    items = [{"role": "user", "content": "Hello"}, call.model_dump(), output]
    assert create(model="tiny", input=items, max_output_tokens=2).usage.output_tokens == 2
    events = list(create(input="Hello", stream=True, **base))
    kinds = [event.type for event in events]
    assert kinds[2:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert json.loads(events[4].arguments)["city"] in ("Paris", "Rome")


def test_a_schema_of_the_answer_is_kept(tooled: Running) -> None:
    shape = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    response = tooled.client.responses.create(model="tiny", input="Hi", text={"format": shape})
    assert json.loads(response.output_text)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"previous_response_id": "resp_1"}, "responses are not stored here"),
        ({"tools": [{"type": "web_search"}]}, "tools of type 'web_search' are not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "takes text alone",
        ),
        ({"background": True}, "background"),
        ({"unheard_of": 1}, "unheard_of is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"model": "other"}, "there is no model"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tooled: Running, change: dict[str, Any], said: str
) -> None:
    body = {"model": "tiny", "input": "Hi", **change}
    status, _, answer = tooled.ask("POST", "/v1/responses", body)
    assert status in (400, 404)
    assert said in json.loads(answer)["error"]["message"]


def test_embeddings_are_refused_by_name(tooled: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
        tooled.client.embeddings.create(model="tiny", input="x")
