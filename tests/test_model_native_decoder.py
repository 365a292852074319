"""The decoder in one call: what PyTorch computes, and the same bits for a row wherever and however it is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from variants import CONTEXT, VARIANTS, make_model, random_tokens

from minigpt.config import ModelConfig, QuantizeName
from minigpt.model import native
from minigpt.model.cache import KVCache
from minigpt.model.decoding import prepare
from minigpt.model.transformer import GPT

LLAMAS = {name: config for name, config in VARIANTS.items() if config.traits.norm == "rms" and config.head_dim % 8 == 0}
OTHERS = {name: config for name, config in VARIANTS.items() if name not in LLAMAS}
# Heads of 80 are gathered in a wide and two narrow parts; half of 160 outputs is no multiple of a block of 16.
LARGE = replace(
    VARIANTS["qwen3"],
    hidden_size=160,
    num_attention_heads=6,
    head_dim=80,
    intermediate_size=224,
    max_position_embeddings=33,
    vocab_size=64,
)
KINDS: tuple[QuantizeName | None, ...] = (None, "int8", "int4")


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    if native.library() is None:
        pytest.skip("no C compiler here")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def ready_model(config: ModelConfig, kind: QuantizeName | None = None) -> GPT:
    model = make_model(config)
    prepare(model, kind)
    assert model.model.native is not None
    return model


def without(model: GPT) -> GPT:
    """The same weights, one PyTorch call after the other."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other.model = copy.copy(model.model)
    other.model.native = None
    return other


@torch.no_grad()
def hidden(model: GPT, tokens: Tensor, cuts: list[int], capacity: int) -> Tensor:
    """Hidden states (B, T, C) of tokens that are read in pieces of these lengths."""
    cache = KVCache(model.config, tokens.shape[0], capacity)
    return torch.cat([model.model(piece, cache) for piece in tokens.split(cuts, dim=1)], dim=1)


@pytest.mark.parametrize("config", [*LLAMAS.values(), LARGE], ids=[*LLAMAS, "large"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_numbers_are_those_of_pytorch(config: ModelConfig, threads: int) -> None:
    model, tokens = ready_model(config), random_tokens(3, 2 * CONTEXT + 6)
    torch.set_num_threads(threads)
    cuts, capacity = [9, *[1] * 20, 3, 4, 2], config.window + 3  # around the ring, several tokens at a time
    found = hidden(model, tokens, cuts, capacity)
    torch.testing.assert_close(found, hidden(without(model), tokens, cuts, capacity), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [VARIANTS["mistral"], VARIANTS["qwen2"], LARGE], ids=["mistral", "qwen2", "large"])
def test_a_row_has_the_same_bits_alone_in_pieces_and_with_other_threads(
    config: ModelConfig, kind: QuantizeName | None
) -> None:
    model, tokens = ready_model(config, kind), random_tokens(7, CONTEXT)
    capacity = CONTEXT + 3
    torch.set_num_threads(1)
    together = hidden(model, tokens, [1] * CONTEXT, capacity)
    for threads, rows, cuts in ((2, 7, [1] * CONTEXT), (1, 1, [1] * CONTEXT), (2, 2, [CONTEXT]), (2, 5, [5, 3, 1, 7])):
        torch.set_num_threads(threads)
        for start in range(0, 7 - rows + 1, rows):
            found = hidden(model, tokens[start : start + rows], cuts, capacity)
            assert torch.equal(found, together[start : start + rows])


@torch.no_grad()
def test_rows_of_different_lengths() -> None:
    model, tokens = ready_model(VARIANTS["mistral"]), random_tokens(3, 20)
    cache, real = KVCache(model.config, 3, 9), [4, 1, 3]
    model.model(tokens[:, :4], cache, real)
    assert cache.lengths == real
    place = torch.tensor(real)
    for _ in range(12):  # each goes around its ring by itself
        found = model.model(tokens.gather(1, place.unsqueeze(1)), cache)
        place += 1
        for row, end in enumerate(place.tolist()):
            assert torch.equal(found[row, 0], hidden(model, tokens[row : row + 1, :end], [1] * end, 9)[0, -1])


@torch.no_grad()
def test_what_would_leave_the_table_or_the_ring_is_refused() -> None:
    model = ready_model(VARIANTS["mistral"])
    for token in (-1, model.config.vocab_size):
        with pytest.raises(IndexError):
            model.model(torch.tensor([[token]]), KVCache(model.config, 1, 8))
    with pytest.raises(AssertionError, match="overruns the ring"):
        model.model(random_tokens(1, 9), KVCache(model.config, 1, 8))


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_what_it_has_no_code_for_is_left_to_pytorch(config: ModelConfig) -> None:
    for kind in KINDS:
        model = make_model(config)
        prepare(model, kind)
        assert model.model.native is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_are_left_to_pytorch(dtype: torch.dtype) -> None:
    for kind in KINDS:
        model = make_model(VARIANTS["qwen3"]).to(dtype)
        prepare(model, kind)
        assert model.model.native is None
