"""`triforce plan`: no torch, clear refusals, the paper as commands, plans that engines take."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from command import run
from gguf_files import write_gguf
from helpers import add_tokenizer, make_model

from bench.plot_trace import read_trace
from triforce_core import Engine, SamplingParams, UsageError
from triforce_core.cli.main import _parser
from triforce_core.cli.options import engine_config
from triforce_core.model.families.hf import from_hf
from triforce_core.model.known.hub_ids import hub_id_of, unsupported_family
from triforce_core.model.known.shapes import SHAPES
from triforce_core.plan.plan import Plan
from triforce_core.settings import AUTO
from triforce_offload.checkpoint.header import read_json
from triforce_offload.machine.profiles import EMULATED

KEYS = {
    *("seconds_per_token", "seconds_per_pass", "draft_seconds", "tokens_per_pass"),
    *("bytes_per_pass", "floor_seconds_per_pass", "bottleneck", "placement", "memory"),
}


def figures(capsys, *arguments: object) -> dict:
    code, out, err = run(capsys, "plan", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def command_of(out: str) -> str:
    """The command that runs a plan, which may go on in further lines as a shell reads them."""
    (line,) = [
        line for line in out.replace(" \\\n    ", " ").splitlines() if line.startswith("Run it: ")
    ]
    return line.removeprefix("Run it: ")


def test_a_plan_for_a_named_gpu_needs_neither_torch_nor_transformers(tmp_path) -> None:
    script = tmp_path / "plan.py"
    script.write_text(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from triforce_core.cli.main import main\n"
        "sys.exit(main(['plan', 'llama2-7b-128k', '--gpu', 'rtx4090', '--json']))\n"
    )
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of processor time, however busy the machine is.
    seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() >= KEYS
    assert seconds < 5


def test_figures_add_up(capsys) -> None:
    planned = figures(capsys, "llama2-7b-128k", "--gpu", "rtx4090", "--compare", "autoregressive")
    whole = planned["seconds_per_pass"] + planned["draft_seconds"] + planned["refresh_seconds"]
    assert planned["seconds_per_round"] == pytest.approx(whole)
    assert planned["seconds_per_token"] == pytest.approx(whole / planned["tokens_per_pass"])
    rate = planned["hardware"]["link_gb_per_s"] * 1e9
    assert planned["floor_seconds_per_pass"] == pytest.approx(planned["bytes_per_pass"] / rate)
    assert planned["simulated"]
    memory = planned["memory"]
    parts = ("weights", "expert_pools", "resident_kv", "drafting", "slots", "workspace")
    assert sum(memory[f"{part}_bytes"] for part in parts) == memory["device_bytes"]
    assert memory["device_bytes"] <= memory["device_available_bytes"]
    assert planned["speed_up"] > 5
    assert planned["plan"]["draft_tokens"] >= 32


def test_a_table_names_what_bounds_it_and_that_it_is_simulated(capsys) -> None:
    code, out, _ = run(capsys, "plan", "llama2-7b-128k", "--gpu", "rtx4090", "--gpus", "2")
    assert code == 0
    assert "SIMULATED" in out
    assert "Bottleneck: " in out
    assert ", full width" in out
    _, out, _ = run(
        capsys, "plan", "llama2-7b-128k", "--gpu", "rtx4090", "--gpus", 2, "--link", "pcie4x8"
    )
    assert "not full width" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("Qwen/Qwen3-8B", "--context", 32768, "--dtype", "bfloat16"),
        ("meta-llama/Llama-2-7b-hf", "--method", "speculative"),
        ("llama2-7b-128k", "--gpus", 2),
        ("qwen3-32b:Q4_K_M", "--context", 16384),
    ],
)
def test_the_command_that_is_printed_runs_the_plan(capsys, arguments) -> None:
    _, out, _ = run(capsys, "plan", *arguments, "--gpu", "rtx4090")
    program, *words = shlex.split(command_of(out))
    assert program == "triforce"
    config = engine_config(_parser()[0].parse_args(words))
    planned = figures(capsys, *arguments, "--gpu", "rtx4090")["plan"]
    asked = asdict(config.method) | {"weights": config.weights, "kv": config.kv}
    for name in ("method", "draft_tokens", "inner_draft_tokens", "draft_weights", "kv"):
        assert asked[name] == planned[name], name
    assert asked["weights"] == (AUTO if ":" in arguments[0] else planned["weights"])
    assert (asked["budget"] or 0) == planned["budget"]
    assert (config.max_context, config.machine.gpus) == (
        planned["context_tokens"],
        planned["gpus"],
    )


def test_a_saved_plan_is_run_by_its_file(capsys, tmp_path) -> None:
    path = tmp_path / "my plan.json"
    _, out, _ = run(capsys, "plan", "qwen3-8b", "--gpu", "rtx4090", "--save", path)
    assert command_of(out) == f"triforce generate Qwen/Qwen3-8B --plan '{path}'"


def test_acceptance_that_nobody_measured_is_said_to_be_assumed(capsys) -> None:
    case = ("plan", "llama2-7b-128k", "--gpu", "rtx4090")
    for given in ((), ("--acceptance", 0.9)):
        of_plan, *_ = run(capsys, *case, *given)[1].split("Faster:")
        assert ("assumed" in of_plan) == (not given)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("qwen2.5-32b", "--context", 131072), "a smaller format of the weights"),
        (("llama2-7b-128k", "--dtype", "bfloat16", "--kv", "dense"), "KV split (--kv split)"),
        (("llama2-7b-128k", "--draft-tokens", 8), "longer drafts"),
        (("qwen3-14b", "--context", 32768, "--dtype", "bfloat16"), "a small draft model"),
        (("Qwen/Qwen3-8B", "--draft-kv", "exact"), "--draft-kv auto"),
    ],
)
def test_advice_follows_from_what_bounds_the_plan(capsys, arguments, advice: str) -> None:
    said = figures(capsys, *arguments, "--gpu", "rtx4090")["bottleneck"]
    assert advice in said
    if "--draft-tokens" not in arguments:
        assert "longer drafts" not in said, "the planner chose their length"
    if "--draft-kv" not in arguments:
        assert "--draft-kv" not in said, "the planner chose it"


def test_hub_ids_are_known_by_their_names(capsys) -> None:
    options = ("--gpu", "rtx4090", "--context", 8192)
    by_id = figures(capsys, "meta-llama/Llama-3.1-8B-Instruct", *options)
    assert by_id["plan"] == figures(capsys, "llama3.1-8b", *options)["plan"]
    for model, mix in (
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b:INT4"),
        ("cyankiwi/Qwen3.8-27B-AWQ-4bit", "qwen3.8-27b:INT4"),
        ("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int4", "qwen2.5-32b:INT4"),
        ("RedHatAI/Qwen3-32B-quantized.w4a16", "qwen3-32b:INT4"),
        ("Qwen/Qwen3.8-27B-FP8", "qwen3.8-27b:FP8"),
        ("unsloth/Qwen3-32B", "qwen3-32b"),
        ("Qwen/Qwen3.8-Flash-Next", "qwen3.8-flash-next"),
    ):
        assert figures(capsys, model, *options)["plan"] == figures(capsys, mix, *options)["plan"]
    for model, family in (
        ("google/gemma-3n-e4b-it", "Gemma 3n"),
        ("zai-org/GLM-5", "GLM-5"),
        ("deepseek-ai/DeepSeek-V3.2", "DeepSeek-V3.2, V4 and those that read images"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "models with experts that read images"),
    ):
        code, _, err = run(capsys, "plan", model, *options)
        assert code == 4
        assert f"a family that is not supported: {family}" in err
    assert all(hub_id_of(name) for name in SHAPES)
    assert not any(map(unsupported_family, [*SHAPES, *map(hub_id_of, SHAPES)]))


def test_two_slots_that_differ_are_as_slow_as_the_slowest(capsys) -> None:
    options = ("plan", "llama2-7b-128k", "--gpu", "rtx4090", "--json")
    planned = []
    for link in ("pcie4x16", "pcie4x4", "pcie4x16,pcie4x4"):
        code, out, _ = run(capsys, *options, "--gpus", 2, "--link", link)
        assert code == 0
        planned.append(json.loads(out)["hardware"]["link_gb_per_s"])
    wide, narrow, unequal = planned
    assert unequal == narrow == pytest.approx(wide / 4)
    code, _, err = run(capsys, *options, "--link", "pcie4x16,pcie4x4")
    assert code == 2
    assert "names 2 slots, and the plan is for 1 GPU\n" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("llama2-7b-128k", "--gpu", "rtx409"), 2, "nearest: rtx4090"),
        (("llama2-7b-128", "--gpu", "rtx4090"), 2, "llama2-7b-128k"),
        (("smollm2-135m", "--gpu", "rtx4090", "--context", 9000), 2, "8192 positions"),
        (("llama2-7b-128k",), 2, "--gpu"),
        (("llama2-7b-128k", "--gpu", "h100", "--acceptance", 1.5), 2, "acceptance"),
        (("llama2-7b-128k", "--gpu", "h100", "--draft-tokens", 999), 2, "--draft-tokens"),
        (("llama2-7b-128k", "--gpu", "h100", "--link", "agp"), 2, "'agp'"),
        (
            ("mistral-7b", "--gpu", "h100", "--method", "speculative", "--draft", "none"),
            2,
            "needs a drafter",
        ),
        (("llama2-7b-128k", "--gpu", "h100", "--resident-kv", "all"), 2, "--resident-kv"),
        (("llama2-7b-128k", "--gpu", "rtx3060", "--device-memory", "2GiB"), 3, "--context"),
        (("llama2-7b-128k", "--gpu", "rtx4090", "--budget", 131072), 3, "without --budget"),
        (("llama2-7b-128k", "--gpu", "rtx4090", "--host-memory", "8GiB"), 3, "--context"),
        (("llama2-7b-128k", "--gpu", "rtx4090", "--resident-kv", 4000), 3, "--resident-kv"),
        (("llama2-7b-128k", "--gpu", "rtx4090", "--save", "/nowhere/plan.json"), 2, "cannot write"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(capsys, arguments, code, said) -> None:
    exit_code, out, err = run(capsys, "plan", *arguments)
    assert (exit_code, out) == (code, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_config_that_lacks_a_field_names_it(capsys, tmp_path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        code, _, err = run(capsys, "plan", path, "--gpu", "rtx4090")
        assert code == 4
        assert "hidden_size" in err


def test_sizes_come_from_a_config_and_from_a_gguf_header(capsys, tiny, tmp_path) -> None:
    path, model = tiny("llama")
    file = tmp_path / "tiny.gguf"
    write_gguf(model, file)
    options = ("--gpu", "rtx3060", "--context", 512, "--new-tokens", 64)
    by_config = figures(capsys, path, *options)
    by_header = figures(capsys, file, *options)
    assert by_config["memory"] == by_header["memory"]


def test_the_trace_draws_and_says_that_it_is_simulated(capsys, tmp_path) -> None:
    file, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    code, _, err = run(
        capsys,
        *("plan", "llama2-7b-128k", "--gpu", "rtx4090", "--context", 8192, "--trace", file),
        *("--resident-kv", 0),
    )
    assert code == 0, err
    tracks = read_trace(file)
    assert {event.name for event in tracks["host"]} >= {"draft", "verify"}
    assert all(event.args["simulated"] for events in tracks.values() for event in events)
    assert tracks["copy in"]
    script = Path(__file__).parents[3] / "scripts" / "bench"
    subprocess.run([sys.executable, script, "plot_trace", file, picture], check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_goes_to_a_file_and_to_an_engine(capsys, speaking, tmp_path) -> None:
    other = tmp_path / "other"
    make_model("qwen3", other, num_hidden_layers=2)
    add_tokenizer(other)
    file = tmp_path / "plan.json"
    saved = figures(
        capsys,
        *(speaking, "--gpu", "rtx4090", "--context", 300, "--new-tokens", 30, "--save", file),
        *("--resident-kv", 5, "--draft-tokens", 6, "--budget", 64, "--dtype", "float32"),
    )
    plan = Plan.read(file)
    assert plan.placement.resident_kv_blocks == 5
    assert plan.predicted["seconds_per_token"] == saved["seconds_per_token"]
    again = figures(capsys, speaking, "--gpu", "rtx4090", "--plan", file, "--new-tokens", 30)
    assert again["plan"]["resident_kv_blocks"] == 5
    changed = figures(capsys, speaking, "--gpu", "rtx4090", "--plan", file, "--draft-tokens", 3)
    assert changed["plan"]["draft_tokens"] == 3
    with pytest.raises(UsageError, match="was made for rtx4090, and this is emulated device"):
        Engine.from_pretrained(speaking, device="cpu", plan=file)
    plan = plan.named("elsewhere", from_hf(read_json(speaking / "config.json"), {}), EMULATED)
    plan.write(file)
    with Engine.from_pretrained(speaking, device="cpu", plan=file) as engine:
        stats = engine.generate("Hello" * 50, SamplingParams(20, temperature=0)).stats
        taken = engine.plan
    assert taken.placement == plan.placement
    assert (taken.budget, taken.method.draft_tokens) == (64, 6)
    assert taken.block_tokens == plan.block_tokens
    assert stats["retrieval"]["budget_tokens"] == 64
    assert stats["placement"]["resident_kv_blocks"] == 5

    options = ("--prompt", "Hello" * 50, "--max-new-tokens", 20, "--device", "cpu", "--plan", file)
    code, _, err = run(capsys, "generate", speaking, *options, "--draft-tokens", 4)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("plan: ")]
    assert "retrieval budget 64" in line
    assert "drafts of 4" in line
    # Another model of other shape.
    code, _, err = run(capsys, "generate", other, *options)
    assert code == 2
    assert "was made for elsewhere (3 layers of" in err
    assert "(2 layers of" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"surprise": 1}, "no 'surprise'"),
        ({"budget": -3}, "budget"),
        ({"method": "guess"}, "guess"),
        ({"streamed_layers": "all"}, "streamed_layers"),
        ({"gpus": 0}, "gpus must be 1"),
        ({"block_tokens": 48}, "power of two"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(capsys, speaking, tmp_path, change, said) -> None:
    file = tmp_path / "plan.json"
    options = ("--gpu", "rtx4090", "--context", 300, "--new-tokens", 30, "--save", file)
    assert run(capsys, "plan", speaking, *options)[0] == 0
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    code, out, err = run(
        capsys, "generate", speaking, "--prompt", "x", "--device", "cpu", "--plan", file
    )
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_acceptance_comes_from_a_run(capsys, speaking, tmp_path) -> None:
    stats = tmp_path / "stats.json"
    options = ("--prompt", "abc" * 40, "--max-new-tokens", 24, "--device", "cpu", "--budget", 32)
    assert run(capsys, "generate", speaking, *options, "--stats", stats, "--seed", 1)[0] == 0
    measured = json.loads(stats.read_text())["acceptance"]["target"]
    planned = figures(
        capsys,
        *("llama2-7b-128k", "--gpu", "rtx4090", "--stats", stats, "--budget", 32),
        # What was measured computed with exact weights.
        *("--draft-tokens", 8, "--weights", "dense"),
    )
    assert planned["acceptance"] == pytest.approx(measured, abs=2e-3)
    code, _, err = run(capsys, "plan", "llama2-7b-128k", "--gpu", "h100", "--stats", __file__)
    assert code == 2
    assert "stats" in err


def test_a_plan_of_a_file_keeps_what_no_flag_changes(capsys, tmp_path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    options = ("llama2-7b-128k", "--gpu", "rtx4090", "--gpus", 2, "--context", 32768)
    figures(capsys, *options, "--save", first)
    raw = json.loads(first.read_text())
    raw |= {"chunk_size": 16, "accept": "coupled", "budget": 4096}
    first.write_text(json.dumps(raw))
    figures(capsys, *options[:3], "--plan", first, "--save", second)
    changed = json.loads(second.read_text())
    names = ("chunk_size", "accept", "budget", "gpus", "context_tokens")
    assert {name: changed[name] for name in names} == {name: raw[name] for name in names}
    # Layers of the plan's own blocks.
    third = figures(capsys, *options[:3], "--plan", first, "--resident-kv", "2layers")
    assert third["placement"]["resident_kv_blocks"] == 2 * (32768 // raw["block_tokens"])


def test_the_dtype_is_that_of_a_plain_run(capsys, tmp_path) -> None:
    """The checkpoint's, or bfloat16 if it is quantised."""
    raw = SHAPES["smollm3-3b"] | {"torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = ("--gpu", "rtx4090", "--context", 2048)
    expected = {
        "llama3.1-8b": "bfloat16",
        "llama3.1-8b:Q4_K_M": "bfloat16",
        "llama2-7b": "float16",
        tmp_path: "float16",
    }
    assert {name: figures(capsys, name, *options)["dtype"] for name in expected} == expected
    assert figures(capsys, "llama2-7b", *options, "--dtype", "bfloat16")["dtype"] == "bfloat16"
