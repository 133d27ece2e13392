"""MTP heads: they compute what transformers' do, follow whatever is accepted and rejected, and cost
no token, however useless.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from float_bounds import assert_within
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from head_walks import walk
from helpers import BLOCK, PLACEMENTS, add_head, make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy
from safetensors.torch import load_file, save_file

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.drafters.head import HeadDrafter
from triforce_core.loading import execution
from triforce_core.loading.plan_inputs import plan_with_drafter
from triforce_core.model.checkpoints.mtp import MtpHead
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_core.settings import EngineConfig, MethodSettings
from triforce_offload.errors import DoesNotFitError, OutOfDeviceMemoryError, UsageError
from triforce_offload.ranks import Alone

NEW = 40
RUNS = {
    "speculative": {"method": "speculative", "draft_tokens": 6},
    "tree": {"method": "speculative", "tree": 13},
    "any shape": {"method": "speculative"},
    "retrieval": {"budget": 16, "draft_tokens": 12, "inner_draft_tokens": 3},
    "learned": {},
}


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, dict]:
    """A model with a random head, and the head's tensors."""
    path = tmp_path_factory.mktemp("headed")
    model = make_model("qwen3_5", path)
    return path, model, add_head(path, model)


def engine(path: Path, placement: str = "kv-in-part", **options: object) -> Engine:
    fixed = {"device": "cpu", "max_context": 500, "block_tokens": BLOCK, "dtype": "float32"}
    return Engine.from_pretrained(path, **fixed, placement=PLACEMENTS[placement], **options)


class TheirHead:
    """The head as transformers' `MtpLayer` computes it, in float64."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        from transformers.modeling_layers import MtpLayer

        config = copy.deepcopy(model.config)
        self._model, layer = copy.deepcopy(model).double(), model.model.layers[-1]
        if kinds := getattr(config, "layer_types", None):
            layer = model.model.layers[kinds.index("full_attention")]
            config.layer_types = ["full_attention"] * len(kinds)
        # A head has experts, whatever the first layers of a model have.
        config.first_k_dense_replace = 0
        if kinds := getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = ["sparse"] * len(kinds)
        head = MtpLayer(config, type(layer), type(layer.input_layernorm), 0)
        renamed = {
            "mtp.fc.": "eh_proj.",
            "mtp.pre_fc_norm_embedding.": "enorm.",
            "mtp.pre_fc_norm_hidden.": "hnorm.",
            "mtp.norm.": "post_norm.",
            "mtp.layers.0.": "mtp_block.",
        }
        state = {}
        for name, tensor in stacked(tensors).items():
            old = next(prefix for prefix in renamed if name.startswith(prefix))
            state[renamed[old] + name.removeprefix(old)] = tensor
        head.load_state_dict(state)
        self._head = head.double().eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of the token after the text, [vocab]: every pair with the model's own state."""
        model = self._model.model
        states = model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        embedded = model.embed_tokens(torch.tensor([tokens[1:]]))
        places = torch.arange(1, len(tokens))[None]
        count = len(tokens) - 1
        mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        hidden = self._head(
            embedded, states, model.rotary_emb(embedded, places), mask, places, None
        )
        return self._model.lm_head(hidden)[0, -1]


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a head's tensors with its experts in one tensor each, as transformers has them."""
    apart = {name for name in tensors if re.search(r"experts\.\d+\.", name)}
    if not apart:
        return tensors
    layer = "mtp.layers.0.mlp.experts."
    kinds = ("gate_proj", "up_proj", "down_proj")
    count = len(apart) // len(kinds)
    gate, up, down = (
        torch.stack([tensors[f"{layer}{i}.{kind}.weight"] for i in range(count)]) for kind in kinds
    )
    whole = {f"{layer}gate_up_proj": torch.cat((gate, up), 1), f"{layer}down_proj": down}
    return {name: tensors[name] for name in tensors.keys() - apart} | whole


def proposed(drafter: HeadDrafter, text: list[int]) -> torch.Tensor:
    return drafter.forward(drafter.catch_up(Text(text), 5))[0]


def answers(
    path: Path, model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a head's logits and those of transformers', wherever a text has come to."""
    theirs = TheirHead(model, tensors)
    with engine(path, "kv", draft="mtp", method="speculative", draft_tokens=6) as ours:
        for drafter, text in walk(ours):
            yield proposed(drafter, text), theirs.logits(text)
            # Tokens of its own, which the next text forgets.
            drafter.forward(torch.tensor([7]))
            drafter.forward(torch.tensor([8]))


def test_the_head_computes_what_transformers_does(headed) -> None:
    """After prefills of any length, passes that keep some of their rows, and cuts."""
    for found, exact in answers(*headed):
        assert_within(found, exact, 1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("qwen3_5_moe", "apart"),
        ("qwen3_5_moe", "stacked"),
        ("qwen3_5_moe", "gguf"),
        ("qwen3_next-moe", "apart"),
        ("glm4_moe", "apart"),
        ("glm4_moe", "gguf"),
        ("glm4_lite-moe", "apart"),
        ("glm4_lite-moe", "gguf"),
        ("deepseek_v3-moe", "apart"),
    ],
)
def test_so_does_a_head_with_experts(tmp_path, family: str, files: str) -> None:
    """Also where files store the experts of the head otherwise than those of the model."""
    sparse = {"mlp_only_layers": []} if family == "qwen3_next-moe" else {}
    model = make_model(family, tmp_path / "m", **sparse)
    tensors = add_head(tmp_path / "m", model)
    path, file = tmp_path / "m", tmp_path / "m" / "model.safetensors"
    if files == "stacked":
        held = {name: each for name, each in load_file(file).items() if name not in tensors}
        whole = {name: each.contiguous() for name, each in stacked(tensors).items()}
        save_file(held | whole, file, metadata={"format": "pt"})
    if files == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf(model, path, head=stacked(tensors))
    for found, exact in answers(path, model, tensors):
        assert_within(found, exact, 1e-4 * float(exact.abs().max()))
    prompt = random_ids(40, 5)
    with engine(path, draft="mtp", **RUNS["tree"]) as ours:
        found = ours.generate(prompt, greedy(NEW)).token_ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert_equal_but_for_ties(model, prompt, found, theirs[0, 40:].tolist())


def test_of_a_long_text_it_sees_the_first_and_the_recent_pairs(headed) -> None:
    path, _, _ = headed
    with engine(path, "kv", draft="mtp", method="speculative", draft_tokens=6) as ours:
        own = Context(ours.models)
        prompt = random_ids(480, 3)
        own.prefill(prompt, 10, lambda _: None)
        drafter = own.levels.drafter
        text = [*prompt, 5]
        proposed(drafter, text)
        assert drafter._places[:SINKS] == list(range(1, SINKS + 1))
        assert drafter._places[-1] == 480
        assert len(drafter._places) == SINKS + WINDOW
        own.close()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_text_is_that_of_transformers(headed, run: str, tokens: int) -> None:
    path, model, _ = headed
    prompt = random_ids(tokens, tokens)
    with engine(path, draft="mtp", **RUNS[run]) as ours:
        result = ours.generate(prompt, greedy(NEW))
        assert result.stats["levels"][0] == "mtp"
        # Another text, and this one again.
        ours.generate(random_ids(30, 4), greedy(9))
        assert ours.generate(prompt, greedy(NEW)).token_ids == result.token_ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, tokens:].tolist())


def test_a_gguf_file_has_the_same_head(headed, tmp_path) -> None:
    path, model, tensors = headed
    write_gguf(model, tmp_path / "m.gguf", head=tensors)
    found = []
    for file in (path, tmp_path / "m.gguf"):
        with engine(file, draft="mtp", method="speculative", draft_tokens=6) as ours:
            own = Context(ours.models)
            own.prefill(random_ids(60, 2), 10, lambda _: None)
            found.append(proposed(own.levels.drafter, [*own.text.tokens, 5]))
            own.close()
    assert_within(found[1], found[0], 1e-4 * float(found[0].abs().max()))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_head_is_kept_as_stored_where_the_model_is(tmp_path, family: str) -> None:
    model = make_model(family, tmp_path / "m")
    tensors = stacked(add_head(tmp_path / "m", model))
    write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0, head=tensors)
    found, nbytes = [], []
    for weights in ("stored", "dense"):
        options = {"draft": "mtp", "weights": weights, **RUNS["speculative"]}
        with engine(tmp_path / "m.gguf", "kv", **options) as ours:
            own = Context(ours.models)
            own.prefill(random_ids(60, 2), 10, lambda _: None)
            found.append(proposed(own.levels.drafter, [*own.text.tokens, 5]))
            nbytes.append(ours.models.small.store.layouts[0].nbytes)
            own.close()
    assert_within(found[1], found[0], 1e-4 * float(found[0].abs().max()))
    assert nbytes[0] < 0.5 * nbytes[1]


def test_it_is_what_auto_takes_where_there_is_one(headed, tiny, tmp_path) -> None:
    path, _, _ = headed
    with engine(path) as ours:
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "mtp"
        parts = ours.runtime.memory.by_purpose()
        assert parts["drafter cache"] > 0
    with engine(path, draft="ngram") as ours:
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "ngram"
    plain, _ = tiny("qwen3_5")
    with engine(plain) as ours:
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "ngram"
    with pytest.raises(UsageError, match="have no MTP head that is known"):
        engine(plain, draft="mtp")
    with pytest.raises(UsageError, match="for a retrieval level without trees"):
        engine(path, draft="mtp", tree=20)
    with engine(path, tree=20) as ours:
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "ngram"


def test_a_head_that_does_not_fit_or_is_in_part_there_is_left_out(headed, tmp_path) -> None:
    path, _, _ = headed
    fixed = {"device": "cpu", "max_context": 500, "dtype": "float32", "method": "speculative"}

    def levels(memory: int, **options: object) -> list[str]:
        with Engine.from_pretrained(path, **fixed, device_memory=memory, **options) as ours:
            return ours.generate(random_ids(30), greedy(4)).stats["levels"]

    def least(draft: str) -> int:
        low, high = 1 << 10, 1 << 26
        while high - low > 1 << 12:
            middle = (low + high) // 2
            try:
                levels(middle, draft=draft)
                high = middle
            except DoesNotFitError:
                low = middle
        return high

    without, with_head = least("ngram"), least("mtp")
    assert without < with_head
    with pytest.warns(RuntimeWarning, match="does not fit together with its MTP head"):
        assert levels(without)[0] == "ngram"
    assert levels(with_head)[0] == "mtp"
    for name, shape in (("mtp.norm.weight", None), ("mtp.fc.weight", (3, 4))):
        copied = tmp_path / name
        shutil.copytree(path, copied)
        held = load_file(path / "model.safetensors")
        del held[name]
        held |= {} if shape is None else {name: torch.zeros(shape)}
        save_file(held, copied / "model.safetensors", metadata={"format": "pt"})
        with engine(copied) as ours:
            assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "ngram"


def test_a_head_for_which_memory_runs_out_as_it_is_loaded_is_left_out(headed, monkeypatch) -> None:
    def taken_by_another(*arguments: object) -> None:
        raise OutOfDeviceMemoryError("planted")

    monkeypatch.setattr(execution, "WeightStore", taken_by_another)
    path, _, _ = headed
    with (
        pytest.warns(RuntimeWarning, match="does not fit together with its MTP head"),
        engine(path) as ours,
    ):
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "ngram"
    with pytest.raises(OutOfDeviceMemoryError):
        engine(path, draft="mtp")


@pytest.mark.parametrize(
    ("draft", "with_head", "without", "kept"),
    [
        ("auto", 0.2, 0.1, False),
        ("auto", 0.1, 0.2, True),
        ("mtp", 0.2, 0.1, True),
        # Not chosen by time: on a CPU, or on a card that nobody knows.
        ("auto", None, None, True),
    ],
)
def test_auto_leaves_a_head_out_whose_plan_is_slower(draft, with_head, without, kept) -> None:
    def plan(drafter: MtpHead | None) -> Resolved:
        return Resolved(None, None, 0, without if drafter is None else with_head)

    head = object.__new__(MtpHead)
    config = EngineConfig(method=MethodSettings(draft=draft))
    inputs = SimpleNamespace(ranks=Alone(), config=config, plan=plan)
    chosen, drafter = plan_with_drafter(inputs, head)
    assert (drafter is head) == kept
    assert chosen.seconds_per_token == (with_head if kept else without)
    assert chosen.leaves_head_out != kept


def test_a_saved_context_goes_on_without_the_states_that_the_head_needs(headed, tmp_path) -> None:
    path, _, _ = headed
    prompt, params = random_ids(80), SamplingParams(20, temperature=0)
    with engine(path, draft="mtp") as first:
        first.generate(prompt, SamplingParams(1))
        first.save_context(tmp_path / "saved")
        expected = first.generate([*prompt, 9], params).token_ids
    with engine(path, draft="mtp") as other:
        assert other.load_context(tmp_path / "saved").tokens == 80
        assert other.generate([*prompt, 9], params).token_ids == expected
