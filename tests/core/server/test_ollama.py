"""Ollama's API, for programs that know only that one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running import HELLO, Running, serving
from tooled import WEATHER, write_tooled

from triforce_core.server.settings import ServerSettings


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_tooled(tmp_path_factory.mktemp("tooled"), "qwen3.5")
    with serving(model, max_context=2000) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    status, _, answer = running.ask("POST", path, {"model": "tiny", **body})
    assert status == 200, answer
    return [json.loads(line) for line in answer.splitlines()]


def test_chats_have_the_text_of_the_other_api(tooled: Running) -> None:
    options = {"temperature": 0, "num_predict": 20}
    reply = tooled.client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=20
    )
    (whole,) = post(tooled, "/api/chat", messages=HELLO, options=options, stream=False)
    assert whole["message"] == {"role": "assistant", "content": reply.choices[0].message.content}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 20)
    assert whole["prompt_eval_count"] == reply.usage.prompt_tokens
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    lines = post(tooled, "/api/chat", messages=HELLO, options=options)
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    (text,) = post(tooled, "/api/generate", prompt="Hello", options=options, stream=False)
    assert text["response"] == whole["message"]["content"]


def test_raw_texts_are_continued_as_they_are(tooled: Running) -> None:
    expected = tooled.client.completions.create(
        model="tiny", prompt="Hello", temperature=0, max_tokens=8
    )
    options = {"temperature": 0, "num_predict": 8}
    lines = post(tooled, "/api/generate", prompt="Hello", raw=True, options=options)
    assert "".join(line["response"] for line in lines) == expected.choices[0].text


def test_a_request_without_a_prompt_only_loads_the_model(tooled: Running) -> None:
    for path, prompt in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        (answer,) = post(tooled, path, **prompt)
        assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_a_format_is_kept(tooled: Running) -> None:
    pytest.importorskip("llguidance")
    shape = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
             "additionalProperties": False}  # fmt: skip
    (answer,) = post(tooled, "/api/chat", messages=HELLO, format=shape, stream=False)
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)


def test_the_model_is_listed_and_described(tooled: Running) -> None:
    def get(path: str) -> Any:
        status, _, answer = tooled.ask("GET", path)
        assert status == 200
        return json.loads(answer)

    (listed,) = get("/api/tags")["models"]
    assert (listed["name"], listed["model"]) == ("tiny", "tiny")
    assert get("/api/ps")["models"][0]["context_length"] == 2000
    assert tuple(map(int, get("/api/version")["version"].split("."))) >= (0, 6, 4)
    (about,) = post(tooled, "/api/show")
    assert about["capabilities"] == ["completion", "tools", "thinking"]
    assert about["model_info"]["llama.context_length"] == 2000
    assert post(tooled, "/api/show", model="tiny:latest") == [about]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/chat", {"model": "other", "messages": HELLO}, "there is no model 'other'"),
        ("/api/show", {"model": "other"}, "there is no model 'other'"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]},
         "pictures are not supported"),
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}},
         "options.mirostat is not supported by this server"),
        ("/api/chat", {"messages": HELLO, "format": 3}, 'format is "json" or a JSON schema'),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/embed", {"input": "x"}, "embeddings are not supported"),
        ("/api/chat", {"messages": HELLO, "tools": [WEATHER, WEATHER]}, "the same name"),
        ("/api/chat", {"messages": HELLO, "options": {"stop": ""}}, "must not be empty"),
    ],
)  # fmt: skip
def test_errors_are_in_ollamas_form(
    tooled: Running, path: str, body: dict[str, Any], said: str
) -> None:
    status, _, answer = tooled.ask("POST", path, {"model": "tiny", **body})
    assert status in (400, 404)
    assert said in json.loads(answer)["error"]


def test_the_key_is_asked_for(speaking) -> None:
    with serving(speaking, ServerSettings(name="tiny", api_key="secret")) as running:
        assert running.ask("GET", "/api/tags")[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert running.ask("GET", "/api/tags", headers=key)[0] == 200
