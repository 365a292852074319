"""Rollouts: what is drawn, what of it carries loss, what it is worth, and that a run on them resumes bit for bit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_chat import make_base
from tiny_rollouts import GROUP, NEW, ROWS, TRAIN, config, count_letters, make_batches, make_policy_trainer, tiny_model
from tiny_run import run, state, steps_of
from torch import Tensor

from minigpt.alignment.held_out import HeldOut
from minigpt.alignment.policy import PolicyLoss, Rollouts, last_places
from minigpt.alignment.reference import without_adapter
from minigpt.alignment.rollouts import RolloutBatches, draw, padded, teaching
from minigpt.alignment.value_head import value_of
from minigpt.config import LoraConfig, SamplingConfig
from minigpt.errors import TrainingError
from minigpt.inference.sampling import row_seed
from minigpt.model import decoding, native_decoder
from minigpt.model import native as native_code
from minigpt.model.lora import adapters, add_lora
from minigpt.model.loss import IGNORED
from minigpt.model.transformer import GPT
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import StepDone


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "transformer-2017"])
@pytest.mark.parametrize("native", [True, False])
def test_answers_to_held_out_prompts_do_not_depend_on_the_type_of_training(
    tmp_path: Path, variant: str, kind: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        for module in (decoding, native_code, native_decoder):
            monkeypatch.setattr(module, "library", lambda: None)
    batches = make_batches(make_base(tmp_path / "model", variant, seed=4), config())
    held_out = HeldOut(batches.reference, batches.tokenizer, batches.asks[:6], count_letters, config(), 7)
    expected = held_out.answers(batches.model, 1.0)
    assert len({tuple(one.ids) for one in expected}) > 1
    with torch.autocast("cpu", kind):
        assert held_out.answers(batches.model, 1.0) == expected
        assert held_out(batches.model).wins.value == 0.5, "it is the start model itself"


def naive_log_probs(model: GPT, tokens: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Each row by itself, whole logits, in float64."""
    found = torch.zeros(targets.shape, dtype=torch.float64)
    with torch.no_grad():
        for row in range(len(tokens)):
            logs = F.log_softmax(model(tokens[row : row + 1])[0].double() / temperature, dim=-1)
            for place in range(tokens.shape[1]):
                if targets[row, place] != IGNORED:
                    found[row, place] = logs[place, targets[row, place]]
    return found


def test_an_answer_is_the_same_alone_and_in_a_batch(base: Path) -> None:
    batches = make_batches(base, config())
    prompts = [ask.ids for ask in batches.asks[:6]]
    sampling = SamplingConfig(max_new_tokens=NEW, temperature=1.0)
    seeds = [row_seed(9, row) for row in range(6)]
    together = draw(batches.model, batches.tokenizer, prompts, sampling, seeds)
    alone = [
        draw(batches.model, batches.tokenizer, [prompt], sampling, [seed])[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone
    assert len({tuple(one.ids) for one in together}) > 1


def test_only_the_tokens_of_an_answer_carry_loss_its_end_among_them() -> None:
    tokens, targets = padded([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]])
    assert tokens.tolist() == [[1, 2, 3, 5], [4, 7, 8, 0]]
    assert targets.tolist() == [[IGNORED, IGNORED, 5, 6], [7, 8, 9, IGNORED]]
    assert last_places(targets != IGNORED).tolist() == [3, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_tokens_that_were_drawn(base: Path, temperature: float) -> None:
    batches = make_batches(base, config(temperature=temperature))
    made = batches.at(0)
    expected = naive_log_probs(batches.model, made.tokens, made.targets, temperature)
    torch.testing.assert_close(made.old.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(made.reference, made.old), "the model is still where it began"
    assert made.figures["entropy"].item() == pytest.approx(-made.old[made.targets != IGNORED].mean().item(), rel=1e-5)


def test_the_first_update_has_ratios_of_one_and_no_distance(base: Path) -> None:
    batches = make_batches(base, config())
    objective = PolicyLoss(batches.config)
    made = batches.at(0)
    objective.weight(made)
    for part in made.split(3):
        objective.loss_sum(batches.model, part)
    figures = objective.figures()
    assert figures["clip_fraction"].item() == 0
    assert figures["kl"].item() == pytest.approx(0.0, abs=1e-9)
    assert set(figures) >= {"reward", "reward_spread", "entropy", "answer_tokens", "ended", "equal_groups"}


def test_a_group_answers_one_prompt_and_advantages_are_those_of_its_rewards(base: Path) -> None:
    batches = make_batches(base, config())
    made = batches.at(0)
    assert made.tokens.shape[0] == ROWS
    for group in range(ROWS // GROUP):
        rows = slice(group * GROUP, (group + 1) * GROUP)
        starts = made.targets[rows].ne(IGNORED).int().argmax(1)
        assert (
            len({tuple(row[: start + 1].tolist()) for row, start in zip(made.tokens[rows], starts, strict=True)}) == 1
        )
        answers = [
            batches.tokenizer.decode([id for id in row.tolist() if id not in (IGNORED, *batches.tokenizer.end_ids)])
            for row in made.targets[rows]
        ]
        rewards = [answer.count("a") - 0.1 * len(answer) for answer in answers]
        mean = sum(rewards) / GROUP
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / (GROUP - 1)) ** 0.5
        for row in range(GROUP):
            mask = made.targets[rows][row] != IGNORED
            each = made.advantages[rows][row]
            expected = (rewards[row] - mean) / deviation if deviation else 0.0
            assert each[mask].tolist() == pytest.approx([expected] * int(mask.sum()), abs=1e-4)
            assert (each[~mask] == 0).all()


def test_epochs_visit_every_prompt_once_and_steps_differ(base: Path) -> None:
    batches = make_batches(base, config())
    a_step = ROWS // GROUP
    steps = len(batches.asks) // a_step
    first, second = (
        [ask.prompt.where for number in range(start, start + steps) for ask in batches._chosen(number)]
        for start in (0, steps)
    )
    assert sorted(first) == sorted(second) == sorted(ask.prompt.where for ask in batches.asks)
    assert first != second


def test_rollouts_are_a_pure_function_of_seed_step_and_weights(base: Path) -> None:
    one, other = make_batches(base, config()), make_batches(base, config())
    torch.manual_seed(77)
    for number in (0, 3):
        for name, tensor in one.make(number).tensors().items():
            assert torch.equal(tensor, other.make(number).tensors()[name]), name
    assert not torch.equal(one.make(0).targets, one.make(1).targets)
    assert not torch.equal(one.make(0).targets, make_batches(base, config(), seed=6).make(0).targets)


def test_ppo_puts_the_reward_on_the_last_token_and_the_distance_on_each(base: Path) -> None:
    settings = config("ppo", group_size=1, standardise=False, decay=1.0, kl=0.5)
    batches = make_batches(base, settings)
    with torch.no_grad():
        for weight in batches.model.parameters():
            if weight.shape == (1, 32):  # the head, which begins at zero
                weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
            elif weight.dim() == 2:  # a policy that has moved away from its reference
                weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    made = batches.at(0)
    mask = made.targets != IGNORED
    with torch.no_grad():
        values = value_of(batches.model, batches.model.model(made.tokens))
    for row in range(ROWS):
        ids = [id for id in made.targets[row].tolist() if id != IGNORED]
        text = batches.tokenizer.decode([id for id in ids if id not in batches.tokenizer.end_ids])
        given = [-0.5 * (o - r) for o, r in zip(made.old[row][mask[row]], made.reference[row][mask[row]], strict=True)]
        given[-1] += text.count("a") - 0.1 * len(text)
        returns = [sum(given[place:]).item() for place in range(len(given))]  # decay 1: what is still to come
        assert made.returns[row][mask[row]].tolist() == pytest.approx(returns, abs=1e-4)
        expected = [r - v.item() for r, v in zip(returns, values[row][mask[row]], strict=True)]
        assert made.advantages[row][mask[row]].tolist() == pytest.approx(expected, abs=1e-4)


# The loss


def random_rollouts(rows: int = 5, length: int = 7, vocab: int = 300) -> Rollouts:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    targets = torch.randint(0, vocab, (rows, length), generator=generator)
    for row in range(rows):
        targets[row, : 1 + row % 3] = IGNORED
        targets[row, length - row :] = IGNORED
    mask = targets != IGNORED

    def some(scale: float) -> Tensor:
        return torch.randn(rows, length, generator=generator) * scale * mask

    old = some(0.4) - 5.5 * mask
    told = {"reward": 0.25, "answers": float(rows), "answer_tokens": int(mask.sum()) / rows}
    figures = {name: torch.tensor(value) for name, value in told.items()}
    return Rollouts(tokens, targets, old, old + some(0.5), some(1.0), some(1.0), figures)


def test_micro_batches_are_of_like_length_and_have_every_row_once() -> None:
    batch = random_rollouts()
    parts = list(batch.split(2))
    assert [part.tokens.shape for part in parts] == [(2, 4), (2, 6), (1, 7)]
    for name, tensor in batch.tensors().items():
        rows = sorted(row.tolist() for row in tensor)
        found = []
        for part in parts:
            fill = IGNORED if name == "targets" else 0
            found += [F.pad(row, (0, 7 - len(row)), value=fill) for row in part.tensors()[name]]
        if name != "tokens":
            assert sorted(row.tolist() for row in found) == rows, name


def test_rows_without_an_advantage_are_left_out_and_count_all_the_same() -> None:
    batch = random_rollouts()
    batch.advantages[1:3] = 0.0
    kept = teaching(batch)
    assert torch.equal(kept.tokens, batch.tokens[[0, 3, 4]])
    assert PolicyLoss(config()).weight(kept) == PolicyLoss(config()).weight(batch)
    batch.advantages[:] = 0.0
    assert teaching(batch) is batch, "a step without any gradient is still a step"


@pytest.mark.parametrize("micro", [5, 2])
@pytest.mark.parametrize(
    ("method", "normalisation"), [("grpo", "token"), ("grpo", "sequence"), ("grpo", "constant"), ("ppo", "token")]
)
def test_the_loss_is_its_formula_however_the_step_is_cut(
    base: Path, method: str, normalisation: str, micro: int
) -> None:
    settings = config(method, normalisation=normalisation, clip_high=0.3, kl=0.2, value_weight=0.7)
    model, batch = make_batches(base, settings).model, random_rollouts()
    if method == "ppo":
        with torch.no_grad():
            model.get_submodule("value_head").weight.normal_(generator=torch.Generator().manual_seed(8))
    objective = PolicyLoss(settings)
    weight = objective.weight(batch)
    total = sum(objective.loss_sum(model, part).item() for part in batch.split(micro)) / weight
    logs = naive_log_probs(model, batch.tokens, batch.targets, 1.0)
    with torch.no_grad():
        hidden = model.model(batch.tokens)
    each: list[list[float]] = []
    clipped = count = 0.0
    for row in range(len(batch.tokens)):
        each.append([])
        for place in range(batch.tokens.shape[1]):
            if batch.targets[row, place] == IGNORED:
                continue
            ratio = (logs[row, place] - batch.old[row, place]).exp().item()
            advantage = batch.advantages[row, place].item()
            loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
            gap = (batch.reference[row, place] - logs[row, place]).item()
            distance = torch.tensor(gap).double().exp().item() - gap - 1
            if method == "grpo":
                loss += 0.2 * distance
            else:
                value = value_of(model, hidden[row, place]).item()
                loss += 0.7 * 0.5 * (value - batch.returns[row, place].item()) ** 2
            each[-1].append(loss)
            clipped += (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8)
            count += 1
    expected = {
        "token": sum(map(sum, each)) / count,
        "sequence": sum(sum(row) / len(row) for row in each) / len(each),
        "constant": sum(map(sum, each)) / (len(each) * NEW),
    }[normalisation]
    assert total == pytest.approx(expected, rel=1e-4, abs=1e-5)
    figures = objective.figures()
    assert figures["clip_fraction"].item() == pytest.approx(clipped / count)
    assert figures["reward"].item() == 0.25


# A run


def digest(model: GPT) -> str:
    return hashlib.sha256(
        b"".join(weight.detach().numpy().tobytes() for weight in model.state_dict().values())
    ).hexdigest()


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_training_raises_the_reward_and_leaves_the_reference_alone(base: Path, tmp_path: Path, method: str) -> None:
    settings = config(method, kl=0.0, group_size=GROUP)
    trainer = make_policy_trainer(tmp_path, base, settings)
    trainer.progress.total_steps, trainer.config = 40, replace(TRAIN, total_steps=40, learning_rate=0.02)
    batches = trainer.batches
    assert isinstance(batches, RolloutBatches)
    with batches.reference() as start:
        before = digest(start)
    steps = [event.figures["reward"] for event in steps_of(run(trainer), StepDone)]
    assert sum(steps[-5:]) / 5 > sum(steps[:5]) / 5 + 0.2
    with batches.reference() as start:
        assert digest(start) == before
        assert start is not trainer.model


def test_an_adapter_switched_off_is_its_base(base: Path) -> None:
    batches = make_batches(base, config())
    model = batches.model
    tokens = batches.at(0).tokens
    with torch.no_grad():
        before = model(tokens)
        add_lora(model, LoraConfig(rank=2), torch.Generator().manual_seed(0))
        for layer in adapters(model).values():
            layer.lora_B.normal_(generator=torch.Generator().manual_seed(1))
        changed = model(tokens)
        with without_adapter(model)() as start:
            torch.testing.assert_close(start(tokens), before)
        assert not torch.allclose(changed, before)
        assert torch.equal(model(tokens), changed)


@pytest.mark.parametrize(("method", "updates", "stop"), [("grpo", 3, 4), ("grpo", 1, 3), ("ppo", 2, 3)])
def test_a_run_stopped_in_the_middle_and_resumed_equals_the_uninterrupted_one(
    base: Path, tmp_path: Path, method: str, updates: int, stop: int
) -> None:
    """With three updates on a rollout, step 4 is the first of the second one: two more follow on the same answers."""
    settings = config(method, updates=updates)
    whole = make_policy_trainer(tmp_path / "whole", base, settings)
    run(whole)
    run(make_policy_trainer(tmp_path / "parts", base, settings), stop_at=stop)
    again = make_policy_trainer(tmp_path / "parts", base, settings)
    torch.manual_seed(123)
    with torch.no_grad():
        for weight in again.model.parameters():
            weight.normal_()
    saved = RunFolder(tmp_path / "parts").load_state()
    assert saved is not None
    assert again.restore(*saved) == []
    run(again)
    one, other = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name]), name


def test_a_state_without_the_answers_that_steps_need_is_refused(base: Path, tmp_path: Path) -> None:
    settings = config(updates=3)
    run(make_policy_trainer(tmp_path, base, settings), stop_at=4)
    tensors, record = RunFolder(tmp_path).load_state() or ({}, {})
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("batches.")}
    assert len(kept) < len(tensors)
    with pytest.raises(TrainingError, match="does not fit this run's state"):
        make_policy_trainer(tmp_path, base, settings).restore(kept, record)


def test_several_updates_use_the_same_answers(base: Path) -> None:
    calls: list[int] = []
    batches = make_batches(base, config(updates=2))
    batches.judge = lambda rows: calls.append(len(rows)) or count_letters(rows)
    assert batches.at(0) is batches.at(1)
    assert batches.at(2) is not batches.at(0)
    assert calls == [ROWS] * 3, "going back draws again"


def test_a_judge_that_fails_ends_the_step_and_the_steps_before_it_are_kept(base: Path, tmp_path: Path) -> None:
    trainer = make_policy_trainer(tmp_path, base, config())
    batches = trainer.batches
    assert isinstance(batches, RolloutBatches)
    left = [2]

    def judge(rows: object) -> list[float]:
        left[0] -= 1
        if left[0] < 0:
            raise TrainingError("reward x: broken")
        return count_letters(rows)  # type: ignore[arg-type]

    batches.judge = judge
    with pytest.raises(TrainingError, match="reward x: broken"):
        run(trainer)
    assert trainer.progress.step == 2
    tensors, record = state(tmp_path)
    assert record["progress"]["step"] == 2
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], weight), name


def test_training_config_of_the_tests_has_a_micro_batch_that_cuts_groups() -> None:
    assert replace(TRAIN).micro_batch_size % GROUP
