"""The page, in a browser: Debian's Chromium, driven by playwright. Skips itself without either."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, serving, until

playwright = pytest.importorskip("playwright.sync_api")
CONTEXT = 500
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(speaking) -> Iterator[Running]:
    """Its answers end with the context."""
    with serving(speaking, max_context=CONTEXT) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 360, "height": 640})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.wait_for_selector("h1:has-text('tiny')")
    yield page
    page.close()
    assert errors == []


def say(page: Any, text: str) -> None:
    """By keyboard, until an answer begins."""
    answers = page.locator("article.assistant")
    before = answers.count()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    answers.nth(before).locator("span").first.wait_for()


@pytest.mark.slow
def test_a_conversation_by_keyboard_on_a_phones_width(page: Any, server: Running) -> None:
    for text in ("Hello", "Next"):
        say(page, text)
        page.keyboard.press("Escape")
        page.wait_for_selector("#stop", state="hidden")
        assert page.inner_text("#status") == "stopped"
    until(lambda: not server.worker.running)
    assert page.locator("article.user").all_inner_texts() == ["Hello", "Next"]
    assert page.locator("article.assistant").count() == 2
    page.click("#again")
    page.wait_for_selector(f"#status:has-text('of {CONTEXT}')")
    assert "tokens/s" in page.inner_text("#status")
    assert page.locator("article.assistant").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#clear")
    assert page.locator("article").count() == 0


@pytest.mark.slow
def test_a_file_is_attached_and_an_error_is_shown(page: Any, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("A note of a few words.")
    page.set_input_files("#file", note)
    page.wait_for_selector("#status:has-text('note.txt')")
    say(page, "What is it?")
    assert "[note.txt, 22 characters] What is it?" in page.inner_text("article.user")
    page.click("#stop")
    page.wait_for_selector("#stop", state="hidden")
    page.fill("#text", "x" * (CONTEXT + 1))
    page.keyboard.press("Enter")
    page.wait_for_selector("article.error")
    assert f"has room for {CONTEXT}" in page.inner_text("article.error")


@pytest.mark.slow
def test_each_piece_has_the_level_that_it_came_from(page: Any) -> None:
    say(page, "aaaa bbbb aaaa bbbb aaaa bbbb")
    page.wait_for_selector(f"#status:has-text('of {CONTEXT}')")
    origins = page.eval_on_selector_all(
        "article.assistant span", "spans => spans.map((span) => span.className)"
    )
    assert len(origins) > 10
    assert set(origins) <= {"plain", "accepted", "corrected", "bonus"}
    page.uncheck("#tint")
    assert "tint" not in page.get_attribute("#talk", "class")
