"""A model laid out for generation computes what it did, with and without a cache, alone and in a batch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from variants import CONTEXT, ENDLESS, VARIANTS, make_model, random_tokens

from minigpt.alignment.value_head import add_value_head
from minigpt.config import LoraConfig, ModelConfig
from minigpt.model.cache import KVCache
from minigpt.model.decoding import laid_out, prepare
from minigpt.model.lora import adapters, add_lora
from minigpt.model.transformer import GPT


def pair(config: ModelConfig) -> tuple[GPT, GPT]:
    """A model, and its copy laid out for generation."""
    plain = make_model(config)
    ready = copy.deepcopy(plain)
    prepare(ready)
    return plain, ready


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_the_logits_stay_the_same(config: ModelConfig) -> None:
    plain, ready = pair(config)
    tokens = random_tokens(3, CONTEXT)
    torch.testing.assert_close(ready(tokens), plain(tokens), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", ENDLESS.values(), ids=ENDLESS)
@torch.no_grad()
def test_token_by_token_past_the_context_the_logits_stay_the_same(config: ModelConfig) -> None:
    plain, ready = pair(config)
    tokens = random_tokens(2, 2 * CONTEXT)
    cache = KVCache(config, 2, CONTEXT)
    steps = [ready(tokens[:, place : place + 1], cache) for place in range(2 * CONTEXT)]
    torch.testing.assert_close(torch.cat(steps, dim=1), plain(tokens), rtol=5e-5, atol=5e-5)


@torch.no_grad()
def test_a_tied_output_stays_the_embedding() -> None:
    _, ready = pair(VARIANTS["qwen3"])
    assert ready.lm_head.weight.data_ptr() == ready.model.embed_tokens.weight.data_ptr()


@torch.no_grad()
def test_fewer_products_are_made() -> None:
    plain, ready = pair(VARIANTS["qwen3"])

    def matrices(model: GPT) -> int:
        return sum(isinstance(module, torch.nn.Linear) for module in model.modules())

    layers = plain.config.num_hidden_layers
    assert (matrices(plain), matrices(ready)) == (7 * layers + 1, 4 * layers + 1)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@torch.no_grad()
def test_other_types_keep_their_type(name: str) -> None:
    plain = make_model(replace(VARIANTS[name], num_hidden_layers=1)).to(torch.bfloat16)
    tokens = random_tokens(2, 5)
    expected = plain(tokens)
    prepare(plain)
    torch.testing.assert_close(plain(tokens), expected, rtol=0.05, atol=0.2)
    assert plain(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "qwen3-heads-of-16", "gpt2", "transformer-2017"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_is_trained_is_laid_out_beside_itself(name: str, lora: bool) -> None:
    model, tokens = make_model(replace(VARIANTS[name], dropout=0.5)).train(), random_tokens(2, CONTEXT)
    if lora:
        add_lora(model, LoraConfig(rank=2, alpha=8.0), torch.Generator().manual_seed(0))
    add_value_head(model)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    for step in range(2):
        with torch.no_grad():
            for layer in adapters(model).values():
                layer.lora_B += 0.1 * (step + 1)
            model.lm_head.weight *= 1.5
            expected = model.eval()(tokens)
            found = laid_out(model.train())(tokens)
        torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)
    assert model.training
    assert all(weight.requires_grad or lora for weight in model.parameters())
    changed = [key for key, weight in model.state_dict().items() if not torch.equal(weight, before[key])]
    assert all(key.endswith(("lora_B", "lm_head.weight", "embed_tokens.weight")) for key in changed)
    model(tokens).sum().backward()
