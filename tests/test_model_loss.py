"""The chunked loss against naive loops and PyTorch's own: values, gradients, masks, chunk sizes, bfloat16."""

from __future__ import annotations

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.model import loss
from minigpt.model.loss import chunk_rows, loss_sum, token_log_probs, token_losses

V, C = 37, 16


def problem(rows: tuple[int, ...] = (3, 7)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*rows, C, generator=generator)
    weight = torch.randn(V, C, generator=generator)
    targets = torch.randint(0, V, rows, generator=generator)
    targets.view(-1)[::3] = -100
    targets.view(-1)[1] = V - 1
    return hidden, weight, targets


def gradients(hidden: Tensor, weight: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch.autograd.grad(value, (hidden, weight))
    return first, second


@pytest.fixture(params=[1, 2, 4, 20, 21, 1000], ids="chunks of {}".format)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "chunk_rows", lambda hidden, vocab_size: request.param)


@pytest.mark.usefixtures("_chunks")
def test_the_sum_equals_the_naive_loop() -> None:
    hidden, weight, targets = problem()
    expected = reference.cross_entropy(hidden.flatten(0, 1), weight, targets.flatten().tolist())
    assert loss_sum(hidden, weight, targets).item() == pytest.approx(sum(expected), rel=1e-6)
    found = token_losses(hidden, weight, targets)
    assert found.shape == targets.shape
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (found[targets == -100] == 0).all()


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_gradients_equal_those_of_cross_entropy(scale: float) -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = F.linear(hidden, weight).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
    found = loss_sum(hidden, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients(hidden, weight, found * scale), gradients(hidden, weight, expected * scale), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_gets_its_own(frozen: str) -> None:
    hidden, weight, targets = problem()
    needed = (weight if frozen == "hidden" else hidden).requires_grad_()
    logits = F.linear(hidden, weight).flatten(0, 1)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, targets.flatten(), reduction="sum"), needed)
    (found,) = torch.autograd.grad(loss_sum(hidden, weight, targets), needed)
    torch.testing.assert_close(found, expected)


def test_everything_masked_gives_zero_and_a_gradient_of_zero() -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    weight.requires_grad_()
    value = loss_sum(hidden, weight, torch.full_like(targets, -100))
    assert value.item() == 0.0
    for gradient in gradients(hidden, weight, value):
        assert gradient.count_nonzero() == 0
    assert token_losses(hidden, weight, torch.full_like(targets, -100)).count_nonzero() == 0


def test_masked_rows_get_no_gradient_and_do_not_change_the_others() -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_sum(hidden, weight, targets), hidden)
    assert gradient[targets == -100].count_nonzero() == 0
    assert (gradient[targets != -100].abs().amax(-1) > 0).all()


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = problem()
    hidden = (hidden * 1e4).requires_grad_()
    value = loss_sum(hidden, weight, targets)
    assert value.isfinite()
    assert torch.autograd.grad(value, hidden)[0].isfinite().all()


def test_bfloat16_autocast_stays_near_float32() -> None:
    hidden, weight, targets = problem((4, 64))
    hidden.requires_grad_()
    weight.requires_grad_()
    exact = loss_sum(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = loss_sum(hidden, weight, targets)
    assert near.dtype == torch.float32
    assert near.item() == pytest.approx(exact.item(), rel=2e-2)
    assert near.item() != exact.item()
    for a, b in zip(gradients(hidden, weight, near), gradients(hidden, weight, exact), strict=True):
        assert a.dtype == torch.float32
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_the_sum_over_many_float16_rows_does_not_overflow() -> None:
    hidden = torch.full((2000, C), 50.0).half()
    weight = torch.zeros(V, C, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss_sum(hidden, weight, torch.zeros(2000, dtype=torch.long))
    (found,) = torch.autograd.grad(value / 2000, weight)
    expected = torch.full((V, C), 50.0 / V)
    expected[0] -= 50.0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_a_model_in_bfloat16_gets_gradients_of_its_own_type() -> None:
    hidden, weight, targets = problem()
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    value = loss_sum(hidden, weight, targets)
    assert value.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients(hidden, weight, value)] == [torch.bfloat16] * 2
    exact = loss_sum(hidden.float(), weight.float(), targets)
    assert value.item() == pytest.approx(exact.item(), rel=2e-2)
    assert token_losses(hidden, weight, targets).dtype == torch.float32


def test_chunks_hold_a_bounded_number_of_logits() -> None:
    hidden = torch.zeros(1, 1)
    for vocab_size in (2, 1000, 50_000, 1 << 19):
        assert chunk_rows(hidden, vocab_size) * vocab_size <= 1 << 20
    assert chunk_rows(hidden, 1 << 22) == 1


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("masked", [True, False])
def test_log_probabilities_and_their_gradients_equal_log_softmax(masked: bool) -> None:
    hidden, weight, targets = problem()
    targets = targets if masked else targets.clamp(min=0)
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = F.linear(hidden, weight).log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = expected.masked_fill(targets == -100, 0.0)
    found = token_log_probs(hidden, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    slope = torch.randn(targets.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        gradients(hidden, weight, (found * slope).sum()),
        gradients(hidden, weight, (expected * slope).sum()),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_log_probabilities_under_autocast_and_with_a_frozen_head() -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_log_probs(hidden, weight, targets)
    found.sum().backward()
    assert found.dtype == torch.float32
    assert hidden.grad is not None
    exact = token_log_probs(hidden.detach(), weight, targets)
    torch.testing.assert_close(found.detach(), exact, rtol=0.05, atol=0.1)


def test_log_probabilities_where_nothing_is_learned_are_zeros_with_a_gradient() -> None:
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    found = token_log_probs(hidden, weight, torch.full_like(targets, -100))
    found.sum().backward()
    assert hidden.grad is not None
    assert (found == 0).all()
    assert (hidden.grad == 0).all()
