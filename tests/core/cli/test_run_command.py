"""The command that a plan prints carries the limits that the plan was made with."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from command import run

from triforce_core.cli.main import _parser
from triforce_core.cli.options import engine_config
from triforce_offload.machine.profiles import named
from triforce_offload.units import parse_bandwidth, parse_bytes

MODEL = ("qwen3-8b", "--context", "16384")
LIMITS = ("--device-memory", "12GiB", "--host-memory", "60GiB")


def words_of(out: str) -> list[str]:
    (line,) = [
        line for line in out.replace(" \\\n    ", " ").splitlines() if line.startswith("Run it: ")
    ]
    return shlex.split(line.removeprefix("Run it: triforce "))


def test_limits_of_a_plan_are_those_of_its_run(capsys) -> None:
    given = ("--new-tokens", "512", "--host-compute", "off", "--link-bandwidth", "20GB/s")
    _, out, _ = run(capsys, "plan", *MODEL, "--gpu", "rtx4090", *LIMITS, *given)
    args = _parser()[0].parse_args(words_of(out))
    config = engine_config(args)
    assert config.machine.device_memory == parse_bytes("12GiB")
    assert config.machine.host_memory == parse_bytes("60GiB")
    assert config.host_compute == 0
    assert args.max_new_tokens == 512
    # A GPU's link is real: a run would refuse a rate.
    assert config.machine.link_bandwidth is None


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory", "--host-compute"])
def test_a_command_without_limits_names_none(capsys, option: str) -> None:
    _, out, _ = run(capsys, "plan", *MODEL, "--gpu", "rtx4090")
    assert option not in words_of(out)


def test_a_server_gets_the_limits_too(capsys) -> None:
    given = ("--sequences", "4", "--new-tokens", "512")
    _, out, _ = run(capsys, "plan", *MODEL, "--gpu", "rtx4090", *LIMITS, *given)
    args = _parser()[0].parse_args(words_of(out))
    assert engine_config(args).machine.device_memory == parse_bytes("12GiB")


def test_a_saved_plan_is_run_within_its_limits(capsys, tmp_path) -> None:
    path = tmp_path / "plan.json"
    _, out, _ = run(capsys, "plan", *MODEL, "--gpu", "rtx4090", *LIMITS, "--save", path)
    assert words_of(out)[2:] == ["--plan", str(path), *LIMITS]


def test_an_emulated_link_keeps_its_rate(capsys, monkeypatch) -> None:
    machine = replace(named("rtx4090"), asynchronous=False)
    monkeypatch.setattr("triforce_offload.machine.probe.this_machine", lambda *_: machine)
    _, out, _ = run(capsys, "plan", *MODEL, "--link-bandwidth", "5GB/s")
    args = _parser()[0].parse_args(words_of(out))
    assert engine_config(args).machine.link_bandwidth == parse_bandwidth("5GB/s")
