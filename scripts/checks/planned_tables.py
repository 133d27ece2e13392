"""The tables of docs/planner.md: what each cell prints, and which plan it comes from."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from frame import ROOT, Figures
from triforce_core.cli.main import main
from triforce_core.model.known.shapes import read_model

PLANNER = ROOT / "docs" / "planner.md"
CARD = ("--gpu", "rtx4090")
TWO = ("--gpus", "2")
PLAIN = ("--compare", "autoregressive")
CPU = ("--host-bandwidth", "60GB/s", "--host-flops", "1.5e12")
_NUMBER = re.compile(r"(?<![\w.])(?:\d[\d,]*)?\.?\d+(?![\w.]*\w)")
_WORDS = {"nothing": "0", "none": "0"}
# What a cell says where there is no plan.
_NO_PLAN = ("refused", "one GPU only")

# What a cell prints of a plan: its numbers, in order.
Read = Callable[[Figures], Sequence[float]]


@dataclass(frozen=True)
class Cell:
    """A cell with figures of a plan.

    place: the document, the row and the column
    text: what is printed
    arguments: those of `triforce plan`
    read: what is printed, from the plan
    """

    place: str
    text: str
    arguments: tuple[str, ...]
    read: Read

    def difference(self, plan: Figures) -> str | None:
        """Return what differs by more than its rounding, in words, or None."""
        return difference(self.text, self.read(plan))


def difference(text: str, computed: Sequence[float]) -> str | None:
    """Return what differs of a text's numbers by more than their rounding, in words, or None."""
    printed = numbers(text)
    alike = len(printed) == len(computed) and all(map(agrees, printed, computed))
    return None if alike else f"{text!r}, and the plan has {list(computed)}"


def numbers(text: str) -> list[str]:
    """Return the numbers in a cell as they are printed; an empty cell has a 0."""
    text = text.replace("*", "").strip()
    text = re.sub(r"\b(nothing|none)\b", lambda found: _WORDS[found[0]], text) or "0"
    return [found.replace(",", "") for found in _NUMBER.findall(text)]


def agrees(printed: str, computed: float) -> bool:
    """Return whether a number is what is printed of it, which may be rounded either way."""
    decimals = len(printed.partition(".")[2])
    return abs(float(printed) - computed) <= 0.5 * 10.0**-decimals * (1 + 1e-6)


@cache
def planned(arguments: tuple[str, ...]) -> Figures:
    """Return what `triforce plan --json` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["plan", *arguments, "--json"])
    if code:
        raise ValueError(f"triforce plan {shlex.join(arguments)} ends with {code}")
    return json.loads(out.getvalue())


def figure(path: str, unit: float = 1.0) -> Read:
    """Return a reader of one figure. path: its names in the JSON, with dots between them"""

    def read(plan: Figures) -> Sequence[float]:
        value: Any = plan
        for name in path.split("."):
            value = value[name]
        return [value / unit]

    return read


def figures(*paths: str) -> Read:
    readers = [figure(path) for path in paths]
    return lambda plan: [value for read in readers for value in read(plan)]


def speeds(plan: Figures) -> Sequence[float]:
    """Return tokens per second, and those of plain decoding."""
    return [plan["tokens_per_second"], plan["compared"]["tokens_per_second"]]


SECONDS = figure("seconds_per_token")
COMPARED = figure("compared.seconds_per_token")
SPEED = figure("tokens_per_second")
GIB = 1 << 30


def resident(plan: Figures) -> Sequence[float]:
    """Return how many layers are whole on the device, and of how many."""
    placement = plan["placement"]
    return [placement["resident_weight_layers"], placement["layers"]]


def resident_and_split(plan: Figures) -> Sequence[float]:
    """Return these numbers, and how many layers are split if any are."""
    split = plan["placement"]["split_layers"]
    return [*resident(plan), *([split] if split else [])]


def resident_and_copies(plan: Figures) -> Sequence[float]:
    """Return these numbers, and the bits of the layers' copies if there are any."""
    bits = plan["placement"]["copy_bits"]
    return [*resident(plan), *([bits] if bits else [])]


def left_to_the_processor(plan: Figures) -> Sequence[float]:
    """Return what the CPU computes: KV blocks, layers, or the experts of layers but those in pools,
    each with their whole number where it is printed.
    """
    placement = plan["placement"]
    layers, mine = placement["layers"], placement["processor_layers"]
    if not mine:
        blocks = placement["processor_kv_blocks"]
        return [blocks] if plan["hardware"]["gpus"] > 1 else [blocks, placement["kv_blocks"]]
    given = [layers] if mine == layers else [mine, layers]
    if slots := placement["expert_slots"]:
        config = read_model(plan["model"]).config
        given += [slots, max(spec.mlp.count for spec in config.layers if spec.mlp.active)]
    return given


@dataclass(frozen=True)
class Column:
    """A column with figures. more: arguments of its plans besides those of the row"""

    read: Read
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A table whose cells come from plans.

    section: the heading above it
    number: which of the section's tables it is
    columns: those with figures, by their names; others name the case or are not checked
    common: arguments of all plans
    """

    section: str
    number: int
    columns: Mapping[str, Column]
    common: tuple[str, ...] = CARD


USUAL = {
    "layers resident": Column(resident),
    "in 4 bits": Column(figure("placement.copied_layers")),
    "only low bits stream": Column(figure("placement.split_layers")),
    "KV blocks resident": Column(figures("placement.resident_kv_blocks", "placement.kv_blocks")),
    "budget": Column(figure("placement.budget")),
    "over the link a pass": Column(figure("bytes_per_pass", GIB)),
    "over each link a pass": Column(figure("bytes_per_pass", GIB)),
    "host": Column(figure("memory.host_bytes", GIB)),
    "pass": Column(figure("seconds_per_pass")),
    "draft": Column(figure("draft_seconds")),
    "tokens a pass": Column(figure("tokens_per_pass")),
    "s/token": Column(SECONDS),
    "stored": Column(SECONDS, ("--weights", "stored")),
}
COMPARING = (*CARD, "--dtype", "float16", *PLAIN)
_PAPER = ("--context", "130304", "--link-bandwidth", "25.4GB/s", "--acceptance", ".95")
I9 = ("--host-bandwidth", "72GB/s", "--host-flops", "1.5e12")
LESS, MORE = ("--host-memory", "60GiB"), ("--host-memory", "124GiB")
RYZEN = ("--host-bandwidth", "77GB/s", "--host-flops", "1.7e12")


def _drafter(name: str) -> dict[str, Column]:
    """Return the columns of a table with a drafter of the usual shape."""
    return {
        "s/token": Column(SECONDS),
        f"{name}, 16 bits": Column(SECONDS, ("--draft", name.lower())),
        f"{name}, Q4_K_M": Column(SECONDS, ("--draft", f"{name.lower()}:Q4_K_M")),
    }


TABLES = (
    Planned("Our choices instead", 0, {"s/token": Column(SECONDS)}, (*CARD, *_PAPER)),
    Planned(
        "Planned: models larger than the GPU, on one RTX 4090",
        0,
        USUAL
        | {"layers resident": Column(resident_and_split), "autoregressive": Column(COMPARED)},
        COMPARING,
    ),
    Planned("Planned: DFlash drafters", 0, _drafter("DFlash")),
    Planned("Planned: DFlash drafters", 1, _drafter("DFlash"), (*CARD, *TWO)),
    Planned("Planned: assistants of Gemma 4", 0, _drafter("assistant")),
    Planned(
        "Planned: split formats",
        0,
        USUAL
        | {
            "layers resident": Column(resident_and_copies),
            "dense KV": Column(SECONDS, ("--kv", "dense")),
            "dense both": Column(SECONDS, ("--kv", "dense", "--weights", "dense")),
        },
    ),
    Planned("Planned: split formats", 1, USUAL),
    Planned("Planned: split formats", 2, USUAL),
    Planned(
        "Planned: two RTX 4090s",
        0,
        USUAL
        | {
            "one 4090": Column(SECONDS, ("--gpus", "1")),
            "autoregressive, two": Column(COMPARED),
        },
        (*COMPARING, *TWO),
    ),
    Planned(
        "Planned: models of 2025 and 2026 on one and two RTX 4090s",
        0,
        {
            "one, bf16": Column(SPEED),
            "one, Q4_K_M": Column(SPEED, (":Q4_K_M",)),
            "two, bf16": Column(SPEED, TWO),
            "two, Q4_K_M": Column(SPEED, (":Q4_K_M", *TWO)),
        },
    ),
    Planned(
        "With experts", 0, {"one GPU": Column(speeds), "two GPUs": Column(speeds, TWO)},
        (*CARD, *PLAIN),
    ),
    Planned(
        "What the CPU adds",
        0,
        {
            "link alone": Column(SECONDS),
            "60 GB/s, 1.5 TFLOP/s": Column(SECONDS, CPU),
            "i9-14900K": Column(SECONDS, I9),
            "7950X": Column(SECONDS, RYZEN),
            "what the 7950X computes": Column(left_to_the_processor, RYZEN),
        },
    ),
    Planned(
        "What the CPU adds",
        1,
        {
            "links alone": Column(SECONDS),
            "with the CPU": Column(SECONDS, CPU),
            "what the CPU computes": Column(left_to_the_processor, CPU),
        },
        (*CARD, *TWO),
    ),
    Planned(
        "What the CPU adds",
        2,
        {
            "one GPU, 60 GiB": Column(SECONDS, LESS),
            "one, 124 GiB": Column(SECONDS, MORE),
            "two GPUs, 60 GiB": Column(SECONDS, (*LESS, *TWO)),
            "two, 124 GiB": Column(SECONDS, (*MORE, *TWO)),
        },
        (*CARD, *CPU, "--context", "32768"),
    ),
)  # fmt: skip


def sections(text: str) -> Iterator[tuple[str, list[list[dict[str, str]]]]]:
    """Yield each heading and the tables below it, whose rows map columns to cells."""
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        yield part.partition("\n")[0], [*tables(part)]


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    for lines in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
            for line in lines.splitlines()
        )
        yield [dict(zip(head, row, strict=True)) for row in rows]


def planner_cells() -> Iterator[Cell]:
    """Yield the figures in the tables of docs/planner.md."""
    found = dict(sections(PLANNER.read_text("utf-8")))
    for table in TABLES:
        words: tuple[str, ...] = ()
        for row in found[table.section][table.number]:
            words = _words(row, words)
            for name in filter(table.columns.__contains__, row):
                column = table.columns[name]
                if row[name] in _NO_PLAN:
                    continue
                mix = [each for each in column.more if each.startswith(":")]
                yield Cell(
                    f"{PLANNER.name}, {table.section}, {', '.join(_case(row))}: {name}",
                    row[name],
                    (
                        words[0] + "".join(mix),
                        *(*words[1:], *table.common),
                        *(each for each in column.more if each not in mix),
                    ),
                    column.read,
                )


def _case(row: Mapping[str, str]) -> Sequence[str]:
    """Return the cells that say what is planned."""
    named = [name for name in row if re.match("model|case|options|cards|context|GPUs", name)]
    return [row[name] for name in named if row[name]]


def _words(row: Mapping[str, str], above: tuple[str, ...]) -> tuple[str, ...]:
    """Return the model and the options of a row: the words in backticks, and what the others say.

    above: those of the row above, which a row without a model goes on from
    """
    case = " ".join(_case(row))
    words = shlex.split(" ".join(re.findall(r"`(.+?)`", case)))
    said = re.sub(r"`.+?`", "", case)
    if size := re.search(r"\b(\d+)B\b", said):
        words.insert(0, f"llama2-{size[1]}b-128k")
    elif words[0].startswith("-"):
        words[:0] = above if "these options" in said else above[:1]
    if context := re.search(r"\b\d+,\d{3}\b|(?<![\w,])\d{4,6}\b", said):
        words += ["--context", context[0].replace(",", "")]
    if "CPU" in said:
        words += CPU
    if "two cards" in said or "2" in (row.get("cards"), row.get("GPUs")):
        words += TWO
    return tuple(words)
