"""GGUF files of a repository of the hub: which of them a quantisation stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from triforce_offload.checkpoint.gguf import PART
from triforce_offload.errors import UsageError

# Names of files beside a model: for images, drafters, and statistics of a quantiser.
_BESIDE = re.compile(r"^(mmproj|mtp|dflash|dspark|eagle3?)[-_.]|imatrix", re.IGNORECASE)
# The end of a file's name, in the words of llama.cpp and Unsloth.
_QUANTISATION = re.compile(
    r"(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP16))$", re.IGNORECASE
)
# What is taken where none is named, the first that there is.
_USUAL = ("q4_k_m", "ud-q4_k_xl", "q4_k_xl", "mxfp4", "q4_k_s", "q4_0", "q8_0")


def files_of(repository: str, held: Iterable[str], wanted: str) -> list[str]:
    """Return the GGUF files that a quantisation stands for: one, or all parts of one, in order.

    held: the files of the repository
    wanted: the quantisation, or a file's own name; empty for the usual one

    Raises UsageError if there is none, or several.
    """
    names = [name for name in held if name.lower().endswith(".gguf")]
    if wanted.lower().endswith(".gguf"):
        base = PART.sub("", wanted)
        found = sorted(name for name in names if wanted == name or PART.sub("", name) == base)
        if not found:
            raise UsageError(f"{repository} has no file {wanted}{_said(names)}")
        return found
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if not _BESIDE.search(name.rpartition("/")[2]):
            models.setdefault(PART.sub("", name).removesuffix(".gguf"), []).append(name)
    by_kind: dict[str, list[str]] = {}
    for base, parts in models.items():
        known = _QUANTISATION.search(base)
        # Of two folders with one quantisation the first one counts.
        by_kind.setdefault((known[1] if known else base).lower(), parts)
    if not wanted and by_kind:
        usual = next((kind for kind in _USUAL if kind in by_kind), None)
        wanted = min(by_kind) if len(by_kind) == 1 else usual or ""
    found = by_kind.get(wanted.lower())
    if found is None:
        what = f"no GGUF file in {wanted}" if wanted or not by_kind else "several GGUF files"
        raise UsageError(f"{repository} has {what}{_said(by_kind)}")
    return found


def _said(names: Iterable[str]) -> str:
    """Return what there is instead, and how to name it."""
    known = sorted(names)
    if not known:
        return ", and no GGUF file of a model"
    return f"; name one as OWNER/NAME:{known[0]}: {', '.join(known)}"
