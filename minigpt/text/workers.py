"""Tokenising on every core, in processes of their own that are given texts and give back ids.

They are started as plain programs, not by `multiprocessing`: so they never run the program's own file again, import no
torch, and end when their input does, whatever becomes of the program.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import DataError
from minigpt.text.tokenizer import Tokenizer

MOST_PROCESSES = 16  # one process reads for all of them, and cannot feed many more
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

T = TypeVar("T")
Batch = tuple[list[str], list[bool]]
Ids = list[NDArray[np.uint32]]


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def encoded(
    tokenizer: Tokenizer, batches: Iterator[tuple[T, Batch]], processes: int
) -> Generator[tuple[T, Ids], None, None]:
    """Yield what goes with each batch and the ids of its texts, in order; a few batches are in memory at a time.

    A batch is what ``Tokenizer.encode_arrays`` takes; one process is this one. Errors: DataError when another one ends
    before its time.
    """
    if processes == 1:
        yield from ((kept, tokenizer.encode_arrays(*batch)) for kept, batch in batches)
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    pending: deque[tuple[T, Future[Ids]]] = deque()

    def encode(batch: Batch) -> Ids:
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        for _ in range(processes):
            worker = _Worker(tokenizer)
            stack.callback(worker.end)
            idle.put(worker)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for kept, batch in batches:
            pending.append((kept, pool.submit(encode, batch)))
            if len(pending) > 2 * processes:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()


class _Worker:
    """A process that encodes one batch after another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from minigpt.text.workers import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for the program alone
        )
        self._tokenizer: Tokenizer | None = tokenizer  # sent with the first batch, while others are started

    def encode(self, batch: Batch) -> Ids:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if self._tokenizer is not None:
                pickle.dump(self._tokenizer, stdin)
                self._tokenizer = None
            pickle.dump(batch, stdin)
            stdin.flush()
            ids, lengths = pickle.load(stdout)
        except (OSError, EOFError, ValueError) as error:
            raise DataError("tokenizing: a process ended before its time; free some memory and run again") from error
        return np.split(ids, np.cumsum(lengths)[:-1])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was still to be sent
                pipe.close()


def serve() -> None:
    """Read a tokenizer and then batches from standard input; write the ids and how many each text has."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    tokenizer: Tokenizer = pickle.load(stdin)
    while True:
        try:
            texts, continues = pickle.load(stdin)
        except EOFError:
            return
        arrays = tokenizer.encode_arrays(texts, continues)
        pickle.dump((np.concatenate(arrays), [len(array) for array in arrays]), stdout)
        stdout.flush()
