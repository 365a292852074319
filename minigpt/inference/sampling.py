"""From logits to a token: pure functions, one uniform number a row, so a row draws the same alone or in a batch."""

from __future__ import annotations

import hashlib
import random

import torch
from torch import Tensor

from minigpt.config import SamplingConfig

CANDIDATES = 1024  # the tokens among which a nucleus is looked for first


def row_seed(seed: int, row: int) -> int:
    """Return the seed of one row: the run's own for row 0, else a number derived from both."""
    if row == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11  # 53 bits: exact in JSON readers that use doubles


def random_streams(seeds: list[int]) -> list[random.Random]:
    """One independent random stream a row."""
    return [random.Random(seed) for seed in seeds]


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were `seen` (B, V bool) less likely: positive logits are divided, negative ones multiplied.

    The penalty of CTRL (Keskar et al. 2019), with the sign mended so that it never rewards a repeat.
    """
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_likely(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Put minus infinity (B, V) on tokens outside top-k, the nucleus of top-p (Holtzman et al. 2020), or min-p.

    The most likely token always stays, and so do all that are as likely as the k-th. Logits are those after the
    temperature.
    """
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        least = logits.topk(config.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if config.top_p is not None and config.top_p < 1.0:
        logits = logits.masked_fill(_outside(logits.softmax(-1), config.top_p), -torch.inf)
    if config.min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < config.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def _outside(probs: Tensor, mass: float) -> Tensor:
    """Tell which tokens of probs (B, V) come after those that hold `mass`, best first, ties by id.

    Where few tokens hold it, without those as likely as the last of them, no others need to be looked at: to find a
    thousand tokens takes a small part of the time of sorting all.
    """
    best, ids = probs.topk(min(CANDIDATES, probs.shape[-1]), dim=-1)
    few = (best * (best > best[..., -1:])).sum(-1) >= mass  # (B,)
    outside = torch.ones_like(probs, dtype=torch.bool)
    if few.any():
        ids = ids[few].sort(dim=-1).values
        best, place = probs[few].gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        outside[few] = outside[few].scatter(-1, ids.gather(-1, place), best.cumsum(-1) - best >= mass)
    if not few.all():
        best, ids = probs[~few].sort(dim=-1, descending=True, stable=True)
        outside[~few] = outside[~few].scatter(-1, ids, best.cumsum(-1) - best >= mass)
    return outside


def probabilities(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Return the distribution (B, V) that the next token is drawn from; temperature must be above 0.

    It is in float64 and on the CPU, since Apple's GPUs have no such type.
    """
    exact = logits.cpu().double()
    # The largest logit is taken off first: a tiny temperature then gives 0 and minus infinity, never NaN.
    scaled = (exact - exact.amax(-1, keepdim=True)).div_(config.temperature)
    return keep_likely(scaled, config).softmax(-1)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative distribution: probs (B, V) and uniforms (B,) in [0, 1) give token ids (B,)."""
    cumulative = probs.cumsum(-1)
    target = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def next_tokens(logits: Tensor, seen: Tensor | None, config: SamplingConfig, streams: list[random.Random]) -> Tensor:
    """Choose a token (B,) for each row of logits (B, V), using one number of its stream (none when greedy)."""
    if seen is not None:
        logits = penalize(logits, seen, config.repetition_penalty)
    if config.temperature == 0.0:
        return logits.argmax(-1)
    uniforms = torch.tensor([stream.random() for stream in streams], dtype=torch.float64)
    return draw(probabilities(logits, config), uniforms).to(logits.device)
