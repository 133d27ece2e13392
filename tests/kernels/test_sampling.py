"""Laws against float64, and acceptance against the rule written out."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE

from triforce_kernels.sampling.sampling import accept, distribution, pick


def exact_law(row: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """By sorting, in Python's float64; logits must not tie."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(row))]
    if top_k:
        order = order[:top_k]
    x = torch.tensor([row[i] for i in order], dtype=torch.float64)
    p = (x / temperature).softmax(0)
    kept = max(1, int((p.cumsum(0) - p < top_p).sum())) if top_p < 1 else len(p)
    result = [0.0] * len(row)
    for i, value in zip(order[:kept], (p[:kept] / p[:kept].sum()).tolist(), strict=True):
        result[i] = value
    return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize("vocab", [8, 97, 5000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0, 0, 1.0), (1.0, 0, 1.0), (0.6, 0, 0.9), (0.8, 5, 1.0), (1.3, 7, 0.5), (1.0, 0, 0.0)],
)
def test_laws(backend, draw, vocab, temperature, top_k, top_p) -> None:
    wide = draw(4, vocab + 3) * 3
    logits = wide[:, :vocab]
    logits[1, :3] = float("-inf")
    ours = distribution(logits, temperature, top_k, top_p)
    assert ours.dtype == torch.float32
    for row, mine in zip(logits.double().tolist(), ours.tolist(), strict=True):
        expected = exact_law(row, temperature, top_k, top_p)
        assert max(abs(a - b) for a, b in zip(mine, expected, strict=True)) <= 1e-6
        assert [a > 0 for a in mine] == [b > 1e-44 for b in expected]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (4500, 1.0), (4500, 0.7), (20, 0.9)])
def test_laws_that_no_short_list_holds(backend, draw, spread, top_k, top_p) -> None:
    """Flat ones have more candidates than fit there, and of steep ones too few lie near the top."""
    logits = draw(3, 6000) * spread
    ours = distribution(logits, 0.9, top_k, top_p)
    for row, mine in zip(logits.double().tolist(), ours.tolist(), strict=True):
        expected = exact_law(row, 0.9, top_k, top_p)
        # Sums in float32 may move the edge of a nucleus by a token in a thousand.
        kept, wanted = (sum(p > 1e-30 for p in values) for values in (mine, expected))
        assert abs(kept - wanted) <= wanted / 1000
        assert max(abs(a - b) for a, b in zip(mine, expected, strict=True)) <= 1e-6 + 2 / 6000 * (
            kept != wanted
        )


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (3, 1.0)])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_logits_that_are_not_finite_are_seen(backend, draw, temperature, top_k, top_p, bad) -> None:
    logits = draw(3, 300)
    logits[1, 250] = float(bad)
    result = distribution(logits, temperature, top_k, top_p).sum(-1)
    assert result.isnan().tolist() == [False, True, False]
    coins = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    assert (pick(distribution(logits, temperature, top_k, top_p), coins) == -1).tolist() == [
        False,
        True,
        False,
    ]


def test_ties_at_the_edge_of_a_nucleus_keep_its_size(backend) -> None:
    ours = distribution(torch.zeros(1, 10, device=DEVICE), 1.0, 0, 0.45)
    assert sorted(ours[0].tolist()) == pytest.approx([0] * 5 + [0.2] * 5)
    ours = distribution(torch.zeros(1, 10, device=DEVICE), 1.0, 4, 1.0)
    assert ours[0].tolist() == pytest.approx([0.1] * 10), "top-k keeps ties with the k-th"
    for size in (4000, 8000):  # on a short list, and beyond it
        ours = distribution(torch.zeros(1, size, device=DEVICE), 1.0, 0, 0.45)
        assert int((ours > 0).sum()) == pytest.approx(0.45 * size, abs=1)
        assert float(ours.sum()) == pytest.approx(1, abs=1e-5)


def test_of_equal_logits_temperature_zero_takes_the_first(backend) -> None:
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[0, [17, 4500]] = 3
    assert distribution(logits, 0, 0, 1.0).argmax(-1).tolist() == [17, 0]


def random_laws(draw, *shape: int) -> torch.Tensor:
    laws = draw(*shape).mul(2).exp() * (draw(*shape) > -0.5)
    laws[..., 0] += 1e-3
    return laws / laws.sum(-1, keepdim=True)


@pytest.mark.parametrize(("vocab", "n", "drafts"), [(8, 4, 200), (97, 1, 40), (5000, 9, 4)])
def test_acceptance_is_the_rule_written_out(backend, draw, vocab, n, drafts) -> None:
    q, p = random_laws(draw, drafts, n, vocab), random_laws(draw, drafts, n + 1, vocab)
    p[: drafts // 3, :n] = q[: drafts // 3]  # these hold wholly
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(q.cpu().view(-1, vocab), 1, generator=generator).view(drafts, n)
    coins = torch.rand(drafts, n + 1, dtype=torch.float64, generator=generator)
    accepted, token = accept(tokens.to(DEVICE), q, p, coins.to(DEVICE))
    seen = set()
    for d in range(drafts):
        held = 0
        while held < n and coins[d, held] * float(q[d, held, tokens[d, held]]) < float(
            p[d, held, tokens[d, held]]
        ):
            held += 1
        rest = p[d, held].double().cpu()
        if held < n:
            gap = (p[d, held] - q[d, held]).clamp(min=0).double().cpu()
            rest = gap if gap.sum() > 0 else rest
        assert int(accepted[d]) == held
        chosen = int(token[d])
        assert rest[chosen] > 0
        cumulative, aim = rest.cumsum(0), coins[d, n] * rest.sum()
        assert cumulative[chosen] >= aim - 1e-12
        assert cumulative[chosen] - rest[chosen] <= aim + 1e-12
        seen.add(held)
    assert {0, n} <= seen or drafts < 10


def test_a_draft_without_laws_was_sure_of_its_tokens(backend, draw) -> None:
    """As if each of its laws had all its weight on the token; which takes no memory to say."""
    drafts, n, vocab = 60, 5, 3000
    p = random_laws(draw, drafts, n + 1, vocab)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(p.cpu()[:, :n].reshape(-1, vocab), 1, generator=generator)
    tokens = tokens.view(drafts, n).to(DEVICE)
    p[:20, torch.arange(n), tokens[0]] += 50  # many of these hold
    p[:20] /= p[:20].sum(-1, keepdim=True)
    tokens[:20] = tokens[0]
    coins = torch.rand(drafts, n + 1, dtype=torch.float64, generator=generator).to(DEVICE)
    sure = torch.nn.functional.one_hot(tokens, vocab).float()
    ours, theirs = accept(tokens, None, p, coins), accept(tokens, sure, p, coins)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert {0, n} <= set(ours[0].tolist())
    for d, held in enumerate(ours[0].tolist()):
        assert held == n or ours[1][d] != tokens[d, held], "what was rejected is not drawn"


@pytest.mark.parametrize("coin", [0.0, 0.5, 1 - 2**-53])
def test_what_has_no_probability_is_never_drawn(backend, coin) -> None:
    laws = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]], device=DEVICE)
    coins = torch.full((2,), coin, dtype=torch.float64, device=DEVICE)
    tokens = pick(laws, coins).tolist()
    assert tokens[0] in ((1,) if coin == 0 else (1, 3))
    assert tokens[1] == 2
    empty = torch.empty(2, 0, dtype=torch.int64, device=DEVICE)
    none, token = accept(empty, laws[:, None][:, :0], laws[:, None], coins[:, None])
    assert none.tolist() == [0, 0]
    assert token.tolist() == tokens


def test_equal_laws_that_reject_draw_from_the_verifier(backend) -> None:
    """A coin of one rejects what is equal: there is no residual then."""
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]], device=DEVICE)
    coins = torch.ones(1, 2, dtype=torch.float64, device=DEVICE)
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    accepted, token = accept(tokens, p[:, :1], p, coins)
    assert (accepted.item(), token.item()) == (0, 1)


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    with pytest.raises(ValueError, match=r"distribution cannot take .*top_p 1.5"):
        distribution(draw(2, 8), 1.0, 0, 1.5)
    coins = torch.rand(2, 3, dtype=torch.float64, device=DEVICE)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"accept cannot take tokens .*coins \(2, 3\)"):
        accept(tokens, draw(2, 3, 8), draw(2, 4, 8), coins)
    with pytest.raises(ValueError, match=r"pick cannot take probs .*coins \(2, 3\)"):
        pick(draw(2, 8), coins)
