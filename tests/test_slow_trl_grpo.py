"""GRPO's loss, gradient and clipped share against `trl` on the same log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from minigpt.alignment.advantages import (
    Normalisation,
    clipped_surrogate,
    divisor,
    group_advantages,
    kl_k3,
    token_weights,
)

pytestmark = pytest.mark.slow
KINDS: dict[Normalisation, str] = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
LOW, HIGH, KL, MOST = 0.2, 0.28, 0.04, 9


def made(seed: int) -> dict[str, Tensor]:
    """Log-probabilities of eight answers of 1 to 7 tokens, in two groups; 7 places each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 1, 3, 5, 2, 7, 4, 6])
    old = -3 * torch.rand(8, 7, generator=generator)
    new, reference = (old + 0.4 * torch.randn(8, 7, generator=generator) for _ in range(2))
    rewards = torch.randn(2, 4, generator=generator)
    return {
        "old": old, "new": new, "reference": reference, "mask": torch.arange(7) < lengths.unsqueeze(1),
        "advantages": group_advantages(rewards, standardise=True).flatten(),
    }  # fmt: skip


def theirs(found: dict[str, Tensor], kind: str, new: Tensor) -> tuple[Tensor, float]:
    """The loss of `trl`'s trainer, which is given log-probabilities in place of a model."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")
    trainer: Any = MagicMock()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (new, torch.zeros_like(new), None)
    trainer.configure_mock(
        loss_type=kind, beta=KL, epsilon_low=LOW, epsilon_high=HIGH, max_completion_length=MOST,
        importance_sampling_level="token", top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    trainer.args.configure_mock(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.model.training = True
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = lambda x: x
    trainer.accelerator.reduce = lambda x, reduction: x
    ids = torch.zeros(8, 7, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :2], "prompt_mask": torch.ones(8, 2, dtype=torch.long), "completion_ids": ids,
        "completion_mask": found["mask"].long(), "advantages": found["advantages"],
        "old_per_token_logps": found["old"], "ref_per_token_logps": found["reference"],
        "num_items_in_batch": found["mask"].sum(),
    }  # fmt: skip
    loss = trainer_module.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, trainer._metrics["train"]["clip_ratio/region_mean"][0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("normalisation", KINDS)
def test_the_loss_its_gradient_and_the_clipped_share_are_those_of_trl(normalisation: Normalisation, seed: int) -> None:
    found = made(seed)
    mask, answers = found["mask"], 8
    ours = found["new"].clone().requires_grad_()
    each, clipped = clipped_surrogate(ours, found["old"], found["advantages"].unsqueeze(1), LOW, HIGH)
    each = each + KL * kl_k3(ours, found["reference"])
    divided = divisor(answers, mask.sum().item() / answers, normalisation, MOST)
    loss = (each * token_weights(mask, normalisation)).sum() / divided
    loss.backward()
    other = found["new"].clone().requires_grad_()
    expected, share = theirs(found, KINDS[normalisation], other)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, other.grad)
    assert (clipped & mask).sum().item() / mask.sum().item() == pytest.approx(share)
    assert share > 0, "something is clipped"
