"""Layers that the processor computes in a pass: how long they take, and how many pay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from triforce_core.model.feed_forward import Experts
from triforce_core.plan.simulation.costs.forward import Costs
from triforce_offload.machine.profiles import PRODUCT_ROWS, SPLIT_ROWS
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placing import for_processor
from triforce_offload.weights.experts import MOST_INSERTED
from triforce_offload.weights.formats import Read

# Seconds of a layer's waits for the device, what crosses for them, and its small operations. These
# operations and attention take .32 ms in SmolLM2-135M on 2 cores of an AMD EPYC (`scripts/bench
# host_compute`, bfloat16: .019 s for 30 layers of 7 MB and an output matrix of 57 MB, which are
# read at 28 GB/s). A GPU computes the attention: the waits are assumed to take about as long.
_LAYER_SECONDS = 350e-6
# Those of a layer's experts alone. On the same machine 70 us were measured for their products
# without arithmetic, and 60 us for looking up and noting what a pool has, by a script that is not
# kept. The rest is assumed, for what crosses and for the waits.
_EXPERTS_SECONDS = 250e-6
# Seconds in which the queries of a layer cross, its thread wakes and its result crosses: assumed.
_HANDING_SECONDS = 200e-6
# Attention reaches this share of the rate of products or more, and a key or value takes as long to
# read as a product with this many rows, dense and split (`scripts/bench host_rows`, bfloat16).
_ATTENTION_SHARE = 0.8
_KEY_ROWS = (5, 12)


# Share of a token's experts that a pool has, by the share of a layer's experts that it holds, if
# every missing expert takes the place of the one that was used longest ago: measured by others with
# Qwen3-30B-A3B (8 of 128; kekzl/imp #1374, #1359) and Qwen3.8-Flash-Next (10 of 512; llama.cpp
# #27861, kekzl/imp #2061), the lower one where they differ.
_POOL_HITS = ((0, 0), (0.06, 0.37), (0.12, 0.62), (0.19, 0.72), (0.25, 0.79), (0.38, 0.87))
_POOL_HITS += ((0.64, 0.95), (1, 1))
# Where a token chooses a larger share of the experts than this, neighbouring tokens choose the same
# ones hardly more often than by chance: 2 of 8 in Mixtral (Jiang et al., 2024, table 5).
_FEW_CHOSEN = 1 / 8


def pool_hits(slots: int, experts: Experts) -> float:
    """Return which share of a token's experts a pool has that holds some of a layer's experts."""
    share = min(1.0, slots / experts.count)
    if experts.active > _FEW_CHOSEN * experts.count:
        return share
    for (low, before), (high, after) in pairwise(_POOL_HITS):
        if share <= high:
            return before + (after - before) * (share - low) / (high - low)
    return 1.0


@dataclass(frozen=True)
class Processor:
    """The processor of a machine, which computes layers for `tokens` rows, but for their attention.
    If several GPUs share the model, it computes for all of them at the same time: each has an equal
    part of its rates.

    experts_only: whether it computes their experts alone
    expert_slots: number of experts in a pool on the device, which the device computes
    """

    costs: Costs
    tokens: int
    experts_only: bool = False
    expert_slots: int = 0

    @property
    def known(self) -> bool:
        """Whether its rates are known."""
        hardware, rates = self.costs.hardware, (self._rate, self._flops_per_second)
        return hardware.emulated or None not in rates

    @property
    def _rate(self) -> float | None:
        """Rate at which its products read host memory, if nothing but other GPUs' products does."""
        hardware = self.costs.hardware
        return self._part(hardware.processor_bytes_per_second or hardware.host_bytes_per_second)

    @property
    def _flops_per_second(self) -> float | None:
        return self._part(self.costs.hardware.host_flops_per_second)

    def _part(self, rate: float | None) -> float | None:
        """Return one GPU's part of a rate."""
        return rate and rate / self.costs.hardware.gpus

    @cached_property
    def on_device(self) -> float:
        """Seconds in which the device would compute the same of an average layer."""
        if self.experts_only:
            return self._scale * self.costs.experts(self.tokens)
        return self.costs.before(self.tokens) + self.costs.after(self.tokens)

    def seconds(self, layers: int, link_bytes: float) -> float:
        """Return the seconds in which the processor computes a number of average layers.

        link_bytes: bytes that cross the link meanwhile
        """
        if self.costs.hardware.emulated:
            # The processor is the device.
            return layers * self.on_device
        nbytes, computing = self._of_layer
        reading = self._reading(layers * nbytes, link_bytes)
        waits = _EXPERTS_SECONDS if self.experts_only else _LAYER_SECONDS
        # The device computes the experts of its pools meanwhile.
        return max(reading, layers * computing, layers * self._pooled) + layers * waits

    @property
    def inserted(self) -> float:
        """Number of experts of a layer that cross the link to its pool after a pass."""
        return min(MOST_INSERTED, self._missing) if self.expert_slots else 0.0

    @property
    def _pooled(self) -> float:
        """Seconds in which the device computes the chosen experts that are in a layer's pool."""
        if not self.expert_slots:
            return 0.0
        share = 1 - self._missing / self._experts.distinct(self.tokens)
        return share * self.on_device

    @property
    def _scale(self) -> float:
        """Experts of a layer that the processor has, by those of an average layer: with pools, all
        of its layers have experts.
        """
        layers = self.costs.config.layers
        return len(layers) / sum(spec.mlp.active > 0 for spec in layers) if self.expert_slots else 1

    @property
    def _missing(self) -> float:
        """Number of experts that the rows choose and that a pool does not have: each row's, unless
        another row's are the same.
        """
        mlp = self._experts
        missing = mlp.active * (1 - pool_hits(self.expert_slots, mlp))
        return min(mlp.distinct(self.tokens), self.tokens * missing)

    @property
    def _experts(self) -> Experts:
        layers = self.costs.config.layers
        return next(spec.mlp for spec in layers if isinstance(spec.mlp, Experts))

    def attention_seconds(
        self, layers: int, keys: float, nbytes: float, link_bytes: float
    ) -> float:
        """Return the seconds in which the processor attends to blocks of some layers together.

        keys, nbytes: of these blocks. link_bytes: bytes that cross the link meanwhile
        """
        costs, mixer = self.costs, self.costs.config.attention
        read, products = float(mixer.kept), 2.0 * self.tokens * mixer.queries
        # What is split takes fewer bytes.
        split = nbytes < keys * read * costs.dtype.itemsize
        operations = 2.0 * keys * (products / _ATTENTION_SHARE + _KEY_ROWS[split] * read)
        computing = operations / self._flops_per_second
        return max(self._reading(nbytes, link_bytes), computing) + layers * _HANDING_SECONDS

    def _reading(self, nbytes: float, link_bytes: float) -> float:
        """Return the seconds in which the processor reads `nbytes` while others cross the link, at
        most as fast as it can: both share the rate of host memory.
        """
        hardware = self.costs.hardware
        link = hardware.stream_bytes_per_second
        whole = self._part(hardware.host_bytes_per_second) or max(self._rate, link)
        reading = (nbytes + link_bytes) / whole
        if whole > link:
            reading = min(reading, nbytes / (whole - link))
        return max(reading, nbytes / self._rate)

    @cached_property
    def _of_layer(self) -> tuple[float, float]:
        """Bytes that an average layer reads, of experts those that the rows choose, and seconds of
        its arithmetic.
        """
        costs, matrices, tokens = self.costs, self.costs.matrices, self.tokens
        before, after, experts = costs.elements
        nbytes, products = matrices.qkv + matrices.rest, before + after
        if self.experts_only:
            nbytes = products = 0.0
        decoding = products * _decoding_rows(matrices.layer_read)
        if experts:
            mlp = self._experts
            share = self._scale * self._missing / mlp.count
            nbytes += matrices.experts * share
            decoding += experts * share * _decoding_rows(matrices.experts_read)
            # A pool has as large a part of the experts of each row as of all.
            there = self._scale * self._missing / mlp.distinct(tokens)
            products += mlp.active * experts / mlp.count * there
        operations = 2.0 * (tokens * products + decoding)
        return nbytes, operations / self._flops_per_second


def _decoding_rows(read: Read) -> int:
    """Return with how many rows a product takes as long as decoding what it reads."""
    return SPLIT_ROWS if read is Read.SPLIT_BF16 else PRODUCT_ROWS


def fastest_counts(processor: Processor, memory: MemoryPlan, compute_seconds: float) -> set[int]:
    """Return numbers of layers that the processor might compute: none, that with which a pass is
    shortest if processor and link never wait for one another, and all that it may.

    memory: a plan in which it computes none. compute_seconds: those of its pass
    """
    layers = for_processor(memory)
    if not layers:
        return {0}
    size = sum(memory.layers[layer].prefill_link_bytes for layer in layers) / len(layers)
    rate = processor.costs.hardware.stream_bytes_per_second

    def seconds(count: int) -> float:
        crossing = memory.link_bytes - count * size
        computing = processor.seconds(count, crossing) - count * processor.on_device
        return max(crossing / rate, compute_seconds + computing)

    return {0, min(range(len(layers) + 1), key=seconds), len(layers)}
