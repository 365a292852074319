"""What a step trains on: windows of the corpus in an order that is a pure function of (seed, step)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.errors import DataError


class TokenReader(Protocol):
    """A flat run of token ids, read in slices."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]: ...


class StepBatch(Protocol):
    """What one step trains on: tokens whose first dimension is rows; a row may be a pair of answers too."""

    @property
    def tokens(self) -> Tensor: ...

    def split(self, rows: int) -> Iterator[Self]: ...

    def to(self, device: torch.device) -> Self: ...


AnyBatch = TypeVar("AnyBatch", bound=StepBatch)
MadeBatch = TypeVar("MadeBatch", bound=StepBatch, covariant=True)


class BatchSource(Protocol[MadeBatch]):
    """Batches as a pure function of the step, so that a position in the data is a number."""

    def at(self, step: int) -> MadeBatch: ...


@runtime_checkable
class LiveSource(BatchSource[MadeBatch], Protocol[MadeBatch]):
    """Batches that depend on the weights as they are: none is made ahead of its step, and what serves several steps is
    saved with the run's state.
    """

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: dict[str, Tensor], step: int) -> None: ...


class Ahead(Generic[AnyBatch]):
    """Batches made one step ahead, in a thread of their own, so that training does not wait for the disk.

    A `LiveSource` is asked when its step comes.
    """

    def __init__(self, source: BatchSource[AnyBatch]) -> None:
        self.source, self.live = source, isinstance(source, LiveSource)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: tuple[int, Future[AnyBatch]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def at(self, step: int, *, more: bool) -> AnyBatch:
        """Return the batch of one step; with `more` the next one is begun."""
        if self.live:
            return self.source.at(step)
        made = self._next[1] if self._next is not None and self._next[0] == step else self._begin(step)
        batch = made.result()
        self._next = (step + 1, self._begin(step + 1)) if more else None
        return batch

    def _begin(self, step: int) -> Future[AnyBatch]:
        return self._thread.submit(self.source.at, step)


@dataclass(frozen=True)
class Batch:
    """Tokens (B, T), their targets already shifted (B, T; -100 carries no loss), and document ids (B, T) or None.

    The model reads each row as `pieces` texts of one length; documents are for whole rows alone.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    pieces: int = 1

    @property
    def texts(self) -> Tensor:
        """What the model reads, (B pieces, T / pieces)."""
        return self.tokens.view(-1, self.tokens.shape[1] // self.pieces)

    def split(self, rows: int) -> Iterator[Batch]:
        """Cut into micro-batches of at most `rows` rows."""
        for start in range(0, self.tokens.shape[0], rows):
            part = slice(start, start + rows)
            documents = None if self.documents is None else self.documents[part]
            yield Batch(self.tokens[part], self.targets[part], documents, self.pieces)

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        documents = None if self.documents is None else _moved(self.documents, device)
        return Batch(_moved(self.tokens, device), _moved(self.targets, device), documents, self.pieces)


def check_length(tokens: int, context: int) -> None:
    """Refuse a training text shorter than one window and the token after it: a DataError."""
    if tokens < context + 1:
        raise DataError(
            f"the training text has {tokens:,} tokens, fewer than one window of {context} + 1; "
            "give more text or a smaller --context"
        )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; to a GPU through pinned memory, so that the program need not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class CorpusBatches:
    """Windows of `context` + 1 tokens; every epoch visits each once, in an order of its own.

    Epoch e cuts the corpus at an offset and shuffles the windows by a generator seeded with (seed, e), so `at(step)`
    needs no state: a resumed run reads on exactly where it was.

    The first `short_steps` steps read each window as two texts, which is quicker and teaches as much while a model
    learns what stands close together (Li et al. 2022, "The Stability-Efficiency Dilemma", section 4).
    """

    def __init__(self, tokens: TokenReader, *, context: int, batch_size: int, seed: int, short_steps: int = 0) -> None:
        check_length(len(tokens), context)
        self.tokens, self.context, self.batch_size, self.seed = tokens, context, batch_size, seed
        self.short_steps = short_steps
        self.windows = (len(tokens) - 1) // context
        self._epoch: int | None = None
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)

    def at(self, step: int) -> Batch:
        """Return the batch of one step (counted from 0)."""
        first = step * self.batch_size
        rows = [self._window(number) for number in range(first, first + self.batch_size)]
        tokens = torch.from_numpy(np.stack(rows))
        pieces = 2 if step < self.short_steps else 1
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), pieces=pieces)

    def _window(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            slack = len(self.tokens) - 1 - self.windows * self.context
            self._starts = generator.permutation(self.windows) * self.context + generator.integers(slack + 1)
            self._epoch = epoch
        start = int(self._starts[place])
        return self.tokens.read(start, start + self.context + 1)
