"""`triforce` alone, and `triforce run`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from command import run

from triforce_core.cli.main import FIRST_COMMANDS, _parser

TINY = ("--device", "cpu", "--temperature", "0", "--max-new-tokens", "12", "--quiet")


def test_triforce_alone_shows_five_commands_that_exist(capsys) -> None:
    code, out, err = run(capsys)
    assert (code, out, err) == (0, FIRST_COMMANDS, "")
    lines = [line.strip() for line in out.splitlines() if line.startswith("  triforce ")]
    commands = _parser()[1]
    assert len(lines) == 5
    for line in lines:
        assert line.split()[1] in commands
    assert max(map(len, out.splitlines())) <= 80


def test_one_message_is_answered_from_the_line_or_a_pipe(
    capsys, speaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a chat answers it. Over a pipe the message is all of the input, with its lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, expected, _ = run(capsys, "chat", speaking, *TINY)
    assert code == 0
    assert expected.strip()
    assert run(capsys, "run", speaking, "Hello", *TINY) == (0, expected, "")
    assert run(capsys, "run", speaking, *TINY, "Hello") == (0, expected, "")
    assert run(capsys, "run", *TINY[:2], speaking, *TINY[2:], "Hello") == (0, expected, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert run(capsys, "run", speaking, *TINY) == (0, expected, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\n/exit\nTwo"))
    code, both, err = run(capsys, "run", speaking, *TINY)
    assert (code, err) == (0, "")
    assert both == run(capsys, "run", speaking, "One\n/exit\nTwo", *TINY)[1]
    # With both, the message has what is piped in first, as in Ollama.
    expected = run(capsys, "run", speaking, "One\n\nTwo", *TINY)
    (tmp_path / "one").write_text("One\n")
    with open(tmp_path / "one") as file:
        monkeypatch.setattr(sys, "stdin", file)
        code, joined, err = run(capsys, "run", speaking, "Two", *TINY)
    assert (code, joined, "begins with standard input" in err) == (*expected[:2], True)
    with open(os.devnull) as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(capsys, "run", speaking, "One\n\nTwo", *TINY) == expected


def test_two_messages_and_unknown_options_are_refused(capsys, speaking: Path) -> None:
    for more in (("Hello", "again"), ("Hello", "--quite", "again"), ("--quite",)):
        code, _, err = run(capsys, "run", speaking, *TINY, *more)
        assert (code, "unrecognized arguments" in err) == (2, True)


def test_an_empty_message_is_refused(capsys, speaking: Path, monkeypatch) -> None:
    for text in ("", "  \n"):
        assert run(capsys, "run", speaking, text, *TINY)[0] == 2
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, _, err = run(capsys, "run", speaking, *TINY)
        assert (code, "the prompt is empty" in err) == (2, True)


def test_an_answer_that_is_cut_says_so(capsys, speaking: Path) -> None:
    code, _, err = run(capsys, "run", speaking, "Hello", *TINY[:4], "-n", "3")
    assert (code, ", stopped at the limit of tokens, context " in err) == (0, True)


def test_a_message_without_room_is_refused_with_what_would_help(capsys, speaking: Path) -> None:
    code, _, err = run(capsys, "run", speaking, "Hello " * 300, *TINY, "-c", "100")
    assert (code, "up to 512, has room for more" in err, "/clear" in err) == (2, True, False)
    code, _, err = run(capsys, "run", speaking, "Hello " * 900, *TINY)
    assert (code, "the model has no more positions" in err) == (2, True)
