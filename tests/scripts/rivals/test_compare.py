"""The comparison: what a system answers, refuses and leaves behind, in its quick version."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import least_memory

from rivals import compare as comparing
from rivals import reference, spawn
from rivals.compare_report import Comparison
from rivals.job import Job, Outcome
from rivals.systems import ABLATION, MEMORY, OFFLOADED, System, chosen, systems

SCRIPTS = Path(__file__).parents[3] / "scripts" / "rivals"
# What needs no package of its own. Weights and KV of the tiny model take some hundred KB.
RIVALS = ("transformers", "accelerate", "ours, auto", "ours, spec", "+ fixed", "+ resident")


def compare(model: Path, work: Path, *more: object) -> subprocess.CompletedProcess[str]:
    options = ("--prompt-tokens", 300, "--new-tokens", 12, "--repeats", 1, "--threads", 1)
    options += least_memory("generate", model, "-p", "x", "-c", 312, "--device", "cpu")
    options += ("--work", work, "--result", work / "result")
    return subprocess.run(
        list(map(str, (sys.executable, SCRIPTS, "compare", "--model", model, *options, *more))),
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_quick_run_does_not_overwrite_the_recorded_comparison() -> None:
    parser = comparing._parser()

    def named(*options: str) -> str:
        return comparing.result_name(parser, parser.parse_args(options))

    assert named() == named("--plot", "x.png", "--afresh") == "compare"
    for options in (("--repeats", "1"), ("--rivals", "ours"), ("--new-tokens", "8")):
        assert named(*options) == "compare_own"


@pytest.mark.slow
def test_every_system_gives_the_text_or_says_why_it_cannot(speaking, tmp_path) -> None:
    picture = tmp_path / "compare.png"
    run = compare(speaking, tmp_path, "--rivals", *RIVALS, "llama", "--plot", picture)
    assert run.returncode == 0, run.stderr
    record = json.loads((tmp_path / "result.json").read_text())
    refused = {name: row["refusal"] for name, row in record["systems"].items() if row["refusal"]}
    assert set(refused) == {
        "transformers, assistant",
        "transformers, offloaded cache",
        "llama.cpp, plain",
        "llama.cpp, KV on the host",
        "ours, autoregressive, as stored",
        "ours, speculative, as stored",
    }
    assert "--assistant" in refused["transformers, assistant"]
    assert "CUDA" in refused["transformers, offloaded cache"]
    assert "GGUF" in refused["llama.cpp, plain"]
    for name, row in record["systems"].items():
        if name not in refused:
            assert row["text"] == "equal", name
            assert row["median_token_seconds"] > 0
            (repeat,) = row["repeats"]
            assert repeat["host_bytes"] > 0
            assert repeat["first_seconds"] > 0
    streamed = record["systems"]["ours, speculative, streamed"]["repeats"][0]
    assert streamed["moved_bytes"] > 0
    assert streamed["device_bytes"] <= record["device_memory_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "did not run" in run.stdout
    assert "differs" not in run.stdout


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_was_interrupted(speaking, tmp_path) -> None:
    rivals = ("--rivals", "ours, autoregressive, streamed", "ours, speculative, streamed")
    assert compare(speaking, tmp_path, *rivals).returncode == 0
    assert not list(tmp_path.glob("*.jsonl"))
    (done,) = tmp_path.glob("*.done")
    lines, kept = done.read_text().splitlines(), done.with_suffix(".jsonl")
    assert len(lines) == 3
    # As if it had been ended while it wrote the last line.
    kept.write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])
    assert compare(speaking, tmp_path, *rivals).returncode == 0
    again = done.read_text().splitlines()
    assert again[:2] == lines[:2]
    assert again[2] != lines[2]
    systems_of = [json.loads(line)["system"] for line in again[1:]]
    assert sorted(systems_of) == sorted(json.loads(line)["system"] for line in lines[1:])


@pytest.mark.first
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rivals", "vllm"), "--rivals 'vllm' is none of memory, offloaded, ablation"),
        (("--acceptance", "0.9"), "give a --shape"),
        (("--prompt-tokens", "900000"), "the material has"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_a_line(speaking, tmp_path, arguments, said) -> None:
    run = compare(speaking, tmp_path, *arguments)
    assert run.returncode == 2
    assert said in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


JOB = Job("nothing", {}, "model", [1, 2], 4, "float32", "cpu", 1)


def test_a_system_that_fails_is_a_row_and_no_end(tmp_path, monkeypatch) -> None:
    log = tmp_path / "log"
    missing = spawn.run(JOB, log, 60, own_packages=False)
    assert "rivals.nothing" in missing.refusal
    failed = spawn.run(replace(JOB, module="ours", model="/nowhere"), log, 60, own_packages=False)
    assert "/nowhere" in failed.refusal
    slow = spawn.run(replace(JOB, module="ours", model="/nowhere"), log, 0.05, own_packages=False)
    assert slow.refusal == "not done after 0 s"
    monkeypatch.setattr(spawn, "OWN_PYTHON", tmp_path / "python")
    away = spawn.run(JOB, log, 60, own_packages=True)
    assert away.refusal == "not installed: bash scripts/setup_rivals.sh"


def test_names_groups_and_beginnings() -> None:
    known = systems(2000, 64, "", is_gguf=True)
    assert chosen(["accelerate"], known) == [name for name in known if name.startswith("accel")]
    assert chosen([MEMORY, OFFLOADED, ABLATION], known) == chosen(["all"], known) == list(known)
    assert chosen(["ours, speculative"], known) == ["ours, speculative"]
    with pytest.raises(KeyError):
        chosen(["nobody"], known)
    assert "2000 tokens" in known["+ whole layers, two slots"].refusal
    assert systems(2100, 64, "", is_gguf=False)["+ whole layers, two slots"].refusal is None


def test_the_first_difference_and_how_much_the_model_preferred_its_own(tmp_path) -> None:
    path = str(tmp_path / "reference.npz")
    logits = np.array([[0, 1, 0.0], [2, 0, 1.5], [0, 0, 3.0]])
    np.savez(path, tokens=np.array([1, 0, 2]), logits=logits)
    assert reference.difference(path, [1, 0, 2]) is None
    assert reference.difference(path, [1, 2, 2]) == (1, 0.5)
    place, gap = reference.difference(path, [1, 0])
    assert place == 2
    assert np.isnan(gap)


def test_medians_and_floors() -> None:
    outcomes = [Outcome(tokens=[1], token_seconds=s, first_seconds=1.0) for s in (3.0, 1.0, 2.0)]
    settings = {"device": "cpu", "temperature": 0, "weights_and_kv_bytes": 1000}
    settings |= {"device_memory_bytes": 400, "link_bytes_per_second": 100.0}
    comparison = Comparison(
        settings,
        {"read_bytes_per_second": 500.0},
        {"a": System(MEMORY, ""), "b": System(OFFLOADED, "")},
        {"a": outcomes, "b": [Outcome(refusal="no")]},
    )
    assert comparison.median("a") == 2.0
    assert comparison.median("b") is None
    assert comparison.floor(MEMORY) == 2.0
    assert comparison.floor(OFFLOADED) == 6.0
    assert comparison.floor(ABLATION) is None
    assert comparison.text("a") == "?"
