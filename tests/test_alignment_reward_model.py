"""Reward models: where the reward is read, what is learned and saved, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_alignment_preference import CPU, prepare
from tiny_chat import make_base
from tiny_pairs import PAIRS, write_pairs
from tiny_run import run, steps_of

from minigpt.alignment.reward_model import HEAD, RewardModel, add_reward_head, load_reward_model
from minigpt.checkpoint.base import REWARD_HEAD
from minigpt.checkpoint.files import read_tensors, write_tensors
from minigpt.checkpoint.folder import load
from minigpt.config import LoraConfig
from minigpt.errors import DataError, ModelFolderError
from minigpt.text.chat import Message
from minigpt.text.tokenizer import IM_END
from minigpt.training.trainer import StepDone

LEARNING = {"learning_rate": 0.01, "eval_every": 20, "batch_size": 8, "optimizer": "adamw", "warmup_steps": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


def conversation(prompt: str, answer: str) -> tuple[Message, ...]:
    return Message("user", prompt), Message("assistant", answer)


def with_head(base: Path) -> RewardModel:
    loaded = load(base, dtype=torch.float32)
    head = torch.randn(1, loaded.model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    return RewardModel(loaded, head)


def by_hand(judge: RewardModel, messages: tuple[Message, ...]) -> float:
    """The conversation read alone up to the end token of its answer; the reward of that last token."""
    tokenizer = judge.template.tokenizer
    ids = judge.template.encode(messages)
    end = tokenizer.special_id(IM_END)
    ids = ids[: len(ids) - ids[::-1].index(end)]
    with torch.no_grad():
        hidden = judge.model.model(torch.tensor([ids]))
        return float(judge.model.get_submodule(HEAD)(hidden[0, -1]))


def test_the_reward_is_read_at_the_last_real_token_where_the_pad_id_is_the_end(base: Path) -> None:
    judge = with_head(base)
    end = judge.template.tokenizer.special_id(IM_END)
    assert end is not None
    many = [conversation(prompt, answer) for prompt, chosen, rejected in PAIRS[:5] for answer in (chosen, rejected)]
    many.append(conversation("Say cat", "cat " * 12))
    expected = [by_hand(judge, one) for one in many]
    for pad in (end, 0):
        judge.pad_id = pad
        assert judge.score(many) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == len(expected)


def test_training_reads_the_reward_where_scoring_does(tmp_path: Path, base: Path) -> None:
    trained, _ = prepare(
        tmp_path / "run", base, write_pairs(tmp_path / "pairs.jsonl"), "reward", train=LEARNING, steps=3
    )
    run(trained.trainer)
    judge = load_reward_model(tmp_path / "run")
    assert trained.final_score is not None
    found = trained.final_score(judge.model)
    held_out = trained.data.examples
    margins = []
    for pair in held_out:
        chosen, rejected = judge.score([(*pair.prompt, *pair.chosen), (*pair.prompt, *pair.rejected)])
        margins.append(chosen - rejected)
    assert found.figures["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_better_answers_are_told_from_worse_ones(tmp_path: Path, base: Path, lora: LoraConfig | None) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl")
    trained, facts = prepare(
        tmp_path / "run", base, data, "reward", steps=60, lora=lora, train=LEARNING, read={"val_fraction": 0.2}
    )
    steps = steps_of(run(trained.trainer), StepDone)
    assert steps[0].loss == pytest.approx(0.693147, abs=1e-6)
    assert steps[-1].figures["accuracy"] >= 0.9
    assert "reference" not in facts.facts
    judge = load_reward_model(tmp_path / "run", CPU)
    assert trained.final_score is not None
    assert trained.final_score(judge.model).figures["accuracy"] >= 0.75


def test_a_folder_that_is_no_reward_model_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"is no reward model \(no reward_head.safetensors in it\)"):
        load_reward_model(base)
    folder = make_base(tmp_path / "judge")
    write_tensors(folder / REWARD_HEAD, {"weight": torch.zeros(1, 5)}, {})
    with pytest.raises(ModelFolderError, match="holds no head of 32 weights"):
        load_reward_model(folder)


def test_the_folder_stays_a_model_folder_with_the_head_beside(tmp_path: Path, base: Path) -> None:
    trained, _ = prepare(tmp_path / "run", base, write_pairs(tmp_path / "pairs.jsonl"), "reward", steps=2)
    run(trained.trainer)
    assert read_tensors(tmp_path / "run" / REWARD_HEAD)[0]["weight"].shape == (1, 32)
    assert HEAD not in "".join(read_tensors(tmp_path / "run" / "model.safetensors")[0])
    load(tmp_path / "run")


def test_a_conversation_without_an_answer_is_refused(base: Path) -> None:
    judge = with_head(base)
    with pytest.raises(DataError, match="ends with no answer"):
        judge.score([(Message("user", "Say cat"),)])
    object.__setattr__(judge.model, "config", replace(judge.model.config, max_position_embeddings=4))
    with pytest.raises(DataError, match="no answer is left of a conversation in a context of 4 tokens"):
        judge.score([conversation("Say cat", "cat!")])


def test_a_head_of_zeros_finds_all_answers_equally_good(base: Path) -> None:
    model = load(base, dtype=torch.float32).model
    add_reward_head(model)
    assert (model.get_submodule(HEAD).get_parameter("weight") == 0).all()
