"""Random DFlash drafters, as published files hold them, and what they compute in float64."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F
from float64_layers import EPS, rms_norm, rotated
from gguf_files import in_blocks
from safetensors.torch import save_file

# What llama.cpp calls tensors, in the order in which the names are replaced.
_IN_GGUF = {
    "layers.": "blk.",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": "selector_hidden",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{each}_norm": f"attn_{each}_norm" for each in "qk"},
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    "hidden_norm.": "enc.output_norm.",
}


@dataclass(frozen=True)
class Made:
    """How a drafter is made.

    rows: number of rows of a block
    layers: number of layers
    taps: layers of the model whose output it takes; None for those that it takes if none is named
    kinds: what `layer_types` says; None without it
    causal: what `is_causal` says; None without it
    window: what `sliding_window` says
    second: whether it is one of DFlash 2
    group: number of channels that share weights of a convolution
    convolved: number of rows that a convolution covers
    best: number of candidates of a position
    factors: of embeddings and of logits
    cap: of logits
    biases: whether attention has biases
    more: further fields of its config
    """

    rows: int = 6
    layers: int = 2
    taps: tuple[int, ...] | None = (0, 1)
    kinds: tuple[str, ...] | None = None
    causal: bool | None = None
    window: int | None = None
    second: bool = False
    group: int = 8
    convolved: int = 2
    best: int = 5
    rank: int = 12
    factors: tuple[float, float] = (1.0, 1.0)
    cap: float | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    wide: int = 80
    theta: float = 1e4
    mask: int = 96
    biases: bool = False
    more: dict[str, object] = field(default_factory=dict)


SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {
    "first": Made(),
    "usual taps": Made(taps=None, rows=4, layers=1, kv_heads=1),
    "causal windows": Made(kinds=(SLIDING, SLIDING), window=512),
    "both kinds": Made(kinds=(SLIDING, FULL), window=512),
    "biases": Made(biases=True),
    "second": Made(rows=8, second=True, kinds=(SLIDING, SLIDING), window=512, causal=False),
    "second, scaled": Made(
        rows=5, second=True, convolved=3, best=9, factors=(1.5, 0.75), cap=3.0, theta=5e5
    ),
}


def _gguf_name(name: str) -> str:
    for ours, theirs in _IN_GGUF.items():
        name = name.replace(ours, theirs)
    return "output_norm.weight" if name == "norm.weight" else name


class RandomDrafter:
    """A random drafter for a model. directory: where its files are"""

    def __init__(self, model: torch.nn.Module, directory: Path, made: Made, seed: int = 0) -> None:
        self.directory = directory
        self.made = made
        self._model = copy.deepcopy(model).double()
        config, generator = model.config, torch.Generator().manual_seed(seed)
        self._hidden = hidden = config.hidden_size
        self._vocab = vocab = config.vocab_size
        count = config.num_hidden_layers
        # Of a single layer: the one in the middle.
        self._taps = made.taps or (count // 2,)
        queries, keys = made.heads * made.head_dim, made.kv_heads * made.head_dim
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (made.head_dim,),
            "self_attn.k_norm.weight": (made.head_dim,),
            "mlp.gate_proj.weight": (made.wide, hidden),
            "mlp.up_proj.weight": (made.wide, hidden),
            "mlp.down_proj.weight": (hidden, made.wide),
        }
        if made.biases:
            layer |= {f"self_attn.{name}_proj.bias": (queries,) for name in "q"}
            layer |= {f"self_attn.{name}_proj.bias": (keys,) for name in "kv"}
            layer["self_attn.o_proj.bias"] = (hidden,)
        shapes = {
            "fc.weight": (hidden, len(self._taps) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        if made.second:
            for part in ("attention_conv", "mlp_conv"):
                layer[f"{part}.base_kernel"] = (2, made.convolved, hidden)
                computed = 2 * made.convolved * hidden // made.group
                layer[f"{part}.kernel_projection.weight"] = (computed, hidden)
            shapes |= {
                "candidate_selector.predecessor_codebook": (vocab, made.rank),
                "candidate_selector.successor_codebook": (vocab, made.rank),
                "candidate_selector.hidden_projection.weight": (made.rank, hidden),
            }
        for index in range(made.layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        self.tensors = {
            name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
            for name, shape in shapes.items()
        }
        self._write()

    def _write(self) -> None:
        made = self.made
        inner: dict[str, object] = {"mask_token_id": made.mask, "block_size": made.rows}
        if made.taps is not None:
            inner["target_layer_ids"] = list(made.taps)
        if made.second:
            inner |= {"conv_kernel_size": made.convolved, "conv_group_size": made.group}
            inner |= {"selector_rank": made.rank, "selector_top_k": made.best}
            inner |= {"input_embedding_scale": made.factors[0]}
            inner |= {"output_multiplier": made.factors[1], "final_logit_softcapping": made.cap}
        config: dict[str, object] = {
            "architectures": ["DFlash2DraftModel" if made.second else "DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self._hidden,
            "num_hidden_layers": made.layers,
            "num_attention_heads": made.heads,
            "num_key_value_heads": made.kv_heads,
            "head_dim": made.head_dim,
            "intermediate_size": made.wide,
            "rms_norm_eps": EPS,
            "rope_theta": made.theta,
            "max_position_embeddings": 4096,
            "vocab_size": self._vocab,
            "hidden_act": "silu",
            "num_target_layers": self._model.config.num_hidden_layers,
            "dflash_config": inner,
        }
        optional = {
            "layer_types": made.kinds and list(made.kinds),
            "is_causal": made.causal,
            "attention_bias": made.biases or None,
            "sliding_window": made.window,
        }
        config |= {name: value for name, value in optional.items() if value is not None}
        self.directory.mkdir(exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(config | made.more))
        save_file(self.tensors, self.directory / "model.safetensors", metadata={"format": "pt"})

    def write_gguf(
        self,
        path: Path,
        kind: gguf.GGMLQuantizationType,
        changed: dict[str, object] | None = None,
    ) -> Path:
        """Write a GGUF file as llama.cpp's converter and quantiser do, with matrices in a type
        where their rows are long enough; from then on the drafter computes with its numbers.

        changed: fields that the file has instead of the usual ones; None for those that it lacks
        """
        made, writer = self.made, gguf.GGUFWriter(path, "dflash")
        writer.add_embedding_length(self._hidden)
        writer.add_feed_forward_length(made.wide)
        writer.add_block_count(made.layers)
        writer.add_head_count(made.heads)
        writer.add_head_count_kv(made.kv_heads)
        writer.add_key_length(made.head_dim)
        writer.add_layer_norm_rms_eps(EPS)
        writer.add_rope_freq_base(made.theta)
        writer.add_context_length(4096)
        writer.add_uint32("tokenizer.ggml.mask_token_id", made.mask)
        writer.add_uint32("dflash.block_size", made.rows)
        writer.add_array("dflash.target_layers", [tapped + 1 for tapped in self._taps])
        writer.add_bool("dflash.attention.causal", False)
        if made.kinds:
            writer.add_uint32("dflash.attention.sliding_window", made.window)
            slides = [each == SLIDING for each in made.kinds]
            writer.add_array("dflash.attention.sliding_window_pattern", slides)
        if made.second:
            writer.add_uint32("dflash.conv_kernel_size", made.convolved)
            writer.add_uint32("dflash.conv_group_size", made.group)
            writer.add_uint32("dflash.selector_rank", made.rank)
            writer.add_uint32("dflash.selector_top_k", made.best)
        for name, tensor in self.tensors.items():
            array = tensor.numpy()
            blocks = array.ndim == 2 and array.shape[1] % 32 == 0
            if blocks:
                data = in_blocks(array, kind)
                array = gguf.quants.dequantize(data, kind)
                writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
            else:
                writer.add_tensor(_gguf_name(name), array)
            self.tensors[name] = torch.from_numpy(array.copy())
        fields = writer.kv_data[0]
        for name, value in (changed or {}).items():
            fields.pop(f"dflash.{name}", None)
            match value:
                case list():
                    writer.add_array(f"dflash.{name}", value)
                case bool():
                    writer.add_bool(f"dflash.{name}", value)
                case float():
                    writer.add_float32(f"dflash.{name}", value)
                case str():
                    writer.add_string(f"dflash.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def get_parameter(self, name: str) -> torch.Tensor:
        """Its numbers, for what writes quantised files."""
        return self.tensors[name]

    @torch.no_grad()
    def logits(
        self, tokens: list[int], after: list[int], *, seen: int | None = None
    ) -> torch.Tensor:
        """Of the token behind a text and some drafted tokens, [vocab] float64.

        after: drafted tokens that follow the text
        seen: number of the text's tokens with states that are seen; None for all
        """
        made, w = self.made, {name: each.double() for name, each in self.tensors.items()}
        held = self._model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        taps = [held.hidden_states[tapped + 1][0] for tapped in self._taps]
        states = rms_norm(torch.cat(taps, 1) @ w["fc.weight"].T, w["hidden_norm.weight"])
        first = 0 if seen is None else max(0, len(states) - seen)
        states = states[first:]
        block = torch.tensor([tokens[-1], *[made.mask] * (made.rows - 1)])
        embedding = self._model.model.embed_tokens
        hidden = embedding.weight[block] * made.factors[0] if made.second else embedding(block)
        places = torch.arange(first, len(tokens) - 1 + made.rows)
        for index in range(made.layers):
            layer = {
                name.removeprefix(f"layers.{index}."): each
                for name, each in w.items()
                if name.startswith(f"layers.{index}.")
            }
            hidden = self._through(layer, hidden, states, places, self._causal(index))
        normed = rms_norm(hidden, w["norm.weight"])[1 + len(after)]
        unary = self._model.lm_head.weight @ normed * made.factors[1]
        if made.cap is not None:
            unary = made.cap * torch.tanh(unary / made.cap)
        if not made.second:
            return unary
        best = unary.topk(made.best)
        gate = w["candidate_selector.hidden_projection.weight"] @ normed
        before = w["candidate_selector.predecessor_codebook"][[*tokens, *after][-1]]
        vectors = w["candidate_selector.successor_codebook"][best.indices]
        logits = torch.full_like(unary, float("-inf"))
        logits[best.indices] = best.values + vectors @ (before * gate)
        return logits

    def _causal(self, index: int) -> bool:
        if self.made.causal is not None:
            return self.made.causal
        return bool(self.made.kinds) and self.made.kinds[index] == SLIDING

    def _through(
        self,
        w: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        states: torch.Tensor,
        places: torch.Tensor,
        causal: bool,
    ) -> torch.Tensor:
        """A layer over a block: [rows, hidden]."""
        made, rows = self.made, len(hidden)
        x = rms_norm(hidden, w["input_layernorm.weight"])
        x, behind = self._convolved(w, "attention_conv", x)
        both = torch.cat((states, x))
        q, k, v = (
            self._product(w, f"self_attn.{name}_proj", each).view(len(each), -1, made.head_dim)
            for name, each in (("q", x), ("k", both), ("v", both))
        )
        q = rotated(rms_norm(q, w["self_attn.q_norm.weight"]), places[-rows:], made.theta)
        k = rotated(rms_norm(k, w["self_attn.k_norm.weight"]), places, made.theta)
        visible = torch.ones(rows, len(both), dtype=torch.bool)
        if causal:
            visible = visible.tril(len(both) - rows)
        mixed = F.scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in (q, k, v)), attn_mask=visible, enable_gqa=True
        )
        mixed = self._product(w, "self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
        hidden = hidden + behind(mixed)
        x = rms_norm(hidden, w["post_attention_layernorm.weight"])
        x, behind = self._convolved(w, "mlp_conv", x)
        gate, up = (x @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + behind((F.silu(gate) * up) @ w["mlp.down_proj.weight"].T)

    def _convolved(self, w: dict[str, torch.Tensor], part: str, x: torch.Tensor):
        """What goes in, and the convolution of what comes out."""
        if not self.made.second:
            return x, lambda y: y
        taps, group = self.made.convolved, self.made.group
        computed = (x @ w[f"{part}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)

        def side(y: torch.Tensor, which: int) -> torch.Tensor:
            out = torch.zeros_like(y)
            for row in range(len(y)):
                for tap in range(min(taps, row + 1)):
                    kernel = w[f"{part}.base_kernel"][which, tap]
                    kernel = kernel + computed[row, which, tap].repeat_interleave(group)
                    out[row] += kernel * y[row - tap]
            return out

        return side(x, 0), lambda y: side(y, 1)

    @staticmethod
    def _product(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
