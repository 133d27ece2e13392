"""The leader's door lets in who knows its key; messages are what was sent, or refused; nothing that
comes is unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.calls import Keep, Load, PassRows, RunPass
from triforce_core.parallel import wire as wires
from triforce_core.parallel.message import (
    DamagedMessageError,
    Failure,
    Sizes,
    Tokens,
    decoded,
    encoded,
)
from triforce_core.parallel.wire import Door, Gone, Wire, knock
from triforce_core.parallel.world import store_on_this_machine
from triforce_core.settings import EngineConfig
from triforce_offload.errors import RankError, UsageError
from triforce_offload.link.trace import Span
from triforce_offload.plan.placement import Placement
from triforce_offload.ranks import Call


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1")
    yield made
    made.close()


def visit(door: Door, sent: bytes) -> socket.socket:
    """A visitor who has sent all that it will send."""
    host, port, _ = door.address.split()
    caller = socket.create_connection((host, int(port)))
    caller.sendall(sent)
    caller.shutdown(socket.SHUT_WR)
    return caller


def greeting(door: Door) -> bytes:
    """What a rank sends behind its key, as it goes over the network."""
    _, _, key = door.address.split()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1 {listening.getsockname()[1]} {key}"
        knocking = threading.Thread(target=lambda: knock(address, 1, "commands").close())
        knocking.start()
        other, _ = listening.accept()
        with other:
            sent = b""
            while part := other.recv(1 << 16):
                sent += part
        knocking.join()
    return sent[len(bytes.fromhex(key)) :]


def test_a_rank_with_the_key_comes_in_by_its_name(door) -> None:
    key = bytes.fromhex(door.address.split()[2])
    with visit(door, key + greeting(door)):
        rank, purpose, wire = door.open(10)
        wire.close()
    assert (rank, purpose) == (1, "commands")


@pytest.mark.parametrize("change", ["first", "last", "zeros", "short", "none"])
def test_a_stranger_does_not_come_in(door, change: str) -> None:
    key = bytes.fromhex(door.address.split()[2])
    sent = {
        "first": bytes([key[0] ^ 1]) + key[1:],
        "last": key[:-1] + bytes([key[-1] ^ 1]),
        "zeros": bytes(len(key)),
        "short": key[:-1],
        "none": b"",
    }[change]
    with visit(door, sent + (greeting(door) if len(sent) == len(key) else b"")):
        assert door.open(10) is None
    # The next one does.
    with visit(door, key + greeting(door)):
        rank, _, wire = door.open(10)
        wire.close()
    assert rank == 1


def test_the_store_listens_on_this_machine_alone() -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}

    before = listening()
    store = store_on_this_machine(2)
    assert listening() - before == {("127.0.0.1", store.port)}
    store.set("key", "value")
    del store
    assert listening() <= before


@pytest.fixture
def pair() -> Iterator[tuple[Wire, Wire]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = Wire(socket.create_connection(listening.getsockname()))
        other = Wire(listening.accept()[0])
    for wire in (one, other):
        # What never comes ends a test.
        wire.set_timeout(30)
    yield one, other
    one.close()
    other.close()


CONFIG = EngineConfig(trace=Path("/a b/\udcff"), max_context=300).changed(
    placement=Placement((0, 2), True, 7, 1, 2, 1), draft=Path("model"), link_bandwidth=2.5e9, gpus=2
)


@pytest.mark.parametrize(
    "message",
    [
        None,
        "beat",
        -5,
        (1, "commands"),
        [0.1, 1e300, float("inf")],
        {"bytes": 3, "none": None, "text": "\u00e4\u4e2d"},
        (1.5, [Span("copy in", "layer 1", 0.1, 0.25, {"bytes": 4})]),
        Failure("ran out of memory", 3, True),
        RunPass(
            Tokens(4, [5, 6, 7, 8]),
            [
                PassRows(3, (0, 0, 1), False, False, context=2, checksum=0xFFFFFFFF),
                PassRows(1, None, False, False, context=0, checksum=0),
            ],
        ),
        RunPass(Tokens(1, None), [PassRows(1, None, True, True, context=1, checksum=1)]),
        Load(Path("/models/a"), "sha256:0", CONFIG, 300),
        Load(Path("/models/a"), "sha256:0", CONFIG, 300, Path("/models/d"), "sha256:1"),
    ],
    ids=str,
)
def test_a_message_comes_as_it_was_sent(pair, message: Any) -> None:
    pair[0].send(message)
    found = pair[1].receive()
    assert found == message
    assert type(found) is type(message)
    if isinstance(message, Call):
        assert [*map(type, astuple(found))] == [*map(type, astuple(message))]


def test_rows_of_a_range_come_as_a_list(pair) -> None:
    pair[0].send(Keep(range(3), checksum=1))
    assert pair[1].receive() == Keep([0, 1, 2], checksum=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 5), (300, 1000)])
def test_a_tensor_comes_as_it_was_sent(pair, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
    # The largest is more than a socket holds.
    sending = threading.Thread(target=pair[0].send_tensor, args=(sent,), daemon=True)
    sending.start()
    found = pair[1].receive_tensor()
    sending.join()
    assert found.dtype == dtype
    assert torch.equal(found, sent)
    pair[0].send_tensor(None)
    assert pair[1].receive_tensor() is None


class Opened:
    """Unpickled it would say so."""

    opened = False

    def __reduce__(self) -> tuple:
        return setattr, (Opened, "opened", True)


def framed(kind: bytes, data: bytes) -> bytes:
    return struct.pack("!cQ", kind, len(data)) + data


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (framed(b"m", pickle.dumps(Opened())), "is damaged"),
        (struct.pack("!i", 40) + pickle.dumps(Opened()), "a frame of kind"),
        (framed(b"t", b"1234"), "a frame of kind"),
        (framed(b"m", b'{"kind": "tuple"}'), "is damaged"),
        (framed(b"m", b'{"kind": "Popen", "of": [["true"]]}'), "is damaged"),
        (framed(b"m", b'{"kind": "Tokens", "of": [1]}'), "is damaged"),
        (framed(b"m", b'{"kind": "tuple", "of": 3}'), "is damaged"),
        (framed(b"m", b'{"kind": "Verify", "of": [1]}'), "is damaged: 'Verify'"),
        (
            framed(b"m", b'{"kind": "Keep", "of": [0, 1, "all"]}'),
            "rows of Keep is 'all', which is no",
        ),
        (
            framed(b"m", b'{"kind": "Keep", "of": [0, 1, [0, true]]}'),
            r"rows of Keep is \[0, True\]",
        ),
        (framed(b"m", b'{"kind": "Refresh", "of": [0, 1, 2.5]}'), "scored of Refresh is 2.5"),
        (framed(b"m", b'{"kind": "Draft", "of": [0, 1, [5], null]}'), r"tokens of Draft is \[5\]"),
        (framed(b"m", b'{"kind": "End", "of": []}'), "is damaged"),
        (framed(b"m", b"[" * 100_000), "is damaged"),
        (framed(b"m", b"\xff\xfe"), "is damaged"),
        (struct.pack("!cQ", b"m", (1 << 30) + 1), "is more than 1073741824"),
    ],
    ids=range(16),
)
def test_what_no_rank_sends_is_refused(pair, sent: bytes, said: str) -> None:
    pair[0]._socket.sendall(sent)
    with pytest.raises(DamagedMessageError, match=said):
        pair[1].receive()
    assert not Opened.opened


@pytest.mark.parametrize(
    ("sizes", "data", "said"),
    [
        (Sizes((3,), "float32"), b"x" * 8, "8 bytes came of a tensor of 12"),
        (Sizes((3,), "float32"), b"x" * 16, "16 bytes is more than 12"),
        (Sizes((3,), "load"), b"", "which is no dtype"),
        (Sizes((-1,), "float32"), b"", r"of shape \(-1,\)"),
        (Sizes((1 << 40,), "float32"), b"", "is more than 274877906944"),
        ("beat", b"", "a str came where a tensor"),
    ],
    ids=str,
)
def test_a_tensor_that_cannot_be_is_refused(pair, sizes: Any, data: bytes, said: str) -> None:
    pair[0].send(sizes)
    pair[0]._socket.sendall(framed(b"t", data))
    with pytest.raises(DamagedMessageError, match=said):
        pair[1].receive_tensor()


def test_settings_are_checked_where_they_come_and_other_things_are_not_sent() -> None:
    with pytest.raises(UsageError, match="method 'odd' is not one of"):
        decoded(encoded(CONFIG.method).replace(b'"triforce"', b'"odd"'))
    with pytest.raises(TypeError, match="ranks do not send object"):
        encoded([object()])


@pytest.mark.parametrize("cut", [1, 9, 12])
def test_an_end_in_the_middle_is_noticed(pair, cut: int) -> None:
    pair[0]._socket.sendall(framed(b"m", encoded("a message"))[:cut])
    pair[0].close()
    assert pair[1].waits(10)
    with pytest.raises(Gone):
        pair[1].receive()


def test_a_damaged_call_ends_the_rank_that_hears_it(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    with Engine.from_pretrained(path, device="cpu", max_context=120, gpus=2) as engine:

        def damaged(message: Any) -> bytes:
            return encoded(message)[:-3] if isinstance(message, Call) else encoded(message)

        monkeypatch.setattr(wires, "encoded", damaged)
        with pytest.raises(RankError, match=r"rank 1: a message of \d+ bytes is damaged"):
            engine.generate(random_ids(60), SamplingParams(4))


ANSWERS_DAMAGED = """
import os

if os.environ.get("RANK") == "1":
    from triforce_core.parallel import wire

    encoded = wire.encoded
    wire.encoded = lambda it: b"{" if isinstance(it, dict) else encoded(it)
"""


def test_a_damaged_answer_is_an_error_and_ends_the_ranks(tiny, tmp_path, monkeypatch) -> None:
    path, _ = tiny("llama")
    (tmp_path / "sitecustomize.py").write_text(ANSWERS_DAMAGED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Engine.from_pretrained(path, device="cpu", max_context=120, gpus=2) as engine:
        with pytest.raises(RankError, match="a message of 1 bytes is damaged"):
            engine.generate(random_ids(60), SamplingParams(4))
        with pytest.raises(RankError):
            engine.generate(random_ids(60), SamplingParams(4))
