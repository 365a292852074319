"""The decoder, from top to bottom: norm, attention, MLP, block, model.

Shapes: B batch, T query tokens, S cached tokens, C hidden, H heads, K key/value heads, D head width, V vocabulary,
L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.config import ModelConfig
from minigpt.model import fused
from minigpt.model.cache import AttentionPlan, KVCache
from minigpt.model.kernels import Kernels, block_attention, document_blocks
from minigpt.model.positions import rotary_angles, rotate, sinusoidal

Rotary = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """Bring each vector to unit size, then scale it (and shift it, for LayerNorm).

    RMSNorm divides by the root mean square (Zhang & Sennrich 2019), LayerNorm takes off the mean too (Ba et al. 2016).
    """

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.traits.norm == "layer" else None
        self.layer, self.eps = config.traits.norm == "layer", config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        if self.layer:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        if fused.fits(x):
            return fused.rms_norm(x, self.weight, self.eps)
        # Under autocast queries and keys are narrower than their gain; PyTorch warns of mixed types.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Let each token gather values from the tokens it may see, by how well its query fits their keys.

    softmax(q k^T / sqrt(D)) v in H heads at once (Vaswani et al. 2017, section 3.2); H/K heads share one key and value
    (grouped-query attention, Ainslie et al. 2023). Undivided, products grow with D and the softmax saturates.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.dropout = config.head_dim, config.dropout
        C, bias = config.hidden_size, config.traits.bias
        self.q_proj = nn.Linear(C, self.heads * self.head_dim, bias=bias != "none")
        self.k_proj = nn.Linear(C, self.kv_heads * self.head_dim, bias=bias != "none")
        self.v_proj = nn.Linear(C, self.kv_heads * self.head_dim, bias=bias != "none")
        self.o_proj = nn.Linear(self.heads * self.head_dim, C, bias=bias == "all")
        self.q_norm = Norm(self.head_dim, config) if config.traits.qk_norm else None
        self.k_norm = Norm(self.head_dim, config) if config.traits.qk_norm else None

    def forward(self, x: Tensor, plan: AttentionPlan, rotary: Rotary | None, cache: KVCache | None) -> Tensor:
        if plan.fused:
            projected = self.projections(x)
            out = fused.attention(*projected, self.head_dim, self.q_norm, self.k_norm, rotary, plan.first)
        else:
            query, key, value = self.project(x, rotary)
            if cache is not None:
                key, value = cache.write(self.layer, key, value, plan)  # (B, K, S, D)
            out = attend(query, key, value, plan, self.dropout if self.training else 0.0)
            out = out.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H*D)
        mixed: Tensor = self.o_proj(out)  # (B, T, C)
        return mixed

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all queries (B, T, H D), keys and values (B, T, K D) of `x` (B, T, C), as the matrices give them."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def by_head(self, x: Tensor) -> Tensor:
        """Take heads (B, T, heads D) apart: (B, heads, T, D)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def project(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (B, H, T, D), key and value (B, K, T, D) of `x` (B, T, C), normed and turned by position."""
        query, key, value = (self.by_head(part) for part in self.projections(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Scaled dot-product attention: (B, H, T, D) over (B, K, S, D) gives (B, H, T, D)."""
    B, H, T, D = query.shape
    if T == 1 and H != key.shape[1] and dropout == 0.0:
        # One query a head: the heads that share a key become the query rows of one product, and no key is copied.
        grouped = query.reshape(B, key.shape[1], -1, D)
        return F.scaled_dot_product_attention(grouped, key, value, attn_mask=plan.mask).reshape(B, H, T, D)
    if plan.blocks is not None:
        return block_attention(query, key, value, plan.blocks)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=plan.mask,
        dropout_p=dropout,
        is_causal=plan.is_causal,
        enable_gqa=H != key.shape[1],
    )


class MLP(nn.Module):
    """Work on each token by itself: widen, bend, narrow. SwiGLU gates one widened copy by another (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, width, bias = config.hidden_size, config.intermediate_size, config.traits.bias == "all"
        self.kind = config.traits.mlp
        self.gate_proj = nn.Linear(C, width, bias=bias) if self.kind == "swiglu" else None
        self.up_proj = nn.Linear(C, width, bias=bias)
        self.down_proj = nn.Linear(width, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.up_proj(x)  # (B, T, width)
        if self.gate_proj is not None:
            gate = self.gate_proj(x)
            wide = fused.gated(gate, wide) if fused.fits(wide) else F.silu(gate) * wide
        elif self.kind == "gelu":
            wide = F.gelu(wide, approximate="tanh")
        else:
            wide = F.relu(wide, inplace=True)
        narrow: Tensor = self.down_proj(wide)  # (B, T, C)
        return narrow


class Block(nn.Module):
    """Attention between tokens, then the MLP within each; both add to the residual stream that runs past them.

    Norm before each part keeps that stream free from bottom to top, so that deep models train (Xiong et al. 2020);
    `transformer-2017` norms after each addition, as the first paper did.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm_first, self.dropout = config.traits.norm_first, config.dropout
        self.input_layernorm = Norm(config.hidden_size, config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, plan: AttentionPlan, rotary: Rotary | None, cache: KVCache | None) -> Tensor:
        if self.norm_first:
            x = add(x, self.drop(self.self_attn(self.input_layernorm(x), plan, rotary, cache)))
            return add(x, self.drop(self.mlp(self.post_attention_layernorm(x))))
        x = self.input_layernorm(add(x, self.drop(self.self_attn(x, plan, rotary, cache))))
        x = self.post_attention_layernorm(add(x, self.drop(self.mlp(x))))
        return x

    def drop(self, x: Tensor) -> Tensor:
        """Dropout on what a part adds; off in evaluation."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def add(x: Tensor, part: Tensor) -> Tensor:
    """Return x + part, in the place of `part` where that has the type of the sum."""
    return part.add_(x) if part.dtype == x.dtype else x + part


def _embedding(rows: int, width: int) -> nn.Embedding:
    """A table of zeros for `initialize` or a file to fill.

    What nn.Embedding fills itself with on the meta device, where models are built around files, imports for seconds.
    """
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)  # type: ignore[no-untyped-call]
    return table


class Decoder(nn.Module):
    """Token ids to hidden states: embedding, positions, blocks, last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.kernels = config, Kernels()
        self.embed_tokens = _embedding(config.vocab_size, config.hidden_size)
        learned = config.traits.positions == "learned"
        self.embed_positions = _embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config) if config.traits.norm_first else None
        self.native: Callable[[Tensor, KVCache], Tensor] | None = None  # all of this in one call, with a cache

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        new_lengths: list[int] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        if cache is not None and self.native is not None:
            x = self.native(tokens, cache)
            cache.advance(new_lengths or [tokens.shape[1]] * tokens.shape[0])
            return x
        training = self.training and cache is None
        plan = self.plan(tokens, documents) if cache is None else cache.plan(tokens.shape[1])
        x = self.embed(tokens, plan.positions)  # (B, T, C)
        rotary = self.rotary(plan.positions)
        for block in self.layers:
            x = self.kernels.block(block, x, plan, rotary) if training else block(x, plan, rotary, cache)
        if cache is not None:
            cache.advance(new_lengths or [tokens.shape[1]] * tokens.shape[0])
        return x if self.norm is None else self.norm(x)

    def plan(self, tokens: Tensor, documents: Tensor | None) -> AttentionPlan:
        """Choose how attention without a cache is computed: as one piece, in tiles, or under a mask."""
        dropout = self.training and self.config.dropout > 0.0
        flex = self.training and self.kernels.flex and not dropout
        rotary = self.config.traits.positions == "rotary"
        fits = fused.fits_heads(next(self.parameters()), self.config.head_dim, rotary)
        whole = fits and not self.kernels.flex and not dropout
        return causal_plan(tokens, self.config, documents, flex, whole)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Look up (B, T) tokens as (B, T, C) vectors, with positions added where the architecture adds them."""
        x: Tensor = self.embed_tokens(tokens)
        if self.config.traits.scale_embedding:
            x = x * math.sqrt(self.config.hidden_size)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        elif self.config.traits.positions == "sinusoidal":
            x = x + sinusoidal(positions, self.config.hidden_size).to(x.dtype)
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def rotary(self, positions: Tensor) -> Rotary | None:
        """The angles for queries and keys, (T, D/2) or (B, 1, T, D/2); None where positions are added instead."""
        if self.config.traits.positions != "rotary":
            return None
        config = self.config
        cos, sin = rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        return (cos, sin) if positions.dim() == 1 else (cos.unsqueeze(1), sin.unsqueeze(1))


def causal_plan(
    tokens: Tensor, config: ModelConfig, documents: Tensor | None, flex: bool = False, whole: bool = False
) -> AttentionPlan:
    """Each token sees itself and those before it, at most one window back, and with `documents` (B, T) only its own.

    Positions start again in each document, so that packed documents are read as if each stood alone; a document is a
    run of equal numbers. `whole` leaves everything to `fused.attention`, `flex` documents to FlexAttention.
    """
    T = tokens.shape[1]
    positions = torch.arange(T, device=tokens.device)
    if documents is None and T <= config.window:
        return AttentionPlan(positions, is_causal=T > 1, fused=whole)
    begin = torch.zeros_like(positions)
    if documents is not None:
        begins = documents != documents.roll(1, dims=1)  # (B, T); a first token begins at 0 in any case
        begin = torch.where(begins, positions, 0).cummax(dim=1).values  # (B, T)
        if flex:
            return AttentionPlan(positions - begin, blocks=document_blocks(documents, config.window))
    first = begin.maximum(positions - config.window + 1)  # (T,) or (B, T): the first token that each one sees
    if whole:
        return AttentionPlan(positions - begin, fused=True, first=first.int().expand_as(tokens).contiguous())
    mask = (positions >= first.unsqueeze(-1)) & (positions <= positions.unsqueeze(-1))  # (T, T) or (B, T, T)
    return AttentionPlan(positions - begin, mask=mask if documents is None else mask.unsqueeze(1))


class GPT(nn.Module):
    """The language model: hidden states of the decoder, and the logits of the next token from each of them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        new_lengths: list[int] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) for tokens (B, T).

        With a cache the tokens follow those that it holds, row by row; `new_lengths` says how many of the T are real
        where rows are padded on the right. `documents` (B, T) keeps packed documents apart (without a cache).
        """
        logits: Tensor = self.lm_head(self.model(tokens, cache, new_lengths, documents))
        return logits

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Fill every weight afresh: normal with deviation 0.02, less for what adds to the residual stream (GPT-2)."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 1 / math.sqrt(2 * self.config.num_hidden_layers) if narrow else 1.0
            weight.normal_(0.0, 0.02 * scale, generator=generator)

    def num_parameters(self) -> int:
        """Count the parameters, a tied weight once."""
        return sum(weight.numel() for weight in self.parameters())
