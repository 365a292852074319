"""Muon against PyTorch's own, and against what it promises: singular values near 1."""

from __future__ import annotations

import torch
from torch import nn

from minigpt.training.muon import Muon, orthogonalize


def matrices(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 16), (16, 8), (8, 16), (12, 12))]


def test_steps_are_those_of_pytorch_but_for_its_bfloat16() -> None:
    ours, theirs = matrices(0), matrices(0)
    mine = Muon(ours, lr=0.02, weight_decay=0.1, momentum=0.95, dtype=torch.float32)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, start in zip(ours, theirs, matrices(0), strict=True):
        moved = (b - start).norm()
        assert (a - b).norm() < 0.02 * moved  # bfloat16 has three digits
        for key, buffer in reference.state[b].items():
            torch.testing.assert_close(mine.state[a][key], buffer)


def test_the_iteration_brings_singular_values_close_to_one() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 16, 40, generator=generator)
    values = torch.linalg.svdvals(orthogonalize(x, torch.float32))
    assert 0.6 < values.min()
    assert values.max() < 1.3


def test_a_gradient_of_zero_gives_no_nan() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)
    Muon([weight], lr=0.1, weight_decay=0.0, momentum=0.95, dtype=torch.float32).step()
    torch.testing.assert_close(weight.detach(), torch.ones(4, 4))
