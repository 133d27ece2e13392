"""The models on this machine, and whether this runtime runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.families.hf import from_hf
from triforce_core.model.found import hub, ollama
from triforce_core.model.found.folders import Place, models_in, places
from triforce_offload.checkpoint.gguf import PART
from triforce_offload.checkpoint.header import read_json
from triforce_offload.errors import TriforceError

# How many folders deep models of a given folder may lie.
_MOST_DEEP = 8


@dataclass(frozen=True)
class Found:
    """A model on this machine.

    name: what to type for it
    source: where it was found
    """

    name: str
    path: Path
    source: str

    @property
    def nbytes(self) -> int:
        """The size of its weights."""
        return sum(path.stat().st_size for path in self._files())

    def family(self) -> str:
        """Return the family of the model. Raises TriforceError if it does not run."""
        if self.path.is_dir():
            return from_hf(read_json(self.path / "config.json"), {}).family
        checkpoint = open_checkpoint(self.path)
        try:
            return checkpoint.config.family
        finally:
            checkpoint.close()

    def _files(self) -> Iterable[Path]:
        if self.path.is_dir():
            files = list(self.path.glob("*.safetensors"))
            return files or self.path.glob("pytorch_model.bin")
        if part := PART.search(self.path.name):
            begins = self.path.name[: part.start()]
            return self.path.parent.glob(f"{begins}-*-of-{part[2]}.gguf")
        return [self.path]


@dataclass(frozen=True)
class Described:
    """A model with what its header says.

    family: None if it does not run
    problem: why it does not run
    """

    found: Found
    nbytes: int
    family: str | None
    problem: str | None

    @classmethod
    def of(cls, found: Found) -> Described:
        """Read a model's header."""
        try:
            return cls(found, found.nbytes, found.family(), None)
        except (TriforceError, OSError) as error:
            problem = str(error).replace(f"{found.path}: ", "")
            return cls(found, _size(found), None, problem)


def found_models(folders: Iterable[Path] = ()) -> Iterator[Found]:
    """Yield the models in the usual places, and in further folders. Each file comes once.

    Models in a folder of the user are named by their paths.
    """
    seen: set[Path] = set()
    for found in _all(folders):
        real = found.path.resolve()
        if real not in seen:
            seen.add(real)
            yield found


def _all(folders: Iterable[Path]) -> Iterator[Found]:
    for folder in folders:
        for path in models_in(folder, _MOST_DEEP):
            yield Found(str(path), path, "your folders")
    for name, path in hub.cached_models():
        yield Found(name, path, "Hugging Face")
    for name, path in ollama.models():
        yield Found(name, path, "Ollama")
    for place in places():
        yield from _in_place(place)


def _in_place(place: Place) -> Iterator[Found]:
    for path in models_in(place.folder, place.depth):
        yield Found(str(path), path, place.what)


def _size(found: Found) -> int:
    try:
        return found.nbytes
    except OSError:
        return 0
