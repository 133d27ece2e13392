"""Decoding while weights or KV stream and the processor computes a share of them.

SmolLM2-135M after a part of the Python manual, over an EMULATED link: all layers, or all KV. On a
CPU the device is the processor too, so only the link's part of a pass can become shorter. Shares
take turns within each round; in float32 the texts must be equal.

    python scripts/bench host_compute [--bandwidth 2e9] [--rounds 3]

Writes benchmarks/results/bench_host_compute.json. Exits with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.placements import KV_STREAMED, LAYERS, WEIGHTS_STREAMED
from bench.workloads import MODEL, engine, greedy, stretches
from frame import Benchmark, Figures, Option
from triforce_core import Engine
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import spread


@dataclass(frozen=True)
class Streaming:
    """What streams, and how it is kept.

    tokens: of the prompt
    drafted: tokens that the retrieval level drafts for each pass; 0 for plain decoding
    """

    what: str
    dtype: str
    weights: str = "dense"
    kv: str = "dense"
    tokens: int = 500
    drafted: int = 0

    def placement(self, share: float) -> Placement:
        """Return the placement in which the processor computes a share of what streams."""
        if self.what == "KV":
            return replace(KV_STREAMED, processor_kv=share)
        count = round(share * len(LAYERS))
        layers = spread(count, len(LAYERS)) if count else ()
        return replace(WEIGHTS_STREAMED, processor_layers=layers)


CASES = {
    "weights float32": Streaming("weights", "float32"),
    "weights bfloat16": Streaming("weights", "bfloat16"),
    "weights Q4_1": Streaming("weights", "float32", weights="stored"),
    "KV float32": Streaming("KV", "float32", tokens=6000),
    "KV bfloat16": Streaming("KV", "bfloat16", tokens=6000),
    "KV split": Streaming("KV", "bfloat16", kv="split", tokens=6000),
    "KV float32, drafts of 4": Streaming("KV", "float32", tokens=6000, drafted=4),
    "KV float32, drafts of 16": Streaming("KV", "float32", tokens=6000, drafted=16),
}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {
        "model": f"{MODEL} float32, as bfloat16 and as stored",
        "link": "emulated",
        "bandwidth_gb_per_s": args.bandwidth / 1e9,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
    }
    for name in args.cases:
        yield {"seconds_per_pass": {name: compared(args, name)}}


def compared(args: argparse.Namespace, name: str) -> Figures:
    """Return the seconds of a pass with each share."""
    case = CASES[name]
    (prompt,) = stretches(1, case.tokens)
    shares = (0.0, *(share for share in args.shares if share))
    engines = {f"{share:g}": opened(args, case, share) for share in shares}
    taken: dict[str, list[float]] = {which: [] for which in engines}
    texts = {}
    try:
        for which, each in engines.items():
            texts[which] = each.generate(prompt, greedy(2)).token_ids
        for _ in range(args.rounds):
            for which, each in engines.items():
                result = each.generate(prompt, greedy(args.new_tokens))
                stats = result.stats
                verifying = stats["seconds"]["decode"] - stats["seconds"]["draft"]
                taken[which].append(verifying / stats["passes"])
                texts[which] = result.token_ids
        plan = engines["0"].memory_plan
    finally:
        for each in engines.values():
            each.close()
    median = {which: statistics.median(seconds) for which, seconds in taken.items()}
    same = [which for which, text in texts.items() if text == texts["0"]]
    faults = [f"{name}: the text with {which} differs" for which in texts if which not in same]
    return {
        "prompt_tokens": case.tokens,
        "streamed_bytes": plan.link_bytes,
        "median": median,
        "of_streamed": {which: seconds / median["0"] for which, seconds in median.items()},
        "same_text": len(same) == len(texts),
        "all": taken,
        "faults": faults if case.dtype == "float32" else [],
    }


def opened(args: argparse.Namespace, case: Streaming, share: float) -> Engine:
    drafts = {"method": "autoregressive"}
    if case.drafted:
        drafts = {"method": "triforce", "draft": "none", "budget": 1024}
        drafts |= {"draft_tokens": case.drafted, "tree": "off"}
    return engine(
        case.tokens + args.new_tokens,
        link_bandwidth=args.bandwidth,
        placement=case.placement(share),
        weights=case.weights,
        kv=case.kv,
        dtype=case.dtype,
        **drafts,
    )


main = Benchmark(
    __doc__,
    "bench_host_compute",
    measure,
    (
        Option("--new-tokens", 24, "tokens that are generated"),
        Option("--rounds", 3, "runs of each share, in turns"),
        Option("--bandwidth", 2e9, "bytes per second of the link"),
        Option("--shares", [0.5, 1.0], "shares of what streams"),
        Option("--cases", list(CASES), "what streams, and how it is kept", choices=list(CASES)),
    ),
)
