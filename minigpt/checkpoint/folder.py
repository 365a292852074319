"""A model folder: what a person uses, shares and opens elsewhere.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json  generation_config.json
minigpt.json        how the model was made
metrics.jsonl       what was measured on the way
last/               what resuming needs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from minigpt.checkpoint.huggingface import (
    config_from_hf,
    config_to_hf,
    weights_from_hf,
    weights_to_hf,
    without_buffers,
)
from minigpt.config import ModelConfig
from minigpt.errors import ModelFolderError
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and the folder's own record of how it was made (may be empty)."""

    folder: Path
    model: GPT
    tokenizer: Tokenizer
    record: dict[str, Any]


def holds_model(folder: Path) -> bool:
    """Tell whether a folder holds a model that can generate."""
    return (folder / WEIGHTS).is_file() and (folder / "config.json").is_file()


def save_description(folder: Path, config: ModelConfig, tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    """Write everything of a model folder but its weights."""
    raw = config_to_hf(
        config, end_of_text_id=tokenizer.end_of_text_id, bos_id=tokenizer.bos_id, pad_id=tokenizer.pad_id
    )
    write_json(folder / "config.json", raw)
    ends = {
        "bos_token_id": raw["bos_token_id"],
        "eos_token_id": list(tokenizer.end_ids),
        "pad_token_id": raw["pad_token_id"],
    }
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "minigpt.json", record)
    tokenizer.save(folder)


def save_weights(folder: Path, model: GPT) -> None:
    """Write a model's weights under the names of `transformers`."""
    write_tensors(folder / WEIGHTS, weights_to_hf(model.state_dict(), model.config), {"format": "pt"})


def load(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """Open a model folder of ours or of `transformers`; `dtype` None keeps the stored type (that of the embedding).

    Nothing in it is executed. Every weight must be there, fit its shape, and have a place in the model, or it is a
    ModelFolderError that names file and weight.
    """
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such model folder; train one with minigpt train, or name one with -m")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder} holds no model (no config.json in it)")
    config = config_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFolderError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model only {config.vocab_size:,}; "
            "they do not belong together"
        )
    model = load_weights(folder, config)
    model = model.to(device=device, dtype=dtype or model.model.embed_tokens.weight.dtype).eval()
    record = read_json(folder / "minigpt.json") if (folder / "minigpt.json").is_file() else {}
    return LoadedModel(folder, model, tokenizer, record)


def load_weights(folder: Path, config: ModelConfig) -> GPT:
    """Build the model around the stored weights, without filling it first."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ModelFolderError(f"{folder} holds no {WEIGHTS}{_hint(folder)}")
    stored = without_buffers(read_tensors(path)[0], config)
    model = _empty_model(path, config, stored)
    _check_fit(path, stored, weights_to_hf(model.state_dict(), config))
    weights = weights_from_hf(stored, config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _hint(folder: Path) -> str:
    """Say what else there is in a folder without our file of weights."""
    if (folder / f"{WEIGHTS}.index.json").is_file():
        return "; weights in several files are not supported, join them into one"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    return f"; {pickles[0]} is a pickle, which can run code and is never opened" if pickles else ""


def _empty_model(path: Path, config: ModelConfig, stored: dict[str, Tensor]) -> GPT:
    """Build the model without memory for its weights; a size that no file of weights can have is an error."""
    misfit = ModelFolderError(f"{path} does not hold a model of the size that config.json asks for")
    if config.num_hidden_layers > len(stored):
        raise misfit
    try:
        with torch.device("meta"):
            return GPT(config)
    except (RuntimeError, TypeError) as error:  # more bytes, or a larger number, than PyTorch can count
        raise misfit from error


def _check_fit(path: Path, stored: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names, shapes and types of stored weights with those that the model has."""
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys() - {"lm_head.weight"})  # a tied one may be stored all the same
    if missing or unexpected:
        what = f"has no weight {missing[0]!r}" if missing else f"has a weight {unexpected[0]!r} with no place"
        raise ModelFolderError(f"{path} {what} in the model of config.json")
    for name, weight in expected.items():
        found = stored[name]
        if found.shape != weight.shape:
            raise ModelFolderError(
                f"{path}: {name} is {list(found.shape)}, but config.json asks for {list(weight.shape)}"
            )
        if found.dtype not in FLOATS:
            raise ModelFolderError(
                f"{path}: {name} has type {found.dtype}; supported are float32, bfloat16, float16 and float64"
            )
