"""A plain GPT and a plain step, as one would first write them: float32, eager, AdamW. Others are held against it.

Pre-norm blocks with LayerNorm, GELU and biases, learned positions, fused q/k/v, `scaled_dot_product_attention`, tied
embeddings, all logits at once (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from protocol import Measure, rate, serve
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        parts = self.qkv(self.norm1(x)).split(C, dim=2)
        query, key, value = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, context: int, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def trainer(layers: int, hidden: int, heads: int, context: int, vocab: int, batch: int, **_: int) -> Measure:
    torch.manual_seed(0)
    model = PlainGPT(layers, hidden, heads, context, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> int:
        rows = torch.randint(vocab, (batch, context + 1))
        loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return batch * context

    step()
    return lambda seconds: rate(step, seconds)


def load(threads: int, sizes: dict[str, dict[str, int]]) -> dict[str, Measure]:
    torch.set_num_threads(threads)
    return {name: trainer(**shape) for name, shape in sizes.items()}


if __name__ == "__main__":
    serve(load)
