"""Train a DFlash 2 drafter for SmolLM2-135M in a few minutes, and draft with it over an EMULATED
link.

The drafter begins as the model's last layers. It learns the model's own distributions over the
beginning of Python's manual, of each place of a block, where the tokens before are those of the
text (as selectors of DFlash 2 learn). Prompts, links and comparisons are those of `scripts/bench
mtp_head`.

    python scripts/bench dflash [--minutes 10] [--directory DIR]

Writes benchmarks/results/dflash.json, and model and drafter to DIR if it is given.
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
from bench.mtp_head import OPTIONS, WINDOW, learn, opened
from bench.trained_drafters import measure, tapped_states
from frame import Benchmark, Figures
from triforce_core.model.tokenizing.tokenizer import load_tokenizer

# Layers whose output it takes, its own layers, rows of a block, and rows of its convolutions.
TAPS, DEPTH, ROWS, CONVOLVED = (9, 19, 28), 2, 8, 2
GROUP, RANK, CANDIDATES = 16, 64, 16
# Blocks in a window that are learned at once, the least context of one, and what a place counts
# for each place before it.
BLOCKS, LEAST, FADES = 12, 16, 0.85
# A token that the manual does not contain.
MASK = 3


class Convolutions(torch.nn.Module):
    """The convolutions around attention or an MLP, which change nothing at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, CONVOLVED, width))
        self.base_kernel.data[:, 0] = 1
        outputs = 2 * CONVOLVED * width // GROUP
        self.kernel_projection = torch.nn.Linear(width, outputs, bias=False)
        torch.nn.init.zeros_(self.kernel_projection.weight)

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weights of rows, [..., 2, taps, width]."""
        computed = self.kernel_projection(x).unflatten(-1, (2, CONVOLVED, -1))
        return self.base_kernel + computed.repeat_interleave(GROUP, -1)

    @staticmethod
    def convolved(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [..., rows, width]. weights: [..., rows, taps, width]"""
        out = weights[..., 0, :] * x
        for tap in range(1, CONVOLVED):
            before = F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
            out = out + weights[..., tap, :] * before
        return out


class Layer(torch.nn.Module):
    """A layer as DFlash 2 publishes it, with a layer of the model at first."""

    def __init__(self, layer: torch.nn.Module, head_dim: int, eps: float) -> None:
        super().__init__()
        layer, self._head_dim = copy.deepcopy(layer), head_dim
        width = layer.input_layernorm.weight.shape[0]
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        for name in ("q_norm", "k_norm"):
            self.self_attn.add_module(name, torch.nn.RMSNorm(head_dim, eps))
        self.attention_conv, self.mlp_conv = Convolutions(width), Convolutions(width)

    def forward(
        self, hidden: torch.Tensor, states: torch.Tensor, rotations: tuple, mask: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [batch, blocks, rows, width]. states: [batch, tokens, width]

        rotations: of the blocks' rows, and of the tokens before these
        mask: [batch, 1, all rows, tokens + all rows], added to scores
        """
        x = self.input_layernorm(hidden)
        weights = self.attention_conv.weights(x)
        x = Convolutions.convolved(x, weights[..., 0, :, :]).flatten(1, 2)
        attention, both = self.self_attn, torch.cat((states, x), 1)
        q, k, v = (
            getattr(attention, f"{name}_proj")(each).unflatten(-1, (-1, self._head_dim))
            for name, each in (("q", x), ("k", both), ("v", both))
        )
        q = rotated(attention.q_norm(q).transpose(1, 2), rotations[0])
        k = rotated(attention.k_norm(k).transpose(1, 2), rotations[1])
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), mask, enable_gqa=True)
        mixed = attention.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(hidden)
        hidden = hidden + Convolutions.convolved(mixed, weights[..., 1, :, :])
        x = self.post_attention_layernorm(hidden)
        weights = self.mlp_conv.weights(x)
        computed = self.mlp(Convolutions.convolved(x, weights[..., 0, :, :]))
        return hidden + Convolutions.convolved(computed, weights[..., 1, :, :])


def rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x: [batch, heads, rows, head_dim]. rotation: cosines and sines, [batch, rows, head_dim]"""
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = (each.unsqueeze(1) for each in rotation)
    return x * cos + rotate_half(x) * sin


class Drafter(torch.nn.Module):
    """A drafter as DFlash 2 publishes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        config, width = model.config, model.config.hidden_size
        size, eps = config.head_dim, config.rms_norm_eps
        self.layers = torch.nn.ModuleList(
            Layer(layer, size, eps) for layer in model.model.layers[-DEPTH:]
        )
        self.fc = torch.nn.Linear(len(TAPS) * width, width, bias=False)
        self.hidden_norm = torch.nn.RMSNorm(width, eps)
        self.norm = copy.deepcopy(model.model.norm)
        self.before = torch.nn.Parameter(torch.randn(config.vocab_size, RANK) * 0.1)
        self.after = torch.nn.Parameter(torch.randn(config.vocab_size, RANK) * 0.1)
        self.gate = torch.nn.Linear(width, RANK, bias=False)
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
        self.config = config


def train(directory: Path, into: Path, tokens: int, seconds: float) -> Iterator[Figures]:
    """Train a drafter for the model of a directory."""
    model = opened(directory)
    torch.manual_seed(0)
    ids = torch.tensor(load_tokenizer(directory).encode(manual(10**7)))[:tokens]
    assert MASK not in ids
    tapped, last = tapped_states(model, ids, [tap + 1 for tap in TAPS])
    used = ids.unique()
    drafter = Drafter(model).requires_grad_(True)
    figures = learn(
        drafter,
        len(ids) - WINDOW - ROWS - 1,
        lambda windows: loss_of(model, drafter, ids, tapped, last, windows, used),
        seconds,
    )
    write(drafter, into)
    yield {"training": {"tokens": tokens, "layers": DEPTH, "rows": ROWS, **figures}}


def loss_of(
    model: torch.nn.Module,
    drafter: Drafter,
    ids: torch.Tensor,
    tapped: torch.Tensor,
    last: torch.Tensor,
    windows: torch.Tensor,
    used: torch.Tensor,
) -> torch.Tensor:
    """Return the cross entropy to the model's distributions of the places of some blocks.

    windows: [batch, tokens] indices of the tokens before the last block
    used: tokens that occur
    """
    batch, rows = len(windows), BLOCKS * ROWS
    states = drafter.hidden_norm(drafter.fc(tapped[windows]))
    begins = torch.stack([LEAST + torch.randperm(WINDOW - LEAST)[:BLOCKS] for _ in windows])
    places = begins[..., None] + torch.arange(ROWS)
    tokens = ids[windows[:, :1, None] + places]
    fed = tokens.clone()
    fed[..., 1:] = MASK
    hidden = model.model.embed_tokens(fed)
    places, every = places.flatten(1), torch.arange(WINDOW).expand(batch, -1)
    both = torch.cat((every, places), 1)
    rotations = tuple(model.model.rotary_emb(states, each) for each in (places, both))
    block = torch.arange(rows) // ROWS
    sees = every[:, None] < begins.repeat_interleave(ROWS, 1)[..., None]
    own = (block[:, None] == block).expand(batch, -1, -1)
    mask = torch.zeros(batch, 1, rows, WINDOW + rows)
    mask.masked_fill_(~torch.cat((sees, own), 2)[:, None], float("-inf"))
    for layer in drafter.layers:
        hidden = layer(hidden, states, rotations, mask)
    normed = drafter.norm(hidden[:, :, 1:])
    head = model.lm_head.weight[used].T
    unary = normed @ head
    gated = drafter.before[tokens[..., :-1]] * drafter.gate(normed)
    joint = unary + gated @ drafter.after[used].T
    with torch.no_grad():
        before = windows[:, :1, None] + begins[..., None] + torch.arange(ROWS - 1)
        target = (last[before] @ head).softmax(-1)
    weights = FADES ** torch.arange(ROWS - 1)
    loss = 0.0
    for logits, share in ((joint, 1.0), (unary, 0.3)):
        each = -(target * logits.log_softmax(-1)).sum(-1)
        loss = loss + share * (each * weights).sum() / (weights.sum() * batch * BLOCKS)
    return loss


def write(drafter: Drafter, into: Path) -> None:
    """Write a drafter as its authors do."""
    renamed = {
        "before": "candidate_selector.predecessor_codebook",
        "after": "candidate_selector.successor_codebook",
        "gate.weight": "candidate_selector.hidden_projection.weight",
    }
    tensors = {
        renamed.get(name, name): each.to(torch.bfloat16).contiguous()
        for name, each in drafter.state_dict().items()
    }
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    config = drafter.config.to_dict() | {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DEPTH,
        "is_causal": False,
        "dflash_config": {
            "block_size": ROWS,
            "mask_token_id": MASK,
            "target_layer_ids": list(TAPS),
            "conv_kernel_size": CONVOLVED,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": CANDIDATES,
        },
    }
    (into / "config.json").write_text(json.dumps(config))


_MEASURE = partial(measure, kind="DFlash drafter", train=train)
main = Benchmark(__doc__, "dflash", _MEASURE, OPTIONS)
