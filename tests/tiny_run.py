"""A training run small enough to take hundreds of steps a second, for tests of the loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from variants import CONTEXT, VARIANTS, VOCAB

from minigpt.checkpoint.files import read_tensors
from minigpt.config import ModelConfig, TrainConfig
from minigpt.evaluation.bits import Score, score_tokens
from minigpt.model.transformer import GPT
from minigpt.training.batches import CorpusBatches
from minigpt.training.distributed import ALONE
from minigpt.training.objectives import NextToken
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Event, Trainer

MODEL = VARIANTS["qwen3"]
TRAIN = TrainConfig(
    total_steps=12, batch_size=4, micro_batch_size=4, context=CONTEXT, seed=5, learning_rate=0.01, warmup_steps=3,
    eval_every=4,
)  # fmt: skip
TIMINGS = ("tokens_per_second", "elapsed", "waited")


class Tokens:
    """Token ids that can be learned: each is mostly the one before it plus three."""

    def __init__(self, length: int = 700, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        steps = np.where(generator.random(length) < 0.8, 3, generator.integers(0, VOCAB, length))
        self.ids = np.cumsum(steps) % VOCAB

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.ids[start:stop].astype(np.int64)


HELD_OUT = Tokens(150, seed=1)


def validate(model: GPT) -> Score:
    return score_tokens(model, HELD_OUT.read, len(HELD_OUT), np.full(VOCAB, 2))


def make_trainer(
    folder: Path, config: TrainConfig = TRAIN, model: ModelConfig = MODEL, *, tokens: Tokens | None = None, **more: Any
) -> Trainer:
    """A trainer with a fresh model, as a run begins with."""
    gpt = GPT(model)
    gpt.initialize(torch.Generator().manual_seed(config.seed))
    source = CorpusBatches(tokens or Tokens(), context=config.context, batch_size=config.batch_size, seed=config.seed)
    where = RunFolder(folder, writes=more.get("ranks", ALONE).first)
    return Trainer(gpt, NextToken(), source, config, where, **{"validate": validate, **more})


def run(trainer: Trainer, stop_at: int | None = None) -> list[Event]:
    """Train to the end, or until it is asked to stop after a step."""
    return list(trainer.run(lambda: stop_at is not None and trainer.progress.step >= stop_at))


def resumed(
    folder: Path, config: TrainConfig = TRAIN, model: ModelConfig = MODEL, *, moved: bool = False, **more: Any
) -> Trainer:
    """A trainer that takes up what was saved, in a process that has drawn other random numbers meanwhile.

    Unless it has `moved` to another number of processes, nothing differs.
    """
    trainer = make_trainer(folder, replace(config, seed=config.seed), model, **more)
    torch.manual_seed(999)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(0.5)
    state = RunFolder(folder).load_state()
    assert state is not None
    assert bool(trainer.restore(*state)) == moved
    return trainer


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what the clock says."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that resuming reads, without what the clock says."""
    tensors, metadata = read_tensors(folder / "last" / "state.safetensors")
    record = json.loads(metadata["record"])
    record["progress"].pop("elapsed")
    return tensors, record


def assert_same(one: Path, other: Path) -> None:
    """Two runs are equal bit for bit: weights, optimizers, random states, best model, metrics."""
    tensors, record = state(one)
    tensors_again, record_again = state(other)
    assert record == record_again
    assert tensors.keys() == tensors_again.keys()
    for name in tensors:
        assert torch.equal(tensors[name], tensors_again[name]), name
    assert metrics(one) == metrics(other)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def steps_of(events: Iterator[Event] | list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]
