"""How the matrices of safetensors files are quantised, as config.json describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from triforce_offload.errors import UnsupportedModelError

# Names of FP8 with 4 bits of exponent, as configs write them.
_E4M3 = ("e4m3", "float8_e4m3fn")
_BITS, _FP8_BLOCKS = (4, 8), [128, 128]
_WHOLE_ROW = -1
_INSTEAD = "use a bfloat16 checkpoint or a GGUF file instead"


class Method(Enum):
    """What a quantised matrix consists of (`floats`, `integers`)."""

    FP8 = "FP8"
    MXFP4 = "MXFP4"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    GPTQ_V2 = "GPTQ v2"
    PACKED = "pack-quantized"


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a checkpoint.

    bits, group: bits of an integer, and number of columns that share a scale; -1 for all of a row
    """

    method: Method
    bits: int = 8
    group: int = _WHOLE_ROW


def quantisation(described: Any) -> Quantisation | None:
    """Return what `quantization_config` describes; None if nothing is quantised.

    Raises UnsupportedModelError.
    """
    if not described:
        return None
    config = described if isinstance(described, Mapping) else {}
    match config.get("quant_method"):
        case "fp8" | "fbgemm_fp8":
            return _fp8(config)
        case "modelopt":
            _only(config, "quant_algo", ("FP8",))
            return Quantisation(Method.FP8)
        case "mxfp4":
            return Quantisation(Method.MXFP4)
        case "awq":
            _only(config, "version", ("gemm", "GEMM", None))
            return _integers(Method.AWQ, config)
        case "gptq":
            return _gptq(config)
        case "auto-round":
            return _auto_round(config)
        case "compressed-tensors":
            return _compressed(config)
    method = config.get("quant_method")
    raise UnsupportedModelError(
        f"quantization_config of method {method!r} is not supported (only awq, gptq, auto-round, "
        f"compressed-tensors, fp8, fbgemm_fp8, modelopt, and mxfp4 of gpt-oss); {_INSTEAD}"
    )


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    _only(config, "fmt", (*_E4M3, None))
    _only(config, "weight_block_size", (_FP8_BLOCKS, None))
    return Quantisation(Method.FP8)


def _integers(method: Method, config: Mapping[str, Any]) -> Quantisation:
    _only(config, "bits", (4,) if method is Method.AWQ else _BITS)
    group = config.get("group_size", _WHOLE_ROW)
    return Quantisation(method, config["bits"], group if isinstance(group, int) else _WHOLE_ROW)


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    _only(config, "desc_act", (False, None))
    _only(config, "checkpoint_format", ("gptq", "gptq_v2", None))
    version = config.get("checkpoint_format")
    return _integers(Method.GPTQ_V2 if version == "gptq_v2" else Method.GPTQ, config)


def _auto_round(config: Mapping[str, Any]) -> Quantisation:
    """AutoRound writes the formats of others, and names them."""
    methods = {"auto_round:auto_awq": Method.AWQ, "auto_round:auto_gptq": Method.GPTQ}
    _only(config, "packing_format", tuple(methods))
    return _integers(methods[config["packing_format"]], config)


def _compressed(config: Mapping[str, Any]) -> Quantisation:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping):
        _only(sparsity, "format", ("dense", None))
    found = {_scheme(each) for each in _groups(config)}
    if len(found) != 1:
        raise UnsupportedModelError(
            f"quantization_config of compressed-tensors describes {len(found)} formats of weights, "
            f"and only one is supported; {_INSTEAD}"
        )
    return found.pop()


def _groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = config.get("config_groups")
    for each in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping):
            yield each


def _scheme(group: Mapping[str, Any]) -> Quantisation:
    """Return how weights of a group of modules are quantised.

    Inputs that FP8 rounds on the way are not rounded here.
    """
    weights = group["weights"]
    _only(weights, "type", ("int", "float"))
    if weights["type"] == "float":
        _only(weights, "num_bits", (8,))
        _only(weights, "strategy", ("tensor", "channel", "block"))
        if weights["strategy"] == "block":
            _only(weights, "block_structure", (_FP8_BLOCKS,))
        return Quantisation(Method.FP8)
    _only(weights, "num_bits", _BITS)
    _only(weights, "strategy", ("group", "channel"))
    _only(weights, "actorder", (None, "static", "weight"))
    _only(group, "input_activations", (None,))
    size = weights.get("group_size")
    grouped = weights["strategy"] == "group" and isinstance(size, int)
    return Quantisation(Method.PACKED, weights["num_bits"], size if grouped else _WHOLE_ROW)


def _only(config: Mapping[str, Any], field: str, known: tuple[Any, ...]) -> None:
    """Raise UnsupportedModelError for a field with another value than those that are known."""
    value = config.get(field)
    if value not in known:
        named = ", ".join(repr(each) for each in known if each is not None)
        raise UnsupportedModelError(
            f"quantization_config with {field} {value!r} is not supported (only {named or None}); "
            f"{_INSTEAD}"
        )
