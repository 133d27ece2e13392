"""The arguments of `triforce chat`."""

from __future__ import annotations

import argparse

from triforce_core.cli.generate.arguments import (
    add_decoding_arguments,
    add_model_argument,
    add_reasoning,
)
from triforce_core.cli.parser import Parser

# The maximum context length when no --ctx-size is given.
DEFAULT_CONTEXT = 32768
CONTEXT_IN_WORDS = f"{DEFAULT_CONTEXT}, or the model's positions if fewer"
# The default maximum of new tokens for each answer.
DEFAULT_NEW_TOKENS = 2048
_ONE_ANSWER = "triforce run MODEL TEXT, for one answer"


def add_chat_arguments(parser: Parser) -> None:
    parser.elsewhere |= dict.fromkeys(("-p", "--prompt"), _ONE_ANSWER)
    parser.beyond = f"it is {_ONE_ANSWER}"
    add = parser.add_argument
    add_model_argument(parser)
    add("--load", metavar="FILE", help="continue a conversation from /save")
    add(
        "--commands",
        action="store_true",
        help="run lines that begin with / as commands even if the input is a pipe; commands read "
        "and write files (default: only in a terminal)",
    )
    add_conversation_arguments(parser)


def add_conversation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a chat shares with the answer to one message."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system prompt")
    add_reasoning(add)
    add_decoding_arguments(parser, DEFAULT_NEW_TOKENS, CONTEXT_IN_WORDS)
    add("--quiet", action="store_true", help="show no progress and no figures")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by origin: accepted draft, correction, bonus token",
    )
