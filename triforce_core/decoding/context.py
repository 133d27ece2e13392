"""A text and everything computed for it, which outlives the requests over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch

from offload.errors import RankError
from offload.feed import Feed
from offload.kv.sizes import SCORED_TOKENS
from offload.link.link import LinkCounters
from offload.passes import PassCounters
from triforce_core.decoding.below import make_drafter, retrieval_level
from triforce_core.decoding.checksum import Checksum
from triforce_core.decoding.decoder import Ask, Prompt
from triforce_core.decoding.kv_parts import Interrupted
from triforce_core.decoding.levels import Nothing, Text
from triforce_core.decoding.models import Models
from triforce_core.decoding.resident import ResidentModel
from triforce_core.decoding.retrieval import RetrievalCache
from triforce_core.decoding.snapshot import Snapshot
from triforce_core.sizing.demand import PREFILL_CHUNK


class Context:
    """A text, its KV, the scores of its chunks, the retrieval cache, what the drafter keeps of it,
    and the forwards that were recorded over these.

    A new prompt keeps the longest beginning that it shares with the text at hand (`read`). Decoders
    then feed tokens and commit them to `text`; KV is kept of all but the last of them. Where ranks
    share the model each has such a context: what the first is asked to do it tells the others.

    link_when_read, passes_when_read: what had been counted when the prompt was read
    logits: of the target, after each row that it was fed last, [rows, vocab] float32; kept if
        tells_logits
    passes: over the text. retrieval: the retrieval cache, None if there is no such level; level:
        the target's weights, or what stands in for them, over it
    """

    def __init__(self, models: Models) -> None:
        """Raises DoesNotFitError."""
        models.ranks.tell("open")
        self.model = models.target
        self.text = Text([])
        self.logits: torch.Tensor | None = None
        self.tells_logits = False
        self.retrieval: RetrievalCache | None = None
        self.level: ResidentModel | None = None
        self._models = models
        self._parts = models.kv_parts
        self._checksum = Checksum()
        self._reads_alike = True
        self._lent_bytes = 0
        self.link_when_read, self.passes_when_read = LinkCounters(), PassCounters()
        runtime = models.runtime
        with ExitStack() as stack:
            self.passes = runtime.passes()
            stack.callback(self.passes.close)
            self._lend()
            self.drafter = make_drafter(models)
            stack.callback(lambda: self.drafter.close())
            self._level_resources = stack.enter_context(ExitStack())
            if models.budget:
                below = retrieval_level(models, self.passes, self._level_resources)
                self._scores, self.retrieval, self.level = below
            self._resources = stack.pop_all()

    @torch.inference_mode()
    def read(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        each_layer: Callable[[int], None],
        *,
        reuse: bool = True,
    ) -> Prompt:
        """Makes `tokens` the text: what it shares with the text at hand is kept, the rest is read
        layer by layer.

        new_tokens: that will follow at most. each_layer is called after each layer with its index,
        and may raise Interrupted, which leaves what is kept. reuse: False keeps nothing.
        Raises DoesNotFitError or LinkError; the context is of no use then.
        """
        kept = self.shared(tokens) if reuse else 0
        self._tell("read", tokens, kept, new_tokens)
        return self.read_from(tokens, kept, new_tokens, self._telling(each_layer))

    def read_from(
        self,
        tokens: Sequence[int],
        kept: int,
        new_tokens: int,
        each_layer: Callable[[int], None],
    ) -> Prompt:
        """Makes `tokens` the text, of which the first `kept` are those of the text at hand. See
        `read`, which others are not told of here.
        """
        self.roll_back(kept)
        self._reads_alike = self.model.rope.reads_alike(len(tokens))
        self.passes.kv.expect(len(tokens) + new_tokens)
        if self.retrieval:
            self.retrieval.begin()
        feed = Feed.text(torch.tensor(tokens[kept:]), kept, self.model.device)
        try:
            # A few tokens are a pass like any other; it needs no memory that is lent.
            short = kept and feed.rows <= self.passes.kv.max_pass_tokens
            last = self._pass(feed, each_layer) if short else self._read(feed, each_layer)
        except Interrupted:
            self.roll_back(kept)
            raise
        self.text = Text(list(tokens))
        self.link_when_read = self._models.runtime.link.counters()
        self.passes_when_read = self.passes.counters
        scored = feed.rows if short else min(feed.rows, SCORED_TOKENS)
        return Prompt(self._told(last), kept, scored)

    def roll_back(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of the text. Raises LinkError."""
        self.passes.roll_back(tokens)
        self.drafter.roll_back(tokens)
        if self.retrieval:
            self.retrieval.roll_back(tokens)
        self.text = Text(self.text.tokens[:tokens])
        self._checksum = Checksum()

    def abandon(self, kept: int) -> None:
        """After a pass or a reading that failed: the KV of the first `kept` tokens is there, and
        whatever drafts begins anew. The text, which may be a token ahead, stays. Raises LinkError.
        """
        self.passes.roll_back(kept)
        self.drafter.roll_back(0)
        if self.retrieval:
            self.retrieval.roll_back(0)
        # It may have been counted in part.
        self.text.seen = None

    def snapshot(self) -> Snapshot:
        """What was computed so far, to be read layer by layer before anything else is done here;
        of all heads, whatever ranks share them. Raises RankError.
        """
        tokens, layers = self.text.tokens[: self.passes.length], self.passes.kv.shape.layers
        # Of a head that several ranks have, each knows what its own query heads attend to.
        scores = self.known_scores() if self.retrieval and self._parts.are_apart else None
        return Snapshot(tokens, layers, self.layer_kv, scores, self._models.method.scored_by)

    def layer_kv(self, layer: int) -> torch.Tensor:
        """Snapshot.layer_kv. Raises LinkError or RankError."""
        own = self.passes.kv.on_host(layer)
        return self._parts.gathered(own, "layer_kv", self.checksum, layer)

    def known_scores(self) -> torch.Tensor:
        """Snapshot.scores. Raises RankError."""
        chunks = self.passes.length // self._models.method.chunk_size
        own = self._scores.sums[..., :chunks].to("cpu", copy=True)
        return self._parts.gathered(own, "known_scores", self.checksum)

    @torch.inference_mode()
    def restore(self, saved: Snapshot) -> None:
        """Makes the text what it was. Of a drafter nothing is kept: it reads anew what it needs.

        Raises DoesNotFitError, LinkError or RankError; the context is of no use then.
        """
        method = self._models.method
        scored = bool(self.retrieval) and saved.has_scores(method.scored_by, method.chunk_size)
        try:
            self._tell("restore_from", saved.tokens, scored)
            self.restore_from(saved.tokens, scored, saved)
        except BaseException:
            self._parts.give_up()
            raise

    def restore_from(self, tokens: Sequence[int], scored: bool, saved: Snapshot | None) -> None:
        """Makes `tokens` the text. scored: whether scores of its chunks are restored too. saved:
        their KV, None on a rank that does not lead. See `restore`, which tells others.
        """
        self.roll_back(0)
        self._reads_alike = self.model.rope.reads_alike(len(tokens))
        self.passes.kv.expect(len(tokens))
        if self.retrieval:
            self.retrieval.begin()
        self.passes.restore(
            len(tokens), lambda layer: self._parts.scattered(saved and saved.layer_kv(layer))
        )
        if scored:
            sums, own = self._scores.sums, self._parts.scattered(saved and saved.scores)
            sums[..., : own.shape[2]] = own.to(sums.device)
        self._parts.agree()
        self.text = Text(list(tokens))

    @torch.inference_mode()
    def begin(self, scored: int) -> None:
        """Once the text is what the next pass follows: chooses chunks anew by the last `scored`
        tokens that were fed, and starts the pass's copies. Raises LinkError.
        """
        self._tell("begin", scored)
        # Before the next pass's copies, or it would wait behind them.
        self.refresh(scored)
        self.passes.begin()

    def refresh(self, scored: int) -> None:
        """Chooses chunks anew by the last `scored` tokens that were fed. Raises LinkError."""
        if self.retrieval:
            began = time.perf_counter()
            self.retrieval.refresh(scored)
            self.passes.trace.host("refresh", began, time.perf_counter() - began)

    def verify(self, tokens: torch.Tensor, parents: tuple[int, ...] | None = None) -> torch.Tensor:
        """A pass over tokens [n] that follow what is kept: float32 logits after each, [n, vocab].

        parents: see Ask. Raises LinkError.
        """
        self._tell("verify", tokens, parents)
        passes = self.passes
        feed = self.feed(Ask(tokens, parents))
        passes.begin()
        return self._told(self.model.forward(feed, passes.weights, passes.cache))

    def feed(self, ask: Ask) -> Feed:
        """What a pass that was asked for is over."""
        self.logits = None
        if self.retrieval:
            self.retrieval.expect(ask.tokens.shape[0])
        start, device = self.passes.length, self.model.device
        if ask.parents is None:
            return Feed.text(ask.tokens, start, device)
        return Feed.tree(ask.tokens, start, ask.parents, device)

    def computed(self, logits: torch.Tensor, ask: Ask) -> None:
        """Takes the logits of a pass that was asked for and that others shared."""
        self.logits = logits if self.tells_logits else None
        if ask.is_kept:
            self.passes.keep([0])

    @torch.inference_mode()
    def run(self, ask: Ask) -> torch.Tensor:
        """A pass that was asked for: float32 logits after each row, [rows, vocab].

        Raises LinkError.
        """
        if ask.is_kept:
            return self.feed_one(ask.tokens, ask.more)
        return self.verify(ask.tokens, ask.parents)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps a path of the rows that the last pass fed, and forgets the others."""
        self._tell("keep", rows)
        self.passes.keep(rows)

    def feed_one(self, token: torch.Tensor, more: bool) -> torch.Tensor:
        """A pass over one token [1] that is kept: float32 logits after it, [1, vocab]. more:
        whether another such pass follows, whose copies begin before the head is computed.

        Raises LinkError.
        """
        self._tell("feed_one", token, more)
        passes = self.passes
        passes.begin()
        feed = Feed.text(token, passes.length, self.model.device)
        hidden = self.model.forward(feed, passes.weights, passes.cache)
        passes.keep([0])
        if more:
            passes.begin()
        return self._told(hidden)

    def draft(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feeds tokens [n] to the retrieval model: float32 logits after each, [n, vocab], to be
        used before the next call.
        """
        self._tell("draft", tokens)
        return self.level.logits(tokens, self.retrieval.length)

    def keep_drafted(self, rows: Sequence[int]) -> None:
        """Keeps a path of the rows that `draft` fed last, until a pass has computed them."""
        self._tell("keep_drafted", rows)
        self.retrieval.kv.keep(rows)

    def end(self) -> None:
        """Drops a pass that was begun: none follows for now."""
        self._tell("end")
        self.passes.end()

    def drop_drafter(self) -> int:
        """Lets go of the drafter, for good: nothing proposes at the lowest level from now on.

        Returns the bytes of device memory that were given back.
        """
        before = self._models.runtime.memory.available_bytes
        self.drafter.close()
        self.drafter = Nothing(self.model.device)
        self._models.drop_drafter()
        return self._freed_since(before)

    def drop_retrieval(self) -> int:
        """Lets go of the retrieval cache, of the model over it and of the scores it is chosen by,
        for good. Not in the middle of a pass.

        Returns the bytes of device memory that were given back.
        """
        self._tell("drop_retrieval")
        before = self._models.runtime.memory.available_bytes
        self._level_resources.close()
        self.retrieval = self.level = None
        self._models.drop_retrieval()
        return self._freed_since(before)

    def arrived(self) -> None:
        """Said when the host has what was computed, before it is used. Raises RankError."""
        self._models.ranks.check()

    def lend(self) -> None:
        """Lends what was dropped to KV, once nobody holds on to it."""
        self._tell("lend")
        self._lend()

    def close(self) -> None:
        """Gives all memory back."""
        # Ranks that are lost need not be told.
        with suppress(RankError):
            self._tell("close")
        self._resources.close()

    @property
    def checksum(self) -> int:
        """Of the tokens whose KV is kept."""
        return self._checksum.of(self.text.tokens, self.passes.length)

    def check(self, checksum: int) -> None:
        """Raises RankError if what is kept here is another text than the first rank's."""
        own = self.checksum
        if own != checksum:
            raise RankError(
                f"the first {self.passes.length} tokens of its text have checksum {own:#010x}, "
                f"and those of rank 0 have {checksum:#010x}"
            )

    def _told(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of hidden states."""
        logits = self.model.logits(hidden)
        self.logits = logits if self.tells_logits else None
        return logits

    def _tell(self, call: str, *arguments: object) -> None:
        """Tells the other ranks, if this one leads, what is about to be done to which text."""
        ranks = self._models.ranks
        if ranks.count > 1 and not ranks.index:
            ranks.tell(call, self.checksum, *arguments)

    def _telling(self, each_layer: Callable[[int], None]) -> Callable[[int], None]:
        """The same, after which the others hear whether to go on: reading ends everywhere or
        nowhere.
        """

        def told(layer: int) -> None:
            try:
                each_layer(layer)
            except BaseException:
                self._models.ranks.tell("stop")
                raise
            self._models.ranks.tell("go on")

        return told

    def _freed_since(self, before: int) -> int:
        freed = self._models.runtime.memory.available_bytes - before
        self._models.freed_bytes += freed
        return freed

    def _lend(self) -> None:
        freed = self._models.freed_bytes
        self.passes.lend(freed - self._lent_bytes)
        self._lent_bytes = freed

    def shared(self, tokens: Sequence[int]) -> int:
        """How many tokens a prompt shares with what is kept. Its last token is always read anew:
        what follows is drawn from its logits.
        """
        if not (self._reads_alike and self.model.rope.reads_alike(len(tokens))):
            return 0
        most = min(self.passes.length, len(tokens) - 1)
        known = self.text.tokens
        return next((i for i in range(most) if known[i] != tokens[i]), most)

    def _pass(self, feed: Feed, each_layer: Callable[[int], None]) -> torch.Tensor:
        """The last row's hidden state, [1, hidden]."""
        passes = self.passes
        passes.begin()
        hidden = self.model.forward(feed, passes.weights, passes.cache, each_layer=each_layer)
        passes.keep(range(feed.rows))
        return hidden[-1:]

    def _read(self, feed: Feed, each_layer: Callable[[int], None]) -> torch.Tensor:
        """The last row's hidden state, [1, hidden], alone: the others' memory is lent next."""
        with self.passes.reading(feed.rows) as cache:
            hidden = self.model.forward(
                feed, self.passes.weights, cache, chunk=PREFILL_CHUNK, each_layer=each_layer
            )
            return hidden[-1:].clone()
