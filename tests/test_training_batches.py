"""Windows of the corpus: each once an epoch, in an order that depends on seed and step alone."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minigpt.config import ModelConfig
from minigpt.errors import DataError
from minigpt.model.transformer import GPT
from minigpt.training.batches import Batch, CorpusBatches
from minigpt.training.objectives import NextToken


class Numbers:
    """Token n is the number n, so that a window shows where it was cut."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        assert 0 <= start < stop <= self.length
        return np.arange(start, stop, dtype=np.int64)


def batches(length: int, context: int = 8, batch_size: int = 1, seed: int = 0) -> CorpusBatches:
    return CorpusBatches(Numbers(length), context=context, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_a_text_shorter_than_a_window_is_an_error(length: int) -> None:
    with pytest.raises(DataError, match=rf"^the training text has {length} tokens, fewer than one window of 8 \+ 1; "):
        batches(length)


def test_the_first_steps_read_each_window_as_two_texts() -> None:
    source = CorpusBatches(Numbers(100), context=8, batch_size=2, seed=0, short_steps=3)
    plain = batches(100, batch_size=2)
    for step in range(5):
        batch, whole = source.at(step), plain.at(step)
        assert torch.equal(batch.tokens, whole.tokens)
        assert torch.equal(batch.targets, whole.targets)
        assert batch.texts.shape == ((4, 4) if step < 3 else (2, 8))
        assert torch.equal(batch.texts.flatten(), whole.tokens.flatten())
        for micro, row in zip(batch.split(1), whole.tokens, strict=True):
            assert torch.equal(micro.to(torch.device("cpu")).texts, row.view(-1, batch.texts.shape[1]))


def test_a_text_of_one_window_has_exactly_one() -> None:
    source = batches(9)
    assert source.windows == 1
    batch = source.at(0)
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.documents is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(1, 5), st.integers(0, 2**63 - 1))
def test_every_epoch_visits_every_window_once(context: int, more: int, batch_size: int, seed: int) -> None:
    source = batches(context + 1 + more, context, batch_size, seed)
    rows = [row for step in range(3 * source.windows) for row in source.at(step).tokens.tolist()]
    for epoch in range(3):
        firsts = sorted(row[0] for row in rows[epoch * source.windows : (epoch + 1) * source.windows])
        assert firsts == [firsts[0] + i * context for i in range(source.windows)], "side by side, each once"
        assert firsts[-1] + context < context + 1 + more, "with a target for the last token"


def test_the_order_is_a_function_of_seed_and_step() -> None:
    one, other = batches(500, 8, 4, seed=3), batches(500, 8, 4, seed=3)
    steps = [*range(40)]
    straight = [one.at(step).tokens.tolist() for step in steps]
    backwards = [other.at(step).tokens.tolist() for step in reversed(steps)]
    assert straight == backwards[::-1]
    assert straight[:5] != [batches(500, 8, 4, seed=4).at(step).tokens.tolist() for step in range(5)]
    epoch = one.windows // 4  # an order of its own in every epoch
    assert sorted(straight[0]) != sorted(straight[epoch])


def test_epochs_are_cut_at_different_places() -> None:
    source = batches(8 * 20 + 1 + 7)
    offsets = {source.at(epoch * source.windows).tokens[0, 0].item() % 8 for epoch in range(20)}
    assert len(offsets) > 3


def test_memory_does_not_grow_with_the_steps() -> None:
    source = batches(10_000, 16, 8)
    source.at(0)
    tracemalloc.start()
    try:
        for step in range(50):
            source.at(step)
        early = tracemalloc.get_traced_memory()[0]
        for step in range(50, 1000):
            source.at(step)
        assert tracemalloc.get_traced_memory()[0] - early < 50_000
    finally:
        tracemalloc.stop()


def test_micro_batches_are_the_batch_in_parts() -> None:
    numbers = torch.arange(30).reshape(5, 6)
    batch = Batch(numbers, numbers + 1, numbers // 3)
    parts = list(batch.split(2))
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert torch.equal(torch.cat([part.documents for part in parts if part.documents is not None]), numbers // 3)
    assert next(Batch(numbers, numbers).split(9)).documents is None
    assert torch.equal(batch.to(torch.device("cpu")).targets, batch.targets)


def test_a_window_in_two_is_learned_as_two_texts() -> None:
    config = ModelConfig(
        vocab_size=19, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        intermediate_size=16, max_position_embeddings=8,
    )  # fmt: skip
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 19, (3, 9), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    whole, halves, apart = (
        NextToken().loss_sum(model, batch)
        for batch in (
            Batch(inputs, targets),
            Batch(inputs, targets, pieces=2),
            Batch(inputs.view(6, 4), targets.view(6, 4)),
        )
    )
    assert torch.equal(halves, apart)
    assert not torch.allclose(halves, whole)
