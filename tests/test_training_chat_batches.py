"""Batches of packed conversations: a pure function of seed and step, sources by weight, and packed = separate."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from variants import CONTEXT, VARIANTS, VOCAB, make_model

from minigpt.errors import ConfigError, DataError
from minigpt.model.loss import IGNORED
from minigpt.text.fitting import Encoded
from minigpt.training.batches import Batch
from minigpt.training.chat_batches import ChatBatches, ChatSource, batches_of
from minigpt.training.objectives import NextToken
from minigpt.training.packing import PackedRows


def conversations(count: int, seed: int, longest: int = CONTEXT) -> list[Encoded]:
    """Random ids of random lengths, a random half of them learned, the last always; the first id is its number."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = generator.integers(0, VOCAB, generator.integers(2, longest + 2)).astype(np.int32)
        ids[0] = number
        trained = generator.random(len(ids)) < 0.5
        trained[-1] = True
        found.append(Encoded(ids, trained))
    return found


def packed(count: int, seed: int = 0, row_length: int = CONTEXT, longest: int = CONTEXT) -> PackedRows:
    return PackedRows(conversations(count, seed, longest), row_length, pad_id=0)


class Text:
    """Ids that no conversation has."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.arange(start, stop, dtype=np.int64) + 1_000


def firsts(batch: Batch) -> list[int]:
    """The first id of every conversation in a batch: its number."""
    assert batch.documents is not None
    found = []
    for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.documents, strict=True):
        for document in documents.unique():
            there = documents == document
            if (targets[there] != IGNORED).any():  # else it is padding
                found.append(int(tokens[there][0]))
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_epoch_holds_every_conversation_once(batch_size: int) -> None:
    source = packed(50)
    batches = ChatBatches([ChatSource(source)], batch_size=batch_size, seed=4)
    assert batches.rows_an_epoch == batches.chat_rows == len(source)
    steps = 3 * len(source)
    rows = [firsts(batches.at(step)) for step in range(steps // batch_size)]
    for epoch in range(3 if batch_size == 1 else 1):
        part = rows[epoch * len(source) // batch_size : (epoch + 1) * len(source) // batch_size]
        if batch_size == 1:
            assert sorted(number for row in part for number in row) == list(range(50))
    counts = Counter(number for row in rows for number in row)
    assert counts == dict.fromkeys(range(50), 3)


def test_the_order_is_a_function_of_seed_and_step() -> None:
    def make(seed: int) -> ChatBatches:
        sources = [ChatSource(packed(40)), ChatSource(packed(10, seed=1), 0.5)]
        return ChatBatches(sources, batch_size=2, seed=seed, text=Text(100), text_share=0.25)

    def listed(batch: Batch) -> list[list[list[int]]]:
        assert batch.documents is not None
        return [part.tolist() for part in (batch.tokens, batch.targets, batch.documents)]

    one, other = make(3), make(3)
    straight = [listed(one.at(step)) for step in range(60)]
    assert [listed(other.at(step)) for step in reversed(range(60))] == straight[::-1]
    assert [listed(make(8).at(step)) for step in range(60)] != straight
    epoch = one.rows_an_epoch // 2
    assert straight[:epoch] != straight[epoch : 2 * epoch]


def test_weights_repeat_a_source_or_take_a_part_of_it() -> None:
    sources = [packed(20, seed=seed) for seed in range(3)]
    for offset, rows in enumerate(sources):
        for one in rows.conversations:
            one.ids[0] += 20 * offset
    batches = ChatBatches(
        [ChatSource(rows, weight) for rows, weight in zip(sources, (1, 3, 0.5), strict=True)], batch_size=1, seed=0
    )
    assert batches.chat_rows == len(sources[0]) + 3 * len(sources[1]) + round(len(sources[2]) / 2)
    epochs = [
        Counter(
            number
            for step in range(epoch * batches.rows_an_epoch, (epoch + 1) * batches.rows_an_epoch)
            for number in firsts(batches.at(step))
        )
        for epoch in range(2)
    ]
    for counts in epochs:
        assert all(counts[number] == 1 for number in range(20))
        assert all(counts[number] == 3 for number in range(20, 40))
        assert 0 < sum(counts[number] for number in range(40, 60)) < 20
    if len(sources[2]) % 2 == 0:
        assert all((epochs[0] + epochs[1])[number] == 1 for number in range(40, 60)), "the other half comes next"


def test_rows_of_text_stand_evenly_between() -> None:
    source = packed(60)
    batches = ChatBatches([ChatSource(source)], batch_size=1, seed=0, text=Text(CONTEXT * 9 + 1), text_share=0.25)
    assert batches.rows_an_epoch == round(len(source) / 0.75)
    rows = [batches.at(step) for step in range(80)]
    is_text = [int(row.tokens[0, 0]) >= 1_000 for row in rows]
    assert [sum(is_text[start : start + 4]) for start in range(0, 80, 4)] == [1] * 20
    windows = [row for row, text in zip(rows, is_text, strict=True) if text]
    assert len({int(row.tokens[0, 0]) for row in windows[:9]}) == 9, "each window once a pass"
    for row in windows:
        assert torch.equal(row.targets, row.tokens + 1)
        assert row.documents is not None
        assert not row.documents.any()


def test_what_cannot_be_is_refused() -> None:
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"^weight is "):
            ChatSource(packed(3), weight)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"^text_share is "):
            ChatBatches([ChatSource(packed(3))], batch_size=1, seed=0, text=Text(99), text_share=share)
    with pytest.raises(DataError, match="fewer than one window"):
        ChatBatches([ChatSource(packed(3))], batch_size=1, seed=0, text=Text(5), text_share=0.5)


def test_scoring_reads_every_row_in_order() -> None:
    rows = packed(30)
    parts = list(batches_of(rows, 4))
    assert [len(part.tokens) for part in parts[:-1]] == [4] * (len(parts) - 1)
    assert sorted(number for part in parts for number in firsts(part)) == list(range(30))


def separate(one: Encoded) -> Batch:
    """A conversation alone, in no row and next to no other."""
    tokens = torch.from_numpy(one.ids[:-1].astype(np.int64))[None]
    targets = torch.from_numpy(np.where(one.trained, one.ids, IGNORED)[1:].astype(np.int64))[None]
    return Batch(tokens, targets)


def loss_and_gradients(name: str, batches: list[Batch], device: str) -> tuple[float, dict[str, torch.Tensor]]:
    objective, model = NextToken(), make_model(VARIANTS[name]).to(device)
    loss = torch.zeros((), device=device)
    for batch in batches:
        loss = loss + objective.loss_sum(model, batch.to(torch.device(device)))
    loss.backward()
    return float(loss.detach()), {
        part: weight.grad.cpu() for part, weight in model.named_parameters() if weight.grad is not None
    }


def check_packed_equals_separate(name: str, device: str, tolerance: float) -> None:
    everything = conversations(12, seed=5, longest=9)
    rows = PackedRows(everything, CONTEXT, pad_id=3)
    assert any(len(row) > 2 for row in rows.rows)
    assert rows.positions < len(rows) * CONTEXT, "some padding"
    packed_batches, alone = list(batches_of(rows, 4)), [separate(one) for one in everything]
    for batches in (packed_batches, alone):
        assert sum(NextToken().weight(batch) for batch in batches) == rows.targets
    packed_loss, packed_grads = loss_and_gradients(name, packed_batches, device)
    loss, grads = loss_and_gradients(name, alone, "cpu")
    assert packed_loss == pytest.approx(loss, rel=tolerance)
    assert packed_grads.keys() == grads.keys() == dict(make_model(VARIANTS[name]).named_parameters()).keys()
    for parameter, gradient in grads.items():
        scale = float(gradient.abs().max())
        # A bias of all keys moves every score of a query alike, so that its gradient is nothing but rounding.
        assert scale > 1e-3 or parameter.endswith("k_proj.bias"), parameter
        torch.testing.assert_close(
            packed_grads[parameter], gradient, rtol=10 * tolerance, atol=2 * tolerance * max(scale, 1.0)
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_equals_separate(name: str) -> None:
    """Fault 23: the summed loss and every gradient, for every architecture option."""
    check_packed_equals_separate(name, "cpu", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_on_a_gpu_equals_separate_on_a_cpu(name: str) -> None:
    check_packed_equals_separate(name, "cuda", 1e-4)
