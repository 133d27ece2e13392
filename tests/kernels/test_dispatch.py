"""The table of kernels: the implementations of each, and who may ask for which."""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from triforce_kernels import dispatch, warmup
from triforce_kernels.dispatch import (
    HOST,
    KERNELS,
    REFERENCE,
    TRITON,
    VARIABLE,
    KernelsError,
    backend,
)
from triforce_kernels.host.library import library

triton = pytest.importorskip("triton")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_implementations_take_the_same_arguments(kernel: str) -> None:
    reference, *others = (dispatch._load(path) for path in KERNELS[kernel] if path)
    parameters = list(inspect.signature(reference).parameters)
    assert all(list(inspect.signature(other).parameters) == parameters for other in others)


@pytest.fixture
def launches(monkeypatch):
    """launches(failure): Triton on CUDA launches, or does not and says why."""

    def set_to(failure: str | None) -> None:
        dispatch._backend.cache_clear()
        monkeypatch.setattr(dispatch, "_failure", lambda device: failure)

    yield set_to
    dispatch._backend.cache_clear()


def test_the_device_decides_unless_the_variable_does(monkeypatch, launches) -> None:
    launches(None)
    monkeypatch.setattr(dispatch, "_forced", "")
    assert backend(CPU) == (HOST if library() else REFERENCE)
    assert backend(GPU) == TRITON
    monkeypatch.setattr(dispatch, "_forced", REFERENCE)
    assert backend(GPU) == REFERENCE
    monkeypatch.setattr(dispatch, "_forced", HOST)
    with pytest.raises(KernelsError, match="TRIFORCE_KERNELS=host, which does not run on cuda"):
        backend(GPU)
    monkeypatch.setattr(dispatch, "_forced", "cutlass")
    with pytest.raises(KernelsError, match="TRIFORCE_KERNELS is 'cutlass'; use reference, tri"):
        backend(CPU)


def test_without_triton_the_reference_takes_its_place_with_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="triton is not installed"):
        assert dispatch._backend.__wrapped__(GPU, "") == REFERENCE
    with pytest.raises(KernelsError, match="triton is not installed"):
        dispatch._backend.__wrapped__(GPU, TRITON)


def test_where_triton_launches_nothing_the_reference_takes_its_place(launches) -> None:
    launches("no C compiler")
    with pytest.warns(RuntimeWarning, match=r"launches nothing \(no C compiler\)"):
        assert dispatch._backend(GPU, "") == REFERENCE
    with pytest.raises(KernelsError, match="launches nothing: no C compiler"):
        dispatch._backend(GPU, TRITON)


def test_triton_is_tried_on_the_device_of_the_inputs_alone(monkeypatch) -> None:
    """Each rank has a GPU of its own, and makes no context on the first one."""
    tried: list[tuple[int | None, int | None]] = []
    current = [0]

    @contextmanager
    def enter(device: torch.device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(dispatch, "_forced", "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.device(device))
    launched = lambda x: tried.append((x.index, current[0]))  # noqa: E731
    monkeypatch.setattr(dispatch, "_load", lambda path: launched)
    dispatch._backend.cache_clear()
    try:
        assert backend(torch.device("cuda", 1)) == backend(torch.device("cuda", 1)) == TRITON
        assert tried == [(1, 1)], "once, on the second GPU"
        assert backend(torch.device("cuda")) == TRITON
        assert tried == [(1, 1), (0, 0)], "the current one"
    finally:
        dispatch._backend.cache_clear()


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("fast", "TRIFORCE_KERNELS is 'fast'; use reference, triton, host, or unset it"),
        ("triton", "TRIFORCE_KERNELS=triton on cpu needs Triton's interpreter"),
    ],
)
def test_the_command_line_says_so_in_a_sentence(speaking, monkeypatch, value, sentence) -> None:
    monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "triforce_core.cli",
            "generate",
            speaking,
            "--prompt",
            "x",
            "--device",
            "cpu",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_nothing_imports_triton_on_a_cpu() -> None:
    modules = "sys, triforce_offload.runtime, triforce_core.engine"
    code = f"import {modules}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("index", "entered"), [(1, [1]), (0, []), (None, [])])
def test_a_kernel_launches_on_the_device_of_its_inputs(monkeypatch, index, entered) -> None:
    """Another thread, or an engine on another GPU, may have made another device the current one."""
    seen: list[int | None] = []

    @contextmanager
    def enter(device: torch.device):
        seen.append(device.index)
        yield
        seen.append(None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(dispatch, "backend", lambda device: TRITON)
    monkeypatch.setattr(dispatch, "_load", lambda path: lambda a, *, b: (a, b, list(seen)))
    launch = dispatch.implementation("swiglu", torch.device("cuda", index))
    assert launch(3, b=4) == (3, 4, entered)
    assert seen == [*entered, None][: 2 * len(entered)], "and leaves it again"


def test_what_triton_compiles_is_counted_beside_other_hooks(monkeypatch) -> None:
    others: list[str] = []
    knobs = triton.knobs.runtime
    monkeypatch.setattr(
        knobs, "jit_post_compile_hook", lambda **named: others.append(named["repr"])
    )
    before = warmup.events()
    warmup.watch_compiler.__wrapped__()
    knobs.jit_post_compile_hook(repr="a kernel")
    assert warmup.events() == before + 1
    assert others == ["a kernel"]
