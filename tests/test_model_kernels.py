"""Compiled kernels stand in for plain ones: what they compute is the same, and generation never meets them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from variants import VARIANTS, make_model, random_tokens

from minigpt.model.cache import KVCache
from minigpt.model.kernels import Kernels, run_block
from minigpt.model.loss import IGNORED, softmax_slope


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral"])
def test_flex_attention_sees_what_the_dense_mask_shows(name: str) -> None:
    config = VARIANTS[name]
    model = make_model(config).train()
    length = config.max_position_embeddings
    tokens = random_tokens(3, length)
    documents = torch.randint(0, 4, (3, length), generator=torch.Generator().manual_seed(3)).sort(dim=1).values
    with torch.no_grad():
        dense = model(tokens, documents=documents)
        model.model.kernels = Kernels(flex=True)
        found = model(tokens, documents=documents)
        whole = model(tokens)
    assert torch.allclose(found, dense, rtol=0, atol=1e-4)
    assert not torch.allclose(found, whole, rtol=0, atol=1e-2), "the documents matter"


def test_only_training_without_a_cache_runs_the_kernels() -> None:
    model = make_model(VARIANTS["qwen3"])
    calls: list[int] = []
    model.model.kernels = Kernels(block=lambda *args: calls.append(1) or run_block(*args))  # type: ignore[func-returns-value]
    tokens = random_tokens(1, 5)
    model(tokens)
    model.train()
    model(tokens, KVCache(model.config, 1, 16))
    assert not calls
    model(tokens)
    assert len(calls) == model.config.num_hidden_layers


def test_the_slope_is_the_gradient_of_the_loss() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([0, 6, IGNORED, 3, 3])
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    expected.backward()
    loss, slope = softmax_slope(logits.detach(), targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits.grad is not None
    assert torch.allclose(slope, logits.grad, rtol=0, atol=1e-6)
    assert not slope[2].any()


def test_dropout_keeps_the_dense_mask() -> None:
    model = make_model(replace(VARIANTS["qwen3"], dropout=0.1)).train()
    model.model.kernels = Kernels(flex=True)
    documents = torch.zeros(1, 5, dtype=torch.long)
    model(random_tokens(1, 5), documents=documents).sum().backward()  # FlexAttention has no dropout
