"""What is chosen when nothing is said, and what cannot be asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from minigpt.config import PRESETS, ModelConfig
from minigpt.errors import ConfigError, DataError
from minigpt.model.size import parameters, training_bytes
from minigpt.training.plan import Machine, Plan, Request, choose_model, make_plan, vocabulary_size

CPU = Machine(flops=1e11, free_memory=20 << 30, compute_dtype="float32", default_minutes=3.0, device_type="cpu")
GPU = Machine(flops=2e14, free_memory=80 << 30, compute_dtype="bfloat16", default_minutes=10.0, device_type="cuda")


def plan_of(request: Request, tokens: int, machine: Machine = CPU, speed: float = 10_000.0) -> Plan:
    model, why = choose_model(request, 1024, tokens, machine)
    return make_plan(
        request,
        model=model,
        model_why=why,
        train_tokens=tokens,
        machine=machine,
        measure=lambda shape, rows, context: speed,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("budget", [{}, {"minutes": 0.01}, {"steps": 1}, {"epochs": 0.5}, {"tokens": 10**12}])
def test_the_vocabulary_grows_with_the_text_and_stays_in_range(budget: dict[str, Any], device: str) -> None:
    sizes = [vocabulary_size(Request(**budget), size, device) for size in (0, 1, 300, 10**4, 10**6, 10**9, 10**13)]
    assert sizes == sorted(sizes)
    assert all(512 <= size <= 65_536 and size & (size - 1) == 0 for size in sizes)


def test_a_short_run_has_a_small_vocabulary() -> None:
    short, long = (vocabulary_size(Request(minutes=minutes), 10**9, "cpu") for minutes in (0.1, 1000.0))
    assert short < long


@pytest.mark.parametrize(
    "budget", [{}, {"minutes": 0.1}, {"minutes": 600.0}, {"steps": 100}, {"epochs": 3.0}, {"tokens": 10**6}]
)
@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("tokens", [150, 5_000, 10**6, 10**10])
def test_every_corpus_and_budget_has_a_plan(tokens: int, machine: Machine, budget: dict[str, Any]) -> None:
    plan = plan_of(Request(**budget), tokens, machine)
    train = plan.train
    assert train.context == plan.model.max_position_embeddings <= tokens
    assert 1 <= train.micro_batch_size <= train.batch_size
    assert train.batch_size * train.context <= tokens
    assert 1 <= train.eval_every <= train.total_steps
    assert 0 < train.learning_rate < 0.1
    assert train.warmup_steps <= max(1, train.total_steps)
    assert plan.validation_tokens >= 8 * train.context
    assert plan.model.vocab_size == 1024
    assert (plan.seconds is None) == bool(set(budget) & {"steps", "epochs", "tokens"})
    assert all(plan.why.values())


def test_a_budget_is_kept() -> None:
    assert plan_of(Request(steps=123), 10**6).train.total_steps == 123
    plan = plan_of(Request(epochs=2.0), 10**6)
    seen = plan.train.total_steps * plan.train.batch_size * plan.train.context
    assert seen == pytest.approx(2e6, rel=0.02)
    plan = plan_of(Request(tokens=5_000_000), 10**6)
    seen = plan.train.total_steps * plan.train.batch_size * plan.train.context
    assert seen == pytest.approx(5e6, rel=0.02)
    plan = plan_of(Request(minutes=2.0), 10**6, speed=7_000.0)
    assert plan.seconds == 120.0
    seen = plan.train.total_steps * plan.train.batch_size * plan.train.context
    assert 0.8 * 120 * 7_000 < seen < 120 * 7_000, "some time is left for evaluation"
    assert plan_of(Request(), 10**6).seconds == 180.0
    assert plan_of(Request(), 10**6, GPU).seconds == 600.0


def test_more_budget_and_more_text_make_larger_models() -> None:
    sizes = [parameters(plan_of(Request(minutes=m), 10**9).model) for m in (0.1, 1.0, 10.0, 1000.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    small, large = (parameters(plan_of(Request(minutes=1000.0), n).model) for n in (20_000, 10**9))
    assert small < large
    assert parameters(plan_of(Request(), 10**9, CPU).model) < parameters(plan_of(Request(), 10**9, GPU).model)


def test_a_small_model_is_chosen_until_a_larger_one_sees_more_tokens_than_it_has_parameters() -> None:
    nano, micro = (parameters(plan_of(Request(preset=name, steps=1), 10**7).model) for name in ("nano", "micro"))  # type: ignore[arg-type]
    chosen = [parameters(plan_of(Request(tokens=int(share * micro)), 10**7).model) for share in (1.4, 1.6)]
    assert chosen == [nano, micro]


def test_reasons_are_printed() -> None:
    plan = plan_of(Request(), 60_000)
    assert plan.why["model"].startswith("preset ")
    assert plan.why["model"].endswith(": chosen for 60k tokens and 3 minutes")
    assert plan.why["plan"].startswith(f"3 minutes = about {plan.train.total_steps:,} steps of ")
    assert plan.why["plan"].endswith(
        "; the corpus is small: the best model on held-out text is kept; give more with --minutes"
    )
    why = plan_of(Request(steps=10, preset="micro"), 10**7).why
    assert why["model"] == "preset micro, as asked"
    assert why["plan"].startswith("10 steps of ")
    assert "give more" not in why["plan"]
    assert plan_of(Request(epochs=1.0), 10**6).why["plan"].startswith("1 epoch = ")
    assert plan_of(Request(epochs=2.0), 10**6).why["plan"].startswith("2 epochs = ")
    assert plan_of(Request(minutes=1.0), 10**6).why["plan"].startswith("1 minute = about ")


def test_what_is_said_is_taken() -> None:
    request = Request(
        preset="tiny", architecture="gpt2", context=64, seed=3, steps=50,
        model={"hidden_size": 96, "head_dim": 16, "dropout": 0.1},
        train={"batch_size": 6, "micro_batch_size": 2, "learning_rate": 0.5, "warmup_steps": 7, "eval_every": 9},
    )  # fmt: skip
    plan = plan_of(request, 10**6)
    model, train = plan.model, plan.train
    assert (model.architecture, model.max_position_embeddings, model.hidden_size, model.dropout) == (
        "gpt2",
        64,
        96,
        0.1,
    )
    assert (train.batch_size, train.micro_batch_size, train.learning_rate, train.warmup_steps) == (6, 2, 0.5, 7)
    assert (train.eval_every, train.seed, train.context, train.total_steps) == (9, 3, 64, 50)
    assert plan_of(Request(steps=5, context=64, train={"context": 32}), 10**6).train.context == 32


def test_presets_that_settings_do_not_fit_are_left_out() -> None:
    plan = plan_of(Request(minutes=0.1, model={"num_key_value_heads": 3}), 10**6)  # nano and micro have 4 heads
    assert plan.model.num_attention_heads % 3 == 0
    with pytest.raises(ConfigError, match=r"^model: num_attention_heads 4 is no multiple of num_key_value_heads 3$"):
        Request(preset="nano", model={"num_key_value_heads": 3})


def test_memory_halves_the_micro_batch_and_keeps_the_batch() -> None:
    request = Request(preset="small", steps=100, train={"batch_size": 64})
    roomy = plan_of(request, 10**7)
    assert roomy.train.micro_batch_size == 64
    model = roomy.model
    for rows in (1, 4, 16):
        need = training_bytes(model, rows, model.max_position_embeddings, "float32", "adamw")
        tight = replace(CPU, free_memory=int(need / 0.7) + (1 << 20))
        train = plan_of(request, 10**7, tight).train
        assert (train.batch_size, train.micro_batch_size) == (64, rows)
    # A GPU has the last word itself; a CPU would start to swap.
    assert plan_of(request, 10**7, replace(GPU, free_memory=1)).train.micro_batch_size == 1
    with pytest.raises(ConfigError, match=r"takes about 0\.\d GB, .*choose a smaller --preset or --context"):
        plan_of(request, 10**7, replace(CPU, free_memory=1))


def test_a_model_that_memory_cannot_hold_is_not_chosen() -> None:
    plan = plan_of(Request(minutes=1e6), 10**11, replace(GPU, free_memory=1 << 30))
    model = plan.model
    assert training_bytes(model, 1, model.max_position_embeddings, "bfloat16", "adamw", device="cuda") < 0.7 * (1 << 30)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"steps": 5, "minutes": 1.0}, "--minutes and --steps are both given; a run has one budget"),
        ({"epochs": 5.0, "tokens": 1}, "--epochs and --tokens are both given; a run has one budget"),
        ({"minutes": math.nan}, "minutes is nan; it must be a number above 0 and below 1e+15"),
        ({"minutes": -1.0}, "minutes is -1.0; it must be a number above 0 and below 1e+15"),
        ({"epochs": 0.0}, "epochs is 0.0; it must be a number above 0 and below 1e+15"),
        ({"epochs": math.inf}, "epochs is inf; it must be a number above 0 and below 1e+15"),
        ({"tokens": 10**400}, None),
        ({"steps": 0}, "steps is 0; it must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps is 1.5; it must be a whole number of at least 1"),
        ({"context": 0}, "context is 0; it must be a whole number of at least 1"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 9223372036854775807"),
        ({"seed": 2**63}, None),
        ({"vocab_size": 50}, None),
        ({"vocab_size": 10**9}, None),
        ({"preset": "giant"}, None),
        ({"architecture": "rnn"}, None),
        ({"train": {"learning_rate": math.nan}}, "train: learning_rate is nan; it must be in [0, 10]"),
        ({"train": {"batch_size": "many"}}, "train: batch_size is 'many'; it must be a whole number of at least 1"),
        ({"train": {"batch_size": 0}}, "train: batch_size is 0; it must be a whole number of at least 1"),
        ({"train": {"batch_size": 2, "micro_batch_size": 3}}, "train: micro_batch_size 3 is larger than batch_size 2"),
        ({"train": {"steps": 3}}, None),
        ({"model": {"layers": 3}}, None),
        ({"model": {"hidden_size": 0}}, "model: hidden_size is 0; it must be a whole number of at least 1"),
        ({"model": {"dropout": 1.0}}, None),
    ],
)
def test_the_impossible_is_refused_before_any_text_is_read(request_: dict[str, Any], message: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        Request(**request_)
    assert "\n" not in str(raised.value)
    if message is not None:
        assert str(raised.value) == message


def test_a_context_longer_than_the_text_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"^the training text has 100 tokens, fewer than one window of 128 \+ 1; give"):
        plan_of(Request(), 100)
    assert plan_of(Request(context=50), 100).train.batch_size == 1
    with pytest.raises(ConfigError, match=r"^train.context is 64, more than the model's context of 32; give a larger"):
        plan_of(Request(context=32, train={"context": 64}), 1000)


def test_the_names_of_presets_are_in_order_of_size() -> None:
    sizes = [parameters(choose_model(Request(preset=name), 4096, 1, CPU)[0]) for name in PRESETS]  # type: ignore[arg-type]
    assert sizes == sorted(sizes)
    assert isinstance(choose_model(Request(), 4096, 1, CPU)[0], ModelConfig)


def test_two_thirds_of_a_run_on_a_cpu_read_short_windows() -> None:
    def short(machine: Machine, preset: str, architecture: Any = "qwen3", **train: Any) -> int:
        request = Request(preset=preset, architecture=architecture, steps=300, train=train)  # type: ignore[arg-type]
        return plan_of(request, 10**7, machine).train.short_steps

    assert short(CPU, "micro") == 200
    assert short(CPU, "micro", short_steps=7) == 7
    assert short(CPU, "micro", context=64) == 0
    assert short(CPU, "micro", context=257 - 2) == 0, "an odd window has no half"
    assert short(CPU, "nano") == 200
    assert short(CPU, "micro", "gpt2") == 0, "which learns each position by itself"
    assert short(GPU, "micro") == 0


def test_only_runs_that_earn_it_back_are_compiled() -> None:
    def compiled(machine: Machine, **budget: Any) -> bool:
        return plan_of(Request(**budget), 10**7, machine).train.compile

    assert not compiled(CPU, minutes=600.0), "which has code of its own"
    assert compiled(GPU, minutes=2.0)
    assert compiled(GPU, steps=300)
    assert not compiled(GPU, steps=299)
