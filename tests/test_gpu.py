"""What only a CUDA device can show: run with -m gpu."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import minigpt
from variants import VARIANTS, make_model, random_tokens

from minigpt.config import SamplingConfig
from minigpt.inference.engine import collect, stream
from minigpt.model.cache import KVCache
from minigpt.model.kernels import compiled_kernels
from minigpt.training.batches import Batch
from minigpt.training.objectives import NextToken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # the compiler and its libraries warn of themselves
]


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_equal_those_of_the_cpu(name: str) -> None:
    model, tokens = make_model(VARIANTS[name]), random_tokens(3, VARIANTS[name].max_position_embeddings)
    with torch.no_grad():
        expected = model.double()(tokens)
        found = model.float().cuda()(tokens.cuda()).cpu()
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_logits_equal_those_of_the_cpu(name: str) -> None:
    model, tokens = make_model(VARIANTS[name]), random_tokens(3, VARIANTS[name].max_position_embeddings)
    parts = []
    with torch.no_grad():
        expected = model.double()(tokens)
        model.float().cuda()
        cache = KVCache(model.config, 3, tokens.shape[1] + 4, device="cuda")
        for piece in tokens.cuda().split([5, 4, *[1] * (tokens.shape[1] - 9)], dim=1):
            parts.append(model(piece, cache))
    found = torch.cat(parts, dim=1).cpu()
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral"])
def test_compiled_gradients_equal_those_of_the_cpu(name: str, packed: bool) -> None:
    config = replace(VARIANTS[name], max_position_embeddings=256)
    model = make_model(config).train()
    tokens, targets = random_tokens(2, 256, seed=1), random_tokens(2, 256, seed=2)
    documents = torch.arange(256).div(50, rounding_mode="floor").repeat(2, 1) if packed else None
    batch = Batch(tokens, targets, documents)
    torch.autograd.backward(NextToken().loss_sum(model, batch) / 512)
    expected = {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    model.cuda().model.kernels = compiled_kernels()
    torch.autograd.backward(NextToken().loss_sum(model, batch.to(torch.device("cuda"))) / 512)
    for key, weight in model.named_parameters():
        assert weight.grad is not None
        assert (weight.grad.cpu() - expected[key]).abs().max() < 1e-3 * expected[key].abs().max(), key


def test_the_device_writes_the_same_greedy_text(tmp_path: Path) -> None:
    from tiny_folder import make_folder

    from minigpt.checkpoint.folder import load

    folder = make_folder(tmp_path / "tiny")
    texts = []
    for device in ("cpu", "cuda"):
        loaded = load(folder, device=device, dtype=torch.float32)
        prompts = [loaded.tokenizer.encode_prompt(text) for text in ("a", "a longer prompt")]
        sampling = SamplingConfig(max_new_tokens=20, temperature=0.0)
        events = stream(loaded.model, loaded.tokenizer, prompts, sampling, [1, 2])
        texts.append([done.text for done in collect(events, 2)])
    assert texts[0] == texts[1]


def test_a_compiled_run_learns_resumes_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    common = ["--steps", "60", "--preset", "nano", "--device", "cuda", "--set", "train.compile=true"]
    done = minigpt("train", "-o", out, *common, "--seed", "1")
    assert done.status == 0, done.err
    assert "went on without it" not in done.err
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 60
    assert losses[-1] < 0.8 * losses[0]
    text = minigpt("generate", "Once", "-m", out, "--max-new-tokens", "20", "--seed", "1")
    assert text.status == 0
    assert text.out.strip()


def test_out_of_memory_halves_the_micro_batch(tmp_path: Path) -> None:
    held = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((held + 3e8) / torch.cuda.mem_get_info()[1])
    try:
        common = ["--steps", "3", "--preset", "nano", "--device", "cuda", "--set", "train.micro_batch_size=4096"]
        done = minigpt("train", "-o", tmp_path / "run", *common, "--batch-size", "4096")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert done.status == 0, done.err
    assert "out of memory at a micro-batch of 4096; went on with 2048 (same effective batch)" in done.err
