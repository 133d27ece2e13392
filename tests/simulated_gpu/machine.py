"""The simulated machine: its devices, its host memory, and what each thread does with them."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import torch

from simulated_gpu.memory import Device, PinnedMemory
from simulated_gpu.order import Adversary, CaptureRefusedError, Coin, Stream, join
from simulated_gpu.races import Access, AccessLog, RaceError

_ACTIVE: list[Machine] = []


def machine() -> Machine:
    """The one that is simulated now. Raises RuntimeError."""
    if not _ACTIVE:
        raise RuntimeError("the simulated GPU is gone")
    return _ACTIVE[-1]


class _Thread(threading.local):
    """What is each thread's own: its device, its streams, its capture."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.capturing: object | None = None


class Machine:
    """Some devices of one kind.

    faults: of ordering, each also raised where it was found; code under test may swallow it there
    host_clock: what the host has seen done, stream by stream; one for all threads
    """

    def __init__(
        self, card: SimpleNamespace, gpus: int, adversary: Adversary, seed: int, *, strict: bool
    ) -> None:
        self.devices = [
            Device(i, SimpleNamespace(**(vars(card) | {"pci_bus_id": i + 1}))) for i in range(gpus)
        ]
        self.pinned = PinnedMemory()
        self.host_clock: dict[int, int] = {}
        self.faults: list[str] = []
        self._strict = strict
        self.thread = _Thread()
        # Targets of copies that were asked for and are not made yet.
        self.arriving: list[torch.Tensor] = []
        self._coin = Coin(adversary, seed)
        self._streams = 0
        self._alive: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._defaults: dict[int, Stream] = {}

    def __enter__(self) -> Machine:
        _ACTIVE.append(self)
        self._defaults = {i: Stream(i, default=True) for i in range(len(self.devices))}
        return self

    def __exit__(self, *_: object) -> None:
        _ACTIVE.remove(self)

    @property
    def capturing(self) -> object | None:
        """The graph that this thread records, if it does."""
        return self.thread.capturing

    def refuse_capture(self, what: str) -> None:
        """Raises CaptureRefusedError if this thread captures."""
        if self.capturing is not None:
            raise self.refusal(what)

    def refusal(self, what: str) -> CaptureRefusedError:
        self.capturing.invalid = what
        return CaptureRefusedError(
            f"CUDA error: operation not permitted when stream is capturing: {what}"
        )

    def fault(self, error: RaceError) -> RaceError:
        """Notes a fault, which the code under test may keep to itself."""
        self.faults.append(str(error))
        return error

    def index_of(self, device: object) -> int:
        """Of `cuda`, `cuda:1`, 1 or None. Raises RuntimeError for one that is not there."""
        if device is None:
            return self.thread.device
        if not isinstance(device, int):
            device = torch.device(device).index
            if device is None:
                return self.thread.device
        if not 0 <= device < len(self.devices):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return device

    @staticmethod
    def torch_device(index: int) -> torch.device:
        return torch.device("cuda", index)

    def new_stream_index(self, stream: Stream) -> int:
        self._alive.add(stream)
        self._streams += 1
        return self._streams

    def runs_now(self) -> bool:
        return self._coin.runs_now()

    def current_stream(self, device: object = None) -> Stream:
        index = self.index_of(device)
        return self.thread.streams.get(index) or self._defaults[index]

    def default_stream(self, device: object = None) -> Stream:
        return self._defaults[self.index_of(device)]

    def host_waits(self, stream: Stream) -> None:
        """The host waits for a stream, without a limit, because it reads what that gives."""
        saw = self.host_clock.get(stream.index, 0) >= stream.clock[stream.index]
        if self._strict and not saw:
            raise self.fault(
                RaceError("the host reads from a device without waiting for an event first")
            )
        stream.run()
        self.host_saw(stream.clock)

    def host_saw(self, clock: dict[int, int]) -> None:
        join(self.host_clock, clock)

    def synchronize(self, device: object = None) -> None:
        """Wait for every stream of a device."""
        self.refuse_capture("cudaDeviceSynchronize")
        index = self.index_of(device)
        for stream in [each for each in self._alive if each.device_index == index]:
            stream.synchronize()

    def use(
        self, log: AccessLog, tensor: torch.Tensor, stream: Stream, *, writes: bool, what: str
    ) -> None:
        """Notes that the newest operation of a stream uses a tensor's bytes. Raises RaceError."""
        start, end = span_of(tensor)
        self.use_bytes(log, start, end, stream, writes=writes, what=what)

    def use_bytes(
        self, log: AccessLog, start: int, end: int, stream: Stream, *, writes: bool, what: str
    ) -> None:
        access = Access(start, end, stream.index, stream.clock[stream.index], writes, what)
        try:
            log.add(access, stream.clock)
        except RaceError as error:
            raise self.fault(error) from None


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last address of what a tensor of CPU memory may touch."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in sizes) + 1
    return start, start + reach * tensor.element_size()


def rtx_4090(memory_bytes: int, multiprocessors: int) -> SimpleNamespace:
    """Properties of a card, as torch names them."""
    return SimpleNamespace(
        name="NVIDIA GeForce RTX 4090 (simulated)",
        major=8,
        minor=9,
        total_memory=memory_bytes,
        multi_processor_count=multiprocessors,
        L2_cache_size=72 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=100 << 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536,
        warp_size=32,
        is_integrated=0,
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
    )
