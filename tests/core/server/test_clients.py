"""What other programs send is taken: each request of recorded_requests.json.

Most were recorded from the client named beside them; those of two programs follow their source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, serving
from tooled import write_tooled

pytest.importorskip("llguidance")
RECORDED = json.loads((Path(__file__).parent / "recorded_requests.json").read_text("utf-8"))
# litellm says that its JSON is a form.
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(write_tooled(tmp_path_factory.mktemp("tooled"), "hermes"), max_context=2000) as it:
        yield it


@pytest.mark.parametrize("at", range(len(RECORDED)))
def test_a_recorded_request_is_answered(tooled: Running, at: int) -> None:
    path, body = RECORDED[at]["path"], RECORDED[at]["body"]
    headers = FORM if path.startswith("/api/") else {}
    status, given, answer = tooled.ask("POST", path, body, headers)
    assert status == 200, answer
    streams = body.get("stream", path.startswith("/api/") and path != "/api/show")
    kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
    empty = not (body.get("messages") or body.get("prompt") or body.get("input"))
    assert given["content-type"].startswith(kind if streams and not empty else "application/json")
    if streams and path.startswith("/api/"):
        lines = [json.loads(line) for line in answer.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    elif not streams:
        assert "error" not in json.loads(answer) or json.loads(answer)["error"] is None


def test_the_form_of_json_is_not_guessed_for_pages_of_other_sites(tooled: Running) -> None:
    """A browser names the page's site. It lets any site send a form, and no site JSON."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "hi", "options": {"num_predict": 2}}
    asked = FORM | {"Origin": "http://elsewhere.example"}
    status, _, answer = tooled.ask("POST", "/api/generate", body, asked)
    assert status == 400
    assert "Content-Type: application/json" in json.loads(answer)["error"]
    assert tooled.ask("POST", "/v1/completions", body, FORM)[0] == 400
