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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import DataError
from minigpt.text.decoding import writing
from minigpt.text.split import Part, Scan, Share, share_parts
from minigpt.text.tokenizer import Tokenizer

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 26
_META_NAME = "corpus.json"
_BATCH_CHARS = 1 << 20
_BATCH_PARTS = 1 << 12
# What a killed run left behind is cleared once nobody can be writing to it any more.
_STALE_SECONDS = 3600.0


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

    ``progress`` is called with the bytes of text done, of ``scan.bytes``. Errors: DataError when there is nothing to
    train on, the files have changed, or the cache cannot be written.
    """
    folder = cache_root / _key(scan, tokenizer)
    if folder.is_dir():
        try:
            return Corpus.load(folder)
        except DataError:  # half-written or damaged: done again
            with writing(folder):
                shutil.rmtree(folder)
    with writing(cache_root):
        cache_root.mkdir(parents=True, exist_ok=True)
        _clear_stale(cache_root)
        work = cache_root / f"{folder.name}.{secrets.token_hex(4)}.tmp"
        work.mkdir()
    try:
        meta = _write_shards(scan, tokenizer, work, shard_tokens, progress)
        with writing(work):
            _write_meta(work / _META_NAME, meta)
        _publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Corpus.load(folder)


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


def _clear_stale(cache_root: Path) -> None:
    for folder in cache_root.glob("*.tmp"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:  # the run it belongs to has just finished with it
            continue
        if time.time() - newest > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _write_shards(
    scan: Scan, tokenizer: Tokenizer, work: Path, shard_tokens: int, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    """Tokenise everything into ``work`` and return what goes into corpus.json."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    shares: tuple[Share, ...] = ("train", "val")
    with ExitStack() as stack:
        writers = {
            share: stack.enter_context(closing(_ShardWriter(work, share, dtype, shard_tokens))) for share in shares
        }
        for batch in _batches(share_parts(scan)):
            encoded = tokenizer.encode_batch([part.text for part in batch], [not part.starts for part in batch])
            with writing(work):
                for share in shares:
                    writers[share].write(_share_ids(batch, encoded, share, tokenizer.end_of_text_id))
            for part in batch:
                writers[part.share].bytes += len(part.text.encode("utf-8"))
            if progress is not None:
                progress(sum(writer.bytes for writer in writers.values()))
        with writing(work):
            for writer in writers.values():
                writer.finish_file()
    if not writers["train"].bytes:
        raise DataError(f"{', '.join(scan.files[:3])}: nothing is left to train on; give more text or hold out less")
    meta: dict[str, Any] = {"format": FORMAT_VERSION, "dtype": dtype.name, "documents": scan.documents}
    meta |= {"split": scan.split, "val_fraction": scan.val_fraction}
    for share, writer in writers.items():
        meta |= {f"{share}_tokens": writer.tokens, f"{share}_bytes": writer.bytes, f"{share}_shards": writer.shards}
    return meta


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


def _share_ids(batch: list[Part], encoded: list[list[int]], share: Share, end_of_text_id: int) -> NDArray[np.int64]:
    rows = [
        ids if part.text else [end_of_text_id] for part, ids in zip(batch, encoded, strict=True) if part.share == share
    ]
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(map(len, rows)))


class _ShardWriter:
    """Ids of one share into files of at most ``shard_tokens`` ids."""

    def __init__(self, folder: Path, share: Share, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder, self._share, self._dtype, self._shard_tokens = folder, share, dtype, shard_tokens
        self._file: BinaryIO | None = None
        self._room = 0
        self.shards = 0
        self.tokens = 0
        self.bytes = 0

    def write(self, ids: NDArray[np.int64]) -> None:
        position = 0
        while position < len(ids):
            if self._file is None:
                path = self._folder / f"{self._share}-{self.shards:05d}.bin"
                self._file, self._room = path.open("wb"), self._shard_tokens
                self.shards += 1
            part = ids[position : position + self._room]
            self._file.write(part.astype(self._dtype).tobytes())
            position += len(part)
            self.tokens += len(part)
            self._room -= len(part)
            if not self._room:
                self.finish_file()

    def finish_file(self) -> None:
        """Bring the open file to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()

    def close(self) -> None:
        """Let go of the open file, finished or not."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # what is left in the buffer of a full disk
                file.close()
