"""What all runs share that begin with a model: opening it, putting adapters in, and what their folder says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from minigpt.checkpoint.adapter import same_weights, save_adapter_config, weights_facts
from minigpt.checkpoint.base import holds_adapter
from minigpt.checkpoint.folder import LoadedModel, load, save_companions, save_description
from minigpt.config import LoraConfig
from minigpt.errors import DataError, ModelFolderError
from minigpt.model.lora import add_lora, lora_parameters
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.chat_data import ChatRequest
from minigpt.training.run_folder import RunFolder
from minigpt.training.runs import check_said, check_source, understanding
from minigpt.training.tuning_plan import TuningRequest

R = TypeVar("R", bound=TuningRequest)


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


def asked(record: Mapping[str, Any], folder: RunFolder, kind: type[R]) -> tuple[ChatRequest, R]:
    """Return what a recorded run was begun with: its data, and its request, of a `kind`."""
    with understanding(folder):
        request = _with_tuples(record["request"])
        if request["lora"] is not None:
            request["lora"] = LoraConfig(**_with_tuples(request["lora"]))
        return ChatRequest(**_with_tuples(record["data"])), kind(**request)


def check_same_data(facts: Mapping[str, Any], recorded: Mapping[str, Any], named: str) -> None:
    """Refuse to go on with other data than a run began with: a DataError."""
    if facts["digest"] != recorded["digest"]:
        raise DataError(f"{named} has changed since this run began; put the old data back, or start again")


def check_same(
    record: Mapping[str, Any],
    folder: RunFolder,
    begun: tuple[ChatRequest, TuningRequest],
    data: ChatRequest | None,
    said: Mapping[str, Any],
    method: Mapping[str, Any] | None = None,
) -> None:
    """Refuse to resume with other data, if some was named, or other settings, if said, than the run began with.

    `method` are the settings of its method, under the names of its options.
    """
    begun_data, request = begun
    if data is not None:
        check_source(data.sources == begun_data.sources, data.named, begun_data.named)
    with understanding(folder):
        before = record["plan"]["train"] | asdict(begun_data) | dict(method or {})
        before |= {name: value for name, value in asdict(request).items() if value is not None}
    adapter = {} if request.lora is None else asdict(request.lora)
    before |= {f"lora_{name}": value for name, value in adapter.items()} | {"lora": request.lora is not None}
    check_said(before, said)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were before JSON made lists of tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
