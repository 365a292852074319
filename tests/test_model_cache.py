"""What each query sees through the cache, token by token, for any way to cut, pad and drop rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from variants import CONTEXT, VARIANTS

from minigpt.config import ModelConfig
from minigpt.model.cache import AttentionPlan, KVCache

GARBAGE = -1.0  # what padding writes


def config_with(window: int) -> ModelConfig:
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    return replace(VARIANTS["qwen3"], **one, max_position_embeddings=window)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pass:
    """One forward pass: how many tokens a row, how many of them are real, and which rows go on after it."""

    new: int
    real: list[int]
    kept: list[int]


@st.composite
def passes(draw: st.DrawFn) -> list[Pass]:
    found, rows = [], draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 9))):
        new = draw(st.integers(1, 6))
        padded = draw(st.booleans())
        real = [draw(st.integers(0, new)) if padded else new for _ in range(rows)]
        kept = list(draw(st.permutations(range(rows))))[: draw(st.integers(1, rows))]
        found.append(Pass(new, real, kept))
        rows = len(kept)
    return found


def smallest_capacity(run: list[Pass], window: int) -> int:
    """No wrap, or room for a window and the widest chunk."""
    lengths, longest = [0] * len(run[0].real), 0
    for step in run:
        longest = max(longest, max(lengths) + step.new)
        lengths = [lengths[row] + step.real[row] for row in step.kept]
    return min(longest, window + max(step.new for step in run) - 1)


def visible(keys: Tensor, plan: AttentionPlan, new: int) -> list[list[list[float]]]:
    """The marks (B, S) that each of the (B, new) queries may look at."""
    rows, slots = keys.shape
    if plan.is_causal:
        assert plan.mask is None
        assert slots == new, "a triangle that is not square is aligned at the wrong corner"
    everything = torch.ones(rows, 1, new, slots, dtype=torch.bool)
    mask = everything.tril() if plan.is_causal else everything & (True if plan.mask is None else plan.mask)
    return [[keys[row][mask[row, 0, place]].tolist() for place in range(new)] for row in range(rows)]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(passes(), st.integers(1, 7), st.integers(0, 3))
def test_each_query_sees_exactly_the_band_of_its_own_row(run: list[Pass], window: int, spare: int) -> None:
    names = [1000 * (row + 1) for row in range(len(run[0].real))]  # a row's tokens are marked name + position
    lengths = [0] * len(names)
    cache = KVCache(config_with(window), len(names), smallest_capacity(run, window) + spare)
    for step in run:
        plan = cache.plan(step.new)
        positions = torch.tensor(lengths).unsqueeze(-1) + torch.arange(step.new)
        assert torch.equal(plan.positions.expand(len(names), -1), positions)
        padding = torch.arange(step.new) >= torch.tensor(step.real).unsqueeze(-1)
        marks = (torch.tensor(names).unsqueeze(-1) + positions).float().masked_fill(padding, GARBAGE)
        written = marks.view(len(names), 1, step.new, 1).expand(-1, -1, -1, 2)
        keys, values = cache.write(0, written, -written, plan)
        assert torch.equal(keys, -values)
        cache.advance(step.real)
        for row, queries in enumerate(visible(keys[:, 0, :, 0], plan, step.new)):
            assert all(queries), "a query without a key gives NaN"
            for place in range(step.real[row]):
                query = lengths[row] + place
                band = range(max(0, query - window + 1), query + 1)
                assert sorted(queries[place]) == [names[row] + position for position in band]
        cache.keep(step.kept)
        names = [names[row] for row in step.kept]
        lengths = [lengths[row] + step.real[row] for row in step.kept]
        assert cache.lengths == lengths


@pytest.mark.parametrize(
    ("window", "capacity", "before", "new"),
    [
        (4, 4, 4, 2),  # the second token would overwrite a key that the first still sees
        (4, 6, 4, 4),
        (4, 3, 3, 1),  # a ring smaller than the window loses keys even one by one
        (4, 3, 0, 4),
    ],
)
def test_a_chunk_that_overruns_the_ring_is_refused(window: int, capacity: int, before: int, new: int) -> None:
    cache = KVCache(config_with(window), 1, capacity)
    cache.advance([before])
    with pytest.raises(AssertionError, match="overruns the ring"):
        cache.plan(new)


def test_the_window_is_the_context_or_what_slides_over_it() -> None:
    assert KVCache(VARIANTS["qwen3"], 1, CONTEXT).window == CONTEXT
    assert KVCache(VARIANTS["mistral"], 1, CONTEXT).window == VARIANTS["mistral"].sliding_window == 6


def test_memory_is_taken_once() -> None:
    config = VARIANTS["qwen3"]
    cache = KVCache(config, 3, 20, dtype=torch.bfloat16)
    assert cache.keys.shape == cache.values.shape == (2, 3, 2, 20, 8)  # (L, B, K, S, D)
    assert cache.keys.dtype == torch.bfloat16
    assert cache.capacity == 20
    place = cache.keys.data_ptr()
    plan = cache.plan(4)
    cache.write(1, torch.ones(3, 2, 4, 8), torch.ones(3, 2, 4, 8), plan)
    assert cache.keys.data_ptr() == place
    assert cache.keys[0].count_nonzero() == 0
    assert cache.keys[1].count_nonzero() == 3 * 2 * 4 * 8
    assert cache.lengths == [0, 0, 0]  # only the forward pass counts
