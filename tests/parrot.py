"""A model that says one thing, whatever it is asked: its next token depends on the last one alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from minigpt.checkpoint.folder import save_description, save_weights
from minigpt.config import ModelConfig
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import IM_END, Tokenizer

TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank.\nuser system assistant\n猫 and café\n"
)


def make_parrot(says: str, *, context: int = 256, endless: bool = False) -> tuple[GPT, Tokenizer]:
    """Make a model that answers with `says`, all of whose tokens differ; `endless` says it again and again."""
    tokenizer = Tokenizer.train([TEXT] * 3, 300)
    ids = tokenizer.encode(says)
    begin, end = tokenizer.encode("\n")[0], tokenizer.special_id(IM_END)
    assert end is not None
    assert len({begin, *ids}) == len(ids) + 1
    return build(tokenizer, [begin, *ids, ids[0] if endless else end], context), tokenizer


def build(tokenizer: Tokenizer, chain: Sequence[int], context: int) -> GPT:
    size = tokenizer.vocab_size
    config = ModelConfig(
        architecture="llama", vocab_size=size, hidden_size=size, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, intermediate_size=8, max_position_embeddings=context,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 1.0
    return model


def make_parrot_folder(folder: Path, says: str, record: dict[str, Any] | None = None, **options: Any) -> Path:
    model, tokenizer = make_parrot(says, **options)
    folder.mkdir(parents=True, exist_ok=True)
    save_description(folder, model.config, tokenizer, record or {})
    save_weights(folder, model)
    return folder
