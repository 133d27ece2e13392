"""What requests may ask for: refusals are sentences, and what other servers take is taken."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers import add_tokenizer, make_model, write_tokens_of_bytes
from running import CONTEXT, HELLO, Running, serving

from triforce_core import Engine, SamplingParams

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
# Of the validator, and of nobody who asks.
INSIDES = (
    "str",
    "list[",
    "function",
    "TextPart",
    "Input should",
    "valid",
    "Value error",
    "JSON decode",
)


def refusal(server: Running, path: str, body: Any, **headers: str) -> dict[str, Any]:
    status, _, answer = server.ask("POST", path, body, headers)
    assert status == 400
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not any(inside in error["message"] for inside in INSIDES), error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "change", "param", "said"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0.content",
         "messages.0.content: parts of type 'image_url' are not supported: the model takes text "
         "alone"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content",
         "messages.0.content: parts without a type are not supported: the model takes text alone"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content",
         "messages.0.content: the content of a message is text, or a list of parts with a type "
         "and a text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
         "messages.0.content",
         "messages.0.content: the content of a message is text, or a list of parts with a type "
         "and a text"),
        (CHAT, {"messages": "Hello"}, "messages", "messages must be a list"),
        (CHAT, {"messages": ["Hello"]}, "messages.0", "messages.0 must be an object"),
        (CHAT, {"messages": None}, "messages", "messages is missing"),
        (CHAT, {"odd": 1}, "odd", "odd is not supported by this server"),
        (CHAT, {"temprature": 1}, "temprature",
         "temprature is not supported by this server (did you mean temperature?)"),
        (CHAT, {"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents",
         "messages.0.contents is not supported by this server (did you mean content?)"),
        (COMPLETE, {"prompt": "Hi", "mirostat": 2}, "mirostat",
         "mirostat is not supported by this server"),
        (CHAT, {"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n",
         "repeat_last_n is not supported by this server"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities",
         "modalities is not supported by this server"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs",
         "top_logprobs: top_logprobs needs logprobs to be true"),
        (CHAT, {"max_tokens": "x"}, "max_tokens", "max_tokens must be a whole number"),
        (CHAT, {"n": 17}, "n", "n must be 16 or less"),
        (CHAT, {"temperature": [1]}, "temperature", "temperature must be a number"),
        (CHAT, {"stop": [1]}, "stop", "stop: stop is a text or a list of up to 16 texts"),
        (CHAT, {"tool_choice": "any"}, "tool_choice",
         'tool_choice: tool_choice is "none", "auto", "required", or one of the tools by its name'),
        (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs",
         "chat_template_kwargs must be an object"),
        (COMPLETE, {"prompt": "Hi", "echo": True}, "echo",
         "echo: echo is not supported: an answer is what follows the prompt"),
        (COMPLETE, {"prompt": "Hi", "best_of": 3}, "best_of",
         "best_of: best_of is not supported: ask for n texts"),
        (COMPLETE, {"prompt": {"a": 1}}, "prompt",
         "prompt: a prompt is text, a list of token ids, or a list of up to 16 of these"),
        (COMPLETE, {"prompt": [[1.5]]}, "prompt",
         "prompt: a prompt is text, a list of token ids, or a list of up to 16 of these"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_sentence(
    server, path: str, change: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": "tiny", "max_tokens": 2} | ({"messages": HELLO} if path == CHAT else {})
    error = refusal(server, path, body | change)
    assert error["message"] == said
    assert error["param"] == param


def test_options_of_other_servers_that_request_nothing_are_taken(server) -> None:
    nothing = {
        **{"cache_prompt": True, "add_generation_prompt": True, "modalities": ["text"]},
        **{"min_tokens": 0, "mirostat": 0, "ignore_eos": False, "typical_p": 1.0, "tfs_z": 1},
        **{"repeat_last_n": 64, "repeat_penalty": 1.0, "top_logprobs": 0},
    }
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    for path, text in ((CHAT, {"messages": HELLO}), (COMPLETE, {"prompt": "Hi"})):
        if path == COMPLETE:
            del nothing["top_logprobs"]
        answers = []
        for more in ({}, nothing):
            status, _, answer = server.ask("POST", path, body | text | more)
            assert status == 200, answer
            answers.append(json.loads(answer)["choices"])
        assert answers[0] == answers[1]


def test_the_reason_of_a_refusal_is_logged_on_one_line(server) -> None:
    before = len(server.log)
    refusal(server, CHAT, {"model": "tiny", "messages": HELLO, "o\x1b[1m\nd" + "d" * 999: 1})
    (line,) = server.log[before:]
    assert line.startswith(f"refused: {CHAT}, 400: o [1m dddd")
    assert len(line) == 500


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_body_that_is_no_json_is_told_where(server, path: str) -> None:
    error = refusal(server, path, '{"model": "tiny", }')
    assert error["message"].startswith("the body is not JSON at character 1")
    assert error["param"] is None
    needed = "the body must be a JSON object, sent with the header Content-Type: application/json"
    for body in ("[]", '"text"', "7"):
        assert refusal(server, path, body)["message"] == needed
    for body in (b'{"a": "\xff"}', "[" * 100_000, '{"model": ' + "1" * 5000 + "}"):
        message = refusal(server, path, body)["message"]
        assert message == "the body cannot be read as JSON in UTF-8"
    # Pages elsewhere may send other types without being asked: they are never taken for JSON.
    whole = json.dumps({"model": "tiny", "messages": HELLO})
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert refusal(server, path, whole, **{"Content-Type": kind})["message"] == needed
    assert refusal(server, path, "{", **{"Content-Type": "text/plain"})["message"] == needed


def test_a_length_beyond_the_context_ends_where_that_does(server) -> None:
    create = server.client.chat.completions.create
    base = {"model": "tiny", "messages": HELLO, "temperature": 0}
    for asked in ({"max_tokens": 1000}, {"max_completion_tokens": 10**9}, {}):
        answer = create(**base, **asked)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == CONTEXT
    text = server.client.completions.create(model="tiny", prompt="Hi", max_tokens=1000)
    assert (text.choices[0].finish_reason, text.usage.total_tokens) == ("length", CONTEXT)


def test_models_were_made_when_the_server_was(server) -> None:
    (model,) = server.client.models.list()
    assert time.time() - 3600 < model.created <= time.time()
    assert server.client.models.retrieve("tiny").created == model.created


@pytest.mark.parametrize("name", ["repeat_penalty", "repetition_penalty"])
def test_a_repeat_penalty_is_the_engines_by_either_name(server, speaking, name: str) -> None:
    params = SamplingParams(20, temperature=0, repeat_penalty=1.7)
    with Engine.from_pretrained(speaking, device="cpu", max_context=CONTEXT) as engine:
        expected, plain = (
            engine.chat(HELLO, each).text for each in (params, SamplingParams(20, temperature=0))
        )
    assert expected != plain, "it would be no test"
    base = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    answer = server.client.chat.completions.create(**base, extra_body={name: 1.7})
    assert answer.choices[0].message.content == expected


TEMPLATE = (
    "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}[quick]{% endif %}<a>"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model's template has variables."""
    directory: Path = tmp_path_factory.mktemp("thinking")
    make_model("llama", directory)
    add_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with serving(directory) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "added"),
    [
        ({}, ""),
        ({"reasoning_effort": "high"}, "[high]"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[quick]"),
        ({"chat_template_kwargs": {"enable_thinking": True, "unheard_of": 1}}, ""),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
         "[low][quick]"),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, "[none]"),
    ],
)  # fmt: skip
def test_variables_reach_the_template(thinking, asked: dict[str, Any], added: str) -> None:
    create, base = thinking.client.chat.completions.create, {"model": "tiny", "temperature": 0}
    answer = create(messages=HELLO, max_tokens=8, extra_body=asked, **base)
    # A token a character, and one for each of <u> and <a>.
    assert answer.usage.prompt_tokens == len("Hello") + 2 + len(added)
    written = thinking.client.completions.create(prompt=f"<u>Hello{added}<a>", max_tokens=8, **base)
    assert answer.choices[0].message.content == written.choices[0].text


@pytest.mark.parametrize("name", ["chat_template", "messages", "tokenize", "conversation", "tools"])
def test_a_request_does_not_change_how_the_template_is_called(thinking, name: str) -> None:
    create = thinking.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match=f"template's {name} cannot be set"):
        create(model="tiny", messages=HELLO, extra_body={"chat_template_kwargs": {name: "x"}})


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model's tokens are bytes, so that any JSON has tokens."""
    pytest.importorskip("llguidance")
    directory = tmp_path_factory.mktemp("bytes")
    write_tokens_of_bytes(directory)
    with serving(directory) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_exhausts_the_grammars_limits_is_an_error(of_bytes, stream: bool) -> None:
    schema = {"type": "integer", "multipleOf": 999999937, "minimum": 1e15}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "response_format": asked}
    status, _, answer = of_bytes.ask("POST", COMPLETE, body | {"stream": stream})
    assert b"the json_schema exceeds the limits of llguidance" in answer
    assert b'"stop"' not in answer
    assert stream or status == 400
