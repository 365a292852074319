"""Short measurements of the machine: what it computes fast in, how fast it trains, how much memory is free."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from minigpt.config import DTypeName, LoraConfig, ModelConfig, OptimizerName, TrainConfig, preset_config
from minigpt.errors import TrainingError
from minigpt.model.kernels import compiled_kernels
from minigpt.model.lora import add_lora
from minigpt.model.size import flops_per_token
from minigpt.model.transformer import GPT
from minigpt.training.allocator import keep_freed_memory
from minigpt.training.batches import Batch
from minigpt.training.objectives import NextToken
from minigpt.training.optim import make_optimizers
from minigpt.training.plan import CPU_MINUTES, GPU_MINUTES, Machine

TOO_LARGE = "out of memory with a single row; choose a smaller --context or a smaller model"
PROBE_SECONDS = 0.7
PRODUCT_SIZE = 768  # of the matrices that compare number types


def fast_dtype(device: torch.device) -> DTypeName:
    """Return the fastest type to compute in: bfloat16 where the device is good at it, float16 on older GPUs.

    A CPU that is good at products in bfloat16 must be quicker in whole steps too.
    """
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device.type != "cpu" or _product_seconds(torch.bfloat16) > 0.7 * _product_seconds(torch.float32):
        return "float32"
    model = preset_config("micro", vocab_size=1024)
    narrow, wide = (training_speed(model, 8, device, dtype, PROBE_SECONDS / 2) for dtype in ("bfloat16", "float32"))
    return "bfloat16" if narrow > wide else "float32"


def _product_seconds(dtype: torch.dtype) -> float:
    """The best of a few timings of one matrix product on the CPU."""
    matrix = torch.ones(PRODUCT_SIZE // 4, PRODUCT_SIZE, dtype=dtype)
    other = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        torch.mm(matrix, other)
        best = min(best, time.perf_counter() - started)
    return best


def training_speed(
    model: ModelConfig,
    rows: int,
    device: torch.device,
    dtype: DTypeName,
    seconds: float = PROBE_SECONDS,
    *,
    context: int | None = None,
    optimizer: OptimizerName = "muon",
    compile: bool = False,
    lora: LoraConfig | None = None,
) -> float:
    """Return tokens/s of whole training steps of `rows` windows, by default of the model's context, or of fewer rows
    where memory holds no more; with `lora` only adapters are trained.

    The model is a throwaway one; the random state and a GPU's memory are left as they were. When not even one row fits
    it is a TrainingError.
    """
    context = context or model.max_position_embeddings
    while True:
        config = TrainConfig(
            total_steps=1, batch_size=rows, micro_batch_size=rows, context=context, seed=0, learning_rate=1e-4,
            warmup_steps=0, optimizer=optimizer, compute_dtype=dtype, compile=compile,
        )  # fmt: skip
        try:
            return _tokens_per_second(model, config, device, seconds, lora)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise TrainingError(TOO_LARGE) from None
        finally:  # after the except clause, which holds on to the failed step's tensors
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
        rows //= 2


def _tokens_per_second(
    model: ModelConfig, config: TrainConfig, device: torch.device, seconds: float, lora: LoraConfig | None
) -> float:
    keep_freed_memory()
    dtype = getattr(torch, config.compute_dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        gpt = GPT(model)
        gpt.initialize(torch.Generator().manual_seed(0))
        if lora is not None:
            add_lora(gpt, lora, torch.Generator().manual_seed(0))
        gpt.to(device).train()
        if config.compile:
            gpt.model.kernels = compiled_kernels()
        optimizers = make_optimizers(gpt, config)
        tokens = torch.randint(0, model.vocab_size, (config.batch_size, config.context), device=device)
        steps, started = -1, 0.0
        while steps < 1 or time.perf_counter() - started < seconds:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = NextToken().loss_sum(gpt, Batch(tokens, tokens)) / tokens.numel()
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loss.item()
            steps += 1
            if steps == 0:  # the first step allocates; it does not count
                started = time.perf_counter()
        return steps * tokens.numel() / (time.perf_counter() - started)


def free_memory(device: torch.device) -> int:
    """Return the bytes a run may use on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def total_memory(device: torch.device) -> int:
    """Return the bytes the device has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


def used_memory() -> int:
    """Return the bytes of the machine's memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held on the device so far; where that is not known, what it holds."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    with suppress(OSError, StopIteration):  # not getrusage: it counts what the parent held when it forked
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return used_memory()


def look_at(device: torch.device, dtype: DTypeName, *, timed: bool) -> Machine:
    """Describe a device for the plan; its speed is measured only where the budget is a time."""
    cpu = device.type == "cpu"
    flops = 0.0
    if timed:
        model = preset_config("micro" if cpu else "small", vocab_size=1024)
        per_token = flops_per_token(model, model.max_position_embeddings, training=True)
        flops = per_token * training_speed(model, 8 if cpu else 64, device, dtype)
    return Machine(
        flops=flops,
        free_memory=free_memory(device),
        compute_dtype=dtype,
        default_minutes=CPU_MINUTES if cpu else GPU_MINUTES,
        device_type=device.type,
    )
