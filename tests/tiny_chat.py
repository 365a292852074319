"""A model folder and conversations small enough to tune in a moment, for tests of instruction tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from variants import VARIANTS

from minigpt.checkpoint.folder import save_description, save_weights
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

CONTEXT = 64
ANIMALS = ("cat", "dog", "owl", "fox", "hen", "cow", "pig", "bee", "ant", "elk", "bat", "rat")
PAIRS = [(f"Say {animal}", f"{animal}!") for animal in ANIMALS] + [(f"Two {a}s", f"{a} {a}") for a in ANIMALS]
TEXT = "".join(f"user\n{question}\nassistant\n{answer}\n" for question, answer in PAIRS)


def make_base(folder: Path, variant: str = "qwen3", *, dropout: float = 0.0, seed: int = 3) -> Path:
    """Write a model of two layers, 32 wide, that knows nothing yet; its tokenizer has seen the conversations."""
    tokenizer = Tokenizer.train([TEXT] * 4, 300)
    config = replace(
        VARIANTS[variant], vocab_size=tokenizer.vocab_size, max_position_embeddings=CONTEXT, dropout=dropout
    )
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True, exist_ok=True)
    save_description(folder, config, tokenizer, {})
    save_weights(folder, model)
    return folder


def write_chats(path: Path, pairs: Sequence[tuple[str, str]] = PAIRS, **more: Any) -> Path:
    """Write questions and answers as JSON lines."""
    rows = [{"prompt": question, "response": answer, **more} for question, answer in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
