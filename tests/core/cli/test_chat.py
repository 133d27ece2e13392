"""`triforce chat` over a pipe: a line a turn."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import heed_signals, least_memory, run
from helpers import add_tokenizer, make_model

from triforce_core.cli.chat.line import Lines, whole
from triforce_core.requests import pool
from triforce_offload.errors import DoesNotFitError

BASE = ("--temperature", "0", "-n", "12", "--device", "cpu", "-c", "400")
COMMANDS = ("--commands",)


def talk(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    *lines: str,
    options: Sequence[str] = (),
    commands: Sequence[str] = COMMANDS,
) -> tuple[int, list[str], str]:
    """The exit code, the answers and what was said besides."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    code, out, err = run(capsys, "chat", model, *BASE, *commands, *options)
    return code, out.splitlines(), err


def prefilled(err: str) -> tuple[int, ...]:
    """The tokens of the last answer that were prefilled, and those reused, as /stats shows them."""
    shown = " ".join(err.replace("│", " ").split())
    return tuple(map(int, *re.findall(r"s of prefill \((\d+) tokens, (\d+) more reused\)", shown)))


def test_turns_go_on_and_read_only_what_is_new(speaking, capsys, monkeypatch) -> None:
    code, answers, err = talk(capsys, monkeypatch, speaking, "Hello", "And you?", "/stats")
    assert code == 0
    assert len(answers) == 2
    # All but the last token of the answer was known, and the template's two around "And you?".
    assert prefilled(err)[0] == len("And you?") + 2 + 1
    assert len(re.findall(r"12 tokens, .* tokens/s, .*context \d+ of 400 tokens", err)) == 2


def test_a_turn_is_answered_anew_edited_and_continued(speaking, capsys, monkeypatch) -> None:
    lines = ("Hello", "/regenerate", "/edit Good day", "/regenerate", "/continue")
    code, answers, _ = talk(capsys, monkeypatch, speaking, *lines)
    assert code == 0
    assert answers[0] == answers[1] != answers[2] == answers[3]
    _, longer, _ = talk(capsys, monkeypatch, speaking, "Good day", options=("-n", "24"))
    assert answers[3] + answers[4] == longer[0]


def test_what_is_edited_keeps_its_files(speaking, capsys, monkeypatch, tmp_path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("Call me Ishmael.")
    edited = ("/file " + str(file), "Who?", "/edit Where?")
    code, answers, _ = talk(capsys, monkeypatch, speaking, *edited)
    assert code == 0
    _, expected, _ = talk(capsys, monkeypatch, speaking, "/file " + str(file), "Where?")
    assert answers[1] == expected[0]
    _, plain, _ = talk(capsys, monkeypatch, speaking, "Where?")
    assert answers[1] != plain[0]
    saved = tmp_path / "talk"
    talk(capsys, monkeypatch, speaking, *edited[:2], f"/save {saved}")
    code, loaded, _ = talk(capsys, monkeypatch, speaking, f"/load {saved}", "/edit Where?")
    assert code == 0
    assert loaded == expected


def test_what_a_stop_ended_does_not_go_on(speaking, capsys, monkeypatch) -> None:
    _, answers, _ = talk(capsys, monkeypatch, speaking, "Hello")
    stop = ("--stop", answers[0][3:5])
    code, cut, err = talk(capsys, monkeypatch, speaking, "Hello", "/continue", options=stop)
    assert code == 2
    assert cut == [answers[0][: answers[0].index(stop[1])]]
    assert "there is no answer that could go on" in err


@pytest.mark.parametrize(
    "said",
    # The model's answer to the second has a token without a text.
    ["Hello", "Hello there"],
)
def test_a_conversation_is_saved_and_goes_on(
    speaking, capsys, monkeypatch, tmp_path, said: str
) -> None:
    file = tmp_path / "talk"
    code, whole, _ = talk(capsys, monkeypatch, speaking, said, "And you?")
    assert code == 0
    code, first, err = talk(capsys, monkeypatch, speaking, said, f"/save {file}")
    assert code == 0
    assert "tokens of context saved" in err
    lines = (f"/load {file}", "And you?", "/stats")
    code, second, err = talk(capsys, monkeypatch, speaking, *lines)
    assert first + second == whole
    assert prefilled(err)[1] > len("Hello")
    load = ("--load", str(file))
    code, third, _ = talk(capsys, monkeypatch, speaking, "And you?", options=load)
    assert third == second
    code, _, err = talk(capsys, monkeypatch, speaking, options=(*load, "--system", "Short"))
    assert code == 2
    assert "--system cannot be used with --load" in err


def test_a_system_prompt_and_files_are_part_of_it(speaking, capsys, monkeypatch, tmp_path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("A note")
    code, plain, _ = talk(capsys, monkeypatch, speaking, "Hello")
    _, system, _ = talk(capsys, monkeypatch, speaking, "Hello", options=("--system", "Short"))
    _, attached, err = talk(capsys, monkeypatch, speaking, f"/file {file}", "Hello")
    assert f"{file}: 6 tokens, before what you say next" in err
    assert len({*plain, *system, *attached}) == 3
    _, cleared, _ = talk(capsys, monkeypatch, speaking, "Hi", "/clear", "Hello")
    assert cleared[1:] == plain
    _, changed, _ = talk(capsys, monkeypatch, speaking, "/system Short", "Hello")
    assert changed == system
    assert code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nonsense", "there is no command /nonsense"),
        ("/regenerate", "nothing was said yet"),
        ("/continue", "there is no answer that could go on"),
        ("/file", "usage: /file FILE"),
        ("/file missing.txt", "cannot read missing.txt"),
        ("/load missing", "there is no such file"),
        ("/save x", "nothing was read yet"),
        ("/stats", "there is no answer yet"),
        ("x" * 500, "the context has room for 400"),
    ],
)
def test_mistakes_over_a_pipe_end_it_with_a_sentence(
    speaking, capsys, monkeypatch, line: str, said: str
) -> None:
    code, answers, err = talk(capsys, monkeypatch, speaking, line, "Hello")
    assert (code, answers) == (2, [])
    assert said in err


def test_in_a_terminal_a_chat_goes_on_if_it_cannot_be_saved(
    speaking, capsys, monkeypatch, tmp_path
) -> None:
    def refuse(size: int, what: str) -> None:
        raise DoesNotFitError(what, size, 0, "wait")

    monkeypatch.setattr(pool, "check_available", refuse)
    terminal = {"terminal": True, "_session": None, "_modes": None}
    monkeypatch.setattr(Lines, "__init__", lambda lines: vars(lines).update(terminal))
    talked = talk(capsys, monkeypatch, speaking, "Hello", f"/save {tmp_path / 'file'}", "And you?")
    assert (talked[0], len(talked[1])) == (0, 2)
    assert "a copy of the context in host memory needs" in talked[2]


def test_over_a_pipe_commands_are_text_unless_they_are_asked_for(
    speaking, capsys, monkeypatch, tmp_path
) -> None:
    """Untrusted text reads no file and writes none."""
    secret, target = tmp_path / "secret.txt", tmp_path / "target"
    secret.write_text("A secret")
    lines = ("Hello", f"/file {secret}", f"/save {target}", "/exit", "And you?")
    code, answers, err = talk(capsys, monkeypatch, speaking, *lines, commands=())
    assert (code, len(answers)) == (0, len(lines)), "each line is a turn"
    assert not target.exists()
    assert "before what you say next" not in err
    assert err.count("--commands makes it a command") == 1


def test_an_attached_file_has_the_size_limit_of_other_texts(
    speaking, capsys, monkeypatch, tmp_path
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("x" * 101)
    monkeypatch.setattr("triforce_core.cli.terminal.reading.MOST_BYTES", 100)
    code, answers, err = talk(capsys, monkeypatch, speaking, f"/file {file}", "Hello")
    assert (code, answers) == (2, [])
    assert f"cannot read {file}: it is larger than" in err


@pytest.mark.parametrize("lines", [("/help", "/exit"), ("/?", "/bye"), ("/?", "/quit")])
def test_help_and_exit(speaking, capsys, monkeypatch, lines: tuple[str, str]) -> None:
    code, answers, err = talk(capsys, monkeypatch, speaking, lines[0], "", lines[1], "Hello")
    assert (code, answers) == (0, [])
    assert "/regenerate" in err


@pytest.mark.parametrize(
    ("lines", "message", "quoted"),
    [
        (["Hello"], "Hello", False),
        (["One\\", "two"], "One\ntwo", False),
        (["One\\"], "One", False),
        (['"""One', "", 'two"""', "rest"], "One\n\ntwo", True),
        (['"""', "/exit", '"""'], "/exit", True),
        (['"""One line"""'], "One line", True),
        (['"""', "One", "two"], "One\ntwo", True),
    ],
)
def test_a_message_may_have_several_lines(lines: list[str], message: str, quoted: bool) -> None:
    first, *others = lines
    more = iter(others)
    assert whole(first, lambda: next(more, None)) == (message, quoted)


def test_several_lines_are_one_turn(speaking, capsys, monkeypatch, tmp_path) -> None:
    for lines in (("One\\", "two"), ('"""One', 'two"""')):
        code, answers, _ = talk(capsys, monkeypatch, speaking, *lines)
        assert (code, len(answers)) == (0, 1)
        assert answers == run(capsys, "run", speaking, "One\ntwo", *BASE)[1].splitlines()
    # Without commands a line of a pipe is text as it is.
    code, answers, _ = talk(capsys, monkeypatch, speaking, "One\\", "two", commands=())
    assert (code, len(answers)) == (0, 2)


@pytest.mark.parametrize(
    ("letters", "said"),
    [
        (450, "has 450 tokens, more than the 400 of the context: start with a larger --ctx-size"),
        (600, "has 600 tokens, more than the 400 of the context: the model has 512 positions"),
    ],
)
def test_a_file_beyond_the_models_positions_is_an_error(
    speaking, capsys, monkeypatch, tmp_path, letters: int, said: str
) -> None:
    (tmp_path / "long").write_text("x" * letters)
    code, _, err = talk(capsys, monkeypatch, speaking, f"/file {tmp_path / 'long'}")
    assert (code, said in err) == (2, True), err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_without_a_chat_template_the_command_that_works_is_named(
    capsys, monkeypatch, tmp_path, command: str
) -> None:
    make_model("llama", tmp_path)
    add_tokenizer(tmp_path, chat=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    code, out, err = run(capsys, command, tmp_path, "--device", "cpu")
    assert (code, out) == (2, "")
    assert f"`triforce generate {tmp_path} -p TEXT` continues a text" in err


@pytest.mark.slow
def test_in_a_terminal_an_interrupt_ends_an_answer_and_not_the_chat(speaking) -> None:
    """Answers go to standard output, lines are edited and figures shown on the terminal."""
    leader, follower = pty.openpty()
    command = ["chat", str(speaking), "--device", "cpu", "-c", "500"]
    command += [*least_memory(*command), "--link-bandwidth", "1MB/s"]
    chat = subprocess.Popen(
        [
            *(sys.executable, "-m", "triforce_core.cli"),
            *(*command, "--temperature", "1", "-n", "450"),
        ],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    os.close(follower)
    seen = b""

    def until(text: bytes, seconds: float = 60) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, seen[-2000:]
            seen += os.read(leader, 4096)
        seen = seen[seen.index(text) + len(text) :]

    try:
        until(b"Ctrl-D ends")
        os.write(leader, b"Hello\r")
        assert chat.stdout.read(1), "the answer begins"
        chat.send_signal(signal.SIGINT)
        until(b"interrupted: /continue goes on")
        os.write(leader, b"/exit\r")
        chat.wait(30)
        assert chat.returncode == 0
    finally:
        chat.kill()
        chat.wait()
        chat.stdout.close()
        os.close(leader)
