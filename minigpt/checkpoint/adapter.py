"""Adapters on disk in the format of PEFT: adapter_config.json and adapter_model.safetensors, read with suspicion.

An adapter names the folder of the model it belongs to. GPT-2 keeps query, key and value in one matrix: adapters of the
three become one whose B is block-diagonal, and one of all three is cut by its rows.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.checkpoint.base import ADAPTER_CONFIG
from minigpt.checkpoint.base import ADAPTER_WEIGHTS as ADAPTER_WEIGHTS
from minigpt.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from minigpt.checkpoint.huggingface import stored_name
from minigpt.checkpoint.weights import weight_files
from minigpt.config import LoraConfig
from minigpt.errors import ModelFolderError
from minigpt.model.lora import LoraLinear, adapters, add_update, block_matrices
from minigpt.model.transformer import GPT

PREFIX = "base_model.model."
# What does not change the result, or is looked at below. Anything else that is set asks for more than plain LoRA.
UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip
MOST = 1e9  # of a rank or an alpha; above it is no number that training had
CHUNK = 1 << 20  # bytes that are hashed at a time


def save_adapter(folder: Path, model: GPT) -> None:
    """Write the weights of a model's adapters under the names of PEFT."""
    layers, tensors = adapters(model), {}
    for name, module in _modules(model).items():
        parts = {part: layers.get(part) for part in module}
        if any(parts.values()):
            a, b = _joined(list(parts.values()), list(module.values()))
            tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
    write_tensors(folder / ADAPTER_WEIGHTS, tensors, {"format": "pt"})


def save_adapter_config(folder: Path, model: GPT, lora: LoraConfig, base: Path) -> None:
    """Write the adapter_config.json that PEFT reads; `base` is the folder of the model without the adapter."""
    layers = adapters(model)
    parts = {_target(name): sum(part in layers for part in module) for name, module in _modules(model).items()}
    fused = {target: count for target, count in parts.items() if count > 1}
    raw: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(target for target, count in parts.items() if count),
        # The ranks of adapters that are joined add up, and alpha / r must stay.
        "rank_pattern": {target: count * lora.rank for target, count in fused.items()},
        "alpha_pattern": {target: count * lora.alpha for target, count in fused.items()},
        "fan_in_fan_out": model.config.architecture == "gpt2",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
    }
    write_json(folder / ADAPTER_CONFIG, raw)


def weights_facts(base: Path) -> dict[str, Any]:
    """Return what tells a model's weights from others: their fingerprint, and sizes and times of their files."""
    return {"fingerprint": fingerprint(base), "files": _sizes_and_times(base)}


def same_weights(base: Path, facts: Mapping[str, Any]) -> bool:
    """Tell whether a model has the weights of which these are the facts, so that no adapter is put on others.

    They are read once more only where a file has another size or time: a copy, or weights that were trained again.
    """
    known = facts.get("fingerprint")
    return known is None or facts.get("files") == _sizes_and_times(base) or known == fingerprint(base)


def _sizes_and_times(base: Path) -> dict[str, list[int]]:
    found = {path.name: path.stat() for path in weight_files(base)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def fingerprint(base: Path) -> str:
    """Return the SHA-256 of a model's weights."""
    digest = hashlib.sha256()
    for path in weight_files(base):
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def merge_adapter(folder: Path, model: GPT) -> None:
    """Add an adapter's updates to the matrices of its base model.

    Every pair of matrices must be there, fit, and have a place in the model, and nothing else may be asked for than
    plain LoRA, or it is a ModelFolderError that names file and entry.
    """
    path, config = folder / ADAPTER_WEIGHTS, read_json(folder / ADAPTER_CONFIG)
    _check_config(folder / ADAPTER_CONFIG, config)
    stored = read_tensors(path)[0]
    modules = _modules(model)
    pairs = _pairs(path, stored, modules)
    _check_complete(folder, config, pairs, modules)
    for name, (a, b) in pairs.items():
        linears = list(modules[name].values())
        widths = [linear.out_features for linear in linears]
        _check_shapes(path, name, a, b, linears[0].in_features, sum(widths))
        scaling = _scaling(folder / ADAPTER_CONFIG, config, name, a.shape[0])
        for linear, rows in zip(linears, torch.split(b, widths), strict=True):
            add_update(linear.weight, a, rows, scaling)


def _modules(model: GPT) -> dict[str, dict[str, nn.Linear]]:
    """Name each adaptable module as `transformers` does, with those of our layers that are in it."""
    named: dict[str, dict[str, nn.Linear]] = {}
    for name, linear in block_matrices(model).items():
        named.setdefault(stored_name(name, model.config), {})[name] = linear
    return named


def _target(name: str) -> str:
    """What a module is called in target_modules: without its layer; GPT-2 has two c_proj."""
    block, _, part = name.rpartition(".")
    return f"{block.rpartition('.')[2]}.{part}" if part.startswith("c_") else part


def _joined(parts: list[LoraLinear | None], linears: list[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Stack the A of layers that share one matrix, and put their B on a diagonal; zeros where one has no adapter."""
    present = [part for part in parts if part is not None]
    if len(parts) == 1:
        return present[0].lora_A, present[0].lora_B
    rank = present[0].lora_A.shape[0]
    rows, place = [], 0
    for part, linear in zip(parts, linears, strict=True):
        row = torch.zeros(linear.out_features, rank * len(present), device=present[0].lora_B.device)
        if part is not None:
            row[:, place : place + rank] = part.lora_B.detach()
            place += rank
        rows.append(row)
    return torch.cat([part.lora_A.detach() for part in present]), torch.cat(rows)


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is no LoRA, or more than that: a setting left unread would change the answers in silence."""
    if config.get("peft_type") != "LORA":
        raise ModelFolderError(f"{path}: peft_type {config.get('peft_type')!r} is not supported (supported: LORA)")
    unknown = [name for name, value in config.items() if value and name not in UNDERSTOOD]
    if config.get("bias", "none") != "none":
        unknown.append("bias")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # others change the base model
        unknown.append("init_lora_weights")
    if unknown:
        raise ModelFolderError(f"{path}: {unknown[0]} is {config[unknown[0]]!r}; that kind of adapter is not supported")
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        value = config.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < MOST:
            raise ModelFolderError(f"{path}: {name} is {value!r}; it must be a number above 0")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            re.fullmatch(r"[\w.]+", key) and type(value) in (int, float) and 0 < value < MOST
            for key, value in pattern.items()
        ):
            raise ModelFolderError(f"{path}: {name} is not supported as it is; it must give modules' names numbers")


def _pairs(path: Path, stored: Mapping[str, Tensor], modules: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Find the two matrices of each module; one that is alone, unknown or of another type is an error."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for key, tensor in stored.items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", key)
        if match is None or match[1] not in modules:
            raise ModelFolderError(f"{path} has a weight {key!r} with no place in the base model")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ModelFolderError(f"{path}: {key} has type {tensor.dtype}; supported are the floating-point types")
        other = f"{PREFIX}{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
        if other not in stored:
            raise ModelFolderError(f"{path} has no weight {other!r}")
        if match[2] == "A":
            pairs[match[1]] = (tensor, stored[other])
    return pairs


def _check_complete(
    folder: Path, config: Mapping[str, Any], pairs: Mapping[str, Any], modules: Mapping[str, Any]
) -> None:
    """Compare the modules that have weights with the targets, where these are plain names in every layer."""
    targets = config.get("target_modules")
    if not pairs:
        raise ModelFolderError(f"{folder / ADAPTER_WEIGHTS} holds no adapter")
    if not isinstance(targets, list) or config.get("layers_to_transform") or config.get("exclude_modules"):
        return
    wanted = {name for name in modules for target in targets if name == target or name.endswith(f".{target}")}
    if missing := sorted(wanted - pairs.keys()):
        raise ModelFolderError(f"{folder / ADAPTER_WEIGHTS} has no weight '{PREFIX}{missing[0]}.lora_A.weight'")
    if beside := sorted(pairs.keys() - wanted):
        raise ModelFolderError(
            f"{folder / ADAPTER_WEIGHTS} has weights for {beside[0]}, which {ADAPTER_CONFIG} does not name"
        )


def _check_shapes(path: Path, name: str, a: Tensor, b: Tensor, inputs: int, outputs: int) -> None:
    rank = a.shape[0] if a.dim() else 0
    for letter, tensor, expected in (("A", a, [rank, inputs]), ("B", b, [outputs, rank])):
        if list(tensor.shape) != expected:
            raise ModelFolderError(
                f"{path}: {PREFIX}{name}.lora_{letter}.weight is {list(tensor.shape)}, "
                f"but the base model asks for {expected}"
            )


def _scaling(path: Path, config: Mapping[str, Any], name: str, rank: int) -> float:
    """What an update is multiplied by: alpha / r, or alpha / sqrt(r) for rank-stabilised ones (Kalajdzievski 2023)."""

    def setting(key: str, pattern: str) -> float:
        named = config.get(pattern) or {}
        return float(next((named[at] for at in named if name == at or name.endswith(f".{at}")), config[key]))

    said = setting("r", "rank_pattern")
    if rank != said:
        raise ModelFolderError(f"{path}: the adapter of {name} has rank {rank}, not {said:g}; they do not fit together")
    return setting("lora_alpha", "alpha_pattern") / (math.sqrt(rank) if config.get("use_rslora") else rank)
