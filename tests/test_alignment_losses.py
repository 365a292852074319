"""Losses on preferences against arithmetic written out: values, gradients, extremes, and padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minigpt.alignment.losses import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
    simpo_loss,
)

# Log-probabilities of two pairs: the policy's of chosen and rejected, then the reference's.
CHOSEN, REJECTED = torch.tensor([-3.0, -10.0]), torch.tensor([-12.0, -8.0])
BEFORE_CHOSEN, BEFORE_REJECTED = torch.tensor([-4.0, -9.0]), torch.tensor([-11.0, -9.5])
# h = (chosen - before) - (rejected - before): (1 - -1) = 2 and (-1 - 1.5) = -2.5
GAPS = (2.0, -2.5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_dpo_is_minus_the_log_of_the_sigmoid_of_the_gap(beta: float) -> None:
    found = dpo_loss(CHOSEN, REJECTED, BEFORE_CHOSEN, BEFORE_REJECTED, beta=beta)
    assert found.tolist() == pytest.approx([-math.log(sigmoid(beta * gap)) for gap in GAPS], rel=1e-6)


def test_dpo_with_smoothed_labels_takes_a_share_of_the_pairs_the_other_way_round() -> None:
    found = dpo_loss(CHOSEN, REJECTED, BEFORE_CHOSEN, BEFORE_REJECTED, beta=0.5, label_smoothing=0.2)
    expected = [-0.8 * math.log(sigmoid(0.5 * gap)) - 0.2 * math.log(sigmoid(-0.5 * gap)) for gap in GAPS]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_where_policy_and_reference_are_one_dpo_is_ln_2_to_the_last_bit() -> None:
    found = dpo_loss(CHOSEN, REJECTED, CHOSEN, REJECTED, beta=0.1)
    assert found.tolist() == [torch.tensor(2.0).log().item()] * 2


@pytest.mark.parametrize(("gap", "loss"), [(-1000.0, 1000.0), (1000.0, 0.0), (-1e6, 1e6)])
def test_dpo_is_exact_far_from_zero(gap: float, loss: float) -> None:
    zero = torch.zeros(1)
    chosen = torch.tensor([gap], requires_grad=True)
    found = dpo_loss(chosen, zero, zero, zero, beta=1.0)
    found.sum().backward()
    assert found.item() == loss
    assert chosen.grad is not None
    assert chosen.grad.item() == (-1.0 if gap < 0 else 0.0)


def test_the_gradient_of_dpo_is_that_of_the_paper() -> None:
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    dpo_loss(chosen, rejected, BEFORE_CHOSEN, BEFORE_REJECTED, beta=0.3).sum().backward()
    expected = [-0.3 * sigmoid(-0.3 * gap) for gap in GAPS]  # the weight of Rafailov et al., section 4
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert rejected.grad.tolist() == pytest.approx([-value for value in expected], rel=1e-6)


def test_ipo_is_the_squared_distance_to_its_target() -> None:
    found = ipo_loss(CHOSEN, REJECTED, BEFORE_CHOSEN, BEFORE_REJECTED, beta=0.25)
    assert found.tolist() == pytest.approx([(2.0 - 2.0) ** 2, (-2.5 - 2.0) ** 2])


def test_simpo_compares_log_probabilities_a_token_and_wants_a_margin() -> None:
    lengths = torch.tensor([3, 5]), torch.tensor([6, 2])
    found = simpo_loss(CHOSEN, REJECTED, *lengths, beta=2.0, margin=1.0)
    # 2 (-3/3 - -12/6) - 1 = 1; 2 (-10/5 - -8/2) - 1 = 3
    assert found.tolist() == pytest.approx([-math.log(sigmoid(1.0)), -math.log(sigmoid(3.0))], rel=1e-6)
    smoothed = simpo_loss(CHOSEN, REJECTED, *lengths, beta=2.0, margin=1.0, label_smoothing=0.1)
    expected = [-0.9 * math.log(sigmoid(x)) - 0.1 * math.log(sigmoid(-x)) for x in (1.0, 3.0)]
    assert smoothed.tolist() == pytest.approx(expected, rel=1e-6)


def test_kto_weighs_good_and_bad_answers_by_their_side_of_the_reference_point() -> None:
    good = torch.tensor([True, False])
    found = kto_loss(
        CHOSEN, BEFORE_CHOSEN, good, torch.tensor(0.5), beta=0.4, desirable_weight=2.0, undesirable_weight=3.0
    )
    # r = 1 and -1: 2 (1 - s(0.4 (1 - 0.5))), 3 (1 - s(0.4 (0.5 - -1)))
    assert found.tolist() == pytest.approx([2 * (1 - sigmoid(0.2)), 3 * (1 - sigmoid(0.6))], rel=1e-6)


@pytest.mark.parametrize(("now", "point"), [([-3.0, -6.0], 0.5), ([-5.0, -6.0], 0.0)])
def test_the_reference_point_is_a_mean_that_is_never_negative(now: list[float], point: float) -> None:
    log_probs = torch.tensor(now, requires_grad=True)
    found = kto_reference_point(log_probs, torch.tensor([-4.0, -6.0]))
    assert found.item() == pytest.approx(point)
    assert not found.requires_grad


def test_bradley_terry_asks_for_the_difference_alone() -> None:
    chosen, rejected = torch.tensor([1.5, -2.0, 0.0]), torch.tensor([0.5, 2.0, 1000.0])
    found = bradley_terry_loss(chosen, rejected)
    assert found.tolist() == pytest.approx([-math.log(sigmoid(1.0)), -math.log(sigmoid(-4.0)), 1000.0], rel=1e-6)
    assert torch.allclose(bradley_terry_loss(chosen + 7, rejected + 7), found, rtol=1e-5)


@pytest.mark.parametrize("width", [3, 8, 20])
def test_padding_does_not_change_what_an_answer_sums_to(width: int) -> None:
    def padded(values: list[float]) -> Tensor:
        return torch.tensor([*values, *[0.0] * (width - len(values))])

    chosen, rejected = padded([-1.0, -2.0]).sum(), padded([-3.0, -4.0, -5.0]).sum()
    assert (chosen.item(), rejected.item()) == (-3.0, -12.0)
    zero = torch.zeros(())
    loss = dpo_loss(chosen, rejected, zero, zero, beta=0.1)
    assert loss.item() == pytest.approx(-math.log(sigmoid(0.9)), rel=1e-6)
