"""The loop: what a step is, what is clipped, what is saved, and what ends a run."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import MODEL, TRAIN, assert_same, make_trainer, metrics, resumed, run, state, steps_of, validate
from torch import Tensor
from variants import make_model, random_tokens

from minigpt.checkpoint.folder import load_weights
from minigpt.config import TrainConfig
from minigpt.errors import TrainingError
from minigpt.evaluation.bits import Score
from minigpt.model.kernels import Kernels, run_block
from minigpt.model.loss import IGNORED, token_losses
from minigpt.model.transformer import GPT
from minigpt.training.batches import Batch
from minigpt.training.objectives import NextToken
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Evaluated, StepDone, Trainer, Warned


class FixedLosses:
    """An objective whose loss at each target is what stands in `tokens`, whatever the model."""

    def weight(self, batch: Batch) -> float:
        return float((batch.targets != IGNORED).sum())

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        nothing = sum((weight.sum() * 0.0 for weight in model.parameters()), torch.zeros(()))
        return nothing + (batch.tokens * (batch.targets != IGNORED)).sum()

    def figures(self) -> dict[str, Tensor]:
        return {"even": torch.tensor(0.5), "gone": torch.tensor(math.nan)}


class OneBatch:
    """The same batch at every step."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def at(self, step: int) -> Batch:
        return self.batch


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_loss_is_per_token_however_the_step_is_cut(tmp_path: Path, rows: int) -> None:
    trainer = make_trainer(tmp_path, replace(TRAIN, total_steps=1, batch_size=3, micro_batch_size=rows), validate=None)
    losses = torch.tensor([[2.0] * 5, [2.0] * 5, [5.0, 5.0, 7.0, 7.0, 7.0]])
    targets = torch.zeros(3, 5, dtype=torch.long)
    targets[2, 2:] = IGNORED
    trainer.objective, trainer.batches = FixedLosses(), OneBatch(Batch(losses, targets))
    (step,) = steps_of(run(trainer), StepDone)
    assert step.loss == pytest.approx(2.5, rel=1e-6)
    assert step.figures["even"] == 0.5
    (row,) = metrics(tmp_path)
    assert (row["even"], row["gone"]) == (0.5, None), "JSON has no NaN"


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_gradients_do_not_depend_on_the_cut(tmp_path: Path, rows: int) -> None:
    tokens, targets = random_tokens(6, 16, seed=2), random_tokens(6, 16, seed=3)
    targets[0, 2:] = IGNORED
    targets[4, :13] = IGNORED
    batch = Batch(tokens, targets)
    trainer = make_trainer(tmp_path, replace(TRAIN, batch_size=6, micro_batch_size=rows))
    model = make_model(MODEL)
    trainer.model.load_state_dict(model.state_dict())
    loss = trainer._accumulate(batch)

    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found = gradients(trainer)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        scale = weight.grad.abs().max()
        assert torch.allclose(found[name], weight.grad, rtol=0, atol=1e-5 * scale.item()), name


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_rate_counts_steps_and_not_micro_batches(tmp_path: Path, rows: int) -> None:
    config = replace(TRAIN, learning_rate=1.0, warmup_steps=4, total_steps=6, micro_batch_size=rows)
    rates = [event.learning_rate for event in steps_of(run(make_trainer(tmp_path, config)), StepDone)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert [row["learning_rate"] for row in metrics(tmp_path) if "loss" in row] == rates


def test_a_run_learns_and_tells_what_it_did(tmp_path: Path) -> None:
    config = replace(TRAIN, total_steps=60, eval_every=20, optimizer="muon")
    trainer = make_trainer(tmp_path, config)
    events = run(trainer)
    steps = steps_of(events, StepDone)
    assert [event.step for event in steps] == [*range(1, 61)]
    assert {event.total_steps for event in steps} == {60}
    assert steps[0].loss == pytest.approx(math.log(61), rel=0.1)
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert all(event.grad_norm > 0 and event.tokens_per_second > 0 for event in steps)
    assert [event.elapsed for event in steps] == sorted(event.elapsed for event in steps)
    assert [event.step for event in steps_of(events, Evaluated)] == [20, 40, 60]
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "bits_per_byte" in row] == [20, 40, 60]
    assert [row["loss"] for row in rows if "loss" in row] == [event.loss for event in steps]


def test_the_best_model_is_kept_and_not_the_last(tmp_path: Path) -> None:
    scores = iter([3.0, 1.0, 2.0])
    trainer = make_trainer(tmp_path, validate=lambda model: replace(validate(model), nats=next(scores)))
    seen: dict[int, dict[str, Tensor]] = {}
    for event in trainer.run():
        if isinstance(event, Evaluated):
            seen[event.step] = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    assert (trainer.progress.best_step, trainer.progress.step) == (8, 12)
    best = load_weights(tmp_path, MODEL).state_dict()
    assert all(torch.equal(best[name], seen[8][name]) for name in best)
    tensors, _ = state(tmp_path)
    assert torch.equal(tensors["model.model.embed_tokens.weight"], trainer.model.model.embed_tokens.weight)


def test_without_held_out_text_the_last_model_is_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, validate=None)
    assert not steps_of(run(trainer), Evaluated)
    kept = load_weights(tmp_path, MODEL).state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in trainer.model.state_dict().items())


def test_a_run_stopped_before_an_evaluation_leaves_a_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    run(trainer, stop_at=2)
    assert trainer.progress.step == 2
    load_weights(tmp_path, MODEL)


def test_gradients_are_clipped_as_a_whole(tmp_path: Path) -> None:
    config = replace(TRAIN, max_grad_norm=1e-3, optimizer="adamw")
    trainer = make_trainer(tmp_path, config)
    loss = trainer._accumulate(trainer.batches.at(0))
    before = gradients(trainer)
    _, norm, _ = trainer._clip(loss)
    expected = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in before.values()))
    assert norm == pytest.approx(expected, rel=1e-4)
    assert norm > 1e-2
    for name, grad in gradients(trainer).items():
        assert torch.allclose(grad, before[name] * (1e-3 / norm), rtol=1e-3, atol=1e-9), name


def test_small_gradients_are_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(TRAIN, max_grad_norm=1e6))
    loss = trainer._accumulate(trainer.batches.at(0))
    before = gradients(trainer)
    trainer._clip(loss)
    assert all(torch.equal(grad, before[name]) for name, grad in gradients(trainer).items())


class Broken(NextToken):
    """An objective that turns to something else at its n-th micro-batch, or at all of them."""

    def __init__(self, at: int | None, change: Callable[[Tensor], Tensor]) -> None:
        self.calls, self.at, self.change = 0, at, change

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        self.calls += 1
        loss = super().loss_sum(model, batch)
        return self.change(loss) if self.at in (None, self.calls) else loss


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_a_loss_that_is_no_number_ends_the_run_with_the_last_good_state(
    tmp_path: Path, value: float, word: str
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.objective = Broken(7, lambda loss: loss * value)
    seen: list[dict[str, Tensor]] = []
    steps = trainer.run(lambda: bool(seen.append(copy.deepcopy(trainer.model.state_dict()))))  # type: ignore[func-returns-value]
    with pytest.raises(TrainingError) as raised:
        list(steps)
    assert str(raised.value) == (
        f"the loss became {word} at step 7; the last good state is in {tmp_path / 'last'} (step 4); try a lower --lr"
    )
    assert len(seen) == 6
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, seen[-1][name]), "the bad step did not touch the weights"
    assert state(tmp_path)[1]["progress"]["step"] == 4
    assert len(steps_of(run(resumed(tmp_path)), StepDone)) == 8


def test_a_gradient_that_is_no_number_ends_the_run_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.objective = Broken(2, lambda loss: loss + (loss.detach() - loss).clamp(min=0.0).sqrt())  # infinite slope
    with pytest.raises(TrainingError, match=r"^the gradient became (NaN|infinite) at step 2; .* \(step 0\); "):
        run(trainer)
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


class OutOfMemory(NextToken):
    """An objective that holds no more than so many rows."""

    def __init__(self, most: int) -> None:
        self.most, self.rows = most, []  # type: ignore[var-annotated]

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        rows = len(batch.tokens)
        if rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.rows.append(rows)
        return super().loss_sum(model, batch)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(tmp_path: Path) -> None:
    trainer, calm = make_trainer(tmp_path / "one"), make_trainer(tmp_path / "two")
    trainer.objective = OutOfMemory(1)
    events, expected = run(trainer), run(calm)
    assert [event.message for event in steps_of(events, Warned)] == [
        "out of memory at a micro-batch of 4; went on with 2 (same effective batch)",
        "out of memory at a micro-batch of 2; went on with 1 (same effective batch)",
    ]
    assert set(trainer.objective.rows) == {1}
    losses, calm_losses = ([event.loss for event in steps_of(each, StepDone)] for each in (events, expected))
    assert losses == pytest.approx(calm_losses, rel=1e-4)
    assert state(tmp_path / "one")[1]["progress"]["micro_batch_size"] == 1, "a resumed run does not try again"


def test_a_compiler_that_fails_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Tensor:
        raise RuntimeError("no C compiler\nand a long story")

    monkeypatch.setattr("minigpt.training.trainer.compiled_kernels", lambda: Kernels(block=broken))
    events = run(make_trainer(tmp_path / "one", replace(TRAIN, compile=True)))
    plain = run(make_trainer(tmp_path / "two"))
    assert [event.message for event in steps_of(events, Warned)] == [
        "torch.compile failed (no C compiler); went on without it"
    ]
    assert [e.loss for e in steps_of(events, StepDone)] == [e.loss for e in steps_of(plain, StepDone)]


def test_an_error_after_the_first_step_is_not_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def breaks_later(*arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("a fault of ours")
        return run_block(*arguments)

    monkeypatch.setattr("minigpt.training.trainer.compiled_kernels", lambda: Kernels(block=breaks_later))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(make_trainer(tmp_path, replace(TRAIN, compile=True)))


def test_out_of_memory_with_one_row_is_one_line(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.objective = OutOfMemory(0)
    with pytest.raises(
        TrainingError, match=r"^out of memory with a single row; choose a smaller --context or a smaller model$"
    ):
        run(trainer)


@pytest.mark.parametrize(("dtype", "scaled"), [("float32", False), ("bfloat16", False), ("float16", True)])
def test_only_float16_is_scaled(tmp_path: Path, dtype: Any, scaled: bool) -> None:
    trainer = make_trainer(tmp_path, replace(TRAIN, compute_dtype=dtype))
    assert trainer.scaler.is_enabled() == scaled
    steps = steps_of(run(trainer), StepDone)
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in trainer.model.parameters())
    assert [event.grad_norm for event in steps] == pytest.approx([event.grad_norm for event in steps])
    reference = steps_of(run(make_trainer(tmp_path / "exact")), StepDone)
    assert steps[0].grad_norm == pytest.approx(reference[0].grad_norm, rel=0.05), "unscaled before it is measured"
    assert steps[-1].loss == pytest.approx(reference[-1].loss, rel=0.05)


def test_a_float16_step_that_overflows_is_skipped_and_seen(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(TRAIN, compute_dtype="float16", total_steps=2))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    before = copy.deepcopy(trainer.model.state_dict())
    assert [event.message for event in steps_of(run(trainer), Warned)] == [
        f"step {step}: the gradient overflowed float16; skipped" for step in (1, 2)
    ]
    assert trainer.scaler.get_scale() < 2.0**100
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert [row["grad_norm"] for row in rows if "loss" in row] == [None, None]


def test_a_step_that_overflows_in_one_optimizer_is_skipped_by_both(tmp_path: Path) -> None:
    config = replace(TRAIN, compute_dtype="float16", optimizer="muon", total_steps=4)
    trainer = make_trainer(tmp_path, config)
    embedding = trainer.model.model.embed_tokens.weight  # AdamW's: its slope overflows once it is scaled
    trainer.objective = Broken(3, lambda loss: loss + (embedding.sum() - embedding.sum().detach()) * 1e36)
    seen: list[dict[str, Tensor]] = []
    for event in trainer.run():
        if isinstance(event, StepDone):
            state = copy.deepcopy(trainer.model.state_dict())
            moments = [each["momentum_buffer"].clone() for each in trainer.optimizers[0].state.values()]
            seen.append(state | {str(index): moment for index, moment in enumerate(moments)})
    changed = [any(not torch.equal(now[name], then[name]) for name in now) for then, now in pairwise(seen)]
    assert changed == [True, False, True]
    assert trainer.scaler.get_scale() == 2.0**15
    assert [row["step"] for row in metrics(tmp_path) if row.get("grad_norm", 0) is None] == [3]


def test_a_gradient_that_no_scale_makes_finite_ends_a_float16_run_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(TRAIN, compute_dtype="float16"))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trainer.objective = Broken(None, lambda loss: loss + (loss.detach() - loss).clamp(min=0.0).sqrt())
    with pytest.raises(TrainingError, match=r"^the gradient became (NaN|infinite) at step 3; "):
        run(trainer)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_asks_the_device_for_numbers_once(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, replace(TRAIN, micro_batch_size=rows))
    asked: list[str] = []
    monkeypatch.setattr(trainer.objective, "weight", lambda batch: 64.0)
    for name in ("item", "tolist", "__float__", "__bool__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda tensor, name=name, read=read: asked.append(name) or read(tensor))
    trainer._clip(trainer._accumulate(trainer.batches.at(0)))
    assert asked == ["tolist"]


def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([math.nan, 2.0, math.inf])
    trainer = make_trainer(tmp_path, validate=lambda model: replace(validate(model), nats=next(scores)))
    assert len(steps_of(run(trainer), Evaluated)) == 3
    assert trainer.progress.best_step == 8
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    scored = [(row["held_out_loss"], row["bits_per_byte"]) for row in rows if "bits_per_byte" in row]
    assert [(loss is None, bits is None) for loss, bits in scored] == [(True, True), (False, False), (True, True)]


@pytest.mark.parametrize(("dtype", "cast"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_held_out_text_is_scored_in_the_type_of_training(tmp_path: Path, dtype: Any, cast: bool) -> None:
    seen = []

    def look(model: GPT) -> Score:
        seen.append(torch.is_autocast_enabled("cpu"))
        return validate(model)

    run(make_trainer(tmp_path, replace(TRAIN, compute_dtype=dtype), validate=look))
    assert seen == [cast] * 3


def test_metrics_are_on_the_disk_before_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, fsync, save, done = make_trainer(tmp_path), os.fsync, RunFolder.save_state, []

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        path = trainer.folder.metrics_path
        done.append(path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()) and len(path.read_bytes()))

    def check(folder: RunFolder, *state: Any) -> None:
        if trainer.progress.step:
            assert done[-1] == len(folder.metrics_path.read_bytes())
        save(folder, *state)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(RunFolder, "save_state", check)
    run(trainer)


def test_evaluation_leaves_training_alone(tmp_path: Path) -> None:
    model = replace(MODEL, dropout=0.2)
    often, never = replace(TRAIN, eval_every=1), replace(TRAIN, eval_every=12)
    one, two = make_trainer(tmp_path / "often", often, model), make_trainer(tmp_path / "never", never, model)
    for trainer in (one, two):
        torch.manual_seed(3)
        for event in trainer.run():
            if isinstance(event, Evaluated):
                assert trainer.model.training, "training mode comes back"
                assert validate(trainer.model) == event.score, "the same text scored twice"
    for weight, other in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_next_token_counts_and_sums_valid_targets() -> None:
    model, objective = make_model(MODEL), NextToken()
    tokens, targets = random_tokens(2, 8), random_tokens(2, 8, seed=9)
    targets[0, :5] = IGNORED
    batch = Batch(tokens, targets)
    assert objective.weight(batch) == 11
    hidden = model.model(tokens)
    expected = token_losses(hidden, model.lm_head.weight, targets).sum()
    assert objective.loss_sum(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_plan_in_minutes_is_corrected_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("minigpt.training.trainer.time.monotonic", lambda: clock[0])
    config = replace(TRAIN, total_steps=100, eval_every=10)
    trainer = make_trainer(tmp_path, config, seconds=60.0)
    totals = []
    for event in trainer.run():
        if isinstance(event, StepDone):
            clock[0] += 1.0  # a step takes a second, not the 0.6 that the plan thought
            totals.append(event.total_steps)
    assert totals[0] == 100
    assert set(totals[10:]) == {60}
    assert trainer.progress.step == 60
    assert state(tmp_path)[1]["progress"]["total_steps"] == 60


def test_corrections_of_the_clock_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("minigpt.training.trainer.time.monotonic", lambda: clock[0])
    config = replace(TRAIN, total_steps=100, eval_every=10)
    trainer = make_trainer(tmp_path, config, seconds=30.0)
    for event in trainer.run(lambda: trainer.progress.step == 15):
        clock[0] += isinstance(event, StepDone)
    assert (trainer.progress.total_steps, trainer.progress.elapsed) == (30, 15.0)
    clock[0] = 5000.0  # much later
    again = resumed(tmp_path, config, seconds=30.0)
    for event in again.run():
        clock[0] += isinstance(event, StepDone)
    assert again.progress.step == 30
    assert again.progress.elapsed == pytest.approx(30.0)


def test_a_state_is_saved_now_and_then_between_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("minigpt.training.trainer.time.monotonic", lambda: clock[0])
    saved = []
    trainer = make_trainer(tmp_path, replace(TRAIN, total_steps=9, eval_every=9))
    for event in trainer.run():
        clock[0] += 25.0
        if isinstance(event, StepDone):
            saved.append(state(tmp_path)[1]["progress"]["step"])
    assert saved == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_a_state_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    run(make_trainer(tmp_path))
    tensors, record = make_trainer(tmp_path).folder.load_state() or ({}, {})
    for broken in ({}, tensors | {"model.model.embed_tokens.weight": torch.zeros(3)}):
        with pytest.raises(TrainingError, match="does not fit this run's model; start again with --overwrite"):
            make_trainer(tmp_path).restore(broken, record)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "harm",
    [
        lambda tensors, record: tensors.pop("random.cpu"),
        lambda tensors, record: tensors.update({"random.cpu": torch.zeros(3)}),
        lambda tensors, record: tensors.update({"optimizer.model.layers.9.weight.exp_avg": torch.zeros(3)}),
        lambda tensors, record: tensors.pop(next(name for name in tensors if name.startswith("optimizer."))),
        lambda tensors, record: [tensors.pop(name) for name in list(tensors) if name.startswith("optimizer.")],
        lambda tensors, record: [
            tensors.update({name: torch.zeros(3)}) for name in list(tensors) if name.startswith("optimizer.")
        ],
        lambda tensors, record: record.pop("scaler"),
        lambda tensors, record: record.pop("progress"),
        lambda tensors, record: record["progress"].update({"mood": 3}),
        lambda tensors, record: record.pop("environment"),
    ],
    ids=range(10),
)
def test_a_state_that_lacks_something_is_one_line(tmp_path: Path, optimizer: Any, harm: Callable[..., object]) -> None:
    config = replace(TRAIN, optimizer=optimizer)
    run(make_trainer(tmp_path, config), stop_at=1)
    tensors, record = make_trainer(tmp_path, config).folder.load_state() or ({}, {})
    harm(tensors, record)
    with pytest.raises(TrainingError) as raised:
        make_trainer(tmp_path, config).restore(tensors, record)
    assert str(raised.value) == (
        f"{tmp_path / 'last' / 'state.safetensors'} does not fit this run's state; start again with --overwrite"
    )


def test_a_state_from_before_the_first_step_needs_no_optimizer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    next(iter(trainer.run()))  # the first thing a run does is to save itself
    assert not [name for name in state(tmp_path)[0] if name.startswith("optimizer.")]
    assert resumed(tmp_path).progress.step == 0


def test_a_resumed_run_keeps_nothing_of_the_file_it_read(tmp_path: Path) -> None:
    run(make_trainer(tmp_path), stop_at=1)
    trainer = make_trainer(tmp_path)
    tensors, record = trainer.folder.load_state() or ({}, {})
    trainer.restore(tensors, record)
    read = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    kept = [value for optimizer in trainer.optimizers for each in optimizer.state.values() for value in each.values()]
    assert kept
    for tensor in [*kept, *trainer.model.parameters()]:
        assert tensor.untyped_storage().data_ptr() not in read


def test_a_different_machine_is_said(tmp_path: Path) -> None:
    run(make_trainer(tmp_path))
    tensors, record = make_trainer(tmp_path).folder.load_state() or ({}, {})
    record["environment"]["threads"] = 77
    messages = make_trainer(tmp_path).restore(tensors, record)
    assert len(messages) == 1
    assert messages[0].startswith("threads was 77 when this run was saved and is ")
    record["environment"] |= {"threads": torch.get_num_threads(), "device": "cuda"}
    messages = make_trainer(tmp_path).restore(tensors, record)
    assert messages == ["device was cuda when this run was saved and is cpu now; it will not be bit-equal"]


OPTIONS: dict[str, tuple[TrainConfig, float]] = {
    "adamw": (TRAIN, 0.0),
    "muon": (replace(TRAIN, optimizer="muon"), 0.0),
    "dropout": (TRAIN, 0.3),
    "micro-batches": (replace(TRAIN, micro_batch_size=3, schedule="linear"), 0.1),
    "bfloat16": (replace(TRAIN, compute_dtype="bfloat16"), 0.0),
    "float16": (replace(TRAIN, compute_dtype="float16", optimizer="muon"), 0.0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_resumed_equals_uninterrupted(tmp_path: Path, name: str) -> None:
    config, dropout = OPTIONS[name]
    model = replace(MODEL, dropout=dropout, head_dim=16)  # for which a CPU has attention of its own
    run(make_trainer(tmp_path / "whole", config, model))
    run(make_trainer(tmp_path / "parts", config, model), stop_at=1)
    for stop_at in (4, 7, None):
        run(resumed(tmp_path / "parts", config, model), stop_at)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("die_at", [1, 6, 12])
def test_a_run_that_dies_without_a_word_is_taken_up_from_its_last_save(tmp_path: Path, die_at: int) -> None:
    run(make_trainer(tmp_path / "whole"))
    trainer = make_trainer(tmp_path / "parts")
    for event in trainer.run():
        if isinstance(event, StepDone) and event.step == die_at:
            break  # nothing after this line runs
    with (tmp_path / "parts" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss": 3.1')
    run(resumed(tmp_path / "parts"))
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run(make_trainer(tmp_path / "whole"))
    run(make_trainer(tmp_path / "again"))
    assert run(resumed(tmp_path / "again")) == []
    assert_same(tmp_path / "whole", tmp_path / "again")
