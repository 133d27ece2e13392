"""Hub ids of known shapes, and names of unsupported model families."""

from __future__ import annotations

import re

from triforce_core.model.known.mixes import OF_SAFETENSORS

# Known shapes by the hub id of a model.
_MODELS = {
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "NousResearch/Yarn-Llama-2-7b-128k": "llama2-7b-128k",
    "NousResearch/Yarn-Llama-2-13b-128k": "llama2-13b-128k",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1-70b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3.2-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3.2-3b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-14B-Instruct": "qwen2.5-14b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral-small3.2",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "seed-oss-36b",
    "zai-org/GLM-4-32B-0414": "glm4-32b",
    "microsoft/phi-4": "phi4-14b",
    "ibm-granite/granite-3.3-8b-instruct": "granite3.3-8b",
    "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
    "google/gemma-3-270m-it": "gemma3-270m",
    "google/gemma-3-4b-it": "gemma3-4b",
    "google/gemma-3-12b-it": "gemma3-12b",
    "google/gemma-3-27b-it": "gemma3-27b",
    "google/gemma-4-E2B-it": "gemma4-e2b",
    "google/gemma-4-E4B-it": "gemma4-e4b",
    "google/gemma-4-12b-it": "gemma4-12b",
    "google/gemma-4-31b-it": "gemma4-31b",
    "Qwen/Qwen3.8-27B": "qwen3.8-27b",
    "Qwen/Qwen3.6-27B": "qwen3.8-27b",
    "Qwen/Qwen3.5-27B": "qwen3.8-27b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "LiquidAI/LFM2-1.2B": "lfm2-1.2b",
    "LiquidAI/LFM3-1.7B": "lfm3-1.7b",
    "facebook/cwm": "cwm-32b",
    "IQuestLab/IQuest-Coder-V1-40B-Instruct": "iquest-coder-40b",
    "upstage/Solar-Open-100B": "solar-open-100b",
    "JetBrains/Mellum2-12B-A2.5B-Instruct": "mellum2-12b-a2.5b",
    "JetBrains/Mellum2-12B-A2.5B-Thinking": "mellum2-12b-a2.5b",
    "LiquidAI/LFM2-8B-A1B": "lfm2-8b-a1b",
    "allenai/Olmo-3.1-32B-Instruct": "olmo3-32b",
    "LGAI-EXAONE/EXAONE-4.0-32B": "exaone4-32b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "qwen3-coder-30b-a3b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3.6-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
    "MiniMaxAI/MiniMax-M2": "minimax-m2",
    "MiniMaxAI/MiniMax-M2.1": "minimax-m2",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "MiniMaxAI/MiniMax-M2.7": "minimax-m2",
    "Qwen/Qwen3-Coder-Next": "qwen3-next-80b-a3b",
    "Qwen/Qwen3.8-Flash-Next": "qwen3.8-flash-next",
    "poolside/Laguna-XS-2.1": "laguna-xs-2.1",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "google/gemma-4-26b-a4b-it": "gemma4-26b-a4b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "zai-org/GLM-4.7-Flash": "glm-4.7-flash",
    "mistralai/Mistral-Small-4-119B-2603": "mistral-small-4",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "ibm-granite/granite-4.0-h-small": "granite-4.0-h-small",
    "ibm-granite/granite-4.0-h-tiny": "granite-4.0-h-tiny",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "nemotron-3-super-120b-a12b",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    "JackFram/llama-68m": "llama-68m",
}
# Who publishes GGUF files of most models, under the models' own names.
_PUBLISHER = "unsloth"
# Suffixes that distinguish models of one shape.
_VARIANT = re.compile(r"-(hf|chat|base|instruct|it|bf16)(?=-|$)")
# Ends of the ids of quantised models, and the mix that they stand for.
_INTEGERS = r"awq(-?4bit)?|gptq|(gptq-)?int4|awq-int4|(quantized[.])?w4a16|(int4-)?autoround"
_QUANTISED = (
    (rf"[-.]({_INTEGERS})$", "INT4"),
    (r"[-.]((gptq-)?int8|(quantized[.])?w8a16)$", "INT8"),
    (r"-fp8([-_]dynamic|-block)?$", "FP8"),
    (r"-nvfp4$", "NVFP4"),
    (r"-gguf$", "Q4_K_M"),
)
# Parts of Ollama's tags that say what a model was trained for.
_TAGS_OF_TEXTS = ("instruct", "chat", "text", "it")
# Families that no config of this runtime can describe, by a pattern of their names.
_UNSUPPORTED = (
    (r"gemma-?3n", "Gemma 3n"),
    (r"qwen3-vl-.*-a\d|glm-4[.]\dv|ernie.*-vl", "models with experts that read images"),
    (r"glm-5", "GLM-5"),
    (r"deepseek.*(v3[.]2|v4|ocr|vl)", "DeepSeek-V3.2, V4 and those that read images"),
    (r"command-r($|-(v|plus|08))|(^|/)aya", "Cohere before Command R7B"),
    (r"nemotron-(super|ultra|h-47b)", "Llama Nemotron Super and Ultra, and Nemotron-H-47B"),
    (r"nemotron-(4|mini)|minitron", "Nemotron-4 and Minitron"),
    (r"lfm[23][.-].*(vl|audio|colbert)", "LFM2 and LFM3 with images or sound"),
    (r"minimax-(m1|m3|text|vl)", "MiniMax-M1 and MiniMax-M3"),
    (r"laguna-m", "Laguna-M"),
)


def shape_of(hub_id: str) -> str | None:
    """Return the name of the known shape for a hub id of its makers, or None."""
    return _SHAPES.get(_plain(hub_id))


def like_known(hub_id: str) -> tuple[str | None, str]:
    """Return the name of the known shape for a hub id of any publisher, or None, and the mix of its
    weights by the end of the id, empty if it does not tell.
    """
    for pattern, mix in _QUANTISED:
        whole = re.sub(pattern, "", hub_id.lower())
        if whole != hub_id.lower():
            return _BY_MODEL.get(_model(whole)), mix
    return _BY_MODEL.get(_model(hub_id)), ""


def _model(hub_id: str) -> str:
    """Return the part of a hub id that does not name the publisher."""
    return _plain(hub_id).rpartition("/")[2].removeprefix("meta-")


def hub_id_of(shape: str) -> str | None:
    """Return the hub id of a model of a known shape, or None."""
    return next((hub_id for hub_id, name in _MODELS.items() if name == shape), None)


def gguf_id_of(name: str) -> str | None:
    """Return the hub id of a repository with GGUF files, and its quantisation, for a short name
    with one, as in `qwen3-8b:Q4_K_M`. None for other names, and for quantisations that are not of
    GGUF files.
    """
    shape, _, mix = name.partition(":")
    hub_id = hub_id_of(shape.lower())
    if hub_id is None or not mix or mix.upper() in OF_SAFETENSORS:
        return None
    model = hub_id.rpartition("/")[2].removesuffix("-BF16")
    return f"{_PUBLISHER}/{model}-GGUF:{mix}"


def short_names() -> list[str]:
    """Return the names of shapes that stand for a model of the hub."""
    return list(dict.fromkeys(_MODELS.values()))


def of_ollamas(name: str) -> str:
    """Return our name for a known shape that is named as Ollama does: `qwen3:8b-q8_0` is
    `qwen3-8b:q8_0`, and `qwen3:8b` is `qwen3-8b:Q4_K_M`, as Ollama has most models. Any other name
    is returned as it is.
    """
    base, _, tag = name.partition(":")
    parts = [part for part in tag.split("-") if part.lower() not in _TAGS_OF_TEXTS]
    for end in range(len(parts), 0, -1):
        shape = "-".join((base, *parts[:end])).lower()
        if shape in _MODELS.values():
            # gpt-oss is published in four bits.
            usual = [] if shape.startswith("gpt-oss") else ["Q4_K_M"]
            return ":".join((shape, *(parts[end:] or usual)))
    return name


def unsupported_family(name: str) -> str | None:
    """Return the family of a model if its name shows that it is unsupported, or None."""
    return next((what for known, what in _UNSUPPORTED if re.search(known, name.lower())), None)


def _plain(hub_id: str) -> str:
    name = hub_id.lower()
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
    return name


_SHAPES = {_plain(hub_id): shape for hub_id, shape in _MODELS.items()}
_BY_MODEL = {_model(plain): shape for plain, shape in _SHAPES.items()}
