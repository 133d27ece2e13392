"""Several ranks say what one says: every family, method, format and placement, as threads of one
process (`thread_ranks`); `test_processes` has what only processes can show.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import product

import gguf
import pytest
import torch
from fp8_files import FP8_SIZES, quantise
from gguf_files import write_gguf
from helpers import PLACEMENTS, make_model, random_ids
from integer_files import to_integers
from oracle import assert_equal_but_for_ties, greedy
from thread_ranks import engine

from triforce_core import SamplingParams
from triforce_core.decoding.contexts.calls import Draft, Prefill, RunPass
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_kernels.host.library import library
from triforce_offload.errors import RankError
from triforce_offload.ranks import Call

PROMPT, NEW = 75, 24
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "speculative": {"method": "speculative"},
    "triforce": {"method": "triforce", "budget": 32, "draft_tokens": 6},
}


# Of these, ranks share heads and columns with biases, partial rotations or fused tensors.
RANKED = ("llama-tied", "llama-bias", "qwen2", "qwen3")
RANKED += ("seed-oss", "smollm3", "granite", "glm4", "phi3-partial", "ernie4_5", "exaone4")
RANKED += (
    "qwen3-windows",
    "exaone4-windows",
    "mistral-windows",
    "gemma4",
    "olmo2",
    "olmo3",
    "qwen3_5",
    "lfm2",
)
# Ranks divide the only group of the first one.
RANKED += ("granite4-h", "granite4-h-moe", "nemotron_h-moe", "lfm2-moe")
RANKED += ("qwen3_moe", "qwen2_moe", "glm4_moe", "qwen3_next-moe", "minimax_m2-moe", "laguna-moe")
# One rank adds the biases of outputs; what two norms take is summed before; one vector a token.
RANKED += ("gpt-oss-moe", "gemma4-moe", "deepseek_v2-moe", "deepseek_v3-moe", "glm4_lite-moe")
RANKED += ("mistral4-moe", "mellum-moe", "hyperclovax")
RANKED += ("arcee", "exaone_moe-moe", "hy_v3-moe", "flex_olmo-moe")
# Gates of columns that are stored apart, and of heads.
RANKED += ("afmoe-moe", "lfm3")
# Every rank computes per-layer embeddings.
RANKED += ("gemma4-small",)


def transformers_text(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.one_in(20)
@pytest.mark.parametrize(
    ("family", "method", "ranks"),
    [
        *(
            (family, method, ranks)
            for family in ("llama", "llama-mha", "llama-mqa")
            for method in METHODS
            for ranks in (2, 4)
        ),
        *((family, "triforce", 2) for family in RANKED),
    ],
)
def test_greedy_text_is_that_of_transformers(
    tiny, leaders, family: str, method: str, ranks: int
) -> None:
    path, model = tiny(family)
    prompt = random_ids(PROMPT)
    with engine(path, ranks, "both" if method != "triforce" else "kv", **METHODS[method]) as ours:
        result = ours.generate(prompt, greedy(NEW))
    theirs = transformers_text(model, prompt)
    assert len(set(theirs)) > 5, "the model says too little to compare"
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs)
    assert result.stats["passes"] == leaders[0].calls.count(RunPass)


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.first
@pytest.mark.parametrize("family", ["olmo2", "llama-mqa", "qwen2_moe"])
def test_in_half_precision_drafts_change_no_text_of_two_ranks(tiny, whole, family: str) -> None:
    """B2: two ranks add two numbers, in whichever order."""
    path, _ = tiny(family)
    prompt, texts = random_ids(PROMPT), []
    methods = list(METHODS.values())[: None if whole else 2]
    for method in methods:
        options = {"dtype": "bfloat16", "accept": "coupled", **method}
        with engine(path, 2, "kv", **options) as ours:
            for temperature in (0.0, 1.0):
                params = SamplingParams(12, temperature=temperature, seed=1)
                texts.append(ours.generate(prompt, params, reuse=False).token_ids)
    assert texts[0::2] == [texts[0]] * len(methods)
    assert texts[1::2] == [texts[1]] * len(methods)


@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_that_do_not_divide(tmp_path, leaders, ranks: int) -> None:
    """9 heads over 3 key-value heads: 2 of these and 1, or one each and one that two ranks have."""
    sizes = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = make_model("llama", tmp_path, **sizes)
    prompt = random_ids(PROMPT)
    theirs = transformers_text(model, prompt)
    for placement in ("kv", "both", "int4"):
        with engine(tmp_path, ranks, placement, **METHODS["triforce"]) as ours:
            result = ours.generate(prompt, greedy(NEW))
        assert_equal_but_for_ties(model, prompt, result.token_ids, theirs)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_wherever_weights_and_kv_live(tiny, leaders, placement: str) -> None:
    path, model = tiny("llama")
    prompt = random_ids(PROMPT)
    with engine(path, 2, placement, **METHODS["triforce"]) as ours:
        result = ours.generate(prompt, greedy(NEW))
        # A text that goes on, one that turns back, and one that is new.
        longer = prompt + result.token_ids + random_ids(5, 3)
        for other in (longer, longer[:90], random_ids(40, 4)):
            found = ours.generate(other, greedy(20)).token_ids
            expected = model.generate(torch.tensor([other]), max_new_tokens=20, do_sample=False)
            assert_equal_but_for_ties(model, other, found, expected[0, len(other) :].tolist())
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))
    ranks = result.stats["ranks"]
    assert len({rank["checksum"] for rank in ranks}) == 1
    assert len({rank["resident_weight_layers"] for rank in ranks}) == 1


@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("weights", ["stored", "dense"])
def test_value_heads_in_the_order_of_gguf_files(
    tmp_path, leaders, weights: str, ranks: int
) -> None:
    """Three of each of two key heads, which ranks divide, or of which two ranks have the same."""
    model = make_model("qwen3_5", tmp_path, linear_value_head_dim=32)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    texts = []
    for count in (1, ranks):
        options = {"weights": weights, **METHODS["triforce"]}
        with engine(tmp_path / "m.gguf", count, "both", **options) as ours:
            texts.append(ours.generate(random_ids(PROMPT), greedy(NEW)).token_ids)
            layer = ours.runtime.weights.layouts[0]
    assert texts[0] == texts[1]
    if weights == "stored":
        assert layer.formats["o"].nbytes < 64 * 192, "at most half of 192 columns, in 8 bits"


@pytest.mark.parametrize(
    ("kind", "weights"),
    [*product(("Q4_0", "Q8_0"), ("stored", "dense")), ("Q6_K", "split")],
)
def test_quantised_weights(tmp_path, leaders, kind: str, weights: str) -> None:
    # Each rank's columns are whole blocks.
    large = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    model = make_model("llama", tmp_path, **(large if kind == "Q6_K" else {}))
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    texts = []
    for ranks in (1, 2):
        with engine(tmp_path / "m.gguf", ranks, "both", weights=weights) as ours:
            texts.append(ours.generate(random_ids(PROMPT), greedy(NEW)).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.first
@pytest.mark.parametrize("placement", ["resident", "weights-one-slot"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_matrix_that_one_rank_cannot_split_is_dense_there(
    tmp_path, leaders, rank: int, placement: str
) -> None:
    """All ranks start over, and what they say is what they say with dense weights."""
    model = make_model("llama", tmp_path)
    own = slice(0, 64) if rank == 0 else slice(64, 96)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, own][:, ::2] = 1e-20
    model.save_pretrained(tmp_path)
    options, texts, prompt = {"dtype": "bfloat16", **METHODS["speculative"]}, [], random_ids(PROMPT)
    for weights in ("dense", "split"):
        warns = pytest.warns(RuntimeWarning, match="is not split") if weights == "split" else None
        with (
            warns or nullcontext(),
            engine(tmp_path, 2, placement, weights=weights, **options) as ours,
        ):
            texts.append(ours.generate(prompt, greedy(NEW)).token_ids)
            down = ours.runtime.weights.layouts[1].formats["down"]
    assert texts[0] == texts[1]
    assert down.split == (rank == 1), "the first rank's part"


@pytest.mark.parametrize("placement", ["resident", "weights"])
def test_experts_split_each_for_itself(tiny, leaders, placement: str) -> None:
    """Each rank has columns of every expert, and no number of them is lost."""
    path, _ = tiny("qwen3_moe")
    logprobs = []
    for weights in ("dense", "split-experts"):
        with engine(path, 2, placement, dtype="bfloat16", weights=weights) as ours:
            result = ours.generate(random_ids(PROMPT), replace(greedy(NEW), logprobs=3))
            logprobs.append((result.token_ids, result.logprobs))
    assert logprobs[0] == logprobs[1]


def test_fp8(tmp_path, leaders) -> None:
    model = make_model("qwen3", tmp_path, **FP8_SIZES)
    quantise(tmp_path, model)
    prompt = random_ids(PROMPT)
    with engine(tmp_path, 2, "weights", weights="stored") as ours:
        result = ours.generate(prompt, greedy(NEW))
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))


@pytest.mark.parametrize("way", ["awq", "gptq", "w4a16-asym"])
def test_integers_of_4_bits(tmp_path, leaders, way: str) -> None:
    model = make_model("qwen3", tmp_path, **FP8_SIZES | {"intermediate_size": 512})
    to_integers(tmp_path, model, way)
    prompt = random_ids(PROMPT)
    with engine(tmp_path, 2, "weights", weights="stored") as ours:
        result = ours.generate(prompt, greedy(NEW))
        layer = ours.runtime.weights.layouts[0]
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))
    assert layer.formats["down"].nbytes < 128 * 256 * 5 / 8, "half of the columns"


@pytest.mark.parametrize("placement", ["resident", "both"])
def test_experts_in_mxfp4(tmp_path, leaders, placement: str) -> None:
    """Rows of gates and up projections alternate in these files, and one rank adds the biases."""
    model = make_model("gpt-oss-moe", tmp_path)
    prompt = random_ids(PROMPT)
    with engine(tmp_path, 2, placement, weights="stored", **METHODS["triforce"]) as ours:
        result = ours.generate(prompt, greedy(NEW))
        layer = ours.runtime.weights.layouts[0]
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))
    assert layer.formats["experts_down"].nbytes == 8 * 64 * 64 * 17 // 32, "64 of 96 columns"


@pytest.mark.parametrize("method", METHODS)
def test_a_coupled_seeds_text_is_that_of_one_rank(tiny, leaders, method: str) -> None:
    path, _ = tiny("qwen3")
    params = SamplingParams(NEW, temperature=0.8, top_p=0.95, seed=5)
    texts = []
    for ranks in (1, 2):
        with engine(path, ranks, "kv", accept="coupled", **METHODS[method]) as ours:
            texts.append(ours.generate(random_ids(PROMPT), params).token_ids)
    assert texts[0] == texts[1]


def test_a_small_model_drafts_on_the_first_rank_alone(tiny, leaders) -> None:
    path, model = tiny("llama")
    prompt = random_ids(PROMPT)
    with engine(path, 2, "kv", draft=tiny("llama-mqa")[0], **METHODS["triforce"]) as ours:
        result = ours.generate(prompt, greedy(NEW))
    assert result.stats["levels"] == ["model", "retrieval", "target"]
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))


@pytest.mark.first
@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("kv", {"method": "speculative"}),
        ("both", {"method": "speculative"}),
        ("kv", {"budget": 16}),
        ("kv", {"budget": 16, "draft_kv": "int8"}),
    ],
)
def test_a_tree_is_verified_by_all_ranks(tiny, leaders, placement: str, options: dict) -> None:
    """A tree of the drafter, or one that the retrieval level grows on all ranks."""
    path, model = tiny("llama")
    prompt, options = random_ids(PROMPT), {"tree": 11, **options}
    with engine(path, 2, placement, draft=tiny("llama-mqa")[0], **options) as ours:
        result = ours.generate(prompt, greedy(NEW))
        again = ours.generate(prompt, greedy(NEW))
    assert result.stats["draft_tokens"]["trees"]
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))
    assert again.token_ids == result.token_ids


def test_two_sums_a_layer_and_one_of_what_is_looked_up(tiny, leaders) -> None:
    path, _ = tiny("llama")
    with engine(path, 2, "kv", **METHODS["triforce"]) as ours:
        ours.generate(random_ids(PROMPT), greedy(NEW))
    leader = leaders[0]
    forwards = sum(leader.calls.count(kind) for kind in (Prefill, RunPass, Draft))
    assert leader.sums == forwards * (2 * 3 + 1)
    assert leader.gathers == forwards


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_streams_its_share(tmp_path, leaders, ranks: int) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_key_value_heads": 4}
    make_model("llama", tmp_path, **sizes)
    streamed = []
    for count in (1, ranks):
        with engine(tmp_path, count, "both", method="autoregressive") as ours:
            result = ours.generate(random_ids(PROMPT), greedy(20))
        each = result.stats.get("ranks") or [result.stats["link"]]
        streamed.append([rank["bytes_to_device"] for rank in each])
    (whole,), shares = streamed
    assert len(shares) == ranks
    for share in shares:
        assert share == pytest.approx(whole / ranks, rel=0.02)


def test_ranks_interrupt_together(tiny, leaders) -> None:
    path, _ = tiny("llama")
    with engine(path, 2, "kv") as ours:
        prompt = random_ids(PROMPT)
        whole = ours.generate(prompt, greedy(NEW)).token_ids
        stops = []

        def stop_at_second(what: str, done: int, count: int) -> None:
            if done == 2 and not stops:
                stops.append(done)
                ours.interrupt()

        ours.progress = stop_at_second
        cut = ours.generate(prompt, greedy(NEW), reuse=False)
        assert (cut.finish_reason, cut.token_ids) == ("interrupted", [])
        assert ours.generate(prompt, greedy(NEW)).token_ids == whole


def test_another_model_of_the_same_shape_is_told_apart(tmp_path) -> None:
    prints = []
    for scale in (0.3, 0.4, 0.3):
        make_model("llama", tmp_path, initializer_range=scale)
        with closing(open_checkpoint(tmp_path)) as checkpoint:
            prints.append(checkpoint.fingerprint)
    assert prints[0] == prints[2] != prints[1]


def test_ranks_that_hold_another_text_are_found_out(tiny, leaders) -> None:
    """A planted fault: a rank is fed one token wrongly."""
    path, _ = tiny("llama")
    with engine(path, 2, "kv", method="autoregressive") as ours:
        ours.generate(random_ids(PROMPT), greedy(4))
        follower = leaders[0].followers[0]
        hear, heard = follower.hear, []

        def wrong() -> Call:
            call = hear()
            heard.append(type(call))
            if heard.count(RunPass) == 2 and isinstance(call, RunPass):
                return replace(call, tokens=call.tokens ^ 1)
            return call

        follower.hear = wrong
        with pytest.raises(RuntimeError):
            ours.generate(random_ids(PROMPT), greedy(8))
        assert isinstance(follower.error, RankError)
        assert "checksum" in str(follower.error)
        follower.error = None


@pytest.mark.parametrize("draft", ["ngram", "{model}"])
def test_the_first_rank_decides_whether_the_retrieval_level_drafts(
    tmp_path, leaders, draft: str
) -> None:
    """It alone has the draft model, above which the level always drafts. Nothing streams."""
    model = make_model("llama", tmp_path, max_position_embeddings=20_000)
    prompt = random_ids(PROMPT)
    options = {"draft": draft.format(model=tmp_path), "draft_tokens": 4, "max_context": 16_384}
    with engine(tmp_path, 2, "resident", **options) as ours:
        assert ours.models.budget
        result = ours.generate(prompt, greedy(NEW))
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))
    assert (result.stats["retrieval"]["steps"] > 0) == (draft != "ngram")
    if draft != "ngram":
        # Its cache has the whole text, on all ranks.
        assert result.stats["acceptance"]["target"] > 0.9
