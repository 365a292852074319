"""Each piece of `fused.c` against the same written out in float64, and whole models with and without it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from variants import CONTEXT, VARIANTS

from minigpt.config import ModelConfig
from minigpt.model import fused
from minigpt.model.loss import IGNORED, loss_sum
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


def naive_layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return naive_norm(x - x.mean(-1, keepdim=True), gain) + bias


@pytest.mark.parametrize("shape", [(8,), (3, 5, 48), (7, 40, 256), (1, 33, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, gain = random(*shape, scale=3.0), random(shape[-1], seed=1)
    compare(lambda x, gain: fused.norm(x, gain, None, EPS), naive_norm, x, gain)


@pytest.mark.parametrize("shape", [(8,), (3, 5, 48), (7, 40, 256), (1, 33, 8)])
def test_layer_norm(shape: tuple[int, ...]) -> None:
    x = (random(*shape, scale=3.0).detach() + 5.0).requires_grad_()
    gain, bias = random(shape[-1], seed=1), random(shape[-1], seed=2)
    compare(lambda x, gain, bias: fused.norm(x, gain, bias, EPS), naive_layer_norm, x, gain, bias)


def test_what_is_normed_need_not_lie_in_a_row() -> None:
    x, gain = random(6, 24), random(6, seed=1).new_ones(24).requires_grad_()
    turned = x.detach().view(6, 3, 8).transpose(0, 1).requires_grad_()
    compare(lambda x, gain: fused.norm(x, gain, None, EPS), naive_norm, turned, gain[:8].detach().requires_grad_())


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_gated(scale: float) -> None:
    compare(fused.gated, lambda gate, up: F.silu(gate) * up, random(5, 7, 24, scale=scale), random(5, 7, 24, seed=1))


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_gelu(scale: float) -> None:
    compare(fused.gelu, lambda x: F.gelu(x, approximate="tanh"), random(5, 7, 24, scale=scale))


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


def test_to_the_nearest_and_ties_to_even() -> None:
    numbers = torch.arange(-256.0, 256.0)  # exact in bfloat16, and 129 times so in float32, of which many are ties
    found = fused.gated(torch.full((512,), 129.0).bfloat16(), numbers.bfloat16())
    assert torch.equal(found, (129.0 * numbers).bfloat16())


ROUNDED = {"rtol": 2.0**-8 * 1.001, "atol": 1e-30}  # half of the last of eight bits


@pytest.mark.parametrize("bias", [None, torch.linspace(-1.0, 1.0, 24)])
def test_what_goes_into_products_is_rounded_once(bias: Tensor | None) -> None:
    x, gain = random(300, 24, scale=3.0), random(24, seed=1)
    wide = fused.norm(x, gain, bias, EPS)
    narrow = fused.norm(x, gain, bias, EPS, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, **ROUNDED)
    slope = random(300, 24, seed=2).detach().bfloat16()
    found = torch.autograd.grad(narrow, (x, gain), slope)
    for one, other in zip(found, torch.autograd.grad(wide, (x, gain), slope.float()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [fused.gelu, lambda x: fused.gated(x, (x * 0.5).detach())])
def test_pieces_in_bfloat16_round_what_float32_gives(piece: Callable[[Tensor], Tensor]) -> None:
    x = random(3, 40, scale=4.0).detach().bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    slope = random(3, 40, seed=1).detach().bfloat16()
    found, expected = piece(x), piece(wide)
    torch.testing.assert_close(found.float(), expected, **ROUNDED)
    (one,), (other,) = torch.autograd.grad(found, x, slope), torch.autograd.grad(expected, wide, slope.float())
    torch.testing.assert_close(one.float(), other, **ROUNDED)


@pytest.mark.parametrize("vocabulary", [1, 5, 8, 65, 1003])
def test_softmax_slope_in_bfloat16(vocabulary: int) -> None:
    logits = random(9, vocabulary, scale=5.0).detach().bfloat16()
    targets = torch.randint(0, vocabulary, (9,), generator=torch.Generator().manual_seed(1))
    targets[4] = IGNORED
    expected, slope_of_wide = fused.softmax_slope(logits.float(), targets, IGNORED)
    loss, slope = fused.softmax_slope(logits, targets, IGNORED)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slope.float(), slope_of_wide, **ROUNDED)
    assert slope.data_ptr() == logits.data_ptr(), "in the logits' own place"


def test_what_is_no_number_stays_none_in_bfloat16() -> None:
    broken = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 3e38, -0.0, 1e-45, 2.0])
    broken.view(torch.int32)[0] = 0x7FFFFFFF  # rounding its bits up would make it a zero
    assert fused.norm(broken, torch.ones(8), None, EPS, torch.bfloat16).isnan().all()
    assert fused.gated(broken.bfloat16(), torch.ones(8).bfloat16())[0].isnan()


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


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if config.head_dim % 8 == 0])
def test_a_model_learns_much_the_same_in_bfloat16(name: str) -> None:
    config: ModelConfig = VARIANTS[name]
    tokens = torch.randint(0, config.vocab_size, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(0))
    found: list[tuple[Tensor, Tensor]] = []
    for narrow in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = loss_sum(model.model(tokens), model.lm_head.weight, tokens)
        loss.backward()
        gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        found.append((loss.detach(), torch.cat(gradients)))
    (wide, exact), (narrow_loss, rounded) = found
    assert narrow_loss.item() == pytest.approx(wide.item(), rel=2e-3)
    assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_what_there_is_no_code_for() -> None:
    assert fused.fits(torch.zeros(2, 16))
    assert fused.fits(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert not fused.fits(torch.zeros(2, 12))
    assert not fused.fits(torch.zeros(2, 16, dtype=torch.float16))
    assert not fused.fits(torch.zeros(2, 16, device="meta"))
    with torch.autocast("cpu", torch.float16):
        assert not fused.fits(torch.zeros(2, 16))
