"""Quantisation mixes of llama.cpp and of safetensors files: the block type of each matrix.

Follows `llama_tensor_get_type` of llama.cpp (src/llama-quant.cpp), for dense models without an
importance matrix. The tests compare sizes with published files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import MLP, Experts
from triforce_core.model.layers import Attention, LatentAttention, LayerSpec, Mixer
from triforce_core.model.parts.recurrent import DeltaNet, Mamba2, ShortConv
from triforce_core.model.tensors import Pieces
from triforce_kernels.weights.block_types import ALL_TYPES, INTEGERS, BlockType
from triforce_offload.checkpoint.quantised.methods import Method, Quantisation
from triforce_offload.errors import UsageError

FP8, MXFP4, NVFP4 = "FP8", "MXFP4", "NVFP4"
# Integers of AWQ, GPTQ and compressed-tensors, by their bits and how many columns share a scale.
_INTEGERS = {
    bits: {size: f"INT{bits}" if size == 128 else kind.name for size, kind in kinds.items()}
    for bits, kinds in INTEGERS.items()
}
# Mixes of safetensors files.
OF_SAFETENSORS = (FP8, MXFP4, NVFP4, *_INTEGERS[4].values(), *_INTEGERS[8].values())
# Block type of most matrices in each mix.
_MIXES = {
    "Q2_K": "Q2_K",
    "Q3_K_M": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
    "Q4_0": "Q4_0",
    "IQ4_XS": "IQ4_XS",
    # Of safetensors. Embeddings and the output matrix stay in 16 bits.
    FP8: "F8_E4M3",
    # Of gpt-oss, whose other matrices are in 16 bits.
    MXFP4: "MXFP4",
    NVFP4: "NVFP4",
    **{
        name: INTEGERS[bits][size].name
        for bits, names in _INTEGERS.items()
        for size, name in names.items()
    },
}
NAMES = tuple(_MIXES)
# Stands for matrices that are never quantised.
_DENSE = ""
# End of the names of matrices of experts.
_OF_EXPERTS = "_of_experts"
# Number of experts of Mixtral, whose attention llama.cpp keeps in more bits.
_FEW_EXPERTS, _BELOW_Q5 = 8, ("Q2_K", "Q3_K", "Q4_K", "IQ4_XS")
# llama.cpp's replacements for rows that are not whole blocks of 256 numbers.
_SMALLER_BLOCKS = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **{f"INT{bits}_{size}": f"INT{bits}_32" for bits in INTEGERS for size in (128, 64)},
}


def is_mix(name: str) -> bool:
    """Return whether a quantisation is known, by its usual pieces."""
    return name.upper() in _MIXES


def pieces_of(config: ModelConfig, mix: str) -> Pieces:
    """Return the pieces of each matrix of a model quantised with `mix`. Raises UsageError."""
    name = mix.upper()
    if name not in _MIXES:
        raise UsageError(
            f"{mix!r} is none of {', '.join(NAMES)}; files in others are planned once they are on "
            "this machine"
        )
    if name == MXFP4 and not any(spec.mlp.active for spec in config.layers):
        raise UsageError("only experts are in MXFP4, and this model has none")
    tied = config.tied

    def pieces(tensor: str) -> list[tuple[int, BlockType | None]]:
        if tensor in config.last_shapes:
            return [(config.last_shapes[tensor][0], None)]
        if "." not in tensor:
            kind = _end(name, output=tensor == "head" or tied)
            return [(config.vocab, _whole(kind, config.hidden) if kind != _DENSE else None)]
        _, layer, part = tensor.split(".")
        kinds = _layer(name, int(layer), config)
        spec = config.layers[int(layer)]
        columns = {part: shape[1] for part, shape in spec.products(config.hidden).items()}
        whole = partial(_whole, columns=columns.get(part, config.hidden))
        return [
            (count, whole(kinds(which)) if which != _DENSE and kinds(which) != _DENSE else None)
            for which, count in _rows(spec, config.hidden)[part]
        ]

    return pieces


def mix_of(quantised: Quantisation | None) -> str | None:
    """Return the mix of a quantised checkpoint, None if it is not quantised."""
    if quantised is None:
        return None
    if quantised.method in (Method.FP8, Method.MXFP4, Method.NVFP4):
        return quantised.method.value
    # A row with one scale is in blocks of 128, or of 32 if 128 does not divide it (`_whole`).
    names = _INTEGERS[quantised.bits]
    group = quantised.group if quantised.group > 0 else max(names)
    return next((name for size, name in names.items() if group % size == 0), names[min(names)])


def _rows(spec: LayerSpec, hidden: int) -> dict[str, list[tuple[str, int]]]:
    """Return the name and rows of each matrix that a tensor is made of. Those that no other name
    stands for have their own.
    """
    mlp = spec.mlp
    experts = isinstance(mlp, Experts)
    width = mlp.shared if experts else mlp.width
    rows = {part: [(part, shape[0])] for part, shape in spec.shapes(hidden).items()} | {
        "qkv": _projections(spec.mixer),
        # llama.cpp gives the outputs of attention more bits, and no others.
        "o": [("o" if isinstance(spec.mixer, Attention) else "out", hidden)],
        "gate_up": _gate_up(mlp, width),
        "down": [("down", hidden)],
    }
    if experts:
        of_one = [(name + _OF_EXPERTS, count) for name, count in _gate_up(mlp, mlp.width)]
        rows["experts_gate_up"] = of_one * mlp.count
        rows["experts_down"] = [("down" + _OF_EXPERTS, mlp.inner(hidden))] * mlp.count
    return rows


def _gate_up(mlp: MLP, width: int) -> list[tuple[str, int]]:
    return [("gate", width), ("up", width)][-mlp.activation.projections :]


def _projections(mixer: Mixer) -> list[tuple[str, int]]:
    match mixer:
        case LatentAttention():
            rows = mixer.query_rank or mixer.heads * (mixer.key_dim + mixer.rope_dim)
            return [("q", rows), ("kept", mixer.head_dim)]
        case Attention():
            queries = mixer.queries * (1 + mixer.output_gate)
            qkv = [("q", queries), ("k", mixer.keys), ("v", mixer.keys)]
            qkv = qkv[: mixer.projections]
            gate = [("gate", mixer.heads)] if mixer.head_gate else []
            return [*qkv, *gate, *([("index", mixer.index.rows)] if mixer.index else [])]
        case DeltaNet():
            rates = [(_DENSE, mixer.value_heads)] * 2
            return [*_joint(mixer), ("gate", mixer.values), *rates]
        case Mamba2():
            parts = mixer.keys, mixer.keys, mixer.values, mixer.values, mixer.value_heads
            return [("in", rows) for rows in parts]
        case ShortConv():
            return [("in", mixer.channels)] * 3


def _joint(mixer: DeltaNet) -> list[tuple[str, int]]:
    """Queries, keys and values of one tensor."""
    return [("joint", mixer.keys), ("joint", mixer.keys), ("joint", mixer.values)]


def _whole(kind: str, columns: int) -> BlockType | None:
    """Return the block type, or its replacement if rows are not whole blocks. Return None, for 16
    bits, if rows are not whole blocks of the replacement either.
    """
    for name in (kind, _SMALLER_BLOCKS.get(kind, kind)):
        if columns % ALL_TYPES[name].elements == 0:
            return ALL_TYPES[name]
    return None


def _end(name: str, *, output: bool) -> str:
    if name in OF_SAFETENSORS:
        return _DENSE
    if name == "Q8_0":
        return name
    if output:
        return "Q6_K"
    return {"IQ4_XS": "IQ4_XS", "Q3_K_M": "Q3_K"}.get(name, _MIXES[name])


def _layer(name: str, layer: int, config: ModelConfig) -> Callable[[str], str]:
    """Return a function from a matrix of a layer to its block type."""
    layers, plain = len(config.layers), _MIXES[name]
    eighth = layers // 8
    # Values are counted among the layers that have a projection of them alone.
    mixers = [spec.mixer for spec in config.layers]
    valued = [i for i, each in enumerate(mixers) if getattr(each, "projects_values", False)]
    value = valued.index(layer) if layer in valued else 0
    counted = len(valued) + sum(isinstance(each, DeltaNet) for each in mixers)
    queries_a_key = config.attention.heads // config.attention.kv_heads
    special: dict[str, str] = {}
    if name in ("Q4_K_M", "Q5_K_M"):
        if _has_more_bits(layer, layers):
            special["down"] = "Q6_K"
        if _has_more_bits(value, counted):
            special["v"] = "Q6_K"
        special["joint"] = "Q5_K" if name == "Q4_K_M" else "Q6_K"
    elif name == "Q4_K_S":
        if value < 4:
            special["v"] = "Q5_K"
        if layer < eighth:
            special["down"] = "Q5_K"
    elif name == "Q3_K_M":
        special = {"v": "Q5_K" if value < 2 else "Q4_K", "o": "Q4_K", "joint": "Q4_K"}
        special["down"] = "Q5_K" if layer < layers // 16 else "Q4_K"
    elif name == "Q2_K":
        special = {"v": "Q4_K" if queries_a_key >= 4 else "Q3_K", "o": "Q3_K", "down": "Q3_K"}
    elif name == "IQ4_XS":
        if queries_a_key >= 4 or value < counted // 8:
            special["v"] = "Q5_K"
        if layer < eighth:
            special["down"] = "Q5_K"
    elif name in OF_SAFETENSORS:
        # `k_up` is stored transposed, so blocks cannot hold it.
        special["k_up"] = _DENSE
    plain_mix = name == "Q8_0" or name in OF_SAFETENSORS
    if getattr(config.layers[layer].mlp, "count", 0) == _FEW_EXPERTS and not plain_mix:
        # Small beside the experts.
        special |= {"k": "Q8_0", "v": "Q8_0"} | ({"o": "Q5_K"} if plain in _BELOW_Q5 else {})
    # A 70B model has many query heads per value head, so values are small and can take more bits.
    if plain in ("Q3_K", "Q4_K") and layers == 80 and special.get("v", plain) != "Q6_K":
        special["v"] = "Q5_K"

    def kind(which: str) -> str:
        of_experts = which.endswith(_OF_EXPERTS)
        if name == MXFP4 and not of_experts:
            return _DENSE
        return special.get(which.removesuffix(_OF_EXPERTS), plain)

    return kind


def _has_more_bits(index: int, count: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and the last eighth, and every third between them."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2
