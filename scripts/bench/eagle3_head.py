"""Train an EAGLE-3 head for SmolLM2-135M in a few minutes, and draft with it over an EMULATED link.

The head begins as the model's last layer. It learns the model's own distributions over the
beginning of Python's manual, for the next tokens, of which later ones follow its own states
(training-time test; Li et al., 2025), and knows the tokens of that text alone. Prompts, links and
comparisons are those of `scripts/bench mtp_head`.

    python scripts/bench eagle3_head [--minutes 10] [--directory DIR]

Writes benchmarks/results/eagle3_head.json, and model and head to DIR if it is given.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from bench.material import manual
from bench.mtp_head import LAYERS, OPTIONS, WINDOW, learn, opened
from bench.trained_drafters import measure, tapped_states
from frame import Benchmark, Figures
from triforce_core.model.tokenizing.tokenizer import load_tokenizer

TAPS = 2, LAYERS // 2, LAYERS - 3
# Tokens behind a state of the model that are learned, all but the first with the head's own states.
STEPS = 3


class Head(torch.nn.Module):
    """A head as EAGLE-3 publishes it, with the model's layer at first."""

    def __init__(self, model: torch.nn.Module, used: torch.Tensor) -> None:
        """used: tokens that the head knows"""
        super().__init__()
        config, width = model.config, model.config.hidden_size
        self.layer = copy.deepcopy(model.model.layers[-1])
        self.fc = torch.nn.Linear(len(TAPS) * width, width, bias=False)
        self.hidden_norm = copy.deepcopy(self.layer.input_layernorm)
        self.norm = copy.deepcopy(model.model.norm)
        self.lm_head = torch.nn.Linear(width, len(used), bias=False)
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
            self.lm_head.weight.copy_(model.lm_head.weight[used])
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.layer.self_attn, name)
                new = torch.nn.Linear(2 * width, old.out_features, bias=False)
                new.weight.mul_(0.1)[:, width:] += old.weight
                setattr(self.layer.self_attn, name, new)
        self.config = config

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, rotation: tuple, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the next states [batch, tokens, hidden]."""
        both = (self.layer.input_layernorm(embedded), self.hidden_norm(states))
        mixed, _ = self.layer.self_attn(
            torch.cat(both, -1), position_embeddings=rotation, attention_mask=mask
        )
        hidden = states + mixed
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))


def train(directory: Path, into: Path, tokens: int, seconds: float) -> Iterator[Figures]:
    """Train a head for the model of a directory."""
    model = opened(directory)
    torch.manual_seed(0)
    ids = torch.tensor(load_tokenizer(directory).encode(manual(10**7)))[:tokens]
    used = ids.unique()
    tapped, last = tapped_states(model, ids, TAPS)
    head = Head(model, used).requires_grad_(True)
    rows = model.lm_head.weight[used]
    figures = learn(
        head,
        len(ids) - WINDOW - STEPS - 1,
        lambda windows: loss_of(model, head, ids, tapped, last, windows, rows),
        seconds,
    )
    write(head, used, into)
    yield {"training": {"tokens": tokens, "tokens_known": len(used), **figures}}


def loss_of(
    model: torch.nn.Module,
    head: Head,
    ids: torch.Tensor,
    tapped: torch.Tensor,
    last: torch.Tensor,
    windows: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return the cross entropy to the model's distributions of the next tokens.

    windows: [batch, tokens] indices of the states that are given
    rows: rows of the output matrix of the tokens that occur
    """
    states, losses = head.fc(tapped[windows]), []
    mask = torch.full((WINDOW, WINDOW), float("-inf")).triu(1)[None, None]
    for step in range(1, STEPS + 1):
        embedded = model.model.embed_tokens(ids[windows + step])
        places = (torch.arange(WINDOW) + step)[None].expand(len(windows), -1)
        rotation = model.model.rotary_emb(embedded, places)
        states = head(embedded, states, rotation, mask)
        with torch.no_grad():
            target = (last[windows + step] @ rows.T).softmax(-1)
        logits = head.lm_head(head.norm(states))
        losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1)))
    return sum(loss * 0.7**step for step, loss in enumerate(losses))


def write(head: Head, used: torch.Tensor, into: Path) -> None:
    """Write a head as SpecForge does."""
    renamed = {"layer.": "midlayer.", "hidden_norm.": "midlayer.hidden_norm."}
    tensors = {}
    for name, tensor in head.state_dict().items():
        old = next((prefix for prefix in renamed if name.startswith(prefix)), "")
        tensors[renamed.get(old, "") + name.removeprefix(old)] = tensor.to(torch.bfloat16)
    into.mkdir()
    vocab = head.config.vocab_size
    known = {
        "d2t": used - torch.arange(len(used)),
        "t2d": torch.isin(torch.arange(vocab), used),
    }
    save_file(
        {name: each.contiguous() for name, each in tensors.items()} | known,
        into / "model.safetensors",
        {"format": "pt"},
    )
    config = head.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(used),
        "tie_word_embeddings": False,
    }
    (into / "config.json").write_text(json.dumps(config))


_MEASURE = partial(measure, kind="EAGLE-3 head", train=train)
main = Benchmark(__doc__, "eagle3_head", _MEASURE, OPTIONS)
