"""Weights as they are stored: the text of the dequantised model, in the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, make_model, placed, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_kernels import dispatch
from triforce_kernels.dispatch import HOST, REFERENCE
from triforce_kernels.host.library import library
from triforce_kernels.weights.block_types import BLOCK_TYPES
from triforce_offload.errors import UsageError

PROMPT, NEW = random_ids(60), 24
GREEDY = SamplingParams(NEW, temperature=0)
# What the gguf package can write.
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(
        path, **{"device": "cpu", "max_context": 120, "block_tokens": BLOCK, **options}
    )


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A family in a GGUF block type."""

    def make(family: str, kind: str, **overrides: object) -> Path:
        path = tmp_path_factory.mktemp("stored")
        model = make_model(family, path, **overrides)
        write_gguf(model, path / "m.gguf", gguf.GGMLQuantizationType[kind])
        return path / "m.gguf"

    return make


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "qwen2", "qwen3", "glm4", "phi3-partial", "granite"]
)
def test_greedy_text_is_that_of_the_dequantised_model(quantised, family: str, kind: str) -> None:
    path = quantised(family, kind)
    with engine(path, method="autoregressive", weights="dense") as dense:
        expected = dense.generate(PROMPT, GREEDY)
    with engine(path, method="autoregressive", weights="stored") as stored:
        found = stored.generate(PROMPT, GREEDY)
    assert found.token_ids == expected.token_ids
    taken = [result.stats["memory"]["weights_bytes"] for result in (expected, found)]
    block = BLOCK_TYPES[kind]
    # Vectors and matrices whose rows are no whole blocks stay as they are.
    assert taken[1] < taken[0] * (block.nbytes / (4 * block.elements) + 0.15)


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2_moe"])
def test_numbers_of_16_bits_stay_so_where_the_model_computes_in_float32(
    tmp_path, monkeypatch, family: str, dtype: torch.dtype
) -> None:
    """On a CPU, unless asked otherwise: the same text from half the bytes, wherever they are."""
    monkeypatch.setattr(dispatch, "_forced", HOST)
    make_model(family, tmp_path).to(dtype).save_pretrained(tmp_path)
    found = {}
    for weights in ("dense", "auto", "stored"):
        with engine(tmp_path, weights=weights, method="autoregressive") as running:
            found[weights] = running.generate(PROMPT, GREEDY)
    taken = {name: result.stats["memory"]["weights_bytes"] for name, result in found.items()}
    assert taken["auto"] == taken["stored"] < 0.6 * taken["dense"]
    with engine(tmp_path, placement=PLACEMENTS["weights"], budget=None) as running:
        found["streamed"] = running.generate(PROMPT, GREEDY)
    assert len({tuple(result.token_ids) for result in found.values()}) == 1


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if kind not in WRITTEN])
def test_every_block_type_is_read_and_computed_with(quantised, kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 16}
    path = quantised("llama", kind, **sizes)
    logits = []
    for weights in ("dense", "stored"):
        with engine(path, method="autoregressive", weights=weights) as running:
            context = Context(running.models)
            logits.append(context.prefill(PROMPT, 1, lambda layer: None).logits)
            context.close()
    dense, stored = logits
    assert dense.std() > 1e-3, "it would be no test"
    torch.testing.assert_close(stored, dense, rtol=0, atol=1e-4 * float(dense.abs().max()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logits_are_bitwise_the_same_wherever_blocks_lie(quantised, placement: str) -> None:
    path = quantised("llama", "Q4_0", tie_word_embeddings=placement == "kv")
    texts, params = [], SamplingParams(NEW, temperature=1.0, seed=3)
    for where in ("resident", placement):
        options = {"weights": "stored", "budget": 32, "accept": "coupled", "draft_tokens": 4}
        with engine(path, **placed(where, options)) as stored:
            result = stored.generate(PROMPT, params)
        texts.append(result.token_ids)
        memory = result.stats["memory"]
        assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    assert texts[0] == texts[1]


def test_layers_of_different_types_stream_in_their_own_sizes(tmp_path) -> None:
    """As Q4_K_M has them: some matrices of some layers in more bits than others."""
    model = make_model("llama", tmp_path)
    types = gguf.GGMLQuantizationType
    write_gguf(model, tmp_path / "m.gguf", types.Q4_0, larger=types.Q8_0)
    with engine(tmp_path / "m.gguf", method="autoregressive") as dense:
        expected = dense.generate(PROMPT, GREEDY).token_ids
    for placement in ("weights", "both-one-slot"):
        options = {"method": "autoregressive", "placement": PLACEMENTS[placement]}
        with engine(tmp_path / "m.gguf", weights="stored", **options) as stored:
            result = stored.generate(PROMPT, GREEDY)
            demand = stored.runtime.plan.requirements
        assert result.token_ids == expected
        sizes = demand.layer_bytes
        assert len(set(sizes)) > 1
        if placement == "weights":
            crossed = result.stats["link"]["bytes_to_device"]
            assert crossed == sum(sizes) * result.stats["passes"]


def test_what_is_not_quantised_cannot_be_kept_so(tiny) -> None:
    path, _ = tiny("llama")
    with pytest.raises(UsageError, match="where they are quantised, and these are not"):
        engine(path, weights="stored")
    with pytest.raises(UsageError, match="weights 'q4' is not one of auto, stored, dense"):
        engine(path, weights="q4")


def has_blocks(running: Engine) -> bool:
    """Whether some matrices of layers are in blocks."""
    layouts = running.runtime.weights.layouts
    return any(part.block_type for layout in layouts for part in layout.decoded())


def test_what_nothing_here_decodes_is_refused_before_it_is_loaded(quantised, monkeypatch) -> None:
    path = quantised("llama", "IQ1_S", hidden_size=256, intermediate_size=256, head_dim=16)
    monkeypatch.setattr("triforce_kernels.weights.blocks._library", lambda kind: None)
    with pytest.raises(UsageError, match=r"IQ1_S weights are kept as stored by transformers 5\.23"):
        engine(path, weights="stored")
    with engine(path, placement=PLACEMENTS["weights"], budget=None) as running:
        assert not any(
            part.block_type
            for layout in running.runtime.weights.layouts
            for part in layout.decoded()
        )


@pytest.mark.parametrize("computed", [REFERENCE, HOST])
def test_auto_keeps_weights_as_stored_where_dense_ones_would_stream_or_kernels_multiply(
    quantised, monkeypatch, computed: str
) -> None:
    if computed == HOST and library() is None:
        pytest.skip("needs the compiled kernels")
    monkeypatch.setattr(dispatch, "_forced", computed)
    path = quantised("llama", "Q4_0", num_hidden_layers=8)
    texts, kept = [], []
    for memory in ("1GiB", 1_150_000):
        with engine(path, device_memory=memory) as running:
            texts.append(running.generate(PROMPT, GREEDY).token_ids)
            kept.append(
                any(
                    part.block_type
                    for layout in running.runtime.weights.layouts
                    for part in layout.decoded()
                )
            )
    assert kept == [computed == HOST, True]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_draft_model_stays_in_its_blocks(
    quantised, tmp_path, monkeypatch, family: str, kind: str
) -> None:
    """Beside a dense model, and in the memory that was planned; where no kernel multiplies by its
    blocks on a CPU, it becomes dense.
    """
    model, drafter, found = make_model(family, tmp_path), quantised(family, kind), {}
    with engine(tmp_path, method="autoregressive") as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    for backend in (HOST, REFERENCE):
        if backend == HOST and library() is None:
            continue
        monkeypatch.setattr(dispatch, "_forced", backend)
        with engine(tmp_path, method="speculative", draft=drafter, draft_tokens=4) as ours:
            assert ours.generate(PROMPT, GREEDY).token_ids == expected
            assert ours.memory.peak_bytes <= ours.memory_plan.device_bytes
            found[backend] = ours.memory_plan.requirements.drafting_bytes
    if HOST in found:
        block, dense = BLOCK_TYPES[kind], sum(each.numel() for each in model.parameters())
        saved = dense * (4 - block.nbytes / block.elements)
        assert found[REFERENCE] - found[HOST] > 0.8 * saved
