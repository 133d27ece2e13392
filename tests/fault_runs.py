"""Small runs, load to a context that goes on, of which one place fails: what must hold then."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fault_points import KINDS, Faults, Held, planted, temporaries
from helpers import BLOCK, PLACEMENTS, random_ids

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import RankError, TriforceError
from triforce_offload.files import Output, cache_directory
from triforce_offload.plan.placement import Placement

# Two blocks and a tail that becomes the third while text is generated.
PROMPT = random_ids(3 * BLOCK - 4)
GREEDY, FURTHER = SamplingParams(7, temperature=0), SamplingParams(2, temperature=0)
_DRAFTS = {"draft": "none", "draft_tokens": 3, "budget": 16}
_SPLIT = {"dtype": "bfloat16", "kv": "split", "method": "speculative", "draft_tokens": 3}
CASES: dict[str, dict[str, Any]] = {
    "triforce, KV streams": {**_DRAFTS, "placement": PLACEMENTS["kv"]},
    "triforce, KV is reclaimed memory": {**_DRAFTS, "placement": PLACEMENTS["kv-reclaimed"]},
    "triforce, copies in 4 bits": {**_DRAFTS, "placement": PLACEMENTS["int4"]},
    "all streams": {"method": "autoregressive", "placement": PLACEMENTS["both"]},
    "the processor computes": {
        **_DRAFTS,
        "placement": Placement(
            *((0,), True, 2, 1, 3, 2), copied_layers=(0,), processor_layers=(0,), processor_kv=0.6
        ),
    },
    "recurrent layers, all streams": {
        **{"method": "speculative", "draft": "ngram", "draft_tokens": 3},
        "placement": PLACEMENTS["both"],
    },
    "recurrent layers, a retrieval level": {**_DRAFTS, "placement": PLACEMENTS["kv"]},
    "a tree of the retrieval level": {
        **{"draft": "none", "tree": 6, "budget": 16},
        "placement": PLACEMENTS["kv-in-part"],
    },
    "KV split": {**_SPLIT, "placement": PLACEMENTS["kv-in-part"]},
    "two ranks": {"method": "autoregressive", "placement": PLACEMENTS["kv"], "gpus": 2},
}


def family(case: str) -> str:
    """The family of a case's model."""
    return "qwen3_5" if case.startswith("recurrent") else "llama"


class Runs:
    """One case's runs: one that goes well, and then as many with a fault as are asked for.

    counts: places of each kind in a run that goes well
    """

    def __init__(self, model: Path, case: str, folder: Path) -> None:
        """folder: for what runs write, and nothing else."""
        self._model = model
        self._options = CASES[case]
        self._folder = folder
        self._faults, self._held = Faults(), Held()
        self._expected, self.counts = self._whole()
        # Some of libraries stay.
        self._threads = threading.active_count()

    def places(self, kind: str) -> list[tuple[str, int]]:
        """Every place of a kind."""
        return [(kind, at) for at in range(1, self.counts[kind] + 1)]

    def sample(self, seed: int, each: int) -> list[tuple[str, int]]:
        """So many places of each kind, or all if there are fewer."""
        choose = random.Random(seed)
        every = [self.places(kind) for kind in KINDS]
        return [it for all_ in every for it in choose.sample(all_, min(each, len(all_)))]

    def go_well(self) -> None:
        """Runs without a fault once more."""
        assert self._whole()[0] == self._expected

    def fail_at(self, kind: str, at: int) -> str:
        """Runs once, with a fault, and says how that ended: "same", or the name of the error.

        Raises AssertionError for whatever else comes of it.
        """
        with self._watched(kind), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._faults.arm(kind, at)
            outcome = self._attempt()
        # How often a run waits follows from when copies end.
        assert self._faults.fired or kind == "wait", f"{kind} {at} was not reached: {outcome}"
        gc.collect()
        assert self._held.alive == 0, "memory is held that nobody has"
        assert threading.active_count() <= self._threads, "threads are left"
        for folder in (self._folder, cache_directory()):
            assert not [*folder.rglob("*.partial")], "a part of a file is left"
        return outcome

    def _attempt(self) -> str:
        faults = self._faults
        try:
            engine = self._engine()
        except TriforceError as error:
            return type(error).__name__
        memory, outcome = engine.runtime.memory, "same"
        before = memory.available_bytes
        try:
            assert self._request(engine) == self._expected
        except TriforceError as error:
            outcome = type(error).__name__
        if faults.fired and outcome != RankError.__name__:
            # Else it is the end that fails; or there is no rank any more that could go on.
            faults.disarm()
            engine.forget()
            # What drafts may have been given up for good.
            assert memory.available_bytes >= before
            assert engine.runtime.host_blocks.taken_bytes == 0
            assert engine.runtime.dense_blocks.taken_bytes == 0
            assert self._request(engine) == self._expected
        try:
            engine.close()
        except TriforceError as error:
            outcome = type(error).__name__
        assert memory.available_bytes == memory.limit_bytes
        assert engine.runtime.host.nbytes == 0
        return outcome

    def _whole(self) -> tuple[list[int], Counter[str]]:
        with self._watched("temporary"):
            self._faults.arm()
            with self._engine() as engine:
                tokens = self._request(engine)
            return tokens, self._faults.counts

    def _engine(self) -> Engine:
        # Layers in 4 bits are written in each run.
        shutil.rmtree(cache_directory(), ignore_errors=True)
        return Engine.from_pretrained(
            self._model,
            device="cpu",
            max_context=100,
            block_tokens=BLOCK,
            trace=self._folder / "trace",
            **self._options,
        )

    def _request(self, engine: Engine) -> list[int]:
        result = engine.generate(PROMPT, GREEDY)
        Output(self._folder / "stats", "stats").write(json.dumps(result.stats))
        context = self._folder / "context"
        engine.save_context(context)
        engine.load_context(context)
        further = engine.generate([*PROMPT, *result.token_ids, 5], FURTHER)
        return result.token_ids + further.token_ids

    @contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        watch = temporaries(self._faults) if kind == "temporary" else nullcontext()
        with planted(self._faults, self._held), watch:
            yield
