"""Preferences against `trl` on the same log-probabilities, and DPO on real pairs."""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import CPU, minigpt
from torch import Tensor

from minigpt.alignment.losses import dpo_loss, ipo_loss
from minigpt.checkpoint.adapter import fingerprint
from minigpt.training.run_folder import RunFolder

pytestmark = pytest.mark.slow

P, T = 5, 9


@pytest.fixture(scope="module")
def answers() -> dict[str, Tensor]:
    """Log-probabilities of each token of some answers, chosen ones first, and of each answer under a reference."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, T, (2 * P,), generator=generator)
    mask = torch.arange(T) < lengths.unsqueeze(1)
    log_probs = -3 * torch.rand(2 * P, T, generator=generator) * mask
    reference = log_probs.sum(1) + torch.randn(2 * P, generator=generator)
    return {"log_probs": log_probs, "mask": mask, "reference": reference}


def trainer_of(kind: type, **more: Any) -> Any:
    """A trainer of `trl` without its models: only what its loss reads."""
    trainer = object.__new__(kind)
    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    settings: dict[str, Any] = {
        "model": SimpleNamespace(training=False), "accelerator": same, "aux_loss_enabled": False, "ld_alpha": None,
        "precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "use_weighting": False,
        "_metrics": {"eval": defaultdict(list)}, "_total_train_tokens": 0,
    }  # fmt: skip
    trainer.__dict__.update(settings | more)
    return trainer


def theirs(answers: dict[str, Tensor], loss_type: str, beta: float) -> float:
    """What `trl` makes of the same log-probabilities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import DPOTrainer

    log_probs, mask = answers["log_probs"], answers["mask"]
    outputs = SimpleNamespace(
        log_probs=log_probs, entropy=torch.zeros_like(log_probs), mean_logits=torch.zeros_like(log_probs),
        is_top1=mask,
    )  # fmt: skip
    first = torch.zeros(2 * P, 1, dtype=torch.bool)  # the first token of a row is never predicted
    inputs = {
        "input_ids": torch.zeros(2 * P, T + 1, dtype=torch.long), "attention_mask": torch.ones(2 * P, T + 1),
        "completion_mask": torch.cat((first, mask), 1).long(),
        "ref_chosen_logps": answers["reference"][:P], "ref_rejected_logps": answers["reference"][P:],
    }  # fmt: skip
    trainer = trainer_of(DPOTrainer, loss_types=[loss_type], loss_weights=[1.0], beta=beta, label_smoothing=0.0)
    return float(trainer._compute_loss(lambda **_: outputs, inputs, return_outputs=False))


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_is_what_trl_computes(answers: dict[str, Tensor], beta: float) -> None:
    sums = answers["log_probs"].sum(1)
    ours = dpo_loss(sums[:P], sums[P:], answers["reference"][:P], answers["reference"][P:], beta=beta)
    assert float(ours.mean()) == pytest.approx(theirs(answers, "sigmoid", beta), rel=1e-6)


def test_ipo_is_what_trl_computes_where_it_is_given_means(answers: dict[str, Tensor]) -> None:
    lengths = answers["mask"].sum(1)
    sums, before = answers["log_probs"].sum(1) / lengths, answers["reference"] / lengths
    ours = ipo_loss(sums[:P], sums[P:], before[:P], before[P:], beta=0.3)
    assert float(ours.mean()) == pytest.approx(theirs(answers, "ipo", 0.3), rel=1e-5)


def test_dpo_tells_held_out_pairs_apart_in_a_minute(tmp_path: Path, shared: Path) -> None:
    data = shared / "data" / "preference" / "instruction-data-with-preference.json"
    base = tmp_path / "base"
    assert minigpt("train", "-o", base, "--minutes", "0.5", "--seed", "1", *CPU).status == 0
    before = fingerprint(base)
    options = ("--steps", "30", "--seed", "0", *CPU)
    result = minigpt("align", data, "-m", base, "-o", tmp_path / "aligned", *options)
    assert result.status == 0, result.err
    first = next(row for row in RunFolder(tmp_path / "aligned").read_metrics() if "loss" in row)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)
    record = json.loads((tmp_path / "aligned" / "minigpt.json").read_text(encoding="utf-8"))
    assert record["preferences"]["held_out"] >= 100
    assert record["result"]["held_out_accuracy"] >= 0.75
    assert fingerprint(base) == before
