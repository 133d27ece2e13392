"""How the matrices of safetensors files are quantised, as config.json describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from triforce_kernels.weights.block_types import INTEGERS
from triforce_offload.errors import UnsupportedModelError

# Names of FP8 with 4 bits of exponent, as configs write them.
_E4M3 = ("e4m3", "float8_e4m3fn")
_BITS, _FP8_BLOCKS = (4, 8), [128, 128]
_WHOLE_ROW = -1
# Columns of the smallest blocks of integers.
LEAST_GROUP = min(INTEGERS[4])
_INSTEAD = "use a bfloat16 checkpoint or a GGUF file instead"


class Method(Enum):
    """What a quantised matrix consists of (`floats`, `integers`)."""

    FP8 = "FP8"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
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
            _only(config, "quant_algo", ("FP8", "NVFP4"))
            return Quantisation(Method[config["quant_algo"]])
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
        case None if "bits" in config:
            raise _unsupported("a quantization_config without a method, as MLX writes it,")
    raise UnsupportedModelError(
        f"quantization_config of method {config.get('quant_method')!r} is not supported (only awq, "
        "gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8, modelopt, and mxfp4 of gpt-oss); "
        f"{_INSTEAD}"
    )


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    _only(config, "fmt", (*_E4M3, None))
    _only(config, "weight_block_size", (_FP8_BLOCKS, None))
    return Quantisation(Method.FP8)


def _integers(method: Method, config: Mapping[str, Any]) -> Quantisation:
    _only(config, "bits", (4,) if method is Method.AWQ else _BITS)
    for name in ("dynamic", "extra_config"):
        # What differs for some modules: a pattern or a name, and what is set for it.
        own = config.get(name)
        for each in own.values() if isinstance(own, Mapping) else ():
            bits = each.get("bits", config["bits"]) if isinstance(each, Mapping) else 16
            if bits not in (config["bits"], 16):
                raise _unsupported(f"a checkpoint with some matrices in {bits} bits ({name})")
    return Quantisation(method, config["bits"], _group(config.get("group_size")))


def _group(size: Any) -> int:
    """Return a group size. Raises UnsupportedModelError for one that no kernel has."""
    group = size if isinstance(size, int) and size > 0 else _WHOLE_ROW
    if group > 0 and group % LEAST_GROUP:
        raise _unsupported(f"a scale for each {group} numbers, no multiple of {LEAST_GROUP},")
    return group


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    if config.get("desc_act"):
        raise _unsupported("GPTQ with desc_act (columns in another order)")
    version = config.get("checkpoint_format", config.get("format"))
    _only({"checkpoint_format": version}, "checkpoint_format", ("gptq", "gptq_v2", None))
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
    transforms = config.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise _unsupported("a checkpoint whose weights are rotated (transform_config)")
    found = {_scheme(each, each.get("format") or config.get("format")) for each in _groups(config)}
    if len(found) != 1:
        raise _unsupported(f"a checkpoint with {len(found)} formats of weights (config_groups)")
    return found.pop()


def _groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = config.get("config_groups")
    for each in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping):
            yield each


def _scheme(group: Mapping[str, Any], stored: Any) -> Quantisation:
    """Return how weights of a group of modules are quantised. stored: the name of their format

    Inputs that FP8 rounds on the way are not rounded here.
    """
    weights, form = group["weights"], {"format": stored}
    bits = weights.get("num_bits")
    _only(weights, "type", ("int", "float"))
    if weights["type"] == "float":
        if bits == 4 and weights.get("strategy") == "tensor_group":
            _only(form, "format", ("nvfp4-pack-quantized", None))
            _only(weights, "group_size", (16,))
            return Quantisation(Method.NVFP4)
        if bits != 8:
            raise _unsupported(f"compressed-tensors with floats of {bits} bits, as in MXFP4,")
        _only(form, "format", ("float-quantized", "naive-quantized", None))
        _only(weights, "strategy", ("tensor", "channel", "block"))
        if weights["strategy"] == "block":
            _only(weights, "block_structure", (_FP8_BLOCKS,))
        return Quantisation(Method.FP8)
    if group.get("input_activations"):
        raise _unsupported("compressed-tensors with inputs in integers (W8A8, W4A8)")
    _only(form, "format", ("pack-quantized", None))
    _only(weights, "num_bits", _BITS)
    _only(weights, "strategy", ("group", "channel"))
    _only(weights, "actorder", (None, "static", "weight"))
    size = weights.get("group_size") if weights["strategy"] == "group" else None
    return Quantisation(Method.PACKED, bits, _group(size))


def _only(config: Mapping[str, Any], field: str, known: tuple[Any, ...]) -> None:
    """Raise UnsupportedModelError for a field with another value than those that are known."""
    value = config.get(field)
    if value not in known:
        named = ", ".join(repr(each) for each in known if each is not None)
        raise UnsupportedModelError(
            f"quantization_config with {field} {value!r} is not supported (only {named}); "
            f"{_INSTEAD}"
        )


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{what} is not supported; {_INSTEAD}")
