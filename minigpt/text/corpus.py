"""Documents into memory-mapped token shards, cached by content.

A corpus is a folder ``<cache>/<key>`` with ``train-00000.bin``, ``val-00000.bin`` ... and at last ``corpus.json``.
The key stands for the text, the tokenizer and the split, so the same text from a file, a folder or a pipe is tokenised
once. Every document's ids are followed by the end-of-text id.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from numpy.typing import NDArray

from minigpt.errors import DataError
from minigpt.text.decoding import writing
from minigpt.text.shards import ShardWriter, forget_journal, has_journal, start_again, take_up, write_journal
from minigpt.text.split import Part, Scan, Share, share_parts
from minigpt.text.tokenizer import Tokenizer
from minigpt.text.workers import MOST_PROCESSES, available_cores, encoded

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 26
_META_NAME = "corpus.json"
_BATCH_CHARS = 1 << 20
_BATCH_PARTS = 1 << 12
# Starting a process takes as long as tokenising some ten megabytes.
_BYTES_FOR_PROCESSES = 1 << 25
_JOURNAL_BATCHES = 16
# Folders of runs that are at work or were killed: those of the second kind are gone on from.
_PRIVATE, _RESUMABLE = ".tmp", ".part"
# What a killed run left behind is cleared once nobody can be writing to it, or will want it, any more.
_STALE_SECONDS = 3600.0
_STALE_RESUMABLE_SECONDS = 7 * 24 * 3600.0


class TokenArray:
    """One long row of ids in several files on disk; only what is read comes into memory."""

    def __init__(self, shards: list[Path], dtype: np.dtype[Any]) -> None:
        """Map the shards, in order. Errors: OSError or ValueError for a missing, empty or odd-sized one."""
        self.shards = tuple(shards)
        self._maps = [np.memmap(shard, dtype=dtype, mode="r") for shard in shards]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._maps)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return ids ``start`` to ``stop``, (stop - start,), also across shard borders."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        result = np.empty(stop - start, dtype=np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        position = start
        while position < stop:
            offset = position - int(self._starts[shard])
            part = self._maps[shard][offset : offset + stop - position]
            result[position - start : position - start + len(part)] = part
            position += len(part)
            shard += 1
        return result


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenised corpus on disk; ``meta`` holds what was counted: documents, tokens and bytes of both shares."""

    folder: Path
    dtype: np.dtype[Any]
    train: TokenArray
    val: TokenArray
    meta: dict[str, Any]

    @property
    def train_bytes(self) -> int:
        """Bytes of text in UTF-8 that the training tokens stand for."""
        return int(self.meta["train_bytes"])

    @property
    def val_bytes(self) -> int:
        """Bytes of text in UTF-8 that the held-out tokens stand for."""
        return int(self.meta["val_bytes"])

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Open a complete corpus. Errors: DataError for one that is missing, half-written or damaged."""
        try:
            meta = json.loads((folder / _META_NAME).read_text(encoding="utf-8"))
            dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]])
            if meta["format"] != FORMAT_VERSION:
                raise ValueError(f"format {meta['format']}, where {FORMAT_VERSION} is expected")
            arrays = {}
            for share in ("train", "val"):
                names = [f"{share}-{index:05d}.bin" for index in range(int(meta[f"{share}_shards"]))]
                arrays[share] = TokenArray([folder / name for name in names], dtype)
                found, expected = len(arrays[share]), meta[f"{share}_tokens"]
                if found != expected:
                    raise ValueError(f"{found} {share} tokens, where {expected} are expected")
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(f"{folder}: not a complete corpus ({reason}); delete the folder and run again") from error
        return cls(folder, dtype, arrays["train"], arrays["val"], meta)


def build(
    scan: Scan,
    tokenizer: Tokenizer,
    cache_root: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Return the corpus for a scan: the cached one where it is complete, else tokenised now on all cores.

    A build that was killed goes on where it was. ``progress`` is called with the bytes of text done, of ``scan.bytes``.
    Errors: DataError when there is nothing to train on, the files have changed, or the cache cannot be written.
    """
    folder = cache_root / _key(scan, tokenizer)
    if (corpus := _complete(folder)) is not None:
        return corpus
    with writing(cache_root):
        cache_root.mkdir(parents=True, exist_ok=True)
        _clear_stale(cache_root)
    with _workspace(folder) as work:
        if (corpus := _complete(folder)) is not None:  # by a run that has just ended
            return corpus
        try:
            with writing(work):
                shutil.rmtree(folder, ignore_errors=True)  # half-written or damaged: done again
                work.mkdir(exist_ok=True)
            meta = _write_shards(scan, tokenizer, work, shard_tokens, progress)
            with writing(work):
                _write_meta(work / _META_NAME, meta)
            _publish(work, folder)
        finally:
            if not has_journal(work):
                shutil.rmtree(work, ignore_errors=True)
        return Corpus.load(folder)


def _complete(folder: Path) -> Corpus | None:
    try:
        return Corpus.load(folder)
    except DataError:
        return None


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """Give the folder to write a corpus in: the one that a killed run may have begun, unless another run is at it now.

    Two that make the same corpus at once each write their own; the first to be done is taken.
    """
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except (filelock.Timeout, OSError, NotImplementedError):
        yield folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{_PRIVATE}")
        return
    try:
        yield folder.with_name(folder.name + _RESUMABLE)
    finally:
        lock.release()


def _key(scan: Scan, tokenizer: Tokenizer) -> str:
    parts = (FORMAT_VERSION, scan.digest, scan.val_fraction, tokenizer.fingerprint(), tokenizer.end_of_text_id)
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()[:32]


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(json.dumps(meta, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _publish(work: Path, folder: Path) -> None:
    try:
        os.rename(work, folder)
    except OSError as error:
        if not folder.is_dir():
            raise DataError(f"cannot write {folder}: {error.strerror}; choose another cache folder") from error
        # Another run finished the same corpus first; its content is the same.
        forget_journal(work)
    else:
        forget_journal(folder)


def _clear_stale(cache_root: Path) -> None:
    for pattern, seconds in ((f"*{_PRIVATE}", _STALE_SECONDS), (f"*{_RESUMABLE}", _STALE_RESUMABLE_SECONDS)):
        for folder in cache_root.glob(pattern):
            try:
                newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            except OSError:  # the run it belongs to has just finished with it
                continue
            if time.time() - newest > seconds:
                shutil.rmtree(folder, ignore_errors=True)


def _write_shards(
    scan: Scan, tokenizer: Tokenizer, work: Path, shard_tokens: int, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    """Tokenise everything into ``work`` and return what goes into corpus.json."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    shares: tuple[Share, ...] = ("train", "val")
    with ExitStack() as stack:
        writers: dict[str, ShardWriter] = {
            share: stack.enter_context(closing(ShardWriter(work, share, dtype, shard_tokens))) for share in shares
        }
        parts, done = _parts_left(scan, work, writers, shard_tokens)
        batches = ((batch, _texts(batch)) for batch in _batches(parts))
        encodings = stack.enter_context(closing(encoded(tokenizer, batches, _processes(scan))))
        for count, (batch, arrays) in enumerate(encodings, start=1):
            done += len(batch)
            with writing(work):
                for share in shares:
                    writers[share].write(_share_ids(batch, arrays, share, tokenizer.end_of_text_id))
            for part in batch:
                writers[part.share].bytes += len(part.text.encode("utf-8"))
            if work.suffix == _RESUMABLE and count % _JOURNAL_BATCHES == 0:
                with writing(work):
                    write_journal(work, done, writers, shard_tokens)
            if progress is not None:
                progress(sum(writer.bytes for writer in writers.values()))
        with writing(work):
            for writer in writers.values():
                writer.finish_file()
    if not writers["train"].bytes:
        raise DataError(f"{', '.join(scan.files[:3])}: nothing is left to train on; give more text or hold out less")
    meta: dict[str, Any] = {"format": FORMAT_VERSION, "dtype": dtype.name, "documents": scan.documents}
    meta |= {"split": scan.split, "val_fraction": scan.val_fraction}
    for name, writer in writers.items():
        meta |= {f"{name}_tokens": writer.tokens, f"{name}_bytes": writer.bytes, f"{name}_shards": writer.shards}
    return meta


def _parts_left(
    scan: Scan, work: Path, writers: Mapping[str, ShardWriter], shard_tokens: int
) -> tuple[Iterator[Part], int]:
    """Return the parts that are still to be tokenised, and how many an earlier run has done."""
    with writing(work):
        done = take_up(work, writers, shard_tokens)
    parts = share_parts(scan)
    found = dict.fromkeys(writers, 0)
    for part in islice(parts, done):
        found[part.share] += len(part.text.encode("utf-8"))
    if found != {share: writer.bytes for share, writer in writers.items()}:  # cut otherwise by another version
        with writing(work):
            start_again(work, writers)
        return share_parts(scan), 0
    return parts, done


def _processes(scan: Scan) -> int:
    """Choose how many processes tokenise: small texts are done before another one has started."""
    return min(available_cores(), MOST_PROCESSES) if scan.bytes >= _BYTES_FOR_PROCESSES else 1


def _texts(batch: list[Part]) -> tuple[list[str], list[bool]]:
    return [part.text for part in batch], [not part.starts for part in batch]


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Group parts into batches large enough to keep all cores busy and small enough for any memory."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part.text)
        if characters >= _BATCH_CHARS or len(batch) >= _BATCH_PARTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _share_ids(
    batch: list[Part], arrays: list[NDArray[np.uint32]], share: Share, end_of_text_id: int
) -> NDArray[np.uint32]:
    end = np.array([end_of_text_id], dtype=np.uint32)
    rows = [ids if part.text else end for part, ids in zip(batch, arrays, strict=True) if part.share == share]
    return np.concatenate(rows) if rows else end[:0]
