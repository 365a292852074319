"""What all runs share that begin with a model: opening it, putting adapters in, and what their folder says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minigpt.checkpoint.adapter import same_weights, save_adapter_config, weights_facts
from minigpt.checkpoint.base import holds_adapter
from minigpt.checkpoint.folder import LoadedModel, load, save_companions, save_description
from minigpt.config import LoraConfig
from minigpt.errors import DataError, ModelFolderError
from minigpt.model.lora import add_lora, lora_parameters
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.run_folder import RunFolder
from minigpt.training.runs import understanding
from minigpt.training.tuning_plan import TuningRequest


def load_base(request: TuningRequest, folder: RunFolder) -> LoadedModel:
    """Open the model to tune, in float32 and with the dropout that was asked for.

    An adapter is a ModelFolderError, and so is a model in the folder that the run would write over.
    """
    path = Path(request.base)
    if holds_adapter(path):
        raise ModelFolderError(
            f"{path} is an adapter; make it a model of its own with minigpt export --merge, or tune its base model"
        )
    if path.resolve() == folder.path.resolve():
        raise ModelFolderError(f"{path} is the model to begin with; write the tuned one elsewhere with -o")
    return load(path, dtype=torch.float32, dropout=request.dropout)


def load_same_base(request: TuningRequest, record: Mapping[str, Any], folder: RunFolder) -> LoadedModel:
    """Open the model that a recorded run began with; one that has changed since is a DataError."""
    base = load_base(request, folder)
    with understanding(folder):
        if not same_weights(base.folder, record["base"]):
            raise DataError(f"{request.base} has changed since this run began; put the old model back, or start again")
    return base


def base_facts(request: TuningRequest, base: LoadedModel) -> dict[str, Any]:
    """What the record says of the model that a run began with."""
    return {"folder": request.base, **weights_facts(base.folder), "record": base.record}


def adapted(model: GPT, request: TuningRequest) -> GPT:
    """Put fresh adapters into a model where some were asked for."""
    if request.lora is not None:
        add_lora(model, request.lora, torch.Generator().manual_seed(request.seed))
    return model


def adapter_size(model: GPT, request: TuningRequest) -> int | None:
    """Count what an adapter would train; None where none was asked for."""
    return None if request.lora is None else lora_parameters(model, request.lora)


def save_all_but_weights(
    folder: RunFolder,
    model: GPT,
    base: LoadedModel,
    tokenizer: Tokenizer,
    request: TuningRequest,
    record: dict[str, Any],
) -> None:
    """Write everything of the folder but the weights."""
    if request.lora is None:
        save_description(folder.path, model.config, tokenizer, record, base.generation)
    else:
        save_adapter_config(folder.path, model, request.lora, Path(request.base))
        save_companions(folder.path, tokenizer, record, base.generation)


def recorded_lora(values: Mapping[str, Any] | None) -> LoraConfig | None:
    """Return the adapter of a recorded request."""
    if values is None:
        return None
    targets = values["targets"]
    return LoraConfig(**{**values, "targets": None if targets is None else tuple(targets)})


def asked_before(record: Mapping[str, Any], request: TuningRequest, *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings that a recorded run was begun with, under the names that options are compared by."""
    before = dict(record["plan"]["train"])
    for other in others:
        before |= other
    before |= {name: value for name, value in asdict(request).items() if value is not None}
    adapter = {} if request.lora is None else asdict(request.lora)
    return before | {f"lora_{name}": value for name, value in adapter.items()} | {"lora": request.lora is not None}
