"""The page's requests answered by tests, and what tests do on the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from triforce_core.server.app import _PAGE_POLICY
from triforce_core.server.page_html import page_html

CONTEXT = 500
# Nothing listens there: the tests answer for it.
SITE = "http://localhost:9"
TIMINGS = {
    "tokens_per_second": 23.4,
    "tokens_per_pass": 6.2,
    "acceptance": 0.93,
    "link_share": 0.4,
    "prompt_tokens": 20,
    "reused_tokens": 10,
    "context_tokens": 50,
    "device_memory_bytes": 3 << 30,
    "device_budget_bytes": 22 << 30,
}


class Answering:
    """Answers the requests of a page. `answers` has a function for each chat request to come."""

    def __init__(self, context: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[Callable[[Any], None]] = []
        policy = {"Content-Security-Policy": _PAGE_POLICY}
        html = {"body": page_html(), "content_type": "text/html", "headers": policy}
        models = {"data": [{"id": "tiny", "context_length": CONTEXT}]}
        context.route(f"{SITE}/", lambda route: route.fulfill(**html))
        context.route("**/health", lambda route: route.fulfill(json={"status": "ok"}))
        context.route("**/v1/models", lambda route: route.fulfill(json=models))
        context.route("**/v1/chat/completions", self.chat)

    def chat(self, route: Any) -> None:
        self.bodies.append(route.request.post_data_json)
        answer = self.answers.pop(0) if self.answers else streams("Fine.")
        answer(route)


def streams(*texts: str, reasoning: str = "", origin: str = "plain") -> Callable[[Any], None]:
    """Return a function that answers with a stream of these pieces."""
    deltas = [{"reasoning_content": reasoning}] if reasoning else []
    chunks: list[dict[str, Any]] = [
        {
            "choices": [{"delta": delta}],
            "origin": origin,
            "so_far": {"tokens": 6 * i + 1, "passes": i},
        }
        for i, delta in enumerate([*deltas, *({"content": text} for text in texts)])
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": TIMINGS})
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    body = ": 0.42 of the prompt is read\n\n" + "".join(events) + "data: [DONE]\n\n"
    return lambda route: route.fulfill(body=body, content_type="text/event-stream")


def refuses(status: int, message: str) -> Callable[[Any], None]:
    return lambda route: route.fulfill(status=status, json={"error": {"message": message}})


def opened(context: Any, address: str = SITE) -> Any:
    page = context.new_page()
    page.goto(f"{address}/")
    page.wait_for_selector("h1:has-text('tiny')")
    page.wait_for_selector(".examples, article")
    return page


def begin_anew(page: Any) -> None:
    """Open a new conversation. The page shows it after a moment."""
    page.click("#new")
    page.wait_for_selector(".examples")


def send(page: Any, text: str) -> None:
    """Send a message by keyboard and wait for the end of its answer."""
    answers = page.locator("article.assistant").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector(f"article.assistant >> nth={answers}")
    page.wait_for_selector("#stop", state="hidden")


def texts(page: Any, role: str) -> list[str]:
    inside = {"user": ".body", "assistant": ".markdown"}[role]
    return page.locator(f"article.{role} {inside}").all_inner_texts()


def scroll_width(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth")
