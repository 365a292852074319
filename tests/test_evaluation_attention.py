"""Attention weights against the modules' own output and a loop over single numbers."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from variants import CONTEXT, ENDLESS, VARIANTS, VOCAB

from minigpt.config import ModelConfig
from minigpt.errors import DataError
from minigpt.evaluation.attention import attention_svg, attention_weights
from minigpt.model.transformer import GPT

every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def make(config: ModelConfig) -> GPT:
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(2))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0)
    return model.eval()


def some_tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(4)).tolist()


@every_variant
def test_rows_are_shares_of_what_came_before(config: ModelConfig) -> None:
    weights = attention_weights(make(config), some_tokens(12))
    assert weights.shape == (config.num_hidden_layers, config.num_attention_heads, 12, 12)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert bool((weights.triu(1) == 0).all())
    assert bool((weights >= 0).all())


@pytest.mark.parametrize("count", [1, 2, CONTEXT, 2 * CONTEXT])
@every_variant
def test_weights_times_values_are_the_modules_own_output(config: ModelConfig, count: int) -> None:
    if config.architecture == "gpt2" and count > CONTEXT:
        pytest.skip("learned positions end with the context")
    model, tokens = make(config), some_tokens(count)
    taken: list[tuple[Tensor, Tensor]] = []
    for block in model.model.layers:
        block.self_attn.register_forward_hook(lambda _, args, out: taken.append((args[0], out)))
    weights = attention_weights(model, tokens)
    assert len(taken) == config.num_hidden_layers
    for layer, (x, out) in enumerate(taken):
        module = model.model.layers[layer].self_attn
        value = module.v_proj(x[0]).unflatten(-1, (config.num_key_value_heads, config.head_dim))  # (T, K, D)
        group = config.num_attention_heads // config.num_key_value_heads
        heads = [weights[layer, head] @ value[:, head // group] for head in range(config.num_attention_heads)]
        with torch.no_grad():
            torch.testing.assert_close(module.o_proj(torch.cat(heads, -1)), out[0], atol=2e-5, rtol=1e-4)


def test_a_weight_is_the_softmax_of_products_over_the_root_of_the_width() -> None:
    config = VARIANTS["transformer-2017-grouped-untied"]
    model, tokens = make(config), some_tokens(5)
    weights = attention_weights(model, tokens)
    with torch.no_grad():
        x = model.model.embed(torch.tensor([tokens]), torch.arange(5))[0]  # post-norm: what the first layer is given
        query, key = model.model.layers[0].self_attn.q_proj(x), model.model.layers[0].self_attn.k_proj(x)
    D = config.head_dim
    for head, shared in enumerate((0, 0, 1, 1)):  # four heads, two keys
        for row in range(5):
            products = [
                sum(float(query[row, head * D + i]) * float(key[column, shared * D + i]) for i in range(D))
                for column in range(row + 1)
            ]
            powers = [math.exp(product / math.sqrt(D)) for product in products]
            expected = [power / sum(powers) for power in powers]
            assert weights[0, head, row, : row + 1].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("config", ENDLESS.values(), ids=ENDLESS)
def test_past_the_context_a_token_sees_one_context_back(config: ModelConfig) -> None:
    weights = attention_weights(make(config), some_tokens(CONTEXT + 5))
    assert bool((weights.tril(-CONTEXT) == 0).all())
    assert bool((weights[:, :, -1, -CONTEXT:] > 0).any())


def test_training_mode_comes_back_and_no_hook_stays() -> None:
    model = make(VARIANTS["qwen3"]).train()
    attention_weights(model, some_tokens(4))
    assert model.training
    assert not model.model.layers[0].self_attn._forward_pre_hooks


def test_what_cannot_be_shown_is_said() -> None:
    with pytest.raises(DataError, match="no token"):
        attention_weights(make(VARIANTS["qwen3"]), [])
    with pytest.raises(DataError, match="17 tokens are more than the model's context of 16"):
        attention_weights(make(VARIANTS["gpt2"]), some_tokens(CONTEXT + 1))
    with pytest.raises(DataError, match="20,000 tokens are too many"):
        attention_weights(make(VARIANTS["qwen3"]), [0] * 20_000)


def test_a_picture_has_a_map_for_every_head_and_every_token_by_name() -> None:
    weights = attention_weights(make(VARIANTS["qwen3"]), some_tokens(4))
    picture = attention_svg(["<a&b>", ' "x"', "\n", "\x1b\ud800"], weights)
    assert picture.encode("utf-8")
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    L, H = weights.shape[:2]
    assert [f"layer {layer} head {head}" for layer in range(L) for head in range(H)] == [
        text for text in texts if text and text.startswith("layer")
    ]
    for name in ("<a&b>", '·"x"', "↵", "��"):
        assert texts.count(name) == L + H  # beside every row of maps, below every column
    maps = root.findall(f"{space}g")
    assert len(maps) == L * H
    for place, drawn in enumerate(maps):
        cells = sum(path.attrib["d"].count("h1v1") for path in drawn.findall(f"{space}path"))
        assert cells == int((weights.flatten(0, 1)[place].sqrt() * 16).round().count_nonzero())


def test_a_long_text_gets_fewer_names_than_tokens() -> None:
    T = 100
    picture = attention_svg(["word"] * T, torch.ones(1, 1, T, T).tril() / T)
    assert 20 <= picture.count(">word<") // 2 < T
    assert len(picture) < 200_000
