"""The whole check of a GPU: is what it computes right, and how fast is it. `bench.py --device cuda` runs it.

Correctness is judged against the same model in float64 on the CPU. Speeds are those of the program's own training step
and its own engine; MFU is the share of the card's dense bfloat16 rate that the model's FLOPs (6 a parameter and token,
and attention) account for.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minigpt.config import ARCHITECTURES, ModelConfig, SamplingConfig, preset_config
from minigpt.inference.engine import prefill, stream
from minigpt.model.cache import KVCache
from minigpt.model.kernels import Kernels, compiled_kernels
from minigpt.model.size import flops_per_token, parameters
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.batches import Batch
from minigpt.training.objectives import NextToken
from minigpt.training.probe import training_speed

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12}
VOCABULARY, CONTEXT = 50_304, 1024
SIZES = {  # layers, hidden, heads: the shapes of GPT-2 small and medium
    "124M": (12, 768, 12),
    "350M": (24, 1024, 16),
}
ROWS = 32
DECODE_TOKENS, PROMPT_TOKENS = 128, 512


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shape(name: str, architecture: str) -> ModelConfig:
    layers, hidden, heads = SIZES[name]
    base = preset_config("nano", vocab_size=VOCABULARY, architecture=architecture, context=CONTEXT)  # type: ignore[arg-type]
    wide = 4 * hidden if ARCHITECTURES[architecture].mlp != "swiglu" else hidden * 8 // 3 // 64 * 64
    return replace(
        base, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=hidden // heads, intermediate_size=wide,
    )  # fmt: skip


def small_model(architecture: str) -> GPT:
    """Four layers with weights far from their first values, in float64 on the CPU."""
    config = preset_config("micro", vocab_size=997, architecture=architecture, context=256)  # type: ignore[arg-type]
    model, generator = GPT(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.1, generator=generator)
            if weight.dim() == 1:
                weight.add_(1.0)
    return model.double().eval()


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def inference_errors(architecture: str, device: torch.device) -> dict[str, float]:
    model = small_model(architecture)
    tokens = torch.randint(0, 997, (4, 200), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(architecture).to(device, dtype)
        cache = KVCache(model.config, 4, 200, device=device, dtype=dtype)
        parts = [model(tokens[:, a:b].to(device), cache) for a, b in ((0, 150), (150, 199), (199, 200))]
        name = str(dtype).removeprefix("torch.")
        errors[f"{name} logits"] = distance(model(tokens.to(device)), expected)
        errors[f"{name} cached logits"] = distance(torch.cat(parts, dim=1), expected)
    return errors


def gradients(model: GPT, batch: Batch) -> Tensor:
    model.train()
    torch.autograd.backward(NextToken().loss_sum(model, batch) / batch.tokens.numel())
    return torch.cat([w.grad.flatten().double().cpu() for w in model.parameters() if w.grad is not None])


def training_errors(architecture: str, device: torch.device) -> dict[str, float]:
    generator = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(0, 997, (4, 256), generator=generator) for _ in range(2))
    documents = torch.randint(0, 5, (4, 256), generator=generator).sort(dim=1).values
    errors = {}
    for name, batch in (("", Batch(tokens, targets)), ("packed ", Batch(tokens, targets, documents))):
        expected = gradients(small_model(architecture), batch)
        for label, kernels in (("eager", Kernels()), ("compiled", compiled_kernels())):
            model = small_model(architecture).float().to(device)
            model.model.kernels = kernels
            errors[f"{name}{label} gradients"] = distance(gradients(model, batch.to(device)), expected)
    return errors


def training_figures(name: str, architecture: str, device: torch.device, peak: float | None) -> dict[str, Any]:
    config, figures = shape(name, architecture), {}
    flops = flops_per_token(config, CONTEXT, training=True)
    for label, compiled in (("eager", False), ("compiled", True)):
        torch.cuda.reset_peak_memory_stats(device)
        graphs = compiled_graphs()
        speed = training_speed(config, ROWS, device, "bfloat16", 6.0, compile=compiled)
        figures[label] = {"tokens_per_second": round(speed), "mfu": round(speed * flops / peak, 3) if peak else None}
        if compiled:
            figures[label]["graphs"] = compiled_graphs() - graphs
        say(f"{name} {architecture} {label}: {figures[label]}")
    return {"parameters": parameters(config), "rows": ROWS, "context": CONTEXT, **figures}


def compiled_graphs() -> int:
    """How many graphs the compiler has made so far: one more within a run is a recompilation."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def peak_memory(config: ModelConfig, device: torch.device) -> float:
    """GB that one compiled training step of all rows takes at most."""
    model = GPT(config).to(device).train()
    model.model.kernels = compiled_kernels()
    tokens = torch.randint(0, VOCABULARY, (ROWS, CONTEXT), device=device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = NextToken().loss_sum(model, Batch(tokens, tokens)) / tokens.numel()
        torch.autograd.backward(loss)
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 2)


def decoding_figures(config: ModelConfig, tokenizer: Tokenizer, device: torch.device) -> dict[str, float]:
    model = GPT(config)
    model.initialize(torch.Generator().manual_seed(0))
    model = model.to(device, torch.bfloat16).eval()
    prompt = [10 + i % 200 for i in range(PROMPT_TOKENS)]
    sampling = SamplingConfig(max_new_tokens=DECODE_TOKENS, temperature=0.0)

    def decode(rows: int) -> None:
        for _ in stream(model, tokenizer, [prompt] * rows, sampling, list(range(rows))):
            pass

    def read(rows: int) -> None:
        with torch.inference_mode():
            prefill(model, KVCache(config, rows, PROMPT_TOKENS, device=device, dtype=torch.bfloat16), [prompt] * rows)

    return {
        "decode tokens/s": DECODE_TOKENS / seconds(lambda: decode(1)),
        "decode tokens/s, 32 rows": 32 * DECODE_TOKENS / seconds(lambda: decode(32)),
        "prefill tokens/s, 32 rows": 32 * PROMPT_TOKENS / seconds(lambda: read(32)),
    }


def seconds(work: Callable[[], None], rounds: int = 3) -> float:
    """The median of a few runs after one that counts for nothing."""
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def attempts(work: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
    """Run each piece; one that fails is reported and does not take the rest with it."""
    for name, piece in work.items():
        try:
            result = piece()
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        say(f"{name}: {result}")
        yield name, result


def check(tokenizer: Tokenizer, device: torch.device) -> dict[str, Any]:
    """Everything about one GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name(device)
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
    work: dict[str, Callable[[], Any]] = {}
    for arch in ARCHITECTURES:
        work[f"inference {arch}"] = lambda arch=arch: inference_errors(arch, device)
    for arch in ("qwen3", "gpt2"):
        work[f"gradients {arch}"] = lambda arch=arch: training_errors(arch, device)
    for size, arch in (("124M", "qwen3"), ("124M", "gpt2"), ("350M", "qwen3")):
        work[f"training {size} {arch}"] = lambda size=size, arch=arch: training_figures(size, arch, device, peak)
        work[f"peak memory {size} {arch}, GB"] = lambda size=size, arch=arch: peak_memory(shape(size, arch), device)
    for size in SIZES:
        work[f"decoding {size} qwen3"] = lambda size=size: decoding_figures(shape(size, "qwen3"), tokenizer, device)
    return {"gpu": name, "peak_flops": peak, "torch": torch.__version__, "results": dict(attempts(work))}
