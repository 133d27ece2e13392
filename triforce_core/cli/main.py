"""The command line. Standard output is generated text only; everything else goes to stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from offload.errors import TriforceError, UsageError
from triforce_core.cli.codes import INTERRUPTED
from triforce_core.cli.plan_arguments import add_plan_arguments
from triforce_core.model.shapes import SHAPES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1, 2 usage, 3 does not fit, 4 bad checkpoint,
    130 interrupted.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our text has gone; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TriforceError as error:
        if args.debug:
            raise
        print(f"triforce: {error}", file=sys.stderr)
        return error.exit_code


def _generate(args: argparse.Namespace) -> int:
    from triforce_core.cli.generate import generate

    return generate(args, _prompt(args))


def _env(args: argparse.Namespace) -> int:
    from triforce_core.cli.report import print_machine

    print_machine()
    return 0


def _bench(args: argparse.Namespace) -> int:
    from triforce_core.cli.bench import bench

    return bench(args)


def _plan(args: argparse.Namespace) -> int:
    from triforce_core.cli.plan import plan

    return plan(args)


def _prompt(args: argparse.Namespace) -> str:
    """The prompt from its one source. Raises UsageError."""
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file is not None:
        try:
            prompt = Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the prompt from {args.prompt_file}: {error}") from error
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt, --prompt-file or standard input")
    else:
        try:
            prompt = sys.stdin.read()
        except ValueError as error:
            raise UsageError(f"standard input is no text: {error}") from error
    if not prompt:
        raise UsageError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 come in as lone surrogates
        raise UsageError(f"the prompt is not UTF-8 text (character {error.start})") from error
    return prompt


def _length(text: str) -> int | str:
    """A draft length: a number or auto."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triforce",
        description="Lossless generation from models whose KV cache or weights do not fit the GPU.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('triforce-offload')}"
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show a traceback on errors")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        parents=[common],
        help="generate text from a prompt",
        formatter_class=_Help,
    )
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("model", metavar="MODEL", help="directory with safetensors, .gguf file, or hub id")
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="prompt (default: standard input)")
    source.add_argument("--prompt-file", metavar="FILE", help="file that holds the prompt")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="most tokens to generate")
    add("--temperature", type=float, default=0.6, metavar="T", help="0 takes the likeliest token")
    add("--top-p", type=float, default=0.9, metavar="P", help="nucleus that is sampled from")
    add("--top-k", type=int, default=0, metavar="K", help="likeliest tokens kept; 0 keeps all")
    add("--seed", type=int, metavar="N", help="of the random draws (default: a new one)")
    add(
        "--method",
        choices=["triforce", "speculative", "autoregressive"],
        help="drafts verified by a retrieval model and then the target, or by the target alone, or "
        "no drafts (default: triforce)",
    )
    add("--draft", metavar="auto|ngram|none|MODEL", help="drafter (default: auto, which is ngram)")
    add("--draft-tokens", type=_length, metavar="N", help="drafted for each pass (default: auto)")
    add(
        "--inner-draft-tokens",
        type=_length,
        metavar="N",
        help="drafted for each step of the retrieval model (default: auto)",
    )
    add(
        "--budget",
        type=int,
        metavar="TOKENS",
        help="of the retrieval cache (default: 4096, or less where those do not fit)",
    )
    add("--chunk-size", type=int, default=8, metavar="TOKENS", help="retrieved together")
    add("--retrieval", default="mass", choices=["mass", "mean"], help="how chunks are chosen")
    add(
        "--accept",
        default="optimal",
        choices=["optimal", "coupled"],
        help="coupled: a seed's text is the same whatever drafts it",
    )
    add("--plan", metavar="FILE", help="what `triforce plan --save` wrote; flags change it")
    add("--resident-kv-blocks", type=int, metavar="N", help="on the device, instead of the plan's")
    _machine_options(generate)
    add("--trace", metavar="FILE", help="write a timeline for Perfetto or chrome://tracing")
    add("--stats", metavar="FILE", help="write figures of the run as JSON")
    add("--quiet", action="store_true", help="no progress and no table")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by where it came from: accepted draft, correction, bonus",
    )

    bench = commands.add_parser(
        "bench",
        parents=[common],
        help="time the parts of a request, with random weights of any shape",
        formatter_class=_Help,
    )
    bench.set_defaults(run=_bench)
    add = bench.add_argument
    add(
        "--shape",
        default="smollm2-135m",
        metavar="SHAPE|FILE",
        help=f"{', '.join(SHAPES)}, or a config.json",
    )
    add("--draft-shape", default="llama-68m", metavar="SHAPE|FILE|none", help="of the drafter")
    add("--context", type=int, default=4096, metavar="N", help="tokens in the KV cache")
    add(
        "--tests",
        default="all",
        metavar="NAME,...",
        help="of link, pass, retrieval, drafter, prefill, decode",
    )
    add("--repeats", type=int, default=5, metavar="N", help="runs of each, of which the median")
    add("--draft-tokens", type=int, default=24, metavar="N", help="verified by a pass")
    add(
        "--budget",
        type=int,
        metavar="TOKENS",
        help="of the retrieval cache (default: 4096 or less)",
    )
    add("--output", default="md", choices=["md", "json"], help="form of the result")
    _machine_options(bench)

    plan = commands.add_parser(
        "plan",
        parents=[common],
        help="what fits where and how fast it would be, simulated; needs no GPU",
        formatter_class=_Help,
    )
    plan.set_defaults(run=_plan)
    add_plan_arguments(plan)

    env = commands.add_parser("env", parents=[common], help="show what was found on this machine")
    env.set_defaults(run=_env)
    return parser


def _machine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", metavar="DEVICE", help="cuda:0 or cpu (default: a GPU if there is one)")
    add("--device-memory", metavar="SIZE", help="budget, e.g. 22GiB (default: what is free)")
    add(
        "--link-bandwidth",
        metavar="RATE",
        help="of the emulated link on cpu, e.g. 25GB/s (default: as fast as memory)",
    )
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of weights and KV; auto: float32 on cpu, as stored on a GPU",
    )
    add("--no-pin", action="store_true", help="leave host memory pageable: slower, never capped")
    add("--no-graphs", action="store_true", help="launch what drafts kernel by kernel (CUDA)")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not of what is off or said in words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)
