"""Short measurements: they shrink until they fit, and leave nothing behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import MODEL
from torch import Tensor

from minigpt.config import TrainConfig
from minigpt.errors import TrainingError
from minigpt.model.transformer import GPT
from minigpt.training import probe
from minigpt.training.batches import Batch
from minigpt.training.objectives import NextToken

CPU = torch.device("cpu")


def hold_at_most(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[tuple[int, int]]:
    """Let memory hold so many rows; returns the shapes that are tried."""
    tried: list[tuple[int, int]] = []
    real = NextToken.loss_sum

    def loss_sum(self: NextToken, model: GPT, batch: Batch) -> Tensor:
        tried.append((batch.tokens.shape[0], batch.tokens.shape[1]))
        if len(batch.tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, model, batch)

    monkeypatch.setattr(NextToken, "loss_sum", loss_sum)
    return tried


def test_out_of_memory_halves_the_rows_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = hold_at_most(monkeypatch, 3)
    assert probe.training_speed(MODEL, 13, CPU, "float32", seconds=0.0) > 0
    assert list(dict.fromkeys(rows for rows, _ in tried)) == [13, 6, 3]


def test_a_row_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_at_most(monkeypatch, 0)
    with pytest.raises(TrainingError, match=r"^out of memory with a single row; choose a smaller --context or"):
        probe.training_speed(MODEL, 4, CPU, "float32", seconds=0.0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_measured_is_what_will_be_trained(monkeypatch: pytest.MonkeyPatch, optimizer: Any) -> None:
    tried, made = hold_at_most(monkeypatch, 9), []
    real = probe.make_optimizers

    def make(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
        made.append(config.optimizer)
        return real(model, config)

    monkeypatch.setattr(probe, "make_optimizers", make)
    probe.training_speed(MODEL, 2, CPU, "float32", 0.0, context=5, optimizer=optimizer)
    assert (set(tried), made) == ({(2, 5)}, [optimizer])
    probe.training_speed(MODEL, 2, CPU, "float32", 0.0)
    assert (tried[-1], made[-1]) == ((2, MODEL.max_position_embeddings), "muon")


def test_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_at_most(monkeypatch, 2)
    models: list[weakref.ref[GPT]] = []
    real = probe.make_optimizers

    def make(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
        assert all(other() is None for other in models), "the model of the failed try is gone before the next"
        models.append(weakref.ref(model))
        return real(model, config)

    monkeypatch.setattr(probe, "make_optimizers", make)
    before = torch.get_rng_state()
    gc.disable()  # what waits for the collector of cycles still fills a GPU
    try:
        probe.training_speed(MODEL, 4, CPU, "float32", 0.0)
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()
    assert torch.equal(torch.get_rng_state(), before)


PEAK = """
import torch
from minigpt.training import probe
block = torch.ones(200 << 20, dtype=torch.uint8)
del block  # so large a block goes back to the system
print(probe.peak_memory(torch.device("cpu")) - probe.used_memory())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is not known here")
def test_the_peak_stays_when_memory_is_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 150 << 20


@pytest.mark.parametrize(
    ("product", "step", "expected"), [(0.1, 2.0, "bfloat16"), (0.1, 0.9, "float32"), (0.8, 2.0, "float32")]
)
def test_bfloat16_must_be_faster_in_products_and_in_steps(
    monkeypatch: pytest.MonkeyPatch, product: float, step: float, expected: str
) -> None:
    monkeypatch.setattr(probe, "_product_seconds", lambda dtype: product if dtype == torch.bfloat16 else 1.0)
    monkeypatch.setattr(
        probe, "training_speed", lambda model, rows, device, dtype, seconds: step if dtype == "bfloat16" else 1.0
    )
    assert probe.fast_dtype(CPU) == expected
