"""One GGUF file on disk, read with suspicion: its header as values, its tensors one by one.

The header is read here and not by the `gguf` package, whose reader keeps an object for every item of an array (seconds
and hundreds of megabytes for a large vocabulary) and never ends on some counts that a hostile file can claim. The
format is small: magic, version, two counts, keys with typed values, tensors with shape, type and offset, then the data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from minigpt.errors import ModelFolderError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above every real file; none of these may make us reserve memory that a small file cannot fill.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 14
MAX_STRINGS = 1 << 22  # of one array; merges are about as many as tokens
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 4
CHUNK_VALUES = 1 << 18  # dequantised at once

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its shape as PyTorch has it, the name of its type, its place in the file."""

    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int


class GGUFFile:
    """The metadata and the tensors of a GGUF file; the data is read when it is asked for.

    A file that is cut short, damaged, or of a kind that is not read is a ModelFolderError that names it.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                cursor = _Cursor(file, size, path)
                self.metadata, self.tensors = _read_header(cursor)
        except FileNotFoundError as error:
            raise ModelFolderError(f"{path}: no such file") from error
        except OSError as error:
            raise ModelFolderError(f"{path}: {error.strerror}") from error
        ends = (tensor.offset + tensor.bytes for tensor in self.tensors.values())
        expected = max(ends, default=0)
        if size < expected:
            raise ModelFolderError(f"{path} is cut short (header says {expected:,} bytes, file has {size:,})")
        split = self.metadata.get("split.count")
        if isinstance(split, int) and split > 1:
            raise ModelFolderError(f"{path} is one of {split} parts; join them first (llama-gguf-split --merge)")
        for name, tensor in self.tensors.items():
            if tensor.type not in TYPES:
                raise ModelFolderError(
                    f"{path}: {name} has type {tensor.type}, which is not read (read are {', '.join(TYPES)})"
                )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor, dequantised, as `dtype`; values that do not fit it are a ModelFolderError."""
        stored = self.tensors[name]
        result = torch.empty(stored.shape, dtype=dtype)
        rows = result.view(-1, stored.shape[-1])
        row_bytes = stored.bytes // rows.shape[0]
        step = max(1, CHUNK_VALUES // rows.shape[1])
        kind = GGMLQuantizationType[stored.type]
        try:
            with open(self.path, "rb") as file:
                file.seek(stored.offset)
                for start in range(0, rows.shape[0], step):
                    count = min(step, rows.shape[0] - start)
                    data = bytearray(file.read(count * row_bytes))
                    if len(data) < count * row_bytes:
                        raise ModelFolderError(f"{self.path} became shorter while it was read")
                    raw = np.frombuffer(data, dtype=np.uint8)
                    # Blocks do not know of rows: as one long row they are done at once, not 16 at a time.
                    with np.errstate(all="ignore"):  # what is no number is found below
                        values = dequantize(raw.reshape(1, -1), kind).reshape(count, -1)
                    part = rows[start : start + count].copy_(torch.from_numpy(values))
                    if not bool(torch.isfinite(part).all()):
                        wanted = str(dtype).removeprefix("torch.")
                        raise ModelFolderError(
                            f"{self.path}: {name} holds values that {wanted} cannot; use another --dtype"
                        )
        except OSError as error:
            raise ModelFolderError(f"{self.path}: {error.strerror}") from error
        return result


class _Cursor:
    """Read little-endian values one after the other, never past the end."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.left, self.path = file, size, path
        self.size = size

    def wrong(self, what: str) -> ModelFolderError:
        return ModelFolderError(f"{self.path}: {what}; it is damaged, copy it again")

    def cut(self) -> ModelFolderError:
        return ModelFolderError(f"{self.path} is cut short or damaged (a part of its header ends past its end)")

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.cut()
        self.left -= count
        data = self.file.read(count)
        if len(data) < count:
            raise ModelFolderError(f"{self.path} became shorter while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong("its header holds a string that is no UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.wrong(f"its header holds a value of the unknown kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            if count > MAX_STRINGS:
                raise self.wrong(f"its header claims an array of {count:,} strings")
            if 8 * count > self.left:
                raise self.cut()
            return [self.string() for _ in range(count)]
        if inner not in _SCALARS:
            raise self.wrong("its header holds an array of arrays or of an unknown kind")
        return np.frombuffer(self.take(count * struct.calcsize(_SCALARS[inner])), dtype=f"<{_SCALARS[inner]}").tolist()


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    magic = cursor.take(min(4, cursor.left))
    if magic != MAGIC:
        raise ModelFolderError(f"{cursor.path} is no GGUF file (it begins with {magic!r})")
    version = cursor.number("I")
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
        what = "written for big-endian machines" if big else f"of GGUF version {version}"
        raise ModelFolderError(f"{cursor.path} is {what}; little-endian files of version 2 and 3 are read")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    if keys > MAX_KEYS or tensors > MAX_TENSORS:
        raise cursor.wrong(f"its header claims {keys:,} keys and {tensors:,} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.wrong(f"its header holds {key!r} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    found = list(_tensor_infos(cursor, tensors))
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not (isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1):
        raise cursor.wrong(f"general.alignment is {alignment!r}, no power of two")
    start = math.ceil((cursor.size - cursor.left) / alignment) * alignment
    placed = {
        name: StoredTensor(stored.shape, stored.type, start + stored.offset, stored.bytes) for name, stored in found
    }
    if len(placed) < len(found):
        raise cursor.wrong("its header holds a tensor twice")
    return metadata, placed


def _tensor_infos(cursor: _Cursor, count: int) -> Iterator[tuple[str, StoredTensor]]:
    """Yield names and places of tensors, with offsets from where the data begins."""
    for _ in range(count):
        name, dimensions = cursor.string(), cursor.number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise cursor.wrong(f"{name} has {dimensions} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        number, offset = cursor.number("I"), cursor.number("Q")
        if number not in GGMLQuantizationType._value2member_map_:
            raise ModelFolderError(f"{cursor.path}: {name} has the unknown type {number} (read are {', '.join(TYPES)})")
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block:
            raise cursor.wrong(f"{name} is {list(shape)}, which {kind.name} cannot hold")
        yield name, StoredTensor(shape, kind.name, offset, math.prod(shape) // block * block_bytes)
