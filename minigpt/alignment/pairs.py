"""Two answers a row: what a step on preferences reads, as a pure function of (seed, step).

A row is a pair, its chosen answer first; or, for answers that are marked good or bad, such an answer and one that
belongs to another prompt. Shapes: B rows, 2 sides, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minigpt.model.loss import IGNORED
from minigpt.text.chat import ChatTemplate, Message
from minigpt.text.fitting import Encoded, FitCounts, shortened

Messages = Sequence[Message]


class EncodedPair(NamedTuple):
    """Both sides of a row, and whether the first is a good answer, which it is in a pair."""

    first: Encoded
    second: Encoded
    good: bool = True

    @property
    def length(self) -> int:
        """The positions of the longer side."""
        return max(len(self.first), len(self.second))


def fit_answers(
    prompt: Messages, answers: Sequence[Messages], template: ChatTemplate, context: int, counts: FitCounts
) -> list[Encoded] | None:
    """Encode answers to one prompt, which alone is not learned, each in at most `context` positions.

    What is too long is cut as in tuning (`text/fitting.py`), the prompt alike for all answers; None where an answer
    has nothing left.
    """
    limit = context + 1
    encoded = [_encoded(prompt, answer, template) for answer in answers]
    if all(one is not None and len(one.ids) <= limit for one in encoded):
        return [one for one in encoded if one is not None]
    longest = max(answers, key=lambda answer: len(template.encode([*prompt, *answer])))
    kept = shortened([*prompt, *longest], template, limit)[: -len(longest)]
    cut = [_encoded(kept, answer, template, limit) for answer in answers] if kept else [None]
    found = [one for one in cut if one is not None]
    if len(found) < len(answers):
        counts.dropped += 1
        return None
    counts.cut += 1
    return found


def _encoded(prompt: Messages, answer: Messages, template: ChatTemplate, limit: int | None = None) -> Encoded | None:
    """Encode a conversation of which the answer alone is learned, up to its last learned id; None without any."""
    ids, trained = template.encode_for_training([*prompt, *answer])
    flags = np.array(trained[:limit], dtype=np.bool_)
    begins = np.flatnonzero(flags & ~np.concatenate(([False], flags[:-1])))
    earlier = sum(message.role == "assistant" for message in prompt)
    if len(begins) <= earlier:
        return None
    flags[: begins[earlier]] = False
    end = int(np.flatnonzero(flags)[-1]) + 1
    return Encoded(np.array(ids[:end], dtype=np.int32), flags[:end]) if end > 1 else None


def at_the_end(encoded: Encoded) -> Encoded:
    """Keep a single target, behind the last token: where a reward is read. Its id stands for nothing."""
    flags = np.zeros(len(encoded.ids) + 1, dtype=np.bool_)
    flags[-1] = True
    return Encoded(np.append(encoded.ids, encoded.ids[-1]), flags)


@dataclass(frozen=True)
class PairBatch:
    """Tokens (B, 2, T) and their targets, already shifted (B, 2, T; -100 carries nothing), padded on the right.

    `reference` (B, 2) are the answers' log-probabilities under the reference; `good` (B,) tells of each first side
    whether it is a good answer.
    """

    tokens: Tensor
    targets: Tensor
    reference: Tensor
    good: Tensor

    @property
    def lengths(self) -> Tensor:
        """Count the targets of each side (B, 2), at least 1."""
        return (self.targets != IGNORED).sum(-1).clamp(min=1)

    def split(self, rows: int) -> Iterator[PairBatch]:
        """Cut into micro-batches of at most `rows` rows, each as long as it needs to be."""
        for start in range(0, len(self.tokens), rows):
            part = slice(start, start + rows)
            targets = self.targets[part]
            length = int((targets != IGNORED).flatten(0, 1).any(0).nonzero().max()) + 1
            yield PairBatch(
                self.tokens[part, :, :length].contiguous(),
                targets[..., :length].contiguous(),
                self.reference[part],
                self.good[part],
            )

    def to(self, device: torch.device) -> PairBatch:
        """Move to a device."""
        return PairBatch(*(tensor.to(device) for tensor in (self.tokens, self.targets, self.reference, self.good)))


def collate(pairs: Sequence[EncodedPair], reference: Tensor, pad_id: int) -> PairBatch:
    """Write rows out; padding is known by its place, so any id will do. `reference` (B, 2) belongs to the rows."""
    shape = (len(pairs), 2, max(pair.length for pair in pairs))
    tokens, targets = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    for row, pair in enumerate(pairs):
        for side, one in enumerate((pair.first, pair.second)):
            tokens[row, side, : len(one)] = one.ids[:-1]
            targets[row, side, : len(one)] = np.where(one.trained[1:], one.ids[1:], IGNORED)
    good = torch.tensor([pair.good for pair in pairs])
    return PairBatch(torch.from_numpy(tokens), torch.from_numpy(targets), reference, good)


class PairBatches:
    """Every epoch takes each row once, in an order of its own; the rows of a step are sorted by their length.

    `reference` (N, 2) may be set once it is known. `at(step)` needs no state: a resumed run reads on where it was.
    """

    def __init__(self, pairs: Sequence[EncodedPair], *, batch_size: int, seed: int, pad_id: int) -> None:
        self.pairs, self.batch_size, self.seed, self.pad_id = pairs, batch_size, seed, pad_id
        self.reference = torch.zeros(len(pairs), 2)
        self._epoch: int | None = None
        self._order = np.empty(0, np.int64)

    @property
    def steps_an_epoch(self) -> int:
        """How many steps pass until every row was taken."""
        return -(-len(self.pairs) // self.batch_size)

    def places(self, step: int) -> list[int]:
        """Return which rows a step (counted from 0) takes."""
        first = step * self.batch_size
        found = [self._place(number) for number in range(first, first + self.batch_size)]
        return sorted(found, key=lambda place: -self.pairs[place].length)

    def at(self, step: int) -> PairBatch:
        """Return the batch of one step."""
        places = self.places(step)
        return collate([self.pairs[place] for place in places], self.reference[places], self.pad_id)

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, len(self.pairs))
        if epoch != self._epoch:
            self._order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.pairs))
            self._epoch = epoch
        return int(self._order[place])


def in_order(pairs: Sequence[EncodedPair], rows: int, pad_id: int) -> list[PairBatch]:
    """Return all rows in batches, by length: for scoring."""
    ordered = sorted(pairs, key=lambda pair: -pair.length)
    parts = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
    return [collate(part, torch.zeros(len(part), 2), pad_id) for part in parts]


def with_reference(batch: PairBatch, reference: Tensor) -> PairBatch:
    """Return a batch with the log-probabilities (B, 2) of its reference."""
    return replace(batch, reference=reference)
