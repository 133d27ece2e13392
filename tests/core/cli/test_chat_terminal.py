"""A chat in a terminal: what is typed while an answer streams, and lines that end between words."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import heed_signals, least_memory
from wcwidth import wcswidth

from triforce_core.cli.chat.wrapping import WordWrap
from triforce_core.cli.terminal.report import colored
from triforce_core.requests.stream import Piece

ORIGINS = ("accepted", "corrected", "bonus", "plain")
TYPED = "typed meanwhile"


def wrapped(pieces: list[Piece], columns: int, show=lambda piece: piece.text) -> str:
    written: list[str] = []
    wrap = WordWrap(lambda text: written.append(text) is None, show, columns)
    for piece in pieces:
        assert wrap.take(piece)
    assert wrap.end()
    return "".join(written)


@pytest.mark.parametrize("columns", [8, 20, 80])
def test_lines_end_between_words(columns: int) -> None:
    draw = random.Random(columns)
    words = ["a", "word", "another", "日本語", "end.", "\n", "  ", "\n\n", "\u0301x"]
    text = "".join(draw.choice(words) + draw.choice([" ", " ", ""]) for _ in range(300))
    pieces, rest = [], text
    while rest:
        size = draw.randint(1, 7)
        pieces.append(Piece(rest[:size], draw.choice(ORIGINS)))
        rest = rest[size:]
    shown = wrapped(pieces, columns)
    assert "".join(shown.split()) == "".join(text.split()), "nothing is lost"
    for line in shown.split("\n"):
        assert wcswidth(line) <= columns
    # A word is broken only where it is longer than a line, or wide characters are in it.
    whole = {word for word in text.split() if word.isascii() and len(word) <= columns}
    assert whole <= set(shown.split())


def test_a_word_longer_than_a_line_is_broken_at_the_margin() -> None:
    assert wrapped([Piece("ab " + "x" * 10, "plain")], 4) == "ab \nxxxx\nxxxx\nxx"


def test_a_words_pieces_keep_their_colours() -> None:
    pieces = [Piece("one tw", "accepted"), Piece("o", "bonus")]
    expected = (colored(Piece("one \ntw", "accepted")), colored(Piece("o", "bonus")))
    assert wrapped(pieces, 5, colored).replace("\x1b[0m\x1b[32m", "") == "".join(expected)


def test_the_last_word_is_held_back_until_it_ends() -> None:
    written: list[str] = []
    wrap = WordWrap(lambda text: written.append(text) is None, lambda piece: piece.text, 80)
    wrap.take(Piece("one tw", "plain"))
    assert "".join(written) == "one "
    wrap.take(Piece("o ", "plain"))
    assert "".join(written) == "one two "


class Terminal:
    """A chat in a terminal of its own. seen: what it shows, in the order in which it came"""

    def __init__(self, leader: int, process: subprocess.Popen) -> None:
        self.leader, self.process = leader, process
        self.seen = b""

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def until(self, text: str, seconds: float = 100) -> str:
        """What was shown until a text was, that included. The rest is seen later."""
        end = time.monotonic() + seconds
        while text.encode() not in self.seen:
            assert time.monotonic() < end, self.seen[-3000:]
            self.seen += os.read(self.leader, 4096)
        there = self.seen.index(text.encode()) + len(text.encode())
        shown, self.seen = self.seen[:there], self.seen[there:]
        return shown.decode(errors="replace")


def _in_terminal() -> None:
    heed_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def chatting(model: Path) -> Iterator[Terminal]:
    """A chat whose answers are long and stream slowly."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = ["chat", str(model), "--device", "cpu", "-c", "500"]
    command += [*least_memory(*command), "--link-bandwidth", "1MB/s"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "triforce_core.cli"),
            *(*command, "--temperature", "1", "-n", "300"),
        ],
        **{"stdin": follower, "stdout": follower, "stderr": follower},
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
        preexec_fn=_in_terminal,
    )
    os.close(follower)
    try:
        yield Terminal(leader, process)
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def echoes(terminal: Terminal) -> bool:
    return bool(termios.tcgetattr(terminal.leader)[3] & termios.ECHO)


def wait_until_answering(terminal: Terminal) -> None:
    """An answer is under way once the terminal is in neither the editor's modes nor its first."""
    end = time.monotonic() + 60
    while echoes(terminal) or not termios.tcgetattr(terminal.leader)[3] & termios.ICANON:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_what_is_typed_while_an_answer_streams_is_the_next_turn(speaking) -> None:
    """It is not shown in the answer, and Ctrl-C, which ends the answer, does not drop it."""
    with chatting(speaking) as terminal:
        terminal.until("Ctrl-D ends")
        terminal.type("Hello\r")
        wait_until_answering(terminal)
        terminal.type(TYPED + "\r")
        terminal.type("\x03")
        answer = terminal.until("interrupted: /continue goes on")
        assert TYPED not in answer
        # It is shown where it is a turn, and answered.
        terminal.until("> ")
        terminal.until(TYPED)
        wait_until_answering(terminal)
        terminal.type("\x03")
        terminal.until("interrupted: /continue goes on")
        terminal.type("/exit\r")
        terminal.process.wait(60)
        assert terminal.process.returncode == 0
        assert echoes(terminal), "the terminal is as it was"
