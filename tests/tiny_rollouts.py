"""Prompts, a judge and rollouts of a tiny model, for tests of reinforcement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_chat import PAIRS, make_base

from minigpt.alignment.policy import PolicyConfig, PolicyLoss
from minigpt.alignment.reference import frozen
from minigpt.alignment.rewards import RewardRow
from minigpt.alignment.rollouts import Ask, RolloutBatches
from minigpt.alignment.value_head import add_value_head
from minigpt.checkpoint.folder import load
from minigpt.config import TrainConfig
from minigpt.text.chat import ChatTemplate, Message, chat_template
from minigpt.text.preferences import Prompt
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Trainer

GROUP, ROWS, NEW = 4, 8, 6
TRAIN = TrainConfig(
    total_steps=6, batch_size=ROWS, micro_batch_size=3, context=64, seed=5, learning_rate=0.003, warmup_steps=1,
    eval_every=100, weight_decay=0.0,
)  # fmt: skip


def config(method: Any = "grpo", **more: Any) -> PolicyConfig:
    return PolicyConfig(method=method, **{"group_size": GROUP, "max_new_tokens": NEW, "kl": 0.1, **more})


def count_letters(rows: Sequence[RewardRow]) -> list[float]:
    """A reward that differs within groups: how often the answer has the letter `a`, less a little for its length."""
    return [row.answer.count("a") - 0.1 * len(row.answer) for row in rows]


def asks_of(template: ChatTemplate) -> list[Ask]:
    prompts = [Prompt(f"line {i}", (Message("user", q),), {"output": a}) for i, (q, a) in enumerate(PAIRS)]
    return [Ask(prompt, template.encode(prompt.messages)) for prompt in prompts]


def make_batches(base: Path, settings: PolicyConfig, **more: Any) -> RolloutBatches:
    """Rollouts of the model in a folder, with a value head where the method has one."""
    loaded = load(base, dtype=torch.float32)
    template = chat_template(loaded.tokenizer)
    reference = frozen(loaded.model)
    if settings.method == "ppo":
        add_value_head(loaded.model)
    options: dict[str, Any] = {"batch_size": ROWS, "seed": 5, "dtype": "float32", **more}
    return RolloutBatches(
        loaded.model, reference, template.tokenizer, asks_of(template), count_letters, settings, **options
    )


def make_policy_trainer(folder: Path, base: Path, settings: PolicyConfig) -> Trainer:
    """A run on rollouts as it begins."""
    batches = make_batches(base, settings)
    loss = PolicyLoss(settings)
    return Trainer(batches.model, loss, batches, TRAIN, RunFolder(folder), validate=None, save=lambda path, model: None)


def tiny_model(folder: Path) -> Path:
    """A model whose answers differ, some of which end."""
    return make_base(folder, seed=4)
