"""Prometheus metrics, served at /metrics."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from triforce_core.requests.stream import Completion
from triforce_core.server.errors import refused
from triforce_core.server.worker import Job, Worker

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = {"registry": self.registry}

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"triforce_{name}", about, labels, **registry)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"triforce_{name}", about, buckets=_SECONDS, **registry)

        self._requests = counter("requests", "Texts by the way in which they ended", "outcome")
        self._refused = counter("refusals", "Requests with a key that were refused", "status")
        self._tokens = counter(
            "tokens", "Tokens that were prefilled, reused from a context, or generated", "kind"
        )
        self._drafts = counter("drafts", "Draft tokens by the target's verdict", "outcome")
        self._link = counter("link_bytes", "Bytes that crossed the link", "direction")
        self._busy = counter("link_busy_seconds", "Seconds in which the link carried to the device")
        self._decode = counter("decode_seconds", "Seconds of decoding")
        self._waited = histogram("queue_seconds", "Seconds that a text waited for the engine")
        self._first = histogram(
            "first_token_seconds", "Seconds from the request to the first token of its text"
        )
        self._each = histogram("token_seconds", "Mean seconds of each further token of a text")
        self._waiting = Gauge("triforce_waiting", "Requests that wait for the engine", **registry)
        self._running = Gauge("triforce_running", "Texts that are being generated", **registry)

    def served(self, job: Job, result: Completion | BaseException) -> None:
        """Count a job that has ended."""
        if not isinstance(result, Completion):
            status, _ = refused(result)
            self._requests.labels("failed" if status >= 500 else "refused").inc()
            return
        stats, link = result.stats, result.stats["link"]
        self._requests.labels(result.finish_reason).inc()
        reused = stats["reused_tokens"]
        for kind, count in (
            ("prompt", stats["prompt_tokens"] - reused),
            ("reused", reused),
            ("generated", stats["new_tokens"]),
        ):
            self._tokens.labels(kind).inc(count)
        lengths = stats["acceptance"]["accepted_lengths"]
        accepted = sum(length * count for length, count in enumerate(lengths))
        drafted = round((stats["draft_tokens"]["mean"] or 0) * sum(lengths))
        self._drafts.labels("accepted").inc(accepted)
        self._drafts.labels("rejected").inc(max(0, drafted - accepted))
        for direction, name in (("to_device", "to_device"), ("to_host", "to_host")):
            crossed = link[f"bytes_{name}"] + link[f"prefill_bytes_{name}"]
            self._link.labels(direction).inc(crossed)
        self._busy.inc(link["busy_seconds"])
        self._decode.inc(stats["seconds"]["decode"])
        waited = (job.began or time.monotonic()) - job.submitted
        self._waited.observe(waited)
        self._first.observe(waited + stats["seconds"]["prefill"])
        if stats["seconds_per_token"]:
            self._each.observe(stats["seconds_per_token"])

    def refused(self, status: int) -> None:
        """Count a request that is answered with an error."""
        self._refused.labels(str(status)).inc()

    def text(self, worker: Worker) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._waiting.set(worker.waiting)
        self._running.set(len(worker.running))
        return generate_latest(self.registry)
