"""The arguments of `triforce generate`."""

from __future__ import annotations

import argparse
from typing import Any

from triforce_core.cli.options import (
    CONTEXT_FLAGS,
    add_machine_options,
    add_option,
    draft_length,
    new_tokens,
    seed,
    tree_nodes,
)
from triforce_core.params import SamplingParams
from triforce_core.settings import (
    ACCEPT,
    DEFAULT_BUDGET,
    DRAFT_KV,
    DRAFT_WEIGHTS,
    METHODS,
    RETRIEVAL,
    EngineConfig,
    MachineSettings,
    MethodSettings,
)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    text = "directory with safetensors, .gguf file, or hub id"
    where.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)
    where.add_argument("-m", "--model", metavar="MODEL", default=argparse.SUPPRESS, help="the same")


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is sampled from, how it is decoded, and on what."""
    _add_sampling(parser)
    add_machine_and_method(parser)


def add_machine_and_method(parser: argparse.ArgumentParser) -> None:
    """How a model is decoded, and on what."""
    _add_method(parser)
    add_machine_options(parser)
    add_option(
        parser,
        EngineConfig,
        "max_context",
        "tokens that device memory is divided for (default: prompt and new tokens; chat and serve: "
        "32768, or the model's positions)",
        flags=CONTEXT_FLAGS,
        type=int,
        metavar="N",
    )
    add_option(
        parser,
        MachineSettings,
        "gpus",
        "that share the model, each with a link of its own; on cpu, as many emulated devices",
        type=int,
        metavar="N",
    )


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="prompt (default: standard input)")
    source.add_argument(
        "--prompt-file", metavar="FILE", help="file that holds the prompt; - for standard input"
    )
    source.add_argument(
        "--messages",
        metavar="FILE",
        help="a conversation to answer: JSON, a list of messages with role and content",
    )
    source.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="many prompts, one a line: text, or JSON with prompt or messages, and id",
    )
    add(
        "--output",
        metavar="FILE",
        help="where answers to --prompts-file go, as JSON lines; what it holds is not done again",
    )
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--system", metavar="TEXT", help="system prompt, before the prompt in the chat template")
    add("--save-context", metavar="FILE", help="write what was computed for the text")
    add(
        "--load-context",
        metavar="FILE",
        help="what --save-context wrote; of a prompt that begins as its text the rest is read",
    )
    add(
        "--json",
        action="store_true",
        help="JSON lines: each piece of text and the level that it came from, then the stats",
    )
    add_sequences(parser)
    add_decoding_arguments(parser)
    add("--plan", metavar="FILE", help="what `triforce plan --save` wrote; flags change it")
    add("--resident-kv-blocks", type=int, metavar="N", help="on the device, instead of the plan's")
    add_option(
        parser,
        EngineConfig,
        "trace",
        "write a timeline for Perfetto or chrome://tracing",
        metavar="FILE",
    )
    add("--stats", metavar="FILE", help="write figures of the run as JSON")
    add("--quiet", action="store_true", help="no progress and no table")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by where it came from: accepted draft, correction, bonus",
    )


def add_sequences(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        EngineConfig,
        "sequences",
        "texts at once: what streams of the weights crosses once a pass for all of them",
        type=int,
        metavar="N",
    )


def _bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 123=-5") from None


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(parser, SamplingParams, name, text, **options)

    add(
        "max_new_tokens",
        "most tokens to generate; -1: until the text ends or the context is full; chat: 2048",
        flags=("-n", "--max-new-tokens"),
        type=new_tokens,
        metavar="N",
    )
    add("temperature", "0 takes the likeliest token", type=float, metavar="T")
    add("top_p", "nucleus that is sampled from", type=float, metavar="P")
    add("top_k", "likeliest tokens kept; 0 keeps all", type=int, metavar="K")
    add("min_p", "least share of the likeliest that is kept; 0 keeps all", type=float, metavar="P")
    add("repeat_penalty", "of what was said before; 1 is off", type=float, metavar="F")
    add("presence_penalty", "of what was generated before", type=float, metavar="X")
    add("frequency_penalty", "of it, for each time", type=float, metavar="X")
    add(
        "logit_bias",
        "added to a token's logit; may be given again",
        type=_bias,
        action="append",
        metavar="TOKEN=X",
    )
    add("grammar", "file with a grammar (llguidance's Lark) that the text keeps to", metavar="FILE")
    add("json_schema", "file with a JSON schema that the text keeps to", metavar="FILE")
    parser.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="ends the text where it begins; may be given again",
    )
    add(
        "seed",
        "of the random draws; -1 draws a new one, as by default",
        flags=("-s", "--seed"),
        type=seed,
        metavar="N",
    )


def _add_method(parser: argparse.ArgumentParser) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(parser, MethodSettings, name, text, **options)

    add(
        "method",
        "drafts verified by a retrieval model and then the target, or by the target alone, or no "
        "drafts",
        choices=METHODS,
    )
    add("draft", "drafter; auto is ngram", metavar="auto|ngram|none|MODEL")
    add("draft_tokens", "drafted for each pass", type=draft_length, metavar="N")
    add(
        "tree",
        "tokens of a draft that branches, where the drafter proposes straight to the target",
        type=tree_nodes,
        metavar="auto|off|NODES",
    )
    add(
        "inner_draft_tokens",
        "drafted for each step of the retrieval model",
        type=draft_length,
        metavar="N",
    )
    add(
        "budget",
        f"of the retrieval cache (default: {DEFAULT_BUDGET}, or less where those do not fit)",
        type=int,
        metavar="TOKENS",
    )
    add("chunk_size", "retrieved together", type=int, metavar="TOKENS")
    add("retrieval", "how chunks are chosen", choices=RETRIEVAL)
    add(
        "draft_weights",
        "of the retrieval model: auto takes copies in 4 bits of layers that stream, int4 of all; "
        "split reads 8 of the 12 bits of --weights split",
        choices=DRAFT_WEIGHTS,
    )
    add("draft_kv", "of the retrieval cache: auto is int8 on a GPU", choices=DRAFT_KV)
    add(
        "accept",
        "coupled: a seed's text is the same whatever drafts it",
        choices=ACCEPT,
    )
