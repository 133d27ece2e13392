"""What a plan counts beside bytes and products: small kernels, laws, and operations on integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triforce_core.decoding.distributions import limited
from triforce_core.model.checkpoints.drafters.found import typical_head
from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.dense import FAMILIES
from triforce_core.model.families.hf import from_hf
from triforce_core.model.feed_forward import Activation, DenseMLP
from triforce_core.model.heads.assistant import AssistantModel
from triforce_core.model.heads.dflash import DFlashModel
from triforce_core.model.heads.head import OwnTensors
from triforce_core.model.heads.joins import Assistant, Convolutions, DFlash, Selector
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.layers import Attention, LayerSpec, Norms
from triforce_core.model.parts.specs import Streams
from triforce_core.model.rope import Rope
from triforce_core.model.tensors import drafter_layouts
from triforce_core.model.transformer import Ends, Model
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.costs import launches as constants
from triforce_core.plan.simulation.costs.drafter import drafter_cost
from triforce_core.plan.simulation.costs.launches import (
    ASSISTANT_LAUNCHES,
    ASSISTANT_LAYER_LAUNCHES,
    CONVOLUTION_LAUNCHES,
    COPY_LAUNCHES,
    FUSED,
    HEAD_LAUNCHES,
    KEYS_LAUNCHES,
    POSITION_LAUNCHES,
    SMALL_KERNEL_SECONDS,
    STATES_LAUNCHES,
    further_launches,
)
from triforce_core.plan.simulation.search import choose
from triforce_kernels import layer
from triforce_kernels.attention import streaming
from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.dense import DenseKeys, attend_dense
from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.dispatch import KERNELS, _load
from triforce_kernels.layer import rope_into
from triforce_kernels.streams import streams as streams_kernels
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.copied import CopiedKV
from triforce_offload.kv.shape import CopiedShape
from triforce_offload.machine.profiles import gpu_names, integer_rate, named
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.formats import DTYPES
from triforce_offload.weights.layouts import Views

TOKENS = 3
TINY = replace(
    read_shape("smollm2-135m"), layers=(LayerSpec(Attention(4, 2, 8), DenseMLP(48)),), hidden=32
)


@dataclass
class Cache8:
    """A retrieval cache in 8 bits, as `kv/rounded` attends to one."""

    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 2, 16, 8, dtype=torch.int8))
    scale: torch.Tensor = field(default_factory=lambda: torch.ones(2, 2, 8))

    def attend(
        self, index: int, qkv: torch.Tensor, batch: ForwardBatch, sinks: None
    ) -> torch.Tensor:
        keys, values = self.rows
        query = rope_into(qkv, *batch.rotation, keys, values, 0, self.scale)
        out = attend_cache(query.reshape(2, -1, 8), keys, values, batch.rows, 0).out
        return torch.mul(out, self.scale[1].unsqueeze(1), out=out).view(query.shape)


@dataclass
class Cache16:
    """A cache in 16 bits, as `DenseKV` is."""

    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 2, 16, 8).bfloat16())

    def dense(self, index: int, batch: ForwardBatch) -> DenseKeys:
        return DenseKeys(*self.rows, 0)

    def attend(
        self, index: int, qkv: torch.Tensor, batch: ForwardBatch, softmax: Softmax = PLAIN
    ) -> torch.Tensor:
        return attend_dense(self.dense(index, batch), qkv, batch.rotation, softmax, batch.visible)


@dataclass
class OneLayer:
    """The weights of a model of one layer."""

    views: Views

    @contextmanager
    def layer(self, index: int) -> Iterator[Views]:
        yield self.views


class Launched(TorchDispatchMode):
    """Kernels of PyTorch's, by name: what makes no view and fills something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        plain = operation.overloadpacket.__name__
        if not (self.inside or operation.is_view or plain.startswith(("empty", "_unsafe_view"))):
            self.names.append(plain)
        return operation(*args, **kwargs or {})


def launches_of(launched: Launched, run: Callable[[], object]) -> int:
    """Return what `run` launches."""
    launched.names = []
    with launched:
        run()
    return len(launched.names)


# What a GPU launches for a kernel of the table: attention over a cache merges its parts.
KERNELS_OF = {"attend_cache": 2}


PRODUCTS = ("mm", "linear", "addmm")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Counts what a GPU launches."""
    launched = Launched()

    def counting(kernel: str, device: torch.device):
        def run(*values, **named):
            launched.names += [kernel] * KERNELS_OF.get(kernel, 1)
            launched.inside = True
            try:
                given = _load(KERNELS[kernel][0])(*values, **named)
                # A kernel writes what it gives into memory that it allocates.
                return given.contiguous() if isinstance(given, torch.Tensor) else given
            finally:
                launched.inside = False

        return run

    for module in (layer, streaming, streams_kernels):
        monkeypatch.setattr(module, "implementation", counting)
    return launched


@pytest.mark.usefixtures("recordable")
@pytest.mark.parametrize("streams", [None, Streams(4, 8)])
def test_kernels_of_a_layer_are_as_many_as_the_code_launches(launched, streams) -> None:
    """Of a step of the retrieval model, its cache in 8 bits: products aside they are small."""
    config = replace(TINY, layers=(replace(TINY.layers[0], streams=streams),))
    shapes = config.layers[0].shapes(TINY.hidden).items()
    views = Views((name, torch.full(shape, 0.1)) for name, shape in shapes)
    batch = ForwardBatch.text(torch.zeros(TOKENS, dtype=torch.int64), 0, torch.device("cpu"))
    batch = replace(batch, rotation=(torch.ones(TOKENS, 8), torch.zeros(TOKENS, 8)))
    matrix, norm = torch.ones(1, TINY.hidden), torch.ones(TINY.hidden)
    ends = Ends(matrix, norm, matrix)
    model, cache = Model(config, ends, None, torch.device("cpu")), Cache8()
    hidden = torch.ones(TOKENS, config.width)
    with launched:
        model._layer(0, views, hidden, cache, batch)
    products = [name for name in launched.names if name in PRODUCTS]
    small = FUSED.small_before + FUSED.small_after + 2  # scaling, and merging what attention gave
    assert len(products) == (10 if streams else 4)
    attention = launched.names.count("attend_cache") - 1
    further = sum(further_launches(config.layers[0], on_gpu=True)) - (len(products) - 4)
    assert len(launched.names) - len(products) - attention == small + further, launched.names
    assert FUSED.before + FUSED.after == FUSED.small_before + FUSED.small_after + 4


def drafter_of_blocks(*, second: bool) -> tuple[DFlashModel, OneLayer]:
    """A drafter of one layer, and its weights. second: whether it is one of DFlash 2"""
    join = DFlash(
        *((1,), TINY.hidden, 4, 0, 16, (False,)),
        Convolutions(2, 4) if second else None,
        Selector(3, 8) if second else None,
    )
    layer = LayerSpec(Attention(4, 2, 8, qk_norm=True), DenseMLP(48), joins=join)
    config = replace(TINY, layers=(layer,), vocab=50)

    def views(shapes: dict[str, tuple[int, ...]]) -> Views:
        made = ((name, torch.full(shape, 0.1)) for name, shape in shapes.items())
        return Views((name, each.bfloat16()) for name, each in made)

    matrix, norm = torch.ones(50, TINY.hidden), torch.ones(TINY.hidden)
    ends = Ends(matrix.bfloat16(), norm.bfloat16(), matrix.bfloat16())
    target = Model(replace(TINY, vocab=50), ends, None, torch.device("cpu"))
    own = OwnTensors(views(config.own_ends), None, None)
    return DFlashModel(config, target, own), OneLayer(views(layer.shapes(TINY.hidden)))


def assistant() -> tuple[AssistantModel, OneLayer, CopiedKV]:
    """An assistant of two layers, one with a window, its weights, and what it attends to."""
    mixer = Attention(4, 2, 8, qk_norm=True)
    join = Assistant(TINY.hidden, (1, 0), 2 * mixer.kept)
    sharing = replace(mixer, projects_keys=False, projects_values=False)
    narrow = LayerSpec(
        sharing, DenseMLP(48, Activation.GELU_TANH), Norms.AROUND, output_scale=True, joins=join
    )
    ropes = {"rope": RopeConfig(theta=1e6), "window_rope": RopeConfig(theta=1e4)}

    def with_windows(spec: LayerSpec, hidden: int) -> ModelConfig:
        windowed = replace(spec, mixer=replace(spec.mixer, window=8, window_rope=True))
        return replace(TINY, layers=(windowed, spec), vocab=50, hidden=hidden, **ropes)

    def views(shapes: dict[str, tuple[int, ...]]) -> Views:
        return Views((name, torch.full(shape, 0.1).bfloat16()) for name, shape in shapes.items())

    whole, config = with_windows(LayerSpec(mixer, DenseMLP(48)), 32), with_windows(narrow, 16)
    matrix, norm = torch.ones(50, TINY.hidden).bfloat16(), torch.ones(TINY.hidden).bfloat16()
    device = torch.device("cpu")
    target = Model(whole, Ends(matrix, norm, matrix), Rope(whole, device, None, 64), device)
    model = AssistantModel(config, target, OwnTensors(views(config.own_ends), None, None))
    shape = CopiedShape(2, 8, 4, 16, 4, torch.bfloat16)
    keys = CopiedKV(shape, shape, DeviceMemory(device, 1 << 20), "keys")
    return model, OneLayer(views(narrow.shapes(16))), keys


@pytest.mark.usefixtures("recordable")
def test_kernels_of_an_assistant_are_as_many_as_the_code_launches(launched) -> None:
    """Of a step, and of the keys and states of new tokens."""
    model, weights, keys = assistant()
    tapped = torch.ones(TOKENS, model.config.joins.tapped_width(16)).bfloat16()
    states, positions = model.states(tapped), torch.arange(TOKENS)

    def note() -> None:
        for kind, rows in zip(keys.kinds, model.keys(tapped, positions), strict=True):
            kind.write(0, rows)
        torch.cat((states, model.states(tapped)))

    def step() -> None:
        keys.begin()
        model.step(ForwardBatch(torch.tensor([1]), torch.tensor([3])), states[:1], weights, keys)

    # The drafter makes the positions, by three.
    assert launches_of(launched, note) == COPY_LAUNCHES - 3
    layers = len(model.config.layers) * (FUSED.layer - FUSED.merge + 1 + ASSISTANT_LAYER_LAUNCHES)
    assert launches_of(launched, step) == HEAD_LAUNCHES + ASSISTANT_LAUNCHES + layers


@pytest.mark.usefixtures("recordable")
def test_kernels_of_a_drafter_of_blocks_are_as_many_as_the_code_launches(launched) -> None:
    """Of the states of new tokens, of convolutions, and of a place behind a block."""
    count = partial(launches_of, launched)
    batch = ForwardBatch.text(torch.zeros(4, dtype=torch.int64), 0, torch.device("cpu"))
    cache, blocks = Cache16(), {}
    for second in (False, True):
        drafter, weights = drafter_of_blocks(second=second)
        blocks[second] = count(partial(drafter.block, batch, weights, cache))
    tapped = torch.ones(TOKENS, TINY.hidden).bfloat16()

    def remember() -> None:
        # The drafter makes the positions.
        places = torch.arange(TOKENS) + 5
        drafter.remember(places, drafter.states(tapped), weights, cache)

    assert count(remember) == STATES_LAUNCHES + KEYS_LAUNCHES
    # A selector adds the likeliest tokens, their vectors and a product, each of which is cast.
    assert blocks[True] - blocks[False] == CONVOLUTION_LAUNCHES + 5
    found = drafter.block(batch, weights, cache)
    token = torch.tensor([1])
    assert count(lambda: limited(drafter.after(found, 1, token))) == POSITION_LAUNCHES


def test_a_recorded_step_counts_its_small_kernels_and_the_steps_of_a_law() -> None:
    case = Case(read_shape("llama3.1-8b"), named("rtx4090"), 131072)
    free = replace(case.hardware, graph_launch_seconds=0.0)
    costs = replace(case.costs, hardware=free)
    layer_bytes = costs.matrices.qkv + costs.matrices.rest
    read = layer_bytes / free.memory_bytes_per_second
    keys = 4096 * 2 * 8 * 128 / free.memory_bytes_per_second
    small = FUSED.small_before + FUSED.small_after + 2
    found = costs.resident_layer(1, 4096, rounded=True)
    assert found == pytest.approx(read + keys + small * SMALL_KERNEL_SECONDS, rel=1e-6)
    # One program makes a row's law: no bandwidth makes it faster.
    fast = replace(costs, hardware=replace(free, memory_bytes_per_second=1e18))
    steps = 4 * 32 + constants.LAW_SEARCH_STEPS
    assert fast.head(1, recorded=True) >= steps * constants.LAW_STEP_SECONDS > 1e-4


def test_every_card_has_a_rate_for_whole_numbers() -> None:
    for name in gpu_names():
        card = named(name)
        assert 0 < card.integer_ops_per_second <= card.flops_per_second
    assert integer_rate("NVIDIA H100 80GB HBM3") == named("h100").integer_ops_per_second
    assert integer_rate("NVIDIA GeForce GTX 1080") is None


def test_planes_are_planned_where_they_are_faster_and_not_where_integers_bound_them() -> None:
    """An H200 reads 16 bits of a number sooner than it makes them of 12."""
    bfloat16, auto = DTYPES["bfloat16"], frozenset({"weights", "kv"})
    fixed = {"budget": 4096, "draft_tokens": 12, "inner_draft_tokens": 3}
    case = Case(
        read_shape("llama3.1-8b"), named("rtx4090"), 131072, dtype=bfloat16, auto=auto, fixed=fixed
    )
    here = choose(case)
    assert here.plan.weights == here.plan.kv == "split"
    there = choose(replace(case, hardware=named("h200")))
    assert there.plan.weights == there.plan.kv == "dense"
    # Without that rate it would be planned there too.
    endless = replace(named("h200"), integer_ops_per_second=None)
    assert choose(replace(case, hardware=endless)).plan.weights == "split"


def test_planes_under_more_rows_than_a_tile_are_decoded_first() -> None:
    case = Case(read_shape("llama3.1-8b"), named("rtx4090"), 8192, dtype=DTYPES["bfloat16"])
    few, more = (replace(case, split="split").costs.after(rows) for rows in (64, 65))
    dense = case.costs.after(65)
    assert more > dense + few / 3


@pytest.mark.parametrize("draft", ["assistant", "dflash", "eagle3"])
def test_drafters_read_their_matrices_as_stored_and_gpus_exchange_what_they_compute(draft) -> None:
    """Without launches and operations on integers, quantised matrices save the seconds of their
    bytes, those of an output matrix included.
    """
    config = read_shape("gemma4-31b" if draft == "assistant" else "qwen3-8b")
    none = {"graph_launch_seconds": 0.0, "launch_seconds": 0.0, "integer_ops_per_second": None}
    free = replace(named("h200"), **none)
    fixed = {"method": "speculative", "draft_tokens": 4, "inner_draft_tokens": 0}

    def seconds(mix: str, exchange: float = 0.0, gpus: int = 1) -> float:
        head = typical_head(draft + mix, config)
        given = {"draft": draft, "draft_config": head.config, "stored_drafter": head.pieces}
        hardware = replace(free, gpus=gpus, all_reduce_seconds=exchange)
        case = Case(config, hardware, 4096, fixed=fixed, **given)
        chosen = choose(case)
        return drafter_cost(case, chosen.plan, chosen.memory).seconds(1)

    whole, quantised = (
        drafter_layouts(head.config, DTYPES["float16"], head.pieces).nbytes
        for head in (typical_head(draft, config), typical_head(draft + ":Q4_K_M", config))
    )
    # `fc` of an EAGLE-3 head is not counted: it is read when the text has grown.
    once = 0.85 * (whole - quantised) / free.memory_bytes_per_second
    assert seconds("") - seconds(":Q4_K_M") > once > 0
    exchanges = seconds("", 1e-3, gpus=2) - seconds("", gpus=2)
    assert exchanges > 8e-3 if draft != "eagle3" else exchanges == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_cost_something(family: str) -> None:
    """Norms before or after, windows, two gates: a GPU is planned for each."""
    raw = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 97}
    raw |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    kinds = ["full_attention"] * 4
    if family in ("exaone4", "olmo3", "cohere2", "qwen3") or family.startswith("gemma"):
        kinds[:3] = ["sliding_attention"] * 3
        raw |= {"layer_types": kinds, "sliding_window": 64, "use_sliding_window": True}
    elif family in ("qwen3_5_text", "lfm2", "lfm2_moe"):
        kinds[:3] = ["linear_attention" if family == "qwen3_5_text" else "conv"] * 3
        raw |= {"layer_types": kinds, "partial_rotary_factor": 1.0}
    else:
        raw |= {"sliding_window": None}
    if family == "granitemoehybrid":
        raw |= {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0}
    if family == "nemotron_h":
        raw |= {"hybrid_override_pattern": "M-*E"}
    if family.startswith("gemma4"):
        raw |= {"hidden_size_per_layer_input": 0, "global_head_dim": 16}
    config = from_hf(raw | {"model_type": family, "head_dim": 16}, {})
    case = Case(config, named("rtx4090"), 4000)
    chosen = choose(case)
    assert chosen.seconds_per_token > 0
    assert bool(chosen.memory.requirements.window_bytes) == ("sliding_attention" in kinds)
    assert bool(chosen.memory.requirements.state_bytes) == bool(config.recurrent_layers)
    if config.recurrent_layers:
        return
    one = case.costs.resident_layer(1, 4000)
    full = replace(case, config=config.as_drafter).costs.resident_layer(1, 4000)
    assert one <= full if "sliding_attention" in kinds else one == full
