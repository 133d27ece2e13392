"""The small operations of a layer against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near

from triforce_kernels.kv.rounding import rounded
from triforce_kernels.layer import geglu, layer_norm, rms_norm, rope_into, swiglu


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("shape", [(1, 64), (5, 200), (3, 1025), (4, 7, 24)])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kind", ["rms", "plus_one", "float32", "layer"])
def test_norm_with_residual(backend, draw, shape, dtype, add, kind) -> None:
    weight = draw(shape[-1], dtype=dtype)
    whole = draw(*shape[:-1], shape[-1] + 3, dtype=dtype) * 3
    x = whole[..., : shape[-1]]  # rows of a larger buffer
    delta = draw(*shape, dtype=dtype) if add else None
    total = (x + delta if add else x).clone()
    before = whole[..., shape[-1] :].clone()
    if kind == "layer":
        ours = layer_norm(x, weight, 1e-5, delta)
        exact = F.layer_norm(total.double(), shape[-1:], weight.double(), None, 1e-5)
    else:
        ours = rms_norm(x, weight, 1e-5, delta, offset={"plus_one": 1.0, "float32": 0.0}.get(kind))
        factors = weight.double() + (kind == "plus_one")
        exact = F.rms_norm(total.double(), shape[-1:], factors, 1e-5)
    assert_near(ours, exact, TOLERANCE[dtype])
    assert torch.equal(x, total), "x is the sum, rounded once"
    assert torch.equal(whole[..., shape[-1] :], before)


def test_a_norm_with_one_more_than_its_weights_rounds_once(backend) -> None:
    """The sum of 1 and a small weight would round to 1 in half precision."""
    x = torch.arange(1.0, 65, device=DEVICE).half().unsqueeze(0)
    weight = torch.full((64,), 4e-4, device=DEVICE).half()
    exact = F.rms_norm(x.double(), (64,), weight.double() + 1).half()
    assert torch.equal(rms_norm(x, weight, 0.0, offset=1.0), exact)
    assert not torch.equal(rms_norm(x, weight + 1, 0.0), exact)


def test_a_norm_near_the_greatest_half_does_not_overflow(backend) -> None:
    x = torch.full((2, 64), 65000.0, device=DEVICE).half()
    ours = rms_norm(x, torch.ones(64, device=DEVICE).half(), 1e-5)
    assert_near(ours, torch.ones(2, 64, device=DEVICE), 2e-3)


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(("queries", "kv_heads"), [(4, 2), (3, 3), (7, 1)])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 80), (5, 64)])
@pytest.mark.parametrize("on_device", [False, True])
def test_rope_rotates_and_puts_keys_and_values_in_place(
    backend, draw, queries, kv_heads, tokens, head_dim, on_device, dtype
) -> None:
    heads = draw(tokens, queries + 2 * kv_heads, head_dim, dtype=dtype)
    angles = draw(tokens, head_dim // 2)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cache = draw(2, kv_heads, 20, head_dim + 4, dtype=dtype)
    key, value = cache[..., :head_dim]
    before = cache.clone()
    start = torch.tensor([9], device=DEVICE) if on_device else 9
    query = rope_into(heads, cos, sin, key, value, start)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        one, two = x.double().transpose(0, 1).chunk(2, -1)
        c, s = (t.double()[:, : head_dim // 2] for t in (cos, sin))
        return torch.cat((one * c - two * s, two * c + one * s), -1)

    there = slice(9, 9 + tokens)
    assert_near(query, rotated(heads[:, :queries]), TOLERANCE[dtype])
    assert_near(key[:, there], rotated(heads[:, queries : queries + kv_heads]), TOLERANCE[dtype])
    assert torch.equal(value[:, there], heads[:, queries + kv_heads :].transpose(0, 1))
    cache[:, :, there, :head_dim] = before[:, :, there, :head_dim]
    assert torch.equal(cache, before), "nothing else is written"


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(("queries", "kv_heads", "head_dim"), [(4, 2, 80), (3, 1, 64)])
@pytest.mark.parametrize("on_device", [False, True])
def test_rope_puts_whole_numbers_in_place(
    backend, draw, queries, kv_heads, head_dim, on_device, dtype
) -> None:
    heads = draw(5, queries + 2 * kv_heads, head_dim, dtype=dtype)
    angles = draw(5, head_dim // 2)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    exact = [draw(kv_heads, 20, head_dim, dtype=dtype) for _ in range(2)]
    query = rope_into(heads, cos, sin, *exact, 9)
    # Some numbers lie far beyond what their scale reaches.
    scale = draw(2, kv_heads, head_dim, dtype=torch.float32).abs() / 60 + 1e-3
    cache = torch.full((2, kv_heads, 20, head_dim + 4), 5, dtype=torch.int8, device=DEVICE)
    start = torch.tensor([9], device=DEVICE) if on_device else 9
    scaled = rope_into(heads, cos, sin, *cache[..., :head_dim], start, scale)
    of_query = scale[0].repeat_interleave(queries // kv_heads, 0).unsqueeze(1)
    assert_near(scaled, query.double() * of_query, TOLERANCE[dtype])
    there = cache[:, :, 9:14, :head_dim]
    for whole, numbers, of in zip(there, exact, scale.unsqueeze(2), strict=True):
        assert torch.equal(whole, rounded(numbers[:, 9:14], of))
    assert int(there.abs().max()) == 127
    there.fill_(5)
    assert (cache == 5).all(), "nothing else is written"


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_rope_of_keys_that_are_the_values_too(backend, draw, on_device, whole, dtype) -> None:
    heads, angles = draw(5, 6, 80, dtype=dtype), draw(5, 80)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    kind = torch.int8 if whole else dtype
    cache = torch.full((3, 1, 20, 84), 5, dtype=kind, device=DEVICE)
    scale = draw(2, 1, 80, dtype=torch.float32).abs() / 60 + 1e-3 if whole else None
    key, value, both = cache[..., :80]
    start = torch.tensor([9], device=DEVICE) if on_device else 9
    # A key more in place of a value.
    apart = torch.cat((heads, heads[:, -1:]), 1)
    expected = rope_into(apart, cos, sin, key, value, start, scale)
    one = None if scale is None else scale[:1].contiguous()
    assert torch.equal(rope_into(heads, cos, sin, both, both, start, one), expected)
    assert torch.equal(both, key)
    cache[..., 9:14, :80] = 5
    assert (cache == 5).all(), "nothing else is written"


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("shape", [(1, 96), (5, 1500)])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated(backend, draw, shape, dtype, gelu) -> None:
    gate_up = draw(shape[0], 2 * shape[1], dtype=dtype) * 4
    gate_up[0, :3] = torch.tensor([60000.0, -60000.0, 0.0])
    gate_up[0, shape[1] : shape[1] + 3] = 1
    gate, up = gate_up.double().chunk(2, -1)
    if gelu:
        exact = F.gelu(gate, approximate="tanh") * up
        assert_near(geglu(gate_up), exact, TOLERANCE[dtype])
    else:
        assert_near(swiglu(gate_up), F.silu(gate) * up, TOLERANCE[dtype])


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    with pytest.raises(ValueError, match=r"rms_norm cannot take x .*weight \(5,\)"):
        rms_norm(draw(2, 4), draw(5), 1e-5)
    with pytest.raises(ValueError, match=r"layer_norm cannot take x .*weight \(5,\)"):
        layer_norm(draw(2, 4), draw(5), 1e-5)
    with pytest.raises(ValueError, match=r"swiglu cannot take gate_up \(2, 5\)"):
        swiglu(draw(2, 5))
    with pytest.raises(ValueError, match=r"geglu cannot take gate_up \(2, 5\)"):
        geglu(draw(2, 5))
    cache, angles = draw(2, 2, 8, 16), draw(3, 16)
    with pytest.raises(ValueError, match=r"rope_into cannot take heads .*start 6"):
        rope_into(draw(3, 8, 16), angles, angles, *cache, 6)
    with pytest.raises(ValueError, match=r"rope_into cannot take heads .*scale \(2, 2, 16\)"):
        rope_into(draw(3, 8, 16), angles, angles, *cache, 0, draw(2, 2, 16))
