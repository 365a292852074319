"""Advantages, the clipped surrogate and the distance to the reference, against arithmetic written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigpt.alignment.advantages import (
    clipped_surrogate,
    divisor,
    gae,
    group_advantages,
    kl_k3,
    token_weights,
    whitened,
)
from minigpt.errors import ConfigError


def test_standardised_advantages_use_the_deviation_of_a_sample() -> None:
    """[1, 0, 0, 1]: mean 1/2, sum of squares 1, divided by 3, root 0.5774; 0.5 / 0.5774 = 0.866."""
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), standardise=True)
    half = 0.5 / math.sqrt(1 / 3)
    assert half == pytest.approx(0.866, abs=1e-3)
    torch.testing.assert_close(found, torch.tensor([[half, -half, -half, half]]))


def test_centred_advantages_keep_the_size_of_rewards() -> None:
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [10.0, 20.0, 30.0, 40.0]]), standardise=False)
    assert found.tolist() == [[0.5, -0.5, -0.5, 0.5], [-15.0, -5.0, 5.0, 15.0]]


@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("value", [1.0, 0.1, -3.3, 0.0])
def test_equal_rewards_give_exact_zeros(value: float, standardise: bool) -> None:
    found = group_advantages(torch.tensor([[value] * 3, [0.0, 1.0, 2.0]]), standardise=standardise)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert found[1].abs().sum() > 0, "only that group"


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        group_advantages(torch.tensor([[1.0], [2.0]]), standardise=True)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=8))
def test_standardised_advantages_are_finite_and_bounded(rewards: list[float]) -> None:
    """No value of n is more than (n - 1) / sqrt(n) sample deviations from their mean (Samuelson)."""
    found = group_advantages(torch.tensor([rewards]), standardise=True)
    n = len(rewards)
    assert found.isfinite().all()
    assert found.abs().max() <= (n - 1) / math.sqrt(n) * 1.01


def naive_gae(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """The sum of eq. 16, term by term."""
    following = [*values[1:], 0.0]
    errors = [r + discount * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [
        sum((discount * decay) ** (later - t) * errors[later] for later in range(t, len(errors)))
        for t in range(len(errors))
    ]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_sum_of_its_definition(discount: float, decay: float) -> None:
    rewards, values = [[0.1, -0.2, 1.0], [0.5, 2.0]], [[0.3, 0.4, -0.1], [1.0, 0.2]]
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, True, False]])
    given_rewards, given_values = torch.full((2, 5), 9.0), torch.full((2, 5), 7.0)  # off the mask nothing counts
    given_rewards[mask] = torch.tensor([*rewards[0], *rewards[1]])
    given_values[mask] = torch.tensor([*values[0], *values[1]])
    found = gae(given_rewards, given_values, mask, discount=discount, decay=decay)
    for row in range(2):
        expected = naive_gae(rewards[row], values[row], discount, decay)
        assert found[row][mask[row]].tolist() == pytest.approx(expected, abs=1e-6)
    assert (found[~mask] == 0).all()


def test_gae_without_decay_of_either_kind_is_what_is_still_to_come_less_the_value() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.25, 0.5, 0.75]])
    found = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), discount=1.0, decay=1.0)
    assert found.tolist() == [[0.75, 0.5, 0.25]]


def test_whitened_values_have_mean_0_and_deviation_1_under_the_mask() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = whitened(torch.tensor([[1.0, 2.0, 50.0], [6.0, 50.0, 50.0]]), mask)
    deviation = math.sqrt((4 + 1 + 9) / 2)
    expected = [-2 / deviation, -1 / deviation, 0.0, 3 / deviation, 0.0, 0.0]
    assert found.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("value", [1.0, 0.1, -2.7])
def test_whitening_what_is_all_the_same_gives_zeros(value: float) -> None:
    assert whitened(torch.full((2, 3), value), torch.ones(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # no more than 1.2 times
        (0.5, 2.0, -1.0, False),  # what became less likely though it was good is never clipped
        (0.5, -2.0, 1.6, True),  # no less than 0.8 times
        (1.5, -2.0, 3.0, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate(ratio: float, advantage: float, expected: float, clipped: bool) -> None:
    log_probs, old = torch.tensor([[-1.0 + math.log(ratio)]]), torch.tensor([[-1.0]])
    loss, where = clipped_surrogate(log_probs, old, torch.tensor([[advantage]]), 0.2, 0.2)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert where.item() is clipped


def test_the_clip_can_be_higher_than_it_is_low() -> None:
    log_probs = torch.tensor([[math.log(1.25), math.log(1.4)]])
    loss, where = clipped_surrogate(log_probs, torch.zeros(1, 2), torch.ones(1, 2), 0.2, 0.28)
    assert loss[0].tolist() == pytest.approx([-1.25, -1.28])
    assert where[0].tolist() == [False, True]


def test_the_gradient_of_a_clipped_token_is_zero_and_of_others_that_of_the_policy_gradient() -> None:
    log_probs = torch.tensor([[0.0, math.log(1.5)]], requires_grad=True)
    loss, _ = clipped_surrogate(log_probs, torch.zeros(1, 2), torch.tensor([[3.0, 3.0]]), 0.2, 0.2)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx([-3.0, 0.0])


def test_the_distance_to_the_reference_is_schulmans_third() -> None:
    """With r = reference / policy: r - 1 - ln r. For 0.5 and 0.25, r = 1/2: -1/2 + ln 2."""
    found = kl_k3(torch.log(torch.tensor([0.5, 0.5, 0.1])), torch.log(torch.tensor([0.25, 0.5, 0.9])))
    assert found.tolist() == pytest.approx([math.log(2) - 0.5, 0.0, 9 - 1 - math.log(9)], abs=1e-5)


def test_the_distance_is_right_on_the_average_and_never_negative() -> None:
    policy, reference = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    each = kl_k3(policy.log(), reference.log())
    assert (each >= 0).all()
    assert (policy * each).sum().item() == pytest.approx((policy * (policy / reference).log()).sum().item(), abs=1e-6)


def test_the_three_ways_to_count_tokens() -> None:
    """Answers of 1 and 3 tokens, of losses 4 and (1, 2, 3); up to 5 were allowed."""
    losses = torch.tensor([[4.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    ways = {"token": 10 / 4, "sequence": (4 + 2) / 2, "constant": 10 / (2 * 5)}
    for way, expected in ways.items():
        total = (losses * token_weights(mask, way)).sum() / divisor(2.0, 2.0, way, 5)
        assert total.item() == pytest.approx(expected), way
