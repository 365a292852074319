"""A model folder with a tokenizer that was trained and weights that were not, for tests of commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from variants import CONTEXT, VARIANTS

from minigpt.checkpoint.folder import save_description, save_weights
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures in it.\n"
)


def make_folder(
    folder: Path, variant: str = "qwen3", record: dict[str, Any] | None = None, context: int = CONTEXT
) -> Path:
    """Write a model of two layers, 32 wide, for a context of 16 tokens or another."""
    tokenizer = Tokenizer.train([TEXT, "猫 and café\n"], 300)
    config = replace(VARIANTS[variant], vocab_size=tokenizer.vocab_size, max_position_embeddings=context)
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)  # attention that is not the same everywhere
    folder.mkdir(parents=True, exist_ok=True)
    save_description(folder, config, tokenizer, record or {})
    save_weights(folder, model)
    return folder
