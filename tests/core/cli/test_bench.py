"""`triforce bench`: every test gives its figure, floors are true, shapes are the models'."""

from __future__ import annotations

import json
import math

import pytest
import torch

from triforce_core.bench.settings import TESTS
from triforce_core.cli.main import main
from triforce_core.machine_settings import MachineSettings
from triforce_core.model.checkpoints.random_checkpoint import RandomCheckpoint
from triforce_core.model.families.hf import from_hf
from triforce_core.model.known.shapes import for_timing, read_shape
from triforce_core.plan.simulation.costs.launches import prefill_flops
from triforce_core.settings import EngineConfig
from triforce_offload.errors import LinkError, UsageError
from triforce_offload.plan.placement import KV_SLOTS, WEIGHT_SLOTS
from triforce_offload.weights.split_formats import SplitBF16

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}
LAYERS = 12
# Bytes of keys and values in a layer.
PER_TOKEN = 2 * 2 * 16 * 4


@pytest.fixture
def tiny_shape(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    return file


def run(capsys, shape, *options: str) -> tuple[int, str, str]:
    arguments = ["bench", "--device", "cpu", "--shape", str(shape), "--draft-shape", str(shape)]
    code = main([*arguments, "--context", "200", "--repeats", "2", "--draft-tokens", "3", *options])
    return code, *capsys.readouterr()


def test_random_recurrent_layers_forget(capsys, tmp_path) -> None:
    """States of decays above 0 would overflow in the middle of a long context."""
    shape = tmp_path / "config.json"
    recurrent = {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "head_dim": 64}
    recurrent |= {"layer_types": ["linear_attention", "full_attention"]}
    recurrent |= {"linear_key_head_dim": 128, "linear_value_head_dim": 16}
    recurrent |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    recurrent |= {"linear_conv_kernel_dim": 4, "max_position_embeddings": 16384}
    shape.write_text(json.dumps(TINY | recurrent))
    arguments = ["bench", "--device", "cpu", "--shape", str(shape), "--draft-shape", "none"]
    assert main([*arguments, "--context", "12000", "--repeats", "1", "--tests", "prefill"]) == 0


def test_every_test_gives_its_figure(capsys, tiny_shape) -> None:
    # Nothing streams, so there is a retrieval model only if one is asked for.
    code, out, err = run(capsys, tiny_shape, "--output", "json", "--budget", "64")
    result = json.loads(out)
    assert code == 0
    rows = result["rows"]
    # All KV is resident here: there is no host memory to make ready.
    assert list(dict.fromkeys(row["test"] for row in rows)) == list(TESTS)
    for row in rows:
        assert 0 < min(row["seconds"]) <= row["median_seconds"] <= max(row["seconds"])
        assert row["rate"] > 0
        assert len(row["seconds"]) >= 2
        assert f"{row['test']}: {row['what']}" in err
    assert result["weights"] == "random"
    assert result["link"]["emulated"] is True
    assert result["hardware"].keys() == {"processor", "threads", "gpu"}
    assert result["placement"]["resident_kv_blocks"] == result["placement"]["kv_blocks"]


def test_the_floor_of_a_pass_is_its_bytes_over_the_link(capsys, tiny_shape) -> None:
    options = ("--tests", "pass", "--output", "json", "--link-bandwidth", "20MB/s")
    # Deep, so that weights stream too: its KV fits into what only reading needs.
    tiny_shape.write_text(json.dumps(TINY | {"num_hidden_layers": LAYERS}))
    code, out, _ = run(
        capsys, tiny_shape, "--context", "400", "--device-memory", "6800KiB", *options
    )
    result = json.loads(out)
    assert code == 0
    placement, rows = result["placement"], result["rows"]
    assert placement["resident_kv_blocks"] < placement["kv_blocks"]
    made, *passes = rows
    assert made["test"] == "host"
    assert [row["what"] for row in passes] == ["1 token after 400", "4 tokens after 400"]
    for row in passes:
        moved = row["floor_seconds"] * 20e6
        weights = placement["streamed_weight_layers"]
        whole = LAYERS * 400 * PER_TOKEN + weights * 200_000
        assert 0 < moved <= whole
        # Nothing is faster than its link: of all passes together, no more than what slots hold may
        # have crossed before the first began.
        early = WEIGHT_SLOTS * 200_000 + 2 * KV_SLOTS * placement["block_tokens"] * PER_TOKEN
        crossed = len(row["seconds"]) * moved - early
        assert crossed > 0
        assert sum(row["seconds"]) * 20e6 >= 0.99 * crossed


def test_kv_is_kept_in_the_format_that_is_asked_for(capsys, tiny_shape) -> None:
    # Weights stream, and KV is in several blocks: one block for all of it is never split.
    tiny_shape.write_text(json.dumps(TINY | {"num_hidden_layers": LAYERS}))
    options = ("--tests", "link", "--output", "json", "--dtype", "bfloat16", "--draft-shape")
    options += ("none", "--context", "400", "--device-memory", "2000KiB", "--kv")
    stored = {}
    for kv in ("dense", "split"):
        code, out, _ = run(capsys, tiny_shape, *options, kv)
        assert code == 0
        stored[kv] = json.loads(out)["bits_per_number"]["kv"]["stored"]
    assert stored["split"] < stored["dense"] == 16


def test_every_option_of_the_engine_reaches_it(capsys, monkeypatch, tiny_shape) -> None:
    configs: list[EngineConfig] = []

    def refuse(settings: object, shape: object, draft: object, config: EngineConfig, _: object):
        configs.append(config)
        raise UsageError("planted")

    monkeypatch.setattr("triforce_core.cli.bench.command.Bench", refuse)
    options = ("--dtype", "bfloat16", "--weights", "split", "--kv", "split", "--threads", "1")
    code, _, err = run(capsys, tiny_shape, *options)
    assert (code, "planted" in err) == (2, True)
    (config,) = configs
    assert (config.dtype, config.weights, config.kv) == ("bfloat16", "split", "split")
    assert config.machine == MachineSettings(device="cpu", threads=1)


def test_a_table_is_the_default(capsys, tiny_shape) -> None:
    code, out, _ = run(capsys, tiny_shape, "--tests", "link,retrieval", "--budget", "64")
    assert code == 0
    lines = out.splitlines()
    assert "EMULATED link" in lines[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert cells[0] == ["test", "what", "rate", "median, s", "spread"]
    # A cell that wraps goes on in a row without a test.
    assert [row[0] for row in cells[2:] if row[0]] == [
        *("link", "link", "retrieval"),
        *("test", "-" * len("retrieval"), "retrieval"),
    ]


def test_the_rate_of_decoding_and_the_time_to_the_first_token_stand_first(
    capsys, tiny_shape
) -> None:
    code, out, _ = run(capsys, tiny_shape, "--tests", "link,prefill,decode")
    assert code == 0
    first = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert [test for test in first if test][2:4] == ["decode", "prefill"]


def test_what_was_found_is_shown_when_a_later_test_fails(capsys, monkeypatch, tiny_shape) -> None:
    def fail(*_: object) -> None:
        raise LinkError("planted")

    monkeypatch.setattr("triforce_core.bench.bench.Bench._pass", fail)
    code, out, err = run(capsys, tiny_shape, "--tests", "link,pass", "--output", "json")
    assert (code, [row["test"] for row in json.loads(out)["rows"]]) == (1, ["link", "link"])
    assert "planted" in err


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--tests", "link,nothing"), 2, "'nothing'"),
        (("--context", "10"), 2, "--context must be 64 or more"),
        (("--repeats", "0"), 2, "--repeats"),
        (("--draft-shape", "llama9"), 2, "llama2-7b"),
        (("--budget", "7"), 2, "budget"),
        (("--device-memory", "100KiB"), 3, "needs"),
        (("--context", "100000"), 3, "needs"),
    ],
)
def test_what_cannot_be_timed_is_said_in_a_line(
    capsys, monkeypatch, tiny_shape, options, code, named
):
    monkeypatch.setattr("triforce_core.loading.load.available_host_bytes", lambda: 60 << 20)
    exit_code, out, err = run(capsys, tiny_shape, *options)
    assert exit_code == code
    assert out == ""
    assert named in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes_per_token"),
    [
        ("llama2-7b", 6.738e9, 512 << 10),
        ("llama2-7b-128k", 6.738e9, 512 << 10),
        ("llama2-13b-128k", 13.016e9, 800 << 10),
        ("llama3.1-70b", 70.55e9, 320 << 10),
        ("qwen2.5-7b", 7.616e9, 56 << 10),
        ("mistral-7b", 7.248e9, 128 << 10),
        ("smollm2-1.7b", 1.711e9, 192 << 10),
        ("llama3.1-8b", 8.030e9, 128 << 10),
        ("qwen2.5-32b", 32.76e9, 256 << 10),
        ("smollm2-135m", 134.5e6, 30 * 2 * 3 * 64 * 2),
    ],
)
def test_shapes_are_those_of_the_models(name: str, parameters: float, kv_bytes_per_token: int):
    config = read_shape(name)
    layers = (spec.shapes(config.hidden).values() for spec in config.layers)
    numbers = sum(sum(map(math.prod, shapes)) for shapes in layers)
    ends = config.vocab * config.hidden * (1 if config.tied else 2) + config.hidden
    assert numbers + ends == pytest.approx(parameters, rel=1e-3)
    assert len(config.kv_layers) * 2 * config.attention.keys * 2 == kv_bytes_per_token
    assert for_timing(config).positions >= 262144


def test_random_weights_are_the_same_each_time_and_no_rows_repeat() -> None:
    config = from_hf(TINY, {})
    rows = []
    for _ in range(2):
        into = torch.empty(97, 64)
        RandomCheckpoint(config).read("head", into)
        rows.append(into)
    assert torch.equal(*rows)
    assert len(rows[0].unique(dim=0)) == 97
    assert rows[0].std() == pytest.approx(0.02, rel=0.05)
    norm = torch.empty(64)
    RandomCheckpoint(config).read("norm", norm)
    assert torch.equal(norm, torch.ones(64))


def test_flops_of_a_prompt_are_those_of_its_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"})
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    tokens = 128
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(torch.arange(tokens)[None] % 97)
    # An eager transformers multiplies the masked half too.
    masked = 2 * tokens * 3 * 2 * 64 * tokens / 2
    assert prefill_flops(from_hf(TINY, {}), tokens) + masked == counter.get_total_flops()


def test_random_weights_come_in_split_formats_too(monkeypatch) -> None:
    """As every bfloat16 benchmark on a GPU needs them where something streams."""
    # Several slices, and more numbers than are drawn.
    monkeypatch.setattr("triforce_kernels.limits.DECODED_AT_ONCE", 70 * 64)
    monkeypatch.setattr("triforce_core.model.checkpoints.random_checkpoint._NOISE", 1009)
    checkpoint = RandomCheckpoint(from_hf(TINY, {}))
    dense, stored = torch.empty(192, 64, dtype=torch.bfloat16), SplitBF16(192, 64)
    checkpoint.read("layers.0.gate_up", dense)
    for _ in range(2):
        split = stored.view(torch.full((stored.nbytes,), 255, dtype=torch.uint8))
        checkpoint.read("layers.0.gate_up", split)
        assert torch.equal(split.joined(), dense)
