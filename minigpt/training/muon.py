"""Muon: momentum whose every step is made orthogonal, for the matrices inside blocks.

The same update as `torch.optim.Muon`, which always iterates in bfloat16 and one matrix at a time: on a CPU without
bfloat16 that takes longer than the rest of the training step. Here matrices of one shape go through the iteration
together, in the type that is fast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from minigpt.training.distributed import cut_like, whole_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, with the steepest slope at zero
ITERATIONS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with Nesterov momentum and AdamW's decoupled decay.

    Steps are scaled by 0.2 sqrt(max(rows, columns)), so that a learning rate means what it does for AdamW (Liu et al.
    2025, "Muon is Scalable for LLM Training"). `params` are matrices; `dtype` is what the iteration computes in. Of
    matrices that are cut over several processes the momentum is cut as well, and the iteration runs on whole ones.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float, dtype: torch.dtype
    ) -> None:
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            gradients, buffers = [weight.grad for weight in weights], [self._buffer(weight) for weight in weights]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            steps = _steps(torch._foreach_lerp(gradients, buffers, group["momentum"]), group["dtype"])
            cut = [cut_like(step, weight) for step, weight in zip(steps, weights, strict=True)]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, cut, alpha=-group["lr"])

    def _buffer(self, weight: nn.Parameter) -> Tensor:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _steps(updates: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Make matrices orthogonal and scale them, those of one shape together."""
    steps, alike = list(updates), defaultdict[tuple[int, int], list[tuple[int, Tensor]]](list)
    for place, update in enumerate(updates):
        whole = whole_tensor(update)
        wide = whole if whole.shape[0] <= whole.shape[1] else whole.t()
        alike[wide.shape[0], wide.shape[1]].append((place, wide))
    for (_, width), members in alike.items():
        made = orthogonalize(torch.stack([wide for _, wide in members]), dtype).to(updates[0].dtype)
        made *= 0.2 * width**0.5
        for (place, _), step in zip(members, made, strict=True):
            steps[place] = step if step.shape == updates[place].shape else step.t()
    return steps


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of `matrices` (N, rows, columns; rows <= columns) close to 1.

    Newton-Schulz iteration of degree five: X <- a X + (b X X^T + c (X X^T)^2) X.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    other, gram = torch.empty_like(x), x.new_empty(*x.shape[:-1], x.shape[-2])
    inner = torch.empty_like(gram)
    for _ in range(ITERATIONS):
        torch.bmm(x, x.transpose(-2, -1), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=inner)
        torch.baddbmm(x, inner, x, beta=a, out=other)
        x, other = other, x
    return x
