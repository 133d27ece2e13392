"""The page, in a browser: Debian's Chromium, driven by playwright. Skips itself without either.

Most tests answer the page's requests themselves; those with `served` use a tiny model's server.
"""

from __future__ import annotations

import json
from typing import Any

import browsing
import pytest
from browsing import CONTEXT, Answering, opened, refuses, scroll_width, send, streams, texts
from running import Running, serving, until

from triforce_core.server.settings import ServerSettings

pytest.importorskip("playwright.sync_api")
pytest_plugins = ["page_fixtures"]


@pytest.mark.slow
def test_a_reload_restores_and_the_list_renames_and_deletes(profile: Any, page: Any) -> None:
    send(page, "First question\nwith a second line")
    page.wait_for_selector(".figures:has-text('23.4 tokens/s'):has-text('memory 3.0 of 22.0 GiB')")
    page.reload()
    page.wait_for_selector("article.assistant")
    assert texts(page, "user") == ["First question\nwith a second line"]
    assert texts(page, "assistant") == ["Fine."]
    assert page.locator("#list a").all_inner_texts() == ["First question"]
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".examples")
    page.click(".example >> nth=1")
    assert "table" in page.input_value("#text")
    send(page, "Other")
    page.click("#list a:has-text('First')")
    page.wait_for_selector("article.user:has-text('First')")
    page.click("[aria-label='Rename First question']")
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    page.click("[aria-label='Delete Renamed']")
    page.wait_for_selector(".examples")
    assert page.locator("#list a").all_inner_texts() == ["Other"]
    page.click(".toast button:has-text('Undo')")
    page.wait_for_selector("article.user:has-text('First')")
    assert sorted(page.locator("#list a").all_inner_texts()) == ["Other", "Renamed"]


@pytest.mark.slow
def test_an_answer_goes_on_while_another_conversation_is_open(
    page: Any, answering: Answering
) -> None:
    held: list[Any] = []
    answering.answers += [held.append, streams("Second"), held.append, held.append]
    page.fill("#text", "First")
    page.press("#text", "Enter")
    page.wait_for_selector(".figures:has-text('waiting for the server')")
    browsing.begin_anew(page)
    send(page, "Other")
    streams("Late")(held[0])
    page.click("#list a:has-text('First')")
    page.wait_for_selector(".markdown:has-text('Late')")
    page.fill("#text", "Again")
    page.press("#text", "Enter")
    page.wait_for_selector(".figures:has-text('waiting for the server')")
    page.reload()
    page.wait_for_selector(".note:has-text('Stopped before the first token')")
    page.click(".again:visible")
    page.wait_for_selector(".figures:has-text('waiting for the server')")
    page.click("[aria-label='Delete First']")
    page.wait_for_selector(".examples")
    page.reload()
    page.wait_for_selector(".examples")
    assert page.locator("#list a").all_inner_texts() == ["Other"]


@pytest.mark.slow
def test_two_tabs_do_not_overwrite_each_other(profile: Any, page: Any) -> None:
    send(page, "One")
    other = profile.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.assistant")
    browsing.begin_anew(other)
    send(other, "Two")
    page.wait_for_selector("#list a:has-text('Two')")
    other.click("#list a:has-text('One')")
    other.wait_for_selector("article.user:has-text('One')")
    send(other, "More")
    page.wait_for_selector("article.user:has-text('More')")
    # A tab that has missed the change keeps its answer in a copy.
    page.evaluate("store.revisions.set(state.conversation.id, 'older')")
    send(page, "Mine")
    other.wait_for_selector("#list a:has-text('One (copy)')")
    assert texts(other, "user") == ["One", "More"]
    assert texts(page, "user") == ["One", "More", "Mine"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["setItem", "all"])
def test_without_storage_it_says_so_once(profile: Any, answering: Answering, broken: str) -> None:
    profile.add_init_script(
        "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }"
        if broken == "setItem"
        else "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window,"
        " name, {get() { throw new DOMException('', 'SecurityError'); }})"
    )
    page = opened(profile)
    send(page, "One")
    said = "storage is full" if broken == "setItem" else "keeps nothing"
    page.click(f".toast:has-text('{said}') [aria-label=Close]")
    send(page, "Two")
    assert texts(page, "user") == ["One", "Two"]
    assert page.locator(".toast").count() == 0
    assert page.locator("#list a").all_inner_texts() == ["One"]


@pytest.mark.slow
def test_broken_contents_of_the_storage_are_passed_over(profile: Any, page: Any) -> None:
    page.evaluate(
        """() => {
          for (const [name, text] of [["a", "{"], ["b", "null"],
            ["c", '{"id":"c","messages":[{}],"title":""}'],
            ["d", '{"id":"d","title":"Kept","messages":[{"role":"user","text":"x"}]}']])
            localStorage.setItem("triforce.conversation." + name, text);
          localStorage.setItem("triforce.settings", "[1");
        }"""
    )
    page.reload()
    page.wait_for_selector("#list a")
    assert page.locator("#list a").all_inner_texts() == ["Kept"]


@pytest.mark.slow
def test_edit_regenerate_copy_and_reasoning(profile: Any, page: Any, answering: Answering) -> None:
    profile.grant_permissions(["clipboard-read", "clipboard-write"])
    answering.answers += [streams("**One**", reasoning="Thought.\n"), streams("Two"), streams("3")]
    send(page, "First")
    assert page.inner_text(".reasoning summary").startswith("Reasoned for")
    assert not page.locator(".reasoning").evaluate("each => each.open")
    page.click(".actions .copy")
    page.wait_for_selector(".copy:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "**One**"
    send(page, "Second")
    assert answering.bodies[1]["messages"] == [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "**One**"},
        {"role": "user", "content": "Second"},
    ]
    assert page.locator(".again:visible").count() == 1
    page.click(".again:visible")
    page.wait_for_selector(".markdown:has-text('3')")
    assert texts(page, "assistant") == ["One", "3"]
    assert answering.bodies[2] == answering.bodies[1]
    page.fill("#text", "a draft")
    page.click("article.user:has-text('First') .edit")
    assert page.input_value("#text") == "First"
    page.keyboard.press("Escape")
    assert page.input_value("#text") == "a draft"
    page.click("article.user:has-text('First') .edit")
    page.fill("#text", "Edited")
    page.press("#text", "Enter")
    page.wait_for_selector("article.user:has-text('Edited') ~ article.assistant:has-text('Fine.')")
    assert texts(page, "user") == ["Edited"]
    assert answering.bodies[3]["messages"] == [{"role": "user", "content": "Edited"}]


@pytest.mark.slow
def test_settings_are_sent_and_kept(page: Any, answering: Answering) -> None:
    send(page, "Plain")
    assert set(answering.bodies[0]) == {"model", "messages", "stream"}
    page.click("#open-settings")
    given = {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 7, "seed": 3}
    for name, value in given.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("[name=system]", "Be brief.")
    page.select_option("[name=reasoning]", "off")
    page.select_option("[name=theme]", "dark")
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 24, 27)"
    send(page, "Set")
    body = answering.bodies[1]
    assert {name: body[name] for name in given} == given
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click("#open-settings")
    page.fill("[name=top_p]", "7")
    page.click("#settings button.main")
    assert page.locator("#settings").evaluate("dialog => dialog.open"), "out of range"
    page.click("#reset-settings")
    page.click("#settings button.main")
    send(page, "Reset")
    assert set(answering.bodies[2]) == {"model", "messages", "stream"}


@pytest.mark.slow
def test_an_error_stays_in_place_and_is_tried_again(page: Any, answering: Answering) -> None:
    cut = f"data: {json.dumps({'choices': [{'delta': {'content': 'Half'}}]})}\n\n"
    answering.answers += [
        refuses(429, "the queue is full"),
        lambda route: route.abort(),
        lambda route: route.fulfill(body=cut),
        streams("Whole"),
        refuses(400, "too long"),
    ]
    send(page, "Hello")
    for said in ("the queue is full", "The server does not answer.", "The connection ended"):
        page.wait_for_selector(f".note.error[role=alert]:has-text('{said}')")
        assert texts(page, "user") == ["Hello"]
        page.click(".again:has-text('Retry')")
    page.wait_for_selector(".markdown:has-text('Whole')")
    assert page.locator(".note:visible").count() == 0
    send(page, "Too long")
    send(page, "Next")
    sent = [message["content"] for message in answering.bodies[-1]["messages"]]
    assert sent == ["Hello", "Whole", "Next"], "without the message that was rejected"


@pytest.mark.slow
def test_files_are_attached_and_folded(page: Any, answering: Answering) -> None:
    def file(name: str, content: bytes) -> dict[str, Any]:
        return {"name": name, "mimeType": "text/plain", "buffer": content}

    page.set_input_files(
        "#file", [file("a.txt", b"A note."), file("b.txt", b"B" * 3000), file("c.txt", b"C")]
    )
    page.wait_for_selector("#chips li >> nth=2")
    assert "b.txt, 2.9 KiB" in page.inner_text("#chips")
    page.click("[aria-label='Remove c.txt']")
    for name, content, said in (
        ("d.png", b"\x89PNG\0", "d.png is not a text in UTF-8"),
        ("e.bin", b"a\0b", "e.bin is not a text in UTF-8"),
        ("f.txt", b"x" * (16 * CONTEXT + 1), "at most 7.8 KiB"),
    ):
        page.set_input_files("#file", [file(name, content)])
        page.wait_for_selector(f".toast:has-text('{said}')")
    page.evaluate(
        """() => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File(["dropped"], "drop.txt"));
          const drop = {dataTransfer, bubbles: true, cancelable: true};
          $("form").dispatchEvent(new DragEvent("drop", drop));
        }"""
    )
    page.wait_for_selector("#chips li:has-text('drop.txt')")
    send(page, "What\nis " * 30)
    [message] = answering.bodies[0]["messages"]
    assert message["content"].startswith("a.txt:\n\nA note.\n\nb.txt:\n\nBBB")
    assert "drop.txt:\n\ndropped\n\nWhat" in message["content"]
    assert page.locator("#chips li").count() == 0
    assert page.locator("details.file").count() == 3
    assert page.locator(".folded").bounding_box()["height"] < 250
    page.click("details.file >> nth=0")
    page.wait_for_selector("details.file pre:has-text('A note.')")
    page.click(".unfold")
    assert page.locator(".folded").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_levels_are_coloured_readably(page: Any, answering: Answering, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    answering.answers += [streams("A **b", " c** d", origin="accepted")]
    send(page, "Colours")
    assert page.locator(".markdown .accepted").count() == 0
    assert not page.is_visible("#legend")
    page.click("#open-settings")
    page.check("[name=levels]")
    page.keyboard.press("Escape")
    assert page.locator(".markdown .accepted").all_inner_texts() == ["A ", "b c", " d"]
    assert page.is_visible("#legend")
    ratios = page.evaluate(
        """() => {
          const light = (colour) => {
            const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
            const linear = parts.map((c) => ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
          };
          const paper = light(getComputedStyle(document.body).backgroundColor);
          return [...document.querySelectorAll("#legend span, .figures")].map((each) => {
            const ink = light(getComputedStyle(each).color);
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
          });
        }"""
    )
    assert len(ratios) == 4
    assert min(ratios) >= 4.5


@pytest.mark.slow
def test_a_phone_has_a_drawer_and_no_sideways_scrolling(page: Any, answering: Answering) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    wide = "| a " * 40 + "\n" + "|--" * 40 + "\n\n```\n" + "x" * 500 + "\n```\n" + "y" * 500
    answering.answers.append(streams(wide))
    send(page, "w" * 300)
    assert scroll_width(page) == 390
    assert page.evaluate("talk.scrollWidth <= talk.clientWidth")
    page.wait_for_selector("#list a", state="hidden")
    page.focus("#menu")
    page.keyboard.press("Enter")
    page.wait_for_selector("#list a", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#list a", state="hidden")
    page.click("#menu")
    browsing.begin_anew(page)
    assert scroll_width(page) == 390
    page.click("#open-settings")
    box = page.locator("#settings").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


@pytest.mark.slow
def test_it_follows_an_answer_only_at_its_end(page: Any, answering: Answering) -> None:
    answering.answers.append(streams("line\n\n" * 200))
    send(page, "Long")
    page.wait_for_function("() => talk.scrollHeight - talk.scrollTop - talk.clientHeight < 2")
    page.evaluate("talk.scrollTop = 0")
    page.wait_for_selector("#to-end", state="visible")
    page.evaluate(
        "showRun({conversation: state.conversation, message: state.views.at(-1).message})"
    )
    assert page.evaluate("talk.scrollTop") == 0
    page.click("#to-end")
    page.wait_for_selector("#to-end", state="hidden")


def test_a_conversation_with_a_served_model(profile: Any, served: Running) -> None:
    page = opened(profile, f"http://127.0.0.1:{served.port}")
    page.click("#open-settings")
    page.check("[name=levels]")
    page.keyboard.press("Escape")
    page.focus("#text")
    for number, text in enumerate(("Hello", "Next")):
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"article.assistant >> nth={number} >> text=/tokens per pass/")
        page.keyboard.press("Escape")
        page.wait_for_selector("#stop", state="hidden")
        assert page.inner_text(f"article.assistant >> nth={number} >> .note") == "Stopped"
    until(lambda: not served.worker.running)
    assert texts(page, "user") == ["Hello", "Next"]
    page.click(".again:visible")
    page.wait_for_selector(f".figures:has-text('of {CONTEXT} tokens')")
    assert "tokens/s" in page.inner_text(".figures >> nth=1")
    page.wait_for_selector(".note:has-text('The answer ends here')")
    levels = page.eval_on_selector_all(".markdown span[class]", "all => all.map(s => s.className)")
    assert set(levels) <= {"plain-text", "accepted", "corrected", "bonus"}
    page.reload()
    page.wait_for_selector(f".figures:has-text('of {CONTEXT} tokens')")


@pytest.mark.slow
def test_a_served_prompt_that_is_too_long_is_shown_as_an_error(
    profile: Any, served: Running
) -> None:
    page = opened(profile, f"http://127.0.0.1:{served.port}")
    send(page, "x" * (CONTEXT + 1))
    assert f"context length is {CONTEXT}" in page.inner_text(".note.error")


@pytest.mark.slow
def test_a_server_with_a_key_is_asked_for_in_a_dialog(profile: Any, speaking) -> None:
    with serving(speaking, ServerSettings(name="tiny", api_key="secret")) as running:
        page = profile.new_page()
        page.goto(f"http://127.0.0.1:{running.port}/")
        for key, said in (("wrong", "accepts only"), ("secret", "refuses this key")):
            page.wait_for_selector(f"#key-why:has-text('{said}')")
            page.fill("[name=key]", key)
            page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('tiny')")
        page.fill("#text", "Hello")
        page.press("#text", "Enter")
        page.wait_for_selector(".markdown p")
        page.click("#stop")
        page.reload()
        page.wait_for_selector("article.assistant")
        assert page.evaluate(
            "[sessionStorage['triforce.key'], 'triforce.key' in localStorage]"
        ) == [
            "secret",
            False,
        ]


@pytest.mark.slow
def test_loading_is_shown(profile: Any, speaking) -> None:
    running = Running(speaking, ServerSettings(name="tiny"))
    running.gate.clear()
    running.start()
    try:
        page = profile.new_page()
        page.goto(f"http://127.0.0.1:{running.port}/")
        page.wait_for_selector("#loading:has-text('Loading the model, 0 %')")
        running.gate.set()
        page.wait_for_selector("h1:has-text('tiny')")
        assert "A context of 300 tokens" in page.inner_text(".welcome")
    finally:
        running.stop()
