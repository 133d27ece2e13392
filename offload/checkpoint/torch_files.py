"""Files of PyTorch (pytorch_model.bin), in which heads are often published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triforce_offload.checkpoint.source import WHOLE, Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType

_NAME = "pytorch_model.bin"


class TorchFiles:
    """The tensors of a directory's pytorch_model.bin, all in host memory.

    Only tensors are unpickled: PyTorch refuses files that would run code (`weights_only`).
    """

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError."""
        import torch

        self._path = directory / _NAME
        if not self._path.exists():
            raise CheckpointError(f"{directory} holds neither safetensors nor {_NAME}")
        try:
            loaded = torch.load(self._path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:
            # Damaged files make PyTorch raise errors of any kind.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"cannot read {self._path}: {reason:.200}") from error
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str)
            and isinstance(each, torch.Tensor)
            and each.layout is torch.strided
            and each.device.type == "cpu"
            for name, each in loaded.items()
        ):
            raise CheckpointError(f"{self._path} does not hold tensors by name")
        self._tensors: dict[str, torch.Tensor] = loaded

    @property
    def files(self) -> list[Path]:
        """TensorSource.files."""
        return [self._path]

    def names(self) -> frozenset[str]:
        """TensorSource.names."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """TensorSource.shape."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point():
            raise UnsupportedModelError(f"{self._path}: {name} holds {tensor.dtype}")
        return tuple(tensor.shape)

    def dtype(self, name: str) -> str | None:
        """TensorSource.dtype."""
        dtype = str(self._tensors[name].dtype).removeprefix("torch.")
        return dtype if dtype in ("float32", "float16", "bfloat16") else None

    def blocks(self, name: str) -> BlockType | None:
        """TensorSource.blocks: none."""
        return None

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """TensorSource.read_blocks: there are none."""
        raise CheckpointError(f"{self._path}: {name} is not stored in blocks")

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        """TensorSource.read."""
        stored = self._tensors[name]
        if stored.dim() < 2:
            into.copy_(stored[corner.row : corner.row + into.numel()].view(into.shape))
            return
        columns = into.shape[-1]
        rows = into.numel() // columns
        part = stored.view(-1, stored.shape[-1])[corner.row : corner.row + rows]
        into.copy_(part[:, corner.column : corner.column + columns].view(into.shape))

    def whole_numbers(self, name: str) -> torch.Tensor:
        """Return a list of whole numbers, [count] int64. Raises CheckpointError for others."""
        import torch

        stored = self._tensors[name]
        if stored.dim() != 1 or stored.dtype not in (torch.int64, torch.int32, torch.int16):
            raise CheckpointError(f"{self._path}: {name} is no list of whole numbers")
        return stored.long()

    def close(self) -> None:
        """TensorSource.close."""
        self._tensors = {}
