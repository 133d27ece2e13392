"""A driver of host memory for machines without one."""

from __future__ import annotations


class FakeDriver:
    """Stands for cudaHostRegister: keeps what is registered, refuses after `most` bytes."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.registered: dict[int, int] = {}
        self.asked: list[int] = []

    def register(self, address: int, size: int) -> int:
        self.asked.append(size)
        assert address % 4096 == 0
        if sum(self.registered.values()) + size > self.most:
            return 2
        assert all(
            address + size <= other or other + length <= address
            for other, length in self.registered.items()
        )
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0
