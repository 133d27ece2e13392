"""Safetensors: one file, or shards with an index."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from offload.checkpoint.header import read_json
from offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": None, "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsSource:
    """A directory with model.safetensors, or with shards and their index. Files stay mapped."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if a file is missing or damaged."""
        self._stack = ExitStack()
        self._tensors: dict[str, tuple[Path, object]] = {}
        self._readers: dict[Path, object] = {}
        self._opening = threading.Lock()
        try:
            wanted = _shards(directory)
            for path, names in wanted.items():
                handle = self._open(path)
                held = frozenset(handle.keys())
                absent = sorted((names or held) - held)
                if absent:
                    raise CheckpointError(
                        f"{path} does not hold {absent[0]}, which the index names"
                    )
                self._tensors.update((name, (path, handle)) for name in names or held)
        except BaseException:
            self._stack.close()
            raise

    @property
    def files(self) -> list[Path]:
        return sorted({path for path, _ in self._tensors.values()})

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        path, handle = self._tensors[name]
        entry = handle.get_slice(name)
        if entry.get_dtype() not in _DTYPES:
            raise UnsupportedModelError(
                f"{path}: {name} is {entry.get_dtype()}, supported are {', '.join(_DTYPES)}"
            )
        return tuple(entry.get_shape())

    def dtype(self, name: str) -> str | None:
        _, handle = self._tensors[name]
        return _DTYPES.get(handle.get_slice(name).get_dtype())

    def blocks(self, name: str) -> None:
        return None

    def read_blocks(self, name: str, into: torch.Tensor) -> None:
        raise TypeError(f"{name} is not stored in blocks")

    def read(self, name: str, into: torch.Tensor) -> None:
        path, _ = self._tensors[name]
        with self._opening:
            # A header is read without torch, which takes longer to load than a small model.
            handle = self._readers.get(path) or self._open(path, "pt")
            self._readers[path] = handle
        try:
            into.copy_(handle.get_tensor(name).view(into.shape))
        except (SafetensorError, RuntimeError, OSError) as error:
            raise CheckpointError(f"cannot read {name} from {path}: {error}") from error

    def close(self) -> None:
        self._tensors.clear()
        self._readers.clear()
        self._stack.close()

    def _open(self, path: Path, framework: str = "numpy"):
        try:
            return self._stack.enter_context(safe_open(path, framework=framework))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Each file and the tensors the index places in it, None for all it holds."""
    index = directory / _INDEX
    if (directory / _SINGLE).exists():
        return {directory / _SINGLE: None}
    if not index.exists():
        others = sorted(path.name for path in directory.glob("*.bin"))
        held = f"; {others[0]} is not read: save the model as safetensors" if others else ""
        raise CheckpointError(f"{directory} holds neither {_SINGLE} nor {_INDEX}{held}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    shards: dict[Path, set[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} places {name} in {file!r}, which is no file name")
        shards.setdefault(directory / file, set()).add(name)
    return shards
