"""Rows of two answers: what is learned of them, how they are cut, and that a step is a function of its number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_chat import make_base

from minigpt.alignment.pairs import EncodedPair, PairBatches, at_the_end, collate, fit_answers, in_order
from minigpt.model.loss import IGNORED
from minigpt.text.chat import ChatTemplate, Message, chat_template
from minigpt.text.fitting import Encoded, FitCounts
from minigpt.text.tokenizer import IM_END, Tokenizer


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return chat_template(Tokenizer.load(make_base(tmp_path_factory.mktemp("base") / "model")))


def said(role: str, content: str) -> tuple[Message, ...]:
    return (Message(role, content),)


def learned(encoded: Encoded, template: ChatTemplate) -> str:
    return template.tokenizer.decode([int(id) for id in encoded.ids[encoded.trained]])


def row(first: int, second: int, good: bool = True) -> EncodedPair:
    def side(length: int) -> Encoded:
        trained = np.zeros(length, dtype=np.bool_)
        trained[-2:] = True
        return Encoded(np.arange(length, dtype=np.int32) + 10, trained)

    return EncodedPair(side(first), side(second), good)


def test_of_a_prompt_with_answers_only_the_last_answer_is_learned(template: ChatTemplate) -> None:
    prompt = said("user", "Say cat") + said("assistant", "cat!") + said("user", "Say dog")
    counts = FitCounts()
    found = fit_answers(prompt, [said("assistant", "dog!"), said("assistant", "dog dog?")], template, 64, counts)
    assert found is not None
    assert [learned(one, template).replace(IM_END, "") for one in found] == ["dog!", "dog dog?"]
    assert [int(one.ids[-1]) for one in found] == [template.tokenizer.special_id(IM_END)] * 2
    assert found[0].ids[:10].tolist() == found[1].ids[:10].tolist()
    assert (counts.cut, counts.dropped) == (0, 0)


def test_an_answer_of_several_turns_is_learned_but_for_what_the_user_says(template: ChatTemplate) -> None:
    answer = said("assistant", "cat!") + said("user", "Say dog") + said("assistant", "dog!")
    found = fit_answers(said("user", "Say cat"), [answer], template, 64, FitCounts())
    assert found is not None
    assert learned(found[0], template).replace(IM_END, "") == "cat!dog!"


def test_a_prompt_that_is_too_long_is_cut_alike_for_both_answers(template: ChatTemplate) -> None:
    prompt = said("user", "Say cat") + said("assistant", "cat!") + said("user", "Say dog")
    answers = [said("assistant", "dog!"), said("assistant", "dog dog dog dog?")]
    whole = fit_answers(prompt, answers, template, 64, FitCounts())
    assert whole is not None
    counts = FitCounts()
    context = max(map(len, whole)) - 1  # the longer answer is one too long, the shorter fits as it is
    found = fit_answers(prompt, answers, template, context, counts)
    alone = fit_answers(said("user", "Say dog"), answers, template, context, FitCounts())
    assert found is not None
    assert alone is not None
    assert counts.cut == 1
    for cut, short in zip(found, alone, strict=True):
        assert cut.ids.tolist() == short.ids.tolist()


def test_a_row_without_room_for_an_answer_is_dropped(template: ChatTemplate) -> None:
    counts = FitCounts()
    answers = [said("assistant", "dog!"), said("assistant", "cat!")]
    assert fit_answers(said("user", "Say dog"), answers, template, 3, counts) is None
    assert counts.dropped == 1


def test_targets_are_shifted_and_padding_carries_none() -> None:
    batch = collate([row(5, 3), row(4, 6)], torch.zeros(2, 2), pad_id=11)
    assert batch.tokens.shape == (2, 2, 5)
    assert batch.tokens[0, 1].tolist() == [10, 11, 11, 11, 11]
    assert batch.targets[0].tolist() == [[-100, -100, 13, 14, -100], [11, 12, -100, -100, -100]]
    assert batch.lengths.tolist() == [[2, 2], [2, 2]]


def test_micro_batches_are_as_long_as_they_need_to_be_and_keep_their_rows() -> None:
    pairs = [row(9, 3), row(4, 5), row(3, 3, good=False)]
    batch = collate(pairs, torch.arange(6.0).view(3, 2), pad_id=0)
    parts = list(batch.split(2))
    assert [tuple(part.tokens.shape) for part in parts] == [(2, 2, 8), (1, 2, 2)]
    assert torch.cat([part.reference for part in parts]).tolist() == batch.reference.tolist()
    assert [part.good.tolist() for part in parts] == [[True, True], [False]]
    assert sum(int((part.targets != IGNORED).sum()) for part in parts) == 12


def test_every_epoch_takes_each_row_once_and_a_step_needs_no_other() -> None:
    pairs = [row(3 + i, 4) for i in range(7)]
    source = PairBatches(pairs, batch_size=3, seed=5, pad_id=0)
    source.reference = torch.arange(14.0).view(7, 2)
    taken = [place for step in range(7) for place in source.places(step)]
    numbers = [source._place(number) for number in range(21)]
    assert [sorted(numbers[start : start + 7]) for start in (0, 7, 14)] == [[*range(7)]] * 3
    assert sorted(taken) == sorted(numbers)
    assert numbers[:7] != numbers[7:14]
    again = PairBatches(pairs, batch_size=3, seed=5, pad_id=0)
    again.reference = source.reference
    late = again.at(5)
    for _ in (source.at(2), source.at(0)):
        pass
    assert torch.equal(source.at(5).tokens, late.tokens)
    assert late.reference[:, 0].tolist() == [2.0 * place for place in source.places(5)]
    assert PairBatches(pairs, batch_size=3, seed=6, pad_id=0).places(0) != source.places(0)


def test_all_rows_are_scored_once() -> None:
    batches = in_order([row(3 + i, 4) for i in range(7)], 3, 0)
    assert [len(batch.tokens) for batch in batches] == [3, 3, 1]
    assert batches[0].tokens.shape[-1] == 8


def test_a_reward_has_one_target_behind_the_last_token() -> None:
    encoded = row(5, 5).first
    found = at_the_end(encoded)
    batch = collate([EncodedPair(found, at_the_end(row(3, 3).first))], torch.zeros(1, 2), pad_id=int(encoded.ids[-1]))
    assert batch.tokens[0].tolist() == [[10, 11, 12, 13, 14], [10, 11, 12, 14, 14]]
    assert (batch.targets != IGNORED).int().argmax(-1).tolist() == [[4, 2]]
