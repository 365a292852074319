"""Cross-entropy straight from hidden states, chunk by chunk, so that the logits never stand whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.model import fused

IGNORED = -100  # a target that carries no loss
VOCABULARY_MULTIPLE = 64  # of the columns of a GPU's products: odd sizes run several times slower there

Slope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_rows(hidden: Tensor, vocab_size: int) -> int:
    """How many rows of logits to hold at a time: 4 MiB of float32 stay in a CPU's cache, a GPU wants large products."""
    elements = 1 << (20 if hidden.device.type == "cpu" else 26)
    return max(1, elements // vocab_size)


def softmax_slope(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy (float32) of logits (n, V), and its gradient in them: softmax minus one-hot.

    The gradient has the type of the logits, and may lie in their place; targets of -100 carry neither.
    """
    if fused.fits(logits, 1):
        return fused.softmax_slope(logits, targets, IGNORED)
    log_probs = logits.float().log_softmax(-1)
    loss = F.nll_loss(log_probs, targets, reduction="sum", ignore_index=IGNORED)
    slope = log_probs.exp_()
    slope[torch.arange(len(targets), device=logits.device), targets.clamp(min=0)] -= 1.0
    return loss, (slope * (targets != IGNORED).unsqueeze(-1)).to(logits.dtype)


def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor, slope: Slope = softmax_slope) -> Tensor:
    """Sum the next-token loss in nats over the targets that are not -100; a float32 scalar with a gradient.

    `hidden` (…, C) are last hidden states, `weight` (V, C) the output embedding, `targets` (…) token ids; `slope` is
    how logits become loss and gradient.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    flat, ids = hidden.flatten(0, -2), targets.flatten()
    if hidden.device.type == "cpu":  # a GPU would have to be waited for, to know how many are left
        kept = (ids != IGNORED).nonzero().squeeze(-1)
        if len(kept) < len(ids):
            flat, ids = flat[kept], ids[kept]
    total: Tensor = _LinearCrossEntropy.apply(flat, weight, ids, slope)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target in nats, float32, shaped as `targets`; 0 where the target is -100."""
    flat, ids = hidden.flatten(0, -2), targets.flatten()
    weight = weight.to(hidden.dtype)
    rows = chunk_rows(hidden, weight.shape[0])
    losses = [
        F.cross_entropy(F.linear(h, weight).float(), t, reduction="none", ignore_index=IGNORED)
        for h, t in zip(torch.split(flat, rows), torch.split(ids, rows), strict=True)
    ]
    return torch.cat(losses).view(targets.shape)


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target, float32, shaped as `targets`, with a gradient; 0 where it is -100.

    `hidden` (…, C) are last hidden states, `weight` (V, C) the output embedding. The logits of one chunk at a time are
    held, and made again for the gradient.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    flat, ids = hidden.flatten(0, -2), targets.flatten()
    kept = (ids != IGNORED).nonzero().squeeze(-1)
    if len(kept) == len(ids):
        found: Tensor = _TokenLogProbs.apply(flat, weight, ids)  # type: ignore[no-untyped-call]
    else:
        some: Tensor = _TokenLogProbs.apply(flat[kept], weight, ids[kept])  # type: ignore[no-untyped-call]
        found = torch.zeros(len(ids), device=some.device).index_put((kept,), some)
    return found.view(targets.shape)


class _TokenLogProbs(torch.autograd.Function):
    """Output projection, log-softmax and choice in one, chunk by chunk both ways."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        cast = weight.to(hidden.dtype)
        found = hidden.new_empty(len(targets), dtype=torch.float32)
        for part in _chunks(hidden, weight):
            log_probs = F.linear(hidden[part], cast).float().log_softmax(-1)
            found[part] = log_probs.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(hidden, weight, targets)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        cast = weight.to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden) if need_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(hidden, weight):
                slope = F.linear(hidden[part], cast).float().softmax(-1).neg_()  # one-hot minus softmax
                slope[torch.arange(len(slope), device=slope.device), targets[part]] += 1.0
                slope *= grads[0][part].unsqueeze(-1)
                if hidden_grad is not None:
                    hidden_grad[part] = torch.mm(slope.to(cast.dtype), cast)
                if weight_grad is not None:
                    weight_grad += torch.mm(slope.t(), hidden[part].float())
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """The rows of hidden states whose logits are held together."""
    rows = chunk_rows(hidden, weight.shape[0])
    return (slice(start, start + rows) for start in range(0, hidden.shape[0], rows))


class _LinearCrossEntropy(torch.autograd.Function):
    """Output projection, softmax and loss in one: the gradient is taken while each chunk's logits are at hand."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, slope_of: Slope) -> Tensor:
        V = weight.shape[0]
        padding = -V % VOCABULARY_MULTIPLE if hidden.device.type == "cuda" else 0
        cast = weight.detach().to(hidden.dtype)
        if padding:  # which copies
            cast = F.pad(cast, (0, 0, 0, padding))  # (V and what fills the last tile, C)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if need_hidden else None
        weight_grad = torch.zeros_like(cast, dtype=torch.float32) if need_weight else None
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = chunk_rows(hidden, V)
        place = hidden.new_empty(min(rows, len(hidden)), len(cast))  # of each chunk's logits in turn
        for start in range(0, hidden.shape[0], rows):
            h, target = hidden[start : start + rows], targets[start : start + rows]
            logits = torch.mm(h, cast.t(), out=place[: len(h)])
            if padding:
                logits[:, V:] = -torch.inf
            loss, slope = slope_of(logits, target)
            total += loss
            if hidden_grad is not None:
                torch.mm(slope, cast, out=hidden_grad[start : start + rows])
            if weight_grad is not None:
                if h.dtype == torch.bfloat16:
                    weight_grad += torch.mm(slope.t(), h)
                else:
                    # float16 ends at 65504, and a chunk's sum is not yet divided by its tokens. In place, since
                    # autocast would turn the arguments of torch.mm back to half precision.
                    weight_grad.addmm_(slope.t().float(), h.float())
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad[:V])
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return (
            None if hidden_grad is None else hidden_grad * scale.to(hidden_grad.dtype),
            None if weight_grad is None else weight_grad * scale,
            None,
            None,
        )
