"""The simulated GPU refuses what a GPU refuses, and notices what a GPU gets wrong now and then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from simulated_gpu import REAL, Adversary, RaceError, simulated
from simulated_gpu.processes import FAULTY, environment

pytestmark = pytest.mark.skipif(REAL, reason="simulates a GPU, and there is one")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def test_tensors_compute_what_the_cpu_computes_and_say_where_they_are() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with simulated():
        there = x.to("cuda")
        assert (there.device, there.is_cuda) == (torch.device("cuda:0"), True)
        assert torch.equal((there @ there.T).softmax(-1)[1:].cpu(), (x @ x.T).softmax(-1)[1:])
        view = there[1]
        view.add_(1)
        assert torch.equal(there.cpu()[1], x[1] + 1)
        assert there.sum().item() == there.cpu().sum().item()
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
            there.numpy()


@pytest.mark.parametrize(
    "mixed",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.where(here > 0, there, 0),
        lambda there, here: here[there.long()],
        lambda there, here: torch.nn.functional.linear(here, there.expand(4, 4)),
    ],
)
def test_operations_that_mix_devices_fail(mixed) -> None:
    with simulated(), pytest.raises(RuntimeError, match=r"same device"):
        mixed(torch.ones(4, device="cuda"), torch.ones(4))


def test_tensors_of_two_devices_do_not_mix_and_memory_is_taken_on_the_current_one() -> None:
    with simulated(gpus=2) as machine:
        one, two = (torch.ones(1 << 20, device=f"cuda:{index}") for index in range(2))
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            one + two
        assert torch.equal(one.to(two.device).cpu(), one.cpu())
        used = torch.cuda.memory_allocated(1)
        with torch.cuda.device(1):
            kept = torch.ones(1 << 20, device="cuda")
        assert kept.device.index == 1
        assert torch.cuda.memory_allocated(1) == used + (4 << 20)
        assert torch.cuda.current_device() == 0
        with pytest.raises(RuntimeError, match="ordinal"):
            torch.empty(1, device="cuda:2")
    assert machine.faults == []


def test_memory_runs_out_at_the_cap_and_comes_back() -> None:
    with simulated():
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((64 << 20) / total)
        kept = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
        view = kept[:10]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        del kept
        assert torch.cuda.memory_allocated() == 60 << 20
        del view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 60 << 20
        torch.empty(8 << 20, dtype=torch.uint8, device="cuda")


def copied_beside() -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]:
    """Pinned numbers, a tensor that a stream of its own copies them to, and that copy's event."""
    source = torch.arange(64.0).pin_memory()
    there = torch.zeros(64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        there.copy_(source, non_blocking=True)
        return source, there, stream.record_event()


@pytest.mark.parametrize("adversary", list(Adversary))
def test_bytes_are_read_behind_their_copy_or_it_is_a_race(adversary: Adversary) -> None:
    with simulated(adversary) as machine:
        source, there, done = copied_beside()
        with pytest.raises(RaceError, match="waits for no event"):
            there + 1
        torch.cuda.current_stream().wait_event(done)
        assert torch.equal((there + 1).cpu(), source + 1)
    assert len(machine.faults) == 1


def test_a_late_copy_leaves_nan_and_notices_that_its_source_was_written() -> None:
    with simulated(Adversary.LATE) as machine:
        source, there, done = copied_beside()
        assert there.inner.isnan().all()
        source.zero_()
        with pytest.raises(RaceError, match="then its source written"):
            done.synchronize()
    assert len(machine.faults) == 1


def test_memory_given_back_while_a_copy_may_use_it_is_noticed() -> None:
    with simulated() as machine:
        there = torch.zeros(64, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            there.copy_(torch.ones(64).pin_memory(), non_blocking=True)
        del there
        with pytest.raises(RaceError, match="given back"):
            torch.zeros(64, device="cuda")
    assert len(machine.faults) == 1


def test_waiting_for_a_device_waits_for_all_of_its_streams() -> None:
    with simulated(Adversary.LATE, strict=True) as machine:
        source = torch.arange(8.0).pin_memory()
        target = torch.zeros(8, device="cuda")
        copies = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert target.tolist() == source.tolist()
    assert machine.faults == []


def test_pageable_memory_is_not_copied_without_waiting() -> None:
    with simulated():
        there = torch.zeros(64, device="cuda")
        assert not torch.ones(64).is_pinned()
        assert torch.ones(64).pin_memory()[3:].is_pinned()
        with pytest.raises(RaceError, match="not pinned"):
            there.copy_(torch.ones(64), non_blocking=True)
        there.copy_(torch.ones(64))
        assert there.sum().item() == 64


def test_a_graph_computes_nothing_until_it_is_replayed_on_the_same_storage() -> None:
    with simulated() as machine:
        x = torch.full((4,), 2.0, device="cuda")
        count = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            y = (x * 3).exp()
            count.add_(1)
        assert y.cpu().isnan().all()
        assert count.item() == 0
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            torch.testing.assert_close(y.cpu(), torch.full((4,), 3 * value).exp())
        assert count.item() == 2
        del x
        with pytest.raises(RuntimeError, match="given back since"):
            graph.replay()
    assert machine.faults == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x[torch.tensor([1])],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().query(),
        lambda x: torch.rand(4, device="cuda", generator=torch.Generator("cuda")),
    ],
)
def test_a_capture_refuses_what_a_stream_under_capture_cannot_do(refused) -> None:
    with simulated():
        x = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="during capture"),
            torch.cuda.graph(graph, stream=torch.cuda.Stream()),
            pytest.raises(RuntimeError, match="when stream is capturing"),
        ):
            refused(x)
        # The thread can capture again.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            x + 1


def test_a_process_that_raced_says_so_in_its_exit_code() -> None:
    program = """
import torch
with torch.inference_mode():
    there, stream = torch.zeros(64, device="cuda:1"), torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        try:
            there.copy_(torch.ones(64).pin_memory(), non_blocking=True)
        except AssertionError:
            pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment(2, 2),
        capture_output=True,
        text=True,
    )
    assert done.returncode == FAULTY, done.stderr
    assert "waits for no event" in done.stderr
