"""LoRA: an update beside a frozen matrix, what of it is trained, and how it is added."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from variants import VARIANTS, make_model, random_tokens

from minigpt.config import LORA_TARGETS, LoraConfig
from minigpt.errors import ConfigError
from minigpt.model.lora import LoraLinear, adapters, add_lora, add_update, block_matrices, lora_parameters
from minigpt.model.transformer import GPT

LORA = LoraConfig(rank=4, alpha=6.0)


def adapted(variant: str, config: LoraConfig = LORA, *, trained: bool = True) -> GPT:
    """A model with adapters; trained ones have a B far from the zero it begins at."""
    model, generator = make_model(VARIANTS[variant]), torch.Generator().manual_seed(4)
    add_lora(model, config, generator)
    if trained:
        with torch.no_grad():
            for layer in adapters(model).values():
                layer.lora_B.normal_(0.0, 0.3, generator=generator)
    return model.eval()


@torch.no_grad()
def logits(model: GPT) -> Tensor:
    found: Tensor = model(random_tokens(2, 12))
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_fresh_adapters_change_nothing(variant: str) -> None:
    assert torch.equal(logits(adapted(variant, trained=False)), logits(make_model(VARIANTS[variant])))


def test_a_layer_is_what_the_paper_says() -> None:
    layer = adapters(adapted("gpt2"))["model.layers.1.mlp.up_proj"]
    layer.requires_grad_(False)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    by_hand = [
        [
            sum(float(layer.weight[o, i] * row[i]) for i in range(32))
            + float(layer.bias[o])
            + 6.0 / 4 * sum(float(layer.lora_B[o, r] * (layer.lora_A[r] @ row)) for r in range(4))
            for o in (0, 7, 47)
        ]
        for row in x
    ]
    assert torch.allclose(layer(x)[:, [0, 7, 47]], torch.tensor(by_hand), atol=1e-5)


@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "transformer-2017"])
def test_only_adapters_are_trained(variant: str) -> None:
    model = adapted(variant).train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    model(random_tokens(2, 12)).logsumexp(-1).sum().backward()
    optimizer.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {f"{name}.lora_{letter}" for name in adapters(model) for letter in "AB"}
    assert moved == {name for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("variant", ["qwen3", "llama-untied-ungrouped", "gpt2", "transformer-2017-grouped-untied"])
@pytest.mark.parametrize("targets", [None, ("k_proj",), ("up_proj", "q_proj")])
def test_the_size_by_arithmetic(variant: str, targets: tuple[str, ...] | None) -> None:
    config = LoraConfig(rank=5, targets=targets)
    model = adapted(variant, config)
    counted = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert lora_parameters(make_model(VARIANTS[variant]), config) == counted > 0
    chosen = {name.rpartition(".")[2] for name in adapters(model)}
    everything = {name.rpartition(".")[2] for name in block_matrices(make_model(VARIANTS[variant]))}
    assert chosen == (set(targets) if targets else everything)
    assert everything <= set(LORA_TARGETS)


def test_dropout_is_of_the_update_and_of_training_alone() -> None:
    model = adapted("qwen3", LoraConfig(rank=4, dropout=0.5))
    assert torch.equal(logits(model), logits(model))
    assert torch.equal(logits(model), logits(adapted("qwen3", LoraConfig(rank=4))))
    layer = adapters(model.train())["model.layers.0.mlp.up_proj"]
    x = torch.ones(400, 32)
    plain = torch.nn.functional.linear(x, layer.weight)
    assert not torch.allclose(layer(x), layer(x))
    full = layer.eval()(x) - plain
    noisy = layer.train()(x) - plain
    assert torch.allclose(noisy.mean(0), full.mean(0), atol=0.15 * full.abs().max().item()), "what is left is doubled"


def test_the_start_depends_on_the_seed_alone() -> None:
    def start(seed: int) -> Sequence[Tensor]:
        model = make_model(VARIANTS["qwen3"])
        torch.manual_seed(seed + 100)
        add_lora(model, LORA, torch.Generator().manual_seed(seed))
        return [layer.lora_A for layer in adapters(model).values()]

    one, again, other = start(1), start(1), start(2)
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
    assert all(0.1 < a.abs().max() * 32**0.5 <= 1.0 for a in one if a.shape[1] == 32)


def test_a_tied_output_stays_frozen_and_tied() -> None:
    model = adapted("qwen3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not isinstance(model.lm_head, LoraLinear)
    assert not model.lm_head.weight.requires_grad


def test_an_update_is_added_in_float32_and_rounded_once() -> None:
    for layer in adapters(adapted("qwen3")).values():
        a, b, narrow = layer.lora_A.detach(), layer.lora_B.detach(), layer.weight.detach().bfloat16()
        exact = narrow.float() + layer.scaling * (b @ a)
        add_update(narrow, a, b, layer.scaling)
        assert narrow.dtype == torch.bfloat16
        assert ((narrow.float() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all(), "half a step of eight bits"


def test_a_target_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^lora targets: gpt2 has no gate_proj \(choose from q_proj, .*down_proj\)$"):
        adapted("gpt2", LoraConfig(targets=("q_proj", "gate_proj")))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank is 0; it must be a whole number of at least 1"),
        ({"rank": 2.5}, "rank is 2.5; it must be a whole number of at least 1"),
        ({"alpha": 0.0}, "alpha is 0.0; it must be in (0, inf)"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be in [0, 0.99]"),
        ({"targets": ()}, "targets is empty; choose from q_proj"),
        ({"targets": ("q_proj", "lm_head")}, "target 'lm_head' is unknown (choose from q_proj"),
    ],
)
def test_settings_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LoraConfig(**values)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)
