"""A model folder: what a person uses, shares and opens elsewhere.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json  generation_config.json
model-00001-of-00003.safetensors …  model.safetensors.index.json     instead of one large file
minigpt.json        how the model was made
metrics.jsonl       what was measured on the way
last/               what resuming needs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minigpt.checkpoint.adapter import merge_adapter, same_weights
from minigpt.checkpoint.base import WEIGHTS, base_folder, config_path, holds_adapter, holds_model, read_tokenizer
from minigpt.checkpoint.files import read_json, write_json
from minigpt.checkpoint.huggingface import config_from_hf, config_to_hf
from minigpt.checkpoint.weights import load_weights, save_weights
from minigpt.config import ModelConfig, SamplingConfig
from minigpt.errors import ConfigError, ModelFolderError
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

__all__ = ["WEIGHTS", "LoadedModel", "holds_model", "load", "load_weights", "save_description", "save_weights"]

GENERATION = "generation_config.json"
DEFAULTS = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and the folder's own record of how it was made (may be empty).

    `generation` has those settings of SamplingConfig that the model's makers chose in generation_config.json.
    """

    folder: Path
    model: GPT
    tokenizer: Tokenizer
    record: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)


def save_description(
    folder: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    record: dict[str, Any],
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write everything of a model folder but its weights; `save_weights` comes after it and notes their type.

    `generation` are defaults of sampling, as `LoadedModel` has them.
    """
    raw = config_to_hf(
        config, end_of_text_id=tokenizer.end_of_text_id, bos_id=tokenizer.bos_id, pad_id=tokenizer.pad_id
    )
    write_json(folder / "config.json", raw)
    save_companions(folder, tokenizer, record, generation)


def save_companions(
    folder: Path, tokenizer: Tokenizer, record: dict[str, Any], generation: Mapping[str, Any] | None = None
) -> None:
    """Write what stands beside the config of a model or an adapter: tokenizer, generation_config.json and the record.

    `generation` are defaults of sampling, as `LoadedModel` has them.
    """
    ends = {
        "bos_token_id": tokenizer.end_of_text_id if tokenizer.bos_id is None else tokenizer.bos_id,
        "eos_token_id": list(tokenizer.end_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    chosen = dict(generation or {})
    if chosen.keys() & {"temperature", "top_k", "top_p"}:
        chosen["do_sample"] = chosen.get("temperature") != 0  # else transformers takes the best token, whatever is said
    write_json(folder / GENERATION, ends | chosen)
    write_json(folder / "minigpt.json", record)
    tokenizer.save(folder)


def load(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    dropout: float | None = None,
) -> LoadedModel:
    """Open a model folder of ours or of `transformers`; `dtype` None keeps the stored type (that of the embedding).

    `dropout` takes the place of the config's, for a model that is to be trained.

    An adapter is merged into its base model. Nothing in a folder is executed. Every weight must be there, fit its
    shape, and have a place in the model, or it is a ModelFolderError that names file and weight.
    """
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such model folder; train one with minigpt train, or name one with -m")
    if holds_adapter(folder):
        assert dropout is None, "an adapter is never trained further"
        return _load_adapted(folder, device, dtype)
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder} holds no model (no config.json in it)")
    config = read_config(folder)
    config = config if dropout is None else replace(config, dropout=dropout)
    tokenizer = Tokenizer.load(folder)
    _check_vocabulary(folder, tokenizer, config)
    record, generation = _record(folder), _generation(folder)
    model = load_weights(folder, config, device=device, dtype=dtype).eval()
    return LoadedModel(folder, model, tokenizer, record, generation)


def read_config(folder: Path) -> ModelConfig:
    """Read the shape of a model, or of the one that an adapter belongs to."""
    path = config_path(folder)
    return config_from_hf(read_json(path), str(path))


def _load_adapted(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> LoadedModel:
    """Open an adapter's base model and merge the adapter into it, in the wider of the two types."""
    base, record = base_folder(folder), _record(folder)
    loaded = load(base, dtype=torch.float32 if dtype == torch.float32 else None)
    made_for = record.get("base")
    if isinstance(made_for, dict) and not same_weights(base, made_for):
        raise ModelFolderError(
            f"{folder}: its base model {base} has other weights than the adapter was trained on; "
            "put the old ones back, or train the adapter again"
        )
    model, stored = loaded.model, loaded.model.lm_head.weight.dtype
    merge_adapter(folder, model)
    tokenizer = read_tokenizer(folder)
    _check_vocabulary(folder, tokenizer, model.config)
    generation = _generation(folder) or loaded.generation
    return LoadedModel(folder, model.to(device=device, dtype=dtype or stored), tokenizer, record, generation)


def _record(folder: Path) -> dict[str, Any]:
    return read_json(folder / "minigpt.json") if (folder / "minigpt.json").is_file() else {}


def _generation(folder: Path) -> dict[str, Any]:
    """Read the defaults of sampling; a null, and a top_k of 0, which there means all, is none."""
    path = folder / GENERATION
    raw = read_json(path) if path.is_file() else {}
    chosen = {name: raw[name] for name in DEFAULTS if raw.get(name) is not None}
    if chosen.get("top_k") == 0:
        del chosen["top_k"]
    try:
        SamplingConfig(**chosen)
    except ConfigError as error:
        raise ModelFolderError(f"{path}: {error}") from error
    return chosen


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFolderError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model only {config.vocab_size:,}; "
            "they do not belong together"
        )
