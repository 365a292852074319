"""LoRA: a frozen matrix and a narrow update beside it, W x + (alpha / r) B A x (Hu et al. 2021).

A is (r, in), B is (out, r). B begins at zero, so that a model with fresh adapters computes what it did without them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.config import LORA_TARGETS, LoraConfig
from minigpt.errors import ConfigError
from minigpt.model.transformer import GPT


class LoraLinear(nn.Linear):
    """A linear layer whose own weights keep their names and stand still, with an update that is trained."""

    def __init__(self, frozen: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(frozen.in_features, frozen.out_features, frozen.bias is not None, device="meta")
        self.weight, self.bias = frozen.weight, frozen.bias
        rank, device = config.rank, frozen.weight.device
        bound = 1 / math.sqrt(self.in_features)  # as PyTorch begins a linear layer
        start = torch.empty(rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(start.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        self.scaling, self.dropout = config.alpha / rank, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.dropout(x, self.dropout, self.training) if self.dropout else x
        update = F.linear(F.linear(narrow, self.lora_A), self.lora_B)  # (…, in) -> (…, r) -> (…, out)
        return F.linear(x, self.weight, self.bias) + self.scaling * update


def add_lora(model: GPT, config: LoraConfig, generator: torch.Generator) -> None:
    """Freeze the model and put a trainable update beside each of its target matrices.

    A target that the architecture does not have is a ConfigError that names those it has.
    """
    there = [target for target in LORA_TARGETS if any(name.endswith(target) for name in block_matrices(model))]
    for target in config.targets or ():
        if target not in there:
            raise ConfigError(
                f"lora targets: {model.config.architecture} has no {target} (choose from {', '.join(there)})"
            )
    model.requires_grad_(False)
    for name, linear in block_matrices(model).items():
        if name.rpartition(".")[2] in (config.targets or there):
            _replace(model, name, LoraLinear(linear, config, generator))


@torch.no_grad()
def add_update(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> None:
    """Add scaling B A to `weight` (out, in), computed in float32 whatever the types."""
    update = torch.mm(b.to(weight.device, torch.float32), a.to(weight.device, torch.float32))
    weight.copy_(weight.float().add_(update, alpha=scaling))


def merged_weight(layer: nn.Linear) -> Tensor:
    """The matrix (out, in) of a layer, with the update of its adapter if it has one."""
    if not isinstance(layer, LoraLinear) or layer.scaling == 0.0:
        return layer.weight
    merged = layer.weight.detach().clone()
    add_update(merged, layer.lora_A, layer.lora_B, layer.scaling)
    return merged


def adapters(model: GPT) -> dict[str, LoraLinear]:
    """The layers with an update, by the names of the modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def block_matrices(model: GPT) -> dict[str, nn.Linear]:
    """The linear layers inside blocks, by the names of the modules."""
    return {name: module for name, module in model.model.named_modules(prefix="model") if isinstance(module, nn.Linear)}


def lora_parameters(model: GPT, config: LoraConfig) -> int:
    """Count what an adapter of this model would train."""
    return sum(
        config.rank * (linear.in_features + linear.out_features)
        for name, linear in block_matrices(model).items()
        if config.targets is None or name.rpartition(".")[2] in config.targets
    )


def _replace(model: GPT, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
