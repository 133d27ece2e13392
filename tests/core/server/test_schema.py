"""S1: requests made from the server's own schema, right ones and wrong ones: each gets an answer or
a refusal that says why, and never a server's error.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

ANY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
BODIES = (CHAT, COMPLETE, RESPOND, MESSAGES, COUNT, OLLAMA_CHAT, OLLAMA_GENERATE)
ROUTES = {
    **dict.fromkeys(BODIES, "POST"),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings", "/api/show"), "POST"),
    **dict.fromkeys(("/api/tags", "/api/ps", "/api/version"), "GET"),
    "/v1/models": "GET",
    "/v1/models/{model}": "GET",
    "/health": "GET",
    "/metrics": "GET",
}


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")


def test_every_route_is_tried(api) -> None:
    known = {operation.ok().path for operation in api.get_all_operations()}
    assert known - {"/"} == set(ROUTES)


# What takes nothing cannot be asked wrongly.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "mode"),
    [*((path, "positive") for path in ROUTES), *((path, "negative") for path in BODIES)],
)
def test_any_request_is_answered_or_refused_by_name(
    whole, api, server, path: str, mode: str
) -> None:
    mode = schemathesis.GenerationMode(mode)
    operation = api[path][ROUTES[path]]
    codes = set()

    @settings(ANY, max_examples=25 if whole else 6)
    @given(operation.as_strategy(generation_mode=mode))
    def holds(case) -> None:
        if isinstance(case.body, dict):
            # Else hardly one would name the model, or ask for so little that there is room.
            case.body |= {"model": "tiny"} if isinstance(case.body.get("model"), str) else {}
            case.body |= {name: 4 for name in case.body if name.startswith("max_")}
        response = case.call(timeout=60)
        codes.add(response.status_code)
        assert response.status_code < 500
        if response.status_code >= 400:
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert error
            else:
                assert error["message"]
                assert error["type"]

    holds()
    # Whatever that was, the next one is served.
    assert server.client.completions.create(model="tiny", prompt="Hi", max_tokens=2).choices
    negative = mode is schemathesis.GenerationMode.NEGATIVE
    assert negative or 200 in codes or path.endswith(("{model}", "show")) or "embed" in path
