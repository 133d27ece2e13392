"""F2 and K1 in the middle of a pass: failing copies and interrupts of models with recurrent layers,
and of trees of the retrieval level. What is kept is right, and a text can be gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import assert_equal_but_for_ties, greedy
from test_link_faults import FaultyLink

from triforce_core import Engine
from triforce_core.model.transformer import Model
from triforce_offload.conveyor import Conveyor
from triforce_offload.errors import LinkError
from triforce_offload.kv.recent.store import RecentStore
from triforce_offload.kv.states.store import StateStore
from triforce_offload.memory.host import HostMemory

# It repeats itself, so that n-grams are found, and its rows are folded while it is gone on with.
PROMPT = random_ids(33, 3) * 2
NEW, FURTHER = 50, 12
# Moments of a run that are tried, evenly over all passes.
MOMENTS = 4
_CHAIN = {"method": "speculative", "draft": "ngram", "draft_tokens": 5}
_LEVEL = {"draft": "none", "budget": 16, "draft_tokens": 6}
_TREE = {"draft": "none", "budget": 16, "tree": 12}
CASES: dict[str, tuple[str, str, dict[str, object]]] = {
    "recurrent": ("qwen3_5", "both", _CHAIN),
    "convolutions": ("lfm2", "both-one-slot", _CHAIN),
    "Mamba-2": ("granite4-h", "both", _CHAIN),
    "recurrent, retrieval level": ("qwen3_5", "kv", _LEVEL),
    "recurrent, tree": ("qwen3_5", "both", _CHAIN | {"tree": 12}),
    "retrieval tree": ("llama", "kv", _TREE),
    "retrieval tree, KV in part": ("llama", "kv-in-part", _TREE),
}
# What runs in a pass, and what keeps its rows.
PLACES = (
    (Conveyor, "acquire"),
    (StateStore, "convolve"),
    (StateStore, "recur"),
    (RecentStore, "keep"),
)


Happens = Callable[[], None]


class Places:
    """Places in passes over the full model, counted once a prompt is read. Something may happen at
    one of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arm()
        own_logits = Model.logits

        def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
            # First of the prompt's last token.
            self._reading = False
            return own_logits(model, hidden)

        def before(original: Callable) -> Callable:
            def call(*args: object, **options: object) -> object:
                self._pass_by()
                return original(*args, **options)

            return call

        monkeypatch.setattr(Model, "logits", logits)
        for owner, name in PLACES:
            monkeypatch.setattr(owner, name, before(getattr(owner, name)))

    def arm(self, at: int = 0, happens: Happens = lambda: None) -> None:
        """At place number `at` of the next request, `happens` is called."""
        self.passed, self._reading = 0, True
        self._at, self._happens = at, happens

    def _pass_by(self) -> None:
        self.passed += not self._reading
        if self.passed == self._at and not self._reading:
            self._happens()


Faulty = tuple[Engine, FaultyLink, torch.nn.Module, bool]


@pytest.fixture
def faulty(
    tiny, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Faulty]:
    """An engine of a case over a link that can fail, its twin, and whether it drafts trees."""
    family, placement, options = CASES[request.param]
    path, model = tiny(family)
    link = FaultyLink("fail")
    monkeypatch.setattr("triforce_core.loading.load.open_link", lambda *_: (link, HostMemory()))
    where = {"block_tokens": BLOCK, "placement": PLACEMENTS[placement]}
    with Engine.from_pretrained(
        path, device="cpu", dtype="float32", max_context=220, **where, **options
    ) as engine:
        yield engine, link, model, "tree" in options


def press() -> None:
    raise KeyboardInterrupt


HOW = {
    "a copy fails": (LinkError, lambda engine, link: lambda: link.count_from_here(1)),
    "the keyboard": (KeyboardInterrupt, lambda engine, link: press),
    "an interrupt": (None, lambda engine, link: engine.interrupt),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("faulty", CASES, indirect=True)
@pytest.mark.parametrize("how", HOW)
def test_a_text_goes_on_rightly_after_a_pass_that_did_not_end(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    engine, link, model, trees = faulty
    error, happening = HOW[how]
    places, memory = Places(monkeypatch), engine.runtime.memory
    before = memory.available_bytes
    result = engine.generate(PROMPT, greedy(NEW))
    expected, passed = result.token_ids, places.passed
    assert result.stats["draft_tokens"]["examined"]
    assert bool(result.stats["draft_tokens"]["trees"]) == trees
    # Further than what was generated last: states and caches are gone on with.
    longer = [*PROMPT, *expected[: NEW // 2], 5, 6]
    engine.forget()
    further = engine.generate(longer, greedy(FURTHER)).token_ids
    for prompt, text in ((PROMPT, expected), (longer, further)):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=len(text), do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert_equal_but_for_ties(model, prompt, text, theirs)
    engine.forget()
    lengths = []
    # The last places may be of a pass whose copies have all been asked for.
    for moment in range(1, MOMENTS + 1):
        places.arm(moment * passed * 4 // (5 * MOMENTS), happening(engine, link))
        stream = engine.stream(PROMPT, greedy(NEW))
        if error:
            with pytest.raises(error):
                list(stream)
            # Whatever was half done is gone, and nobody holds memory.
            assert memory.available_bytes == before
        else:
            list(stream)
            assert stream.result.finish_reason == "interrupted"
        places.arm()
        link.count_from_here()
        if error is not KeyboardInterrupt:
            kept = stream.result.token_ids
            assert kept == expected[: len(kept)]
            lengths.append(len(kept))
        assert engine.generate(longer, greedy(FURTHER)).token_ids == further
        assert engine.generate(PROMPT, greedy(NEW)).token_ids == expected
    assert lengths == sorted(lengths)
    assert error is KeyboardInterrupt or lengths[-1] > NEW // 2 > lengths[0]
