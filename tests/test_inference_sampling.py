"""Exact distributions against naive loops and hand calculation; draws at the borders of the unit interval."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import reference
import torch

from minigpt.config import SamplingConfig
from minigpt.inference.sampling import draw, next_tokens, penalize, probabilities, random_streams, row_seed

LAST = math.nextafter(1.0, 0.0)  # the largest uniform number

LOGITS = [
    [2.0, -1.0, 0.5, 0.5, -3.0, 1.9, 0.0],
    [0.0] * 7,
    [-5.0, 9.0, 8.9, -40.0, 8.8, 8.9, 0.0],
]


def probs_of(logits: list[list[float]], **settings: Any) -> list[list[float]]:
    found: list[list[float]] = probabilities(torch.tensor(logits), SamplingConfig(**settings)).tolist()
    return found


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 4, "top_p": 0.7},
        {"top_k": 5, "top_p": 0.95, "min_p": 0.3},
    ],
    ids=str,
)
def test_probabilities_equal_the_naive_loop(temperature: float, filters: dict[str, Any]) -> None:
    found = probs_of(LOGITS, temperature=temperature, **filters)
    for row, logits in zip(found, torch.tensor(LOGITS).tolist(), strict=True):
        expected = reference.distribution(logits, temperature=temperature, **filters)
        assert row == pytest.approx(expected, abs=1e-12)
        assert math.fsum(row) == pytest.approx(1.0)


# Probabilities 8/15, 4/15, 2/15, 1/15: each token half as likely as the one before.
HALVES = [[math.log(weight) for weight in (1, 8, 2, 4)]]


def test_temperature_by_hand() -> None:
    assert probs_of(HALVES, temperature=1.0)[0] == pytest.approx([1 / 15, 8 / 15, 2 / 15, 4 / 15])
    assert probs_of(HALVES, temperature=0.5)[0] == pytest.approx([1 / 85, 64 / 85, 4 / 85, 16 / 85])


def test_top_k_by_hand() -> None:
    assert probs_of(HALVES, temperature=1.0, top_k=2)[0] == pytest.approx([0, 2 / 3, 0, 1 / 3])


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.5, [0, 1, 0, 0]),
        (0.534, [0, 2 / 3, 0, 1 / 3]),  # 8/15 = 0.5333 is not enough
        (0.79, [0, 2 / 3, 0, 1 / 3]),
        (0.81, [0, 4 / 7, 1 / 7, 2 / 7]),  # 12/15 = 0.8 is not enough
        (0.99, [1 / 15, 8 / 15, 2 / 15, 4 / 15]),
    ],
)
def test_top_p_by_hand(top_p: float, expected: list[float]) -> None:
    assert probs_of(HALVES, temperature=1.0, top_p=top_p)[0] == pytest.approx(expected)


def test_min_p_by_hand() -> None:
    assert probs_of(HALVES, temperature=1.0, min_p=0.3)[0] == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert probs_of(HALVES, temperature=1.0, min_p=0.24)[0] == pytest.approx([0, 4 / 7, 1 / 7, 2 / 7])


def test_ties() -> None:
    tied = [[1.0, 3.0, 3.0, 3.0, 0.0]]
    assert probs_of(tied, temperature=1.0, top_k=2)[0] == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert probs_of(tied, temperature=1.0, min_p=1.0)[0] == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert probs_of(tied, temperature=1.0, top_p=0.1)[0] == [0, 1, 0, 0, 0]  # the first of them


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
def test_tiny_temperatures_are_nearly_greedy_and_never_nan(temperature: float) -> None:
    assert probs_of([[1.0, 3.0, -500.0, 2.5]], temperature=temperature)[0] == pytest.approx([0, 1, 0, 0])
    assert probs_of([[3.0, 3.0, 2.0]], temperature=temperature, top_p=0.9, min_p=0.1)[0] == [0.5, 0.5, 0]
    assert probs_of([[-1e30, 1e30]], temperature=temperature)[0] == [0, 1]


def test_a_huge_temperature_is_uniform() -> None:
    assert probs_of([[1.0, 3.0, -500.0, 2.5]], temperature=1e308)[0] == pytest.approx([0.25] * 4)


def test_probabilities_are_the_same_alone_and_in_a_batch() -> None:
    settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    together = probs_of(LOGITS, **settings)
    assert [probs_of([row], **settings)[0] for row in LOGITS] == together


def test_the_repetition_penalty_never_rewards_a_repeat() -> None:
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0, 0.0], [1.0, 2.0, 3.0, -4.0, 5.0]])
    seen = torch.tensor([[True, True, False, False, True], [False] * 5])
    assert penalize(logits, seen, 1.5).tolist() == [[2.0, -4.5, 3.0, -3.0, 0.0], [1.0, 2.0, 3.0, -4.0, 5.0]]
    assert penalize(logits, seen, 1.0).tolist() == logits.tolist()


def test_the_penalty_comes_before_the_choice() -> None:
    logits, seen = torch.tensor([[3.0, 2.5, -1.0]]), torch.tensor([[True, False, False]])
    greedy = SamplingConfig(temperature=0.0, repetition_penalty=1.5)
    assert next_tokens(logits, seen, greedy, random_streams([0])).tolist() == [1]
    almost = SamplingConfig(temperature=1e-6, repetition_penalty=1.5)
    assert next_tokens(logits, seen, almost, random_streams([0])).tolist() == [1]


@pytest.mark.parametrize(
    ("probs", "uniform", "expected"),
    [
        ([0.25, 0.25, 0.5], 0.0, 0),
        ([0.25, 0.25, 0.5], math.nextafter(0.25, 0), 0),
        ([0.25, 0.25, 0.5], 0.25, 1),
        ([0.25, 0.25, 0.5], math.nextafter(0.5, 0), 1),
        ([0.25, 0.25, 0.5], 0.5, 2),
        ([0.25, 0.25, 0.5], LAST, 2),
        ([0.0, 0.0, 1.0, 0.0], 0.0, 2),
        ([0.0, 0.0, 1.0, 0.0], LAST, 2),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.0, 1),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.5, 3),
        ([0.0, 0.5, 0.0, 0.5, 0.0], LAST, 3),
        ([0.1] * 10 + [0.0], LAST, 9),  # ten tenths add up to less than 1 in floating point
        ([1.0], LAST, 0),
    ],
)
def test_a_draw_inverts_the_cumulative_distribution(probs: list[float], uniform: float, expected: int) -> None:
    found = draw(torch.tensor([probs], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64))
    assert found.tolist() == [expected]


def test_tokens_without_probability_are_never_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (2, 17, 300):
        probs = torch.rand(200, size, generator=generator, dtype=torch.float64)
        probs = probs.masked_fill(torch.rand(200, size, generator=generator) < 0.8, 0.0)
        probs[:, size // 2] += 1e-12
        probs /= probs.sum(-1, keepdim=True)
        for uniforms in (torch.zeros(200), torch.full((200,), LAST, dtype=torch.float64)):
            tokens = draw(probs, uniforms.double())
            assert (probs.gather(-1, tokens.unsqueeze(-1)) > 0).all()


def test_frequencies_follow_the_distribution() -> None:
    draws, config = 20_000, SamplingConfig(temperature=0.9, top_k=5)
    logits = torch.tensor([LOGITS[0]]).expand(draws, -1)
    expected = reference.distribution(LOGITS[0], temperature=0.9, top_k=5)
    # One stream for every draw: what rows get from seeds must be as good as what one stream gives.
    for streams in ([random.Random(7)] * draws, random_streams([row_seed(7, row) for row in range(draws)])):
        counts = Counter(next_tokens(logits, None, config, streams).tolist())
        possible = [token for token, p in enumerate(expected) if p > 0]
        assert set(counts) == set(possible)
        chi_square = sum((counts[t] - draws * expected[t]) ** 2 / (draws * expected[t]) for t in possible)
        assert chi_square < 18.5  # 99.9 % of fair draws with 4 degrees of freedom


class AppleLike(torch.Tensor):
    """A tensor on a device that has no float64."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return found.as_subclass(torch.Tensor)
        if isinstance(found, cls) and found.dtype == torch.float64:
            raise TypeError("this device has no float64")
        return found


def test_a_device_without_float64_draws_the_same() -> None:
    logits, config = torch.tensor(LOGITS), SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    seen = logits > 1.0
    expected = next_tokens(logits, seen, config, random_streams([1, 2, 3])).tolist()
    assert next_tokens(logits.as_subclass(AppleLike), seen, config, random_streams([1, 2, 3])).tolist() == expected


def test_greedy_takes_the_best_and_no_random_number() -> None:
    stream = random.Random(3)
    before = stream.getstate()
    found = next_tokens(torch.tensor([[0.0, 2.0, 1.0]]), None, SamplingConfig(temperature=0.0), [stream])
    assert found.tolist() == [1]
    assert stream.getstate() == before


def test_every_draw_takes_one_number_of_its_own_row() -> None:
    streams = random_streams([1, 2])
    next_tokens(torch.tensor(LOGITS[:2]), None, SamplingConfig(top_k=2, top_p=0.5), streams)
    for seed, stream in zip((1, 2), streams, strict=True):
        fresh = random.Random(seed)
        fresh.random()
        assert stream.getstate() == fresh.getstate()


def test_row_seeds() -> None:
    assert row_seed(81273, 0) == 81273
    seeds = [row_seed(seed, row) for seed in range(50) for row in range(1, 50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert row_seed(1, 11) != row_seed(11, 1)
    assert row_seed(5, 3) == row_seed(5, 3) == 7094014967151009  # seeds people noted down stay good


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
def test_a_nucleus_of_few_candidates_is_that_of_all(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator).mul(4).round()  # with many ties
    config = SamplingConfig(temperature=1.3, top_p=top_p)
    everything = probabilities(logits, config)
    for candidates in (1, 7, 40, 299):
        monkeypatch.setattr("minigpt.inference.sampling.CANDIDATES", candidates)
        assert torch.equal(probabilities(logits, config), everything)
