"""Models of 70B's layers, in sparse files of zeros: what this machine cannot hold it streams from
its files, begins to load, or refuses with one sentence, in no more memory than was planned.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from command import run

from triforce_core.model.known.mixes import pieces_of
from triforce_core.model.known.shapes import SHAPES, read_shape
from triforce_core.model.tensors import dense_layouts, stored_layouts
from triforce_offload.weights.formats import DTYPES

# A small vocabulary: what is large are the layers.
VOCAB = 256
CONFIG = dict(SHAPES["llama3.1-70b"]) | {"vocab_size": VOCAB, "tie_word_embeddings": True}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def write_safetensors(directory: Path) -> Path:
    """131 GB of zeros in one file that takes a few KB of disk."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = read_shape(str(directory))
    shapes = {
        "model.embed_tokens.weight": (VOCAB, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    queries, keys = config.attention.queries, config.attention.keys
    width = config.layers[0].mlp.width
    for layer in range(len(config.layers)):
        for name, shape in (
            ("input_layernorm", (config.hidden,)),
            ("self_attn.q_proj", (queries, config.hidden)),
            ("self_attn.k_proj", (keys, config.hidden)),
            ("self_attn.v_proj", (keys, config.hidden)),
            ("self_attn.o_proj", (config.hidden, queries)),
            ("post_attention_layernorm", (config.hidden,)),
            ("mlp.gate_proj", (width, config.hidden)),
            ("mlp.up_proj", (width, config.hidden)),
            ("mlp.down_proj", (config.hidden, width)),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for count in shape:
            size *= count
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return directory


def write_q4_k(path: Path) -> Path:
    """The same as llama.cpp's Q4_K_M would have it."""
    config = read_shape("llama3.1-70b")
    pieces = pieces_of(config, "Q4_K_M")
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        ("context_length", config.positions),
        ("embedding_length", config.hidden),
        ("block_count", len(config.layers)),
        ("feed_forward_length", config.layers[0].mlp.width),
        ("attention.head_count", config.attention.heads),
        ("attention.head_count_kv", config.attention.kv_heads),
        ("vocab_size", VOCAB),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 5e5)
    names = {
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "o": ("attn_output",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
    }
    end = 0

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        nonlocal end
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        size = rows * columns // block * nbytes
        shape = (columns,) if rows == 1 else (rows, columns)
        writer.add_tensor_info(name, shape, "float32", size, raw_dtype=kind)
        end = -(-(end + size) // 32) * 32

    f32 = gguf.GGMLQuantizationType.F32
    add("token_embd.weight", VOCAB, config.hidden, gguf.GGMLQuantizationType.Q6_K)
    add("output_norm.weight", 1, config.hidden, f32)
    for layer in range(len(config.layers)):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", 1, config.hidden, f32)
        for part, shape in config.layers[layer].shapes(config.hidden).items():
            for which, (rows, kind) in zip(
                names.get(part, ()),
                pieces(f"layers.{layer}.{part}") if part in names else (),
                strict=True,
            ):
                number = gguf.GGMLQuantizationType[kind.name]
                add(f"blk.{layer}.{which}.weight", rows, shape[1], number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "ab") as file:
        start = -(-file.tell() // 32) * 32
        file.truncate(start + end)
    return path


@pytest.fixture(scope="module", params=["bf16", "Q4_K_M"])
def model(request, tmp_path_factory) -> tuple[Path, int]:
    """A model, and the bytes of its largest layer as it is held."""
    folder, config = tmp_path_factory.mktemp("large"), read_shape("llama3.1-70b")
    if request.param == "bf16":
        path = write_safetensors(folder / "bf16")
        layouts = dense_layouts(config, DTYPES["bfloat16"])
    else:
        path = write_q4_k(folder / "m.gguf")
        layouts = stored_layouts(config, DTYPES["bfloat16"], pieces_of(config, "Q4_K_M"))
    return path, max(layer.nbytes for layer in layouts.layers)


def test_it_is_planned(model, capsys) -> None:
    path, layer = model
    base = ("plan", path, "--gpu", "rtx4090", "--context", 8192, "--json")
    code, out, _ = run(capsys, *base)
    planned = json.loads(out)
    assert code == 0
    assert planned["placement"]["layers"] == 80
    streamed = planned["memory"]["streamed_weights_bytes"]
    assert 0 < streamed <= 80 * layer
    code, out, _ = run(capsys, *base, "--host-memory", "16GiB", "--disk-bandwidth", "3GB/s")
    planned = json.loads(out)
    assert planned["placement"]["file_layers"] > 5
    assert "the disk" in planned["bottleneck"]


LOADING = """
import sys, threading, time
import torch
from triforce_core import Engine
path, layer, host, device = sys.argv[1], *map(int, sys.argv[2:])
anonymous, done = [], threading.Event()
def held():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) << 10 for l in status if l.startswith("RssAnon"))
def watch():
    while not done.wait(0.005):
        anonymous.append(held())
class Enough(Exception):
    pass
layers = []
def progress(phase, index, count):
    layers.append(index)
torch.zeros(1)
before = held()
threading.Thread(target=watch, daemon=True).start()
try:
    with Engine.from_pretrained(
        path, device="cpu", dtype="bfloat16", max_context=512, host_memory=host,
        device_memory=device, weights="stored" if path.endswith("gguf") else "dense",
        method="autoregressive", progress=progress,
    ) as engine:
        stays = engine.runtime.host.nbytes + engine.runtime.memory.peak_bytes
        files = len(engine.runtime.plan.placement.file_layers)
finally:
    done.set()
print(len(layers), max(anonymous) - before, stays, files)
"""


def test_it_is_loaded_in_the_memory_that_was_given(model) -> None:
    path, layer = model
    # Some layers on the device, some on the host, the rest in files.
    device, host = 5 * layer + (256 << 20), 4 * layer + (256 << 20)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(path), str(layer), str(host), str(device)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, grown, stays, files = map(int, done.stdout.split())
    assert loaded == 80
    assert 60 < files < 80
    assert grown <= stays + 2 * layer


def test_what_is_too_large_is_refused_in_a_sentence(model, capsys) -> None:
    path, layer = model
    base = ("generate", path, "-p", "a", "-n", 2, "--device", "cpu", "--dtype", "bfloat16")
    for option, size in (("--device-memory", layer), ("--host-memory", layer)):
        code, out, err = run(
            capsys, *base, "-c", 256, option, size,
            *(("--device-memory", 5 * layer) if option != "--device-memory" else ()),
        )  # fmt: skip
        assert (code, out) in ((3, ""), (2, ""))
        assert err.strip().count("\n") == 0
