"""Reasoning apart from the answer, however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from answer_pieces import in_pieces

from triforce_core.requests.answer.channels import ChannelSplit
from triforce_core.requests.answer.parts import Parts, whole
from triforce_core.requests.answer.reasoning import (
    GEMMA_THOUGHT,
    ReasoningSplit,
    tags_of,
    variables,
)
from triforce_core.requests.answer.split import split_of
from triforce_core.requests.stream import Piece
from triforce_core.server.messages.schema import Message
from triforce_core.server.settings import ServerSettings
from triforce_core.server.wording.openai import ChatCompletions, TextCompletions
from triforce_core.server.wording.wording import WholeAnswer
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


@pytest.mark.parametrize(("prompt", "text", "reasoning", "answer"), CASES)
def test_any_pieces_add_up_to_the_same_parts(prompt, text, reasoning, answer) -> None:
    assert whole(ReasoningSplit(prompt), text) == Parts(reasoning, answer)
    choose = random.Random(text)
    for _ in range(20):
        assert in_pieces(ReasoningSplit(prompt), text, choose, 5) == Parts(reasoning, answer)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
GEMMA = [
    ("<|channel>thought\nTwo.\n<channel|>Four.", "Two.", "Four."),
    ("<|channel>thought\n<channel|>Four.", "", "Four."),
    ("Four, <|channel> is a word.", "", "Four, <|channel> is a word."),
]


@pytest.mark.parametrize(("text", "reasoning", "answer"), GEMMA)
def test_gemma_4_reasons_in_a_channel(text, reasoning, answer) -> None:
    tags = tags_of("... <|channel>thought ... <channel|>")
    assert tags == GEMMA_THOUGHT
    choose = random.Random(text)
    for _ in range(20):
        split = ReasoningSplit("<|turn>model\n", tags)
        assert in_pieces(split, text, choose, 5) == Parts(reasoning, answer)


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
    assert whole(ChannelSplit(), text) == Parts(reasoning, answer)
    choose = random.Random(text)
    for _ in range(20):
        assert in_pieces(ChannelSplit(), text, choose, 9) == Parts(reasoning, answer)


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
    assert split_of("</think>", OPEN, guided=True) is None
    assert split_of("<|channel|>", OPEN, guided=True) is None


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
    def new_split() -> Any:
        return split_of("</think>" if reasons else "plain", OPEN) or WholeAnswer()

    text = "Two and two.\n</think>\n\nFour."
    stats = dict.fromkeys(("prompt_tokens", "reused_tokens"), 3)
    said = SimpleNamespace(text=text, token_ids=[1], finish_reason="stop", stats=stats, logprobs=[])
    (choice,) = ChatCompletions("tiny", str, new_split).whole([said], 1)["choices"]
    expected = {"role": "assistant", "content": text}
    if reasons:
        expected |= {"content": "Four.", "reasoning_content": "Two and two."}
    assert choice["message"] == expected
    streamed = ChatCompletions("tiny", str, new_split)
    parts = {"reasoning_content": "", "content": ""}
    for letter in text:
        piece = Piece(letter, "bonus")
        (choice,) = json.loads(streamed.piece(0, piece).removeprefix("data: "))["choices"]
        for name, part in choice["delta"].items():
            parts[name] += part
    expected = ("Two and two.", "Four.") if reasons else ("", text)
    assert tuple(parts.values()) == expected
    plain = TextCompletions("tiny", str, logprobs=False, usage=False)
    assert plain.whole([said], 1)["choices"][0]["text"] == text
