"""Random EAGLE-3 heads, as published files hold them, and what they compute in float64."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from float64_layers import EPS, rms_norm, rotated
from safetensors.torch import save_file


@dataclass(frozen=True)
class Made:
    """How a head is made.

    hidden: its width; None for the model's
    tokens: number of the model's tokens that it knows; None for all
    embeds: whether it has an embedding of its own
    norms_residual, norms_output: see `joins.Eagle3`
    tap_norm: "norm_before_fc", "fc_norm" or ""
    tapped: layers that its config names; None for none
    style: who wrote the files: "specforge", "speculators" or "eagle" (a pytorch_model.bin)
    """

    hidden: int | None = None
    tokens: int | None = 31
    embeds: bool = False
    norms_residual: bool = False
    norms_output: bool = False
    tap_norm: str = ""
    tapped: tuple[int, ...] | None = None
    style: str = "specforge"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    wide: int = 80
    theta: float = 1e4
    more: dict[str, object] = field(default_factory=dict)


KINDS = {
    "specforge": Made(),
    "all tokens": Made(tokens=None, tapped=(2, 1), norms_output=True),
    "speculators": Made(
        hidden=48, embeds=True, norms_residual=True, tapped=(1, 2), style="speculators"
    ),
    "eagle": Made(style="eagle", kv_heads=1, theta=5e5),
    # As speculators trains them by default, and as EAGLE-3.1 does.
    "newer": Made(
        norms_residual=True, norms_output=True, tap_norm="norm_before_fc", style="speculators"
    ),
    "eagle 3.1": Made(norms_output=True, tap_norm="fc_norm", style="speculators"),
}


class RandomHead:
    """A random head for a model. directory: where its files are"""

    def __init__(self, model: torch.nn.Module, directory: Path, made: Made, seed: int = 0) -> None:
        self.directory = directory
        self.made = made
        self._model = copy.deepcopy(model).double()
        config, generator = model.config, torch.Generator().manual_seed(seed)
        self._layers = config.num_hidden_layers
        of_model = config.hidden_size
        self._hidden = hidden = made.hidden or of_model
        taps = made.tapped or (2, self._layers // 2, self._layers - 3)
        self._taps = taps
        vocab = config.vocab_size
        known = vocab if made.tokens is None else made.tokens
        self._known = torch.randperm(vocab, generator=generator)[:known].sort().values
        queries, keys = made.heads * made.head_dim, made.kv_heads * made.head_dim
        shapes = {
            "fc.weight": (hidden, len(taps) * of_model),
            "norm.weight": (hidden,),
            "lm_head.weight": (known, hidden),
            "input_layernorm.weight": (hidden,),
            "hidden_norm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, 2 * hidden),
            "self_attn.k_proj.weight": (keys, 2 * hidden),
            "self_attn.v_proj.weight": (keys, 2 * hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (made.wide, hidden),
            "mlp.up_proj.weight": (made.wide, hidden),
            "mlp.down_proj.weight": (hidden, made.wide),
        }
        if made.tap_norm == "norm_before_fc":
            shapes["input_norm.weight"] = (len(taps) * of_model,)
        if made.tap_norm == "fc_norm":
            shapes |= {f"fc_norm.{i}.weight": (of_model,) for i in range(len(taps))}
        if made.embeds:
            shapes["embed_tokens.weight"] = (vocab, hidden)
        self.tensors = {
            name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
            for name, shape in shapes.items()
        }
        self._write(vocab)

    def _write(self, vocab: int) -> None:
        made, whole = (
            self.made,
            ("fc.", "norm.", "lm_head.", "embed_tokens.", "input_norm.", "fc_norm."),
        )
        layer = "layers.0." if made.style == "speculators" else "midlayer."
        held = {
            name if name.startswith(whole) else layer + name: tensor.contiguous()
            for name, tensor in self.tensors.items()
        }
        if made.tokens is not None:
            held["d2t"] = self._known - torch.arange(len(self._known))
            held["t2d"] = torch.isin(torch.arange(vocab), self._known)
        config: dict[str, object] = {
            "model_type": "llama",
            "hidden_size": self._hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": made.heads,
            "num_key_value_heads": made.kv_heads,
            "head_dim": made.head_dim,
            "intermediate_size": made.wide,
            "rms_norm_eps": EPS,
            "rope_theta": made.theta,
            "max_position_embeddings": 4096,
            "vocab_size": vocab,
            "hidden_act": "silu",
        }
        own: dict[str, object] = {"draft_vocab_size": len(self._known)}
        if made.norms_output:
            own["norm_output"] = True
        if made.tap_norm:
            own[made.tap_norm] = True
        if made.style == "speculators":
            own |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
            own |= {"transformer_layer_config": config}
            own |= {"norm_before_residual": made.norms_residual}
            own |= {"eagle_aux_hidden_state_layer_ids": list(self._taps)}
        else:
            own |= config | {"architectures": ["LlamaForCausalLMEagle3"]}
            if made.tapped is not None:
                # SpecForge names the layers whose output it is, beginning with 1.
                assert made.tapped[0] == 2
                ids = [tapped - 1 for tapped in made.tapped]
                own["eagle_config"] = {
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": ids,
                }
        self.directory.mkdir(exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(own | made.more))
        if made.style == "eagle":
            torch.save(held, self.directory / "pytorch_model.bin")
        else:
            save_file(held, self.directory / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def logits(self, tokens: list[int], drafted: int = 0) -> torch.Tensor:
        """Of the token after the text, [vocab] float64.

        drafted: number of the last tokens whose states are the head's own
        """
        made, w = self.made, {name: each.double() for name, each in self.tensors.items()}
        ids = torch.tensor([tokens])
        held = self._model.model(ids, output_hidden_states=True).hidden_states
        taps = [held[tapped][0] for tapped in self._taps]
        if made.tap_norm == "fc_norm":
            taps = [rms_norm(each, w[f"fc_norm.{i}.weight"]) for i, each in enumerate(taps)]
        joined = torch.cat(taps, 1)
        if made.tap_norm == "norm_before_fc":
            joined = rms_norm(joined, w["input_norm.weight"])
        states = (joined @ w["fc.weight"].T)[: len(tokens) - 1 - drafted]
        table = w.get("embed_tokens.weight", self._model.model.embed_tokens.weight)
        for _ in range(drafted + 1):
            count = len(states)
            embedded = table[ids[0, 1 : count + 1]]
            normed = rms_norm(states, w["hidden_norm.weight"])
            both = torch.cat((rms_norm(embedded, w["input_layernorm.weight"]), normed), 1)
            residual = normed if made.norms_residual else states
            places = torch.arange(count)
            q, k, v = (
                (both @ w[f"self_attn.{name}_proj.weight"].T).view(count, -1, made.head_dim)
                for name in "qkv"
            )
            mixed = F.scaled_dot_product_attention(
                *(rotated(each, places, made.theta).transpose(0, 1) for each in (q, k)),
                v.transpose(0, 1),
                is_causal=True,
                enable_gqa=True,
            )
            mixed = mixed.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
            hidden = residual + mixed
            inner = rms_norm(hidden, w["post_attention_layernorm.weight"])
            gate = F.silu(inner @ w["mlp.gate_proj.weight"].T)
            up = inner @ w["mlp.up_proj.weight"].T
            out = hidden + (gate * up) @ w["mlp.down_proj.weight"].T
            normed = rms_norm(out[-1:], w["norm.weight"])
            states = torch.cat((states, normed if made.norms_output else out[-1:]))
        own = normed @ w["lm_head.weight"].T
        logits = torch.full((self._model.config.vocab_size,), float("-inf"), dtype=torch.float64)
        logits[self._known] = own[0]
        return logits
