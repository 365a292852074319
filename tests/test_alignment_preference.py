"""Runs on preferences: they begin as the model they began with, learn what they should, and resume exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import make_base
from tiny_pairs import PAIRS, write_marked, write_pairs
from tiny_run import assert_same, run, steps_of

from minigpt.alignment import preference_run
from minigpt.alignment.losses import dpo_loss, kto_loss, kto_reference_point
from minigpt.alignment.pairs import PairBatch, collate
from minigpt.alignment.preference import (
    PreferenceConfig,
    PreferenceLoss,
    answer_log_probs,
    score_pairs,
)
from minigpt.alignment.preference_health import PreferenceWatch
from minigpt.alignment.preference_plan import PreferenceRequest
from minigpt.alignment.preference_run import PreferenceRun
from minigpt.checkpoint.adapter import fingerprint
from minigpt.checkpoint.folder import load
from minigpt.config import LoraConfig
from minigpt.errors import ConfigError, DataError
from minigpt.model.loss import IGNORED
from minigpt.model.transformer import GPT
from minigpt.text.fitting import Encoded
from minigpt.training.chat_data import ChatRequest
from minigpt.training.finetune import answers_to
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Evaluated, StepDone

CPU = torch.device("cpu")


class Facts:
    """What a person would have read."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.warnings: list[str] = []

    def fact(self, label: str, text: str) -> None:
        self.facts[label] = text

    def warning(self, message: str) -> None:
        self.warnings.append(message)

    def working(self, what: str, done: int, total: int, unit: str = "") -> None:
        assert done <= total


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.training.finetune.ANSWER_TOKENS", 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model", dropout=0.1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "animals.jsonl")


def prepare(
    folder: Path, base: Path, data: Path, method: str = "dpo", *, preference: dict[str, Any] | None = None,
    read: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **more: Any,
) -> tuple[PreferenceRun, Facts]:  # fmt: skip
    facts = Facts()
    request = PreferenceRequest(
        base=str(base), preference={"method": method, **(preference or {})},
        train={"batch_size": 4, "micro_batch_size": 2, **(train or {})}, **{"steps": 4, **more},
    )  # fmt: skip
    chats = ChatRequest(sources=(str(data),), named=data.name, **{"val_fraction": 0.25, **(read or {})})
    return preference_run.prepare(chats, request, RunFolder(folder), CPU, "float32", facts), facts


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# The beginning


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("micro", [1, 4])
def test_the_first_loss_of_dpo_is_ln_2_to_the_last_bit(
    tmp_path: Path, base: Path, pairs: Path, micro: int, lora: LoraConfig | None
) -> None:
    before = fingerprint(base)
    aligned, facts = prepare(tmp_path / "run", base, pairs, lora=lora, train={"micro_batch_size": micro})
    events = run(aligned.trainer)
    ln2 = torch.tensor(2.0).log()
    assert steps_of(events, StepDone)[0].loss == pytest.approx(ln2.item(), abs=1e-7)
    first = steps_of(events, Evaluated)[0].score
    assert first.loss == pytest.approx(math.log(2), abs=1e-7)
    assert first.figures["accuracy"] == 0.5, "all are ties"
    assert fingerprint(base) == before, "the reference is as it was"
    assert "log-probabilities of 22 rows" in facts.facts["reference"]
    assert aligned.trainer.model.config.dropout == 0.0


def test_every_pair_of_the_first_epoch_is_what_the_reference_said(tmp_path: Path, base: Path, pairs: Path) -> None:
    aligned, _ = prepare(tmp_path / "run", base, pairs, train={"learning_rate": 0.0, "optimizer": "adamw"}, steps=4)
    losses = {event.loss for event in steps_of(run(aligned.trainer), StepDone)}
    assert max(losses) - min(losses) <= 1.2e-7  # what adding up the halves of a step leaves


@pytest.mark.parametrize(("method", "loss"), [("ipo", 25.0), ("kto", 0.5)])
def test_the_first_loss_of_others_is_that_of_no_difference(
    tmp_path: Path, base: Path, method: str, loss: float
) -> None:
    data = (write_marked if method == "kto" else write_pairs)(tmp_path / "data.jsonl")
    aligned, _ = prepare(tmp_path / "run", base, data, method)
    assert steps_of(run(aligned.trainer), StepDone)[0].loss == pytest.approx(loss, rel=1e-5)


def test_the_reference_is_kept_in_a_file_and_read_again(tmp_path: Path, base: Path, pairs: Path) -> None:
    _, first = prepare(tmp_path / "one", base, pairs)
    (file,) = (tmp_path / ".cache" / "reference").iterdir()
    _, second = prepare(tmp_path / "two", base, pairs)
    assert "from" not in first.facts["reference"]
    assert str(file) in second.facts["reference"]
    file.write_bytes(b"broken")
    _, third = prepare(tmp_path / "three", base, pairs)
    assert "from" not in third.facts["reference"]
    prepare(tmp_path / "four", make_base(tmp_path / "other", seed=4), pairs)
    assert len([*file.parent.iterdir()]) == 2, "another model, another reference"


def test_simpo_asks_for_no_reference(tmp_path: Path, base: Path, pairs: Path) -> None:
    _, facts = prepare(tmp_path / "run", base, pairs, "simpo")
    assert "reference" not in facts.facts
    assert not (tmp_path / ".cache").exists()


# What a step is


def hand_log_probs(model: GPT, encoded: Encoded) -> float:
    """One answer, read by itself, token by token."""
    with torch.no_grad():
        log_probs = model(torch.tensor([encoded.ids[:-1].tolist()]))[0].double().log_softmax(-1)
    said = [place for place in range(1, len(encoded.ids)) if encoded.trained[place]]
    return sum(float(log_probs[place - 1, encoded.ids[place]]) for place in said)


def test_a_step_is_the_mean_of_the_pairs_losses_however_it_is_cut_and_padded(
    tmp_path: Path, base: Path, pairs: Path
) -> None:
    aligned, _ = prepare(tmp_path / "run", base, pairs)
    policy, reference = make_moved(base), load(base, dtype=torch.float32).model.eval()
    some = aligned.data.train[:4]
    sides = [[[hand_log_probs(model, side) for side in pair[:2]] for pair in some] for model in (policy, reference)]
    now, before = (torch.tensor(values).unbind(1) for values in sides)
    expected = dpo_loss(*now, *before, beta=0.1).mean().item()
    kept = torch.stack(before, 1)
    for micro in (1, 3, 4):
        for pad in (0, 5):
            objective = PreferenceLoss(PreferenceConfig(method="dpo"))
            batch = wider(collate(some, kept, pad_id=1), pad)
            weight = objective.weight(batch)
            total = sum(objective.loss_sum(policy, part).item() / weight for part in batch.split(micro))
            assert total == pytest.approx(expected, rel=1e-5)
    figures = {name: float(value) for name, value in objective.figures().items()}
    gap = (now[0] - before[0]) - (now[1] - before[1])
    assert figures["margin"] == pytest.approx(0.1 * gap.mean().item(), rel=1e-3)
    assert figures["accuracy"] == pytest.approx((gap > 0).float().mean().item())
    assert figures["chosen_change"] == pytest.approx((now[0] - before[0]).mean().item(), rel=1e-3)


def make_moved(base: Path) -> GPT:
    """The model after something has happened to it."""
    model = load(base, dtype=torch.float32, dropout=0.0).model.eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model


def wider(batch: PairBatch, more: int) -> PairBatch:
    pad = (0, more)
    tokens = torch.nn.functional.pad(batch.tokens, pad, value=7)
    targets = torch.nn.functional.pad(batch.targets, pad, value=IGNORED)
    return replace(batch, tokens=tokens, targets=targets)


def test_kto_measures_its_reference_point_on_the_answers_of_others(tmp_path: Path, base: Path) -> None:
    aligned, _ = prepare(tmp_path / "run", base, write_marked(tmp_path / "marked.jsonl"), "kto")
    policy = make_moved(base)
    batch = aligned.trainer.batches.at(0)
    now, before = answer_log_probs(policy, batch.tokens, batch.targets), batch.reference
    point = kto_reference_point(now[:, 1], before[:, 1])
    expected = kto_loss(now[:, 0], before[:, 0], batch.good, point, beta=0.1).mean().item()
    for micro in (1, 3, 4):
        objective = PreferenceLoss(PreferenceConfig(method="kto"))
        weight = objective.weight(batch)
        total = sum(objective.loss_sum(policy, part).item() / weight for part in batch.split(micro))
        assert total == pytest.approx(expected, rel=1e-5)
        assert float(objective.figures()["kl"]) == pytest.approx(point.item(), abs=1e-5)
    score = score_pairs(policy, [batch], aligned.config)
    assert score.loss == pytest.approx(expected, rel=1e-5)
    assert score.text.startswith("accuracy ")


@pytest.mark.parametrize("method", ["dpo", "ipo", "simpo", "kto"])
def test_every_method_learns_to_tell_the_answers_apart(tmp_path: Path, base: Path, method: str) -> None:
    data = (write_marked if method == "kto" else write_pairs)(tmp_path / "data.jsonl")
    train = {"learning_rate": 0.01, "eval_every": 20, "batch_size": 8, "optimizer": "adamw", "warmup_steps": 2}
    strong = {"beta": 0.5} if method == "kto" else {}
    aligned, _ = prepare(
        tmp_path / "run", base, data, method, preference=strong, steps=40, train=train, read={"val_fraction": 0.2}
    )
    events = run(aligned.trainer)
    steps = steps_of(events, StepDone)
    assert sum(step.loss for step in steps[-10:]) / 10 < 0.75 * steps[0].loss
    assert aligned.final_score is not None
    found = aligned.final_score(load(tmp_path / "run").model)
    if method == "kto":  # a bad answer may still be likelier than it was, as long as good ones gain more
        assert steps[-1].figures["chosen_change"] > steps[-1].figures["rejected_change"] + 2.0
        assert found.figures["chosen_change"] > found.figures["rejected_change"]
    else:
        assert steps[-1].figures["accuracy"] >= 0.9
        assert found.figures["accuracy"] >= 0.75
    stored = [row for row in rows(tmp_path / "run") if "held_out_accuracy" in row]
    assert [row["step"] for row in stored] == [0, 20, 40]


# Resumed


@pytest.mark.parametrize(
    ("method", "lora"),
    [("dpo", None), ("dpo", LoraConfig(rank=2, dropout=0.1)), ("kto", None), ("reward", None)],
    ids=["dpo", "lora", "kto", "reward"],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tmp_path: Path, base: Path, method: str, lora: LoraConfig | None
) -> None:
    data = (write_marked if method == "kto" else write_pairs)(tmp_path / "data.jsonl")
    whole, _ = prepare(tmp_path / "one" / "whole", base, data, method, lora=lora, steps=6)
    run(whole.trainer)
    part, _ = prepare(tmp_path / "two" / "part", base, data, method, lora=lora, steps=6)
    run(part.trainer, stop_at=3)
    folder = RunFolder(tmp_path / "two" / "part")
    for file in (tmp_path / "two").glob(".cache/reference/*"):
        file.unlink()
    record, state = preference_run.recorded(folder, "reward" if method == "reward" else "align"), folder.load_state()
    assert record is not None
    assert state is not None
    torch.manual_seed(999)
    again = preference_run.resume(folder, record, state, CPU, Facts())
    run(again.trainer)
    if lora is None:
        assert_same(tmp_path / "one" / "whole", tmp_path / "two" / "part")
    else:
        name = "adapter_model.safetensors"
        assert (folder.path / name).read_bytes() == (tmp_path / "one" / "whole" / name).read_bytes()


def test_other_preferences_are_not_resumed_on(tmp_path: Path, base: Path) -> None:
    data = write_pairs(tmp_path / "data.jsonl")
    part, _ = prepare(tmp_path / "run", base, data, steps=6)
    run(part.trainer, stop_at=3)
    write_pairs(data, PAIRS[:-1])
    folder = RunFolder(tmp_path / "run")
    record, state = preference_run.recorded(folder, "align"), folder.load_state()
    assert record is not None
    assert state is not None
    with pytest.raises(DataError, match=r"data\.jsonl has changed since this run began"):
        preference_run.resume(folder, record, state, CPU, Facts())


# What is refused


def test_an_empty_answer_is_an_error_of_the_data(tmp_path: Path, base: Path) -> None:
    data = write_pairs(tmp_path / "data.jsonl", [*PAIRS[:3], ("Say cat", "", "cat")])
    with pytest.raises(DataError, match=r"data\.jsonl:4: "):
        prepare(tmp_path / "run", base, data)
    assert not (tmp_path / "run").exists()


def test_where_no_answer_fits_it_is_said(tmp_path: Path, base: Path, pairs: Path) -> None:
    with pytest.raises(DataError, match="no answer is left in a context of 4 tokens"):
        prepare(tmp_path / "run", base, pairs, context=4)
    with pytest.raises(ConfigError, match=r"context is 65, more than the model's 64"):
        prepare(tmp_path / "run", base, pairs, context=65)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dpo", "margin": 0.5}, "margin is 0.5, which dpo knows nothing of; it is simpo's"),
        ({"method": "ipo", "label_smoothing": 0.1}, "label_smoothing is 0.1, which ipo knows nothing of"),
        ({"method": "dpo", "beta": 0.0}, "beta is 0.0; it must be from 1e-06"),
        ({"method": "dpo", "beta": math.nan}, "beta is nan"),
        ({"method": "dpo", "label_smoothing": 0.5}, "label_smoothing is 0.5; it must be from 0 to below 0.5"),
        ({"method": "orpo"}, "method"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreferenceConfig(**settings)


# Health


def test_warnings_tell_of_collapses_once() -> None:
    watch = PreferenceWatch(PreferenceConfig(method="dpo"))
    good = {"loss": 0.6, "accuracy": 0.8, "margin": 0.3, "chosen_change": 1.0, "rejected_change": -3.0, "drift": 0.01}
    assert [text for _ in range(20) for text in watch.see(good)] == []
    bad = good | {"chosen_change": -20.0, "rejected_change": -60.0, "drift": 0.8, "loss": 0.001}
    said = [text for _ in range(30) for text in watch.see(bad)]
    assert len(said) == 3
    assert any("the chosen answers become less likely too" in text for text in said)
    assert any("nats a token less likely than before" in text for text in said)
    assert any("the loss is" in text for text in said)
    assert watch.text() == "loss 0.001, accuracy 80%"
    assert "chosen -20.0, rejected -60.0 nats" in watch.health()


def test_a_run_that_learns_nothing_is_told() -> None:
    watch = PreferenceWatch(PreferenceConfig(method="dpo"))
    flat = {"loss": 0.69, "accuracy": 0.5, "margin": 0.0, "chosen_change": 0.0, "rejected_change": 0.0, "drift": 0.0}
    said = [text for _ in range(120) for text in watch.see(flat)]
    assert len(said) == 1
    assert "50% of the pairs are told apart, as by chance" in said[0]


def test_questions_are_answered_before_and_after(tmp_path: Path, base: Path, pairs: Path) -> None:
    aligned, _ = prepare(tmp_path / "run", base, pairs)
    assert len(aligned.questions) == len(aligned.before) == 3
    model = load(base, dtype=torch.float32, dropout=0.0).model
    assert answers_to(model, aligned.data.template, aligned.questions) == aligned.before
