"""Anthropic's Messages API, by its own client, and as Claude Code asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from running import HELLO, Running, serving
from tooled import SHOWN, TEMPLATES, write_tooled

from triforce_core.requests.answer.parts import Parts, ToolCall
from triforce_core.requests.stream import Piece
from triforce_core.server.messages.anthropic import MessagesRequest
from triforce_core.server.settings import ServerSettings
from triforce_core.server.wording.anthropic import AnthropicMessages
from triforce_core.server.wording.wording import WholeAnswer, refusal

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "go", "description": "Go there", "input_schema": SCHEMA}
# The client knows no temperature any more. The server takes it, as older clients send it.
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
PATH = "/v1/messages"
CLIENT = {"anthropic-version": "2023-06-01"}
BILLED = "x-anthropic-billing-header: cc_version=2.1.114.76c; cc_entrypoint=cli; cch=%s;"


def client_of(running: Running) -> anthropic.Anthropic:
    url = f"http://127.0.0.1:{running.port}"
    key = running.settings.api_key or "none"
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_tooled(tmp_path_factory.mktemp("tooled"), "qwen3.5")
    with serving(model, max_context=2000) as running:
        yield running


def test_a_message_has_the_chats_text_whole_and_streamed(tooled: Running) -> None:
    client = client_of(tooled)
    chat = tooled.client.chat.completions.create(messages=HELLO, **BASE)
    whole = client.messages.create(messages=HELLO, system="", **BASE)
    (block,) = whole.content
    assert block.text == chat.choices[0].message.content
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == 12
    used = whole.usage
    assert used.input_tokens + used.cache_read_input_tokens == chat.usage.prompt_tokens
    assert used.cache_read_input_tokens == chat.usage.prompt_tokens - 1
    with client.messages.stream(messages=HELLO, **BASE) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        last = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert last.content[0].text == block.text
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == chat.usage.prompt_tokens


def test_blocks_make_the_prompt_that_a_chat_of_the_same_messages_makes(tooled: Running) -> None:
    """Reasoning, calls and results of tools go where a chat has them."""
    marked = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I go."},
            {"type": "tool_use", "id": "c1", "name": "go", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "c2", "name": "go", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "Sun"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [
                {"type": "text", "text": "No "}, {"type": "text", "text": "way"}]},
            {"type": "text", "text": "And", **marked},
            {"type": "text", "text": " now?"}]},
    ]  # fmt: skip
    calls = [
        {"id": at, "type": "function",
         "function": {"name": "go", "arguments": json.dumps({"city": city})}}
        for at, city in (("c1", "Rome"), ("c2", "Paris"))
    ]  # fmt: skip
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I go.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "No way"},
        {"role": "user", "content": "And now?"},
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", **marked}]
    described = {"type": "function", "function": {
        "name": "go", "description": "Go there", "parameters": SCHEMA}}  # fmt: skip
    client = client_of(tooled)
    said = client.messages.create(messages=messages, system=system, tools=[TOOL], **BASE)
    theirs = tooled.client.chat.completions.create(messages=chat, tools=[described], **BASE)
    assert said.content[0].text == theirs.choices[0].message.content
    used = said.usage
    assert used.input_tokens + used.cache_read_input_tokens == theirs.usage.prompt_tokens
    counted = client.messages.count_tokens(
        model="tiny", messages=messages, system=system, tools=[TOOL]
    )
    assert counted.input_tokens == theirs.usage.prompt_tokens


def test_tools_are_called_whole_and_streamed_and_answered(tooled: Running) -> None:
    client = client_of(tooled)
    asked: dict[str, Any] = {"tools": [TOOL], "messages": HELLO, "model": "tiny", "max_tokens": 99}
    for choice in {"type": "any"}, {"type": "tool", "name": "go"}:
        said = client.messages.create(tool_choice=choice, **asked)
        (call,) = said.content
        assert (said.stop_reason, call.name) == ("tool_use", "go")
        assert call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(tool_choice={"type": "any"}, **asked) as stream:
        streamed = stream.get_final_message()
    (call,) = streamed.content
    assert streamed.stop_reason == "tool_use"
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(messages=turns, tools=[TOOL], **BASE)
    assert again.usage.output_tokens
    none = client.messages.create(tool_choice={"type": "none"}, **asked | {"max_tokens": 4})
    assert none.stop_reason == "max_tokens"


def test_a_schema_of_the_answer_is_kept(tooled: Running) -> None:
    shape = {"type": "json_schema", "schema": SCHEMA}
    for config in {"output_config": {"format": shape}}, {"output_format": shape}:
        body = {"messages": HELLO, **BODY, "max_tokens": 99, **config}
        said = json.loads(tooled.ask("POST", PATH, body, CLIENT)[2])
        assert json.loads(said["content"][0]["text"])["city"] in ("Paris", "Rome")
        assert said["stop_reason"] == "end_turn"


def test_a_stop_sequence_is_named(tooled: Running) -> None:
    client = client_of(tooled)
    free = client.messages.create(messages=HELLO, **BASE).content[0].text
    stop = next(each for each in free[1:] if each.isprintable() and each != "\ufffd")
    said = client.messages.create(messages=HELLO, stop_sequences=["never!", stop], **BASE)
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in said.content) == free[: free.index(stop)]


def test_an_answer_that_is_begun_goes_on(tooled: Running) -> None:
    """As llama.cpp does, and vLLM for `continue_final_message`: the prompt ends with the text."""
    begun = [*HELLO, {"role": "assistant", "content": "So "}]
    said = client_of(tooled).messages.create(messages=begun, **BASE)
    more = {"continue_final_message": True, "add_generation_prompt": False, "temperature": 0}
    chat = tooled.client.chat.completions.create(messages=begun, **BASE | {"extra_body": more})
    # The template of this model shows messages as they are.
    text = "<user>Hello<answer>So "
    raw = tooled.client.completions.create(prompt=text, **BASE)
    assert said.content[0].text == chat.choices[0].message.content == raw.choices[0].text


def test_a_number_that_changes_with_each_request_leaves_the_prefix_reusable(
    tooled: Running,
) -> None:
    """Claude Code's first line, as a block of its own and as the first line of a text."""
    long = "You are careful. " * 20
    reused = []
    for number, form in enumerate(["blocks", "text", "blocks"]):
        billed = BILLED % f"ab{number}"
        system: Any = f"{billed}\n{long}"
        if form == "blocks":
            system = [{"type": "text", "text": billed}, {"type": "text", "text": long}]
        body = {"system": system, "messages": HELLO, **BODY}
        said = json.loads(tooled.ask("POST", f"{PATH}?beta=true", body, CLIENT)[2])
        reused.append(said["usage"]["cache_read_input_tokens"])
    # The tokens of this model are bytes.
    assert min(reused[1:]) > len(long)


@pytest.mark.parametrize(
    ("change", "status", "kind", "said"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"unheard_of": 1}, 400, "invalid_request_error", "unheard_of is not supported"),
        ({"model": "claude"}, 404, "not_found_error", "there is no model 'claude'"),
        ({"messages": []}, 400, "invalid_request_error", "messages must have 1 or more"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400, "invalid_request_error", "tools of type 'web_search_20250305' are not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400, "invalid_request_error", "takes text alone"),
        (
            {"messages": [{"role": "user", "content": "x" * 3000}]},
            400, "invalid_request_error", "prompt is too long: the prompt has 30"),
        (
            {"tool_choice": {"type": "tool"}, "tools": [TOOL]},
            400, "invalid_request_error", "a choice of a tool needs its name"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers must be empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_anthropics_form(
    tooled: Running, change: dict[str, Any], status: int, kind: str, said: str
) -> None:
    body = {**BODY, "messages": HELLO, **change}
    found, _, answer = tooled.ask("POST", PATH, body)
    error = json.loads(answer)
    assert (found, error["type"], error["error"]["type"]) == (status, "error", kind), answer
    assert said in error["error"]["message"]


def test_answers_of_models_in_channels_cannot_be_begun(tmp_path) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "So"}]
    refused = pytest.raises(anthropic.BadRequestError, match="cannot begin")
    with serving(write_tooled(tmp_path, "gpt-oss")) as running, refused:
        client_of(running).messages.create(messages=begun, **BASE)


def test_answers_that_begin_with_reasoning_cannot_be_begun(tmp_path, monkeypatch) -> None:
    """A template that opens the reasoning whatever is asked, as DeepSeek-R1's does."""
    monkeypatch.setitem(TEMPLATES, "reasons", SHOWN + "<think>\n{# </think> #}")
    begun = [*HELLO, {"role": "assistant", "content": "So"}]
    refused = pytest.raises(anthropic.BadRequestError, match="begins with reasoning")
    with serving(write_tooled(tmp_path, "reasons")) as running, refused:
        client_of(running).messages.create(messages=begun, **BASE)


def test_clients_that_say_who_they_are_reuse_only_their_own_prefixes(tooled: Running) -> None:
    system = "You are only known to me. " * 9
    reused = []
    for user in ("one", "two", "two"):
        body = {"system": system, "messages": HELLO, "user": user, **BODY}
        said = json.loads(tooled.ask("POST", PATH, body, CLIENT)[2])
        reused.append(said["usage"]["cache_read_input_tokens"])
    assert reused[:2] == [0, 0]
    assert reused[2] > len(system)


def test_the_key_is_taken_from_either_header(tmp_path) -> None:
    settings = ServerSettings(name="tiny", api_key="secret")
    with serving(write_tooled(tmp_path, "hermes"), settings) as running:
        client = client_of(running)
        assert client.messages.create(messages=HELLO, **BASE).usage.output_tokens
        bearer = anthropic.Anthropic(base_url=str(client.base_url), auth_token="secret")
        assert [each.id for each in bearer.models.list()] == ["tiny"]
        for wrong in ({}, {"x-api-key": "other"}, {"authorization": "Bearer other"}):
            status, _, answer = running.ask("POST", PATH, {}, wrong)
            assert status == 401
            assert json.loads(answer)["error"]["type"] == "authentication_error"


class _Planned:
    """A splitter whose pieces are planned."""

    def __init__(self, *planned: Parts) -> None:
        self._planned = list(planned)

    def take(self, text: str) -> Parts:
        return self._planned.pop(0)

    def finish(self) -> Parts:
        return Parts()


def test_reasoning_text_and_calls_are_blocks_in_their_order() -> None:
    call = ToolCall("go", '{"city":"Rome"}')
    planned = Parts("Hm"), Parts("m."), Parts("", "I go", (call,)), Parts("", "", (call,))
    body = MessagesRequest(model="tiny", max_tokens=9, messages=HELLO)
    wording = AnthropicMessages("tiny", body, lambda: _Planned(*planned))
    said = [wording.piece(0, Piece("x", "plain")) for _ in planned]
    events = [json.loads(each.split("data: ")[1]) for each in "".join(said).split("\n\n")[:-1]]
    kinds = [
        (event["index"], event["type"].removeprefix("content_block_"), (
            event.get("delta") or event.get("content_block") or {"type": ""})["type"])
        for event in events
    ]  # fmt: skip
    assert kinds == [
        (0, "start", "thinking"),
        (0, "delta", "thinking_delta"),
        (0, "delta", "thinking_delta"),
        (0, "delta", "signature_delta"),
        (0, "stop", ""),
        (1, "start", "text"),
        (1, "delta", "text_delta"),
        (1, "stop", ""),
        (2, "start", "tool_use"),
        (2, "delta", "input_json_delta"),
        (2, "stop", ""),
        (3, "start", "tool_use"),
        (3, "delta", "input_json_delta"),
        (3, "stop", ""),
    ]


def test_a_stream_that_fails_ends_with_an_error() -> None:
    body = MessagesRequest(model="tiny", max_tokens=9, messages=HELLO)
    wording = AnthropicMessages("tiny", body, WholeAnswer)
    failed = wording.failed(refusal("planted", "server_error"))
    assert failed.startswith("event: error\n")
    error = json.loads(failed.split("data: ")[1])
    assert error == {"type": "error", "error": {"type": "api_error", "message": "planted"}}


def test_the_clients_tool_runner_goes_on_without_a_stored_thread(tooled: Running) -> None:
    """The runner first asks the server to store the conversation, and then sends all of it."""

    @anthropic.beta_tool
    def go(city: Literal["Paris", "Rome"]) -> str:
        """Go there."""
        return f"Sun in {city}"

    runner = client_of(tooled).beta.messages.tool_runner(
        model="tiny", max_tokens=120, tools=[go], tool_choice={"type": "any"}, messages=HELLO,
        max_iterations=2,
    )  # fmt: skip
    called, _ = list(runner)
    assert called.stop_reason == "tool_use"
    status, _, answer = tooled.ask(
        "POST", PATH, {**BODY, "messages": HELLO, "thread": {"type": "create"}}
    )
    details = json.loads(answer)["error"]["details"]
    assert (status, details["error_code"]) == (400, "thread_unsupported_request")
