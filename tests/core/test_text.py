from __future__ import annotations

import pytest

from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_core.requests.text import TextStream


class ByteTokenizer:
    """A token a byte: any character beyond ASCII comes in pieces."""

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 👩‍👩‍👧 end", "a\ufffdb", ""])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_pieces_add_up_and_no_character_is_cut(text: str, at_once: int) -> None:
    ids = list(text.encode())
    stream = TextStream(Tokenizer(ByteTokenizer()))
    pieces = [stream.push(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text
    pieces.append(stream.finish())
    assert "".join(pieces) == text == stream.text


def test_what_never_becomes_a_character_is_not_lost() -> None:
    stream = TextStream(Tokenizer(ByteTokenizer()))
    assert stream.push([65, 0xE2]) == ""
    assert stream.push([0x82]) == ""
    assert stream.finish() == "A\ufffd"
    assert stream.finish() == ""
    assert stream.text == "A\ufffd"


def test_special_tokens_give_no_text() -> None:
    stream = TextStream(Tokenizer(ByteTokenizer()))
    assert [stream.push([t]) for t in (72, 300, 105)] == ["H", "", "i"]


@pytest.mark.parametrize("stops", [("\n\n",), ("END", "EN"), ("é", "日本"), ("xyzzy",), ("aab",)])
@pytest.mark.parametrize(
    "text", ["one\n\ntwo", "some EEND of it", "naïve é", "日本", "日 日本", "aaaab", "aaab", ""]
)
@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_a_stop_ends_the_text_where_it_begins(stops, text: str, at_once: int) -> None:
    """What was given before is never taken back, and no more is held than a stop may begin with."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    expected = text[: min(found)] if found else text
    ids = list(text.encode())
    stream = TextStream(Tokenizer(ByteTokenizer()), stops)
    pieces = []
    for first in range(0, len(ids), at_once):
        for some in stream.portions(ids[first : first + at_once]):
            if stream.stop is None:
                pieces.append(stream.push(some))
    pieces.append(stream.finish())
    assert (stream.stop is not None) == bool(found)
    assert "".join(pieces) == stream.text == expected
