"""Weights split: bitwise what dense ones of bfloat16 give, in three quarters of the bytes."""

from __future__ import annotations

import warnings
from contextlib import closing
from contextlib import nullcontext as noted
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, SPLIT, make_model, placed, random_ids
from tiny_parts import LAYERS

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.decoder import PassInput
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.sharing.share import Share
from triforce_core.model.tensors import dense_layouts, split_layouts
from triforce_kernels.weights.high_bits import HighBitsWeight, high_bits_matmul
from triforce_kernels.weights.split_bf16 import SplitBF16Weight, check, decode
from triforce_offload.errors import UsageError
from triforce_offload.plan.memory_plan import Where
from triforce_offload.plan.placement import Placement
from triforce_offload.weights.formats import DTYPES, Dense

PROMPT, NEW = random_ids(75), 24
GREEDY = SamplingParams(NEW, temperature=0)


def engine(path: Path, weights: str, **options: object) -> Engine:
    options = {"device": "cpu", "dtype": "bfloat16", "max_context": 120, **options}
    return Engine.from_pretrained(path, weights=weights, block_tokens=BLOCK, **options)


@pytest.fixture(scope="module")
def clear(tiny) -> tuple[list[int], list[int]]:
    """A prompt and its greedy text, none of whose tokens was close: passes of different lengths
    round differently, in bfloat16 by several hundredths.
    """
    path, _ = tiny("llama")
    with engine(path, "dense", method="autoregressive") as plain:
        context = Context(plain.models)
        for seed in range(100):
            prompt = random_ids(75, seed)
            logits = context.prefill(prompt, 12, lambda layer: None).logits
            text, gaps = [], []
            while len(text) < 12:
                best = logits[0].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                text.append(int(best.indices[0]))
                logits = context.run(PassInput(best.indices[:1], is_kept=True, more=False))
            if min(gaps) > 0.25:
                context.close()
                return prompt, text
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-bias", "qwen2", "qwen3"])
@pytest.mark.parametrize("placement", ["resident", "weights", "both-one-slot"])
def test_logits_are_bitwise_those_of_dense_weights(tiny, family: str, placement: str) -> None:
    path, _ = tiny(family)
    logits = []
    for weights in ("dense", "split"):
        options = {"method": "speculative", "draft_tokens": 4, "placement": PLACEMENTS[placement]}
        with engine(path, weights, **options) as running:
            context = Context(running.models)
            read = context.prefill(PROMPT, 8, lambda layer: None).logits
            one = context.run(PassInput(torch.tensor([5]), is_kept=True, more=False))
            several = context.run(PassInput(torch.tensor([7, 8, 9])))
            context.close()
        logits.append(torch.cat((read, one, several)))
    dense, split = logits
    assert dense.std() > 1e-3, "it would be no test"
    assert torch.equal(split, dense)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_texts_are_the_same_at_every_placement(tiny, placement: str) -> None:
    path, _ = tiny("llama")
    params = SamplingParams(NEW, temperature=0.8, top_p=0.9, seed=3)
    options = placed(placement, {"budget": 32, "accept": "coupled", "draft_tokens": 4})
    texts = []
    for weights in ("dense", "split"):
        with engine(path, weights, **options) as running:
            result = running.generate(PROMPT, params)
        texts.append(result.token_ids)
        memory = result.stats["memory"]
        assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    assert texts[0] == texts[1]


def test_three_quarters_cross_the_link(tmp_path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    make_model("llama", tmp_path, **sizes, initializer_range=0.05)
    crossed, taken, texts = [], [], []
    for weights in ("dense", "split"):
        options = {"method": "autoregressive", "placement": PLACEMENTS["weights"]}
        with engine(tmp_path, weights, **options) as running:
            result = running.generate(PROMPT, GREEDY)
            assert running.plan.weights == weights
        crossed.append(result.stats["link"]["bytes_to_device"])
        taken.append(result.stats["memory"]["weights_bytes"])
        texts.append(result.token_ids)
    assert texts[0] == texts[1]
    # 12 bits, and room for exceptions, which small matrices have more of for their size.
    assert crossed[1] < 0.76 * crossed[0]
    assert taken[1] < 0.76 * taken[0]


@pytest.mark.parametrize("placement", ["kv", "kv-in-part", "int4-in-part"])
def test_what_drafts_by_upper_planes_leaves_the_text_as_it_is(
    tiny, clear, monkeypatch, placement: str
) -> None:
    path, _ = tiny("llama")
    options = {"budget": 32, "draft_tokens": 5, "placement": PLACEMENTS[placement]}
    prompt, expected = clear
    params = SamplingParams(len(expected), temperature=0)
    products = []

    def counted(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
        products.append(weight.shape)
        return high_bits_matmul(x, weight)

    monkeypatch.setattr("triforce_kernels.weights.high_bits.high_bits_matmul", counted)
    copies = not placement.startswith("kv")
    for draft_weights in ("auto",) if copies else ("exact", "split"):
        options |= {"draft": "none", "draft_weights": draft_weights}
        if copies:
            # As on a GPU, without being asked for.
            monkeypatch.setattr(Models, "reads_high_bits", True)
        with engine(path, "split", **options) as running:
            result = running.generate(prompt, params)
        assert result.token_ids == expected
        reads = draft_weights != "exact"
        assert result.stats["retrieval"]["reads_high_bits"] == reads
        assert bool(products) == reads


# Low bits stream of all layers, of some, of some beside layers that stream wholly.
HALVED = {
    "all": Placement((0, 1, 2), True, 10**6, 2, 0, 0, split_layers=(0, 1, 2)),
    "one slot": Placement((0, 2), False, 4, 1, 1, 1, split_layers=(0, 2)),
    "and whole ones": Placement((0, 1, 2), True, 0, 2, 3, 2, split_layers=(1,)),
    "and copies": Placement((0, 1), True, 0, 2, 3, 2, split_layers=(1,), copied_layers=(0,)),
}


@pytest.mark.parametrize("method", ["triforce", "autoregressive"])
@pytest.mark.parametrize("name", HALVED)
def test_what_streams_by_its_lower_planes_gives_the_text(
    tiny, clear, name: str, method: str
) -> None:
    path, _ = tiny("llama")
    placement = HALVED[name]
    options = {"method": method, "placement": placement}
    if method == "triforce" and placement.can_draft:
        options |= {"budget": 32, "draft": "none", "draft_tokens": 4}
    prompt, expected = clear
    with engine(path, "split", **options) as running:
        result = running.generate(prompt, SamplingParams(len(expected), temperature=0))
        demand = running.runtime.plan.requirements
    assert result.token_ids == expected
    memory = result.stats["memory"]
    assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    if "budget" in options:
        assert result.stats["levels"] == ["retrieval", "target"]
    if name == "all" and method == "autoregressive":
        crossed = result.stats["link"]["bytes_to_device"]
        assert crossed == sum(demand.low_bytes) * result.stats["passes"]


@pytest.mark.slow
def test_a_pass_carries_the_lower_planes_alone_where_the_others_fit(tmp_path) -> None:
    """And level 1 drafts from those, which needs no copies."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 24}
    make_model("llama", tmp_path, **sizes, initializer_range=0.05)
    with engine(tmp_path, "dense", method="autoregressive") as plain:
        dense_bytes = plain.runtime.plan.requirements.weights_bytes
        peak = plain.generate(PROMPT, GREEDY).stats["memory"]["device_peak_bytes"]
    with engine(tmp_path, "split", device_memory=peak) as running:
        assert not running.runtime.plan.placement.streamed_layers
    less = peak - int(0.35 * dense_bytes)
    options = {"device_memory": less, "draft": "none", "draft_tokens": 4, "budget": 32}
    with engine(tmp_path, "split", **options) as running:
        placement = running.runtime.plan.placement
        stats = running.generate(PROMPT, GREEDY).stats
    assert placement.split_layers == placement.streamed_layers
    assert stats["levels"] == ["retrieval", "target"]
    assert stats["link"]["bytes_to_device"] / stats["passes"] <= 0.27 * dense_bytes
    # Not even the high bits of all fit.
    with engine(tmp_path, "split", device_memory=peak - int(0.8 * dense_bytes)) as running:
        placement = running.runtime.plan.placement
    assert placement.streamed_layers
    assert not placement.split_layers


def test_a_placement_halves_planes_alone(tiny) -> None:
    path, _ = tiny("llama")
    with pytest.raises(UsageError, match="split_layers of a placement are of weights that are"):
        engine(path, "dense", placement=HALVED["all"], method="autoregressive")
    with pytest.raises(UsageError, match=r"split_layers \[1\] are not all streamed_layers"):
        Placement((0,), True, 0, 1, 1, 1, split_layers=(1,))
    with pytest.raises(UsageError, match=r"layers \[0\] cannot be both file_layers and split"):
        Placement((0,), True, 0, 1, 1, 1, split_layers=(0,), file_layers=(0,))


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-14b", "llama2-7b"])
def test_models_take_twelve_bits_a_number(name: str) -> None:
    config, dtype = read_shape(name), DTYPES["bfloat16"]
    dense, split = dense_layouts(config, dtype), split_layouts(config, dtype)
    assert 16 * split.nbytes / dense.nbytes <= 12.1


def test_a_gguf_file_and_layers_in_files(tmp_path) -> None:
    """Rows of a GGUF file's queries and keys are stored in another order; a layer in a file is
    encoded anew each time it crosses.
    """
    model = make_model("llama", tmp_path)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    layers = tuple(range(LAYERS))
    in_files = Placement(layers, False, 0, 2, 3, 2, file_layers=layers)
    texts = []
    both = PLACEMENTS["both"]
    for weights, placement in (("dense", both), ("split", both), ("split", in_files)):
        options = {"placement": placement, "method": "autoregressive"}
        with engine(tmp_path / "m.gguf", weights, **options) as running:
            texts.append(running.generate(PROMPT, GREEDY).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_a_rank_encodes_its_share(tiny) -> None:
    path, _ = tiny("llama")
    with closing(open_checkpoint(path)) as whole:
        for rank in range(2):
            share = Share.of(whole.config, rank, 2)
            checkpoint = whole.shared(share)
            read = []
            for made in (dense_layouts, split_layouts):
                layout = made(checkpoint.config, torch.bfloat16).layers[1]
                views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
                checkpoint.read_layer(1, views)
                read.append(views)
            dense, split = read
            for name, view in split.items():
                if isinstance(view, SplitBF16Weight):
                    check(view)
                    view = decode(view)
                assert torch.equal(view, dense[name])


def test_what_has_cannot_split_is_refused_in_a_sentence(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    with pytest.raises(UsageError, match="only bfloat16, FP8, Q6_K and Q5_K can be split"):
        engine(path, "split", dtype="float32")
    with pytest.raises(UsageError, match="weights that are kept split: give weights split"):
        engine(path, "dense", draft_weights="split")


def test_planes_that_were_asked_for_to_draft_with_are_not_replaced_by_copies(tiny) -> None:
    path, _ = tiny("llama")
    options = {"draft_weights": "split", "placement": PLACEMENTS["weights-one-slot"]}
    with engine(path, "split", **options) as ours:
        assert "retrieval" not in ours.models.levels
        assert "the high bits of some layers stream" in ours.plan_line
    copies = options | {"placement": PLACEMENTS["int4-in-part"], "budget": 32}
    with pytest.raises(UsageError, match="themselves, their high bits or copies"):
        engine(path, "split", **copies)


@pytest.mark.parametrize("placement", ["resident", "halved", "weights-one-slot"])
def test_a_matrix_that_planes_have_no_room_for_is_dense(tmp_path, placement: str) -> None:
    """Also one of the ends; all are found as the model is read once."""
    model = make_model("llama", tmp_path)
    with torch.no_grad():
        for layer in (0, 1):
            model.model.layers[layer].mlp.down_proj.weight[:, ::2] = 1e-20
        model.model.layers[1].self_attn.o_proj.weight[::2, ::2] = 1e-20
        model.lm_head.weight[:, ::2] = 1e-20
    model.save_pretrained(tmp_path)
    halved = Placement((0, 1, 2), True, 10**6, 2, 0, 0, split_layers=(0, 1, 2))
    options = {"placement": halved if placement == "halved" else PLACEMENTS[placement]}
    options |= {"method": "autoregressive"}
    with engine(tmp_path, "dense", **options | {"placement": PLACEMENTS["resident"]}) as dense:
        expected = dense.generate(PROMPT, GREEDY).token_ids
    read: list[str] = []
    with pytest.warns(RuntimeWarning, match="not split") as warned:
        split = engine(tmp_path, "split", progress=lambda *at: read.append(at[0]), **options)
    # The head at once, then the layers, all of them.
    assert [str(it.message)[:2] for it in warned] == ["he", "4 "]
    assert read == ["load"] * 2 * LAYERS
    with split:
        assert split.generate(PROMPT, GREEDY).token_ids == expected
        bits = split.generate(PROMPT, GREEDY).stats["bits_per_number"]["weights"]["stored"]
        assert 12 < bits < 16
        dense_ones = {
            f"{index}.{name}"
            for index, layout in enumerate(split.runtime.weights.layouts)
            for name, stored in layout.formats.items()
            if isinstance(stored, Dense) and len(stored.shape) == 2
        }
    assert dense_ones == {"0.down", "1.down", "1.o"}


def test_drafts_read_a_dense_matrix_among_split_ones(tmp_path) -> None:
    model = make_model("llama", tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, ::2] = 1e-20
    model.save_pretrained(tmp_path)
    options = {"method": "triforce", "draft": "none", "budget": 32, "placement": PLACEMENTS["kv"]}
    with engine(tmp_path, "dense", **options) as dense:
        expected = dense.generate(PROMPT, GREEDY).token_ids
    with pytest.warns(RuntimeWarning, match=r"layers\.1\.down is not split"):
        split = engine(tmp_path, "split", draft_weights="split", **options)
    with split:
        result = split.generate(PROMPT, GREEDY)
        assert result.stats["retrieval"]["reads_high_bits"]
        assert result.token_ids == expected


def test_no_copy_is_kept_of_a_layer_that_planes_had_no_room_for(tmp_path, monkeypatch) -> None:
    """While the model is read for the first time its place holds anything."""
    model = make_model("llama", tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, ::2] = 1e-20
    model.save_pretrained(tmp_path / "model")
    options = {"placement": PLACEMENTS["int4"], "draft": "none", "budget": 16}
    kept = []
    for weights in ("dense", "split"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / weights))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine(tmp_path / "model", weights, draft_weights="int4", **options).close()
        files = sorted((tmp_path / weights).rglob("*.safetensors"))
        kept.append([file.read_bytes() for file in files])
    assert len(kept[0]) == LAYERS
    assert kept[0] == kept[1]


def test_processes_of_ranks_start_over_together(tmp_path) -> None:
    """`core/parallel/test_texts.py` has matrices of one rank alone."""
    model = make_model("llama", tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, ::2] = 1e-20
    model.save_pretrained(tmp_path)
    texts = []
    for weights in ("dense", "split"):
        warned = noted() if weights == "dense" else pytest.warns(RuntimeWarning, match="not split")
        options = {"gpus": 2, "method": "autoregressive", "kv": "dense"}
        with warned, engine(tmp_path, weights, **options) as running:
            texts.append(running.generate(PROMPT, GREEDY).token_ids)
    assert texts[0] == texts[1]


def test_a_layer_of_which_nothing_could_be_split_is_on_the_device(tmp_path) -> None:
    """Its numbers have exponents at random: more exceptions than a list holds."""
    model = make_model("llama", tmp_path, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".layers.0." in name and tensor.dim() == 2:
                powers = torch.randint(-60, 0, tensor.shape, generator=generator)
                tensor.copy_(torch.ldexp(torch.ones_like(tensor), powers))
    model.save_pretrained(tmp_path)
    texts = []
    options = {"method": "autoregressive", "kv": "dense"}
    with engine(tmp_path, "dense", **options) as dense:
        texts.append(dense.generate(PROMPT, GREEDY).token_ids)
    with engine(tmp_path, "split", placement=SPLIT, **options) as running:
        texts.append(running.generate(PROMPT, GREEDY).token_ids)
        first, _, last = running.memory_plan.layers
    assert texts[0] == texts[1]
    assert (first.where, first.link_bytes, last.where) == (Where.DEVICE, 0, Where.SPLIT)
