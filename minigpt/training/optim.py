"""Optimizers and the learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.config import ScheduleName, TrainConfig
from minigpt.training.distributed import cut_like
from minigpt.training.muon import Muon

MUON_MOMENTUM = 0.95
EMBEDDING_RATE = 2.0
STATE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {  # what each keeps for a parameter
    Muon: ("momentum_buffer",),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name; a tied weight is there once."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def parameter_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Split the parameters that are trained into the matrices inside blocks, and the rest: embeddings, gains, biases.

    Only the first decay. Each parameter is in one group; a tied weight is there once, as an embedding.
    """
    named = trained_parameters(model)
    matrices = {name: weight for name, weight in named.items() if weight.dim() == 2 and ".layers." in name}
    rest = {name: weight for name, weight in named.items() if name not in matrices}
    return matrices, rest


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make AdamW (Loshchilov & Hutter 2019) for everything, or Muon for the matrices and AdamW for the rest.

    A group's `rate` multiplies the learning rate: beside Muon, embeddings and gains take larger steps.
    """
    matrices, rest = parameter_groups(model)
    shared: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": True}
    still = {"params": list(rest.values()), "weight_decay": 0.0}
    if config.optimizer == "adamw":
        decayed = {"params": list(matrices.values()), "weight_decay": config.weight_decay}
        return [torch.optim.AdamW([decayed, still], **shared)]
    muon = Muon(
        matrices.values(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=MUON_MOMENTUM,
        dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32,
    )
    return [muon, torch.optim.AdamW([still | {"rate": EMBEDDING_RATE}], **shared)] if rest else [muon]


def clear_gradients(optimizers: list[torch.optim.Optimizer], *, in_place: bool) -> None:
    """Drop the gradients, or set them to zero `in_place`, where they are made if there are none.

    In place they lie together on a heap, and not in between what a micro-batch keeps.
    """
    for optimizer in optimizers:
        if not in_place:
            optimizer.zero_grad(set_to_none=True)
            continue
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        kept = [weight.grad for weight in weights if weight.grad is not None]
        if kept:
            torch._foreach_zero_(kept)
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)


def learning_rate_factor(step: int, *, warmup: int, total: int, schedule: ScheduleName, final: float) -> float:
    """The share of the peak rate at a step (from 0): 1/w, 2/w … 1 in warm-up, then down to `final` at the last."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done
    return final + (1 - final) * left


def optimizer_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Flatten the optimizers' states into named tensors."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        f"optimizer.{names[id(weight)]}.{key}": torch.as_tensor(value)
        for optimizer in optimizers
        for weight, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizers(model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put copies of the states saved by `optimizer_tensors` back: that of every parameter, or none before a first step.

    States that are missing, unknown or of another shape are a ValueError.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    places = {
        f"optimizer.{names[id(weight)]}.{key}": (optimizer, weight, key)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
        for key in STATE[type(optimizer)]
    }
    saved = {name for name in tensors if name.startswith("optimizer.")}
    if saved and saved != places.keys():
        raise ValueError(f"{min(saved ^ places.keys())} is missing or unknown")
    for name in sorted(saved):  # the order in which several ranks will save them, the same on each
        optimizer, weight, key = places[name]
        if tensors[name].shape != (() if key == "step" else weight.shape):
            raise ValueError(f"{name} has another shape")
        # A copy: what was read may be a map of the file that the next save replaces.
        saved_one = tensors[name] if key == "step" else cut_like(tensors[name], weight)
        optimizer.state[weight][key] = saved_one.to(weight.device, copy=True)
