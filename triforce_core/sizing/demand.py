"""What a model, its context and what drafts for it ask of device and host; no tensors."""

from __future__ import annotations

from dataclasses import replace

from offload.errors import DoesNotFitError, UsageError
from offload.formats import ElementType
from offload.kv.sizes import COPY_BYTES, reader_bytes
from offload.placement import Demand, Placement, least_bytes, place
from triforce_core.model.config import ModelConfig
from triforce_core.model.tensors import embedding_layout, head_layout, kv_shape, layer_layout
from triforce_core.settings import MethodSettings
from triforce_core.sizing.drafting import (
    LONGEST_RECORDED,
    fitting_budget,
    retrieval_bytes,
    small_model_parts_bytes,
)
from triforce_core.sizing.workspace import graph_bytes, law_bytes, pass_bytes, workspace_bytes

PREFILL_CHUNK = 1024
_BLOCK_TOKENS = (16, 4096)


def choose_block_tokens(token_bytes: int, max_context: int, block_bytes: int) -> int:
    """Tokens of a KV block: a power of two near `block_bytes`, an eighth of the context at most."""
    least, most = _BLOCK_TOKENS
    tokens = max(1, min(block_bytes // token_bytes, max_context // 8, most))
    return max(least, 1 << tokens.bit_length() - 1)


def demand_of(
    config: ModelConfig,
    dtype: ElementType,
    max_context: int,
    settings: MethodSettings,
    block_tokens: int | None = None,
    *,
    budget: int = 0,
    drafter: ModelConfig | None = None,
    block_bytes: int = COPY_BYTES,
    graphs: bool = False,
    splits: int = 1,
) -> Demand:
    """What the model and what drafts for it ask for at the longest context.

    budget: tokens of the retrieval cache, 0 for none. block_bytes: of a KV block, about, if
    block_tokens is None. graphs: whether what drafts is recorded. splits: see
    `workspace_bytes`. Raises UsageError.
    """
    shape = kv_shape(config, 1, dtype)
    block_tokens = block_tokens or max(
        settings.chunk_size, choose_block_tokens(shape.token_bytes, max_context, block_bytes)
    )
    if settings.chunk_size > block_tokens:
        raise UsageError(
            f"chunk_size {settings.chunk_size} is more than the {block_tokens} tokens of a block"
        )
    shape = replace(shape, block_tokens=block_tokens)
    longest = settings.max_draft_tokens
    drafting = 0
    if drafter:
        drafting = small_model_parts_bytes(drafter, shape, longest)
        drafting += law_bytes(drafter, 1) + pass_bytes(drafter, 512, 4)
    through_host = 0
    if budget:
        drafting += retrieval_bytes(shape, budget, settings.chunk_size, longest, max_context)
        through_host = reader_bytes(shape, fitting_budget(budget, settings.chunk_size, max_context))
    if graphs:
        for recorded in (config if budget else None, drafter):
            if recorded:
                drafting += graph_bytes(recorded, LONGEST_RECORDED, dtype.itemsize)
    return Demand(
        layers=config.layers,
        layer_bytes=layer_layout(config, dtype).nbytes,
        head_bytes=head_layout(config, dtype).nbytes,
        embedding_bytes=0 if config.tied else embedding_layout(config, dtype).nbytes,
        workspace_bytes=workspace_bytes(
            config,
            max_context,
            PREFILL_CHUNK,
            longest + 1,
            block_tokens,
            settings.chunk_size if budget else 0,
            dtype.itemsize,
            splits,
        ),
        kv=shape,
        context_tokens=max_context,
        max_pass_tokens=longest + 1,
        drafting_bytes=drafting,
        drafting_host_bytes=through_host,
    )


def plan(
    config: ModelConfig,
    dtype: ElementType,
    max_context: int,
    settings: MethodSettings,
    block_tokens: int | None,
    drafter: ModelConfig | None,
    placement: Placement | None,
    available_bytes: int,
    *,
    block_bytes: int = COPY_BYTES,
    graphs: bool = False,
    splits: int = 1,
) -> tuple[Demand, Placement, int]:
    """What is asked for, where it goes, and the retrieval budget.

    The retrieval model computes with the target's own weights, so it is there if they all stay on
    the device; if they have to stream, the drafter proposes to the target directly.
    Raises DoesNotFitError, or UsageError.
    """

    def demand(budget: int) -> Demand:
        return demand_of(
            config,
            dtype,
            max_context,
            settings,
            block_tokens,
            budget=budget,
            drafter=drafter,
            block_bytes=block_bytes,
            graphs=graphs,
            splits=splits,
        )

    without = demand(0)
    if settings.method != "triforce" or (placement and placement.streamed_layers):
        return without, placement or place(without, available_bytes), 0
    if settings.budget is not None:
        cache = settings.budget * without.kv.token_bytes * config.layers
        if cache > available_bytes:
            raise DoesNotFitError(
                f"device memory for a retrieval budget of {settings.budget} tokens",
                cache,
                available_bytes,
                "use a smaller --budget",
            )
    for budget in settings.budgets:
        wanted = demand(budget)
        if placement:
            return wanted, placement, budget
        needed = least_bytes(wanted, streamed_layers=0)
        if needed <= available_bytes:
            return wanted, place(wanted, available_bytes), budget
    if settings.budget is not None and least_bytes(without, streamed_layers=0) <= available_bytes:
        raise DoesNotFitError(
            f"device memory with a retrieval budget of {settings.budget} tokens",
            needed,
            available_bytes,
            "use a smaller --budget or a shorter context",
        )
    return without, place(without, available_bytes), 0
