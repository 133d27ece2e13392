"""The command that runs a plan."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from rich.cells import cell_len

from triforce_core.model.found.names import local
from triforce_core.model.known.hub_ids import hub_id_of, of_ollamas, shape_of
from triforce_core.model.known.mixes import OF_SAFETENSORS
from triforce_core.params import SamplingParams
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_core.settings import AUTO, MethodSettings, of_usual_shape

_INDENT = "    "


def run_command(chosen: Candidate, args: argparse.Namespace) -> str:
    """Return a `triforce generate` command, or `serve` for several sequences, that gives the plan
    on the machine it was made for.

    args: the arguments of `plan`; the command names a known shape by its hub id, a quantised one by
        a name that stands for a GGUF file, and the file of a saved plan
    """
    on_disk = local(args.model) is not None
    shape, _, mix = ("", "", "") if on_disk else of_ollamas(args.model).partition(":")
    # A quantisation of its makers' id stands for GGUF files of another publisher.
    shape = shape_of(shape) or (shape.lower() if hub_id_of(shape.lower()) else shape)
    name = hub_id_of(shape) or args.model
    if mix.upper() in OF_SAFETENSORS:
        name = f"MODEL-{mix.upper()}"
    elif mix:
        name = f"{shape}:{mix}" if "/" in shape or hub_id_of(shape) else "MODEL.gguf"
    case, plan = chosen.case, chosen.plan
    words = ["triforce", "generate" if case.sequences == 1 else "serve", name]
    if args.save:
        return _joined(words, {"--plan": args.save} | _limits(args, case))
    flags: dict[str, object] = {"--context": case.context, "--dtype": case.dtype.name}
    if case.sequences > 1:
        flags["--sequences"] = case.sequences
    if plan.gpus > 1:
        flags["--gpus"] = plan.gpus
    if case.pieces is None or case.split:
        flags["--weights"] = plan.weights
    flags["--kv"] = plan.kv
    flags |= _method_flags(plan.method, budget=plan.budget)
    if plan.placement.copied_layers and plan.method.copy_bits != AUTO:
        flags["--copy-bits"] = plan.method.copy_bits
    if args.host_compute != AUTO:
        flags["--host-compute"] = args.host_compute
    return _joined(words, flags | _limits(args, case))


def _limits(args: argparse.Namespace, case: Case) -> dict[str, object]:
    """Return the flags that no plan holds, and that a run needs to find the same plan."""
    flags: dict[str, object] = {
        "--device-memory": args.device_memory,
        "--host-memory": args.host_memory,
    }
    if case.hardware.emulated:
        # A run on a GPU rejects a rate, since its link is real.
        flags["--link-bandwidth"] = args.link_bandwidth
    if case.sequences == 1 and case.new_tokens != SamplingParams.max_new_tokens:
        flags["--max-new-tokens"] = case.new_tokens
    return {flag: value for flag, value in flags.items() if value is not None}


def _joined(words: Sequence[str], flags: Mapping[str, object]) -> str:
    return shlex.join([*words, *(str(each) for flag in flags.items() for each in flag)])


def on_lines(label: str, command: str, width: int) -> list[str]:
    """Return a label and a command in lines of at most `width` cells. Longer words stay whole.

    A line that continues ends with a backslash, as shells read it. An option and its value stay on
    one line.
    """
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        is_value = bool(parts) and parts[-1].startswith("--") and " " not in parts[-1]
        if is_value and not word.startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [label + parts[0]]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]} {part} \\") <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"{_INDENT}{part}")
    return lines


def _method_flags(method: MethodSettings, budget: int) -> dict[str, object]:
    flags: dict[str, object] = {"--method": method.method}
    if not method.drafts:
        return flags
    values = {
        "--draft": "HEAD" if of_usual_shape(method.draft) else method.draft,
        "--draft-tokens": method.draft_tokens,
        "--inner-draft-tokens": method.inner_draft_tokens,
        "--draft-weights": method.draft_weights,
        "--draft-kv": method.draft_kv,
    }
    flags |= {flag: value for flag, value in values.items() if str(value) != AUTO}
    return flags | ({"--budget": budget} if budget else {})
