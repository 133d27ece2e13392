"""Shared code of all benchmarks and checks: options, records, tables and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from triforce_offload.files import Output
from triforce_offload.machine.hardware import provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Figures = dict[str, Any]


class Option:
    """One command-line option. Its type is the type of its default.

    name: the name with its dashes; a name without dashes makes a positional argument
    default: the default value; False makes a switch, a list takes several values
    more: further arguments of `add_argument`
    """

    def __init__(self, name: str, default: Any = None, help: str = "", **more: Any) -> None:
        self.name = name
        if default is False:
            self.arguments = {"action": "store_true"}
        elif isinstance(default, list | tuple):
            self.arguments = {"nargs": "+", "type": type(default[0]) if default else str}
        else:
            self.arguments = {} if default is None else {"type": type(default)}
        self.arguments |= {"default": default, "help": help, **more}


@dataclass(frozen=True)
class Benchmark:
    """A script that measures or checks something and records the result.

    doc: the docstring of its module, which is its help text
    result: the name of its file in benchmarks/results, or a function that returns the name from the
        arguments; None writes no file unless --result asks for one
    measure: yields parts of the record; the record is written after each part is merged into it
    show: prints the record at the end
    """

    doc: str
    result: str | Callable[[argparse.Namespace], str] | None
    measure: Callable[[argparse.Namespace], Iterator[Figures]]
    options: Sequence[Option] = ()
    show: Callable[[Figures], None] = lambda record: print_record(record)

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the script. Return 0, or 1 if the record has faults or a part of it failed, or 130
        after an interrupt: what was measured until then is printed.
        """
        args = self._parser().parse_args(arguments)
        result = args.result or (self.result(args) if callable(self.result) else self.result)
        record: Figures = {}
        path = code = None
        try:
            for part in self.measure(args):
                for name in filter(lambda name: is_table(part[name]), part):
                    print(f"{name}: {', '.join(map(str, part[name]))}", file=sys.stderr, flush=True)
                merge(record, part)
                path = write_result(result, record) if result else None
        except KeyboardInterrupt:
            code = 130
        except Exception:
            traceback.print_exc()
            code = 1
        if args.json:
            print(json.dumps(provenance(command()) | record, indent=2))
        elif code is None:
            self.show(record)
        if path:
            print(f"written to {os.path.relpath(path)}", file=sys.stderr)
        for fault in (faults := faults_of(record)):
            print(f"FAULT {fault}", file=sys.stderr)
        return int(bool(faults)) if code is None else code

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=Path(sys.argv[0]).name,
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for option in self.options:
            parser.add_argument(option.name, **option.arguments)
        parser.add_argument("--result", help="a name in benchmarks/results, or the path of a file")
        parser.add_argument("--json", action="store_true", help="print the record, not tables")
        return parser


def merge(record: Figures, part: Figures) -> None:
    """Add a part to a record: dictionaries are merged, lists joined, other values replaced."""
    for name, value in part.items():
        known = record.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            merge(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            known += value
        else:
            record[name] = deepcopy(value)


def command() -> str:
    """Return this command. Of absolute paths it has the names: records are published."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["python", *sys.argv[0].split(), *words])


def result_path(name: str) -> Path:
    """Return the path of a result. name: a name in benchmarks/results, or the path of a file"""
    return RESULTS / f"{name.removesuffix('.json')}.json"


def write_result(name: str, figures: Figures) -> Path:
    """Write the date, the command, the hardware, the versions and the figures as JSON."""
    path = result_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    Output(path, "result").write(json.dumps(provenance(command()) | figures, indent=2) + "\n")
    return path


def faults_of(record: Figures) -> list[Any]:
    """Return the faults in a record, at any depth."""
    faults = [*record.get("faults", ()), *record.get("wrong", ())]
    faults += [
        f"{name} is false"
        for name in ("same_tokens", "same_answer", "holds")
        if record.get(name) is False
    ]
    if record.get("hung_clients"):
        faults.append(f"{record['hung_clients']} clients hung")
    least = record.get("least_p_allowed", 0)
    for name, part in record.items():
        if isinstance(part, dict):
            faults += faults_of(part)
            if part.get("least_p", 1) < least:
                faults.append(f"{name}: p {part['least_p']}")
    return faults


def print_record(record: Figures) -> None:
    """Print the figures of a record, its sections as tables.

    The columns of a table are its entries or their figures, whichever are fewer. Lists such as runs
    and samples are left out; the file contains them.
    """
    for name, value in record.items():
        if is_table(value):
            rows = {entry: flat(figures) for entry, figures in value.items()}
            columns = list(dict.fromkeys(figure for row in rows.values() for figure in row))
            if len(columns) > len(rows):
                rows, columns = {c: {e: rows[e].get(c, "") for e in rows} for c in columns}, [*rows]
            print_table(
                name,
                {e: {c: _cell(row.get(c, "")) for c in columns} for e, row in rows.items()},
                columns,
            )
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            if name not in ("samples", "runs", "faults"):
                print_record({name: {str(i): each for i, each in enumerate(value, 1)}})
        else:
            for figure, each in flat({name: value}).items():
                print(f"{figure}: {_cell(each)}")


def is_table(section: Any) -> bool:
    """Return whether a section of a record maps names to dictionaries of figures."""
    return (
        isinstance(section, dict)
        and bool(section)
        and all(isinstance(entry, dict) for entry in section.values())
    )


def flat(figures: Figures, prefix: str = "") -> Figures:
    """Return the numbers and strings at any depth, under dotted names."""
    found: Figures = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            found[f"{prefix}{name}"] = value
    return found


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def print_table(first: str, rows: Mapping[str, Mapping[str, str]], columns: Sequence[str]) -> None:
    """Print a table with a row for each entry, whose name is in the column `first`."""
    table = Table(Column(first, no_wrap=True), *columns)
    for name, row in rows.items():
        table.add_row(name, *(row[column] for column in columns))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in seconds.items()}


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
