"""One contract for every architecture option: the naive reference, causality, the cache, gradients, documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from variants import CONTEXT, ENDLESS, VARIANTS, VOCAB, make_model, random_tokens

from minigpt.config import ModelConfig
from minigpt.model.cache import KVCache
from minigpt.model.loss import loss_sum
from minigpt.model.transformer import GPT

TOLERANCE = 2e-5  # float32 rounding in logits of size 1 to 10

every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
every_endless_variant = pytest.mark.parametrize("config", ENDLESS.values(), ids=ENDLESS)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def in_pieces(model: GPT, tokens: Tensor, sizes: list[int], capacity: int) -> Tensor:
    cache = KVCache(model.config, tokens.shape[0], capacity)
    pieces = [model(piece, cache) for piece in tokens.split(sizes, dim=1)]
    assert cache.lengths == [tokens.shape[1]] * tokens.shape[0]
    return torch.cat(pieces, dim=1)


def without_effect(config: ModelConfig, name: str) -> bool:
    """A key bias that is not turned adds the same to all scores of a query, which softmax does not see.

    Its gradient is nothing but rounding.
    """
    return name.endswith("k_proj.bias") and config.traits.positions != "rotary"


@every_variant
@torch.no_grad()
def test_logits_equal_the_naive_reference(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(1, 12)
    expected = reference.logits(reference.weights_of(model), config, tokens[0].tolist())
    assert expected.std() > 0.5  # large enough for a difference to show
    np.testing.assert_allclose(model(tokens)[0].numpy(), expected, rtol=1e-4, atol=1e-4)


@every_endless_variant
@torch.no_grad()
def test_past_the_context_logits_equal_a_banded_mask(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(1, 2 * CONTEXT + 5)
    expected = reference.logits(reference.weights_of(model), config, tokens[0].tolist())
    np.testing.assert_allclose(model(tokens)[0].numpy(), expected, rtol=1e-4, atol=1e-4)


@every_variant
@torch.no_grad()
def test_future_tokens_cannot_change_past_logits(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (tokens[:, 7:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 0.1


@every_variant
@torch.no_grad()
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12, [1, 11], [11, 1], [4, 1, 7]], ids=str)
def test_whole_equals_chunked_equals_token_by_token(config: ModelConfig, sizes: list[int]) -> None:
    model = make_model(config)
    tokens = random_tokens(2, 12)
    close(in_pieces(model, tokens, sizes, capacity=12), model(tokens))


@every_variant
@torch.no_grad()
def test_a_text_fills_the_context_to_its_last_position(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(1, CONTEXT)
    close(in_pieces(model, tokens, [CONTEXT - 1, 1], capacity=CONTEXT), model(tokens))


@every_endless_variant
@torch.no_grad()
@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [
        ([CONTEXT, *[1] * 29], CONTEXT),  # a ring as small as can be
        ([5, *[1] * 40], CONTEXT),
        ([10, 6, 4, 5, 5, 5, 5, 5], CONTEXT + 5),  # 5 tokens wrap around at once
        ([6, 6, 6, 6, 6, 6, 6, 3], CONTEXT + 5),
        ([20, 10, *[1] * 15], 30),  # larger than the context: slots and window part
        ([7, 7, 7, 7, 7, 7, 3], 64),  # never wraps
    ],
    ids=str,
)
def test_past_the_context_the_ring_equals_the_full_sequence(
    config: ModelConfig, sizes: list[int], capacity: int
) -> None:
    model = make_model(config)
    tokens = random_tokens(2, 45)
    close(in_pieces(model, tokens, sizes, capacity), model(tokens))


@torch.no_grad()
@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [([6, *[1] * 39], 6), ([1] * 45, 6), ([10, 4, 10, *[1] * 21], 15), ([16, 16, 13], 21)],
    ids=str,
)
def test_a_sliding_window_needs_a_ring_no_longer_than_itself(sizes: list[int], capacity: int) -> None:
    model = make_model(VARIANTS["mistral"])
    assert capacity == model.config.window + max(sizes[1:]) - 1
    tokens = random_tokens(2, 45)
    close(in_pieces(model, tokens, sizes, capacity), model(tokens))


@torch.no_grad()
def test_a_window_as_wide_as_the_context_is_none() -> None:
    wide, none = replace(VARIANTS["mistral"], sliding_window=CONTEXT), replace(VARIANTS["mistral"], sliding_window=None)
    tokens = random_tokens(1, 3 * CONTEXT)
    assert torch.equal(make_model(wide)(tokens), make_model(none)(tokens))
    assert not torch.equal(make_model(wide)(tokens), make_model(VARIANTS["mistral"])(tokens))


@every_variant
@torch.no_grad()
def test_unequal_prompts_in_a_batch_equal_each_alone(config: ModelConfig) -> None:
    model = make_model(config)
    lengths, more = [2, 9], 6
    tokens = random_tokens(2, 9 + more)
    prompts = tokens[:, :9].clone()
    prompts[0, 2:] = 0  # right padding
    cache = KVCache(config, 2, 9 + more)
    together = [model(prompts, cache, lengths)]
    assert cache.lengths == lengths
    together += [model(tokens[:, 9 + step : 10 + step], cache) for step in range(more)]
    assert all(logits.isfinite().all() for logits in together)
    for row, length in enumerate(lengths):
        alone = model(torch.cat((tokens[row : row + 1, :length], tokens[row : row + 1, 9:]), dim=1))[0]
        close(together[0][row, :length], alone[:length])
        close(torch.stack([logits[row, 0] for logits in together[1:]]), alone[length:])


@every_endless_variant
@torch.no_grad()
def test_unequal_rows_stay_apart_past_the_context(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(2, 2 * CONTEXT)
    cache = KVCache(config, 2, CONTEXT)
    model(tokens[:, :11], cache, [3, 11])
    steps = [model(tokens[:, place : place + 1], cache)[:, 0] for place in range(11, 2 * CONTEXT)]
    for row, length in enumerate((3, 11)):
        alone = model(torch.cat((tokens[row : row + 1, :length], tokens[row : row + 1, 11:]), dim=1))[0]
        close(torch.stack([logits[row] for logits in steps]), alone[length:])


@every_variant
@torch.no_grad()
def test_kept_rows_go_on_as_if_alone(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(3, 10)
    cache = KVCache(config, 3, 10)
    model(tokens[:, :8], cache, [8, 5, 3])
    cache.keep([2, 0])
    assert cache.lengths == [3, 8]
    found = model(tokens[[2, 0], 8:9], cache)[:, 0]
    for place, (row, length) in enumerate(((2, 3), (0, 8))):
        alone = torch.cat((tokens[row : row + 1, :length], tokens[row : row + 1, 8:9]), dim=1)
        close(found[place], model(alone)[0, -1])


@every_variant
def test_every_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = make_model(config).train()
    tokens = random_tokens(2, CONTEXT + 1)  # every learned position is used
    loss_sum(model.model(tokens[:, :-1]), model.lm_head.weight, tokens[:, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.abs().max() > 1e-3) != without_effect(config, name), name


@every_variant
def test_one_batch_overfits(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(3))
    tokens = random_tokens(2, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(40):
        loss = loss_sum(model.model(tokens[:, :-1]), model.lm_head.weight, tokens[:, 1:]) / tokens[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.0
    assert losses[-1] < 0.3


@every_variant
def test_packed_documents_do_not_see_each_other(config: ModelConfig) -> None:
    def loss_and_gradients(rows: list[tuple[list[int], list[int], list[int] | None]]) -> tuple[float, list[Tensor]]:
        model = make_model(config)
        total = torch.zeros(())
        for tokens, targets, documents in rows:
            marks = None if documents is None else torch.tensor([documents])
            hidden = model.model(torch.tensor([tokens]), documents=marks)
            total = total + loss_sum(hidden, model.lm_head.weight, torch.tensor([targets]))
        total.backward()
        return total.item(), [weight.grad for weight in model.parameters() if weight.grad is not None]

    first, second = [1, 2, 3], [4, 5, 6, 7, 8]
    apart = loss_and_gradients([(first[:-1], first[1:], None), (second[:-1], second[1:], None)])
    packed = (first + second, [2, 3, -100, 5, 6, 7, 8, -100], [0] * 3 + [1] * 5)
    together = loss_and_gradients([packed])
    assert together[0] == pytest.approx(apart[0], rel=1e-5)
    for a, b in zip(together[1], apart[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    mixed = loss_and_gradients([(*packed[:2], None)])
    assert abs(mixed[0] - apart[0]) > 0.1  # it is the document ids that keep them apart


@every_endless_variant
@torch.no_grad()
def test_a_packed_document_longer_than_the_context_has_the_same_band(config: ModelConfig) -> None:
    model = make_model(config)
    tokens = random_tokens(1, CONTEXT + 12)
    documents = torch.tensor([[7] * 4 + [3] * (CONTEXT + 8)])
    close(model(tokens, documents=documents)[:, 4:], model(tokens[:, 4:]))


@every_variant
def test_dropout_acts_in_training_only(config: ModelConfig) -> None:
    torch.manual_seed(0)
    dropping = GPT(replace(config, dropout=0.5))
    dropping.load_state_dict(make_model(config).state_dict())
    tokens = random_tokens(2, 8)
    assert not torch.equal(dropping.train()(tokens), dropping(tokens))
    assert torch.equal(dropping.eval()(tokens), dropping(tokens))
    close(dropping(tokens), make_model(config)(tokens))


@every_variant
def test_autocast_stays_near_float32_and_warns_of_nothing(config: ModelConfig) -> None:
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(2))  # the large weights of make_model would multiply rounding
    tokens = random_tokens(2, CONTEXT)
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = loss_sum(model.model(tokens[:, :-1]), model.lm_head.weight, tokens[:, 1:])
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for (name, _), exact, near in zip(model.named_parameters(), *gradients, strict=True):
        assert near.dtype == torch.float32
        if not without_effect(config, name):
            assert torch.cosine_similarity(exact.flatten(), near.flatten(), dim=0) > 0.99, name


@every_variant
def test_initialize_fills_every_weight_and_repeats(config: ModelConfig) -> None:
    models = [GPT(config) for _ in range(2)]
    for model in models:
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(torch.nan)
        model.initialize(torch.Generator().manual_seed(5))
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert a.isfinite().all(), name
        assert torch.equal(a, b), name
        if a.dim() == 1:
            assert a.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name


@every_variant
def test_parameters_are_counted_once(config: ModelConfig) -> None:
    model = GPT(config)
    weights = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    assert model.num_parameters() == sum(weights.values())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == config.tie_word_embeddings


def test_the_first_loss_is_that_of_guessing() -> None:
    model = GPT(VARIANTS["qwen3"]).eval()
    model.initialize(torch.Generator().manual_seed(0))
    tokens = random_tokens(4, CONTEXT)
    loss = loss_sum(model.model(tokens[:, :-1]), model.lm_head.weight, tokens[:, 1:]).item() / tokens[:, 1:].numel()
    assert loss == pytest.approx(np.log(VOCAB), abs=0.3)
