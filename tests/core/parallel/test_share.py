"""What each rank has of a model: all of it is somewhere, and a rank reads its share alone."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import gguf
import pytest
import torch
from fp8_files import FP8_SIZES, quantise
from gguf_files import write_gguf
from helpers import make_model
from integer_files import WAYS, to_integers

from triforce_core.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import DenseMLP
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.layers import LayerSpec
from triforce_core.model.parts.recurrent import Mamba2
from triforce_core.model.sharing.divided import spread
from triforce_core.model.sharing.share import Share, mlp_unit
from triforce_core.model.tensors import Layouts, dense_layouts, stored_layouts
from triforce_kernels.weights.linear import Weight, dense_rows
from triforce_offload.checkpoint.opened import OpenedFile
from triforce_offload.errors import UsageError
from triforce_offload.weights.formats import Blocks
from triforce_offload.weights.layouts import FlatLayout

FLOAT = torch.float32


def with_heads(heads: int, kv_heads: int, mlp: int = 14336) -> ModelConfig:
    config = read_shape("llama3.1-8b")
    mixer = replace(config.attention, heads=heads, kv_heads=kv_heads)
    return replace(config, layers=(LayerSpec(mixer, DenseMLP(mlp)),) * len(config.layers))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (9, 3), (32, 32), (16, 1), (12, 6)])
def test_every_part_of_a_model_is_on_some_rank(heads: int, kv_heads: int, ranks: int) -> None:
    config = with_heads(heads, kv_heads)
    if (heads, kv_heads, ranks) == (9, 3, 8):
        # Ranks of each key-value head: 2, 3, 3.
        queries = Share.of(config, 0, 8).heads(config.attention).queries
        assert [len(part) for part in queries] == [2, 1, 1, 1, 1, 1, 1, 1]
    shares = [Share.of(config, rank, ranks) for rank in range(ranks)]
    share = shares[0]
    divided = share.heads(config.attention)
    for parts, count in (
        (divided.queries, heads),
        ([own.columns(config.layers[0].mlp.width) for own in shares], config.layers[0].mlp.width),
        (share.vocab, config.vocab),
    ):
        assert [i for part in parts for i in part] == list(range(count))
    assert {i for part in divided.keys for i in part} == set(range(kv_heads))
    group = heads // kv_heads
    for rank, own in enumerate(shares):
        local = own.config
        attended = {head // group for head in divided.queries[rank]}
        assert attended == set(divided.keys[rank]), "a head is where its keys are"
        assert local.attention.heads % local.attention.kv_heads == 0
        assert len(divided.keys[rank]) == 1 or kv_heads >= ranks
        assert local.layers[0].mlp.width % 64 == 0
        assert local.vocab == config.vocab
    sizes = [own.config.attention.heads for own in shares]
    assert max(sizes) == sizes[0], "the first rank has the most"


def test_what_does_not_spread_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"9 attention heads over 3 .* over 16 GPUs.* share 3"):
        Share.of(with_heads(9, 3), 0, 16)
    with pytest.raises(UsageError, match="an MLP of 2 columns"):
        Share.of(with_heads(32, 8, mlp=2), 0, 4)
    mamba = Mamba2(key_heads=3, value_heads=12, key_dim=8, value_dim=8, taps=4)
    config = with_heads(32, 8)
    config = replace(config, layers=(*config.layers, LayerSpec(mamba, DenseMLP(64))))
    with pytest.raises(UsageError, match="3 groups of heads do not spread over 4 GPUs"):
        Share.of(config, 0, 4)


def test_spread_is_as_even_as_can_be() -> None:
    for count in range(1, 30):
        for over in range(1, count + 1):
            sizes = [len(part) for part in spread(count, over)]
            assert sum(sizes) == count
            assert sorted(sizes, reverse=True) == sizes
            assert sizes[0] - sizes[-1] <= 1


def filled(checkpoint: Checkpoint, layouts: Layouts) -> dict[str, Weight]:
    """Every tensor of a checkpoint, or of a share of one."""

    def views(layout: FlatLayout) -> dict[str, Weight]:
        return layout.views(torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8))

    tensors: dict[str, Weight] = {}
    for name, view in views(layouts.head).items():
        checkpoint.read(name, view)
        tensors[name] = view
    for i, layout in enumerate(layouts.layers):
        read = views(layout)
        checkpoint.read_layer(i, read)
        tensors |= {f"layers.{i}.{name}": view for name, view in read.items()}
    return tensors


def decoded(weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor) and weight.dim() < 2:
        return weight
    return torch.cat([rows for _, rows in dense_rows(weight, FLOAT)])


def held_against_the_whole(path: Path, ranks: int, *, stored: bool = False) -> list[Layouts]:
    """Reads a checkpoint whole and in shares and compares number by number. Returns the layouts of
    the shares.
    """
    used = []
    with closing(open_checkpoint(path)) as checkpoint:
        config = checkpoint.config
        whole = filled(checkpoint, dense_layouts(config, FLOAT))
        unit = mlp_unit(config, checkpoint.pieces)
        for rank in range(ranks):
            share = Share.of(config, rank, ranks, unit)
            shared = checkpoint.shared(share)
            layouts = dense_layouts(share.config, FLOAT)
            if stored:
                layouts = stored_layouts(share.config, FLOAT, shared.pieces)
            used.append(layouts)
            for name, part in filled(shared, layouts).items():
                expected = whole[name]
                pieces = checkpoint.pieces(name) if expected.dim() > 1 else None
                rows = [count for count, _ in pieces] if pieces else None
                if name.endswith("qkv_bias"):
                    mixer = config.attention
                    rows = [mixer.queries, mixer.keys, mixer.keys]
                if name.endswith("conv_bias") and isinstance(config.recurrent, Mamba2):
                    mixer = config.recurrent
                    rows = [mixer.keys, mixer.keys, mixer.values]
                split = expected.split(rows or expected.shape[0])
                taken = []
                for piece, window in zip(split, share.windows(name, len(split)), strict=True):
                    if (own := window.rows) is not None:
                        matrices = piece.chunk(window.matrices)
                        piece = torch.cat([each[own.start : own.stop] for each in matrices])
                    if window.columns is not None:
                        piece = piece[:, window.columns.start : window.columns.stop]
                    taken.append(piece)
                assert torch.equal(decoded(part), torch.cat(taken)), (name, rank)
    return used


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *product(("llama", "llama-mqa", "llama-bias", "qwen3", "gemma4"), (2, 3, 4)),
        *product(("qwen2_moe", "mixtral"), (2, 3)),
        *product(("olmo2", "olmo3"), (2, 4)),
        *product(("qwen3_5", "lfm2", "lfm2-moe"), (2, 3)),
        *product(("granite4-h", "granite4-h-moe", "nemotron_h-latent-moe"), (2,)),
        *product(("gemma4-moe", "gpt-oss-moe", "deepseek_v2-moe", "glm4_lite-moe"), (2, 3)),
    ],
)
def test_a_rank_reads_its_share_of_safetensors(tiny, family: str, ranks: int) -> None:
    layouts = held_against_the_whole(tiny(family)[0], ranks)
    assert len(layouts) == ranks
    assert not any(each.block_types for each in layouts)


@pytest.mark.parametrize(
    "family", ["llama", "llama-mqa", "gemma4", "qwen3_5", "qwen2_moe", "glm4_lite-moe"]
)
def test_a_rank_reads_no_byte_of_another_share(tiny, monkeypatch, family: str) -> None:
    read = []
    fill = OpenedFile.fill

    def counted(self: OpenedFile, into: memoryview, start: int, what: str) -> None:
        read.append(len(into))
        fill(self, into, start, what)

    monkeypatch.setattr(OpenedFile, "fill", counted)
    with closing(open_checkpoint(tiny(family)[0])) as checkpoint:
        for rank in range(2):
            share = Share.of(checkpoint.config, rank, 2)
            read.clear()
            held = filled(checkpoint.shared(share), dense_layouts(share.config, FLOAT))
            assert sum(read) == sum(it.numel() * FLOAT.itemsize for it in held.values())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0"])
def test_a_rank_reads_its_share_of_blocks(tmp_path, kind: str, ranks: int) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    sizes |= {"head_dim": 32, "intermediate_size": 192}
    model = make_model("llama", tmp_path, **sizes)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    held_against_the_whole(tmp_path / "m.gguf", ranks)
    for layouts in held_against_the_whole(tmp_path / "m.gguf", ranks, stored=True):
        assert {each.name for each in layouts.block_types} == {kind}


def test_columns_that_cut_blocks_are_dense(tmp_path) -> None:
    """Two heads of 24 on each rank, and blocks of 32."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}
    model = make_model("llama", tmp_path, **sizes)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    for layouts in held_against_the_whole(tmp_path / "m.gguf", 2, stored=True):
        for layer in layouts.layers:
            in_blocks = {name for name, it in layer.formats.items() if isinstance(it, Blocks)}
            assert in_blocks == {"qkv", "gate_up", "down"}


@pytest.mark.parametrize("method", ["fp8", *WAYS])
def test_a_rank_reads_its_share_of_numbers_in_parts(tmp_path, method: str) -> None:
    """FP8 with its scales, and integers with scales and zeros."""
    model = make_model("qwen3", tmp_path, **FP8_SIZES)
    if method == "fp8":
        quantise(tmp_path, model)
    else:
        to_integers(tmp_path, model, method)
    for stored in (False, True):
        for layouts in held_against_the_whole(tmp_path, 2, stored=stored):
            assert bool(layouts.block_types) == stored
