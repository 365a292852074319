"""Where a model looks: the attention weights of every layer and head, as numbers and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from minigpt.errors import DataError
from minigpt.evaluation.curves import STYLE
from minigpt.model.cache import AttentionPlan
from minigpt.model.transformer import GPT, Attention, Rotary

MOST_WEIGHTS = 1 << 28  # numbers held at once: 1 GiB
SHADES = 16  # steps of opacity in a picture
_CHARACTER_WIDTH = 5.5
_LABEL_CHARACTERS = 12


@torch.no_grad()
def attention_weights(model: GPT, tokens: Sequence[int]) -> Tensor:
    """Return how much each of T tokens draws from each token before it, float32 (L, H, T, T): rows are queries.

    The numbers come from the model's own modules, as they are called in a forward pass. Errors: DataError for no
    token, or for so many that the weights would not fit in a gibibyte.
    """
    config, T = model.config, len(tokens)
    if not T:
        raise DataError("inspect: no token to look at; give some text")
    most = math.isqrt(MOST_WEIGHTS // (config.num_hidden_layers * config.num_attention_heads))
    if most < T:
        raise DataError(f"inspect: {T:,} tokens are too many for the attention of all heads; give at most {most:,}")
    if config.traits.positions == "learned" and T > config.max_position_embeddings:
        raise DataError(
            f"inspect: {T:,} tokens are more than the model's context of {config.max_position_embeddings:,}; "
            "give a shorter text"
        )
    found: list[Tensor] = []

    def take(module: Attention, args: tuple[Tensor, AttentionPlan, Rotary | None, Any]) -> None:
        found.append(module_weights(module, *args[:3])[0].cpu())

    hooks = [block.self_attn.register_forward_pre_hook(take) for block in model.model.layers]  # type: ignore[union-attr]
    training = model.training
    model.eval()
    try:
        model.model(torch.tensor([list(tokens)], device=model.lm_head.weight.device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def module_weights(module: Attention, x: Tensor, plan: AttentionPlan, rotary: Rotary | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) of one attention module for `x` (B, T, C), float32 (B, H, T, T)."""
    query, key, _ = module.project(x, rotary)
    T, group = x.shape[1], query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)  # (B, K, T, D) -> (B, H, T, D): the heads of a group share a key
    scores = query.float() @ key.float().transpose(-1, -2) / math.sqrt(module.head_dim)  # (B, H, T, T)
    mask = plan.mask if plan.mask is not None else torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    if plan.first is not None:
        mask = mask & (torch.arange(T, device=x.device) >= plan.first[:, None, :, None])
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


def attention_svg(tokens_text: Sequence[str], weights: Tensor) -> str:
    """Draw weights (L, H, T, T) as a grid of heat maps, a row for each layer and a column for each head.

    In each map a row is a token that looks and a column one that it looks at. Shade grows with the weight's square
    root, so that weak attention shows too. The result is one SVG that needs nothing else.
    """
    L, H, T, _ = weights.shape
    labels = [_label(text) for text in tokens_text]
    cell = max(2.0, min(14.0, 320.0 / T))
    side, step = T * cell, max(1, math.ceil(9.0 / cell))  # a label needs 9 pixels
    margin = 10.0 + _CHARACTER_WIDTH * max(map(len, labels))
    width, height = margin + H * (side + 16), 40 + L * (side + 26) + margin
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="9">{STYLE}',
        f'<rect class="paper" fill="#ffffff" width="{width:.0f}" height="{height:.0f}"/>',
        '<text class="ink" fill="#1f2328" x="10" y="18" font-size="12">attention: a row looks at its columns</text>',
    ]
    for layer in range(L):
        top = 56 + layer * (side + 26)
        parts.append(_row_labels(labels[::step], margin - 4, top, cell, step))
        for head in range(H):
            left = margin + head * (side + 16)
            title = f"layer {layer} head {head}"
            parts.append(f'<text class="ink" fill="#1f2328" x="{left:.1f}" y="{top - 5:.1f}">{title}</text>')
            parts.append(_heat_map(weights[layer, head], left, top, cell))
            if layer == L - 1:
                parts.append(_column_labels(labels[::step], left, top + side + 4, cell, step))
    return "\n".join([*parts, "</svg>\n"])


def _label(text: str) -> str:
    """A token as a short visible word: spaces and line ends as signs."""
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    shown = "".join(character if character.isprintable() else "�" for character in shown)
    return shown if len(shown) <= _LABEL_CHARACTERS else shown[: _LABEL_CHARACTERS - 1] + "…"


def _row_labels(labels: Sequence[str], right: float, top: float, cell: float, step: int) -> str:
    return "".join(
        f'<text class="ink" fill="#1f2328" text-anchor="end" x="{right:.1f}" '
        f'y="{top + (i * step + 0.5) * cell + 3:.1f}">{escape(label)}</text>'
        for i, label in enumerate(labels)
    )


def _column_labels(labels: Sequence[str], left: float, top: float, cell: float, step: int) -> str:
    places = [(left + (i * step + 0.5) * cell - 3, label) for i, label in enumerate(labels)]
    return "".join(
        f'<text class="ink" fill="#1f2328" transform="translate({x:.1f} {top:.1f}) rotate(90)">{escape(label)}</text>'
        for x, label in places
    )


def _heat_map(weights: Tensor, left: float, top: float, cell: float) -> str:
    """One head as one path for each shade, which keeps the file small."""
    T = weights.shape[0]
    shade = (weights.clamp(0, 1).sqrt() * SHADES).round().int().tolist()
    paths: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for row, values in enumerate(shade):
        for column, value in enumerate(values):
            paths[value].append(f"M{column} {row}h1v1h-1z")
    filled = "".join(
        f'<path class="heat" fill="#0969da" fill-opacity="{value / SHADES:.3f}" d="{"".join(path)}"/>'
        for value, path in enumerate(paths)
        if value and path
    )
    frame = f'<path class="rule" fill="none" stroke="#d1d9e0" stroke-width="{0.7 / cell:.3f}" d="M0 0H{T}V{T}H0z"/>'
    return f'<g transform="translate({left:.1f} {top:.1f}) scale({cell:.3f})">{frame}{filled}</g>'
