"""Ollama's API, for programs that know only that one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import write_gguf
from helpers import make_model, write_tokens_of_bytes
from running import HELLO, Running, serving
from safetensors.torch import load_file
from tooled import WEATHER, write_tooled

from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.server.settings import ServerSettings
from triforce_core.server.wording.model_files import ModelFiles


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
    (loaded,) = get("/api/ps")["models"]
    assert loaded["context_length"] == 2000
    file = tooled.model / "model.safetensors"
    for each in (listed, loaded):
        assert each["size"] == file.stat().st_size
        assert re.fullmatch(r"[0-9a-f]{64}", each["digest"])
    held = sum(tensor.numel() for tensor in load_file(file).values())
    details = listed["details"]
    assert details["parameter_size"] == f"{held / 1e6:.2f}M"
    assert (details["quantization_level"], details["format"]) == ("F32", "safetensors")
    assert tuple(map(int, get("/api/version")["version"].split("."))) >= (0, 6, 4)
    (about,) = post(tooled, "/api/show")
    assert about["capabilities"] == ["completion", "tools", "thinking"]
    assert about["details"] == details
    assert about["model_info"]["llama.context_length"] == 2000
    assert about["model_info"]["general.parameter_count"] == held
    assert post(tooled, "/api/show", model="tiny:latest") == [about]


@pytest.mark.parametrize(
    ("kind", "level"),
    [(gguf.GGMLQuantizationType.Q8_0, "Q8_0"), (gguf.GGMLQuantizationType.F16, "F16")],
)
def test_the_format_of_a_gguf_file_is_named(tmp_path: Path, kind: Any, level: str) -> None:
    write_gguf(make_model("llama", tmp_path), tmp_path / "m.gguf", kind)
    with closing(open_checkpoint(tmp_path / "m.gguf")) as checkpoint:
        files = ModelFiles.of(checkpoint)
    assert files.details()["quantization_level"] == level
    assert (files.format, files.nbytes) == ("gguf", (tmp_path / "m.gguf").stat().st_size)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_empty_fields_of_ollamas_request_nothing(tooled: Running, path: str) -> None:
    text = {"messages": HELLO} if path.endswith("chat") else {"prompt": "Hello"}
    options = {"num_predict": 2, "mirostat": 0, "tfs_z": 1, "typical_p": 1, "repeat_last_n": 64}
    empty = {"context": [], "template": "", "suffix": "", "system": ""}
    (answer,) = post(tooled, path, **text, **empty, options=options, stream=False)
    assert answer["eval_count"] == 2


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
        ("/api/generate", {"prompt": "x", "images": ["AA=="]}, "pictures are not supported"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context is not supported"),
        ("/api/generate", {"prompt": "x", "template": "y"}, "template is not supported"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"},
         "system cannot be used with raw"),
        ("/api/chat", {"messages": HELLO, "think": "x" * 40}, "think is true, false, or a level"),
        ("/api/chat", {"messages": HELLO, "keep_alive": []}, "a number of seconds or a text"),
        ("/api/nothing", {}, "Not Found"),
    ],
)  # fmt: skip
def test_errors_are_in_ollamas_form(
    tooled: Running, path: str, body: dict[str, Any], said: str
) -> None:
    status, _, answer = tooled.ask("POST", path, {"model": "tiny", **body})
    assert status in (400, 404)
    assert said in json.loads(answer)["error"]


def test_the_guards_errors_are_in_ollamas_form_too(tooled: Running, monkeypatch) -> None:
    def said(body: Any, headers: dict[str, str]) -> tuple[int, str]:
        status, _, answer = tooled.ask("POST", "/api/chat", body, headers)
        return status, json.loads(answer)["error"]

    assert said({}, {"Host": "elsewhere"})[0] == 403
    assert "elsewhere" in said({}, {"Host": "elsewhere"})[1]
    status, message = said("x" * ((32 << 20) + 1), {})
    assert (status, "larger than" in message) == (413, True)
    # A fault of the program, which no one foresaw.
    monkeypatch.setattr(tooled.worker, "check_ready", lambda: 1 // 0)
    assert said({"model": "tiny", "messages": HELLO}, {}) == (
        500, "integer division or modulo by zero"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mine", "mine:latest"])
def test_the_tag_latest_is_no_other_model(speaking, name: str) -> None:
    with serving(speaking, ServerSettings(name=name)) as running:
        for asked in ("mine", "mine:latest"):
            assert post(running, "/api/show", model=asked)
            (answer,) = post(running, "/api/generate", model=asked)
            assert (answer["model"], answer["done_reason"]) == (name, "load")
        assert running.ask("POST", "/api/show", {"model": "mine:7b"})[0] == 404


def test_a_model_that_reasons_in_channels_is_described_so(tmp_path) -> None:
    with serving(write_tooled(tmp_path, "gpt-oss"), max_context=2000) as running:
        (about,) = post(running, "/api/show")
        assert about["capabilities"] == ["completion", "tools", "thinking"]


def test_any_limit_of_tokens_is_taken(tooled: Running) -> None:
    """0, -1 and -2 are no limit."""
    for most in (0, -1, -2):
        options = {"temperature": 0, "num_predict": most}
        (answer,) = post(
            tooled, "/api/generate", prompt="Hi", options=options, stream=False, think="high",
            format=""
        )  # fmt: skip
        assert answer["eval_count"] > 20


def test_the_key_is_asked_for(speaking) -> None:
    with serving(speaking, ServerSettings(name="tiny", api_key="secret")) as running:
        status, _, answer = running.ask("GET", "/api/tags")
        assert status == 401
        assert "API key is missing" in json.loads(answer)["error"]
        key = {"Authorization": "Bearer secret"}
        assert running.ask("GET", "/api/tags", headers=key)[0] == 200


def test_a_model_without_a_chat_template_continues_texts_alone(tmp_path) -> None:
    write_tokens_of_bytes(tmp_path)
    options = {"num_predict": 2}
    with serving(tmp_path) as running:
        assert post(running, "/api/generate", prompt="Hi", options=options)[-1]["eval_count"] == 2
        (about,) = post(running, "/api/show")
        assert about["capabilities"] == ["completion"]
        for path, body, said in (
            ("/api/generate", {"prompt": "Hi", "system": "x"}, "system cannot be used"),
            ("/api/chat", {"messages": HELLO}, "the model has no chat template"),
            (
                "/api/chat",
                {"messages": HELLO, "tools": [WEATHER]},
                "the model has no chat template",
            ),
        ):
            status, _, answer = running.ask("POST", path, {"model": "tiny", **body})
            assert status == 400
            assert said in json.loads(answer)["error"]
