"""Weights in split blocks on a real device. Simulated without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from fp8_files import FP8_RECURRENT, FP8_SIZES, quantise
from gguf_files import write_gguf
from helpers import BLOCK, make_model, random_ids
from simulated_gpu import TOKENS

from triforce_core import Engine, SamplingParams
from triforce_kernels.dispatch import TRITON
from triforce_offload.machine.profiles import named
from triforce_offload.memory.available import LIBRARY_BYTES
from triforce_offload.plan.placement import Placement

pytestmark = pytest.mark.gpu
PROMPT, GREEDY = random_ids(60), SamplingParams(max_new_tokens=TOKENS, temperature=0)
OPTIONS = {"max_context": 90, "block_tokens": BLOCK, "dtype": "float32"}
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "triforce": {"budget": 80, "draft": "none", "draft_tokens": 4},
}


# Families, and the type of their matrices.
FILES = [("qwen3", "FP8"), ("qwen3_5", "FP8"), ("llama", "Q6_K")]


def written(family: str, kind: str, path: Path, **more: object) -> Path:
    """A checkpoint in FP8, or a GGUF file."""
    if kind == "FP8":
        recurrent = FP8_RECURRENT if family == "qwen3_5" else {}
        quantise(path, make_model(family, path, **FP8_SIZES, **recurrent, **more))
        return path
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = make_model(family, path, **sizes, **more)
    write_gguf(model, path / "m.gguf", gguf.GGMLQuantizationType[kind])
    return path / "m.gguf"


@pytest.fixture(scope="module", params=FILES, ids=" ".join)
def quantised(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(*request.param, tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="module")
def expected(quantised: Path) -> list[int]:
    """The text of the stored numbers on a processor."""
    with Engine.from_pretrained(quantised, device="cpu", weights="stored", **OPTIONS) as engine:
        return engine.generate(PROMPT, GREEDY).token_ids


@pytest.mark.first
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("streamed", [(0, 1, 2), (1,)])
def test_text_is_that_of_the_cpu(quantised, expected, method: str, streamed: tuple) -> None:
    placement = Placement(streamed, True, 10**6, 2, 1, 1, split_layers=streamed)
    options = {**OPTIONS, **METHODS[method], "placement": placement, "weights": "split"}
    with Engine.from_pretrained(quantised, device="cuda:0", **options) as engine:
        result = engine.generate(PROMPT, GREEDY)
        low = engine.memory_plan.requirements.low_bytes
    assert result.token_ids == expected
    if method == "triforce":
        assert result.stats["retrieval"]["reads_high_bits"]
    else:
        crossed = result.stats["link"]["bytes_to_device"]
        assert crossed >= result.stats["passes"] * sum(low[layer] for layer in streamed)


@pytest.mark.first
@pytest.mark.parametrize(("family", "kind"), [("llama", "Q6_K"), ("qwen3", "FP8")])
def test_seconds_choose_to_split_what_would_stream(
    tmp_path, monkeypatch, family: str, kind: str
) -> None:
    """Over a slow link, and where not all bits have room."""
    slow = replace(named("rtx4090", 4), link_bytes_per_second=2e6)
    monkeypatch.setattr("triforce_core.loading.load.rates", lambda *_: slow)
    monkeypatch.setattr("triforce_core.loading.devices.backend", lambda device: TRITON)
    path = written(family, kind, tmp_path, num_hidden_layers=12)
    options = {**OPTIONS, "block_tokens": None, "method": "autoregressive", "cuda_graphs": False}
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        expected = engine.generate(PROMPT, GREEDY).token_ids
    options |= {"device": "cuda:0"}
    with Engine.from_pretrained(path, **options) as engine:
        assert engine.plan.weights == "stored"
        whole, layer = engine.memory_plan.device_bytes, engine.memory_plan.layers[0].nbytes
    found = set()
    for less in range(1, 8):
        options |= {"device_memory": LIBRARY_BYTES + whole - less * layer}
        with Engine.from_pretrained(path, **options) as engine:
            if engine.memory_plan.weights_link_bytes:
                found.add(engine.plan.weights)
                assert engine.generate(PROMPT, GREEDY).token_ids == expected
    assert "split" in found
