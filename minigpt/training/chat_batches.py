"""What a step of instruction tuning trains on, as a pure function of (seed, step): rows of packed conversations.

An epoch of the mixture takes `weight` times the rows of each source, in an order of its own; a source whose weight is
no whole number goes on in the next epoch where it stopped. Rows of ordinary text may stand between them, evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minigpt.errors import ConfigError
from minigpt.training.batches import Batch, CorpusBatches, TokenReader
from minigpt.training.packing import Arrays, PackedRows

MAX_WEIGHT = 1_000.0
_SHARES = 1_000_000  # a share of text is counted in millionths


@dataclass(frozen=True)
class ChatSource:
    """Packed conversations, and how often an epoch takes each of them: 2 is twice, 0.5 every second epoch."""

    rows: PackedRows
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= MAX_WEIGHT:
            raise ConfigError(f"weight is {self.weight}; it must be above 0, at most {MAX_WEIGHT:g}")

    @property
    def rows_an_epoch(self) -> int:
        """How many rows an epoch of the mixture takes."""
        return max(1, round(self.weight * len(self.rows)))


class ChatBatches:
    """Rows of packed conversations from several sources, with a share of rows from a corpus of ordinary text.

    All sources have one row length. Errors: ConfigError for a share of text outside [0, 1); DataError for a text
    shorter than one row.
    """

    def __init__(
        self,
        sources: Sequence[ChatSource],
        *,
        batch_size: int,
        seed: int,
        text: TokenReader | None = None,
        text_share: float = 0.0,
    ) -> None:
        if not 0 <= text_share < 1:
            raise ConfigError(f"text_share is {text_share}; it must be 0 for none, or a share below 1")
        self.sources, self.batch_size, self.seed = sources, batch_size, seed
        (row_length,) = {source.rows.row_length for source in sources}
        self.text = None
        if text is not None and text_share > 0:
            self.text = CorpusBatches(text, context=row_length, batch_size=1, seed=seed)
        self._text_share = round(text_share * _SHARES) if self.text is not None else 0
        self.chat_rows = sum(source.rows_an_epoch for source in sources)
        self._epoch: int | None = None
        self._order: list[tuple[int, list[int]]] = []

    @property
    def rows_an_epoch(self) -> int:
        """How many rows, text among them, pass until every source was taken as often as its weight says."""
        return round(self.chat_rows * _SHARES / (_SHARES - self._text_share))

    def at(self, step: int) -> Batch:
        """Return the batch of one step (counted from 0)."""
        first = step * self.batch_size
        return _stacked([self._row(number) for number in range(first, first + self.batch_size)])

    def _row(self, number: int) -> Batch:
        text = number * self._text_share // _SHARES  # rows of text before this one
        if self.text is not None and (number + 1) * self._text_share // _SHARES > text:
            window = self.text.at(text)
            return Batch(window.tokens, window.targets, torch.zeros_like(window.tokens))
        epoch, place = divmod(number - text, self.chat_rows)
        if epoch != self._epoch:
            self._order, self._epoch = self._mixed(epoch), epoch
        source, row = self._order[place]
        return _batch(self.sources[source].rows.arrays([row]))

    def _mixed(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Return the rows of one epoch in order, each with its source."""
        rows: list[tuple[int, list[int]]] = []
        for index, source in enumerate(self.sources):
            count = source.rows_an_epoch
            rows += [(index, row) for row in self._drawn(index, epoch * count, (epoch + 1) * count)]
        order = _generator(self.seed, 1, epoch).permutation(len(rows))
        return [rows[place] for place in order]

    def _drawn(self, index: int, start: int, stop: int) -> Iterator[list[int]]:
        """Yield the rows `start` to `stop` of all that a source ever gives, one shuffled pass after the other."""
        rows = self.sources[index].rows
        for number in range(start // len(rows), (stop - 1) // len(rows) + 1):
            first = number * len(rows)
            shuffled = rows.shuffled(_generator(self.seed, 2 + index, number))
            yield from shuffled[max(0, start - first) : stop - first]


def batches_of(rows: PackedRows, batch_size: int) -> Iterator[Batch]:
    """Yield all rows in order, for scoring."""
    for start in range(0, len(rows), batch_size):
        yield _batch(rows.arrays(rows.rows[start : start + batch_size]))


def _batch(arrays: Arrays) -> Batch:
    tokens, targets, documents = map(torch.from_numpy, arrays)
    return Batch(tokens, targets, documents)


def _stacked(rows: list[Batch]) -> Batch:
    documents = [row.documents for row in rows if row.documents is not None]
    return Batch(
        torch.cat([row.tokens for row in rows]), torch.cat([row.targets for row in rows]), torch.cat(documents)
    )


def _generator(seed: int, stream: int, epoch: int) -> np.random.Generator:
    """Return the generator of one epoch of one stream; stream 0 is the corpus's own."""
    return np.random.Generator(np.random.Philox(key=[seed, (stream << 40) + epoch]))
