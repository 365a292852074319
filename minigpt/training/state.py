"""What a run's state holds beside weights and optimizers: random streams, and the machine it was saved on."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random streams that dropout draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["random.mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `random_states` returned; the CPU's state must be there, a KeyError."""
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
    if device.type == "mps" and "random.mps" in tensors:
        torch.mps.set_rng_state(tensors["random.mps"])


def environment(device: torch.device, ranks: int) -> dict[str, Any]:
    """What bit-equality depends on; `ranks` is the number of processes."""
    return {
        "device": device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "ranks": ranks,
    }


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say what differs between two environments; one that says nothing of ranks had a single process."""
    return [
        f"{name} was {before} when this run was saved and is {value} now; it will not be bit-equal"
        for name, value in now.items()
        if (before := then.get(name, 1 if name == "ranks" else None)) != value
    ]
