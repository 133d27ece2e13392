"""Draft copies, rounded by what their matrices multiply, which a short prefill shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch

from triforce_core.decoding.contexts.models import Models
from triforce_core.model.fused import FusedLayer
from triforce_core.plan.sizes import PREFILL_CHUNK
from triforce_kernels.weights.inputs import InputSizes, added_to
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.ranks import all_agree
from triforce_offload.weights.draft_copies import DraftCopies
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.store import Weights

# Tokens of the prefill. With 64 or 1,024 of them SmolLM2-135M accepted as many drafts
# (docs/benchmarks.md, "Weights and KV read cheaply").
RANDOM_TOKENS = 256


def tokens_read(context_tokens: int) -> int:
    """Return the number of random tokens that are prefilled. context_tokens: most that may be"""
    return min(RANDOM_TOKENS, context_tokens)


@torch.inference_mode()
def fill_copies(models: Models, progress: Callable[[str, int, int], None]) -> None:
    """Make the copies that the cache did not have, if any rank lacks some. The full model prefills
    random tokens, and the copy of each layer is made while its exact weights are on the device.

    progress: called with "copies", the layers done and the number of layers
    Raises DoesNotFitError, LinkError or RankError.
    """
    copies, runtime, model = models.draft_copies, models.runtime, models.target
    lacks = copies is not None and bool(copies.missing)
    if all_agree(models.ranks, not lacks):
        return
    count = tokens_read(runtime.plan.requirements.context_tokens)
    coins = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab, (count,), generator=coins)
    weights = _Copying(runtime.passes.prefill_weights, copies)
    batch = ForwardBatch.text(tokens, 0, model.device)

    def report(layer: int) -> None:
        progress("copies", layer + 1, len(model.config.layers))

    memory = runtime.memory
    with memory.typed_errors(), memory.current(), closing(runtime.sequence()) as sequence:
        sequence.kv.expect(count)
        with sequence.prefill(count) as cache:
            model.forward(batch, weights, cache, chunk=PREFILL_CHUNK, each_layer=report)


class _Copying:
    """Weights for a prefill. When a layer was computed, its copy is made."""

    def __init__(self, weights: Weights, copies: DraftCopies | None) -> None:
        self._weights = weights
        self._copies = copies

    @contextmanager
    def layer(self, index: int) -> Iterator[Views]:
        """Weights.layer."""
        with self._weights.layer(index) as exact:
            if self._copies is None or index not in self._copies.missing:
                yield exact
                return
            sizes, computed = InputSizes(), Views(exact)
            # Products that are fused with others do not show what they multiply.
            computed.prepared = FusedLayer()
            with added_to(sizes):
                yield computed
            self._copies.make(index, exact, lambda name: sizes.of(exact[name]))
