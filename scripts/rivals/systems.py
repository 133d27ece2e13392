"""The systems of a comparison, by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rivals.published_policies import BY_LAYERS, CHOSEN_ONCE, MEAN_KEYS

MEMORY, OFFLOADED, ABLATION = "memory", "offloaded", "ablation"
GROUPS = {
    MEMORY: "everything in the device's memory",
    OFFLOADED: "in the same memory, which does not hold everything",
    ABLATION: "KV over a slow link: our engine, with what the published code does otherwise",
}
# The rate of the ablation's emulated link: a pass takes several times as long as its compute.
ABLATION_LINK = 100e6
ABLATION_BLOCK = 128


@dataclass(frozen=True)
class System:
    """A system of a comparison.

    module, options: the adapter and its options
    refusal: why it cannot run, on any machine
    """

    group: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def own_packages(self) -> bool:
        """Whether the system is installed in .venv-rivals."""
        return self.module in ("deepspeed_zero", "llama_cpp")

    @property
    def lossless(self) -> bool:
        """Whether its greedy text must equal the text of the model in float32."""
        return self.module != "llama_cpp"


def systems(
    prompt_tokens: int, new_tokens: int, assistant: str, *, is_gguf: bool
) -> dict[str, System]:
    """Return all systems, for texts of one length.

    assistant: the path of a draft model, or empty
    """
    no_file = None if is_gguf else "it reads GGUF files, and the model is none"
    no_model = None if assistant else "it needs a small model of this vocabulary: --assistant"
    hf, accelerate, deepspeed = "transformers_generate", "accelerate_offload", "deepspeed_zero"
    found = {}
    for name, group, module, options in (
        ("transformers, plain", MEMORY, hf, {}),
        ("transformers, prompt lookup", MEMORY, hf, {"prompt_lookup_num_tokens": 10}),
        ("transformers, assistant", MEMORY, hf, {"assistant": assistant}),
        ("accelerate, plain", MEMORY, accelerate, {"how": "memory"}),
        ("deepspeed, plain", MEMORY, deepspeed, {"offload": False}),
        ("llama.cpp, plain", MEMORY, "llama_cpp", {}),
        ("ours, autoregressive", MEMORY, "ours", {"method": "autoregressive", "in_memory": True}),
        ("ours, speculative", MEMORY, "ours", {"method": "speculative", "in_memory": True}),
        (
            *("ours, autoregressive, as stored", MEMORY, "ours"),
            {"method": "autoregressive", "in_memory": True, "as_stored": True},
        ),
        (
            *("ours, speculative, as stored", MEMORY, "ours"),
            {"method": "speculative", "in_memory": True, "as_stored": True},
        ),
        ("transformers, offloaded cache", OFFLOADED, hf, {"cache_implementation": "offloaded"}),
        ("accelerate, cpu_offload", OFFLOADED, accelerate, {"how": "cpu_offload"}),
        ("accelerate, disk_offload", OFFLOADED, accelerate, {"how": "disk_offload"}),
        ("accelerate, device_map auto", OFFLOADED, accelerate, {"how": "auto"}),
        (
            *("deepspeed, ZeRO-3 offloaded", OFFLOADED, deepspeed),
            {"offload": True, "cache": "offloaded"},
        ),
        ("llama.cpp, KV on the host", OFFLOADED, "llama_cpp", {"kv_on_host": True}),
        ("ours, autoregressive, streamed", OFFLOADED, "ours", {"method": "autoregressive"}),
        ("ours, speculative, streamed", OFFLOADED, "ours", {"method": "speculative"}),
        ("ours, triforce, streamed", OFFLOADED, "ours", {"method": "triforce"}),
    ):
        refusal = no_model if "assistant" in options else None
        found[name] = System(group, module, options, no_file if module == "llama_cpp" else refusal)
    return found | _ablation(prompt_tokens, new_tokens)


def _ablation(prompt_tokens: int, new_tokens: int) -> dict[str, System]:
    """Return our engine with one more policy of the published code in each row.

    About a quarter of the KV is resident.
    """
    layers_resident = 8
    text_tokens = prompt_tokens + new_tokens
    options: dict[str, Any] = {
        "budget": max(ABLATION_BLOCK, text_tokens // 8 // ABLATION_BLOCK * ABLATION_BLOCK),
        "block_tokens": ABLATION_BLOCK,
        "resident_blocks": text_tokens // ABLATION_BLOCK * layers_resident,
        "kv_slots": 3,
        "link_bandwidth": ABLATION_LINK,
        "draft_weights": "exact",
    }
    whole = 1 << (prompt_tokens.bit_length() - 1)
    rows = {"ours, KV streamed": System(ABLATION, "ours", dict(options))}
    for name, changes in (
        ("+ mean keys", {"policies": [MEAN_KEYS]}),
        ("+ chosen once", {"policies": [MEAN_KEYS, CHOSEN_ONCE]}),
        ("+ fixed lengths", {"draft_tokens": 12, "inner_draft_tokens": 1}),
        ("+ resident by layers", {"policies": [MEAN_KEYS, CHOSEN_ONCE, BY_LAYERS]}),
        (
            "+ whole layers, two slots",
            {"block_tokens": whole, "resident_blocks": layers_resident, "kv_slots": 2},
        ),
    ):
        options |= changes
        rows[name] = System(ABLATION, "ours", dict(options))
    if whole < 0.9 * prompt_tokens:
        rows[name] = replace(
            rows[name],
            refusal=f"a block of a power of two holds {whole} of {prompt_tokens} tokens, and no "
            "whole layer; a prompt of little more would fit it",
        )
    return rows


def chosen(names: list[str], known: dict[str, System]) -> list[str]:
    """Return the systems that match: names, beginnings of names, groups, or "all".

    Raises KeyError for a name that matches none.
    """
    found = []
    for name in names:
        meant = (
            [name]
            if name in known
            else [
                each
                for each, system in known.items()
                if name in (system.group, "all") or each.startswith(name)
            ]
        )
        if not meant:
            raise KeyError(name)
        found += [each for each in meant if each not in found]
    return [name for name in known if name in found]
