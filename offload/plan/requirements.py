"""What a model and its contexts require of device and host, for any placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from triforce_offload.kv.index.shape import IndexShape
from triforce_offload.kv.recent.shapes import RecentShape
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.states.shape import StateShape
from triforce_offload.kv.windows.shape import WindowShape
from triforce_offload.weights.experts import ExpertSizes


@dataclass(frozen=True)
class Requirements:
    """Memory estimate of a model and its contexts. Sizes in bytes.

    layer_bytes: size of each layer's weights as they are stored
    low_bytes: size of the low bits of split matrices in each layer, which only passes read; empty
        if there are none
    expert_bytes: size of each layer's experts, which may be away while the rest of the layer is on
        the device; empty if there are none
    experts: sizes of each layer's experts one by one; None where they cannot be apart, or where
        there are none
    head_bytes: size of final norm and output matrix, which are always on the device
    embedding_bytes: size of the input embedding if it is a matrix of its own, 0 if it is tied to
        the head
    prefill_workspace_bytes: temporaries of a prefill that fills the context
    pass_workspace_bytes: temporaries of a pass, of drafting and of sampling
    drafting_bytes: everything used for drafting, such as a retrieval cache; always on the device
    copy_bytes: size of each layer's draft copy; empty if there are none
    copies_all: whether resident layers have a copy too
    decoding_bytes: temporaries of products with draft copies
    gather_bytes: size of the device buffers through which chunks of streamed KV are retrieved; the
        host has buffers of the same size
    kv_layers: layers that store KV in blocks; None if all do
    windows: geometry of the KV of layers with a window; None if there are none
    states: geometry of the states of recurrent layers; None if there are none
    ngrams: geometry of the inputs of the convolution behind n-gram embeddings; None without any
    index: geometry of the index of keys; None without one
    records_passes: whether passes are recorded as CUDA graphs if nothing of them streams
    sequences: number of sequences in a pass, each of up to context_tokens. drafting_bytes and
        gather_bytes are for all sequences, temporaries for one
    looked_up_bytes: host bytes of the per-layer embeddings of a prompt
    """

    layer_bytes: tuple[int, ...]
    head_bytes: int
    embedding_bytes: int
    prefill_workspace_bytes: int
    pass_workspace_bytes: int
    kv: KVShape
    context_tokens: int
    max_pass_tokens: int
    drafting_bytes: int = 0
    gather_bytes: int = 0
    copy_bytes: tuple[int, ...] = ()
    copies_all: bool = False
    decoding_bytes: int = 0
    low_bytes: tuple[int, ...] = ()
    expert_bytes: tuple[int, ...] = ()
    experts: tuple[ExpertSizes | None, ...] = ()
    kv_layers: tuple[int, ...] | None = None
    windows: WindowShape | None = None
    states: StateShape | None = None
    ngrams: StateShape | None = None
    index: IndexShape | None = None
    records_passes: bool = False
    sequences: int = 1
    looked_up_bytes: int = 0

    @property
    def max_draft_tokens(self) -> int:
        """Number of tokens of the longest draft, which a pass verifies."""
        return self.max_pass_tokens - 1

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @cached_property
    def kv_index(self) -> tuple[int | None, ...]:
        """Index of each layer among those that store KV in blocks, None for any other layer."""
        storing = range(self.layers) if self.kv_layers is None else self.kv_layers
        places = {layer: i for i, layer in enumerate(storing)}
        return tuple(places.get(layer) for layer in range(self.layers))

    @cached_property
    def weights_bytes(self) -> int:
        """Size of the weights of all layers."""
        return sum(self.layer_bytes)

    @property
    def kv_blocks(self) -> int:
        """Blocks of all layers and sequences with full contexts; the newest tokens are in tails."""
        return self.sequences * self.kv.layers * (self.context_tokens // self.kv.block_tokens)

    @property
    def temporary_bytes(self) -> int:
        """Temporaries of passes, or of the prefill of one sequence while the others wait."""
        others = (self.sequences - 1) * self.pass_workspace_bytes
        return others + max(self.prefill_workspace_bytes, self.pass_workspace_bytes)

    @property
    def tail_bytes(self) -> int:
        """Size of the tails of all sequences."""
        return self.sequences * self.kv.tail_bytes(self.max_pass_tokens)

    @property
    def recent(self) -> tuple[RecentShape, ...]:
        """Geometry of the stores that hold recent tokens only, or that no pass copies."""
        return tuple(filter(None, (self.windows, self.states, self.ngrams, self.index)))

    @property
    def window_bytes(self) -> int:
        """Device bytes of the windows of all sequences."""
        if self.windows is None:
            return 0
        return self.sequences * self.windows.device_bytes(self.max_pass_tokens)

    @property
    def state_bytes(self) -> int:
        """Device bytes of the states of all sequences, and of what n-grams and an index keep."""
        shapes = filter(None, (self.states, self.ngrams, self.index))
        return self.sequences * sum(each.device_bytes(self.max_pass_tokens) for each in shapes)

    @property
    def marks_bytes(self) -> int:
        """Host bytes of copies of windows and states, to which contexts can be cut."""
        return self.sequences * sum(shape.marks_bytes for shape in self.recent)
