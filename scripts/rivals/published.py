"""The cost of the published TriForce by the planner's constants, beside its authors' measurements.

The paper measured five settings on RTX 4090s. The planner's costs of the published code must come
close to these figures; nothing is fitted to them.

    python scripts/rivals published

The published offloading path (Infini-AI-Lab/TriForce, models/TP_llama.py, models/tensor_op.py and
utils/decoding.py) streams whole layers of KV through two buffers. For each streamed layer it
synchronises the device, launches the layer's kernels, then the copy of the next layer, and
synchronises again. Forwards are launched kernel by kernel (its README: no CUDA graphs with tensor
parallelism on RTX 4090s). A step of the retrieval level verifies one token of llama-68m and covers
gamma + 1 positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from frame import print_table
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.parts.kept import kv_shape
from triforce_core.model.tensors import dense_layouts
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_core.plan.simulation.acceptance_curve import (
    MODEL_ACCEPTANCE,
    AcceptanceCurve,
    expected_tokens,
)
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.costs.forward import Costs
from triforce_core.plan.simulation.costs.launches import PLAIN
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.machine.profiles import named

DRAFTER = "llama-68m"
# Kernels of a layer: 16 for two norms, 3 + 1 + 3 products, 12 for the rotation, 4 for the cache, 2
# for attention, 2 all-reduces, 2 sums, 2 for the MLP (models/tensor_op.py).
LAYER_LAUNCHES = 47
KV_BUFFERS = 2
SPARE_TOKENS = 32
PROMPT_TOKENS, NEW_TOKENS = 130048, 256
# Bytes per second, as the second row of the table implies; see docs/planner.md.
LINK_BYTES_PER_SECOND = 25.4e9
# The memory of a card: the layers that TriForce's README keeps resident for 7B take 21.9 to 22.2
# GB.
MOST_BYTES = 22.2e9


@dataclass(frozen=True)
class PublishedRow:
    """A setting of the paper. seconds: per token. gamma: the draft length, 0 without drafts"""

    model: str
    gpus: int
    budget: int
    gamma: int
    resident_layers: int
    seconds: float


PAPER = (
    PublishedRow("llama2-7b-128k", 2, 12288, 16, 9, 0.108),
    PublishedRow("llama2-7b-128k", 2, 0, 0, 12, 0.840),
    PublishedRow("llama2-13b-128k", 2, 12288, 16, 0, 0.226),
    PublishedRow("llama2-13b-128k", 2, 0, 0, 4, 1.794),
    PublishedRow("llama2-7b-128k", 1, 8192, 12, 0, 0.312),
)


@dataclass(frozen=True)
class Published:
    """The published code in one setting.

    resident_layers: the number of layers, from the first, whose KV stays on the device
    gamma: the draft length, 0 without drafts
    """

    case: Case
    budget: int
    gamma: int
    resident_layers: int

    def __post_init__(self) -> None:
        layers = len(self.case.config.layers)
        if not 0 <= self.resident_layers <= layers:
            raise UsageError(f"resident layers must be 0 to {layers}, got {self.resident_layers}")

    def check(self) -> None:
        """Raise UsageError or DoesNotFitError if the setting is impossible."""
        self.case.check()
        available = self.case.hardware.memory_bytes
        if self.device_bytes > available:
            raise DoesNotFitError(
                "device memory as published",
                self.device_bytes,
                available,
                "use fewer resident layers or a smaller budget",
            )

    @property
    def device_bytes(self) -> int:
        """Bytes on one GPU: weights, buffers, KV of resident layers, retrieval cache, drafter."""
        case, rank = self.case, self.case.rank
        whole, own = (dense_layouts(config, case.dtype) for config in (case.config, rank))
        # Each card holds the embedding and the head in full.
        weights = own.layers_bytes + whole.nbytes - whole.layers_bytes
        kv = (KV_BUFFERS + self.resident_layers) * self._layer_kv(case.context + SPARE_TOKENS)
        if not self.gamma:
            return weights + kv
        cache = len(rank.layers) * self._layer_kv(self.budget + self.gamma + 1)
        small = dense_layouts(read_shape(DRAFTER), case.dtype)
        drafter = small.layers_bytes + 2 * small.head.nbytes
        return weights + kv + cache + drafter

    @property
    def tokens_per_pass(self) -> float:
        return expected_tokens(self.case.curve.outer, self.gamma)

    @property
    def link_bytes(self) -> int:
        streamed = len(self.case.config.layers) - self.resident_layers
        return streamed * self._layer_kv(self.case.length)

    @property
    def link_seconds(self) -> float:
        return self.link_bytes / self.case.hardware.stream_bytes_per_second

    @cached_property
    def pass_seconds(self) -> float:
        tokens, streamed = self.gamma + 1, len(self.case.config.layers) - self.resident_layers
        compute = self._layer(tokens, self.case.length)
        # The resident layers and the copy of the first streamed layer run one after another on one
        # stream.
        seconds = self.resident_layers * compute + self._costs.head(tokens)
        if streamed:
            copy = self.link_seconds / streamed
            synchronise = 2 * self._launches(1)
            seconds += copy + (streamed - 1) * max(self._launches(LAYER_LAUNCHES) + copy, compute)
            seconds += compute + streamed * synchronise
        return seconds + self._costs.round

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step of the retrieval level, over gamma + 1 positions."""
        tokens = self.gamma + 1
        layers = len(self.case.config.layers) * self._layer(tokens, self.budget + tokens)
        return layers + self._costs.head(tokens) + self._costs.round

    @cached_property
    def drafter_seconds(self) -> float:
        """Seconds of a token of llama-68m over its window, launched kernel by kernel."""
        small = Costs(read_shape(DRAFTER), self.case.dtype, self.case.hardware)
        launches = len(small.config.layers) * LAYER_LAUNCHES + PLAIN.distribution
        work = small.resident_forward(1, SINKS + WINDOW)
        return max(work, self._launches(launches))

    @property
    def draft_seconds(self) -> float:
        """Seconds of drafting. A step gives its own token, and the one before it if accepted."""
        if not self.gamma:
            return 0.0
        steps = self.gamma / (1 + self._inner)
        return steps * (self.step_seconds + self.drafter_seconds)

    @property
    def seconds_per_token(self) -> float:
        return (self.pass_seconds + self.draft_seconds) / self.tokens_per_pass

    @property
    def _inner(self) -> float:
        return self.case.curve.inner or MODEL_ACCEPTANCE

    @property
    def _costs(self) -> Costs:
        return self.case.costs

    def _layer(self, tokens: int, keys: int) -> float:
        """Seconds of a layer with all-reduces, or of the host's launches if they take longer."""
        costs = self._costs
        work = costs.before(tokens, recorded=True) + costs.after(tokens, recorded=True)
        work += costs.attend(tokens, keys, recorded=True)
        return max(work, self._launches(LAYER_LAUNCHES))

    def _launches(self, count: int) -> float:
        return count * self.case.hardware.launch_seconds

    def _layer_kv(self, tokens: int) -> int:
        return tokens * kv_shape(self.case.rank, 1, self.case.dtype).token_bytes


def as_published(row: PublishedRow) -> Published:
    """Return a row of the paper on RTX 4090s, at the acceptance that its figures imply (.95)."""
    hardware = replace(named("rtx4090"), gpus=row.gpus, link_bytes_per_second=LINK_BYTES_PER_SECOND)
    curve = AcceptanceCurve(
        outer=0.95,
        budget=row.budget or 4096,
        inner=MODEL_ACCEPTANCE,
        context=PROMPT_TOKENS + NEW_TOKENS // 2,
    )
    case = Case(
        read_shape(row.model), hardware, PROMPT_TOKENS + NEW_TOKENS, NEW_TOKENS, curve=curve
    )
    return Published(case, row.budget, row.gamma, row.resident_layers)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    rows = {}
    for row in PAPER:
        published = as_published(row)
        published.check()
        seconds = published.seconds_per_token
        name = f"{row.model}, {row.gpus} GPUs, gamma {row.gamma or 'none'}"
        rows[f"{name}, {row.resident_layers} layers resident"] = {
            "measured by them": f"{row.seconds:.3f}",
            "SIMULATED": f"{seconds:.3f}",
            "difference": f"{seconds / row.seconds - 1:+.0%}",
        }
    print_table("seconds per token", rows, ["measured by them", "SIMULATED", "difference"])
