"""The program's own training step: its `Trainer` on an endless corpus, with saves and metrics as in any run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from protocol import Measure, rate, serve

from minigpt.config import ModelConfig, TrainConfig
from minigpt.model.transformer import GPT
from minigpt.training.batches import CorpusBatches
from minigpt.training.objectives import NextToken
from minigpt.training.probe import fast_dtype
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import StepDone, Trainer

ENDLESS = 10**6


class Tokens:
    """A corpus of random tokens in memory."""

    def __init__(self, vocab: int) -> None:
        self.ids = np.random.default_rng(0).integers(vocab, size=10**6)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.ids[start:stop]


def model_config(architecture: str, shape: dict[str, int]) -> ModelConfig:
    heads, gpt2 = shape["heads"], architecture == "gpt2"
    return ModelConfig(
        architecture=architecture, vocab_size=shape["vocab"], hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"], num_attention_heads=heads,
        num_key_value_heads=heads if gpt2 else shape["kv_heads"], head_dim=shape["hidden"] // heads,
        intermediate_size=4 * shape["hidden"] if gpt2 else shape["wide"],
        max_position_embeddings=shape["context"],
    )  # fmt: skip


def trainer(architecture: str, optimizer: str, shape: dict[str, int]) -> Measure:
    model = GPT(model_config(architecture, shape))
    model.initialize(torch.Generator().manual_seed(0))
    batch, context = shape["batch"], shape["context"]
    config = TrainConfig(
        total_steps=ENDLESS, batch_size=batch, micro_batch_size=batch, context=context, seed=0, learning_rate=1e-3,
        warmup_steps=0, eval_every=ENDLESS, compute_dtype=fast_dtype(torch.device("cpu")), optimizer=optimizer,
    )  # fmt: skip
    folder = tempfile.TemporaryDirectory()  # lives as long as the measure that holds it
    batches = CorpusBatches(Tokens(shape["vocab"]), context=context, batch_size=batch, seed=0)
    events = Trainer(model, NextToken(), batches, config, RunFolder(Path(folder.name)), validate=None).run()

    def step() -> int:
        assert folder
        while not isinstance(next(events), StepDone):
            pass
        return batch * context

    step()
    return lambda seconds: rate(step, seconds)


def load(threads: int, architecture: str, optimizer: str, sizes: dict[str, dict[str, int]]) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    return {name: trainer(architecture, optimizer, shape) for name, shape in sizes.items()}


if __name__ == "__main__":
    serve(load)
