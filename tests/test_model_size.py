"""The arithmetic of sizes against models, PyTorch's own FLOP counter, and the memory a process takes."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from variants import CONTEXT, VARIANTS

from minigpt import compiler
from minigpt.config import ArchitectureName, ModelConfig, OptimizerName, preset_config
from minigpt.model import fused, size
from minigpt.model.cache import KVCache
from minigpt.model.loss import chunk_rows
from minigpt.model.transformer import GPT

every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_parameters_are_those_of_the_model(config: ModelConfig) -> None:
    assert size.parameters(config) == GPT(config).num_parameters()


def test_the_embedding_is_looked_up_with_its_positions() -> None:
    config = VARIANTS["gpt2"]
    model = GPT(config).model
    assert model.embed_positions is not None
    assert size.embedding_parameters(config) == model.embed_tokens.weight.numel() + model.embed_positions.weight.numel()
    assert size.embedding_parameters(VARIANTS["qwen3-untied"]) == 61 * 32


def attention_flops(config: ModelConfig, context: int) -> float:
    """Count a multiplication and an addition for every number in q k^T and in the sum of values, pair by pair."""
    total = 0
    for query in range(context):
        for key in range(query + 1):
            if query - key < config.window:
                total += 2 * 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return total / context


@every_variant
def test_flops_are_those_of_the_products_and_of_the_pairs_that_see_each_other(config: ModelConfig) -> None:
    model, tokens = GPT(config), torch.zeros(2, CONTEXT, dtype=torch.long)
    model.initialize(torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.square().sum().backward()
    products = {"aten.mm", "aten.addmm"}
    count = [
        sum(v for k, v in counter.get_flop_counts()["Global"].items() if str(k) in products) / tokens.numel()
        for counter in (forward, backward)
    ]
    pairs = attention_flops(config, CONTEXT)
    assert size.flops_per_token(config, CONTEXT, training=False) == count[0] + pairs
    assert size.flops_per_token(config, CONTEXT, training=True) == sum(count) + 3 * pairs


def test_a_text_longer_than_the_context_costs_a_band_of_attention() -> None:
    config, products = VARIANTS["llama"], size.flops_per_token(VARIANTS["llama"], 1, training=False)
    alone = attention_flops(config, 1)
    for context in (CONTEXT + 1, 3 * CONTEXT):
        expected = products - alone + attention_flops(config, context)
        assert size.flops_per_token(config, context, training=False) == int(expected)


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "found", lambda: None)
    monkeypatch.setattr(fused, "library", lambda: None)


@pytest.mark.parametrize("plain", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@every_variant
def test_activations_are_what_the_backward_pass_keeps(
    config: ModelConfig, mixed: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        without_compiler(monkeypatch)
    model, batch = GPT(config), 3
    model.initialize(torch.Generator().manual_seed(0))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if tensor.is_floating_point() and tensor.dim() > 1 and place not in weights:  # no copies of gains
            kept[place] = tensor  # held, so that its place is not given to another
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        model.model(torch.zeros(batch, CONTEXT, dtype=torch.long))
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    matrices = sum(w.numel() for n, w in model.named_parameters() if w.dim() == 2 and ".layers." in n)
    expected = size.activation_bytes(config, batch * CONTEXT, "bfloat16" if mixed else "float32")
    expected += 2 * matrices if mixed else 0
    angles = 4 * CONTEXT * config.head_dim if config.traits.positions == "rotary" else 0  # once, not for each token
    masks = size.mask_bytes(config, CONTEXT, "bfloat16" if mixed else "float32")
    assert (masks > 0) == (config.window < CONTEXT)
    if size.fused(config, "bfloat16" if mixed else "float32", "cpu"):
        assert not plain
        masks = 0
    assert found == expected + angles + masks


def test_optimizers_and_types_cost_what_they_keep() -> None:
    config = VARIANTS["qwen3"]
    matrices = sum(w.numel() for n, w in GPT(config).named_parameters() if w.dim() == 2 and ".layers." in n)
    adamw, muon = (size.training_bytes(config, 100, CONTEXT, "float32", name) for name in ("adamw", "muon"))
    assert adamw - muon == 4 * matrices
    few = size.training_bytes(config, 1, 1, "float32", "muon")
    assert few > 4 * size.parameters(config) + (8 + size.MUON_BYTES) * matrices, "the iteration takes the most"
    rows = [size.training_bytes(config, count, CONTEXT) for count in (1, 2, 3)]
    assert rows[0] < rows[1] < rows[2]
    # On a GPU, where both types keep the same tensors.
    wide, narrow = (size.training_bytes(config, 1000, CONTEXT, kind, device="cuda") for kind in ("float32", "bfloat16"))
    assert narrow < wide
    assert rows[0] > 16 * size.parameters(config)


def test_biases_of_queries_keys_and_values_are_counted() -> None:
    without, with_them = VARIANTS["llama"], VARIANTS["qwen2"]
    assert replace(with_them, architecture="llama") == without
    biases = 2 * (32 + 16 + 16)  # layers x (queries, keys, values)
    assert size.parameters(with_them) - size.parameters(without) == biases
    # Weight, gradient and two numbers of AdamW.
    assert size.training_bytes(with_them, 2, CONTEXT) - size.training_bytes(without, 2, CONTEXT) == 16 * biases


def test_a_window_narrower_than_the_text_costs_a_mask_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    config = VARIANTS["mistral"]
    wide = replace(config, sliding_window=None)
    for rows in (1, 3):
        more = size.training_bytes(config, rows, CONTEXT) - size.training_bytes(wide, rows, CONTEXT)
        assert more == pytest.approx(size.HEAP * 2 * CONTEXT * CONTEXT * 4, abs=1)
    assert size.training_bytes(config, 1, 6) == size.training_bytes(wide, 1, 6)


def test_packed_rows_keep_a_mask_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    config, batch = VARIANTS["qwen3"], 3
    model, tokens = GPT(config), torch.zeros(batch, CONTEXT, dtype=torch.long)
    model.initialize(torch.Generator().manual_seed(0))

    def kept(documents: Tensor | None) -> int:
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: found.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
        ):
            model.model(tokens, documents=documents)
        return sum(t.untyped_storage().nbytes() for t in found.values() if t.is_floating_point() and t.dim() == 4)

    documents = torch.arange(CONTEXT).expand(batch, -1) // 5
    masks = kept(documents) - kept(None)
    more = size.training_bytes(config, batch, CONTEXT, packed=True) - size.training_bytes(config, batch, CONTEXT)
    assert more == pytest.approx(size.HEAP * (masks - 4 * batch * CONTEXT * config.head_dim), abs=1)
    assert masks == config.num_hidden_layers * batch * CONTEXT * CONTEXT * 4 + 4 * batch * CONTEXT * config.head_dim, (
        "and the angles of each row's own positions"
    )
    on_gpu = [size.training_bytes(config, batch, CONTEXT, device="cuda", packed=packed) for packed in (False, True)]
    assert on_gpu[0] == on_gpu[1]


def test_an_adapter_costs_its_own_states_alone() -> None:
    config = replace(VARIANTS["qwen3"], vocab_size=7)
    whole, small, large = (size.training_bytes(config, 1, 4, adapter=count) for count in (None, 100, 200))
    assert large - small == 12 * 100
    assert whole - small > 12 * (size.parameters(config) - 100)


def test_the_loss_works_with_as_many_logits_as_is_said() -> None:
    other = torch.empty(1, device="meta")  # stands for every device but a CPU
    assert chunk_rows(torch.empty(1), 64) == size.LOGITS_AT_ONCE["cpu"] // 64
    assert chunk_rows(other, 64) == size.LOGITS_AT_ONCE["cuda"] // 64


@every_variant
def test_the_cache_is_as_large_as_the_one_that_is_allocated(config: ModelConfig) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(config, 3, 24, dtype=dtype)
        found = cache.keys.nbytes + cache.values.nbytes
        assert size.cache_bytes(config, 3, 24, dtype.itemsize) == found


STEP = """
import resource, sys, torch
from minigpt.config import TrainConfig, preset_config
from minigpt.model.loss import loss_sum
from minigpt.model.transformer import GPT
from minigpt.training.allocator import join_freed_memory, keep_freed_memory
from minigpt.training.optim import clear_gradients, make_optimizers

keep_freed_memory()
torch.set_num_threads(1)
name, architecture, optimizer = sys.argv[1:4]
vocab, rows, context, micro_batches = map(int, sys.argv[4:])

def step(config, rows):
    model, context = GPT(config), config.max_position_embeddings
    model.initialize(torch.Generator().manual_seed(1))
    train = TrainConfig(total_steps=1, batch_size=rows, micro_batch_size=rows, context=context, seed=1,
                        learning_rate=1e-3, warmup_steps=1, optimizer=optimizer)
    optimizers = make_optimizers(model, train)
    for _ in range(2):  # states are there in the second step
        clear_gradients(optimizers, in_place=True)
        for _ in range(micro_batches):
            join_freed_memory()
            tokens = torch.randint(0, config.vocab_size, (rows, context))
            loss_sum(model.model(tokens), model.lm_head.weight, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()

step(preset_config("nano", vocab_size=300, architecture=architecture, context=8), 1)  # libraries take theirs
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
step(preset_config(name, vocab_size=vocab, architecture=architecture, context=context), rows)
with open("/proc/self/status") as file:  # getrusage would count what the parent held when it forked
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(peak - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its heap is the one that was measured")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("name", "architecture", "vocab", "rows", "context"),
    [
        ("nano", "qwen3", 1024, 24, 128),
        pytest.param("micro", "gpt2", 16384, 3, 256, marks=pytest.mark.slow),
        pytest.param("mini", "transformer-2017", 8192, 4, 256, marks=pytest.mark.slow),
        pytest.param("small", "qwen3", 1024, 16, 256, marks=pytest.mark.slow),
        pytest.param("small", "llama", 61440, 4, 256, marks=pytest.mark.slow),
    ],
)
def test_training_takes_the_memory_that_is_foretold(
    name: str,
    architecture: ArchitectureName,
    vocab: int,
    rows: int,
    context: int,
    optimizer: OptimizerName,
    micro_batches: int,
) -> None:
    arguments = [name, architecture, optimizer, *map(str, (vocab, rows, context, micro_batches))]
    result = subprocess.run([sys.executable, "-c", STEP, *arguments], capture_output=True, text=True, check=True)
    config = preset_config(name, vocab_size=vocab, architecture=architecture, context=context)
    foretold = size.training_bytes(config, rows, context, "float32", optimizer)
    bound = 0.15 if architecture == "transformer-2017" else 0.1  # whose heap has more holes
    assert foretold == pytest.approx(int(result.stdout), rel=bound)
