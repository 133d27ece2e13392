"""Random Gemma 4 assistants, and what transformers' class computes with them in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import torch
from gguf_files import describe_gemma4, in_blocks
from helpers import full_layers
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Made:
    """How an assistant is made.

    kinds: of its layers
    heads: number of query heads
    window: number of tokens that layers with a window see; None for the model's
    masked: whether it chooses some of the tokens first
    """

    kinds: tuple[str, ...] = (SLIDING, SLIDING, FULL)
    heads: int = 4
    hidden: int = 32
    wide: int = 48
    window: int | None = None
    masked: bool = False


KINDS = {
    "usual": Made(),
    "one layer": Made(kinds=(FULL,), heads=8),
    "alternating": Made(kinds=(FULL, SLIDING, FULL), hidden=48, window=16),
}


class RandomAssistant:
    """A random assistant for a model. directory: where its files are"""

    def __init__(self, model: torch.nn.Module, directory: Path, made: Made, seed: int = 0) -> None:
        self.directory = directory
        self.made = made
        self._target = copy.deepcopy(model).double()
        # What the last layer of each kind computes is shared.
        for layer in self._target.model.layers:
            layer.self_attn.store_full_length_kv = True
        self._width = model.config.hidden_size
        whole = model.config.to_dict()
        full = whole["layer_types"].index(FULL)
        own = whole["per_layer_config"][str(full)]
        text = whole | {
            "hidden_size": made.hidden,
            "intermediate_size": made.wide,
            "num_hidden_layers": len(made.kinds),
            "num_attention_heads": made.heads,
            "layer_types": list(made.kinds),
            "num_kv_shared_layers": len(made.kinds),
            **{"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0},
            "use_double_wide_mlp": False,
            "tie_word_embeddings": True,
            "per_layer_config": {
                str(index): own for index, kind in enumerate(made.kinds) if kind == FULL
            },
            **{"enable_moe_block": False, "num_experts": None, "top_k_experts": None},
        }
        text["model_type"] = "gemma4_text"
        if made.window:
            text["sliding_window"] = made.window
        config = Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**text),
            backbone_hidden_size=self._width,
            use_ordered_embeddings=made.masked,
            num_centroids=model.config.vocab_size,
            centroid_intermediate_top_k=5,
        )
        torch.manual_seed(seed)
        # transformers 5.23 takes no model all of whose layers share keys.
        shared = property(lambda own: ["reuse"] * own.num_hidden_layers)
        with mock.patch.object(Gemma4TextConfig, "kv_sharing_modes", shared):
            assistant = Gemma4AssistantForCausalLM(config).eval()
        for name, each in assistant.named_parameters():
            scale, mean = (0.2, 1.0) if "norm" in name else (0.2, 0.0)
            each.data = torch.randn_like(each) * scale + mean
        for name, each in assistant.named_buffers():
            if "layer_scalar" in name:
                each.fill_(0.7)
        assistant.save_pretrained(directory)
        # Of all tokens, not only of those that it would choose first.
        assistant.config.use_ordered_embeddings = False
        self.assistant = assistant.double()

    def write_gguf(self, path: Path, kind: gguf.GGMLQuantizationType) -> Path:
        """Write a GGUF file as llama.cpp's converter and quantiser do, with matrices in a type
        where their rows are long enough; from then on the assistant computes with its numbers.
        """
        config = self.assistant.config.get_text_config()
        writer = gguf.GGUFWriter(path, "gemma4-assistant")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_uint32("gemma4-assistant.embedding_length_out", self._width)
        writer.add_nextn_predict_layers(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        describe_gemma4(writer, config, shared=config.num_hidden_layers)
        slides = [kind == SLIDING for kind in self.made.kinds]
        writer.add_sliding_window_pattern(slides)
        writer.add_sliding_window(config.sliding_window)
        ropes = config.rope_parameters
        writer.add_rope_freq_base(ropes[FULL]["rope_theta"])
        writer.add_float32("gemma4-assistant.rope.freq_base_swa", ropes[SLIDING]["rope_theta"])
        writer.add_rope_dimension_count(full_layers(config).head_dim)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
        projections = ("pre_projection", "post_projection")
        for name, tensor in self.assistant.state_dict().items():
            if name.startswith(("lm_head", "masked_embedding")):
                continue
            held = name + ".weight" if name.endswith("layer_scalar") else name
            stored = (
                f"nextn.{name}"
                if name.startswith(projections)
                else names.get_name(held, (".weight",))
            )
            array = tensor.float().numpy()
            if array.ndim == 2 and array.shape[1] % 32 == 0:
                data = in_blocks(array, kind)
                writer.add_tensor(stored, data, raw_dtype=kind)
                tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
            else:
                writer.add_tensor(stored, array)
        half = full_layers(config).head_dim // 2
        writer.add_tensor("rope_freqs.weight", np.ones(half, np.float32))
        if self.made.masked:
            writer.add_tensor("masked_embd_centroids.weight", np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @torch.no_grad()
    def logits(
        self, tokens: list[int], after: list[int], *, seen: tuple[range, ...] | None = None
    ) -> torch.Tensor:
        """Of the token behind a text and some drafted tokens, [vocab] float64.

        after: drafted tokens that follow the text
        seen: positions that full layers and layers with a window see; None for all
        """
        held = self._target(
            torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        state = held.hidden_states[-1][:, -1:]
        shared = dict(held.shared_kv_states.items())
        for kind, positions in zip((FULL, SLIDING), seen or (), strict=False):
            shared[kind] = tuple(each[:, :, list(positions)] for each in shared[kind])
        place = torch.tensor([[len(tokens) - 1]])
        for token in (tokens[-1], *after):
            embedded = self._target.get_input_embeddings()(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat((embedded, state), -1),
                position_ids=place,
                shared_kv_states=shared,
            )
            state, logits = out.last_hidden_state, out.logits
        return logits[0, 0]
