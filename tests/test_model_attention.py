"""Attention of `attention.c` against every pair of tokens by itself in float64, in float32 and in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from test_model_fused import EPS, compare, naive_norm, random
from torch import Tensor, nn

from minigpt.model import attention_calls, attention_tiles, fused
from minigpt.model.attention import attention, fits_heads
from minigpt.model.positions import rotary_angles, rotate


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if fused.library() is None or attention_calls.library() is None:
        pytest.skip("no C compiler here")


def norm(gain: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight, module.eps = nn.Parameter(gain.detach()), EPS
    return module


def naive_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, turn: Callable[[Tensor], Tensor], first: Tensor
) -> Tensor:
    """Every pair of tokens by itself: heads apart, scores, mask, softmax, weighted sum."""

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    q, k, v = turn(heads(query)), turn(heads(key)), heads(value)
    group, places = q.shape[1] // k.shape[1], torch.arange(query.shape[1])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = (places <= places[:, None]) & (places >= first[:, None, :, None])
    scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Places:
    """Where tokens stand and from which one on they see: `kind` is causal, documents or window."""

    kind: str
    B: int
    T: int
    D: int

    @property
    def first(self) -> Tensor:
        places = torch.arange(self.T)
        if self.kind == "documents":
            return torch.stack([places // (5 + row) * (5 + row) for row in range(self.B)]).int()
        first = (places - 9).clamp(min=0) if self.kind == "window" else torch.zeros_like(places)
        return first.int().expand(self.B, self.T).contiguous()

    @property
    def rotary(self) -> tuple[Tensor, Tensor]:
        packed = self.kind == "documents"
        positions = torch.arange(self.T) - self.first if packed else torch.arange(self.T)
        cosines, sines = rotary_angles(positions, self.D, 10_000.0)
        return (cosines.unsqueeze(1), sines.unsqueeze(1)) if packed else (cosines, sines)

    def turn(self, x: Tensor) -> Tensor:
        return rotate(x, *(angles.double() for angles in self.rotary))

    def attend(self, *given: Tensor, norms: tuple[nn.Module, nn.Module] | tuple[()] = ()) -> Tensor:
        first = None if self.kind == "causal" else self.first
        return attention(*given, self.D, *(norms or (None, None)), self.rotary, first)


KINDS = pytest.mark.parametrize("kind", ["causal", "documents", "window"])


@KINDS
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "D"), [(2, 13, 4, 2, 16), (1, 1, 2, 1, 16), (3, 64, 3, 3, 32), (2, 131, 4, 1, 48)]
)
def test_attention_under_rotary_positions(B: int, T: int, H: int, K: int, D: int, kind: str) -> None:
    places = Places(kind, B, T, D)
    compare(
        places.attend,
        lambda q, k, v: naive_attention(q, k, v, D, places.turn, places.first),
        random(B, T, H * D), random(B, T, K * D, seed=1), random(B, T, K * D, seed=2),
    )  # fmt: skip


@KINDS
@pytest.mark.parametrize(("scores", "queries"), [(1 << 19, (16, 256)), (1, (16, 256)), (2000, (8, 24))])
@pytest.mark.parametrize(("T", "H", "K"), [(1, 2, 1), (13, 4, 2), (61, 3, 3)])
def test_attention_in_bfloat16(
    T: int, H: int, K: int, scores: int, queries: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_tiles, "SCORES", scores)
    monkeypatch.setattr(attention_tiles, "QUERIES", queries)
    B, D = 3, 16
    places = Places(kind, B, T, D)
    given = [random(B, T, heads * D, seed=seed) for seed, heads in enumerate((H, K, K))]
    narrow = [x.detach().bfloat16().requires_grad_() for x in given]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    norms = norm(random(D, seed=7)), norm(random(D, seed=8))
    gains, slope = [module.weight for module in norms], random(B, T, H * D, seed=9).detach().bfloat16()
    out, expected = places.attend(*narrow, norms=norms), places.attend(*wide, norms=norms)
    assert out.dtype == torch.bfloat16
    assert off_by(out, expected) < 0.01
    found = torch.autograd.grad(out, [*narrow, *gains], slope)
    for one, other in zip(found, torch.autograd.grad(expected, [*wide, *gains], slope.float()), strict=True):
        assert off_by(one, other) < 0.015, "all that is rounded has eight bits"


def off_by(found: Tensor, expected: Tensor) -> float:
    """How far two tensors are apart, as a part of the second, or of 0.01 where that is next to nothing."""
    found, expected = found.detach().float(), expected.detach()
    return float((found - expected).norm() / max(0.01, float(expected.norm())))


def test_gradients_of_many_tiles_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "QUERIES", (8, 8))
    places = Places("causal", 1, 1000, 16)
    given = [random(1, 1000, 16, seed=seed).detach().bfloat16().requires_grad_() for seed in range(3)]
    wide = [x.detach().float().requires_grad_() for x in given]
    slope = random(1, 1000, 16, seed=9).detach().bfloat16()
    found = torch.autograd.grad(places.attend(*given), given, slope)
    for one, other in zip(found, torch.autograd.grad(places.attend(*wide), wide, slope.float()), strict=True):
        assert off_by(one, other) < 0.008, "as with one tile; in bfloat16 the sums of 125 are off by 0.02"


def test_what_is_no_number_stays_in_its_row() -> None:
    places = Places("causal", 2, 9, 16)
    given = [random(2, 9, 16, seed=seed).detach().bfloat16().requires_grad_() for seed in range(3)]
    slope = torch.ones(2, 9, 16).bfloat16()
    slope[0] = math.nan
    for gradient in torch.autograd.grad(places.attend(*given), given, slope):
        assert gradient[0].isnan().any()
        assert gradient[1].isfinite().all()


def test_a_second_derivative_is_refused() -> None:
    for kind in (torch.float32, torch.bfloat16):
        given = [random(1, 9, 16, seed=seed).detach().to(kind).requires_grad_() for seed in range(3)]
        out = Places("causal", 1, 9, 16).attend(*given)
        (first,) = torch.autograd.grad(out.float().square().sum(), given[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


def test_attention_without_positions_in_bfloat16() -> None:
    given = [random(2, 20, 32, seed=seed).detach().bfloat16().requires_grad_() for seed in range(3)]
    wide = [x.detach().double().requires_grad_() for x in given]
    out = attention(*given, 8)
    expected = naive_attention(*wide, 8, lambda x: x, torch.zeros(2, 20))
    assert off_by(out, expected.float()) < 0.01
    slope = random(2, 20, 32, seed=9).detach()
    found = torch.autograd.grad(out, given, slope.bfloat16())
    for one, other in zip(found, torch.autograd.grad(expected, wide, slope.double()), strict=True):
        assert off_by(one, other.float()) < 0.015


def test_attention_with_norms_of_queries_and_keys() -> None:
    B, T, H, K, D = 2, 37, 4, 2, 16
    query, key, value = random(B, T, H * D), random(B, T, K * D, seed=1), random(B, T, K * D, seed=2)
    norms = norm(random(D, seed=3)), norm(random(D, seed=4))
    slope = random(B, T, H * D, seed=5).detach()
    inputs = (query, key, value, norms[0].weight, norms[1].weight)
    out = attention(query, key, value, D, *norms)
    found = torch.autograd.grad(out, inputs, slope)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    q, k = (
        naive_norm(x.unflatten(-1, (-1, D)), gain).flatten(2) for x, gain in ((wide[0], wide[3]), (wide[1], wide[4]))
    )
    expected = naive_attention(q, k, wide[2], D, lambda x: x, torch.zeros(B, T))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(expected, wide, slope.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_the_same_bits_whatever_the_number_of_threads_and_the_rows_beside() -> None:
    B, T, D = 4, 50, 16
    parts = [random(B, T, width, seed=width) for width in (4 * D, 2 * D, 2 * D)]
    gain = random(D, seed=7)

    def run(rows: slice) -> list[Tensor]:
        some = [part[rows] for part in parts]
        out = attention(*some, D, norm(gain), norm(gain))
        normed = fused.norm(some[0], torch.ones(4 * D), None, EPS)
        return [out, *torch.autograd.grad(out.sum(), parts), normed, *torch.autograd.grad(normed.sum(), parts[:1])]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(slice(None))
        torch.set_num_threads(3)
        assert all(torch.equal(one, other) for one, other in zip(alone, run(slice(None)), strict=True))
    finally:
        torch.set_num_threads(threads)
    last = run(slice(3, 4))
    assert all(torch.equal(one[3:4], other[-1:]) for one, other in zip(alone, last, strict=True))


def test_what_there_is_no_code_for() -> None:
    assert fits_heads(torch.zeros(16), 24, rotary=False)
    assert not fits_heads(torch.zeros(16), 24, rotary=True)
    assert not fits_heads(torch.zeros(16, dtype=torch.bfloat16), 16, rotary=True), "weights are float32"
    with torch.autocast("cpu", torch.bfloat16):
        assert fits_heads(torch.zeros(16), 16, rotary=True)
    with torch.autocast("cpu", torch.float16):
        assert not fits_heads(torch.zeros(16), 16, rotary=True)
