"""`triforce chat`: a conversation in a terminal or over a pipe, with one turn per line."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from triforce_core.cli.chat.arguments import DEFAULT_CONTEXT, DEFAULT_NEW_TOKENS
from triforce_core.cli.chat.line import Lines, OneMessage, whole
from triforce_core.cli.chat.session import ChatSession
from triforce_core.cli.chat.wrapping import WordWrap
from triforce_core.cli.codes import INTERRUPTED
from triforce_core.cli.options import check_ctx_size, engine_config, sampling_params
from triforce_core.cli.ranks import followed, of_world
from triforce_core.cli.terminal.output import WARNING, TextOutput, announce, say, terminal_columns
from triforce_core.cli.terminal.progress import ProgressBars
from triforce_core.cli.terminal.reading import saved_tokens
from triforce_core.cli.terminal.report import (
    ENDS,
    accepted_drafts,
    colored,
    print_run,
    takes_colors,
)
from triforce_core.cli.terminal.signals import Stop, ending, exit_code
from triforce_core.loading.open_model import OpenModel
from triforce_core.requests.answer.reasoning import variables
from triforce_core.requests.stream import Completion, Piece, Stream
from triforce_offload.errors import DoesNotFitError, OutputError, UsageError

HELP = """\
/file FILE       attach a text to what you say next
/regenerate      answer what you said last again
/edit TEXT       replace what you said last, and answer this
/continue        go on with an answer that was cut
/clear           start a new conversation; the system prompt stays
/system TEXT     start a new conversation with this system prompt
/save FILE       save the conversation, with what was computed for it
/load FILE       go on with a saved conversation
/stats           show the figures of the last answer
/exit            end, as /bye, /quit and Ctrl-D do; Ctrl-C ends an answer
\"""              begin and end a message of several lines; or end lines with \\"""
_ENDS = ("/exit", "/quit", "/bye")


def chat(args: argparse.Namespace) -> int:
    """Process turns from standard input until it ends. Return the exit code."""
    return converse(args, Lines)


def converse(args: argparse.Namespace, lines: Callable[[], Lines | OneMessage]) -> int:
    """Process turns until the input ends. Return the exit code.

    lines: opens the input, once the model is known
    """
    if (code := followed(quiet=args.quiet)) is not None:
        return code
    params = sampling_params(args, max_new_tokens=DEFAULT_NEW_TOKENS)
    config = of_world(engine_config(args, None))
    if args.load:
        if args.system:
            raise UsageError("--system cannot be used with --load, which continues a conversation")
        saved_tokens(args.load)
    with ExitStack() as stack:
        bars = ProgressBars(show=not args.quiet)
        # While the model loads, a signal restores the terminal and ends the process.
        loading = stack.enter_context(ExitStack())
        loading.enter_context(Stop(bars.give_back).listening())
        stack.enter_context(bars)
        model = stack.enter_context(OpenModel.at(args.model, announce=announce))
        if model.tokenizer is None:
            raise UsageError(f"{model.checkpoint.path} has no tokenizer")
        if not model.tokenizer.has_chat_template:
            raise UsageError(
                f"{args.model} has no chat template, so it answers no messages; "
                f"`triforce generate {shlex.quote(args.model)} -p TEXT` continues a text"
            )
        messages = [{"role": "system", "content": args.system}] if args.system else []
        # Reject a chat template that cannot be rendered, before anything is loaded.
        model.tokenizer.render([*messages, {"role": "user", "content": "Hello"}])
        positions = model.checkpoint.config.positions
        check_ctx_size(config.max_context, positions)
        config = replace(config, max_context=config.max_context or min(positions, DEFAULT_CONTEXT))
        opened = lines()
        from triforce_core.engine import Engine

        engine = stack.enter_context(Engine.from_pretrained(model, config, progress=bars.update))
        model.close()
        bars.stop()
        loading.close()
        if not args.quiet:
            say(f"plan: {engine.plan_line}")
        session = ChatSession(engine, params, messages, variables=variables(args.reasoning))
        if args.load:
            say(f"{session.load(args.load)} tokens of context loaded")
        return Chat(session, opened, args).run()


class Chat:
    """The terminal interface of a conversation."""

    def __init__(
        self, session: ChatSession, lines: Lines | OneMessage, args: argparse.Namespace
    ) -> None:
        self._session = session
        self._lines = lines
        self._quiet = args.quiet
        self._colors = args.color_levels and takes_colors(sys.stdout)
        # Text over a pipe may be untrusted, and commands read and write files.
        self._takes_commands = lines.terminal or args.commands
        self._said_that_commands_are_text = False
        self._output = TextOutput()
        self._last: Completion | None = None
        self._code = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "file": self._attach,
            "regenerate": lambda _: self._show(self._session.regenerate()),
            "edit": lambda text: self._show(self._session.edit(_needed(text, "/edit TEXT"))),
            "continue": lambda _: self._show(self._session.go_on()),
            "system": lambda text: self._clear(_needed(text, "/system TEXT")),
            "clear": lambda _: self._clear(None),
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
            **dict.fromkeys(("help", "?"), lambda _: say(HELP)),
        }

    def run(self) -> int:
        """Process turns until the input ends. Return the exit code."""
        if self._lines.terminal and not self._quiet:
            say("Say something; /help lists the commands, Ctrl-D ends.")
        while not self._code and not self._output.code:
            with ending():
                line = self._lines.read(self._status)
            if line is None:
                break
            try:
                text, is_text = self._whole(line)
                if self._takes_commands and not is_text and text in _ENDS:
                    break
                if not text:
                    continue
                self._turn(text, is_text)
            except KeyboardInterrupt:
                say("interrupted")
                if not self._lines.terminal:
                    return INTERRUPTED
            except (UsageError, OutputError, DoesNotFitError) as error:
                say(f"triforce: {error}")
                if not self._lines.terminal:
                    # Without a terminal, only the exit code can report the error.
                    return error.exit_code
        if self._output.code:
            say(f"triforce: {self._output.why}")
        return self._code or self._output.code

    def _whole(self, line: str) -> tuple[str, bool]:
        """Return the message that begins with a line, and whether it is text whatever it begins
        with.
        """
        if not self._takes_commands:
            return line.strip(), False
        # An interrupt discards the message, and in a terminal the chat goes on.
        with ending():
            text, is_text = whole(line, lambda: self._lines.read(self._status, goes_on=True))
        return text.strip(), is_text

    def _turn(self, text: str, is_text: bool) -> None:
        is_command = text.startswith("/") and not is_text
        if not (is_command and self._takes_commands):
            if is_command:
                self._say_that_commands_are_text()
            self._show(self._session.say(text))
            return
        name, _, rest = text[1:].partition(" ")
        if name not in self._commands:
            raise UsageError(f"there is no command /{name}; /help lists them")
        with ending():
            self._commands[name](rest.strip())

    def _say_that_commands_are_text(self) -> None:
        if not self._said_that_commands_are_text:
            self._said_that_commands_are_text = True
            say(
                "triforce: over a pipe a line that begins with / is text for the model; "
                "--commands makes it a command",
                WARNING,
            )

    def _show(self, stream: Stream) -> None:
        """Write an answer as it is generated. An interrupt ends it and keeps its text."""
        bars = ProgressBars(show=self._lines.terminal and not self._quiet, opening=False)
        engine, before = self._session.engine, self._session.engine.progress
        engine.progress = bars.update

        def give_back() -> None:
            bars.give_back()
            self._lines.give_back()

        stop = Stop(give_back)
        stop.end = stream.interrupt
        columns = terminal_columns(sys.stdout)
        wrap = WordWrap(self._output.write, self._shown, columns) if columns else None
        try:
            with stop.listening(), self._lines.held(), bars:
                for piece in stream.pieces():
                    with suppress(OSError):
                        bars.stop()
                    wrote = wrap.take(piece) if wrap else self._output.write(self._shown(piece))
                    if not wrote:
                        stream.interrupt()
        finally:
            if wrap:
                wrap.end()
            engine.progress = before
            stop.ended()
            if stream.ended:
                self._last = stream.result
                self._session.ended(stream.result)
        if not stream.result.text.endswith("\n"):
            self._output.write("\n")
        if stop.number is not None and not (stop.is_interrupt and self._lines.terminal):
            self._code = exit_code(stop.number)
        if not self._quiet:
            say(self._status())

    def _shown(self, piece: Piece) -> str:
        return colored(piece) if self._colors else piece.text

    def _status(self) -> str:
        """Return one line with the figures of the last answer."""
        session = self._session
        used = f"context {session.context_tokens:,} of {session.most_tokens:,} tokens"
        if self._last is None:
            return used
        stats = self._last.stats
        parts = [f"{stats['new_tokens']} tokens"]
        if seconds := stats["seconds_per_token"]:
            parts.append(f"{1 / seconds:.1f} tokens/s")
        if accepted := accepted_drafts(stats):
            parts.append(f"{accepted} accepted")
        if stats["finish_reason"] != "stop":
            more = ": /continue goes on" if self._takes_commands else ""
            parts.append(f"{ENDS.get(stats['finish_reason'], stats['finish_reason'])}{more}")
        return ", ".join((*parts, used))

    def _attach(self, path: str) -> None:
        tokens = self._session.attach(_needed(path, "/file FILE"))
        say(f"{path}: {tokens:,} tokens, before what you say next")

    def _clear(self, system: str | None) -> None:
        self._session.clear(system)
        self._last = None
        say("a new conversation" + (" with this system prompt" if system else ""))

    def _save(self, path: str) -> None:
        say(f"{self._session.save(_needed(path, '/save FILE')):,} tokens of context saved")

    def _load(self, path: str) -> None:
        say(f"{self._session.load(_needed(path, '/load FILE')):,} tokens of context loaded")
        self._last = None

    def _stats(self, _: str) -> None:
        if self._last is None:
            raise UsageError("there is no answer yet")
        print_run(self._last.stats)


def _needed(text: str, usage: str) -> str:
    if not text:
        raise UsageError(f"usage: {usage}")
    return text
