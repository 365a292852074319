"""Each piece of `fused.c` against the same written out in float64, and whole models with and without it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from variants import CONTEXT, VARIANTS

from minigpt.config import ModelConfig
from minigpt.model import fused
from minigpt.model.loss import IGNORED, loss_sum
from minigpt.model.positions import rotary_angles, rotate
from minigpt.model.transformer import GPT

EPS = 1e-6


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if fused.library() is None:
        pytest.skip("no C compiler here")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).requires_grad_()


def compare(found: Callable[..., Tensor], naive: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The same results and gradients, where the naive form gets everything in float64."""
    out = found(*inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = naive(*wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    slope = random(*out.shape, seed=99).detach()
    gradients = torch.autograd.grad(out, inputs, slope)
    for one, other in zip(gradients, torch.autograd.grad(expected, wide, slope.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(1.0, float(other.abs().max())))


def naive_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


@pytest.mark.parametrize("shape", [(8,), (3, 5, 48), (7, 40, 256), (1, 33, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, gain = random(*shape, scale=3.0), random(shape[-1], seed=1)
    compare(lambda x, gain: fused.rms_norm(x, gain, EPS), naive_norm, x, gain)


def test_what_is_normed_need_not_lie_in_a_row() -> None:
    x, gain = random(6, 24), random(6, seed=1).new_ones(24).requires_grad_()
    turned = x.detach().view(6, 3, 8).transpose(0, 1).requires_grad_()
    compare(lambda x, gain: fused.rms_norm(x, gain, EPS), naive_norm, turned, gain[:8].detach().requires_grad_())


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_gated(scale: float) -> None:
    compare(fused.gated, lambda gate, up: F.silu(gate) * up, random(5, 7, 24, scale=scale), random(5, 7, 24, seed=1))


def test_gated_where_the_exponential_ends() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.5, 87.5, 88.5, 200.0, 1e30])
    torch.testing.assert_close(fused.gated(gate, torch.ones(8)), F.silu(gate))
    broken = torch.full((8,), math.nan)
    assert fused.gated(broken, torch.ones(8)).isnan().all()


@pytest.mark.parametrize("vocabulary", [1, 5, 8, 65, 512, 1003])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_softmax_slope(vocabulary: int, scale: float) -> None:
    logits = random(9, vocabulary, scale=scale).detach()
    targets = torch.randint(0, vocabulary, (9,), generator=torch.Generator().manual_seed(1))
    targets[[0, 4]] = IGNORED
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORED)
    expected.backward()
    loss, slope = fused.softmax_slope(logits, targets, IGNORED)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope.double(), wide.grad, rtol=1e-5, atol=1e-6)
    assert slope.data_ptr() == logits.data_ptr(), "in the logits' own place"


@pytest.mark.parametrize("wrong", [-1, 16, IGNORED - 1])
def test_a_target_that_no_vocabulary_has_is_refused(wrong: int) -> None:
    logits = random(2, 16).detach()
    before = logits.clone()
    with pytest.raises(IndexError, match="not in the vocabulary"):
        fused.softmax_slope(logits, torch.tensor([3, wrong]), IGNORED)
    assert torch.equal(logits, before)


def test_a_loss_that_is_no_number_is_seen() -> None:
    logits = torch.zeros(2, 16)
    logits[1] = math.nan
    loss, _ = fused.softmax_slope(logits, torch.tensor([3, 3]), IGNORED)
    assert loss.isnan()


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


@pytest.mark.parametrize("kind", ["causal", "documents", "window"])
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "D"), [(2, 13, 4, 2, 16), (1, 1, 2, 1, 16), (3, 64, 3, 3, 32), (2, 131, 4, 1, 48)]
)
def test_attention_under_rotary_positions(B: int, T: int, H: int, K: int, D: int, kind: str) -> None:
    places = torch.arange(T)
    first = torch.zeros(B, T, dtype=torch.int32)
    if kind == "documents":
        first = torch.stack([places // (5 + row) * (5 + row) for row in range(B)]).int()
    elif kind == "window":
        first = (places - 9).clamp(min=0).int().expand(B, T).contiguous()
    positions = places - first if kind == "documents" else places
    cosines, sines = rotary_angles(positions, D, 10_000.0)
    rotary = (cosines.unsqueeze(1), sines.unsqueeze(1)) if kind == "documents" else (cosines, sines)
    ranges = None if kind == "causal" else first

    def turn(x: Tensor) -> Tensor:
        return rotate(x, *(angles.double() for angles in rotary))

    compare(
        lambda q, k, v: fused.attention(q, k, v, D, rotary=rotary, first=ranges),
        lambda q, k, v: naive_attention(q, k, v, D, turn, first),
        random(B, T, H * D), random(B, T, K * D, seed=1), random(B, T, K * D, seed=2),
    )  # fmt: skip


def test_attention_with_norms_of_queries_and_keys() -> None:
    B, T, H, K, D = 2, 37, 4, 2, 16
    query, key, value = random(B, T, H * D), random(B, T, K * D, seed=1), random(B, T, K * D, seed=2)
    norms = norm(random(D, seed=3)), norm(random(D, seed=4))
    slope = random(B, T, H * D, seed=5).detach()
    inputs = (query, key, value, norms[0].weight, norms[1].weight)
    out = fused.attention(query, key, value, D, *norms)
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
        out = fused.attention(*some, D, norm(gain), norm(gain))
        normed = fused.rms_norm(some[0], torch.ones(4 * D), EPS)
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


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if config.head_dim % 8 == 0])
@pytest.mark.parametrize("packed", [False, True])
def test_a_model_learns_the_same_with_and_without(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config: ModelConfig = VARIANTS[name]
    tokens = torch.randint(0, config.vocab_size, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(CONTEXT).expand(3, -1) // 6 if packed else None
    found: list[dict[str, Tensor]] = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(fused, "library", lambda: None)
        model = GPT(config)
        model.initialize(torch.Generator().manual_seed(0))
        loss = loss_sum(model.model(tokens, documents=documents), model.lm_head.weight, tokens)
        loss.backward()
        gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(
            value, found[1][key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_what_there_is_no_code_for() -> None:
    assert fused.fits(torch.zeros(2, 16))
    assert not fused.fits(torch.zeros(2, 12))
    assert not fused.fits(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert not fused.fits(torch.zeros(2, 16, device="meta"))
    assert fused.fits_heads(torch.zeros(16), 24, rotary=False)
    assert not fused.fits_heads(torch.zeros(16), 24, rotary=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused.fits_heads(torch.zeros(16), 16, rotary=True)
