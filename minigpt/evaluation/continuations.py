"""How likely continuations of a context are: what multiple choice, minimal pairs and LAMBADA are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.inference import scoring
from minigpt.inference.scoring import Window, windows
from minigpt.model.loss import chunk_rows
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Continuation:
    """The token ids of a context and of what goes on from it; those from `first` on count."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Likelihood:
    """The summed log-probability of a continuation in nats, and whether each of its tokens was the likeliest."""

    logprob: float
    greedy: bool


def encode(tokenizer: Tokenizer, questions: Sequence[tuple[str, Sequence[str]]]) -> list[list[Continuation]]:
    """Encode each context together with each of its choices.

    A begin token stands before them where the model has one; where nothing stands before a choice, the token does that
    ends a document. A token may join the end of a context to the beginning of a choice: what counts begins where the
    ids of the context alone first differ from those with any of its choices, at one place for all of them, so that
    they are compared by the same text.
    """
    encoded = iter(
        tokenizer.encode_batch(
            [text for context, choices in questions for text in (context, *(context + choice for choice in choices))]
        )
    )
    result = []
    for _, choices in questions:
        alone, whole = next(encoded), [next(encoded) for _ in choices]
        border = min(_common(alone, ids[:-1]) for ids in whole)
        before = tokenizer.encode_prompt("") if tokenizer.bos_id is not None or border == 0 else []
        result.append([Continuation((*before, *ids), len(before) + border) for ids in whole])
    return result


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of ids at the start that are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cut_windows(item: Continuation, context: int) -> Iterator[Window]:
    """Cut a continuation into windows of at most `context` tokens, in which each token that counts does so once.

    One window holds it with as much before it as fits, where a context is long enough; else windows overlap by half.
    """
    length, first = len(item.ids), item.first
    if length - first <= context:
        yield max(0, length - 1 - context), length - 1, first
        return
    base = max(0, first - (context + 1) // 2)
    for start, end, new in windows(length - base, context):
        if base + end >= first:
            yield base + start, base + end, max(first, base + new)


@torch.no_grad()
def likelihoods(
    model: GPT, items: Sequence[Continuation], progress: Callable[[float], None] | None = None
) -> list[Likelihood]:
    """Return the likelihood of every continuation, in order; `progress` is told the share that is done.

    They are scored in batches, the longest first, padded on the right, where no token sees it. Training mode comes
    back as it was.
    """
    context, training = model.config.max_position_embeddings, model.training
    parts = [(number, window) for number, item in enumerate(items) for window in cut_windows(item, context)]
    parts.sort(key=lambda part: part[1][0] - part[1][1])
    sums, greedy = [0.0] * len(items), [True] * len(items)
    model.eval()
    try:
        done = 0
        while done < len(parts):
            width = parts[done][1][1] - parts[done][1][0]
            batch = parts[done : done + max(1, scoring.BATCH_TOKENS // width)]
            for (number, _), logprob, best in zip(batch, *_score(model, items, batch), strict=True):
                sums[number] += logprob
                greedy[number] &= best
            done += len(batch)
            if progress is not None:
                progress(done / len(parts))
    finally:
        model.train(training)
    return [Likelihood(logprob, best) for logprob, best in zip(sums, greedy, strict=True)]


def _score(
    model: GPT, items: Sequence[Continuation], batch: Sequence[tuple[int, Window]]
) -> tuple[list[float], list[bool]]:
    """Return for each window the summed log-probability of its targets, and whether all of them were the likeliest."""
    width = max(end - start for _, (start, end, _) in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    rows: list[int] = []
    places: list[int] = []
    targets: list[int] = []
    for row, (number, (start, end, first)) in enumerate(batch):
        ids = items[number].ids
        tokens[row, : end - start] = torch.tensor(ids[start:end])
        rows += [row] * (end + 1 - first)
        places += range(first - 1 - start, end - start)
        targets += ids[first : end + 1]
    device = next(model.parameters()).device
    hidden = model.model(tokens.to(device))[torch.tensor(rows, device=device), torch.tensor(places, device=device)]
    logprobs, best = _targets(model, hidden, torch.tensor(targets, device=device))
    owners = torch.tensor(rows)
    sums = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, owners, logprobs.double().cpu())
    misses = torch.zeros(len(batch), dtype=torch.long).index_add_(0, owners, (~best).long().cpu())
    return sums.tolist(), (misses == 0).tolist()


def _targets(model: GPT, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target (N,) after hidden states (N, C), and whether it is the likeliest."""
    logprobs, best = [], []
    rows = chunk_rows(hidden, model.config.vocab_size)
    for h, target in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        logits = model.lm_head(h).float()  # (n, V)
        logprobs.append(logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1))
        best.append(logits.argmax(-1) == target)
    return torch.cat(logprobs), torch.cat(best)
