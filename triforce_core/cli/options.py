"""Options that stand for fields of settings: their defaults are those of the classes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from triforce_core.cli.parser import Explained
from triforce_core.params import SamplingParams
from triforce_core.settings import (
    AUTO,
    DTYPE_NAMES,
    KV_FORMATS,
    OFF,
    WEIGHTS,
    EngineConfig,
    MachineSettings,
    MethodSettings,
)
from triforce_offload.errors import UsageError

# The flags of a context's length, in every command.
CONTEXT_FLAGS = ("-c", "--ctx-size", "--context")
# For `-n -1`: generate until the text ends or the context is full.
UNTIL_FULL = sys.maxsize


def add_option(
    parser: argparse.ArgumentParser,
    settings: type,
    name: str,
    text: str,
    *,
    flags: Sequence[str] = (),
    **options: Any,
) -> None:
    """An option for a field of a settings class. The namespace has it only where it was given.

    text: for the help, to which the default is added if there is one. flags: by the field's name if
        none are given. options: of `add_argument`
    """
    (default,) = (field.default for field in fields(settings) if field.name == name)
    if default not in (None, MISSING, ()) and not isinstance(default, bool):
        text += f" (default: {default})"
    flags = flags or (f"--{name.replace('_', '-')}",)
    parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, **options)


def given(args: argparse.Namespace, *settings: type) -> dict[str, Any]:
    """What was given of the fields of some classes."""
    names = {field.name for each in settings for field in fields(each)}
    return {name: value for name, value in vars(args).items() if name in names}


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """What was given of it. Raises UsageError."""
    values = {**defaults, **given(args, SamplingParams)}
    for name in ("grammar", "json_schema"):
        if name in values:
            try:
                values[name] = Path(values[name]).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"cannot read {flag} {values[name]}: {error}") from error
    return SamplingParams(**values)


def engine_config(args: argparse.Namespace, config: EngineConfig | None = None) -> EngineConfig:
    """A config with what was given of it. Raises UsageError."""
    changes = given(args, EngineConfig, MachineSettings, MethodSettings)
    return (config or EngineConfig()).changed(**changes)


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """The device, its link and the numbers that are computed with."""

    def add(name: str, text: str, settings: type = MachineSettings, **options: Any) -> None:
        add_option(parser, settings, name, text, **options)

    add("device", "cuda:0 or cpu (default: a GPU if there is one)", metavar="DEVICE")
    add("device_memory", "budget, e.g. 22GiB (default: what is free)", metavar="SIZE")
    add_explained_options(parser)
    add(
        "host_memory",
        "for what streams; layers beyond it are read from disk in each pass (default: what is "
        "free)",
        metavar="SIZE",
    )
    add(
        "link_bandwidth",
        "of the emulated link on cpu, e.g. 25GB/s (default: as fast as memory)",
        metavar="RATE",
    )
    add("threads", "of the CPU (default: its physical cores)", type=int, metavar="N")
    add(
        "dtype",
        "of weights and KV; auto: float32 on cpu, as stored on a GPU",
        EngineConfig,
        choices=DTYPE_NAMES,
    )
    add(
        "weights",
        "stored: a GGUF file's blocks stay as they are, on device, host and link; auto: so on a "
        "GPU, and on cpu where dense ones would stream; split: bfloat16 in 12 bits a number, the "
        "same to the last bit; auto: so on a GPU where something would stream",
        EngineConfig,
        choices=WEIGHTS,
    )
    add(
        "kv",
        "split: blocks of bfloat16 in 12 bits a number, the same to the last bit; auto: so on a "
        "GPU where some KV would stream",
        EngineConfig,
        choices=KV_FORMATS,
    )
    add(
        "pin",
        "leave host memory pageable: slower, never capped",
        flags=("--no-pin",),
        action="store_false",
    )
    add(
        "cuda_graphs",
        "launch what drafts kernel by kernel (CUDA)",
        flags=("--no-graphs",),
        action="store_false",
    )


def add_explained_options(parser: argparse.ArgumentParser) -> None:
    """Options of llama.cpp that have no counterpart, which a sentence says."""
    parser.add_argument(
        *("-ngl", "--gpu-layers", "--n-gpu-layers"),
        nargs="?",
        action=Explained,
        const="there is no number of layers to choose, since as many stay on the device as fit; "
        "--device-memory limits them",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def new_tokens(text: str) -> int:
    """A number of new tokens; -1 is UNTIL_FULL."""
    number = int(text)
    return UNTIL_FULL if number == -1 else number


def seed(text: str) -> int | None:
    """A seed; None, which draws one, for -1."""
    number = int(text)
    return None if number == -1 else number


def draft_length(text: str) -> int | str:
    """A draft length: a number or auto."""
    return _number_or(text, AUTO)


def tree_nodes(text: str) -> int | str:
    """Tokens of a draft that branches: a number, auto or off."""
    return _number_or(text, AUTO, OFF)


def _number_or(text: str, *words: str) -> int | str:
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        said = f"{text!r} is neither a number nor {' nor '.join(words)}"
        raise argparse.ArgumentTypeError(said) from None
