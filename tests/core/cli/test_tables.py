"""Tables and sentences fit the terminal: none is wider, none is cut, speed comes first."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from command import GREEDY, least_memory, run
from helpers import make_model
from rich.cells import cell_len
from safetensors.torch import load_file, save_file

from triforce_core.bench.rows import Row
from triforce_core.cli import machine
from triforce_core.cli.bench.command import print_rows
from triforce_core.cli.plan import report
from triforce_core.cli.plan.run_command import on_lines
from triforce_core.cli.terminal.console import Printer, columns_of, fitted
from triforce_core.cli.terminal.report import print_run
from triforce_core.cli.verify import command as verify_command
from triforce_offload.machine.hardware import Gpu

WIDTHS = (60, 80, 120)
GPU = ("--gpu", "rtx4090", "--context", "32768")
PLANS = {
    "plan": ("qwen3.8-27b", *GPU),
    "compared": ("qwen3.8-27b", *GPU, "--compare", "autoregressive"),
    "two GPUs": ("qwen3.8-27b", *GPU, "--gpus", "2"),
    "with a disk": (
        *("smollm2-1.7b", "--gpu", "rtx3060", "--device-memory", "2GiB", "--context", "4096"),
        *("--host-memory", "1500MB", "--disk-bandwidth", "5GB/s"),
    ),
    "sweep over GPUs": ("qwen3.8-27b", *GPU, "--sweep", "gpus"),
    "sweep over links": ("llama3.1-8b", *GPU, "--sweep", "link"),
    "sweep over contexts": ("smollm2-1.7b", "--gpu", "rtx3060", "--sweep", "context"),
    "sweep that does not fit": ("qwen2.5-32b", *GPU, "--sweep", "gpus", "--host-memory", "30GB"),
}

# The figures of a run with a bit of everything.
RUN: dict[str, Any] = {
    "model": "/models/a [4-bit].gguf",
    "dtype": "bfloat16",
    "device": "cuda:0",
    "seconds": {"load": 12.345, "prefill": 98.7, "decode": 22.2},
    "seconds_per_token": 0.0222,
    "passes": 60,
    "tokens_per_pass": 17.11,
    "new_tokens": 1000,
    "prompt_tokens": 98765 + 32,
    "reused_tokens": 32,
    "finish_reason": "length",
    "memory": {
        **{"device_peak_bytes": 22 << 30, "device_budget_bytes": 23 << 30},
        **{"host_bytes": 61 << 30},
    },
    "placement": {
        **{"layers": 80, "resident_weight_layers": 12, "split_layers": 20, "file_layers": 20},
        **{"processor_layers": 10, "processor_kv_blocks": 12, "expert_layers": 8},
        **{"kv_blocks": 1024, "resident_kv_blocks": 804, "block_tokens": 4096},
    },
    "levels": ["SmolLM2-135M-Instruct", "retrieval", "target"],
    "retrieval": {"budget_tokens": 4096},
    "acceptance": {"target": 0.974, "retrieval": 0.5},
    "draft_tokens": {
        **{"mean": 17.3, "inner_mean": 2.5, "examined": 900, "inner_examined": 4, "trees": 7},
        "from_siblings": 21,
    },
    "seed": 1234567890123456789,
    "experts": {"slots": 24, "found": 812, "missing": 188, "bytes_to_device": 1 << 30},
    "link": {
        **{"emulated": True, "floor_seconds_per_pass": 0.3, "bandwidth_gb_per_s": 25.2},
        **{"bytes_to_device": 450 << 30},
    },
    "ranks": [{}, {"bytes_to_device": 1 << 30, "device_peak_bytes": 1, "device_budget_bytes": 2}],
}


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def words(text: str) -> list[str]:
    """Words and numbers of a text, without the lines of tables."""
    return re.sub(r"[│┃|\\]|[─━┏┓┗┛┡┩╇┳┌┐└┘├┤┼┬┴-]{2,}", " ", text).split()


def check(text: str, width: int, whole: Sequence[str] = ()) -> None:
    """whole: words that are not broken at the end of a line"""
    assert text.strip()
    for line in text.splitlines():
        assert cell_len(line) <= width, line
        assert "…" not in line
    for word in whole:
        assert word in words(text), (word, text)


@pytest.fixture
def planned(capsys, monkeypatch) -> Callable[..., Callable[[int], str]]:
    """Makes a plan once, and returns what prints it at a width."""

    def plan(*arguments: str) -> Callable[[int], str]:
        prints = []
        for name in ("print_plan", "print_sweep"):
            function = getattr(report, name)
            monkeypatch.setattr(
                f"triforce_core.cli.plan.command.{name}",
                lambda *given, function=function, **named: prints.append(
                    partial(function, *given, **named)
                ),
            )
        code, _, err = run(capsys, "plan", *arguments)
        assert code == 0, err

        def at(width: int) -> str:
            monkeypatch.setenv("COLUMNS", str(width))
            prints[0]()
            return capsys.readouterr().out

        return at

    return plan


@pytest.mark.one_in(8)
@pytest.mark.parametrize("arguments", PLANS.values(), ids=PLANS)
def test_plans_fit(planned, arguments: Sequence[str]) -> None:
    at = planned(*arguments)
    wide = at(1000)
    for width in WIDTHS:
        check(at(width), width)
        if "--sweep" not in arguments:
            # At a width at which nothing wraps, the same words, each of them whole.
            assert sorted(words(at(width))) == sorted(words(wide))


def test_every_figure_of_a_sweep_is_whole(planned, capsys) -> None:
    arguments = PLANS["sweep over contexts"]
    _, out, _ = run(capsys, "plan", *arguments, "--json")
    at = planned(*arguments)
    for row in json.loads(out)["rows"]:
        figures = (
            *(str(row["context"]), f"{1 / row['seconds_per_token']:.1f}"),
            *(f"{row['seconds_per_token']:.4f}", f"{row['seconds_per_pass']:.3f}"),
            f"{row['seconds_to_first_token']:.1f}",
        )
        for width in WIDTHS:
            check(at(width), width, figures)


def test_a_plan_begins_with_its_speed(planned) -> None:
    out = planned(*PLANS["plan"])(80)
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert [row for row in rows if row][:2] == ["speed", "time to first token"]
    out = planned(*PLANS["sweep over GPUs"])(80)
    header = [line.split("┃")[1:] for line in out.splitlines() if line.startswith("┃")]
    titles = [" ".join(words(" ".join(column))) for column in zip(*header, strict=True)]
    assert titles[:3] == ["GPUs", "tokens per second", "first token, s"]


def test_a_machine_fits(capsys, monkeypatch, width: int) -> None:
    found = machine.inspect_machine()
    gpus = (Gpu("NVIDIA GeForce RTX 4090 [0]", 24 << 30, 4, 4, 16, None),)
    versions = filter(None, found.packages.values())
    for each in (found, replace(found, gpus=gpus)):
        monkeypatch.setattr(machine, "inspect_machine", lambda each=each: each)
        code, out, _ = run(capsys, "env")
        assert code == 0
        check(out, width, ("driver", *found.packages, *versions))
    assert "[0]" in out


def test_the_table_of_a_run_fits(capsys, speaking: Path, width: int) -> None:
    command = ("generate", speaking, "-p", "Hello " * 40, *GREEDY, "-c", "500")
    options = (*least_memory(*command), "--link-bandwidth", "1GB/s")
    code, _, err = run(capsys, *command, *options)
    assert code == 0
    table = [line for line in err.splitlines() if line[:1] in "┌│└"]
    check("\n".join(table), width, ("tokens/s", "GB/s;", "seed"))
    rows = [line.split("│")[1].strip() for line in table[1:-1]]
    assert [row for row in rows if row][:3] == ["speed", "time to first token", "new tokens"]


def test_the_table_of_a_run_with_everything_in_it_fits(capsys, width: int) -> None:
    print_run(RUN)
    figures = ("[4-bit].gguf", "45.05", "tokens/s", "12.35", "17.11", "(98765", "rank")
    check(capsys.readouterr().err, width, figures)


def test_the_tables_of_a_benchmark_fit(capsys, width: int) -> None:
    about: dict[str, Any] = {
        "shape": "llama3.1-70b",
        "dtype": "bfloat16",
        "context": 131072,
        "link": {"emulated": False, "bandwidth_gb_per_s": 25.2},
        "placement": {
            **{"layers": 80, "streamed_weight_layers": 60},
            **{"kv_blocks": 1024, "resident_kv_blocks": 804},
        },
        "hardware": {"gpu": "NVIDIA GeForce RTX 4090", "processor": "AMD EPYC"},
        "versions": {"torch": "2.13.0+cu130"},
        "memory": {"streaming_bytes": 1 << 30},
    }
    rate = "weights and cache at the rate of a copy on the device"
    rows = [
        Row("link", "host to device, copies of 64.00 MiB", (0.1, 0.2), 2.5, "GB/s"),
        Row("pass", "65 tokens after 131072", (1.25,), 31.5, "GB/s", 1.24, "bytes over the link"),
        Row("retrieval", "one token over 16384, 56 layers in 4 bits", (0.01,), 1, "tokens/s", 1e-5),
        Row("prefill", "131072 tokens", (72.1234567,), 131072, "tokens/s", 50.0, rate),
    ]
    print_rows(about, rows)
    figures = ("131072", "72.123457", "50.000000", "retrieval", "1000.000", "tokens/s")
    check(capsys.readouterr().out, width, figures)


def test_what_a_model_lacks_is_wrapped_in_a_terminal_alone(capsys, monkeypatch, tmp_path) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    del held["model.norm.weight"]
    save_file(held, file)
    monkeypatch.setenv("COLUMNS", "60")
    assert len(run(capsys, "verify", tmp_path)[1].splitlines()) == 1
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == verify_command.CheckpointError.exit_code
    assert len(out.splitlines()) > 1
    check(out, 60)


def test_a_command_is_wrapped_as_a_shell_reads_it() -> None:
    command = shlex.join(["triforce", "generate", "a b", "--dtype", "bfloat16", "--kv", "x" * 50])
    for width in (30, 60, 200):
        lines = on_lines("Run it: ", command, width)
        assert all(len(line) <= width or len(line.split("--kv")) == 2 for line in lines)
        text = "\n".join(lines).removeprefix("Run it: ")
        done = subprocess.run(
            ["sh", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == shlex.split(command)
    # An option stays beside its value.
    assert not any(line.endswith("--dtype \\") for line in on_lines("Run it: ", command, 23))


@pytest.mark.parametrize("room", range(3, 40))
def test_columns_share_what_room_there_is(room: int) -> None:
    natural, least = (4, 20, 12), (4, 6, 2)
    widths = fitted(natural, least, room)
    assert sum(widths) <= max(room, len(widths))
    assert all(1 <= width <= most for width, most in zip(widths, natural, strict=True))
    if room >= sum(least):
        assert all(width >= word for width, word in zip(widths, least, strict=True))


def test_a_table_that_cannot_fit_loses_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    Printer().table(("name", "size"), [("a" * 30, "7"), None, ("b", "12345678901234567890")])
    out = capsys.readouterr().out
    check(out, 20)
    assert out.count("a") == 30 + "name".count("a")
    assert sum(character.isdigit() for character in out) == 21


def test_names_are_printed_as_they_are(capsys, monkeypatch) -> None:
    """Brackets are no styles and colons no emoji."""
    monkeypatch.setenv("COLUMNS", "80")
    printer = Printer()
    printer.print("[bold]:smile: x[/bold]")
    printer.table(("", ""), [("[red]", ":smile:")])
    out = capsys.readouterr().out
    assert "[bold]:smile: x[/bold]" in out
    assert "│ [red] │ :smile: │" in out


def test_without_a_terminal_the_width_is_that_of_columns_or_80(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns_of(StringIO()) == 80
    for columns, width in (("132", 132), ("0", 80), ("wide", 80), ("²", 80), ("", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        assert columns_of(StringIO()) == width


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_in_a_terminal_the_width_is_its_own() -> None:
    import fcntl
    import struct
    import termios

    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 64, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-P", "-m", "triforce_core.cli", "plan", *PLANS["plan"]]
    with subprocess.Popen(
        command, stdout=theirs, env={**environment, "TERM": "xterm", "NO_COLOR": "1"}
    ):
        os.close(theirs)
        shown = b""
        # Linux ends a terminal that all others have closed with an error.
        with suppress(OSError):
            while more := os.read(terminal, 1 << 16):
                shown += more
    os.close(terminal)
    text = re.sub(r"\x1b\[[\d;]*m", "", shown.decode())
    check(text, 64)
    assert max(map(cell_len, text.splitlines())) > 60
