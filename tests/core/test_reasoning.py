"""Reasoning apart from the answer, however the text is cut into pieces."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from triforce_core.requests.reasoning import (
    ChannelSplit,
    ReasoningSplit,
    split_of,
    variables,
    whole,
)
from triforce_core.server.messages.schema import Message
from triforce_core.server.messages.wording import Wording
from triforce_core.server.settings import ServerSettings
from triforce_offload.errors import UsageError

OPEN, PLAIN = "<|assistant|>\n<think>\n", "<|assistant|>\n"
CASES = [
    (OPEN, "Two.\nThen four.\n</think>\n\nFour.\nYes.", "Two.\nThen four.", "Four.\nYes."),
    (OPEN, "I do not end", "I do not end", ""),
    (OPEN, "\n</think>\n\nAt once.", "", "At once."),
    (OPEN, "a < b, </thin air> \n", "a < b, </thin air> \n", ""),
    (PLAIN, "<think>\nHm.\n</think>\n\nSo.", "Hm.", "So."),
    (PLAIN, "\n<think>\nHm.", "Hm.", ""),
    (PLAIN, "No reasoning, <think> is a word.", "", "No reasoning, <think> is a word."),
    (PLAIN, "<thin", "", "<thin"),
    (PLAIN, "", "", ""),
    (PLAIN, "    if a:\n        b\n", "", "    if a:\n        b\n"),
    (PLAIN, "\n  <thin", "", "\n  <thin"),
    (PLAIN, "  \n ", "", "  \n "),
    (OPEN, "  Two.\n</think>\n \n    a = 1\n\n  b", "  Two.", "    a = 1\n\n  b"),
    (OPEN + "\n</think>\n\n", "Answer </think> with a tag", "", "Answer </think> with a tag"),
]  # fmt: skip


def in_pieces(
    split: ReasoningSplit | ChannelSplit, text: str, choose: random.Random, longest: int
) -> tuple[str, str]:
    """Return the reasoning and the answer of a text that comes in pieces of random lengths."""
    parts = []
    while text:
        count = choose.randint(1, longest)
        parts.append(split.take(text[:count]))
        text = text[count:]
    reasoning, answer = zip(*parts, split.finish(), strict=True)
    return "".join(reasoning), "".join(answer)


@pytest.mark.parametrize(("prompt", "text", "reasoning", "answer"), CASES)
def test_any_pieces_add_up_to_the_same_parts(prompt, text, reasoning, answer) -> None:
    assert whole(ReasoningSplit(prompt), text) == (reasoning, answer)
    choose = random.Random(text)
    for _ in range(20):
        assert in_pieces(ReasoningSplit(prompt), text, choose, 5) == (reasoning, answer)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CHANNELS = [
    (f"{ANALYSIS}Two.\nThen four.{NEXT}{FINAL}Four.", "Two.\nThen four.", "Four."),
    (f"{FINAL}At once.", "", "At once."),
    (f"{ANALYSIS}I do not end", "I do not end", ""),
    (f"{ANALYSIS}a <| b{NEXT}{FINAL}c <|e", "a <| b", "c <|e"),
    (
        f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary to=f<|message|>{{}}{NEXT}{FINAL}So.<|end|>",
        "Hm.{}",
        "So.",
    ),
    ("Not in a message", "", "Not in a message"),
    ("<|channel|>anal", "", ""),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "answer"), CHANNELS)
def test_messages_in_channels_are_told_apart(text, reasoning, answer) -> None:
    """As gpt-oss writes them."""
    assert whole(ChannelSplit(), text) == (reasoning, answer)
    choose = random.Random(text)
    for _ in range(20):
        assert in_pieces(ChannelSplit(), text, choose, 9) == (reasoning, answer)


def test_the_template_says_how_a_model_reasons() -> None:
    assert split_of("{{ messages }}", PLAIN) is None
    assert isinstance(split_of("... </think> ...", PLAIN), ReasoningSplit)
    assert isinstance(split_of("... <|channel|>analysis ...", PLAIN), ChannelSplit)


def test_a_setting_is_a_variable_of_the_template() -> None:
    assert [variables(setting) for setting in ("auto", "on", "off")] == [
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
    ]
    with pytest.raises(UsageError, match="reasoning must be auto, on or off, got 'loud'"):
        ServerSettings(reasoning="loud")


def test_an_answer_that_follows_a_grammar_has_no_reasoning() -> None:
    tokenizer = SimpleNamespace(chat_template="</think>")
    wording = Wording("tiny", tokenizer, prompt=OPEN, guided=True)
    (choice,) = wording.piece(0, SimpleNamespace(text="{}", origin="bonus", logprobs=None))[
        "choices"
    ]
    assert choice["delta"] == {"content": "{}"}


def test_an_answer_with_reasoning_can_be_sent_back() -> None:
    message = Message(role="assistant", content="Four.", reasoning_content="Two.")
    assert message.as_dict() == {
        "role": "assistant",
        "content": "Four.",
        "reasoning_content": "Two.",
    }
    assert "reasoning_content" not in Message(role="user", content="x").as_dict()


@pytest.mark.parametrize("reasons", [True, False])
def test_a_chat_says_its_reasoning_apart_if_the_template_knows_it(reasons: bool) -> None:
    def wording(prompt: str | None) -> Wording:
        tokenizer = SimpleNamespace(chat_template="</think>" if reasons else "plain")
        return Wording("tiny", tokenizer, prompt=prompt)

    text = "Two and two.\n</think>\n\nFour."
    stats = dict.fromkeys(("prompt_tokens", "reused_tokens"), 3)
    said = SimpleNamespace(text=text, token_ids=[1], finish_reason="stop", stats=stats, logprobs=[])
    (choice,) = wording(OPEN).whole([said], 1, told=False)["choices"]
    expected = {"role": "assistant", "content": text}
    if reasons:
        expected |= {"content": "Four.", "reasoning_content": "Two and two."}
    assert choice["message"] == expected
    streamed, parts = wording(OPEN), {"reasoning_content": "", "content": ""}
    for letter in text:
        piece = SimpleNamespace(text=letter, origin="bonus", logprobs=None)
        (choice,) = streamed.piece(0, piece)["choices"]
        for name, part in choice["delta"].items():
            parts[name] += part
    expected = ("Two and two.", "Four.") if reasons else ("", text)
    assert tuple(parts.values()) == expected
    (choice,) = wording(None).whole([said], 1, told=False)["choices"]
    assert choice["text"] == text
