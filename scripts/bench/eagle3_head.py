"""Train an EAGLE-3 head for SmolLM2-135M in a few minutes, and draft with it over an EMULATED link.

The head begins as the model's last layer. It learns the model's own distributions over the
beginning of Python's manual, for the next tokens, of which later ones follow its own states
(training-time test; Li et al., 2025), and knows the tokens of that text alone. Prompts, links and
comparisons are those of `scripts/bench mtp_head`.

    python scripts/bench eagle3_head [--minutes 10] [--directory DIR]

Writes benchmarks/results/eagle3_head.json, and model and head to DIR if it is given.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from bench.make_shallow_draft import make_shallow_draft
from bench.material import manual, model_file
from bench.mtp_head import LAYERS, OPTIONS, WINDOW, compare, learn
from frame import Benchmark, Figures
from triforce_core.model.tokenizing.tokenizer import load_tokenizer

TAPS = 2, LAYERS // 2, LAYERS - 3
# Tokens behind a state of the model that are learned, all but the first with the head's own states.
STEPS = 3


def ways(head: Path) -> dict[str, dict[str, Any]]:
    speculative = {"method": "speculative", "draft": str(head)}
    return {
        "plain": {"method": "autoregressive"},
        "n-grams": {"method": "speculative", "draft": "ngram"},
        "EAGLE-3 head, chains": {**speculative, "tree": "off"},
        "EAGLE-3 head, trees": {**speculative, "tree": 24},
        "EAGLE-3 head": speculative,
        "retrieval level, n-grams": {"draft": "ngram", "budget": 1024},
        "retrieval level, EAGLE-3 head": {"draft": str(head), "budget": 1024},
    }


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(args.directory or folder)
        model, head = directory / "model", directory / "head"
        if not head.exists():
            directory.mkdir(parents=True, exist_ok=True)
            make_shallow_draft(model_file(), model, LAYERS, torch.bfloat16)
            yield from train(model, head, args.training_tokens, args.minutes * 60)
        yield from compare(model, args, ways(head))


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
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    ).eval()
    model.requires_grad_(False)
    torch.manual_seed(0)
    ids = torch.tensor(load_tokenizer(directory).encode(manual(10**7)))[:tokens]
    used = ids.unique()
    tapped, last = states_of(model, ids)
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


@torch.no_grad()
def states_of(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states that enter the tapped layers, side by side, and the last ones, over
    pieces of 1,024 tokens.
    """
    tapped, last = [], []
    for piece in ids.split(1024):
        states = model.model(piece[None], output_hidden_states=True).hidden_states
        tapped.append(torch.cat([states[tap][0] for tap in TAPS], 1))
        last.append(states[-1][0])
    return torch.cat(tapped), torch.cat(last)


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


main = Benchmark(__doc__, "eagle3_head", measure, OPTIONS)
