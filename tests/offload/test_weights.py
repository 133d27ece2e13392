"""Layers of any formats and sizes, wherever they live."""

from __future__ import annotations

import pytest
import torch

from triforce_offload.conveyor import Conveyor, Transfer
from triforce_offload.errors import DoesNotFitError
from triforce_offload.link.emulated import EmulatedLink
from triforce_offload.link.trace import NoTrace
from triforce_offload.memory import host as host_memory
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostBuffers, HostMemory
from triforce_offload.plan.memory_plan import LayerPlan, Where
from triforce_offload.schedule import WEIGHTS
from triforce_offload.weights.formats import ALIGNMENT, Dense
from triforce_offload.weights.layouts import FlatLayout
from triforce_offload.weights.store import ResidentWeights, StreamedWeights, WeightStore

LAYERS = 5


def layout(layer: int) -> FlatLayout:
    """Each layer has its own tensors, in formats of their own."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    return FlatLayout.of(
        {
            f"part{i}": Dense((3 + layer, 5 * (i + 1)), dtypes[(layer + i) % 4])
            for i in range(1 + layer % 3)
        }
    )


def fill(layer: int, views: dict[str, torch.Tensor]) -> None:
    for i, view in enumerate(views.values()):
        view.fill_(10 * layer + i + 1)


def test_a_layout_gives_each_tensor_its_format() -> None:
    for layer in range(LAYERS):
        flat = layout(layer)
        views = flat.views(torch.zeros(flat.nbytes, dtype=torch.uint8))
        assert all(offset % ALIGNMENT == 0 for offset in flat.offsets.values())
        for name, stored in flat.formats.items():
            assert views[name].shape == stored.shape
            assert views[name].dtype == stored.dtype
        # Nothing overlaps.
        fill(layer, views)
        for i, view in enumerate(views.values()):
            assert (view == 10 * layer + i + 1).all()


@pytest.mark.parametrize("streamed", [(), (1, 3), (0, 2, 4), tuple(range(LAYERS))])
@pytest.mark.parametrize("slots", [1, 2])
def test_layers_of_different_sizes_go_through_slots_of_one(streamed, slots: int) -> None:
    layouts = [layout(layer) for layer in range(LAYERS)]
    memory, host, link = DeviceMemory(torch.device("cpu"), 1 << 20), HostMemory(), EmulatedLink()
    plans = [
        LayerPlan(Where.HOST if layer in streamed else Where.DEVICE, each.nbytes)
        for layer, each in enumerate(layouts)
    ]
    store = WeightStore(layouts, plans, memory, host, fill)
    largest = max(plan.link_bytes for plan in plans)
    rings = {WEIGHTS: [torch.zeros(largest, dtype=torch.uint8) for _ in range(slots)]}
    conveyor = Conveyor(link, rings)
    weights = StreamedWeights(store.in_passes, layouts, conveyor, NoTrace(), {}, prefills=False)
    try:
        for _ in range(2):
            before = link.counters()
            conveyor.start(
                Transfer((WEIGHTS, layer), WEIGHTS, store.locations[layer].source)
                for layer in streamed
            )
            for layer in range(LAYERS):
                with weights.layer(layer) as views:
                    expected = layouts[layer].views(
                        torch.zeros(layouts[layer].nbytes, dtype=torch.uint8)
                    )
                    fill(layer, expected)
                    assert views.keys() == expected.keys()
                    for name, view in views.items():
                        assert torch.equal(view, expected[name])
            carried = (link.counters() - before).bytes_to_device
            assert carried == sum(plan.link_bytes for plan in plans)
        if not streamed:
            resident = ResidentWeights(store)
            with resident.layer(2) as views:
                assert (views["part0"] == 21).all()
    finally:
        link.close()
    store.close()
    assert memory.available_bytes == memory.limit_bytes
    assert host.nbytes == 0


def test_host_buffers_lie_side_by_side_and_none_crosses_a_piece(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 100)
    memory = HostMemory()
    buffers = HostBuffers([40, 40, 30, 100, 250, 10], memory)
    assert [buffer.numel() for buffer in buffers.buffers] == [40, 40, 30, 100, 250, 10]
    assert len(buffers._arenas) == 5
    assert memory.nbytes == 470
    buffers.close()
    assert memory.nbytes == 0
    with pytest.raises(DoesNotFitError, match="host memory for streamed weights"):
        HostBuffers([1 << 60], memory)
