"""The arguments of `triforce plan`: each input of a plan has a flag."""

from __future__ import annotations

import argparse

from triforce_core.cli.options import (
    CONTEXT_FLAGS,
    SEQUENCES_FLAGS,
    add_explained_options,
    host_share,
    share,
    tokens,
)
from triforce_core.cli.parser import for_experts
from triforce_core.model.known.mixes import NAMES
from triforce_core.model.known.shapes import SHAPES
from triforce_core.params import SamplingParams
from triforce_core.plan.simulation.acceptance_curve import (
    BLOCK_ACCEPTANCE,
    DEFAULT_ACCEPTANCE,
    HEAD_ACCEPTANCE,
    MODEL_ACCEPTANCE,
    NGRAM_ACCEPTANCE,
)
from triforce_core.settings import (
    AUTO,
    COPY_BITS,
    DEFAULT_BUDGET,
    DRAFT_KV,
    DRAFT_WEIGHTS,
    KV_FORMATS,
    METHODS,
    WEIGHTS,
)
from triforce_offload.machine.profiles import RESERVED_BYTES, gpu_names
from triforce_offload.units import format_bytes
from triforce_offload.weights.formats import DTYPES

SWEEPS = ("context", "gpus", "link")
DEFAULT_CONTEXT = 131072
# Cards that messages name where any card would do.
EXAMPLE_GPUS = ("rtx4090", "rtx5090", "rtx3060")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"one of {', '.join(SHAPES)}; a quantisation may follow, as in qwen3-32b:Q4_K_M "
        f"({', '.join(NAMES)}); Ollama's name, as in qwen3:32b, which has 4 bits; the hub id of "
        "one of these models, a config.json, or a .gguf file",
    )
    _add_text(parser)
    _add_hardware(parser)
    _add_drafting(parser)
    _add_placement(parser)
    _add_output(parser)
    add_explained_options(parser)


def _add_text(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    add(
        *CONTEXT_FLAGS,
        dest="context",
        type=tokens,
        metavar="N",
        help=f"prompt and new tokens (default: {DEFAULT_CONTEXT}, or what the model has if fewer)",
    )
    add(
        "--new-tokens",
        type=tokens,
        default=SamplingParams.max_new_tokens,
        metavar="N",
        help="tokens of the context that are generated",
    )
    add(
        *SEQUENCES_FLAGS,
        dest="sequences",
        type=int,
        default=1,
        metavar="N",
        help="texts that `serve` decodes together; each has the whole context",
    )
    add(
        "--acceptance",
        type=share,
        metavar="A",
        help="share of draft tokens that the target accepts, for a retrieval cache of --budget "
        f"(or {DEFAULT_BUDGET}) tokens (default: {DEFAULT_ACCEPTANCE}, assumed)",
    )
    add(
        "--inner-acceptance",
        type=share,
        metavar="A",
        help=f"share of the drafter's tokens that are accepted (default: {NGRAM_ACCEPTANCE} for "
        f"n-grams, {MODEL_ACCEPTANCE} for a small model, {HEAD_ACCEPTANCE} for a head and "
        f"{BLOCK_ACCEPTANCE} for a DFlash drafter, assumed)",
    )
    add("--stats", metavar="FILE", help="take the acceptance from a run's `generate --stats`")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hardware").add_argument
    add(
        "--gpu",
        metavar="NAME",
        help=f"card: {', '.join(gpu_names())} (default: this machine, measured)",
    )
    add("--gpus", type=int, choices=range(1, 9), help="number of cards (default: 1, or the plan's)")
    add(
        "--device-memory",
        metavar="SIZE",
        help=f"memory of each card (default: all but {format_bytes(RESERVED_BYTES)})",
    )
    add("--host-memory", metavar="SIZE", help="reject plans that need more (default: no limit)")
    add(
        "--link",
        metavar="pcie4x8",
        help="slot of the card, if narrower than the card's own; one per card: pcie4x16,pcie4x4",
    )
    for_experts(add("--link-bandwidth", metavar="RATE", help="rate of each link, such as 25.4GB/s"))
    for_experts(
        add(
            "--host-bandwidth",
            metavar="RATE",
            help="rate of host memory, which all links and the CPU share",
        )
    )
    for_experts(
        add(
            "--host-flops",
            metavar="RATE",
            help="operations per second of the CPU's products, such as 1.5TFLOP/s; with "
            "--host-bandwidth, it may compute weights and KV that would stream",
        )
    )
    add(
        "--disk-bandwidth",
        metavar="RATE",
        help="rate of the disk; layers that host memory cannot hold are read from it in each pass",
    )


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("drafting").add_argument
    add("--method", choices=METHODS, help="method to plan (default: the fastest)")
    add(
        "--draft",
        metavar="ngram|mtp|eagle3|dflash|assistant|none|MODEL",
        help="drafter: MODEL is a small model, an EAGLE-3 head, a DFlash drafter or an assistant "
        "of Gemma 4; eagle3, dflash and assistant plan one of the usual shape, dflash:Q4_K_M and "
        "assistant:Q4_K_M a quantised one (default: the MTP head of models that have one, else "
        "n-grams)",
    )
    add("--budget", type=tokens, metavar="TOKENS", help="tokens in the retrieval cache")
    add("--draft-tokens", type=int, metavar="N", help="tokens drafted for each pass")
    add(
        "--inner-draft-tokens", type=int, metavar="N", help="tokens drafted for each retrieval step"
    )
    for_experts(
        add(
            "--draft-weights",
            choices=DRAFT_WEIGHTS,
            help="weights of the retrieval level: exact; int4: copies of all layers in 4 bits; "
            "split: the high bits of split weights; auto: exact where resident, copies of layers "
            "that stream",
        )
    )
    for_experts(
        add(
            "--copy-bits",
            type=int,
            choices=COPY_BITS[1:],
            help="bits of the numbers of copies of layers that stream (default: the faster)",
        )
    )
    for_experts(
        add(
            "--draft-kv",
            choices=DRAFT_KV,
            help="format of the retrieval cache: exact; int8; auto: int8 on a GPU",
        )
    )


def _add_placement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("placement").add_argument
    add(
        "--dtype",
        default=AUTO,
        choices=[AUTO, *DTYPES],
        help="number type of weights and KV; auto: the checkpoint's, or bfloat16 if it is "
        "quantised; float32 on the emulated device",
    )
    add(
        "--weights",
        default=AUTO,
        choices=WEIGHTS,
        help="format of weights; dense: in --dtype; stored: the model's quantised numbers; "
        "split: bfloat16 in 12 bits, and FP8, Q6_K and Q5_K in two parts, without loss; "
        "auto: the faster of stored and split if quantised, and else the fastest",
    )
    add(
        "--kv",
        default=AUTO,
        choices=KV_FORMATS,
        help="format of KV; dense: in --dtype; split: bfloat16 in 12 bits, without loss; auto: "
        "the faster",
    )
    add(
        "--host-compute",
        type=host_share,
        default=AUTO,
        metavar="auto|off|SHARE",
        help="share of the weights and KV that would stream which the CPU computes; auto: as "
        "much as makes passes faster, if its rates are known",
    )
    add("--resident-kv", metavar="N|Nlayers", help="KV blocks, or layers, that stay on the device")
    add(
        "--plan",
        metavar="FILE",
        help="start from a saved plan; flags change it, and settings that are auto are chosen",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--save", metavar="FILE", help="write the plan, for `generate --plan`")
    add("--json", action="store_true", help="print all figures as JSON")
    add("--compare", choices=METHODS, help="also show the best plan of another method")
    add(
        "--sweep",
        choices=list(SWEEPS),
        help="plan for contexts (up to --ctx-size), numbers of GPUs (up to --gpus) or links, one "
        "row for each",
    )
    add("--plot", metavar="FILE.png", help="draw seconds per token over context lengths")
    for_experts(
        add(
            "--trace",
            metavar="FILE",
            help="write the simulated timeline of one draft and its pass, for Perfetto",
        )
    )
