"""F5 for ranks: what each accounts is what it allocates, within its own budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from allocations import allocated_peak
from helpers import BLOCK, make_model, placed, random_ids

from triforce_core import SamplingParams
from triforce_core.engine import Engine
from triforce_core.loading.load import load
from triforce_core.loading.start import Loaded
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.settings import EngineConfig
from triforce_offload.ranks import Call, Silent


class Deaf(Silent):
    """One of two ranks that takes the other one's part of every sum for nothing, and of what is
    gathered for its own: wrong numbers, in memory of the right size.
    """

    count = 2

    def __init__(self, index: int) -> None:
        self.index = index

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        # Also for the second rank, which draws for itself here.
        parts = [torch.empty_like(part) for _ in widths]
        return torch.cat([it.copy_(part)[:, :w] for it, w in zip(parts, widths, strict=True)], 1)

    def least(self, number: int) -> int:
        return number

    def of_first(self, message: Call) -> Call:
        return message


@pytest.mark.one_in(8)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("placement", ["resident", "kv", "both"])
@pytest.mark.parametrize("heads", [4, 9])
def test_accounted_bytes_cover_what_a_rank_allocates(
    tmp_path: Path, heads: int, placement: str, rank: int
) -> None:
    """9 heads over 3 key-value heads do not divide. Heads are as large as those of real models."""
    sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": 2 if heads == 4 else 3, "intermediate_size": 128 * heads}
    make_model("llama", tmp_path, max_position_embeddings=2048, **sizes)
    options = placed(placement, {"budget": 256, "draft": "none"})
    # A rank has its part of the processors, and attention on a CPU a buffer for each thread.
    config = EngineConfig().changed(device="cpu", threads=1, block_tokens=4 * BLOCK, **options)
    peaks = []

    def run() -> None:
        with closing(open_checkpoint(tmp_path)) as checkpoint:
            whole = checkpoint.config
            models = load(checkpoint, config, 1520, None, lambda *_: None, Deaf(rank))
            loaded = Loaded(models, None, "m", 0.0, whole, "", None)
            with Engine(loaded, lambda *_: None) as engine:
                engine.generate(random_ids(1500), SamplingParams(max_new_tokens=20))
                peaks.append(models.runtime.memory.peak_bytes)

    before = torch.get_num_threads()
    try:
        peak = allocated_peak(run, 0)
    finally:
        torch.set_num_threads(before)
    (accounted,) = peaks
    assert peak <= accounted
    assert accounted <= 1.35 * peak
