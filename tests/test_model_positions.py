"""Positions against values worked out by hand, and the property each kind is chosen for."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from minigpt.config import RopeScaling
from minigpt.model.positions import rotary_angles, rotate, scaled, sinusoidal


def test_rotation_turns_half_split_pairs_by_the_position() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for position in (0, 1, 100):
        found = rotate(x, *rotary_angles(torch.tensor([position]), 4, 10_000.0))[0].tolist()
        first = complex(1, 3) * cmath.exp(1j * position)
        second = complex(2, 4) * cmath.exp(1j * position / 100)
        assert found == pytest.approx([first.real, second.real, first.imag, second.imag], abs=1e-5)


def test_products_of_turned_vectors_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 8, generator=generator)

    def product(query_position: int, key_position: int) -> float:
        q = rotate(query, *rotary_angles(torch.tensor([query_position]), 8, 10_000.0))
        k = rotate(key, *rotary_angles(torch.tensor([key_position]), 8, 10_000.0))
        return float((q * k).sum())

    assert product(1005, 1000) == pytest.approx(product(5, 0), abs=1e-3)
    assert abs(product(7, 0) - product(5, 0)) > 1e-2


def test_a_larger_theta_turns_more_slowly() -> None:
    cos, sin = rotary_angles(torch.tensor([3]), 4, 10_000.0)
    assert cos.tolist()[0] == pytest.approx([math.cos(3), math.cos(0.03)])
    assert sin.tolist()[0] == pytest.approx([math.sin(3), math.sin(0.03)])
    cos, _ = rotary_angles(torch.tensor([3]), 4, 1_000_000.0)
    assert cos.tolist()[0] == pytest.approx([math.cos(3), math.cos(0.003)])


def test_linear_scaling_is_a_position_further_on() -> None:
    scaling = RopeScaling(kind="linear", factor=4.0)
    found = rotary_angles(torch.tensor([12, 400]), 8, 500.0, scaling)
    for slowed, plain in zip(found, rotary_angles(torch.tensor([3, 100]), 8, 500.0), strict=True):
        assert torch.allclose(slowed, plain, atol=1e-5)


def test_the_scaling_of_llama_3_slows_long_waves_alone() -> None:
    """The first training saw 8192 tokens: waves of up to 2048 are kept, those of 8192 and more are 8 times as long."""
    scaling = RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    waves = torch.tensor([10.0, 2048.0, 4096.0, 8192.0, 80_000.0])
    frequencies = 2 * math.pi / waves
    found = (scaled(frequencies, scaling) / frequencies).tolist()
    # A wave of 4096 turns twice: a third of the way from 1 to 4.
    assert found == pytest.approx([1.0, 1.0, 1 / 3 + 2 / 3 / 8, 1 / 8, 1 / 8], rel=1e-5)


def test_rotation_keeps_the_type_and_works_in_float32() -> None:
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    cos, sin = rotary_angles(torch.tensor([1000], dtype=torch.long), 4, 10_000.0)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[0, 0].item() == pytest.approx(math.cos(1000), abs=1e-4)  # in bfloat16 the angle alone would be off by 4
    assert rotate(x, cos, sin).dtype == torch.bfloat16


def test_sinusoidal_vectors_are_those_of_the_paper() -> None:
    found = sinusoidal(torch.tensor([[0, 1], [5, 100]]), 4)
    assert found.shape == (2, 2, 4)
    for place, position in (((0, 0), 0), ((0, 1), 1), ((1, 0), 5), ((1, 1), 100)):
        expected = [math.sin(position), math.cos(position), math.sin(position / 100), math.cos(position / 100)]
        assert found[place].tolist() == pytest.approx(expected, abs=1e-5)
