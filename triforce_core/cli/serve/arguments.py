"""The arguments of `triforce serve`."""

from __future__ import annotations

from typing import Any

from triforce_core.cli.chat.arguments import CONTEXT_IN_WORDS
from triforce_core.cli.generate.arguments import (
    add_machine_and_method,
    add_model_argument,
    add_sequences,
)
from triforce_core.cli.options import add_option
from triforce_core.cli.parser import Parser
from triforce_core.requests.answer.reasoning import AS_TEMPLATE, OFF, ON
from triforce_core.server.settings import ServerSettings

_FIELDS = ("top_p", "top_k", "min_p", "stop", "logit_bias")
_FIELDS += ("repeat_penalty", "presence_penalty", "frequency_penalty")
# What clients set for each request, by the options of `triforce generate` and others' servers.
_OF_REQUESTS = {
    **dict.fromkeys(("-n", "--max-new-tokens", "--n-predict", "--max-tokens"), "max_tokens"),
    **dict.fromkeys(("-s", "--seed"), "seed"),
    **dict.fromkeys(("--temp", "--temperature"), "temperature"),
    **dict.fromkeys(("-sys", "--system", "--system-prompt"), "a message of the role system"),
    "--json-schema": "response_format",
    **{"--" + name.replace("_", "-"): name for name in _FIELDS},
}


def add_serve_arguments(parser: Parser) -> None:
    parser.elsewhere |= {flag: f"{field} in a request" for flag, field in _OF_REQUESTS.items()}
    add_model_argument(parser)
    group = parser.add_argument_group("server")

    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, ServerSettings, name, text, **options)

    add(
        "host",
        "address to listen on; an address that other machines can reach needs a key",
        metavar="ADDRESS",
    )
    add("port", "port to listen on", type=int, metavar="N")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="key that clients must send (default: TRIFORCE_API_KEY, or none)",
    )
    group.add_argument(
        "--name", metavar="NAME", help="name of the model for clients (default: the file's name)"
    )
    add_sequences(group)
    add("queue", "number of requests that may wait", type=int, metavar="N")
    add(
        "contexts",
        "conversations whose KV waits in host memory while another is served",
        type=int,
        metavar="N",
    )
    add(
        "reasoning",
        "whether the model reasons before it answers; auto: the chat template decides",
        choices=(AS_TEMPLATE, ON, OFF),
    )
    add(
        "allow_origins",
        "origins whose pages may use the server through a browser, such as http://localhost:3000",
        expert=True,
        metavar="ORIGIN[,ORIGIN]",
    )
    add("max_body", "largest request, such as 32MiB", expert=True, metavar="SIZE")
    group.add_argument(
        "--log-requests",
        action="store_true",
        help="log a line for each request, why one was refused, and each text when it ends",
    )
    group.add_argument("--quiet", action="store_true", help="log only warnings")
    add_machine_and_method(parser, CONTEXT_IN_WORDS)
