"""The engine over Triton's kernels, in their interpreter or on a GPU: the same text."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, make_model, random_ids

from triforce_core import Engine, SamplingParams
from triforce_kernels import dispatch
from triforce_kernels.dispatch import HOST, KERNELS, REFERENCE, TRITON
from triforce_kernels.host.library import library

pytest.importorskip("triton")

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
# What is not dense has tests of its own; an emulated link has to carry what is gathered.
PACKED = {"integer_matmul", "decode_blocks", "block_matmul"}
# Of bfloat16, which products in the interpreter do not know; see kernels/test_split_bf16.py.
SPLIT = {
    *("decode_split", "split_matmul", "high_bits_matmul"),
    *("encode_kv_block", "decode_kv_blocks", "gather_split_chunks"),
}
# What makes blocks of split ones.
JOINING = {"join_fp8", "join_quants"}
# Products with experts that are not dense.
EXPERTS = {"block_experts", "split_experts", "high_bits_experts", "integer_experts"}
# The gates and the norm of a recurrent layer, by family; all else is common to the two.
OF_RECURRENT = {
    "qwen3_5": {"delta_gates", "gated_norm"},
    "granite4-h": {"step_gates", "norm_of_gated"},
}
OF_STREAMS = {name for name, paths in KERNELS.items() if paths.triton.startswith("streams.")}
RECURRENT = {name for name, paths in KERNELS.items() if paths.triton.startswith("recurrent.")}
# The processor's compiled kernels, where there are any.
HERE = [HOST] if DEVICE == "cpu" and library() else []
MOVED = {"gather_chunks"} if DEVICE == "cpu" else set()
NOT_USED = PACKED | SPLIT | EXPERTS | JOINING | OF_STREAMS | MOVED
# The others are PyTorch's operators on a GPU, too.
OF_TRITON = {name: paths for name, paths in KERNELS.items() if paths.triton != paths.reference}

# Norms and gates that a family does not have, if it has others than most.
OF_OTHERS = {"gemma4": {"layer_norm", "swiglu"}, "cohere2": {"rms_norm", "geglu"}}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths of the implementations that are called."""
    seen: set[str] = set()
    original = dispatch._load

    def load(path: str):
        seen.add(path)
        return original(path)

    monkeypatch.setattr(dispatch, "_load", load)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafts", "draft_kv", "same_bits"),
    [
        ("qwen3", "model", "exact", "off"),
        ("qwen3", "none", "exact", "on"),
        ("llama", "ngram", "int8", "off"),
        ("gemma4", "ngram", "exact", "off"),
        ("cohere2", "none", "exact", "off"),
        ("qwen3_5", "none", "exact", "off"),
        ("granite4-h", "none", "exact", "off"),
        ("qwen3_moe", "none", "exact", "off"),
    ],
)
def test_greedy_text_is_the_same_with_triton_and_with_the_reference(
    tiny, monkeypatch, used, family: str, drafts: str, draft_kv: str, same_bits: str
) -> None:
    path, _ = tiny(family)
    options = {"device": DEVICE, "dtype": "float32", "max_context": 128, "block_tokens": BLOCK}
    # So small blocks do not keep the promise, which is not tested here; the kernels take them.
    monkeypatch.setattr("triforce_core.plan.formats.SAME_BITS_TOKENS", BLOCK)
    options |= {"draft": path if drafts == "model" else drafts, "budget": 32, "draft_tokens": 4}
    options |= {"placement": PLACEMENTS["kv-in-part"], "inner_draft_tokens": 2}
    options |= {"draft_kv": draft_kv}
    # Long enough for a whole chunk of rows of a recurrent layer behind those that are not folded.
    prompt = random_ids(24) * (4 if family in OF_RECURRENT else 2)
    not_used = NOT_USED | OF_OTHERS.get(family, {"layer_norm", "geglu"})
    if family in OF_RECURRENT:
        not_used |= set().union(*OF_RECURRENT.values()) - OF_RECURRENT[family]
    else:
        not_used |= RECURRENT
    if family != "qwen3_moe":
        not_used |= {"dense_experts", "choose_experts", "expert_tiles", "sum_experts"}
    if draft_kv != "int8":
        not_used |= {"round_chunks"}
    if same_bits == "off":
        not_used |= {"dense_matmul"}  # PyTorch's product is used
    texts = {}
    for name in (REFERENCE, *HERE, TRITON):
        monkeypatch.setattr(dispatch, "_forced", name)
        mode = same_bits if name == TRITON else "auto"
        with Engine.from_pretrained(path, same_bits=mode, **options) as engine:
            texts[name] = engine.generate(prompt, SamplingParams(7, temperature=0))
    assert all(text.token_ids == texts[REFERENCE].token_ids for text in texts.values())
    assert texts[TRITON].stats["retrieval"]["churn"] is not None, "it was refreshed"
    for kernel, paths in OF_TRITON.items():
        assert (paths.triton in used) == (kernel not in not_used), kernel


@pytest.mark.slow
def test_residual_streams_give_the_same_text(tiny, monkeypatch, used) -> None:
    path, _ = tiny("qwen4_exp-moe")
    options = {"device": DEVICE, "dtype": "float32", "max_context": 64, "draft_tokens": 3}
    texts = []
    for name in (REFERENCE, *HERE, TRITON):
        monkeypatch.setattr(dispatch, "_forced", name)
        with Engine.from_pretrained(path, draft="ngram", **options) as engine:
            texts.append(engine.generate(random_ids(24), SamplingParams(6, temperature=0)))
    assert all(text.token_ids == texts[0].token_ids for text in texts)
    assert all(KERNELS[name].triton in used for name in OF_STREAMS)


@pytest.mark.slow
def test_sampled_text_is_the_same_if_coins_fall_alike(tiny, monkeypatch) -> None:
    """Coupled: what is drawn at a position depends on nothing but its law."""
    path, _ = tiny("llama-mqa")
    options = {"device": DEVICE, "dtype": "float32", "max_context": 64, "block_tokens": BLOCK}
    options |= {"accept": "coupled", "draft": "none", "budget": 32, "draft_tokens": 3}
    params = SamplingParams(6, temperature=0.8, top_p=0.9, seed=2)
    texts = []
    for name in (REFERENCE, *HERE, TRITON):
        monkeypatch.setattr(dispatch, "_forced", name)
        with Engine.from_pretrained(path, placement=PLACEMENTS["kv"], **options) as engine:
            texts.append(engine.generate(random_ids(40), params).token_ids)
    assert all(text == texts[0] for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "packed"),
    [("llama-tied", "stored"), ("llama-tied", "int4"), ("qwen2_moe", "int4")],
)
def test_weights_that_are_not_dense_give_the_same_text(
    tmp_path, monkeypatch, used, family: str, packed: str
) -> None:
    path = tmp_path
    model = make_model(family, path, moe_intermediate_size=64)
    if packed == "stored":
        path = tmp_path / "m.gguf"
        write_gguf(model, path, gguf.GGMLQuantizationType.Q4_0)
    options = {"device": DEVICE, "dtype": "float32", "max_context": 64, "block_tokens": BLOCK}
    options |= {"draft": "none", "draft_tokens": 3, "weights": "auto"}
    if packed == "stored":
        options |= {"weights": "stored", "placement": PLACEMENTS["weights-one-slot"]}
    else:
        options |= {"budget": 32, "placement": PLACEMENTS["int4"]}
    texts = []
    for name in (REFERENCE, *HERE, TRITON):
        monkeypatch.setattr(dispatch, "_forced", name)
        with Engine.from_pretrained(path, **options) as engine:
            texts.append(engine.generate(random_ids(24), SamplingParams(6, temperature=0)))
    assert all(text.token_ids == texts[0].token_ids for text in texts)
    expected = {"integer_matmul"} if packed == "int4" else PACKED - {"integer_matmul"}
    if family == "qwen2_moe":
        expected.add("integer_experts")
    assert {each for each in PACKED | EXPERTS if KERNELS[each].triton in used} == expected
