"""GGUF files of a repository of the hub: which of them a quantisation stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from triforce_core.model.found.folders import NO_MODEL
from triforce_offload.checkpoint.gguf import PART
from triforce_offload.errors import UsageError

# Files that draft for a model. They are taken where there is nothing else.
_DRAFTER = re.compile(r"^(mtp|dflash|dspark|eagle3?)[-_.]|[-_.]assistant(?![a-z])", re.IGNORECASE)
_WORDS = r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP16)"
# The end of a file's name, in the words of llama.cpp and Unsloth.
_QUANTISATION = re.compile(rf"(?:^|[-_.])({_WORDS})$", re.IGNORECASE)
# What is taken where none is named, the first that there is.
_USUAL = ("q4_k_m", "ud-q4_k_xl", "q4_k_xl", "mxfp4", "q4_k_s", "q4_k", "q4_0", "q8_0")


@dataclass
class _File:
    """A GGUF file, or one in several parts.

    base: path of the file without its ending
    count: number of parts that it has
    files: those that are there, in order
    """

    base: str
    count: int
    files: list[str]

    @property
    def name(self) -> str:
        return self.base.rpartition("/")[2]

    @property
    def kind(self) -> str:
        """Its quantisation, by the name of the file or of its folder, else its name."""
        folder = self.base.rpartition("/")[0].rpartition("/")[2]
        known = _QUANTISATION.search(self.name) or re.fullmatch(f"({_WORDS})", folder, re.I)
        return (known[1] if known else self.name).lower()

    def is_named(self, file: str) -> bool:
        """Whether it is meant by a file's path: its own, or that of one of its parts."""
        return file.lower() in map(str.lower, (f"{self.base}.gguf", *self.files))


def files_of(repository: str, held: Iterable[str], wanted: str) -> list[str]:
    """Return the GGUF files that a quantisation stands for: one, or all parts of one, in order.

    held: the files of the repository
    wanted: the quantisation, or a file's own path; empty for the usual one

    Raises UsageError if there is none, several different ones, or not all parts of one.
    """
    files = _whole(held)
    if wanted.lower().endswith(".gguf"):
        chosen = next((each for each in files if each.is_named(wanted)), None)
        if chosen is None:
            there = [each.files[0] for each in files]
            raise UsageError(f"{repository} has no file {wanted}{_instead(there)}")
    else:
        chosen = _of_kind(repository, _models(files), wanted)
    if len(chosen.files) != chosen.count:
        raise UsageError(
            f"{repository} has {len(chosen.files)} of the {chosen.count} parts of {chosen.base}"
        )
    return chosen.files


def name_of(repository: str, held: Sequence[str], file: str) -> str | None:
    """Return the shortest name, OWNER/NAME:QUANTISATION or OWNER/NAME:FILE, that stands for a GGUF
    file, by its first part; None if there is none.

    held: the files that are there
    """
    if (whole := next((each for each in _whole(held) if each.files[0] == file), None)) is None:
        return None
    has_kind = whole.kind != whole.name.lower()
    for wanted in (whole.kind.upper(), file) if has_kind else (file,):
        with suppress(UsageError):
            if files_of(repository, held, wanted)[0] == file:
                return f"{repository}:{wanted}"
    return None


def _whole(held: Iterable[str]) -> list[_File]:
    """Return the GGUF files among files, those in parts as one."""
    found: dict[tuple[str, int], _File] = {}
    for file in sorted(held):
        if file.lower().endswith(".gguf"):
            part = PART.search(file)
            count = int(part[2]) if part else 1
            base = file[: part.start() if part else -len(".gguf")]
            found.setdefault((base, count), _File(base, count, [])).files.append(file)
    return list(found.values())


def _models(files: list[_File]) -> list[_File]:
    """Return the models among files, or the drafters if there are no others."""
    models = [each for each in files if not NO_MODEL.search(f"{each.name}.gguf")]
    return [each for each in models if not _DRAFTER.search(each.name)] or models


def _of_kind(repository: str, models: list[_File], wanted: str) -> _File:
    kinds: dict[str, list[_File]] = {}
    for each in models:
        kinds.setdefault(each.kind, []).append(each)
    if not wanted and len(kinds) == 1:
        (kind,) = kinds
    else:
        kind = wanted.lower() or next((each for each in _USUAL if each in kinds), "")
    found = kinds.get(kind, [])
    if not found:
        none = wanted or not models
        what = f"no GGUF file{f' in {wanted}' if wanted else ''}" if none else "several GGUF files"
        raise UsageError(f"{repository} has {what}{_instead(kinds)}")
    if len({each.name for each in found}) > 1:
        names = [each.files[0] for each in found]
        raise UsageError(f"{repository} has several GGUF files in {kind}{_instead(names)}")
    # Of folders with the same file, the first one counts.
    return found[0]


def _instead(there: Iterable[str]) -> str:
    """Return what there is, and how to name it."""
    known = sorted(there)
    if not known:
        return ", and none of a model"
    return f"; name one as OWNER/NAME:{known[0]}: {', '.join(known)}"
