"""The MTP head of a model with residual streams (Qwen3.8-Flash-Next), against transformers' modules
put together as SGLang does.
"""

from __future__ import annotations

import copy
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from float_bounds import assert_within
from head_walks import walk
from helpers import add_head, make_model, random_ids
from oracle import greedy
from safetensors.torch import load_file, save_file

from triforce_core import Engine
from triforce_core.decoding.contexts.text import Text
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.checkpoints.mtp import planned_pieces, shapes_of
from triforce_core.model.known.shapes import read_model

FAMILY = "qwen4_exp-moe"
MIXER = "hyper_connection_mixer."


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, dict]:
    path = tmp_path_factory.mktemp("headed")
    model = make_model(FAMILY, path)
    return path, model, add_head(path, model)


def engine(path: Path, **options: object) -> Engine:
    fixed = {"device": "cpu", "max_context": 200, "dtype": "float32", "draft": "mtp"}
    return Engine.from_pretrained(path, **fixed | options)


class TheirHead:
    """The head in transformers' modules."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        config = copy.deepcopy(model.config)
        # A head sees a window, in which all keys are chosen.
        config.indexer_budget = 4096
        place = config.layer_types.index("indexed_attention")
        self._model, self._tensors = model, tensors
        like = model.model.layers[place]
        self._layer = self._loaded(type(like)(config, place), "mtp.layers.0.")
        mixer = type(model.model.hyper_connection_mixer)(config, use_combine=False)
        self._mixer = self._loaded(mixer, f"mtp.{MIXER}")
        norm = type(self._mixer.hc_norm)
        wide = config.hc_count * config.hidden_size
        self._token_norm = self._loaded(norm(config.hidden_size), "mtp.pre_fc_norm_embedding.")
        self._state_norm = self._loaded(norm(wide), "mtp.pre_fc_norm_hidden.")

    def _loaded(self, module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        own = {k.removeprefix(prefix): v for k, v in self._tensors.items() if k.startswith(prefix)}
        apart = {name: own.pop(name) for name in list(own) if re.search(r"experts\.\d+\.", name)}
        if apart:
            numbers = range(len(apart) // 3)
            gate, up, down = (
                torch.stack([apart[f"mlp.experts.{i}.{kind}.weight"] for i in numbers])
                for kind in ("gate_proj", "up_proj", "down_proj")
            )
            own |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1)}
            own |= {"mlp.experts.down_proj": down}
        module.load_state_dict(own)
        return module.eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of the token after the text, [vocab]: every pair with the model's own streams."""
        inner, seen = self._model.model, []
        hook = inner.layers[-1].register_forward_hook(lambda *each: seen.append(each[2]))
        inner(torch.tensor([tokens]))
        hook.remove()
        states = seen[0][:, :-1]
        embedded = inner.embed_tokens(torch.tensor([tokens[1:]]))
        token = self._token_norm(embedded) @ self._tensors["mtp.fc_embedding.weight"].T
        streams = self._state_norm(states).unflatten(-1, (self._model.config.hc_count, -1))
        joined = streams @ self._tensors["mtp.fc_hidden.weight"].T + token.unsqueeze(-2)
        count = len(tokens) - 1
        places = torch.arange(1, len(tokens))[None]
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        angles = inner.rotary_emb(embedded, places.expand(3, 1, -1))
        hidden = self._layer(joined.flatten(2), position_embeddings=angles, attention_mask=mask)
        return self._model.lm_head(self._mixer(hidden))[0, -1]


def test_the_head_computes_what_transformers_modules_do(headed) -> None:
    """After prefills of any length, passes that keep some of their rows, and cuts."""
    path, model, tensors = headed
    theirs, count = TheirHead(model, tensors), 0
    with engine(path, method="speculative", draft_tokens=6) as ours:
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            exact = theirs.logits(text)
            assert_within(found, exact, 1e-4 * float(exact.abs().max()))
            # A token of its own, which the next text forgets.
            drafter.forward(torch.tensor([7]))
            count += 1
    assert count == 15


@pytest.mark.parametrize("run", [{"draft_tokens": 6}, {"tree": 13}, {}])
def test_no_token_depends_on_the_head(headed, run: dict[str, int]) -> None:
    path, _, _ = headed
    prompt = random_ids(50)
    with engine(path, draft="none") as plain:
        expected = plain.generate(prompt, greedy(40)).token_ids
    with engine(path, method="speculative", **run) as ours:
        result = ours.generate(prompt, greedy(40))
        assert result.stats["levels"][0] == "mtp"
    assert result.token_ids == expected


def test_a_head_is_planned_without_the_index_of_a_layer(headed) -> None:
    path, _, _ = headed
    with closing(open_checkpoint(path)) as checkpoint:
        planned = planned_pieces(checkpoint.config, checkpoint.pieces)
        rows, _ = shapes_of(checkpoint.mtp_head.config)["qkv"]
        assert sum(count for count, _ in planned("layers.0.qkv")) == rows


def test_a_head_of_two_layers_is_not_known(headed, tmp_path: Path) -> None:
    path, _, _ = headed
    shutil.copytree(path, tmp_path / "model")
    tensors, first = load_file(path / "model.safetensors"), "mtp.layers.0."
    second = {
        name.replace(first, "mtp.layers.1."): each.clone()
        for name, each in tensors.items()
        if name.startswith(first)
    }
    save_file(tensors | second, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with closing(open_checkpoint(tmp_path / "model")) as checkpoint:
        assert checkpoint.mtp_head is None


def test_a_head_that_lacks_a_tensor_does_not_draft(headed, tmp_path: Path) -> None:
    path, _, _ = headed
    assert read_model(str(path)).has_head
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    del tensors["mtp.fc_hidden.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with engine(tmp_path, draft="auto", method="speculative") as ours:
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "ngram"
    assert not read_model(str(tmp_path)).has_head
