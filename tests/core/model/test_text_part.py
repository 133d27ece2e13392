"""Models that also read images: of these the language model runs, and a warning says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import VOCAB, random_ids
from oracle import assert_equal_but_for_ties, greedy

from triforce_core import Engine
from triforce_core.model.families.hf import from_hf

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "head_dim": 16,
}
_IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_IMAGES["out_hidden_size"] = 64
# Models that also read images: what their text part and the other part say.
AROUND = {
    "Mistral3": (
        {"model_type": "mistral"},
        {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "Qwen2_5_VL": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            }
        },
        _IMAGES | {"fullatt_block_indexes": [0]},
    ),
    "Qwen3VL": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            }
        },
        _IMAGES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Gemma3": (
        {
            "sliding_window": 16,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    ),
    "Qwen3_5": (
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
        _IMAGES | {"num_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize(
    ("model", "tied"),
    [
        *(("Mistral3", False), ("Mistral3", True), ("Qwen2_5_VL", False), ("Qwen3VL", False)),
        *(("Gemma3", False), ("Gemma3", True), ("Qwen3_5", False)),
    ],
)
def test_of_a_model_that_reads_images_the_text_part_runs(
    tmp_path: Path, model: str, tied: bool
) -> None:
    import transformers

    torch.manual_seed(3)
    more, images = AROUND[model]
    text = CONFIG | more | {"tie_word_embeddings": tied, "initializer_range": 0.3}
    text |= {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{model}Config")(
        text_config=text, vision_config=images, tie_word_embeddings=tied
    )
    theirs = getattr(transformers, f"{model}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path)
    prompt = random_ids(40, 1)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    with pytest.warns(RuntimeWarning, match=r"the part that reads images \(\d+ tensors\) is not"):
        engine = Engine.from_pretrained(tmp_path, device="cpu", max_context=80)
    with engine:
        assert engine.config.tied == tied
        result = engine.generate(prompt, greedy(20))
    assert_equal_but_for_ties(theirs, prompt, result.token_ids, expected[0, len(prompt) :].tolist())


def test_the_first_configs_of_a_model_that_reads_images_have_no_text_config() -> None:
    raw = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    config = from_hf(CONFIG | raw, {})
    assert (config.family, config.rope.type, dict(config.rope.parameters)) == (
        "qwen2",
        "default",
        {},
    )
