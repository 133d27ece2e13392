"""Mapping from this runtime's tensor names to those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import LayerSpec
from triforce_core.model.share import Window
from triforce_offload.checkpoint.source import WHOLE, Corner


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint that makes up some rows of a tensor of the model.

    rows: number of rows
    heads: if not 0, the rows are stored with the halves of each head interleaved, as in llama.cpp
    corner: first row and column of the part that is read; it is as wide as the model's tensor
    """

    name: str
    rows: int
    heads: int = 0
    corner: Corner = WHOLE

    def within(self, window: Window) -> Piece:
        """Return the part of the piece in a window, which covers whole heads."""
        rows = self.rows if window.rows is None else len(window.rows)
        first = 0 if window.rows is None else window.rows.start
        column = 0 if window.columns is None else window.columns.start
        heads = self.heads * rows // self.rows
        return Piece(self.name, rows, heads, Corner(first, column))


def hf_names(config: ModelConfig) -> Callable[[str], list[Piece]]:
    names = {
        "embedding": "model.embed_tokens.weight",
        "head": "model.embed_tokens.weight" if config.tied else "lm_head.weight",
        "norm": "model.norm.weight",
        "input_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    return _named(config, names, "model.layers.{}.", interleaved=False)


def gguf_names(config: ModelConfig) -> Callable[[str], list[Piece]]:
    names = {
        "embedding": "token_embd.weight",
        "head": "token_embd.weight" if config.tied else "output.weight",
        "norm": "output_norm.weight",
        "input_norm": "attn_norm.weight",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "post_norm": "ffn_norm.weight",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    }
    # For this architecture, llama.cpp rotates neighbouring pairs, and stores q and k accordingly.
    return _named(config, names, "blk.{}.", interleaved=config.family == "llama")


def _named(
    config: ModelConfig, names: Mapping[str, str], prefix: str, *, interleaved: bool
) -> Callable[[str], list[Piece]]:
    """Return a function from `embedding`, `layers.3.qkv`, ... to the pieces of the checkpoint."""
    whole = {
        "embedding": [Piece(names["embedding"], config.vocab)],
        "head": [Piece(names["head"], config.vocab)],
        "norm": [Piece(names["norm"], config.hidden)],
    }
    parts = {
        spec: _layer_pieces(spec, config.hidden, names, interleaved=interleaved)
        for spec in config.distinct_layers
    }

    def lookup(name: str) -> list[Piece]:
        if name in whole:
            return whole[name]
        _, layer, part = name.split(".")
        return [
            Piece(prefix.format(layer) + piece.name, piece.rows, piece.heads)
            for piece in parts[config.layers[int(layer)]][part]
        ]

    return lookup


def _layer_pieces(
    spec: LayerSpec, hidden: int, names: Mapping[str, str], *, interleaved: bool
) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of a layer."""
    mixer, width = spec.mixer, spec.mlp.width
    q_heads, k_heads = (mixer.heads, mixer.kv_heads) if interleaved else (0, 0)

    def projections(suffix: str) -> dict[str, list[Piece]]:
        return {
            "qkv": [
                Piece(f"{names['q']}.{suffix}", mixer.queries, q_heads),
                Piece(f"{names['k']}.{suffix}", mixer.keys, k_heads),
                Piece(f"{names['v']}.{suffix}", mixer.keys),
            ],
            "o": [Piece(f"{names['o']}.{suffix}", hidden)],
            "gate_up": [
                Piece(f"{names['gate']}.{suffix}", width),
                Piece(f"{names['up']}.{suffix}", width),
            ],
            "down": [Piece(f"{names['down']}.{suffix}", hidden)],
        }

    parts = projections("weight")
    parts |= {f"{part}_bias": pieces for part, pieces in projections("bias").items()}
    parts |= {part: [Piece(names[part], hidden)] for part in ("input_norm", "post_norm")}
    parts |= {part: [Piece(names[part], mixer.head_dim)] for part in ("q_norm", "k_norm")}
    return parts
