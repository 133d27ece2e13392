"""The arguments of `triforce run`."""

from __future__ import annotations

from triforce_core.cli.chat.arguments import add_conversation_arguments
from triforce_core.cli.generate.arguments import MODEL_HELP
from triforce_core.cli.parser import Parser


def add_run_arguments(parser: Parser) -> None:
    parser.elsewhere |= dict.fromkeys(("-p", "--prompt"), "the text after MODEL")
    parser.beyond = "quotes keep the words of a message together"
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="answer this message, then end (default: chat). If the input is a pipe, the message "
        "is its text, then PROMPT; </dev/null leaves it out",
    )
    add_conversation_arguments(parser)
