"""Weights in fewer bits: how near they come, and that every way to multiply with them gives the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from variants import CONTEXT, VARIANTS, make_model, random_tokens

from minigpt import compiler
from minigpt.config import ModelConfig, QuantizeName
from minigpt.model import native
from minigpt.model.cache import KVCache
from minigpt.model.decoding import prepare
from minigpt.model.quantize import GROUP, QuantizedEmbedding, QuantizedLinear, quantized
from minigpt.model.transformer import GPT

KINDS: tuple[QuantizeName, ...] = ("int8", "int4")


def random_matrix(outs: int, ins: int, seed: int = 0) -> Tensor:
    return torch.randn(outs, ins, generator=torch.Generator().manual_seed(seed))


def test_int8_is_off_by_half_a_step_of_its_row_at_most() -> None:
    weight = random_matrix(12, 50) * torch.logspace(-3, 2, 12).unsqueeze(-1)
    found = QuantizedLinear(weight, None, "int8")
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((found.weight - weight).abs() <= 0.5001 * step).all()
    assert found.numbers.dtype == torch.int8
    assert found.numbers.abs().amax() == 127


def test_int4_is_off_by_little_more_than_half_a_step_of_its_group() -> None:
    weight = random_matrix(8, 3 * GROUP) + torch.linspace(-1, 1, 3 * GROUP)
    found = QuantizedLinear(weight, None, "int4")
    groups = weight.unflatten(-1, (-1, GROUP))
    span = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    error = (found.weight - weight).unflatten(-1, (-1, GROUP)).abs()
    assert (error <= span / 15 * 0.62).all()  # scale and zero are bfloat16, so up to 0.4 % beside the best
    assert found.numbers.numel() == weight.numel() // 2


def test_int4_by_hand() -> None:
    weight = torch.arange(GROUP).float().remainder(16).repeat(4, 1)  # 0 … 15 twice in a group
    found = QuantizedLinear(weight, None, "int4")
    assert torch.equal(found.weight, weight)
    assert found.numbers[0, :3].tolist() == [0 | 1 << 4, 2 | 3 << 4, 4 | 5 << 4]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_all_equal_or_zero(kind: QuantizeName) -> None:
    for value in (0.0, 0.5, -2.0):
        weight = torch.full((4, GROUP), value)
        torch.testing.assert_close(QuantizedLinear(weight, None, kind).weight, weight, rtol=0.01, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(4, 32), (12, 96), (52, 64), (32, 128), (7, 64), (5, 20)])
def test_a_product_is_that_with_its_weights(kind: QuantizeName, bias: bool, outs: int, ins: int) -> None:
    layer = quantized(random_matrix(outs, ins), torch.arange(outs).float() if bias else None, kind)
    assert layer.kind == (kind if ins % GROUP == 0 else "int8")
    for rows in (1, 2, 3, 4, 7, 49):
        x = random_matrix(rows, ins, seed=rows).unsqueeze(1)
        expected = (x.double() @ layer.weight.double().t()) + (0 if layer.bias is None else layer.bias)
        half_a_step = x.abs().amax(-1, keepdim=True) / 32_766 / 2  # of what is multiplied, in 16 bits
        most = half_a_step * layer.weight.abs().sum(-1)
        assert ((layer(x) - expected).abs() <= most + 1e-5 * (1 + expected.abs())).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ins", [64, 1024])
def test_whole_numbers_are_multiplied_exactly(kind: QuantizeName, ins: int) -> None:
    numbers, most = torch.arange(4 * ins).remainder(16).view(4, ins).float(), 2**15 - 1
    if kind == "int8":
        numbers, most = numbers.sub_(8).sign_() * 127, min(most, (2**31 - 1) // (127 * ins))
    layer = quantized(numbers, None, kind)
    x = torch.randint(-most, most, (5, ins), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0], x[0] = most, most * numbers[1].sign()  # the greatest sum of all
    expected = x.double() @ layer.weight.double().t()
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-6, atol=100)  # of up to 2e9


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_is_bit_for_bit_that_row_among_others(kind: QuantizeName) -> None:
    if native.library() is None:
        pytest.skip("no C compiler here")
    layer = quantized(random_matrix(64, 128), None, kind)
    x = random_matrix(11, 128, seed=1)
    alone = torch.cat([layer(x[row : row + 1]) for row in range(11)])
    for rows in (2, 3, 4, 5, 11):
        assert torch.equal(layer(x[:rows]), alone[:rows])


@pytest.mark.parametrize("found", [None, "false"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_that_works_pytorch_multiplies(
    kind: QuantizeName, found: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    try:
        assert native.library() is None
        layer = quantized(random_matrix(64, 96), None, kind)
    finally:
        native.library.cache_clear()
    x = random_matrix(3, 96, seed=1)
    torch.testing.assert_close(layer(x), x @ layer.weight.t(), rtol=0.02, atol=0.2)  # bfloat16: 8 bits


def with_rounded_weights(plain: GPT, ready: GPT) -> GPT:
    """The plain model with the weights that the quantised one stands for."""
    model = copy.deepcopy(plain)
    head = ready.lm_head.weight
    model.lm_head.weight.data = head
    if isinstance(ready.model.embed_tokens, QuantizedEmbedding):
        model.model.embed_tokens.weight.data = head
    for block, fused in zip(model.model.layers, ready.model.layers, strict=True):
        attention, own = block.self_attn, fused.self_attn
        sizes = [layer.out_features for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        for layer, weight in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj), own.qkv_proj.weight.split(sizes), strict=True
        ):
            layer.weight.data = weight
        attention.o_proj.weight.data = own.o_proj.weight
        gate = block.mlp.gate_proj
        wide = fused.mlp.wide_proj.weight
        if gate is not None:
            gate.weight.data, wide = wide.chunk(2)
        block.mlp.up_proj.weight.data = wide
        block.mlp.down_proj.weight.data = fused.mlp.down_proj.weight
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_a_model_computes_with_its_rounded_weights_and_nothing_else(config: ModelConfig, kind: QuantizeName) -> None:
    plain = make_model(config)
    ready = copy.deepcopy(plain)
    prepare(ready, kind)
    tokens = random_tokens(2, CONTEXT)
    expected = with_rounded_weights(plain, ready)(tokens)
    cache = KVCache(config, 2, CONTEXT)
    steps = [ready(tokens[:, place : place + 1], cache) for place in range(CONTEXT)]
    for found in (ready(tokens), torch.cat(steps, dim=1)):
        # What is multiplied is rounded to 12 bits or more; 8 would cost some 1e-2.
        assert (found - expected).square().mean().sqrt() < 5e-4 * expected.std()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fewer_bits_take_less_memory(kind: QuantizeName) -> None:
    ready = make_model(VARIANTS["llama"])
    count: Callable[[GPT], int] = lambda model: sum(  # noqa: E731
        t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]
    )
    before = count(ready)
    prepare(ready, kind)
    assert count(ready) < before / (2.5 if kind == "int8" else 3)
