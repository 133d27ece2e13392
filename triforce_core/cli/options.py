"""Command-line options for the fields of settings classes, whose defaults they take."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from triforce_core.cli.parser import Explained, Options, for_experts
from triforce_core.machine_settings import MachineSettings
from triforce_core.params import SamplingParams
from triforce_core.settings import (
    AUTO,
    DTYPE_NAMES,
    KV_FORMATS,
    OFF,
    SAME_BITS,
    WEIGHTS,
    EngineConfig,
    MethodSettings,
)
from triforce_offload.errors import UsageError

# The flags for the context length, in every command.
CONTEXT_FLAGS = ("-c", "--ctx-size", "--context")
SEQUENCES_FLAGS = ("--sequences", "-np", "--parallel")
# The value of `-n -1`: generate until the text ends or the context is full.
UNTIL_FULL = sys.maxsize
_EXPLAINED = {
    ("--mmap", "--no-mmap"): "weights are read into memory, or from their files where host memory "
    "has no room",
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): "there is no number of layers to choose, since as "
    "many stay on the device as fit; --device-memory limits them",
    ("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"): "the planner leaves experts to the CPU "
    "where that is faster; --host-compute sets their share",
    (
        "--moe-expert-cache",
        "--moe-cache-slots",
        "--moe-hot-cache",
    ): "the planner gives the device a "
    "cache of experts where that is faster; the expert_slots of a plan (--plan) set its size",
}


def add_option(
    parser: Options,
    settings: type,
    name: str,
    text: str,
    *,
    flags: Sequence[str] = (),
    expert: bool = False,
    **options: Any,
) -> None:
    """Add an option for a field of a settings class.

    The namespace contains the field only if the option is given.
    text: the help text, to which the default is added if there is one and the text has none
    flags: the flags; derived from the field's name by default
    expert: whether `--help` leaves it out
    options: further arguments of `add_argument`
    """
    (default,) = (field.default for field in fields(settings) if field.name == name)
    known = default not in (None, MISSING, ()) and not isinstance(default, bool)
    if known and "(default: " not in text:
        text += f" (default: {default})"
    flags = flags or (f"--{name.replace('_', '-')}",)
    action = parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, **options)
    if expert:
        for_experts(action)


def given(args: argparse.Namespace, *settings: type) -> dict[str, Any]:
    """Return the fields of some classes that were given on the command line."""
    names = {field.name for each in settings for field in fields(each)}
    return {name: value for name, value in vars(args).items() if name in names}


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Return the sampling parameters that were given, over `defaults`. Raises UsageError."""
    values = {**defaults, **given(args, SamplingParams)}
    for name in ("grammar", "json_schema"):
        if name in values:
            try:
                values[name] = Path(values[name]).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                flag = "--" + name.replace("_", "-")
                reason = getattr(error, "strerror", None) or error
                raise UsageError(f"cannot read {flag} {values[name]}: {reason}") from error
    if "json_schema" in values:
        try:
            json.loads(values["json_schema"])
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--json-schema {args.json_schema} is no JSON: {error}") from error
    return SamplingParams(**values)


def engine_config(args: argparse.Namespace, config: EngineConfig | None = None) -> EngineConfig:
    """Return a config with the settings that were given. Raises UsageError."""
    changes = given(args, EngineConfig, MachineSettings, MethodSettings)
    return (config or EngineConfig()).changed(**changes)


def check_ctx_size(asked: int | None, positions: int) -> None:
    """Raise UsageError for a context longer than a model's `positions`."""
    if asked is not None and asked > positions:
        raise UsageError(f"--ctx-size {asked} is more than the {positions} positions the model has")


def add_machine_options(parser: argparse.ArgumentParser) -> Options:
    """Add the options of the device, its link and the formats of weights and KV.

    Return their group.
    """
    group = parser.add_argument_group("memory and placement")
    _add_device(group)
    add_explained_options(parser)
    _add_formats(group)
    return group


def _add_device(group: Options) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, MachineSettings, name, text, **options)

    add("device", "cuda:0 or cpu (default: the first GPU, else cpu)", metavar="DEVICE")
    add(
        "device_memory",
        "device memory to use at most, such as 22GiB (default: what is free, but for a reserve)",
        metavar="SIZE",
    )
    add(
        "host_memory",
        "host memory to use at most for streamed weights and KV; layers that do not fit are read "
        "from disk in each pass (default: all that is free)",
        metavar="SIZE",
    )
    add(
        "threads",
        "number of CPU threads (default: one per physical core)",
        flags=("-t", "--threads"),
        type=int,
        metavar="N",
    )
    add(
        "link_bandwidth",
        "rate of the emulated link on cpu, such as 25GB/s (default: as fast as memory)",
        expert=True,
        metavar="RATE",
    )
    add(
        "pin",
        "do not pin host memory: transfers are slower, but limits of the driver do not matter",
        flags=("--no-pin",),
        expert=True,
        action="store_false",
    )
    add(
        "cuda_graphs",
        "launch the kernels of draft steps and passes one by one, without CUDA graphs",
        flags=("--no-graphs",),
        expert=True,
        action="store_false",
    )


def _add_formats(group: Options) -> None:
    """Add the options for the formats of weights and KV."""

    def add(name: str, text: str, **options: Any) -> None:
        add_option(group, EngineConfig, name, text, **options)

    add(
        "dtype",
        "number type of weights and KV; auto: float32 on cpu, the checkpoint's own on a GPU",
        choices=DTYPE_NAMES,
    )
    add(
        "weights",
        "format of weights; dense: in --dtype; stored: the quantised numbers of the file (GGUF, "
        "AWQ, GPTQ, FP8, ...); split: bfloat16 in 12 bits, and FP8, Q6_K and Q5_K in two parts, "
        "without loss; split-experts: the experts alone, each by itself; auto: stored if "
        "quantised, but dense on a CPU without kernels for the format, unless that streams; split "
        "or split-experts on a GPU where bfloat16 or such blocks would stream",
        choices=WEIGHTS,
    )
    add(
        "kv",
        "format of KV; dense: in --dtype; split: bfloat16 in 12 bits, without loss; auto: split "
        "on a GPU where something would stream",
        choices=KV_FORMATS,
    )
    add(
        "same_bits",
        "whether each token has the same logits to the last bit, with every drafter and beside "
        "every other sequence; auto: on with a CPU's compiled kernels",
        expert=True,
        choices=SAME_BITS,
    )
    add(
        "host_compute",
        "share of the weights and KV that would stream which the CPU computes where they "
        "are, from 0 to 1; off is 0; auto: as much as makes a GPU's passes faster",
        type=host_share,
        metavar="auto|off|SHARE",
    )


def add_explained_options(parser: argparse.ArgumentParser) -> None:
    """Add options of llama.cpp that have no counterpart here; using one explains why."""
    for flags, why in _EXPLAINED.items():
        parser.add_argument(
            *flags,
            nargs="?",
            action=Explained,
            const=why,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def tokens(text: str) -> int:
    """Parse a number of tokens: 4096, or 128K for 128 times 1024."""
    digits = text.removesuffix("K") if text.endswith("K") else text.removesuffix("k")
    return int(digits) * (1024 if digits != text else 1)


def new_tokens(text: str) -> int:
    """Parse a number of new tokens, as `tokens` does; -1 gives UNTIL_FULL."""
    number = tokens(text)
    if number < 1 and number != -1:
        raise argparse.ArgumentTypeError(
            f"{number} is neither 1 or more nor -1, until the text ends or the context is full"
        )
    return UNTIL_FULL if number == -1 else number


def seed(text: str) -> int | None:
    """Parse a seed; -1 gives None, which draws a seed."""
    number = int(text)
    return None if number == -1 else number


def draft_length(text: str) -> int | str:
    """Parse a draft length, or a number of bits: a number or "auto"."""
    return _number_or(text, AUTO)


def share(text: str) -> float:
    """Parse a share: 0.95, or 95%."""
    digits = text.removesuffix("%")
    return float(digits) / (100 if digits != text else 1)


def host_share(text: str) -> float | str:
    """Parse a share of what would stream, as `share` does, or "auto" or "off"."""
    return _number_or(text, AUTO, OFF, kind=share)


def tree_nodes(text: str) -> int | str:
    """Parse the number of nodes in a draft tree: a number, "auto" or "off"."""
    return _number_or(text, AUTO, OFF)


def _number_or(text: str, *words: str, kind: Callable[[str], float] = int) -> Any:
    if text in words:
        return text
    try:
        return kind(text)
    except ValueError:
        said = f"{text!r} is neither a number nor {' nor '.join(words)}"
        raise argparse.ArgumentTypeError(said) from None
