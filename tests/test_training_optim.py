"""Parameter groups, the two optimizers, and the learning rate over a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from variants import VARIANTS, make_model

from minigpt.config import TrainConfig
from minigpt.training.optim import (
    learning_rate_factor,
    make_optimizers,
    optimizer_tensors,
    parameter_groups,
    restore_optimizers,
)

CONFIG = TrainConfig(
    total_steps=10, batch_size=1, micro_batch_size=1, context=8, seed=0, learning_rate=0.01, warmup_steps=0
)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_parameter_is_in_one_group_and_only_matrices_decay(variant: str, optimizer: str) -> None:
    model = make_model(VARIANTS[variant])
    optimizers = make_optimizers(model, replace(CONFIG, optimizer=optimizer, weight_decay=0.3))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decays = [
        (names[id(weight)], group["weight_decay"])
        for each in optimizers
        for group in each.param_groups
        for weight in group["params"]
    ]
    assert len(decays) == len(dict(decays)) == len(names)
    weights = dict(model.named_parameters())
    for name, decay in decays:
        in_block = ".layers." in name and weights[name].dim() == 2
        assert decay == (0.3 if in_block else 0.0), name
        assert weights[name].dim() > 1 or decay == 0.0, name


def test_a_tied_weight_is_counted_once_as_an_embedding() -> None:
    model = make_model(VARIANTS["qwen3"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    matrices, rest = parameter_groups(model)
    assert [name for name in [*matrices, *rest] if "embed_tokens" in name or "lm_head" in name] == [
        "model.embed_tokens.weight"
    ]
    assert "model.embed_tokens.weight" in rest
    assert "lm_head.weight" in parameter_groups(make_model(VARIANTS["qwen3-untied"]))[1]


def factors(total: int, warmup: int, schedule: str = "cosine", final: float = 0.1) -> list[float]:
    return [
        learning_rate_factor(step, warmup=warmup, total=total, schedule=schedule, final=final)  # type: ignore[arg-type]
        for step in range(total)
    ]


def test_warm_up_begins_above_zero_and_reaches_the_peak() -> None:
    assert factors(20, 4)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors(20, 4, "linear")[:4] == [0.25, 0.5, 0.75, 1.0]


def test_decay_follows_the_formula_and_ends_at_its_share() -> None:
    cosine = factors(24, 4)
    for step in range(4, 24):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 19)) / 2
        assert cosine[step] == pytest.approx(expected, abs=1e-12)
    linear = factors(24, 4, "linear", final=0.2)
    assert [linear[i] - linear[i + 1] for i in range(4, 23)] == pytest.approx([0.8 / 19] * 19)
    assert cosine[-1] == pytest.approx(0.1)
    assert linear[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3), (3, 10), (5, 0)])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_short_runs_have_a_sensible_rate(total: int, warmup: int, schedule: str) -> None:
    assert all(0.0 < factor <= 1.0 for factor in factors(total, warmup, schedule))


@pytest.mark.parametrize("harm", ["lacks one", "one more", "another shape"])
def test_states_of_something_else_are_refused(harm: str) -> None:
    model = make_model(VARIANTS["qwen3"])
    optimizers = make_optimizers(model, CONFIG)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    for each in optimizers:
        each.step()
    tensors = optimizer_tensors(model, optimizers)
    name = "optimizer.model.embed_tokens.weight.exp_avg"
    if harm == "lacks one":
        del tensors[name]
    else:
        tensors[name if harm == "another shape" else f"{name}_more"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"is missing or unknown|has another shape"):
        restore_optimizers(model, make_optimizers(model, CONFIG), tensors)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_survive_being_flattened(optimizer: str) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    one, other = make_model(VARIANTS["qwen3"]), make_model(VARIANTS["qwen3"])
    ones, others = make_optimizers(one, config), make_optimizers(other, config)

    def step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        for each in optimizers:
            each.step()

    step(one, ones, 1)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(one, ones).items()}
    other.load_state_dict(one.state_dict())
    restore_optimizers(other, others, tensors | {"model.x": torch.zeros(1)})
    step(one, ones, 2)
    step(other, others, 2)
    for (name, weight), again in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, again), name
