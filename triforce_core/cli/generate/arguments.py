"""The arguments of `triforce generate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from triforce_core.cli.options import (
    CONTEXT_FLAGS,
    SEQUENCES_FLAGS,
    add_machine_options,
    add_option,
    draft_length,
    new_tokens,
    seed,
    tokens,
    tree_nodes,
)
from triforce_core.cli.parser import Options, Parser, for_experts
from triforce_core.machine_settings import MachineSettings
from triforce_core.params import SamplingParams
from triforce_core.requests.answer.reasoning import AS_TEMPLATE, OFF, ON
from triforce_core.settings import (
    ACCEPT,
    COPY_BITS,
    DEFAULT_BUDGET,
    DRAFT_KV,
    DRAFT_WEIGHTS,
    METHODS,
    EngineConfig,
    MethodSettings,
)

MODEL_HELP = (
    "a directory with safetensors, a .gguf file, a hub id, a short name such as qwen3-8b, either "
    "with a quantisation of GGUF files such as qwen3-8b:Q4_K_M, or Ollama's name for a model; "
    "triforce list shows those on this machine"
)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=MODEL_HELP
    )
    where.add_argument(
        "-m", "--model", metavar="MODEL", default=argparse.SUPPRESS, help="same as MODEL"
    )


def add_reasoning(add: Callable[..., Any]) -> None:
    """Add the option of models that reason first."""
    add(
        "--reasoning",
        choices=(AS_TEMPLATE, ON, OFF),
        default=AS_TEMPLATE,
        help="whether the model reasons before it answers; auto: the chat template decides",
    )


def add_decoding_arguments(
    parser: argparse.ArgumentParser, new_tokens_most: int, context: str
) -> Options:
    """Add the options for sampling, decoding and the machine. Return the last group.

    new_tokens_most: the command's default for the number of new tokens
    context: the command's default for the context length, in words
    """
    group = parser.add_argument_group("sampling")
    _add_sampling(group, new_tokens_most)
    _add_constraints(group)
    return add_machine_and_method(parser, context)


def add_machine_and_method(parser: argparse.ArgumentParser, context: str) -> Options:
    """Add the options for decoding and the machine. Return the last group.

    context: the command's default for the context length, in words
    """
    group = parser.add_argument_group("drafting")
    _add_method(group)
    _add_retrieval(group)
    group = add_machine_options(parser)
    add_option(
        group,
        EngineConfig,
        "max_context",
        f"context length in tokens that memory is planned for (default: {context})",
        flags=CONTEXT_FLAGS,
        type=tokens,
        metavar="N",
    )
    add_option(
        group,
        MachineSettings,
        "gpus",
        "GPUs that share the model, each with its own link; on cpu, emulated devices",
        type=int,
        metavar="N",
    )
    return group


def add_generate_arguments(parser: Parser) -> None:
    parser.beyond = "-p TEXT gives a prompt, triforce run MODEL TEXT answers a message"
    add_model_argument(parser)
    _add_input(parser)
    new_tokens_most = SamplingParams.max_new_tokens
    group = add_decoding_arguments(parser, new_tokens_most, "prompt and new tokens")
    group.add_argument(
        "--plan", metavar="FILE", help="run a plan from `triforce plan --save`; flags override it"
    )
    add_sequences(group)
    for_experts(
        group.add_argument(
            "--resident-kv-blocks",
            type=int,
            metavar="N",
            help="number of KV blocks that stay on the device; overrides the plan",
        )
    )
    _add_output(parser)


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="prompt (default: standard input)")
    source.add_argument(
        *("-f", "--prompt-file", "--file"),
        metavar="FILE",
        help="file with the prompt; - for standard input",
    )
    source.add_argument(
        "--messages",
        metavar="FILE",
        help="conversation to answer: JSON, a list of messages with role and content",
    )
    source.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="many prompts, one per line: text, or JSON with prompt or messages, and id",
    )
    add = group.add_argument
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--system", metavar="TEXT", help="system prompt for the chat template")
    add_reasoning(add)
    add(
        "--load-context",
        metavar="FILE",
        help="reuse a context from --save-context: of a prompt that begins with the saved text, "
        "only the rest is prefilled",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(
        "--json",
        action="store_true",
        help="print JSON lines: each piece of text with its origin, then statistics",
    )
    add("--stats", metavar="FILE", help="write statistics of the run as JSON")
    add(
        "--save-context",
        metavar="FILE",
        help="write the text and its KV, for --load-context and a prompt that begins with the text",
    )
    add(
        "--output",
        metavar="FILE",
        help="write answers to --prompts-file as JSON lines; skip prompts answered in FILE",
    )
    add("--quiet", action="store_true", help="show no progress and no table")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by origin: accepted draft, correction, bonus token",
    )
    add_option(
        group,
        EngineConfig,
        "trace",
        "write a timeline for Perfetto or chrome://tracing",
        expert=True,
        metavar="FILE",
    )


def add_sequences(parser: Options) -> None:
    add_option(
        parser,
        EngineConfig,
        "sequences",
        "sequences that are decoded together; streamed weights are copied once per pass for all",
        flags=SEQUENCES_FLAGS,
        type=int,
        metavar="N",
    )


def _bias(text: str) -> tuple[int, float]:
    """Parse a token id and the value that is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 123=-5") from None


def _add_sampling(group: Options, new_tokens_most: int) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, SamplingParams, name, text, **options)

    add(
        "max_new_tokens",
        f"generate at most N tokens (default: {new_tokens_most}); -1: until the text ends or the "
        "context is full",
        flags=("-n", "--max-new-tokens", "--n-predict"),
        type=new_tokens,
        metavar="N",
    )
    add(
        "temperature",
        "0 always takes the most likely token",
        flags=("--temperature", "--temp"),
        type=float,
        metavar="T",
    )
    add(
        "top_p",
        "sample from the smallest set of tokens that has this total probability",
        type=float,
        metavar="P",
    )
    add("top_k", "sample from the K most likely tokens; 0 keeps all", type=int, metavar="K")
    add(
        "min_p",
        "drop tokens less likely than this share of the most likely one; 0 keeps all",
        type=float,
        metavar="P",
    )
    add(
        "seed",
        "seed of the random draws; -1, the default, draws a new seed. Learned draft lengths depend "
        "on time: for the same text each time add --accept coupled, or fix --draft-tokens and "
        "--inner-draft-tokens",
        flags=("-s", "--seed"),
        type=seed,
        metavar="N",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the text before this string; may be given again",
    )


def _add_constraints(group: Options) -> None:
    """Add the options that change logits: penalties, biases and grammars."""

    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, SamplingParams, name, text, **options)

    add(
        "repeat_penalty",
        "penalise tokens that already occur in the text; 1 is off",
        type=float,
        metavar="F",
    )
    add(
        "presence_penalty",
        "penalise a token once if it was generated before; 0 is off",
        expert=True,
        type=float,
        metavar="X",
    )
    add(
        "frequency_penalty",
        "penalise a token for every time it was generated; 0 is off",
        expert=True,
        type=float,
        metavar="X",
    )
    add(
        "logit_bias",
        "add X to the logit of a token id; may be given again",
        expert=True,
        type=_bias,
        action="append",
        metavar="TOKEN=X",
    )
    add(
        "grammar",
        "file with a grammar (llguidance's Lark) that the text must follow",
        expert=True,
        metavar="FILE",
    )
    add(
        "json_schema",
        "file with a JSON schema that the text must follow",
        expert=True,
        metavar="FILE",
    )


def _add_method(group: Options) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, MethodSettings, name, text, **options)

    add(
        "method",
        "triforce: a drafter, the retrieval level, then the target; speculative: a drafter, then "
        "the target; autoregressive: no drafts",
        choices=METHODS,
    )
    add(
        "draft",
        "the drafter: ngram looks tokens up in the text, mtp is the model's own MTP head, MODEL is "
        "a small model with the same vocabulary, an EAGLE-3 head, a DFlash drafter or an assistant "
        "of Gemma 4; auto is mtp if the files have a head that fits and pays, else ngram",
        metavar="auto|ngram|mtp|none|MODEL",
    )
    add(
        "budget",
        "tokens in the retrieval cache (default: the fastest number on a GPU that `triforce plan` "
        f"knows, else {DEFAULT_BUDGET}, or fewer if memory is short)",
        type=tokens,
        metavar="TOKENS",
    )
    add(
        "draft_tokens",
        "tokens drafted for each pass (forward of the target)",
        type=draft_length,
        metavar="N",
    )
    add(
        "inner_draft_tokens",
        "tokens drafted for each step of the retrieval level",
        expert=True,
        type=draft_length,
        metavar="N",
    )
    add(
        "tree",
        "draft trees of up to NODES tokens; off: no trees; auto: trees where they pay",
        expert=True,
        type=tree_nodes,
        metavar="auto|off|NODES",
    )
    add(
        "accept",
        "coupled: a seed gives the same text with every drafter; optimal: accepts more tokens",
        expert=True,
        choices=ACCEPT,
    )


def _add_retrieval(group: Options) -> None:
    """Add the options of the retrieval level."""

    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, MethodSettings, name, text, **options)

    add(
        "chunk_size",
        "tokens per chunk; the retrieval cache holds whole chunks",
        expert=True,
        type=int,
        metavar="TOKENS",
    )
    add(
        "draft_weights",
        "weights of the retrieval level: exact; int4: copies of all layers in 4 bits; split: the "
        "high bits of --weights split; auto: exact where resident, copies of layers that stream",
        expert=True,
        choices=DRAFT_WEIGHTS,
    )
    add(
        "copy_bits",
        "bits of the numbers of copies of layers that stream; auto: 4, or 3 where that is better",
        expert=True,
        type=draft_length,
        choices=COPY_BITS,
    )
    add(
        "draft_kv",
        "format of the retrieval cache: exact; int8; auto: int8 on a GPU",
        expert=True,
        choices=DRAFT_KV,
    )
