"""`triforce list`: the models on this machine, and whether they run and fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from triforce_core.cli.plan.arguments import EXAMPLE_GPUS
from triforce_core.cli.terminal.console import Printer
from triforce_core.model.found import hub, ollama
from triforce_core.model.found.folders import places
from triforce_core.model.found.models import Described, found_models
from triforce_offload.errors import UsageError
from triforce_offload.machine.hardware import Machine, inspect_machine
from triforce_offload.units import format_bytes

# The share of a GPU's memory that weights may take if a context is to have room beside them.
_WEIGHTS_SHARE = 0.9


def list_models(args: argparse.Namespace) -> int:
    """Print the models. Return the exit code. Raises UsageError for a folder that is none."""
    folders = [Path(folder).expanduser() for folder in args.folders]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder")
    found = [Described.of(each) for each in found_models(folders)]
    machine = inspect_machine()
    if args.json:
        print(json.dumps([_as_dict(each, machine) for each in found], indent=2))
        return 0
    printer = Printer()
    if found:
        printer.print(_table(found, machine))
        printer.print(
            "triforce run MODEL talks to one; triforce plan MODEL"
            f"{'' if machine.gpus else f' --gpu {EXAMPLE_GPUS[0]}'} says how fast it is.",
            soft_wrap=True,
        )
    else:
        printer.print(_nothing(folders), soft_wrap=True)
    return 0


def where(model: Described, machine: Machine) -> str:
    """Return where a model's weights would be on this machine, or why it does not run."""
    if model.problem is not None:
        return f"does not run: {model.problem}"
    if any(model.nbytes <= _WEIGHTS_SHARE * gpu.memory_bytes for gpu in machine.gpus):
        return "fits the GPU"
    if model.nbytes <= machine.host_available_bytes:
        return "streams from host memory" if machine.gpus else "fits host memory"
    return "streams from disk"


def _table(found: Iterable[Described], machine: Machine) -> Table:
    table = Table("model", "size", "family", "on this machine")
    table.columns[1].justify = "right"
    table.columns[1].no_wrap = table.columns[2].no_wrap = True
    table.columns[0].overflow = table.columns[3].overflow = "fold"
    source = None
    for each in sorted(found, key=lambda each: each.found.source != source):
        if each.found.source != source:
            source = each.found.source
            if table.row_count:
                table.add_section()
            table.add_row(Text(source, style="bold"), "", "", "")
        # Texts, so that a name in brackets is no markup.
        table.add_row(
            Text(each.found.name),
            format_bytes(each.nbytes),
            each.family or "",
            Text(where(each, machine)),
        )
    return table


def _as_dict(model: Described, machine: Machine) -> dict[str, object]:
    return {
        "name": model.found.name,
        "path": str(model.found.path),
        "source": model.found.source,
        "bytes": model.nbytes,
        "family": model.family,
        "runs": model.problem is None,
        "on_this_machine": where(model, machine),
    }


def _nothing(folders: Iterable[Path]) -> str:
    looked = [*folders, hub.cache_folder(), *ollama.folders(), *(each.folder for each in places())]
    lines = [f"  {'the current folder' if name == '.' else name}" for name in map(str, looked)]
    return "\n".join(
        (
            "No model was found in these folders:",
            *dict.fromkeys(lines),
            "triforce list FOLDER looks in another. Every command takes a file's path as MODEL.",
            "triforce run qwen3-4b downloads a model: it shows the size before it begins.",
        )
    )
