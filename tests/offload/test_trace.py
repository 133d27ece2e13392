"""The timeline: every copy with its bytes, in order on its stream, and nothing when it is off."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from tiny_parts import LAYERS

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import OutputError, UsageError
from triforce_offload.link.emulated import EmulatedLink
from triforce_offload.link.trace import (
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    HOST,
    PROCESSOR,
    TRACKS,
    NoTrace,
    Trace,
    TracedLink,
)

PARAMS = SamplingParams(30, temperature=0.8, seed=1)
OPTIONS = {
    "device": "cpu",
    "max_context": 200,
    "block_tokens": BLOCK,
    "placement": PLACEMENTS["both"],
    "link_bandwidth": "200MB/s",
}


def events_of(path: Path) -> dict[str, list[dict]]:
    whole = json.loads(path.read_text())
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in whole["traceEvents"]
        if event["name"] == "thread_name"
    }
    found: dict[str, list[dict]] = {name: [] for name in tracks.values()}
    for event in whole["traceEvents"]:
        if event["ph"] == "X":
            found[tracks[event["tid"]]].append(event)
    return found


@pytest.mark.parametrize(
    "method", [{"method": "autoregressive"}, {"method": "speculative", "draft_tokens": 4}]
)
def test_a_trace_holds_every_copy_and_changes_nothing(tiny, tmp_path, method) -> None:
    path, _ = tiny("llama")
    file = tmp_path / "trace.json"
    with Engine.from_pretrained(path, **OPTIONS, **method) as engine:
        expected = engine.generate(random_ids(75), PARAMS)
    with Engine.from_pretrained(path, trace=file, **OPTIONS, **method) as engine:
        engine.generate(random_ids(50), PARAMS)
        result = engine.generate(random_ids(75), PARAMS)
    assert result.token_ids == expected.token_ids
    assert not (tmp_path / "trace.json.partial").exists()
    events, link = events_of(file), result.stats["link"]
    assert tuple(events) == TRACKS
    for track, named in ((COPY_IN, "to_device"), (COPY_OUT, "to_host")):
        carried = sum(event["args"]["bytes"] for event in events[track])
        assert carried == link[f"bytes_{named}"] + link[f"prefill_bytes_{named}"]
        for event in events[track]:
            assert 0 <= event["args"]["layer"] < LAYERS
        for before, after in pairwise(events[track]):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    # At its bandwidth, each copy takes its bytes.
    for event in events[COPY_IN]:
        assert event["dur"] == pytest.approx(event["args"]["bytes"] / 200, rel=0.01, abs=0.01)
    layers = [event for event in events[COMPUTE] if event["name"] == "layer"]
    assert len(layers) == LAYERS * (1 + result.stats["passes"])
    assert {event["name"] for event in events[COMPUTE]} == {"layer", "wait"}
    named = {event["name"] for event in events[HOST]}
    assert named >= ({"step"} if method["method"] == "autoregressive" else {"draft", "verify"})


def test_layers_that_the_processor_computes_have_a_track_of_their_own(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    file = tmp_path / "trace.json"
    options = OPTIONS | {"placement": PLACEMENTS["processor"], "method": "autoregressive"}
    with Engine.from_pretrained(path, trace=file, **options) as engine:
        passes = engine.generate(random_ids(75), PARAMS).stats["passes"]
    events = events_of(file)
    computed = [e["args"]["layer"] for e in events[PROCESSOR] if e["name"] == "layer"]
    assert computed == list(PLACEMENTS["processor"].processor_layers) * passes
    attended = [e["args"]["layer"] for e in events[PROCESSOR] if e["name"] == "attention"]
    assert attended == list(range(LAYERS)) * passes
    # The device computes all layers of the prefill.
    layers = [event for event in events[COMPUTE] if event["name"] == "layer"]
    assert len(layers) == LAYERS * (1 + passes) - len(computed)
    crossed = [e["args"]["layer"] for e in events[COPY_IN] if e["name"] == "weights"]
    assert sorted(crossed) == sorted([0, 1, 2] + [1] * passes)


def test_levels_below_the_target_are_in_it(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    file = tmp_path / "trace.json"
    options = OPTIONS | {"placement": PLACEMENTS["kv"], "budget": 32, "draft": path}
    with Engine.from_pretrained(path, trace=file, **options) as engine:
        result = engine.generate(random_ids(75), PARAMS)
    events = events_of(file)
    computed = [event["name"] for event in events[COMPUTE]]
    assert set(computed) >= {"layer", "retrieval model", "drafter"}
    told = {event["name"] for event in events[HOST]}
    assert told >= {"draft", "verify", "refresh"}
    accepted = [e["args"]["accepted"] for e in events[HOST] if e["name"] == "verify"]
    assert sum(accepted) + len(accepted) == result.stats["new_tokens"] - 1
    assert "retrieval" in {event["name"] for event in events[COPY_IN]}


def test_a_copy_is_in_it_as_it_ran() -> None:
    link = EmulatedLink(bandwidth=1e6)
    trace = Trace(link)
    traced = TracedLink(link, trace)
    try:
        target, source = (torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
        traced.wait(traced.to_device(target, source, (), ("kv", 3, 9)))
        (span, wait) = trace.spans()
        assert (span.name, span.args) == ("kv", {"layer": 3, "block": 9, "bytes": 1000})
        assert span.ended - span.began == pytest.approx(1e-3)
        assert wait.name == "wait"
        trace.clear()
        assert trace.spans() == []
    finally:
        traced.close()


def test_off_there_is_nothing_in_the_way(tiny) -> None:
    path, _ = tiny("llama")
    with Engine.from_pretrained(path, **OPTIONS) as engine:
        assert type(engine.runtime.link) is EmulatedLink
        assert isinstance(engine.runtime.trace, NoTrace)


def test_a_trace_that_cannot_be_written_in_the_end_loses_nothing_else(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    folder = tmp_path / "folder"
    folder.mkdir()
    with Engine.from_pretrained(path, trace=folder / "t.json", **OPTIONS) as engine:
        folder.rmdir()
        stream = engine.stream(random_ids(75), PARAMS)
        with pytest.raises(OutputError, match="cannot write the trace"):
            list(stream)
        assert len(stream.result.token_ids) == 30


@pytest.mark.parametrize("where", ["", "missing/trace.json"])
def test_a_file_that_cannot_be_written_is_refused_before_loading(tiny, tmp_path, where) -> None:
    path, _ = tiny("llama")
    with pytest.raises(UsageError, match="cannot write"):
        Engine.from_pretrained(path, trace=tmp_path / where, **OPTIONS)
