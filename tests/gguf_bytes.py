"""GGUF files put together byte by byte, as the format's description has it, for tests of what reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

# Kinds of values, and of tensors, by their numbers in the format.
UINT8, INT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 1, 4, 5, 6, 7, 8, 9, 10
CODES = {UINT8: "B", INT8: "b", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q"}
F32, F16, Q4_0, Q8_0, Q2_K = 0, 1, 2, 8, 10
ALIGNMENT = 32


def string(text: str | bytes) -> bytes:
    data = text.encode("utf-8") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value without its kind; an array is given as (kind of its items, items)."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack(f"<{CODES[kind]}", content)


def pair(key: str | bytes, kind: int, content: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's entry; `shape` as PyTorch has it, which the file holds the other way round."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf(
    pairs: list[bytes], tensors: list[bytes], data: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    """A whole file; `counts` are the numbers of tensors and pairs that it claims."""
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    head += b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % ALIGNMENT) + data


def altered(
    path: Path, folder: Path, *, drop: tuple[str, ...] = (), tensors: Mapping[str, np.ndarray] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a float32 file again with the `gguf` package: other values, other tensors, and some of both left out."""
    reader, target = GGUFReader(path), folder / "altered.gguf"
    values = dict(values or {})
    writer = GGUFWriter(target, values.pop("general.architecture", reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in (*drop, *values):
            writer.add_key_value(key, field.contents(), field.types[0])
    kinds = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }  # fmt: skip
    for key, content in values.items():
        writer.add_key_value(key, content, kinds[type(content)])
    for name, data in ({tensor.name: tensor.data for tensor in reader.tensors} | dict(tensors or {})).items():
        if name not in drop:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
